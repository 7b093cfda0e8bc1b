"""Snapshots in and out of a node of any number of ranks: what travels, what stays, what memory it takes."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from node.exchange import spool as spools
from node.exchange.base import DonateOrder, ExchangeError, LoadOrder
from node.exchange.spool import Spool
from node.exchange.tensor_bytes import layout, total_bytes
from node.exchange.trouble import TransferError
from node.handover import Handover
from node.ranks import Alone, Ranks
from node.state import SharedState
from node.whole_state import WholeState
from protos.digests import state_digest
from protos.snapshots import chunks, shares
from tests.node.snapshot_rig import LAYOUTS, ORDER, Store, content, small, state
from tests.node.virtual_ranks import DEADLINE, on_all

Layouts = list[tuple[torch.dtype, tuple[int, ...], bool]]
SMALL = {f"t{index}": torch.arange(5 * index, dtype=torch.int32) for index in range(6)}  # 300 bytes


class Mailbox:
    """Pieces of tensors between ranks that are threads; counts what has been sent."""

    def __init__(self, rank: int, boxes: dict[tuple[int, int], queue.Queue[torch.Tensor]]) -> None:
        self._rank, self._boxes = rank, boxes
        self.sent = 0

    def send(self, data: torch.Tensor, rank: int) -> None:
        self.sent += data.numel()
        self._boxes[self._rank, rank].put(data.clone())

    def receive(self, data: torch.Tensor, rank: int) -> None:
        try:
            data.copy_(self._boxes[rank, self._rank].get(timeout=DEADLINE))
        except queue.Empty:
            raise RuntimeError(f"rank {rank} is silent") from None


class Post:
    """An exchange of snapshots: what is donated is kept, what is downloaded was put there."""

    def __init__(self, store: Store | None = None) -> None:
        self.parts: list[tuple[DonateOrder, Spool]] = []
        self.store = store
        self.failure = ""

    def donate(self, order: DonateOrder, spool: Spool, done: Callable[[str], None]) -> None:
        self.parts.append((order, spool))
        done("")

    def download(self, order: LoadOrder, rows: Any) -> Spool:
        if self.failure:
            raise TransferError(self.failure)
        assert self.store is not None and tuple(rows) == self.store.rows and order == ORDER
        spool = Spool(rows, 0, chunks(len(self.store.data)), self.store.digest)
        spool.write(0, memoryview(self.store.data))
        return spool


class Node:
    """Ranks of a node that hold the tensors of one state in turns."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], size: int, post: Post) -> None:
        self.tensors, self.size, self.post = tensors, size, post
        pairs = [(a, b) for a in range(size) for b in range(size)]
        boxes: dict[tuple[int, int], queue.Queue[torch.Tensor]] = {pair: queue.Queue(1) for pair in pairs}
        self.mail = [Mailbox(rank, boxes) for rank in range(size)]

    def all(self, action: Callable[[Handover, Ranks], Any]) -> list[Any]:
        def on_one(ranks: Ranks) -> Any:
            held = {name: self.tensors[name] for name in sorted(self.tensors)[ranks.rank :: self.size]}
            whole = WholeState(SharedState(held), ranks, self.mail[ranks.rank])
            exchange: Any = None if ranks.rank else self.post
            return action(Handover(whole, ranks, exchange), ranks)

        return [on_one(Alone())] if self.size == 1 else on_all(self.size, on_one)

    def donate(self, order: DonateOrder, told: list[str] | None = None) -> list[Any]:
        digest = state_digest(self.tensors)
        done = [] if told is None else told
        return self.all(lambda handover, ranks: handover.donate(order, digest, done.append))

    def load(self) -> list[Any]:
        def action(handover: Handover, ranks: Ranks) -> str:
            if ranks.rank == 0:
                handover.download(ORDER)
            return handover.load(ORDER)

        return self.all(action)


@settings(max_examples=25)
@given(
    layouts=LAYOUTS,
    size=st.sampled_from([1, 2, 3]),
    donors=st.integers(1, 3),
    chunk=st.integers(1, 40),
    piece=st.integers(1, 50),
)
def test_a_state_goes_from_islands_to_an_island(
    layouts: Layouts, size: int, donors: int, chunk: int, piece: int
) -> None:
    source, target = state(layouts, 1), state(layouts, 2)
    nbytes = total_bytes(layout(source))
    with small(chunk, piece):
        post = Post(Store(source))
        data = bytearray(nbytes)
        donor = Node(source, size, post)
        for _, first, count in shares(nbytes, [str(donor) for donor in range(donors)]):
            told: list[str] = []
            kept = donor.donate(DonateOrder("s1", 9, first, count), told)
            order, part = post.parts[-1]
            assert kept == [part.nbytes] * size and told == [""]
            assert (order.first, order.count) == (part.first, part.count)
            assert part.rows == layout(source) and part.state_digest == state_digest(source)
            data[part.start : part.stop] = content(part)
            part.close()
        assert post.store is not None and data == post.store.data
        # Every byte of another rank than the leader has gone to it once.
        theirs = sum(source[name].nbytes for i, name in enumerate(sorted(source)) if i % size)
        assert sum(box.sent for box in donor.mail) == theirs
        joiner = Node(target, size, post)
        assert joiner.load() == [state_digest(source)] * size
        assert joiner.mail[0].sent == theirs
    assert all(torch.equal(target[name], tensor) for name, tensor in source.items())


def test_only_what_overlaps_the_ordered_chunks_goes_to_the_leader() -> None:
    with small(20):
        post = Post()
        node = Node(SMALL, 2, post)  # 1, 3 and 5 on the other rank, from bytes 0, 60 and 200 on
        node.donate(DonateOrder("s1", 9, 2, 2))
        assert node.mail[1].sent == 20  # bytes 60 to 80 of 40 to 80
        node.donate(DonateOrder("s1", 9, 6, 2))
        assert node.mail[1].sent == 20
        for _, part in post.parts:
            part.close()


def untouched(node: Node, reason: str) -> None:
    before = {name: tensor.clone() for name, tensor in node.tensors.items()}
    outcomes = node.load()
    assert len(outcomes) == node.size
    assert all(isinstance(o, TransferError) and reason in str(o) for o in outcomes), outcomes
    assert all(torch.equal(before[name], tensor) for name, tensor in node.tensors.items())


def test_a_download_that_failed_or_is_wrong_leaves_all_ranks_as_they_were() -> None:
    theirs = {name: tensor + 1 for name, tensor in SMALL.items()}
    post = Post(Store(theirs))
    node = Node({name: tensor.clone() for name, tensor in SMALL.items()}, 3, post)
    post.failure = "the coordinator is gone"
    untouched(node, "the coordinator is gone")
    post.failure = ""
    store = post.store = Store(theirs)
    right, store.digest = store.digest, "0123"
    untouched(node, f"the state of round 9 that came has the digest {right}, announced was 0123")
    store.digest = right
    assert node.load() == [right] * 3


def test_nothing_is_loaded_that_was_not_downloaded() -> None:
    handover = Handover(WholeState(SharedState(SMALL), Alone()), Alone(), Post(Store(SMALL)))  # type: ignore[arg-type]
    with pytest.raises(TransferError, match="nothing was downloaded"):
        handover.load(ORDER)
    handover.download(ORDER)
    handover.close()
    with pytest.raises(TransferError, match="nothing was downloaded"):
        handover.load(ORDER)
    handover.download(ORDER)
    handover.load(ORDER)
    with pytest.raises(TransferError, match="nothing was downloaded"):
        handover.load(ORDER)


def test_a_file_that_breaks_while_it_is_loaded_voids_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    handover = Handover(WholeState(SharedState(SMALL), Alone()), Alone(), Post(Store(SMALL)))  # type: ignore[arg-type]
    handover.download(ORDER)

    def broken(self: Spool, offset: int, into: memoryview) -> None:
        raise TransferError("input/output error")

    monkeypatch.setattr(Spool, "read", broken)
    with pytest.raises(ExchangeError, match="loading the state of round 9 broke off: input") as caught:
        handover.load(ORDER)
    assert not isinstance(caught.value, TransferError)


def test_what_reads_otherwise_once_it_is_loaded_voids_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {name: tensor.clone() for name, tensor in SMALL.items()}
    whole = WholeState(SharedState(tensors), Alone())
    handover = Handover(whole, Alone(), Post(Store(SMALL)))  # type: ignore[arg-type]
    handover.download(ORDER)
    read = Spool.read

    def flipping(self: Spool, offset: int, into: memoryview) -> None:
        read(self, offset, into)
        into[0] ^= 1

    monkeypatch.setattr(Spool, "read", flipping)
    with pytest.raises(ExchangeError, match=r"once it is loaded, .* this machine's memory or its disk"):
        handover.load(ORDER)


@pytest.mark.parametrize("size", [1, 3])
def test_a_donor_without_room_is_unharmed(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    post = Post()
    node = Node(SMALL, size, post)
    with monkeypatch.context() as patch:
        patch.setattr(spools.shutil, "disk_usage", lambda folder: Full())
        check(node, DonateOrder("s1", 9, 0, 1), "0 MB are free; set TMPDIR", size)
    check(node, DonateOrder("s1", 9, 0, 2), "300 bytes has 1 chunks, not 2 from 0 on", size)

    def full(self: Spool, offset: int, data: memoryview) -> None:
        raise TransferError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Spool, "write", full)
        check(node, DonateOrder("s1", 9, 0, 1), "No space left on device", 1)  # found out by the leader alone
    assert post.parts == []
    assert node.donate(DonateOrder("s1", 9, 0, 1)) == [300] * size  # and the ranks are in step
    post.parts[0][1].close()


class Full:
    free = 0


def check(node: Node, order: DonateOrder, reason: str, failing: int) -> None:
    if node.size == 1:
        with pytest.raises(TransferError, match=reason):
            node.donate(order)
        return
    outcomes = node.donate(order)
    assert all(isinstance(o, TransferError) and reason in str(o) for o in outcomes[:failing]), outcomes
    assert outcomes[failing:] == [300] * (node.size - failing)


def test_a_rank_that_is_gone_ends_the_handover() -> None:
    class Gone:
        def send(self, data: torch.Tensor, rank: int) -> None:
            raise RuntimeError("connection closed by peer")

        receive = send

    def action(ranks: Ranks) -> None:
        held = {name: SMALL[name] for name in sorted(SMALL)[ranks.rank :: 2]}
        for _ in WholeState(SharedState(held), ranks, Gone()).pieces(0, 300):
            pass

    outcomes = on_all(2, action)
    assert all("handing on the shared state failed" in str(outcome) for outcome in outcomes), outcomes


# --------------------------------------------------------------------------------------------------- memory


def peak_memory() -> int:
    """Highest resident size of this process so far, in bytes."""
    (line,) = (
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")
    )
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc"
)
def test_neither_a_donation_nor_a_load_copies_the_state() -> None:
    nbytes = 96 << 20  # one tensor, so large that the allocator maps a copy anew
    tensors = {"t": torch.ones(nbytes, dtype=torch.uint8)}
    post = Post()
    node = Node(tensors, 1, post)
    digest = state_digest(tensors)
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_memory()
    assert node.donate(DonateOrder("s1", 9, 0, chunks(nbytes))) == [nbytes]
    ((_, spool),) = post.parts
    post.download = lambda order, rows: spool  # type: ignore[method-assign]
    assert node.load() == [digest]
    assert peak_memory() - before < nbytes // 2


class Allocations(TorchDispatchMode):
    """Bytes of the largest storage that an operation of this thread has made."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        held = {
            id(tensor.untyped_storage()) for tensor in tree_leaves(args) if isinstance(tensor, torch.Tensor)
        }
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and id(tensor.untyped_storage()) not in held:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return made


def test_no_rank_of_an_island_ever_holds_more_than_a_piece_of_what_is_not_its_own() -> None:
    piece, each = 1000, 3005
    tensors = {f"t{index}": torch.ones(each, dtype=torch.uint8) for index in range(4)}
    post = Post()
    node = Node(tensors, 2, post)
    largest = []

    def action(handover: Handover, ranks: Ranks) -> int:
        with Allocations() as made:
            kept = handover.donate(order, digest, lambda text: None)
            if ranks.rank == 0:
                post.download = lambda order, rows: post.parts[0][1]  # type: ignore[method-assign]
                handover.download(ORDER)
            assert handover.load(ORDER) == digest
        largest.append(made.largest)
        return kept

    digest = state_digest(tensors)
    with small(2000, piece):
        order = DonateOrder("s1", 9, 0, chunks(4 * each))
        assert node.all(action) == [4 * each] * 2
    assert largest == [piece] * 2
