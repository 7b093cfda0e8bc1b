"""The reducer against a reference that reads like the definition."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.reducer import Reduction, Slab, all_finite, cut, padding_bits
from optim.bits import tally
from optim.mean import mean_into
from protos.buckets import Bucket, BucketTable
from protos.wire import CHUNK, CHUNK_BYTES, decode_frame, payload_digest
from tests.coordinator.coordinator_rig import mixed_table, random_payload, slow_tally, voted_table


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


def run(reduction: Reduction, steps: Sequence[int], nbytes: int, attempt: int = 0) -> bytes:
    """Advance step by step; check the frames and put them together."""
    result = b""
    for delivered in [*sorted(steps), nbytes]:
        expected = reduction.reducible(delivered)
        frames = reduction.advance(delivered)
        assert sum(len(decode_frame(frame).body) for frame in frames) == expected
        for message in frames:
            frame = decode_frame(message)
            assert (frame.kind, frame.attempt, frame.offset) == (CHUNK, attempt, len(result))
            result += bytes(frame.body)
        assert len(result) <= delivered
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
    pieces = cut(table, lines * 64)
    fast = Reduction(pieces, rows(payloads), weights, casting=casting, tally=tally)
    assert run(fast, steps, table.nbytes) == reference(table, payloads, weights, casting)


@pytest.mark.parametrize("members", range(1, 10))
def test_ties_take_the_casting_vote(members: int) -> None:
    table = voted_table()
    payloads = [random_payload(i, table) for i in range(members)]
    for casting in range(members):
        reduction = Reduction(cut(table), rows(payloads), [1] * members, casting=casting, tally=tally)
        assert run(reduction, [], table.nbytes) == reference(table, payloads, [1] * members, casting)


def test_a_single_voter_is_the_result() -> None:
    table = mixed_table()
    payload = random_payload(3, table)
    reduction = Reduction(cut(table), rows([payload]), [7], casting=0, tally=tally, attempt=5)
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
    weights = [1, 1, 1, 1]
    reduction = Reduction(cut(table, 128), rows(payloads), weights, casting=2, tally=tally)
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
    reduction = Reduction(cut(table), rows([random_payload(0, table)] * 2), [1, 1], casting=0, tally=tally)
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
        reduction = Reduction(
            cut(table), [honest, honest.copy(), liar], [1, 1, 1], casting=0, tally=tally, phase=phase
        )
        reduction.advance(table.nbytes)
        assert reduction.agreement()[:2] == [1.0, 1.0]
        shares.append(reduction.agreement()[2])
    assert sum(shares) / 4 == pytest.approx(1 - 1 / 8)


def test_pieces_cover_the_payload() -> None:
    table = mixed_table()
    for size in (64, 128, 192, 1 << 20):
        pieces = cut(table, size)
        assert [p.start for p in pieces] == list(range(0, table.nbytes, size))
        parts = [part for piece in pieces for part in piece.parts]
        assert parts[0].start == 0 and parts[-1].end == table.nbytes
        assert all(a.end == b.start for a, b in itertools.pairwise(parts))
        assert all(part.start >= p.start and part.end <= p.end for p in pieces for part in p.parts)
    assert max(p.end - p.start for p in cut(voted_table(40000))) == CHUNK_BYTES


def test_the_slab_keeps_its_memory() -> None:
    slab = Slab(640)
    first = slab.rows(3)
    assert [row.shape for row in first] == [(640,)] * 3
    assert all(row.ctypes.data % 64 == 0 for row in first)
    addresses = [row.ctypes.data for row in first]
    assert [row.ctypes.data for row in slab.rows(2)] == addresses[:2]
    grown = slab.rows(5)
    assert len({row.ctypes.data for row in grown}) == 5


def test_finiteness_is_checked_in_mean_sections_only() -> None:
    table = mixed_table()
    row = np.zeros(table.nbytes, np.uint8)
    row[:64] = 0xFF  # votes may hold any bits, also those of a NaN
    assert all_finite(row, table.sections(), 0, table.nbytes)
    for bad in (np.nan, np.inf, -np.inf):
        row[64 + 12 : 64 + 16] = np.array([bad], "<f4").view(np.uint8)
        assert not all_finite(row, table.sections(), 0, table.nbytes)
        assert all_finite(row, table.sections(), 0, 76)
        assert all_finite(row, table.sections(), 80, table.nbytes)
        assert not all_finite(row, table.sections(), 76, 80)
