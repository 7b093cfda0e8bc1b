"""A small ResNet learns images on several nodes; its convolutions are voted on, one bit an entry.

atoll run init images.toml --model examples/image_classification.py:ResNet --nodes 2 --rounds 150 --batch 32
atoll coordinator images.toml                       # prints an invite
python examples/image_classification.py INVITE      # on each node
"""

import sys

import torch
import torch.nn.functional as F
from digits import draw_digits
from torch import Tensor, nn

import atoll


class Block(nn.Module):
    """Two convolutions and a way around them; group norms, as statistics of a batch are not exchanged."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(4, outputs) for _ in range(2))
        self.around = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(inner)) + self.around(x))


class ResNet(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            Block(1, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2)
        )
        self.head = nn.Linear(4 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x).mean((2, 3)))


def main(where: str, count: int = 4000) -> float:
    """Train on ``count`` images; returns the share of images never seen that are recognised."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images, labels = (part.to(device) for part in draw_digits(count))
    unseen, digits = (part.to(device) for part in draw_digits(max(64, count // 8), seed=1))
    with atoll.local(where) if where.endswith(".toml") else atoll.join(where) as run:
        torch.manual_seed(run.seed)
        model = ResNet().to(device)
        optimizer = run.optimizer(model)

        def validate() -> Tensor:
            return F.cross_entropy(model(unseen), digits)

        for batch in run.batches(len(images), validate=validate, data="digits 1"):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            run.report(loss)
            optimizer.step()
    with torch.no_grad():
        right = (model.eval()(unseen).argmax(1) == digits).float().mean().item()
    print(f"{100 * right:.1f} % of images it has never seen are recognised")
    return right


if __name__ == "__main__":
    main(sys.argv[1])
