"""Slices: any cut of a round at the bounds of its units, reduced apart, makes the same result."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from optim.aggregate import Aggregation, ReducerMemory
from optim.bits import tally
from optim.pieces import cut
from optim.reduction import Reduction
from optim.slices import Slice, pieces_within, slice_pieces, units
from protos.buckets import Bucket, BucketTable
from protos.wire import decode_frame
from tests.coordinator.contribution_rig import coded_table, mixed_table, random_payload, voted_table


def basis_table() -> BucketTable:
    shapes = [("a", (32, 64)), ("b", (16, 48))]
    buckets = [Bucket.of("v", "majority", [("v", (700,))])]
    for name, shape in shapes:
        buckets.append(Bucket.of(name, "mean", [(name, shape)]))
        buckets.append(
            Bucket.of(f"{name}/basis", "basis", [(f"optimizer/{name}/basis", (shape[0], 4))], source=name)
        )
    return BucketTable(tuple(buckets))


TABLES = {
    "voted": voted_table(20_000),
    "mixed": mixed_table(),
    "coded": coded_table(),
    "basis": basis_table(),
}


def reduced(table: BucketTable, pieces, rows, part: Slice) -> bytes:  # type: ignore[no-untyped-def]
    aggregation = Aggregation(table, len(rows), round_index=3, tally=tally, memory=ReducerMemory())
    reduction = Reduction(pieces, aggregation, [row[part.start : part.end] for row in rows], phase=3)
    frames = reduction.advance(part.nbytes)
    assert reduction.done
    return b"".join(bytes(decode_frame(frame).body) for frame in frames)


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("seed", range(4))
def test_slices_reduced_apart_make_the_whole_result(name: str, seed: int) -> None:
    table, chance = TABLES[name], random.Random(seed)
    rows = [np.frombuffer(random_payload(seed * 10 + i, table), np.uint8).copy() for i in range(3)]
    whole = Slice(0, table.nbytes, 0, table.result_nbytes)
    expected = reduced(table, cut(table, 1 << 20), rows, whole)
    pieces = slice_pieces(table)
    finest = units(table, pieces)
    bounds = sorted({0, len(finest), *chance.choices(range(len(finest) + 1), k=3)})
    parts = [
        Slice(finest[a].start, finest[b - 1].end, finest[a].out_start, finest[b - 1].out_end)
        for a, b in itertools.pairwise(bounds)
    ]
    got = b"".join(reduced(table, pieces_within(pieces, part), rows, part) for part in parts)
    assert got == expected


@pytest.mark.parametrize("name", TABLES)
def test_units_cover_everything(name: str) -> None:
    table = TABLES[name]
    finest = units(table, slice_pieces(table))
    assert finest[0].start == finest[0].out_start == 0
    assert (finest[-1].end, finest[-1].out_end) == (table.nbytes, table.result_nbytes)
    for before, after in itertools.pairwise(finest):
        assert (before.end, before.out_end) == (after.start, after.out_start)


def test_a_basis_stays_with_its_source() -> None:
    table = basis_table()
    outs = dict(zip((bucket.name for bucket in table.buckets), table.result_offsets, strict=True))
    bounds = {unit.out_start for unit in units(table, slice_pieces(table))}
    assert outs["a/basis"] not in bounds and outs["b/basis"] not in bounds
    assert outs["b"] in bounds
