"""Optimizers with 8-bit states on what a rank holds, and shards that keep their blocks whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from node.island import CommPolicy, LayoutError, full_state_dict, fully_shard
from node.island.optimizers import IslandOptimizer, check_blocks, quantisation_units
from tests.island.mixed_model import wide
from tests.island.rig import Member, device, pool


def eight_bit(member: Member, steps: int) -> tuple[float, list[str], float]:
    """Difference from one process, types of the states' tensors, and how far the weights went."""
    from torchao.optim import AdamW8bit

    torch.compiler.set_stance("force_eager")  # compiling takes a minute and changes nothing here
    try:
        model, whole = wide(), wide()
        fully_shard(
            model,
            mesh=member.mesh,
            placement="ragged",
            granularity=quantisation_units(),
            comm_policy=CommPolicy(ordered=True),
        )
        check_blocks(model)
        optimizer = IslandOptimizer(model, None, lambda groups: AdamW8bit(groups, lr=1e-2))
        alone = AdamW8bit(whole.parameters(), lr=1e-2)
        for step in range(steps):
            x = torch.randn(12, 160, generator=torch.Generator().manual_seed(step)).to(device())
            model(x.chunk(member.ranks)[member.rank]).square().mean().backward()
            for part in x.chunk(member.ranks):
                whole(part).square().mean().backward()
            for parameter in whole.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(1.0 / member.ranks)
            for stepper in (optimizer, alone):
                stepper.step()
                stepper.zero_grad()
        kinds = {
            type(value).__name__
            for state in optimizer.optimizers[0].state.values()
            for value in state.values()
        }
        state = full_state_dict(model)
        difference = max((state[n] - p).abs().max().item() for n, p in whole.named_parameters())
        moved = max(
            (p - q).abs().max().item() for p, q in zip(whole.parameters(), wide().parameters(), strict=True)
        )
        return difference, sorted(kinds), moved
    finally:
        torch.compiler.set_stance("default")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_fifty_steps_of_eight_bit_adam(ranks: int) -> None:
    """Bit for bit in fp32, which is what it computes in."""
    pytest.importorskip("torchao")
    for difference, kinds, moved in pool().run(eight_bit, ranks, 50):
        assert difference == 0.0 and moved > 1e-3
        assert "OptimState8bit" in kinds


def blocks(member: Member) -> list[str]:
    results = []
    for granularity in (quantisation_units(64), 40):
        model = nn.ModuleList([nn.Linear(40, 64), nn.Linear(52, 7), nn.Linear(24, 64, bias=False)])
        fully_shard(model, mesh=member.mesh, placement="ragged", granularity=granularity)
        try:
            check_blocks(model, 64)
            results.append("")
        except LayoutError as error:
            results.append(str(error))
    return results


def test_quantisation_blocks_stay_whole() -> None:
    for ranks in (3, 4):
        for good, bad in pool().run(blocks, ranks):
            assert good == ""
            assert "cuts a quantisation block of 64" in bad
