"""The most memory that a step takes, against stock FSDP2 in the same processes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy as StockPolicy
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from node.island import CommPolicy, MixedPrecisionPolicy, fully_shard
from tests.island.rig import Member, pool

WIDTH, BLOCKS, VOCAB, TOKENS = 96, 6, 200, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Model(nn.Module):
    """Weights of 2.1 MB and activations of next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def allocated(work: Callable[[], None]) -> tuple[int, int]:
    """Bytes that the allocator of CPU tensors has given out in ``work``: the most at once, and in the end."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    now = most = 0
    assert recorded.profiler is not None and recorded.profiler.kineto_results is not None
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most, now


def peaks(member: Member, stock: bool, policy: CommPolicy, bf16: bool) -> tuple[int, int]:
    """Bytes between steps, and the most within one."""
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if bf16 else {}
    model, steppers = Model(), []

    def wrap() -> None:
        options: dict[str, Any] = {"mesh": member.mesh}
        if stock:
            for layer in model.layers:
                stock_fully_shard(layer, mp_policy=StockPolicy(**dtypes), **options)
            stock_fully_shard(model, mp_policy=StockPolicy(**dtypes), **options)
        else:
            options |= {"comm_policy": policy, "mp_policy": MixedPrecisionPolicy(**dtypes)}
            fully_shard(model, units=model.layers, **options)
        steppers.append(torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False))

    def step() -> None:
        tokens = torch.arange(TOKENS).view(1, -1) + member.rank
        F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten()).backward()
        steppers[0].step()
        steppers[0].zero_grad()

    def warm() -> None:
        wrap()
        for _ in range(2):
            step()

    _, resident = allocated(warm)  # shards and optimizer state; the whole model came before and is not counted
    most, _ = allocated(step)
    return resident, resident + most


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_no_rank_needs_more_than_with_fsdp2(ranks: int, bf16: bool) -> None:
    stock = pool().run(peaks, ranks, True, CommPolicy(), bf16)
    for reduce in ("auto", "chunks", "roots"):
        ours = pool().run(peaks, ranks, False, CommPolicy(reduce=reduce), bf16)
        print(ranks, bf16, reduce, stock, ours)
        assert max(peak for _, peak in ours) <= max(peak for _, peak in stock)
