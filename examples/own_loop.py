"""The same script in a run of several nodes, each with its own loop:

atoll run init own.toml --model examples/own_loop.py:make_model --nodes 2 --rounds 200 --batch 16
atoll coordinator own.toml                # prints an invite
python examples/own_loop.py INVITE        # on each node
python examples/own_loop.py own.toml      # or alone, without a coordinator
"""

import sys

import torch
import torch.nn.functional as F
from digits import draw_digits
from torch import nn

import atoll


def make_model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(400, 64), nn.ReLU(), nn.Linear(64, 10))


def main(where: str) -> None:
    images, labels = draw_digits(2000)
    with atoll.local(where) if where.endswith(".toml") else atoll.join(where) as run:
        torch.manual_seed(run.seed)
        model = make_model()
        optimizer = run.optimizer(model)
        for step, batch in enumerate(run.batches(len(images))):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            run.report(loss)
            optimizer.step()
            if step % 20 == 0:
                print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main(sys.argv[1])
