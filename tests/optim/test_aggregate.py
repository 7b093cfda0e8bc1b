"""The reduction of encoded contributions against one that reads like its definition."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import optim.aggregate
from optim.aggregate import ReducerMemory, casting_voter
from optim.codecs import codec_of
from optim.lordo.basis import compute_basis
from protos.buckets import Bucket, BucketTable, MeanRule
from tests.optim.aggregate_rig import CODECS, Reference, begun, contribution, decoded, mixed, reduced


def single(codec: str, shape: tuple[int, ...], result: str | None = None, **rule: float) -> BucketTable:
    table = (Bucket.of("w", "mean", [("w", shape)], codec=codec, result=result),)
    return BucketTable(table, MeanRule(**rule))  # type: ignore[arg-type]


@pytest.mark.parametrize("codec", CODECS)
def test_equals_the_reference_over_rounds(codec: str) -> None:
    """Voters come and go; residuals, bases and warm starts are carried on."""
    table, memory = mixed(codec), ReducerMemory()
    reference = Reference(table)
    for round_index, weights in enumerate([(1,), (1, 1, 1), (3, 1), (7, 70, 2, 9, 1), (2, 2)]):
        payloads = [contribution(10 * round_index + i, table) for i in range(len(weights))]
        result = reduced(table, payloads, memory, round_index=round_index, weights=weights)
        assert result == reference.reduce(payloads, round_index, weights), round_index


@pytest.mark.parametrize("result", CODECS)
@pytest.mark.parametrize("codec", ["fp32", "int8", "2bit"])
def test_a_result_may_have_a_codec_of_its_own(codec: str, result: str) -> None:
    table, memory = mixed(codec, result), ReducerMemory()
    reference = Reference(table)
    for round_index in range(3):
        payloads = [contribution(10 * round_index + i, table) for i in range(3)]
        found = reduced(table, payloads, memory, round_index=round_index)
        assert found == reference.reduce(payloads, round_index)
        assert len(found) == table.result_nbytes


@pytest.mark.parametrize(
    ("codec", "result"),
    [(codec, "2bit") for codec in ("fp32", "bf16", "int8", "int4:6", "2bit", "ternary", "1bit-row")]
    + [("int8:16", result) for result in ("fp32", "bf16", "int8", "int4:6", "ternary", "1bit", "lowrank:2")],
)
@pytest.mark.parametrize("shape", [(40, 33), (1320,), (6, 5, 44)])
def test_runs_change_nothing(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], codec: str, result: str
) -> None:
    """A bucket that is decoded and encoded in runs has the bytes of one that is worked on as a whole."""
    table = single(codec, shape, result)
    payloads = [contribution(i, table) for i in range(3)]
    outcomes = []
    for elements in (1 << 20, 300, 1):
        monkeypatch.setattr(optim.aggregate, "RUN_ELEMENTS", elements)
        memory = ReducerMemory()
        rounds = [reduced(table, payloads, memory, round_index=index) for index in range(2)]
        outcomes.append((rounds, {key: value.tobytes() for key, value in memory.arrays().items()}))
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert outcomes[0][0][0] == Reference(table).reduce(payloads, 0)


def test_a_residual_is_what_the_last_result_lost() -> None:
    """Results of the same contribution average to it, although each alone is coarse."""
    table, memory = single("fp32", (50, 40), "2bit"), ReducerMemory()
    payload = contribution(1, table)
    wanted = decoded(table.buckets[0], payload, 0)
    total, errors = np.zeros((50, 40)), []
    for round_index in range(1, 65):
        result = np.frombuffer(reduced(table, [payload], memory, round_index=round_index), np.uint8)
        total += decoded(table.buckets[0], result, 0, result=True)
        errors.append(np.linalg.norm(total / round_index - wanted) / np.linalg.norm(wanted))
    assert errors[0] > 0.3
    assert errors[-1] < 0.05


def test_an_exact_result_leaves_nothing_behind() -> None:
    table, memory = single("int4", (9, 9), "fp32"), ReducerMemory()
    reduced(table, [contribution(0, table)] * 2, memory)
    assert memory.arrays() == {}


def test_the_mean_of_equal_contributions_is_each_of_them() -> None:
    """In fp32, bit for bit, whatever the weights."""
    table = single("fp32", (31, 7), clip=4.0)  # not streamed, but decoded
    payload = contribution(0, table)
    for weights in ([1] * 3, [5, 7, 11], [65535 * 1024] * 5):
        assert reduced(table, [payload] * len(weights), ReducerMemory(), weights=weights) == payload.tobytes()


def test_only_the_ratio_of_weights_matters() -> None:
    table = mixed("fp32")
    payloads = [contribution(i, table) for i in range(3)]
    results = {
        reduced(table, payloads, ReducerMemory(), weights=[factor * w for w in (1, 3, 2)])
        for factor in (1, 3, 48, 4800)
    }
    assert len(results) == 1


# ------------------------------------------------------------------ memory


@pytest.mark.parametrize("codec", ["int4", "lowrank:3"])
def test_an_attempt_that_comes_to_nothing_leaves_no_trace(codec: str) -> None:
    """Other voters are tried first: the committed attempt is what it would have been without that."""
    table = mixed(codec)
    first, second = ([contribution(10 * r + i, table) for i in range(3)] for r in range(2))
    plain, tried = ReducerMemory(), ReducerMemory()
    for memory in (plain, tried):
        reduced(table, first, memory)
    before = {key: value.tobytes() for key, value in tried.arrays().items()}
    speculative, _ = begun(table, second[:2], tried, round_index=1)
    assert {key: value.tobytes() for key, value in tried.arrays().items()} == before
    expected = reduced(table, second, plain, round_index=1)
    assert reduced(table, second, tried, round_index=1) == expected != speculative
    assert {k: v.tobytes() for k, v in tried.arrays().items()} == {
        k: v.tobytes() for k, v in plain.arrays().items()
    }


def test_a_lost_memory_begins_afresh() -> None:
    """After a restart residuals are zero and the basis is that of the present mean alone."""
    table, memory = mixed("int4"), ReducerMemory()
    payloads = [contribution(i, table) for i in range(2)]
    reduced(table, payloads, memory)
    again = Reference(table).reduce(payloads, 5)
    assert reduced(table, payloads, ReducerMemory(), round_index=5) == again
    assert reduced(table, payloads, memory, round_index=5) != again


def test_a_memory_survives_a_checkpoint() -> None:
    table, memory = mixed("lowrank:2+int4:16"), ReducerMemory()
    rounds = [[contribution(10 * r + i, table) for i in range(2)] for r in range(3)]
    for index in range(2):
        reduced(table, rounds[index], memory, round_index=index)
    restored = ReducerMemory()
    restored.load({key: value.copy() for key, value in memory.arrays().items()})
    expected = reduced(table, rounds[2], memory, round_index=2)
    assert reduced(table, rounds[2], restored, round_index=2) == expected


def test_a_memory_of_another_model_is_not_used() -> None:
    small, large = single("int4", (8, 8)), single("int4", (8, 9))
    memory = ReducerMemory()
    reduced(small, [contribution(0, small)], memory)
    payload = contribution(1, large)
    assert reduced(large, [payload], memory) == Reference(large).reduce([payload], 0)


def test_packs_of_one_name_in_two_tables_have_their_own_residuals() -> None:
    """Fragments of a model each have their bucket of vectors."""
    tables = [BucketTable((Bucket.of("[vectors]", "mean", [(name, (40,))], codec="2bit"),)) for name in "ab"]
    together, apart = ReducerMemory(), [ReducerMemory(), ReducerMemory()]
    for round_index in range(6):
        table = tables[round_index % 2]
        payload = contribution(round_index, table)
        expected = reduced(table, [payload], apart[round_index % 2], round_index=round_index)
        assert reduced(table, [payload], together, round_index=round_index) == expected


# ------------------------------------------------------------------ bases


def test_a_basis_follows_the_mean_of_its_source() -> None:
    """Of the mean itself, not of its encoding; warm-started from the last committed one."""
    table, memory = mixed("int8", "2bit"), ReducerMemory()
    previous = None
    for round_index in range(3):
        payloads = [contribution(10 * round_index + i, table) for i in range(2)]
        values = [decoded(table.buckets[1], p, table.offsets[1]) for p in payloads]
        mean = ((values[0].astype(np.float64) + values[1]) / 2).astype(np.float32)
        expected = compute_basis(mean, 4, previous)
        result = np.frombuffer(reduced(table, payloads, memory, round_index=round_index), np.uint8)
        start = table.result_offsets[2]
        basis = result[start : start + 4 * 23 * 4].view("<f4").reshape(23, 4)
        assert basis.tobytes() == expected.tobytes()
        previous = expected


# ------------------------------------------------------------------ rules for outliers


def brute_force(rows: np.ndarray, weights: Sequence[int], clip: float, trim: int) -> np.ndarray:
    """Entry by entry with lists."""
    rows = rows.astype(np.float64)
    if clip:
        norms = [float(np.sqrt((row**2).sum())) for row in rows]
        middle = sorted(norms)[len(norms) // 2]
        if len(norms) % 2 == 0:
            middle = (middle + sorted(norms)[len(norms) // 2 - 1]) / 2
        for row, norm in zip(rows, norms, strict=True):
            if norm > clip * middle:
                row *= clip * middle / norm
    while trim and 2 * trim >= len(rows):
        trim -= 1
    means = []
    for column in rows.reshape(len(rows), -1).T:
        order = sorted(range(len(column)), key=lambda i: (column[i], i))
        kept = sorted(order[trim : len(column) - trim])
        total = sum(column[i] * weights[i] for i in kept)
        means.append(total / sum(weights[i] for i in kept))
    return np.array(means).reshape(rows.shape[1:])


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 9),
    st.sampled_from([0.0, 0.5, 1.0, 1.5, 100.0]),
    st.integers(0, 5),
    st.sampled_from(["fp32", "int8", "1bit"]),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_clip_and_trim_equal_brute_force(
    voters: int, clip: float, trim: int, codec: str, even: bool, seed: int
) -> None:
    table = single(codec, (5, 9), "fp32", clip=clip, trim=trim)
    rng = np.random.default_rng(seed)
    weights = [1 if even else int(w) for w in rng.integers(1, 50, voters)]
    # Magnitudes differ by orders; coarse codecs make ties.
    payloads = [contribution(seed + i, table, float(10.0 ** rng.integers(-3, 4))) for i in range(voters)]
    result = np.frombuffer(reduced(table, payloads, ReducerMemory(), weights=weights), np.uint8)
    rows = np.stack([decoded(table.buckets[0], payload, 0) for payload in payloads])
    expected = brute_force(rows, weights, clip, trim)
    found = decoded(table.buckets[0], result, 0, result=True)
    np.testing.assert_allclose(found, expected, rtol=3e-7, atol=1e-12 * float(np.abs(rows).max()))


@pytest.mark.parametrize("rule", [{"trim": 1}, {"clip": 2.0}, {"clip": 1.0, "trim": 2}])
def test_one_attacker_moves_the_mean_by_a_bounded_amount(rule: dict[str, float]) -> None:
    table = single("fp32", (20, 20), **rule)
    honest = [contribution(i, table) for i in range(6)]
    attacker = contribution(99, table, 1e30)
    rows = np.stack([decoded(table.buckets[0], payload, 0) for payload in honest])
    result = np.frombuffer(reduced(table, [*honest, attacker], ReducerMemory()), np.uint8)
    found = decoded(table.buckets[0], result, 0)
    assert np.abs(found).max() <= np.abs(rows).max() * 2
    plain = single("fp32", (20, 20))
    undefended = np.frombuffer(reduced(plain, [*honest, attacker], ReducerMemory()), np.uint8)
    assert np.abs(decoded(plain.buckets[0], undefended, 0)).max() > 1e28


@pytest.mark.parametrize("rule", [{"trim": 2}, {"clip": 1.0}, {"clip": 1.0, "trim": 1}])
@pytest.mark.parametrize("codec", ["int4:8", "1bit-row", "lowrank:3"])  # the last cannot be cut
def test_rules_are_the_same_in_runs(
    monkeypatch: pytest.MonkeyPatch, rule: dict[str, float], codec: str
) -> None:
    table = single(codec, (30, 24), **rule)
    payloads = [contribution(i, table, 1.0 + i) for i in range(5)]
    whole = reduced(table, payloads, ReducerMemory())
    monkeypatch.setattr(optim.aggregate, "RUN_ELEMENTS", 40)
    assert reduced(table, payloads, ReducerMemory()) == whole


def test_a_single_voter_is_neither_clipped_nor_trimmed() -> None:
    table = single("fp32", (8, 8), clip=1.0, trim=3)
    payload = contribution(0, table)
    assert reduced(table, [payload], ReducerMemory()) == payload.tobytes()


# ------------------------------------------------------------------ the rest


@pytest.mark.parametrize("codec", CODECS)
def test_the_largest_numbers_do_no_harm(codec: str) -> None:
    """What a peer may send and goes through the checks must not end a run: results stay finite for ever."""
    table, memory = mixed(codec), ReducerMemory()
    largest = np.finfo(np.float32).max
    payload = contribution(0, table)
    for bucket, start in zip(table.buckets, table.offsets, strict=True):
        if bucket.reduce == "mean":
            codec_ = codec_of(bucket.codec, bucket.shape)
            part = payload[start : start + codec_.nbytes]
            rng = np.random.default_rng(1)
            codec_.encode(
                np.where(rng.random(bucket.shape) < 0.6, largest, -largest).astype(np.float32), part
            )
            assert codec_.problem(part) == ""
    for round_index in range(4):
        result = np.frombuffer(reduced(table, [payload] * 2, memory, round_index=round_index), np.uint8)
        for bucket, start in zip(table.buckets, table.result_offsets, strict=True):
            if bucket.reduce != "majority":
                assert np.isfinite(decoded(bucket, result, start, result=True)).all(), bucket.name


def test_the_casting_vote_rotates() -> None:
    assert [casting_voter(r, 3) for r in range(4)] == [0, 1, 2, 0]
    assert casting_voter(5, 0) == 0
