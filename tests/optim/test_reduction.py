"""The reducer against a reference that reads like the definition."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optim.aggregate import Aggregation, ReducerMemory, casting_voter
from optim.bits import tally
from optim.mean import mean_into
from optim.pieces import cut
from optim.reduction import Reduction, Slab, padding_bits
from protos.buckets import LINE_BYTES, Bucket, BucketTable
from protos.wire import CHUNK, CHUNK_BYTES, decode_frame, payload_digest
from tests.coordinator.contribution_rig import mixed_table, random_payload, slow_tally, voted_table


def reference(table: BucketTable, payloads: Sequence[bytes], weights: Sequence[int], casting: int) -> bytes:
    """Bucket by bucket, element by element."""
    result = bytearray()
    for bucket, offset in zip(table.buckets, table.offsets, strict=True):
        parts = [np.frombuffer(p[offset : offset + bucket.nbytes], np.uint8) for p in payloads]
        if bucket.reduce == "majority":
            result += slow_tally(parts, weights, casting=casting).tobytes()
            continue
        columns = zip(*(part.view("<f4").tolist() for part in parts), strict=True)
        means = []
        for column in columns:
            total = 0.0
            for weight, value in zip(weights, column, strict=True):
                total += weight * value
            means.append(total / sum(weights))
        result += np.array(means, "<f4").tobytes()
    return bytes(result)


def reducing(
    table: BucketTable,
    payloads: Sequence[bytes],
    weights: Sequence[int] | None = None,
    *,
    casting: int = 0,
    piece: int = CHUNK_BYTES,
    **others: Any,
) -> Reduction:
    """Of a round in which voter ``casting`` breaks ties."""
    aggregation = Aggregation(
        table,
        len(payloads),
        round_index=casting,
        tally=tally,
        memory=ReducerMemory(),
        weights=weights,
    )
    assert casting_voter(casting, len(payloads)) == casting
    return Reduction(cut(table, piece), aggregation, rows(payloads), **others)


def run(reduction: Reduction, steps: Sequence[int], nbytes: int, attempt: int = 0) -> bytes:
    """Advance step by step; check the frames and put them together."""
    result = b""
    for delivered in [*sorted(steps), nbytes]:
        cost = reduction.cost(delivered)
        frames = reduction.advance(delivered)
        assert bool(frames) == bool(cost)
        for message in frames:
            frame = decode_frame(message)
            assert (frame.kind, frame.attempt, frame.offset) == (CHUNK, attempt, len(result))
            result += bytes(frame.body)
    assert reduction.done
    assert reduction.digest() == payload_digest(result)
    return result


def rows(payloads: Sequence[bytes]) -> list[np.ndarray]:
    slab = Slab(len(payloads[0])).rows(len(payloads))
    for row, payload in zip(slab, payloads, strict=True):
        row[:] = np.frombuffer(payload, np.uint8)
    return slab


tables = st.lists(
    st.tuples(st.sampled_from(["majority", "mean"]), st.integers(1, 2500)), min_size=1, max_size=5
).map(
    lambda rows: BucketTable(
        tuple(Bucket.of(f"b{i}", rule, [(f"t{i}", (n,))]) for i, (rule, n) in enumerate(rows))
    )
)


@settings(max_examples=60)
@given(
    tables,
    st.lists(st.integers(1, 65535), min_size=1, max_size=9),
    st.integers(1, 40),
    st.integers(0, 2**32),
    st.data(),
)
def test_equals_the_reference(
    table: BucketTable, weights: list[int], lines: int, seed: int, data: st.DataObject
) -> None:
    payloads = [random_payload(seed + i, table) for i in range(len(weights))]
    casting = data.draw(st.integers(0, len(weights) - 1))
    steps = data.draw(st.lists(st.integers(0, table.nbytes), max_size=6))
    fast = reducing(table, payloads, weights, casting=casting, piece=lines * 64)
    assert run(fast, steps, table.nbytes) == reference(table, payloads, weights, casting)


@pytest.mark.parametrize("members", range(1, 10))
def test_ties_take_the_casting_vote(members: int) -> None:
    table = voted_table()
    payloads = [random_payload(i, table) for i in range(members)]
    for casting in range(members):
        reduction = reducing(table, payloads, casting=casting)
        assert run(reduction, [], table.nbytes) == reference(table, payloads, [1] * members, casting)


def test_a_single_voter_is_the_result() -> None:
    table = mixed_table()
    payload = random_payload(3, table)
    reduction = reducing(table, [payload], [7], attempt=5)
    assert run(reduction, [], table.nbytes, attempt=5) == payload
    assert reduction.agreement() == [1.0]


def test_the_mean_is_exact_to_half_an_ulp() -> None:
    """fp64 in slot order, rounded once: against rational arithmetic."""
    rng = np.random.default_rng(1)
    values = (rng.standard_normal((5, 64)) * 10.0 ** rng.integers(-8, 8, (5, 64))).astype("<f4")
    weights = [1, 3, 65535, 2, 10]
    out = np.empty(256, np.uint8)
    mean_into([v.view(np.uint8) for v in values], weights, out)
    for column, got in zip(values.T, out.view("<f4"), strict=True):
        exact = sum(w * Fraction(float(v)) for w, v in zip(weights, column, strict=True)) / sum(weights)
        scale = max(abs(Fraction(float(v))) for v in column)
        assert abs(Fraction(float(got)) - exact) <= Fraction(float(np.spacing(abs(got)))) / 2 + scale / 2**50


def test_the_mean_depends_on_slots_not_on_arrival() -> None:
    values = [np.array([x] * 16, "<f4").view(np.uint8) for x in (1e30, 1.0, -1e30)]
    out = np.empty(64, np.uint8)
    mean_into(values, [1, 1, 1], out)
    assert out.view("<f4")[0] == 0.0  # 1 is lost in fp64 beside 1e30: a fixed order, not a lucky one
    mean_into([values[0], values[2], values[1]], [1, 1, 1], out)
    assert out.view("<f4")[0] == np.float32(1 / 3)


def test_large_values_do_not_overflow_on_the_way() -> None:
    big = np.full(16, np.finfo(np.float32).max, "<f4").view(np.uint8)
    out = np.empty(64, np.uint8)
    mean_into([big] * 8, [65535] * 8, out)
    assert (out.view("<f4") == np.finfo(np.float32).max).all()


def test_agreement_is_the_share_of_equal_bits() -> None:
    table = mixed_table()
    payloads = [random_payload(i, table) for i in range(4)]
    for i, payload in enumerate(payloads):  # pad bits are 0 on the wire
        clean = bytearray(payload)
        clean[62] &= 0x0F
        clean[63] = 0
        clean[192 + 137] &= 0x0F
        clean[192 + 138 :] = bytes(192 - 138)
        payloads[i] = bytes(clean)
    reduction = reducing(table, payloads, casting=2, piece=128)
    result = run(reduction, [100], table.nbytes)
    for payload, share in zip(payloads, reduction.agreement(padding_bits(table)), strict=True):
        bits = [
            np.unpackbits(np.frombuffer(x, np.uint8)[a : a + n // 8 + 1], bitorder="little")[:n]
            for x in (payload, result)
            for a, n in ((0, 500), (192, 1100))
        ]
        equal = (bits[0] == bits[2]).sum() + (bits[1] == bits[3]).sum()
        assert share == pytest.approx(equal / 1600, abs=1e-12)


def test_agreement_of_a_mean_is_nothing() -> None:
    table = BucketTable((Bucket.of("b", "mean", [("b", (5,))]),))
    reduction = reducing(table, [random_payload(0, table)] * 2)
    run(reduction, [], table.nbytes)
    assert all(np.isnan(reduction.agreement()))


def test_agreement_of_large_payloads_is_sampled_fairly() -> None:
    """Over four rounds every block is read once."""
    table = voted_table(lines=(2 << 20) // 64)
    honest = np.zeros(table.nbytes, np.uint8)
    liar = honest.copy()
    liar[: table.nbytes // 8] = 0xFF
    shares = []
    for phase in range(4):
        reduction = reducing(table, [honest.tobytes(), honest.tobytes(), liar.tobytes()], phase=phase)
        reduction.advance(table.nbytes)
        assert reduction.agreement()[:2] == [1.0, 1.0]
        shares.append(reduction.agreement()[2])
    assert sum(shares) / 4 == pytest.approx(1 - 1 / 8)


def test_a_whole_bucket_is_sent_in_chunks() -> None:
    """Larger than a message: its bytes wait for all of it, and leave one chunk behind the other."""
    table = BucketTable(
        (
            Bucket.of("v", "majority", [("v", (512,))]),
            Bucket.of("w", "mean", [("w", (3 << 19,))], codec="int8"),
        )
    )
    payloads = [random_payload(i, table) for i in range(2)]
    reduction = reducing(table, payloads)
    assert reduction.advance(table.nbytes - 64)[0][16:] == payloads[0][:64]
    frames = [decode_frame(frame) for frame in reduction.advance(table.nbytes)]
    assert [(frame.offset, len(frame.body)) for frame in frames] == [
        (64, CHUNK_BYTES),
        (64 + CHUNK_BYTES, table.nbytes - 64 - CHUNK_BYTES),
    ]
    assert reduction.done


@settings(max_examples=40)
@given(tables, st.integers(0, 30), st.integers(0, 2**32), st.data())
def test_pieces_that_are_ready_go_into_one_frame(
    table: BucketTable, lines: int, seed: int, data: st.DataObject
) -> None:
    """The bytes, and what is counted, are those of pieces that are made one by one."""
    payloads = [random_payload(seed + i, table) for i in range(3)]
    steps = data.draw(st.lists(st.integers(0, table.nbytes), max_size=4))
    singly = reducing(table, payloads, piece=LINE_BYTES)
    expected = run(singly, [], table.nbytes)
    joined = reducing(table, payloads, piece=LINE_BYTES, frame_bytes=lines * LINE_BYTES)
    assert run(joined, steps, table.nbytes) == expected
    assert joined.counts() == singly.counts()


def test_a_frame_is_no_longer_than_was_asked_for() -> None:
    table = voted_table(lines=10)
    payloads = [random_payload(i, table) for i in range(2)]
    reduction = reducing(table, payloads, piece=LINE_BYTES, frame_bytes=3 * LINE_BYTES + 63)
    lengths = [len(decode_frame(frame).body) // LINE_BYTES for frame in reduction.advance(8 * LINE_BYTES)]
    assert lengths == [3, 3, 2]
    assert [len(frame) - 16 for frame in reduction.advance(table.nbytes)] == [2 * LINE_BYTES]


def test_which_blocks_are_compared_does_not_depend_on_how_a_large_result_is_cut() -> None:
    table = voted_table(lines=(2 << 20) // LINE_BYTES)
    payloads = [np.random.default_rng(i).bytes(table.nbytes) for i in range(2)]
    counts = []
    for piece, frame_bytes in ((CHUNK_BYTES, 0), (24_384, 0), (24_384, 200_000)):
        reduction = reducing(table, payloads, piece=piece, frame_bytes=frame_bytes, phase=1)
        reduction.advance(table.nbytes // 3)
        reduction.advance(table.nbytes)
        counts.append(reduction.counts())
    assert counts[0] == counts[1] == counts[2]


def test_the_slab_keeps_its_memory() -> None:
    slab = Slab(640)
    first = slab.rows(3)
    assert [row.shape for row in first] == [(640,)] * 3
    assert all(row.ctypes.data % 64 == 0 for row in first)
    addresses = [row.ctypes.data for row in first]
    assert [row.ctypes.data for row in slab.rows(2)] == addresses[:2]
    grown = slab.rows(5)
    assert len({row.ctypes.data for row in grown}) == 5
