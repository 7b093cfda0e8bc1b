"""Layouts against brute force: every element once, no unit cut, boxes and pieces that agree."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.island.layout import (
    ALIGN,
    GroupLayout,
    LayoutError,
    Plan,
    TensorMeta,
    boxes,
    from_cuts,
    granularity_of,
    owned,
    ragged,
)
from node.island.placement import spread_owners

SPECS = ("element", "row", "rows:3", "block", "matrix", 5)


@st.composite
def tensor_metas(draw: st.DrawFn, largest: int = 6) -> list[TensorMeta]:
    metas = []
    for number in range(draw(st.integers(1, largest))):
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
        numel = prod(shape)
        if numel > 1 and draw(st.booleans()):
            cut = draw(st.integers(1, numel - 1))
            metas.append(TensorMeta(f"t{number}", shape, blocks=(cut, numel - cut)))
        else:
            spec = draw(st.sampled_from(SPECS))
            metas.append(TensorMeta(f"t{number}", shape, granularity_of(spec, shape)))
    return metas


def legal_cuts(meta: TensorMeta) -> set[int]:
    """Where the tensor may be cut, from the definition."""
    if meta.blocks:
        return {sum(meta.blocks[:n]) for n in range(len(meta.blocks) + 1)}
    unit = meta.granularity or max(1, meta.numel)
    return {*range(0, meta.numel, unit), meta.numel}


def check_cover(layout: GroupLayout) -> None:
    """Every element of every tensor is held once, where its offset says, and no unit is divided."""
    for index, meta in enumerate(layout.tensors):
        held = []
        for rank in range(layout.ranks):
            piece = layout.piece(index, rank)
            if piece is None:
                assert layout.boxes(index, rank) == []
                continue
            assert piece in layout.pieces(rank) and rank in layout.holders(index)
            assert layout.cuts[rank] + piece.offset == layout.offsets[index] + piece.start
            assert piece.offset + piece.numel <= layout.resident(rank)
            assert {piece.start, piece.start + piece.numel} <= legal_cuts(meta)
            held += range(piece.start, piece.start + piece.numel)
        assert held == list(range(meta.numel))
        whole = [r for r in range(layout.ranks) if (p := layout.piece(index, r)) and p.numel == meta.numel]
        assert layout.owner(index) == (whole[0] if whole else None)
    assert sum(layout.resident(rank) for rank in range(layout.ranks)) == layout.total
    assert layout.padding == layout.total - sum(meta.numel for meta in layout.tensors) >= 0
    assert sum(len(layout.pieces(rank)) for rank in range(layout.ranks)) == sum(
        layout.piece(i, r) is not None for i in range(len(layout.tensors)) for r in range(layout.ranks)
    )


@given(tensor_metas(), st.integers(1, 9), st.sampled_from((1, 4, ALIGN)), st.data())
def test_owned_layouts_keep_every_tensor_whole(
    metas: list[TensorMeta], ranks: int, align: int, data: st.DataObject
) -> None:
    owners = [data.draw(st.integers(0, ranks - 1)) for _ in metas]
    layout = owned(metas, owners, ranks, align=align)
    check_cover(layout)
    for index, meta in enumerate(metas):
        assert layout.owner(index) == (owners[index] if meta.numel else None)
        assert layout.offsets[index] % align == 0
    for rank in set(range(ranks)) - {o for o, meta in zip(owners, metas, strict=True) if meta.numel}:
        assert layout.resident(rank) == 0
    assert layout.padding < len(metas) * align + ranks


@given(tensor_metas(), st.integers(1, 9), st.sampled_from((1, 4, ALIGN)), st.data())
def test_ragged_layouts_cover_and_respect_units(
    metas: list[TensorMeta], ranks: int, align: int, data: st.DataObject
) -> None:
    shares = data.draw(
        st.none() | st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks).filter(lambda s: sum(s) > 0)
    )
    layout = ragged(metas, ranks, shares=shares, align=align)
    check_cover(layout)
    for rank, share in enumerate(shares or []):
        if share == 0:
            assert not layout.pieces(rank)
    assert layout.padding < len(metas) * align + ranks


def test_ragged_element_cuts_are_even() -> None:
    layout = ragged([TensorMeta("a", (13, 7), 1), TensorMeta("b", (50,), 1)], 4, align=1)
    assert {sum(piece.numel for piece in layout.pieces(rank)) for rank in range(4)} <= {35, 36}
    even = ragged([TensorMeta("a", (130, 7), 1)], 4, align=1)
    assert even.equal and even.padding == 2
    rows = ragged([TensorMeta("a", (64, 8), 8)], 4)
    assert rows.equal and rows.padding == 0 and rows.cuts == (0, 128, 256, 384, 512)
    assert ragged([TensorMeta("a", (8, 4), 4)], 3, shares=[1, 0, 1]).cuts == (0, 16, 16, 66)


@given(tensor_metas(largest=1))
def test_cuts_of_one_tensor_agree_with_the_definition(metas: list[TensorMeta]) -> None:
    meta = metas[0]
    legal = legal_cuts(meta)
    for position in range(meta.numel + 1):
        assert meta.is_cut(position) == (position in legal)
        nearest = meta.nearest_cut(position)
        assert nearest in legal
        assert abs(nearest - position) == min(abs(cut - position) for cut in legal)


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_boxes_are_the_range_in_memory_order(shape: list[int], data: st.DataObject) -> None:
    numel = prod(shape)
    start = data.draw(st.integers(0, numel - 1))
    count = data.draw(st.integers(0, numel - start))
    strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
    found = boxes(shape, start, count)
    elements: list[int] = []
    for box in found:
        inside = [
            sum((o + i) * s for o, i, s in zip(box.offsets, indices, strides, strict=True))
            for indices in product(*(range(length) for length in box.lengths))
        ]
        assert inside[0] == box.start
        elements += inside
    assert elements == list(range(start, start + count))
    assert len(found) <= max(1, 2 * len(shape) - 1)


def test_granularities_by_word() -> None:
    assert [granularity_of(spec, (6, 4, 2)) for spec in SPECS] == [1, 8, 24, 8, 48, 5]
    assert granularity_of("rows:128", (6, 4)) == 24
    assert granularity_of("row", (7,)) == 1
    for wrong in ("column", "rows:", "rows:0", 0):
        with pytest.raises(LayoutError, match="granularity"):
            granularity_of(wrong, (2, 2))


@given(tensor_metas(), st.integers(1, 5))
def test_json_and_hash(metas: list[TensorMeta], ranks: int) -> None:
    layout = ragged(metas, ranks)
    again = GroupLayout.from_json(layout.to_json())
    assert again == layout and again.hash() == layout.hash()
    assert layout.renamed("layers.0").tensors[0].name == "layers.0.t0"
    assert layout.renamed("x").hash() != layout.hash()
    plan = Plan((layout, layout.renamed("b")))
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.find("b.t0") == (1, layout.renamed("b"), 0)
    assert list(plan) == [m.name for m in metas] + [f"b.{m.name}" for m in metas] and "t0" in plan


@pytest.mark.parametrize(
    ("offsets", "cuts", "reason"),
    [
        ((0, 12), (0, 9, 20), "divides a at element 9"),
        ((0, 8), (0, 12, 20), "b starts at 8, inside a"),
        ((0, 12), (0, 12, 18), "ends at 20, after the last cut 18"),
        ((0, 12), (0, 12, 8), "do not ascend"),
        ((0, 12), (0, 12, 21), "no multiple of 2 ranks"),
        ((0,), (0, 12, 20), "2 tensors have 1 offsets"),
    ],
)
def test_illegal_layouts_say_why(offsets: tuple[int, ...], cuts: tuple[int, ...], reason: str) -> None:
    metas = [TensorMeta("a", (3, 4), 4), TensorMeta("b", (8,))]
    with pytest.raises(LayoutError, match=reason):
        from_cuts(metas, offsets, cuts)
    assert from_cuts(metas, (0, 12), (0, 12, 20)).legal() == (True, "")


def test_errors_name_the_tensor() -> None:
    meta = TensorMeta("w", (2, 3))
    with pytest.raises(LayoutError, match="w: owner 2 is not one of 2"):
        owned([meta], [2], 2)
    with pytest.raises(LayoutError, match="1 tensors have 0 owners"):
        owned([meta], [], 2)
    with pytest.raises(LayoutError, match="cannot have shares"):
        ragged([meta], 2, shares=[0, 0])
    with pytest.raises(LayoutError, match="a name occurs twice"):
        ragged([meta, meta], 2)
    with pytest.raises(LayoutError, match="no place for v"):
        Plan((owned([meta], [0], 1),)).find("v")
    with pytest.raises(LayoutError, match="blocks of"):
        TensorMeta("w", (2, 3), blocks=(2, 2))
    with pytest.raises(LayoutError, match="not the JSON of a layout"):
        GroupLayout.from_json('{"tensors": [], "offsets": []}')
    with pytest.raises(LayoutError, match="not the JSON of a plan"):
        Plan.from_json("[]")
    text = owned([TensorMeta("w", (2, 3))], [0], 2, align=1).to_json().replace("[0,6,6]", "[0,3,6]")
    with pytest.raises(LayoutError, match="divides w"):
        GroupLayout.from_json(text)


def test_owners_are_spread_within_a_layer_and_over_layers() -> None:
    shapes = [(8, 8)] * 4 + [(24, 8)] * 2 + [(8, 24)] + [(8,)] * 2
    metas = [TensorMeta(f"w{i}", shape) for i, shape in enumerate(shapes)]
    loads = [0.0] * 4
    for _ in range(8):
        owners = spread_owners(metas, loads)
        layer = [sum(m.numel for m, o in zip(metas, owners, strict=True) if o == r) for r in range(4)]
        assert max(layer) <= 4 * 64 + 16  # the four small matrices on one rank, a large one on each other
        assert owners[-1] == owners[-2]
    assert sum(loads) == 8 * sum(meta.numel for meta in metas)
    assert max(loads) <= 1.1 * min(loads)
