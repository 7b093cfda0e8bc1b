"""A plain PyTorch script, beside which own_loop.py is to be read: python examples/plain_loop.py"""

import torch
import torch.nn.functional as F
from digits import draw_digits
from torch import nn


def make_model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(400, 64), nn.ReLU(), nn.Linear(64, 10))


def main(steps: int = 200) -> None:
    images, labels = draw_digits(2000)
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        batch = torch.randint(len(images), (16,))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
