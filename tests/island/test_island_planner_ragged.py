"""Cuts: the fast forms against the plain ones, equal segments against all orders and lengths."""

from __future__ import annotations

import random
from itertools import permutations
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.island.layout import ALIGN, TensorMeta, granularity_of, owned, ragged
from node.island.planner_ragged import before_cuts, equal, layout_owned, uneven


@st.composite
def tensor_metas(draw: st.DrawFn) -> list[TensorMeta]:
    metas = []
    for number in range(draw(st.integers(1, 6))):
        shape = tuple(draw(st.lists(st.integers(0 if number else 1, 9), max_size=3)))
        numel = prod(shape)
        if numel > 1 and draw(st.booleans()):
            cut = draw(st.integers(1, numel - 1))
            metas.append(TensorMeta(f"t{number}", shape, blocks=(cut, numel - cut)))
        else:
            spec = draw(st.sampled_from(("element", "row", "rows:3", "block", "matrix", 5)))
            metas.append(TensorMeta(f"t{number}", shape, granularity_of(spec, shape)))
    return metas


@given(tensor_metas(), st.integers(1, 9), st.data())
def test_owned_at_once(metas: list[TensorMeta], ranks: int, data: st.DataObject) -> None:
    owners = data.draw(st.lists(st.integers(0, ranks - 1), min_size=len(metas), max_size=len(metas)))
    numel = np.array([meta.numel for meta in metas])
    assert layout_owned(metas, numel, np.array(owners), ranks) == owned(metas, owners, ranks)


@given(tensor_metas(), st.integers(1, 9), st.sampled_from((1, 4, ALIGN)), st.data())
def test_cut_at_once(metas: list[TensorMeta], ranks: int, align: int, data: st.DataObject) -> None:
    shares = data.draw(
        st.lists(st.integers(0, 5), min_size=ranks, max_size=ranks).filter(lambda s: sum(s) > 0)
    )
    layout = uneven(metas, np.array(shares, np.float64), align=align)
    assert layout == ragged(metas, ranks, shares=shares, align=align)
    weights = np.array([1.0 + number for number in range(len(metas))])
    counted = [sum(weights[p.tensor] * p.numel for p in layout.pieces(rank)) for rank in range(ranks)]
    assert np.diff(before_cuts(layout, weights)) == pytest.approx(counted)


@given(tensor_metas(), st.integers(1, 12), st.sampled_from((1, 4, ALIGN)))
def test_equal_segments_divide_no_unit(metas: list[TensorMeta], ranks: int, align: int) -> None:
    layout = equal(metas, ranks, align=align)
    assert layout.legal().ok, layout.legal().reason
    assert layout.equal and layout.ranks == ranks
    size = layout.resident(0)
    assert size % align == 0 and all(offset % align == 0 for offset in layout.offsets)
    units = [
        max(m.blocks) if m.blocks else m.numel if m.whole else min(m.granularity, m.numel) for m in metas
    ]
    assert size >= max(-(-sum(meta.numel for meta in metas) // ranks), *units)


def shortest(metas: list[TensorMeta], ranks: int) -> int:
    """The shortest segment of all orders and offsets. A tensor may as well start as early as it can, so
    that every order needs one pass."""

    def fits(order: tuple[int, ...], size: int) -> bool:
        at = 0
        for index in order:
            meta = metas[index]
            for start in range(at, at + 2 * size + meta.numel + 1):
                first = (start // size + 1) * size
                if all(meta.is_cut(edge - start) for edge in range(first, start + meta.numel, size)):
                    break
            else:
                return False
            at = start + meta.numel
        return at <= size * ranks

    size = -(-sum(meta.numel for meta in metas) // ranks)
    while not any(fits(order, size) for order in permutations(range(len(metas)))):
        size += 1
    return size


def test_equal_segments_of_a_few_tensors_are_as_short_as_can_be() -> None:
    rng = random.Random(0)
    for number in range(100):
        ranks = rng.choice((2, 3, 4, 6, 9))
        metas = []
        for tensor in range(6 if number % 10 == 0 else rng.randint(1, 5)):
            unit, rows = rng.choice((1, 1, 2, 3, 4, 6, 8)), rng.randint(1, 8)
            shape, blocks = (rows, unit), ()
            if rng.random() < 0.3 and rows * unit > 1:
                first = rng.randint(1, rows * unit - 1)
                blocks = (first, rows * unit - first)
            metas.append(TensorMeta(f"t{tensor}", shape, unit, blocks))
        assert equal(metas, ranks, align=1).resident(0) == shortest(metas, ranks), metas


def test_equal_segments_of_a_decoder_block() -> None:
    width, hidden = 512, 1792
    shapes = [(width, width), (64, width), (64, width), (width, width)]
    shapes += [(hidden, width), (hidden, width), (width, hidden)]
    metas = [TensorMeta(f"w{number}", shape, shape[1]) for number, shape in enumerate(shapes)]
    for ranks in (2, 4, 8, 16, 17):
        layout = equal(metas, ranks)
        assert layout.legal().ok
        assert layout.padding <= 0.03 * layout.total
    element = [TensorMeta(meta.name, meta.shape, 1) for meta in metas]
    assert equal(element, 17).padding < 17 * ALIGN
