"""What a round in flight makes of its contributions: jobs that come back too late, means and their memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from optim.aggregate import ReducerMemory
from optim.bits import tally
from optim.reduce import reduce_payloads
from protos.buckets import BucketTable
from tests.coordinator.active_round_rig import BIG_PIECE, Case, big
from tests.coordinator.contribution_rig import coded_table, mixed_table, voted_table
from tests.coordinator.coordinator_rig import HeldPool, InlinePool


def test_a_job_of_a_void_attempt_is_dropped() -> None:
    pool = HeldPool()
    case = Case(3, table=big(), pool=pool, piece=BIG_PIECE)
    uploads = [case.begin(i) for i in range(3)]
    for i, upload in enumerate(uploads):
        case.upload(i, upload, BIG_PIECE)
    assert len(pool.jobs) == 1
    case.round.lost("n2", uploads[2])
    case.round.departed("n2")
    assert len(pool.jobs) == 1  # one at a time: rows may be in use
    pool.run()
    for i in (0, 1):
        case.finish(i, uploads[i])
    pool.run()
    assert case.closed[0].voters == ("n0", "n1")
    assert case.result() == case.expected(0, 1)


def test_a_job_that_ends_after_the_round_is_dropped() -> None:
    pool = HeldPool()
    case = Case(2, table=big(), pool=pool, piece=BIG_PIECE)
    uploads = [case.begin(i) for i in range(2)]
    for i, upload in enumerate(uploads):
        case.upload(i, upload, BIG_PIECE)
        case.round.refuse(f"n{i}", upload)
    assert case.closed[0].voters == ()
    pool.run()
    assert case.round.result.frames == []


def test_the_commit_waits_for_the_reducer() -> None:
    pool = HeldPool()
    case = Case(2, table=big(), pool=pool, piece=BIG_PIECE)
    case.deliver(0, 1)
    assert not case.closed and case.round.verdict is not None
    case.round.departed("n1")  # closing: the voters are fixed
    pool.run()
    assert case.closed[0].voters == ("n0", "n1")
    assert case.result() == case.expected(0, 1)


@pytest.mark.parametrize("table", [voted_table(8), big()])
def test_a_broken_reducer_ends_the_round_with_a_reason(table: BucketTable) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise MemoryError("no memory")

    case = Case(2, table=table, tally=broken, piece=BIG_PIECE)
    case.deliver(0, 1)
    assert [verdict.action for verdict in case.closed] == ["fail"]
    assert "the reducer failed in round 6" in case.closed[0].reason
    assert "no memory" in case.closed[0].reason


def test_mixed_buckets() -> None:
    case = Case(3, table=mixed_table())
    case.deliver(2, 0, 1)
    assert case.result()[:64] == case.expected(0, 1, 2)[:64]
    means = [np.frombuffer(p[64 : 64 + 68], "<f4").astype(np.float64) for p in case.payloads]
    assert case.result()[64 : 64 + 68] == ((means[0] + means[1] + means[2]) / 3).astype("<f4").tobytes()


def reduced(case: Case, *voters: int, memory: ReducerMemory | None = None) -> bytes:
    """What the reducer of a simulation makes of the voters' payloads."""
    result = reduce_payloads(
        case.table,
        [torch.frombuffer(bytearray(case.payloads[i]), dtype=torch.uint8) for i in voters],
        round_index=case.round.round,
        mean_weights=[case.round.members[f"n{i}"].samples for i in voters],
        memory=memory,
    )
    assert result is not None
    return result.numpy().tobytes()


def contents(memory: ReducerMemory) -> dict[str, bytes]:
    return {key: array.tobytes() for key, array in memory.arrays().items()}


@pytest.mark.parametrize("pool", [InlinePool(), HeldPool()])
def test_encoded_buckets_and_bases(pool: Any) -> None:
    case = Case(3, table=coded_table(), pool=pool, memory=ReducerMemory())
    for i, samples in enumerate((32, 16, 8)):
        case.round.members[f"n{i}"].samples = samples
    case.deliver(1, 0, 2)
    if isinstance(pool, HeldPool):
        assert pool.jobs  # a basis is never found on the event loop
        pool.run()
    assert case.closed[0].voters == ("n0", "n1", "n2")
    assert case.result() == reduced(case, 0, 1, 2)
    assert len(case.result()) == case.table.result_nbytes


def test_the_memory_moves_on_with_the_commit_only() -> None:
    """A member is lost after its bucket was reduced and sent: the attempt without it starts from the same
    memory."""
    memory, expected = ReducerMemory(), ReducerMemory()
    table = coded_table()
    for _ in range(2):
        case = Case(3, table=table, memory=memory)
        before = contents(memory)
        uploads = [case.begin(i) for i in range(3)]
        for i, upload in enumerate(uploads):
            case.upload(i, upload, table.offsets[4])
        assert case.round.result.frames
        assert contents(memory) == before
        case.round.lost("n1", uploads[1])
        case.round.departed("n1")
        case.finish(0, uploads[0])
        assert contents(memory) == before
        case.finish(2, uploads[2])
        assert case.round.result.attempt == 1
        assert case.result() == reduced(case, 0, 2, memory=expected)
        assert contents(memory) == contents(expected) != before


def test_a_round_without_contributions_leaves_the_memory_alone() -> None:
    memory = ReducerMemory()
    Case(2, table=coded_table(), memory=memory).deliver(0, 1)
    before = contents(memory)
    case = Case(2, table=coded_table(), memory=memory)
    case.abstain(0)
    case.abstain(1)
    assert case.round.result.committed
    assert contents(memory) == before


def test_an_error_of_a_void_attempt_does_not_end_the_round() -> None:
    """Its rows may have been written to again while it read them."""
    calls = []

    def fails_once(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise ValueError("garbage")
        return tally(*args, **kwargs)

    class Failing(HeldPool):
        def run(self) -> None:
            while self.jobs:
                work, done = self.jobs.pop(0)
                try:
                    frames = work()
                except ValueError as error:
                    done(None, error)
                else:
                    done(frames, None)

    pool = Failing()
    case = Case(3, table=big(), pool=pool, piece=BIG_PIECE, tally=fails_once)
    uploads = [case.begin(i) for i in range(3)]
    for i, upload in enumerate(uploads):
        case.upload(i, upload, BIG_PIECE)
    case.round.lost("n2", uploads[2])
    case.round.departed("n2")
    pool.run()
    for i in (0, 1):
        case.finish(i, uploads[i])
    pool.run()
    assert case.closed[0].voters == ("n0", "n1")
    assert case.result() == case.expected(0, 1)
