"""Bucket tables: layouts of contributions and of results, what is refused, and schedules."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from protos.buckets import LINE_BYTES, Bucket, BucketTable, BucketTableError, MeanRule, TableSchedule
from protos.codecs import CodecSpec, round_up


def matrix(name: str = "w", shape: tuple[int, ...] = (24, 40), codec: str = "fp32", **fields: str) -> Bucket:
    return Bucket.of(name, "mean", [(f"{name}/x", shape)], codec=codec, **fields)


def basis(source: str = "w", shape: tuple[int, ...] = (24, 3), name: str = "w/basis") -> Bucket:
    return Bucket.of(name, "basis", [(f"{name}/x", shape)], source=source)


def vote(name: str = "v", elements: int = 700) -> Bucket:
    return Bucket.of(name, "majority", [(f"{name}/x", (elements,))])


def mixed() -> BucketTable:
    return BucketTable(
        (
            vote(),
            matrix("w", codec="1bit", result="int8"),
            basis(),
            Bucket.of("[vectors]", "mean", [("a", (5,)), ("b", ()), ("c", (3, 2))]),
        ),
        MeanRule(clip=3.0, trim=1),
    )


# ------------------------------------------------------------------ layout


@pytest.mark.parametrize(
    "name", ["fp32", "bf16", "int8", "int4:8", "2bit", "ternary", "1bit", "1bit-row", "lowrank:4+1bit"]
)
def test_a_mean_has_the_size_of_its_codecs_in_whole_lines(name: str) -> None:
    for shape in ((24, 40), (7,), (1,), (3, 5, 7)):
        spec = CodecSpec.parse(name)
        bucket = matrix(shape=shape, codec=name)
        assert bucket.nbytes == bucket.result_nbytes == round_up(spec.nbytes(shape), LINE_BYTES)
        other = matrix(shape=shape, codec=name, result="fp32")
        assert other.nbytes == bucket.nbytes
        assert other.result_nbytes == round_up(4 * bucket.elements, LINE_BYTES)


def test_a_codec_sees_several_tensors_as_one_vector() -> None:
    bucket = Bucket.of("[vectors]", "mean", [("a", (5, 4)), ("b", ()), ("c", (3,))], codec="2bit")
    assert bucket.shape == (24,) and bucket.elements == 24
    assert [member.start for member in bucket.members] == [0, 20, 21]
    assert bucket.nbytes == 64  # one scale, not one for each row of a
    assert matrix(shape=(5, 4, 2)).shape == (5, 4, 2)


def test_a_basis_comes_only_in_results() -> None:
    assert basis().nbytes == 0
    assert basis().result_nbytes == round_up(4 * 24 * 3, LINE_BYTES)


def test_contributions_and_results_have_layouts_of_their_own() -> None:
    table = mixed()
    sizes = [128, round_up(128 + 4, 64), 0, 64]
    assert [bucket.nbytes for bucket in table.buckets] == sizes
    assert table.offsets == (0, 128, 320, 320) and table.nbytes == 384
    results = [128, round_up(4 * 4 + 960, 64), 320, 64]
    assert [bucket.result_nbytes for bucket in table.buckets] == results
    assert table.result_offsets == (0, 128, 1152, 1472) and table.result_nbytes == 1536
    assert table.elements == 700 + 960 + 12
    assert table.sections() == (
        ("majority", 0, 128),
        ("mean", 128, 320),
        ("basis", 320, 320),
        ("mean", 320, 384),
    )


def test_every_bucket_starts_at_a_line() -> None:
    table = mixed()
    assert not any(offset % LINE_BYTES for offset in table.offsets + table.result_offsets)


def number(name: str = "v/scale", **fields: Any) -> Bucket:
    return Bucket.of(name, "mean", [(name, (3,))], padded=False, **fields)


def test_single_numbers_lie_side_by_side_at_the_end() -> None:
    table = BucketTable((vote(), matrix(), number(), number("w/scale")))
    assert table.offsets == table.result_offsets == (0, 128, 3968, 3980)
    assert table.nbytes == table.result_nbytes == 3992
    assert BucketTable.from_json(table.to_json()) == table
    assert table.part({"v", "w/scale"}).offsets == (0, 128)
    with pytest.raises(BucketTableError, match="'w' does not start at a line: it comes behind 'v/scale'"):
        BucketTable((number(), matrix()))
    for field in ({"codec": "int8"}, {"result": "int8"}):
        with pytest.raises(BucketTableError, match="only a mean of fp32 goes without padding"):
            BucketTable((number(**field),))
    with pytest.raises(BucketTableError, match="only a mean of fp32 goes without padding"):
        BucketTable((replace(vote(), padded=False),))


# ------------------------------------------------------------------ what is refused


def test_names_and_tensors_are_unique() -> None:
    with pytest.raises(BucketTableError, match="'v' is there twice"):
        BucketTable((vote(), replace(vote(), members=matrix().members)))
    with pytest.raises(BucketTableError, match="'v/x' is in two buckets"):
        BucketTable((vote(), replace(vote(), name="u")))


def test_members_are_back_to_back() -> None:
    bucket = Bucket.of("b", "mean", [("a", (5,)), ("c", (3,))])
    gap = replace(bucket, members=(bucket.members[0], replace(bucket.members[1], start=6)))
    with pytest.raises(BucketTableError, match="'c' starts at 6, not 5"):
        BucketTable((gap,))


@pytest.mark.parametrize("shape", [(0,), (3, 0), (-3,), (-2, -3)])
def test_a_bucket_without_elements_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(BucketTableError, match="holds no elements"):
        BucketTable((matrix(shape=shape),))
    with pytest.raises(BucketTableError, match="holds no elements"):
        BucketTable((Bucket.of("b", "mean", [("a", (7,)), ("c", shape)]),))
    with pytest.raises(BucketTableError, match="holds no elements"):
        BucketTable((Bucket.of("b", "mean", []),))


def test_unknown_codecs_and_reductions_are_refused() -> None:
    with pytest.raises(BucketTableError, match="bucket 'w': unknown codec 'int7'"):
        BucketTable((matrix(codec="int7"),))
    with pytest.raises(BucketTableError, match="bucket 'w': codec 'lowrank': write the rank"):
        BucketTable((matrix(codec="fp32", result="lowrank"),))
    with pytest.raises(BucketTableError, match="must be majority, mean or basis, not 'median'"):
        BucketTable((replace(matrix(), reduce="median"),))  # type: ignore[arg-type]


def test_a_basis_is_of_an_earlier_mean_of_a_matrix() -> None:
    assert BucketTable((matrix(), basis())).result_nbytes == 24 * 40 * 4 + 320
    assert BucketTable((matrix(shape=(40, 24)), basis())).buckets[1].source == "w"
    assert BucketTable((matrix(shape=(8, 3, 5)), basis(shape=(8, 2)))).buckets[1].shape == (8, 2)
    for buckets in (
        (basis(), matrix()),
        (matrix(), basis(source="")),
        (vote("w"), basis()),
        (matrix(shape=(960,)), basis()),
        (Bucket.of("w", "mean", [("a", (24, 40)), ("b", (3,))]), basis()),
    ):
        with pytest.raises(BucketTableError, match="is no earlier mean bucket of a matrix"):
            BucketTable(buckets)
    for shape in ((40, 3), (24, 25), (24,), (24, 3, 1)):
        with pytest.raises(BucketTableError, match=r"a basis of \[24, 40\] is \[24, rank\]"):
            BucketTable((matrix(), basis(shape=shape)))
    with pytest.raises(BucketTableError, match="only a basis has a source"):
        BucketTable((matrix(), matrix("u", source="w")))


@pytest.mark.parametrize("rule", [MeanRule(clip=-1.0), MeanRule(clip=float("nan")), MeanRule(trim=-1)])
def test_a_rule_that_means_nothing_is_refused(rule: MeanRule) -> None:
    with pytest.raises(BucketTableError, match="must be a number from 0 on"):
        BucketTable((matrix(),), rule)


# ------------------------------------------------------------------ JSON and digests


def test_json_keeps_everything() -> None:
    table = mixed()
    again = BucketTable.from_json(table.to_json())
    assert again == table and again.digest == table.digest
    assert (
        again.rule == MeanRule(3.0, 1)
        and again.buckets[1].result == "int8"
        and again.buckets[2].source == "w"
    )


def test_every_field_is_in_the_digest() -> None:
    table = mixed()
    vectors = table.buckets[3]
    changed = [
        replace(table, rule=MeanRule(clip=2.0, trim=1)),
        replace(table, rule=MeanRule(clip=3.0, trim=0)),
        replace(table, buckets=table.buckets[:3], numbers=()),
        replace(table, numbers=tuple(reversed(table.numbers))),
        replace(table, buckets=(*table.buckets[:3], replace(vectors, name="[rest]"))),
        replace(table, buckets=(*table.buckets[:3], replace(vectors, reduce="majority"))),
        replace(table, buckets=(*table.buckets[:3], replace(vectors, codec="bf16"))),
        replace(table, buckets=(*table.buckets[:3], replace(vectors, result="bf16"))),
        replace(table, buckets=(*table.buckets[:3], replace(vectors, padded=False))),
        replace(
            table,
            buckets=(*table.buckets[:3], Bucket.of("[vectors]", "mean", [("a", (6,)), ("c", (3, 2))])),
        ),
        replace(table, buckets=(vote("u"), *table.buckets[1:])),
        BucketTable((table.buckets[1], table.buckets[0], *table.buckets[2:]), table.rule),
    ]
    digests = {other.digest for other in changed}
    assert len(digests) == len(changed) and table.digest not in digests


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{}",
        "[[0,0]]",
        "[[0,0],[[]]]",
        '[[0,0],[["w"]]]',
        '[["x",0],[]]',
        "[[0,1e999],[]]",
        '[[0,0],[["w","mean",[["x",["y"]]],"fp32","fp32","",true]]]',
        '[[0,0],[["w","mean",[["x",[1e999]]],"fp32","fp32","",true]]]',
        '[[0,0],[["w","mean",7,"fp32","fp32","",true]]]',
        '[[0,0],[["w","mean",[["x",[3]]],"fp33","fp32","",true]]]',
        '[[0,0],[["w","mean",[["x",[3]]],"fp32","fp32",""]]]',
    ],
)
def test_other_json_is_no_table(text: str) -> None:
    with pytest.raises(BucketTableError):
        BucketTable.from_json(text)


def test_json_is_canonical() -> None:
    text = mixed().to_json()
    assert BucketTable.from_json(json.dumps(json.loads(text), indent=3)).to_json() == text


# ------------------------------------------------------------------ schedules


def test_tables_take_turns() -> None:
    small, large = BucketTable((matrix(),)), mixed()
    schedule = TableSchedule((small, large), (0, 1, 1))
    assert [schedule.of(index) is large for index in range(6)] == [False, True, True] * 2
    assert schedule.nbytes == max(small.nbytes, large.nbytes) == 3840
    assert schedule.result_nbytes == 3840
    mean, result_mean = schedule.mean_nbytes
    assert mean == pytest.approx((3840 + 2 * 384) / 3) and result_mean == pytest.approx((3840 + 2 * 1536) / 3)
    assert TableSchedule((small,)).of(10**9) is small


def test_the_digest_of_a_schedule_knows_tables_and_order() -> None:
    small, large = BucketTable((matrix(),)), mixed()
    schedules = [
        TableSchedule((small,)),
        TableSchedule((large,)),
        TableSchedule((small, large), (0, 1)),
        TableSchedule((small, large), (1, 0)),
        TableSchedule((large, small), (0, 1)),
        TableSchedule((small, large), (0, 1, 1)),
    ]
    assert len({schedule.digest for schedule in schedules}) == len(schedules)
    assert TableSchedule((small, large), (0, 1)).digest == schedules[2].digest


@pytest.mark.parametrize("cycle", [(), (0,), (0, 2), (0, 1, 2), (1, -1)])
def test_a_cycle_uses_all_tables_and_no_others(cycle: tuple[int, ...]) -> None:
    with pytest.raises(BucketTableError, match="does not use all of 2 tables"):
        TableSchedule((BucketTable((matrix(),)), mixed()), cycle)
