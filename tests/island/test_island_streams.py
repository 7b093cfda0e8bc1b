"""The order of a transfer's copies, waits and frees on a GPU's streams, on streams that only count."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from types import SimpleNamespace
from typing import Any
from weakref import finalize

import pytest
import torch

from node.island.collectives import Collectives, CommPolicy
from node.island.layout import GroupLayout, TensorMeta, from_cuts
from node.island.streams import Inline, SideStream, side_of
from tests.island.rig import Member, pool


class Stream:
    """A queue of launches; ``seen`` is how much of each stream precedes whatever is launched next on it."""

    def __init__(self, name: str, cuda: Cuda) -> None:
        self.name, self.cuda, self.device = name, cuda, torch.device("cuda:0")
        self.launched = 0
        self.seen: dict[str, int] = {}

    def launch(self) -> None:
        self.launched += 1

    def wait_stream(self, other: Stream) -> None:
        for name, count in {**other.seen, other.name: other.launched}.items():
            self.seen[name] = max(self.seen.get(name, 0), count)

    def record_event(self) -> Any:
        return SimpleNamespace(query=lambda: True)

    def follows(self, other: Stream) -> bool:
        """Whether what is launched next comes after all of ``other``."""
        return self.has_seen(other) == other.launched

    def has_seen(self, other: Stream) -> int:
        """How many launches of ``other`` come before what is launched next."""
        return self.seen.get(other.name, 0)


class Cuda:
    """What :class:`SideStream` takes of ``torch.cuda``. A turn on a side counts as a launch there."""

    def __init__(self) -> None:
        self.compute = Stream("compute", self)
        self.current = self.compute

    def current_stream(self, device: torch.device) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        stream.launch()
        try:
            yield
        finally:
            self.current = before


LAYOUT = from_cuts([TensorMeta("w", (12,), 1)], [0], (0, 7, 12))
EQUAL = from_cuts([TensorMeta("w", (12,), 1)], [0], (0, 6, 12))


def gathering(member: Member, mode: Any, equal: bool) -> list[str]:
    cuda, faults, layout = Cuda(), list[str](), EQUAL if equal else LAYOUT
    side = Stream("gather", cuda)
    comm = Collectives(member.group, None, CommPolicy(gather=mode), sides=lambda *_: SideStream(side, cuda))
    full = torch.full((12,), -1.0, device=member.device)

    def allocate() -> torch.Tensor:
        if cuda.current is not cuda.compute:
            faults.append("the whole buffer is not from the compute stream's pool")
        return full

    segment = torch.full((layout.resident(member.rank),), 1.0 + member.rank, device=member.device)
    freed, gone = list[int](), Event()
    finalize(segment, lambda: (freed.append(cuda.compute.launched), gone.set()))
    cuda.compute.launch()  # the optimizer's step, say
    transfer = comm.gather("w", layout, segment, allocate)
    del segment
    transfer.advance()
    if not side.follows(cuda.compute):
        faults.append("the first stage does not wait for what had been computed")
    cuda.compute.launch()  # the layer before
    transfer.advance()
    if not side.follows(cuda.compute):
        faults.append("the buffer is written before those who used its memory are done")
    if cuda.compute.follows(side) or freed:
        faults.append("computing waits for the gather, or its input is freed, before the end")
    cuda.compute.launch()  # goes on beside the gather
    whole, launched = transfer.wait(), cuda.compute.launched
    if not (cuda.compute.follows(side) and gone.wait(10.0) and freed == [launched]):
        faults.append("something is computed between the end of the gather and the wait for it")
    wanted = [1.0] * layout.cuts[1] + [2.0] * (12 - layout.cuts[1])
    return faults if whole.tolist() == wanted else [*faults, f"gathered {whole.tolist()}"]


def reducing(member: Member, mode: Any, equal: bool) -> list[str]:
    cuda, faults, layout = Cuda(), list[str](), EQUAL if equal else LAYOUT
    side = Stream("reduce", cuda)
    comm = Collectives(member.group, None, CommPolicy(reduce=mode), sides=lambda *_: SideStream(side, cuda))
    buffer = torch.arange(12.0, device=member.device)
    cuda.compute.launch()  # fills it
    transfer = comm.reduce("w", layout, buffer)
    freed, gone, reading = list[bool](), Event(), side.launched + 1
    # The transport's thread may let go of it late, when the next stage runs on the side.
    finalize(buffer, lambda: (freed.append(cuda.compute.has_seen(side) >= reading), gone.set()))
    del buffer
    transfer.advance()
    if not side.follows(cuda.compute):
        faults.append("the gradients are sent before they are there")
    if cuda.compute.follows(side) or freed:
        faults.append("computing waits for the reduce, or its input is freed, at once")
    cuda.compute.launch()  # the layer before
    transfer.progress()
    if freed and not freed[0]:
        faults.append("the gradients' memory is given back before the reduce has read it")
    segment = transfer.wait()
    if not (cuda.compute.follows(side) and gone.wait(10.0) and freed == [True]):
        faults.append(f"at the end: freed {freed}, waited {cuda.compute.follows(side)}")
    low, high = layout.cuts[member.rank], layout.cuts[member.rank + 1]
    return faults if segment.tolist() == [2.0 * x for x in range(low, high)] else [*faults, "wrong sum"]


@pytest.mark.parametrize("equal", [False, True])
def test_streams_and_memory_are_in_order(equal: bool) -> None:
    for mode in ("chunks", "roots", "peers"):
        assert pool().run(gathering, 2, mode, equal) == [[], []], mode
    for mode in ("chunks", "roots"):
        assert pool().run(reducing, 2, mode, equal) == [[], []], mode


def test_an_abandoned_gather_is_waited_for_before_its_buffer_is_released() -> None:
    cuda = Cuda()
    side = Stream("gather", cuda)
    layout: GroupLayout = from_cuts([TensorMeta("w", (3,), 1)], [0], (0, 3))
    comm = Collectives(sides=lambda *_: SideStream(side, cuda))
    transfer = comm.gather("w", layout, torch.zeros(3), lambda: torch.empty(3))
    transfer.advance()
    transfer.advance()
    assert not cuda.compute.follows(side)
    transfer.abandon()
    assert cuda.compute.follows(side)


def test_the_compute_stream_is_the_one_that_is_current_in_each_turn() -> None:
    cuda = Cuda()
    side, other = Stream("side", cuda), Stream("other", cuda)
    stream = SideStream(side, cuda)
    other.launch()
    with cuda.stream(other):
        with stream.turn():
            assert cuda.current is side and side.follows(other)
            made = stream.on_compute(lambda: torch.tensor(cuda.current is other))
            assert made.item() and side.follows(other)
            stream.join()
        assert other.follows(side) and not cuda.compute.follows(side)
    assert cuda.current is cuda.compute and stream.mark()() is True


def test_a_cpu_has_one_order() -> None:
    side = side_of(torch.device("cpu"), "gather")
    assert isinstance(side, Inline) and side.mark() is None
    with side.turn():
        assert side.on_compute(lambda: torch.ones(2)).tolist() == [1.0, 1.0]
        side.join()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_has_a_side_for_each_kind() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    gathers, reduces = side_of(device, "gather"), side_of(device, "reduce")
    assert gathers is side_of(device, "gather") and gathers is not reduces
    x = torch.ones(1 << 20, device=device)
    with gathers.turn():
        y = gathers.on_compute(lambda: torch.empty_like(x)).copy_(x).mul_(2)
        gathers.join()
    assert y.sum().item() == 2 << 20
