"""Snapshots: put together from several donors, checked, read; and every way to fail."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from coordinator.partial_snapshot import COPIED
from coordinator.snapshots import PAUSES
from protos import atoll_pb2 as pb
from protos.refusal import Refused
from protos.wire import CHUNK, CHUNK_BYTES, END, HEADER, decode_frame, encode_frame
from tests.coordinator.snapshot_rig import STALL, STATE, Case, read
from tests.coordinator.state_rig import SharedState, chunks_end


@pytest.mark.parametrize("donors", [1, 2, 3, 7])
@pytest.mark.parametrize("size", [CHUNK_BYTES, 700_001])
async def test_donors_put_a_snapshot_together(donors: int, size: int) -> None:
    case = Case(agreed={5: STATE.digest})
    orders = case.begin(5, [f"d{index}" for index in range(donors)])
    assert len(orders) == min(donors, 4)
    uploads = [case.feed(node, STATE.frames(order, size)) for node, order in reversed(list(orders.items()))]
    for upload, done in await asyncio.gather(*uploads):
        assert done and upload.count == orders[upload.node].count
    ((snapshot, reason),) = case.ended
    assert snapshot is not None and case.snapshots.kept == [snapshot]
    assert reason.startswith("the state after 5 rounds is kept: ")
    assert (snapshot.round, snapshot.nbytes, snapshot.state_digest) == (5, STATE.nbytes, STATE.digest)
    manifest, data = await read(case.snapshots, snapshot.id)
    assert data == STATE.data
    assert manifest.digests == STATE.chunk_digests(0, 4)
    assert [(row.name, row.dtype, tuple(row.shape)) for row in manifest.tensors] == STATE.tensors


async def test_a_download_goes_on_from_any_chunk() -> None:
    case = Case()
    snapshot = await case.make(5)
    for first, count, stop in ((2, 0, 4), (1, 2, 3), (4, 0, 4), (3, 1, 4)):
        _, data = await read(case.snapshots, snapshot.id, first, count)
        assert data == STATE.data[first * CHUNK_BYTES : stop * CHUNK_BYTES]
    for first, count in ((5, 0), (0, 5), (4, 1), (1 << 63, 1 << 63)):
        with pytest.raises(Refused, match="has 4 chunks"):
            case.snapshots.read(pb.ChunksRequest(snapshot=snapshot.id, first=first, count=count))
    with pytest.raises(Refused) as refused:
        case.snapshots.open("another")
    assert refused.value.code == "NOT_FOUND"


async def test_without_donors_there_is_nothing_to_wait_for() -> None:
    case = Case()
    assert case.snapshots.begin(5, 100, []) == []
    assert case.snapshots.begin(5, 0, ["x"]) == []
    assert case.snapshots.gathering is None
    case.begin()
    with pytest.raises(RuntimeError):
        case.begin()


BAD_HEADERS: list[tuple[dict[str, Any], str]] = [
    ({"round": 4}, "of round 4"),
    ({"nbytes": STATE.nbytes + 1}, "asked for were"),
    ({"first": 1}, "asked for were"),
    ({"count": 1}, "asked for were"),
    ({"state_digest": ""}, "must name the digest"),
    ({"state_digest": "0" * 32}, "the nodes agreed on"),
    ({"tensors": []}, "the tensors have 0 bytes"),
    ({"tensors": [pb.StateTensor(name="a", dtype="float32", shape=[1 << 63] * 3)]}, "the tensors have"),
    ({"tensors": [pb.StateTensor(name="a", dtype="float32", shape=[1] * 99)]}, "99 dimensions"),
    ({"tensors": [pb.StateTensor(name="a", dtype="object", shape=[1])]}, "cannot digest dtype 'object'"),
    ({"tensors": [pb.StateTensor(name="a", dtype="bool", shape=[1])] * 2}, "sort by name"),
    ({"tensors": [pb.StateTensor(name="a" * ((1 << 20) - 100), dtype="bool")]}, "do not fit into a manifest"),
]


@pytest.mark.parametrize(("changes", "words"), BAD_HEADERS, ids=[words for _, words in BAD_HEADERS])
async def test_a_header_that_does_not_fit(changes: dict[str, Any], words: str) -> None:
    case = Case(agreed={5: STATE.digest})
    order = case.begin()["x"]
    with pytest.raises(Refused, match=words):
        await case.feed("x", STATE.frames(order, **changes))
    await case.fails(words)


async def test_donors_of_unlike_states() -> None:
    other, renamed = (SharedState.of(seed, STATE.nbytes) for seed in (1, 0))
    renamed.tensors[2] = ("cc", "int64", ())
    for state, digest, words in (
        (other, other.digest, "with another donor"),
        (renamed, STATE.digest, "other tensors"),
    ):
        case = Case()
        orders = case.begin()
        await case.feed("x", STATE.frames(orders["x"]))
        with pytest.raises(Refused, match=words):
            await case.feed("y", state.frames(orders["y"], state_digest=digest))
        await case.fails(words)


BAD_MESSAGES: list[tuple[list[bytes], str]] = [
    ([b"short"], "at least 16 bytes"),
    ([encode_frame(HEADER)], "of kind 1 among the chunks"),
    ([bytes(2 << 20)], "a message of"),
    ([encode_frame(CHUNK, b"x", offset=1)], "expected were some from 0 on"),
    ([encode_frame(CHUNK, b"")], "0 bytes at offset 0"),
    ([encode_frame(CHUNK, b"x", offset=1 << 62)], "expected were some from 0 on"),
    ([chunks_end([])], "the chunks end at byte 0"),
    ([encode_frame(END, b"\xff")], "the chunks end at byte 0"),
]


@pytest.mark.parametrize(("messages", "words"), BAD_MESSAGES, ids=[words for _, words in BAD_MESSAGES])
async def test_a_message_that_does_not_fit(messages: list[bytes], words: str) -> None:
    case = Case()
    order = case.begin()["x"]
    with pytest.raises(Refused, match=words):
        await case.feed("x", [STATE.header(order), *messages])
    await case.fails(words)


@pytest.mark.parametrize("ending", ["short", "wrong", "none"])
async def test_the_digests_at_the_end(ending: str) -> None:
    case = Case()
    order = case.begin()["x"]
    frames = STATE.frames(order)
    good = list(pb.ChunksEnd.FromString(bytes(decode_frame(frames[-1]).body)).digests)
    if ending == "none":
        frames[-1] = encode_frame(END, b"\xff")
    else:
        frames[-1] = chunks_end(good[:1] if ending == "short" else [good[0], bytes(16)])
    with pytest.raises(Refused) as refused:
        await case.feed("x", frames)
    await case.fails(refused.value.text)
    assert refused.value.kind == "bad-transfer"


async def test_more_than_ones_share_is_refused() -> None:
    case = Case()
    order = case.begin()["x"]
    frames = STATE.frames(order)[:-1]
    with pytest.raises(Refused, match="expected were some from 2097152 on, before 2097152"):
        await case.feed("x", [*frames, encode_frame(CHUNK, b"x", offset=2 << 20)])
    await case.fails("broke off")


async def test_a_donor_that_lies_about_the_state() -> None:
    """Its chunks have the digests that it announces, the state does not."""
    case = Case()
    order = case.begin(donors=["x"])["x"]
    await case.feed("x", SharedState.of(1, STATE.nbytes).frames(order, state_digest=STATE.digest))
    await case.fails("the state that came has the digest")


@pytest.mark.parametrize("agreed", [STATE.digest, "0" * 32])
async def test_nothing_is_offered_before_the_nodes_agree(agreed: str) -> None:
    """All donors may have left the common state in the same way."""
    case = Case(agreed={5: ""})
    for node, order in case.begin().items():
        await case.feed(node, STATE.frames(order))
    case.snapshots.sweep()
    assert case.snapshots.gathering is not None and not case.snapshots.kept and not case.ended
    case.agreed[5] = agreed
    case.snapshots.judge()
    if agreed == STATE.digest:
        assert [kept.round for kept in case.snapshots.kept] == [5]
    else:
        await case.fails("the nodes agreed on 000")


async def test_what_was_agreed_on_once_is_remembered() -> None:
    case = Case(agreed={5: ""})
    orders = case.begin()
    await case.feed("x", STATE.frames(orders["x"]))
    case.agreed[5] = STATE.digest
    case.snapshots.judge()
    case.agreed[5] = ""  # so long ago that nobody knows
    await case.feed("y", STATE.frames(orders["y"]))
    assert len(case.snapshots.kept) == 1


async def test_nodes_that_never_agree() -> None:
    case = Case(agreed={5: ""})
    for node, order in case.begin().items():
        await case.feed(node, STATE.frames(order))
    case.timer.advance(STALL)
    case.snapshots.sweep()
    await case.fails("did not agree on the state after 5 rounds within 60 s")


async def test_strangers_and_repetitions_harm_nobody() -> None:
    case = Case()
    orders = case.begin()
    with pytest.raises(Refused, match="was not asked"):
        case.snapshots.upload("z", STATE.header(orders["x"]))
    with pytest.raises(Refused, match="is not being made"):
        case.snapshots.upload("x", STATE.header(orders["x"], snapshot="another"))
    for message in (b"", encode_frame(CHUNK, b"x"), encode_frame(HEADER, b"\xff")):
        with pytest.raises(Refused):
            case.snapshots.upload("x", message)
    await case.feed("x", STATE.frames(orders["x"]))
    with pytest.raises(Refused, match="already"):
        case.snapshots.upload("x", STATE.header(orders["x"]))
    case.snapshots.departed("x", "it is done")
    case.snapshots.departed("z", "it was never here")
    await case.feed("y", STATE.frames(orders["y"]))
    assert len(case.snapshots.kept) == 1


@pytest.mark.parametrize("loss", ["departed", "broke", "stalled"])
async def test_a_donor_is_lost_and_the_others_are_told(loss: str) -> None:
    case = Case()
    orders = case.begin()
    closed: list[str] = []
    upload, _ = await case.feed("x", STATE.frames(orders["x"])[:2])
    upload.on_close = lambda: closed.append("x")
    other, _ = await case.feed("y", STATE.frames(orders["y"])[:2])
    if loss == "departed":
        case.snapshots.departed("y", "it died")
    elif loss == "broke":
        other.broke("the stream ended")
    else:
        case.timer.advance(STALL - 1)
        await upload.feed(STATE.frames(orders["x"])[2])
        assert case.snapshots.sweep() == ()
        case.timer.advance(1)
        assert case.snapshots.sweep() == ("y",)
    await case.fails("y")
    assert closed == ["x"]
    with pytest.raises(Refused, match="the snapshot was given up") as refused:
        await upload.feed(STATE.frames(orders["x"])[-1])
    assert (refused.value.kind, refused.value.code) == ("", "ABORTED")
    assert upload.refusal is not None
    await case.make(6)  # the next one is not harmed


async def test_a_donor_has_time_to_copy_a_large_share_before_it_begins() -> None:
    case = Case()
    large = STALL * COPIED
    case.snapshots.begin(5, round(2 * large), ("x", "y"))
    case.timer.advance(2 * STALL - 1)
    assert case.snapshots.sweep() == ()
    case.timer.advance(1.001)  # shares are whole chunks, so one is somewhat larger
    assert case.snapshots.sweep() == ("y",)
    await case.fails("y sent no chunks for 60 s")


async def test_a_donor_may_pause_while_its_contribution_moves() -> None:
    case = Case()
    case.begin()
    for _ in range(PAUSES - 1):
        case.timer.advance(STALL)
        case.moved = {"x": case.timer.now(), "y": case.timer.now()}
        assert case.snapshots.sweep() == ()
    case.timer.advance(STALL + 1)  # the first seconds are for copying
    case.moved = dict.fromkeys("xy", case.timer.now())
    assert case.snapshots.sweep() == ("x", "y")
