"""How a reduction is cut: every byte once, nothing before its bytes have come."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optim.aggregate import ReducerMemory
from optim.codecs import codec_of
from optim.pieces import cut, parts_of
from optim.spans import byte_ranges, run_length, run_shape, unit
from protos.buckets import Bucket, BucketTable, MeanRule
from protos.codecs import CodecSpec
from tests.optim.aggregate_rig import begun, contribution, mixed

KINDS = ("majority", "fp32", "int4", "int8/fp32", "basis")


@st.composite
def tables(draw: st.DrawFn) -> BucketTable:
    buckets: list[Bucket] = []
    for index in range(draw(st.integers(1, 6))):
        kind, shape = draw(st.sampled_from(KINDS)), (draw(st.integers(2, 60)), draw(st.integers(2, 60)))
        name = f"b{index}"
        if kind == "majority":
            buckets.append(Bucket.of(name, "majority", [(name, shape)]))
        elif kind == "basis":
            basis = (min(shape), draw(st.integers(1, min(shape))))
            buckets.append(Bucket.of(name, "mean", [(name, shape)]))
            buckets.append(Bucket.of(f"{name}q", "basis", [(f"{name}q", basis)], source=name))
        else:
            codec, _, result = kind.partition("/")
            buckets.append(Bucket.of(name, "mean", [(name, shape)], codec=codec, result=result or None))
    for index in range(draw(st.integers(0, 3))):
        name = f"b{index}/scale"
        buckets.append(Bucket.of(name, "mean", [(name, (draw(st.integers(1, 40)),))], padded=False))
    rule = draw(st.sampled_from([MeanRule(), MeanRule(clip=2.0), MeanRule(trim=1)]))
    return BucketTable(tuple(buckets), rule)


@given(tables(), st.integers(1, 80))
def test_pieces_cover_both_layouts(table: BucketTable, lines: int) -> None:
    size = lines * 64
    pieces = cut(table, size)
    parts = [part for piece in pieces for part in piece.parts]
    assert parts[0].out_start == parts[0].start == 0
    assert (parts[-1].end, parts[-1].out_end) == (table.nbytes, table.result_nbytes)
    for a, b in itertools.pairwise(parts):
        assert (a.end, a.out_end) == (b.start, b.out_start)
    for part in parts:
        assert part.out_nbytes > 0 and part.cost > 0
        assert part.bucket >= 0 or part.end - part.start == part.out_nbytes
    for piece in pieces:
        assert (piece.start, piece.end) == (piece.parts[0].out_start, piece.parts[-1].out_end)
        assert piece.needs == max(part.end for part in piece.parts)
        assert piece.end - piece.start <= size or len(piece.parts) == 1
    for a, b in itertools.pairwise(pieces):
        assert a.end == b.start and a.needs <= b.needs
        assert a.end - a.start + b.parts[0].out_nbytes > size  # no piece is smaller than it has to be
    assert sum(piece.cost for piece in pieces) == sum(part.cost for part in parts_of(table))


@given(tables(), st.integers(1, 20), st.integers(0, 2**16))
def test_pieces_change_nothing(table: BucketTable, lines: int, seed: int) -> None:
    payloads = [contribution(seed + i, table) for i in range(3)]
    whole, _ = begun(table, payloads, ReducerMemory(), round_index=2)
    parts = [part for piece in cut(table, lines * 64) for part in piece.parts]
    assert begun(table, payloads, ReducerMemory(), round_index=2, parts=parts)[0] == whole


def test_votes_and_exact_means_stay_on_a_fixed_grid() -> None:
    """What can be cut anywhere is: pieces of one size, whatever the buckets."""
    table = BucketTable(
        (
            Bucket.of("a", "majority", [("a", (20, 25))]),
            Bucket.of("b", "mean", [("b", (17,))]),
            Bucket.of("c", "majority", [("c", (1100,))]),
        )
    )
    for size in (64, 128, 192, 1 << 20):
        assert [p.start for p in cut(table, size)] == list(range(0, table.nbytes, size))
        assert all(p.needs == p.end for p in cut(table, size))
    assert [part.rule for part in parts_of(table)] == ["majority", "mean", "majority"]


def test_what_is_made_as_a_whole() -> None:
    rules = [part.rule for part in parts_of(mixed("int4"))]
    assert rules == ["majority", "coded", "basis", "mean", "coded", "basis", "majority", "coded"]
    exact = BucketTable(mixed("fp32").buckets[3:4], MeanRule(clip=3.0))
    assert [part.rule for part in parts_of(exact)] == ["coded"]  # its norm needs all of it


def test_neighbours_of_one_rule_are_one_part() -> None:
    table = BucketTable(tuple(Bucket.of(n, "majority", [(n, (600,))]) for n in "abc"))
    assert [(part.start, part.end) for part in parts_of(table)] == [(0, table.nbytes)]


@pytest.mark.parametrize("nbytes", [64, 128, 192, 4096])
def test_chunks_of_a_part(nbytes: int) -> None:
    part = parts_of(BucketTable((Bucket.of("a", "majority", [("a", (5000,))]),)))[0]
    chunks = part.chunks(nbytes)
    assert (chunks[0].start, chunks[-1].end) == (part.start, part.end)
    assert all(a.end == b.start for a, b in itertools.pairwise(chunks))
    assert all(chunk.out_nbytes == nbytes for chunk in chunks[:-1])
    assert sum(chunk.cost for chunk in chunks) == part.cost


# ------------------------------------------------------------------ spans


@pytest.mark.parametrize("shape", [(1,), (7,), (1000,), (20, 50), (3, 7, 11), (33, 1), (70, 32)])
@pytest.mark.parametrize(
    "codec",
    [
        "fp32",
        "bf16",
        "int8",
        "int8:10",
        "int4",
        "int4:10",
        "2bit",
        "ternary",
        "1bit",
        "1bit-row",
        "lowrank:2",
    ],
)
def test_a_run_of_an_encoding_is_the_encoding_of_a_run(codec: str, shape: tuple[int, ...]) -> None:
    spec = CodecSpec.parse(codec)
    values = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    whole = codec_of(codec, shape)
    data = np.empty(whole.nbytes, np.uint8)
    whole.encode(values, data)
    step = run_length(spec, shape, 60)
    assert step == values.size or step % unit(spec, shape) == 0
    seen = np.zeros(whole.nbytes, np.bool_)
    for first in range(0, values.size, step):
        last = min(first + step, values.size)
        ranges = byte_ranges(spec, shape, first, last)
        for start, end in ranges:
            seen[start:end] = 1
        run = codec_of(codec, run_shape(spec, shape, first, last))
        part = np.concatenate([data[start:end] for start, end in ranges])
        assert run.decode(part).tobytes() == whole.decode(data).reshape(-1)[first:last].tobytes()
    assert seen.all()


def test_the_length_of_a_run() -> None:
    assert run_length(CodecSpec.parse("int4:6"), (100, 10), 100) == 96
    assert run_length(CodecSpec.parse("2bit"), (100, 10), 50) == 40  # rows, and whole bytes
    assert run_length(CodecSpec.parse("2bit"), (100, 10), 5) == 20
    assert run_length(CodecSpec.parse("lowrank:2"), (100, 10), 100) == 1000
