"""Snapshots without a network: the frames of a download in any state, and the pace of an upload."""

from __future__ import annotations

import asyncio

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from node.exchange.chunks_down import Progress, SnapshotAssembly
from node.exchange.chunks_up import DUTY, Pace
from node.exchange.retry import Patience
from node.exchange.spool import Spool
from node.exchange.tensor_bytes import layout, total_bytes
from node.exchange.trouble import Kind, TransferError, Trouble
from protos import wire
from protos.snapshots import chunks
from tests.node.hub_rig import FakeClock
from tests.node.snapshot_rig import LAYOUTS, ORDER, Store, content, small, state

Layouts = list[tuple[torch.dtype, tuple[int, ...], bool]]

SMALL = {"a": torch.arange(50, dtype=torch.uint8), "b": torch.arange(5, dtype=torch.int64)}  # 90 bytes


def take(assembly: SnapshotAssembly, frames: list[bytes]) -> bool:
    assembly.begin()
    return [assembly.add(frame) for frame in frames][-1]


def empty(store: Store) -> Spool:
    return Spool(store.rows, 0, chunks(len(store.data)))


@given(layouts=LAYOUTS, chunk=st.integers(1, 40), frame=st.integers(1, 50))
def test_frames_of_any_size_make_the_snapshot(layouts: Layouts, chunk: int, frame: int) -> None:
    with small(chunk):
        store = Store(state(layouts, 1))
        spool = empty(store)
        assembly = SnapshotAssembly(ORDER, spool)
        assert take(assembly, store.frames(size=frame)) and assembly.complete
        assert (content(spool), spool.state_digest, spool.digest()) == (
            store.data,
            store.digest,
            store.digest,
        )
        spool.close()


@given(
    harm=st.sampled_from(["cut", "flip", "drop", "twice", "swap", "end"]),
    where=st.integers(0, 1 << 30),
    frame=st.integers(3, 40),
)
def test_what_harms_a_stream_is_mended_by_the_next_or_ends_the_download(
    harm: str, where: int, frame: int
) -> None:
    with small(20):
        store = Store(SMALL)
        spool = empty(store)
        assembly = SnapshotAssembly(ORDER, spool)
        frames = store.frames(size=frame)
        index = where % len(frames)
        if harm == "cut":
            frames = frames[:index]
        elif harm == "flip":  # one bit of any byte of the stream
            bit = where % (8 * sum(map(len, frames)))
            index = 0
            while bit >= 8 * len(frames[index]):
                bit -= 8 * len(frames[index])
                index += 1
            damaged = bytearray(frames[index])
            damaged[bit // 8] ^= 1 << bit % 8
            frames[index] = bytes(damaged)
        elif harm == "drop":
            del frames[index]
        elif harm == "twice":
            frames.insert(index, frames[index])
        elif harm == "swap":
            other = (index + 1) % len(frames)
            frames[index], frames[other] = frames[other], frames[index]
        else:
            frames.insert(index, frames[-1])
        try:
            for message in frames:
                if assembly.add(message):
                    break
        except Trouble as trouble:
            assert trouble.passing and "broke off" in str(trouble)
        except TransferError:
            assert (harm, index) == ("flip", 0)  # what the header says of the snapshot itself
            return
        done = assembly.done
        assert content_until(spool, assembly.nbytes) == store.data[: assembly.nbytes]
        try:
            if not assembly.complete:
                assert take(assembly, store.frames(done, size=frame))
        except TransferError as error:
            assert (harm, index) == ("flip", 0) and "has changed under its download" in str(error)
            return
        except Trouble as trouble:  # a digest of the manifest itself was damaged
            assert (harm, index) == ("flip", 0) and "is damaged" in str(trouble)
            return
        assert content(spool) == store.data
        # A wrong digest of the whole is found by whoever loads it.
        assert spool.state_digest == store.digest or (harm, index) == ("flip", 0)
        spool.close()


def content_until(spool: Spool, stop: int) -> bytes:
    data = bytearray(stop)
    spool.read(0, memoryview(data))
    return bytes(data)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"snapshot": "s2"}, "is snapshot 's2' of round 9, ordered was 's1' of round 9"),
        ({"round": 8}, "of round 8, ordered was 's1' of round 9"),
        ({"nbytes": 91}, "announces 91 bytes, the tensors of this model have 90"),
    ],
)
def test_another_snapshot_is_refused(change: dict[str, str | int], text: str) -> None:
    store = Store(SMALL)
    with pytest.raises(TransferError, match=text):
        SnapshotAssembly(ORDER, empty(store)).add(store.frames(**change)[0])


@pytest.mark.parametrize(
    ("ours", "text"),
    [
        ({**SMALL, "more": torch.zeros(1)}, "the snapshot lacks 1 tensors of this model, first 'more'"),
        ({"a": SMALL["a"]}, "holds 1 tensors that this model does not have, first 'b'"),
        ({**SMALL, "b": torch.zeros(5)}, r"holds 'b' as int64\[5\], this model as float32\[5\]"),
        (
            {**SMALL, "a": SMALL["a"].view(5, 10)},
            r"holds 'a' as uint8\[50\], this model as uint8\[5, 10\]",
        ),
    ],
)
def test_a_state_of_other_tensors_is_refused_before_a_byte_is_taken(
    ours: dict[str, torch.Tensor], text: str
) -> None:
    rows = layout(ours)
    spool = Spool(rows, 0, chunks(total_bytes(rows)))
    with pytest.raises(TransferError, match=text):
        SnapshotAssembly(ORDER, spool).add(Store(SMALL).frames()[0])
    with pytest.raises(TransferError, match="never written"):
        spool.read(0, memoryview(bytearray(1)))


def test_digests_that_do_not_fit_are_refused() -> None:
    for digests in ([], [bytes(16)] * 2, [bytes(15)]):
        store = Store(SMALL)
        store.manifest.digests[:] = digests
        with pytest.raises(TransferError, match=r"its manifest has .* digests of .* due were 1 of 16"):
            SnapshotAssembly(ORDER, empty(store)).add(store.frames()[0])


def test_a_snapshot_that_changes_between_two_streams_is_given_up() -> None:
    with small(20):
        store = Store(SMALL)
        assembly = SnapshotAssembly(ORDER, empty(store))
        for frame in store.frames()[:2]:
            assembly.add(frame)
        with pytest.raises(TransferError, match="'s1' has changed under its download"):
            take(assembly, store.frames(1, state_digest="other"))


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        (lambda frames: frames[1:], "starts with a frame of kind 2 instead of a header"),
        (lambda frames: [frames[0], wire.encode_frame(wire.COMMIT)], "holds a frame of kind 4"),
        (lambda frames: [*frames[:2], frames[-1]], "ended after 1 of 5 chunks"),
        (lambda frames: [*frames[:2], frames[1]], "20 bytes from 0 on came where byte 20 was due"),
        (lambda frames: [*frames[:-1], wire.encode_frame(wire.CHUNK, b"x", offset=90)], "from 90 on came"),
        (lambda frames: [frames[0], wire.encode_frame(wire.CHUNK)], "0 bytes from 0 on"),
        (lambda frames: [frames[0], frames[1][:-1] + b"?"], "chunk 0 is damaged"),
        (lambda frames: [frames[0], b"\x02"], "a frame has at least"),
        (lambda frames: [wire.encode_frame(wire.HEADER, b"\xff\xff")], "Error parsing message"),
    ],
)
def test_frames_that_break_the_order_are_told(frames, text: str) -> None:  # type: ignore[no-untyped-def]
    with small(20):
        store = Store(SMALL)
        with pytest.raises(Trouble, match=text) as caught:
            take(SnapshotAssembly(ORDER, empty(store)), frames(store.frames()))
        assert caught.value.kind is Kind.CUT


def test_a_state_without_bytes_is_complete_with_its_manifest() -> None:
    store = Store({"none": torch.empty(0, 3)})
    assembly = SnapshotAssembly(ORDER, empty(store))
    frames = store.frames()
    assert len(frames) == 2 and not assembly.complete
    assert take(assembly, frames) and assembly.complete


# ------------------------------------------------------------------------------------------------- progress


def test_progress_is_told_every_few_seconds_and_renews_the_patience() -> None:
    clock, said = FakeClock(), list[str]()
    timing = clock.timing()
    patience = Patience("it", 10.0, timing, lambda text: None)
    progress = Progress("the download", 4_000_000, patience, timing, said.append)
    cut = Trouble(Kind.CUT, "cut")

    async def failing(times: int) -> None:
        for _ in range(times):
            await patience.endure(cut)

    asyncio.run(failing(3))  # 3.5 s of 10
    progress.now(1_000_000)
    assert said == []
    clock.time += 2
    progress.now(2_000_000)
    assert said == ["the download: 2 of 4 MB"]
    progress.now(3_000_000)
    assert len(said) == 1
    asyncio.run(failing(4))  # 7.5 s of 10: without the progress they would have been the end
    progress.now(3_000_000)  # none
    with pytest.raises(Trouble, match="gave up on it after 10 s"):
        asyncio.run(failing(4))


# ----------------------------------------------------------------------------------------------------- pace


def send(clock: FakeClock, pace: Pace, frames: int, seconds: float) -> None:
    async def run() -> None:
        for _ in range(frames):
            await pace.wait()
            clock.time += seconds
            pace.sent(seconds)

    asyncio.run(run())


def test_frames_go_without_a_pause_while_the_uplink_is_free() -> None:
    clock = FakeClock()
    send(clock, Pace(lambda: False, clock.timing()), 50, 0.1)
    assert clock.pauses == []


@pytest.mark.parametrize("seconds", [0.02, 0.1, 0.5])
def test_frames_take_a_small_share_of_a_busy_uplink_and_never_starve(seconds: float) -> None:
    clock = FakeClock()
    pace = Pace(lambda: True, clock.timing())
    send(clock, pace, 1, seconds)
    began = clock.time
    send(clock, pace, 50, seconds)
    assert 50 * seconds / (clock.time - began) == pytest.approx(DUTY)


def test_a_slow_uplink_is_used_often_enough_to_be_believed_alive() -> None:
    clock = FakeClock()
    pace = Pace(lambda: True, clock.timing())
    send(clock, pace, 1, 4.0)
    began = clock.time
    send(clock, pace, 3, 4.0)
    assert (clock.time - began) / 3 == pytest.approx(4.0 + 15.0)


def test_the_pause_ends_with_the_contribution() -> None:
    clock = FakeClock()
    pace = Pace(lambda: clock.time < 10.0, clock.timing())
    send(clock, pace, 1, 1.0)
    clock.time = 9.0
    send(clock, pace, 1, 1.0)
    assert clock.time == pytest.approx(11.0, abs=0.03)
