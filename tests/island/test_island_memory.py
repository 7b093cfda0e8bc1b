"""The most memory that a step takes, against stock FSDP2 in the same processes."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy as StockPolicy
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from node.island import CommPolicy, MixedPrecisionPolicy, Schedule, fully_shard
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
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that are alive whenever an operation has run."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self._seen: dict[int, StorageWeakRef] = {}
        self.most = 0
        for tensor in tensors:
            self._note(tensor)

    def _note(self, value: object) -> None:
        if isinstance(value, DTensor):
            value = value.to_local()
        if isinstance(value, Tensor):
            reference = StorageWeakRef(value.untyped_storage())
            self._seen[reference.cdata] = reference

    def now(self) -> int:
        """Bytes at the moment; storages are followed when they are resized."""
        total = 0
        for key, reference in list(self._seen.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._seen[key]
            else:
                total += storage.nbytes()
        return total

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tree_map(self._note, result)
        self.most = max(self.most, self.now())
        return result


def peaks(
    member: Member,
    bf16: bool,
    stock: bool,
    policy: CommPolicy | None = None,
    schedule: Schedule | None = None,
) -> tuple[int, int]:
    """Bytes between steps, and the most within one."""
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if bf16 else {}
    gc.collect()
    before = {id(item) for item in gc.get_objects() if issubclass(type(item), Tensor)}
    model = Model()
    options: dict[str, Any] = {"mesh": member.mesh}
    if stock:
        for layer in model.layers:
            stock_fully_shard(layer, mp_policy=StockPolicy(**dtypes), **options)
        stock_fully_shard(model, mp_policy=StockPolicy(**dtypes), **options)
    else:
        options |= {"comm_policy": policy, "schedule": schedule, "mp_policy": MixedPrecisionPolicy(**dtypes)}
        fully_shard(model, units=model.layers, **options)
    stepper = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

    def step() -> None:
        tokens = torch.arange(TOKENS).view(1, -1) + member.rank
        F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten()).backward()
        stepper.step()
        stepper.zero_grad()

    for _ in range(2):
        step()
    resident, most = [], []
    for _ in range(4):
        gc.collect()
        alive = [
            item for item in gc.get_objects() if issubclass(type(item), Tensor) and id(item) not in before
        ]
        with LiveBytes(alive) as live:
            resident.append(live.now())
            step()
        most.append(live.most)
    # a thread of gloo may hold a buffer a little longer than its transfer takes: that only adds
    return min(resident), min(most)


BLOCK_BYTES = sum(parameter.nbytes for parameter in Block().parameters())


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_peak_is_that_of_fsdp2_and_what_running_ahead_costs(ranks: int, bf16: bool) -> None:
    stock = pool().run(peaks, ranks, bf16, True)
    within = max(peak - resident for resident, peak in stock)
    for reduce in ("auto", "chunks", "roots"):
        second = 0 if reduce == "roots" else BLOCK_BYTES  # an all-to-all does not work in place
        for schedule, chunk in ((Schedule(prefetch=0), 0), (Schedule(), BLOCK_BYTES // ranks)):
            ours = pool().run(peaks, ranks, bf16, False, CommPolicy(reduce=reduce), schedule)
            uneven = max(resident for resident, _ in ours) - max(resident for resident, _ in stock)
            # a chunk: the first stage of the gather after the next; uneven: gradients of the vectors' owner
            assert max(peak - resident for resident, peak in ours) <= within + second + chunk + uneven
            if reduce == "roots" and not schedule.prefetch:
                assert max(peak for _, peak in ours) <= max(peak for _, peak in stock)
