"""The bench of a round: its figures from made-up rows of four nodes, and the run that its nodes make."""

from __future__ import annotations

import pytest

from bench import round as bench_round
from bench.round import NODES, PAYLOAD, Row
from protos.ring import RING_BYTES, RING_ROUNDS
from protos.runfile import RunFile

LENGTHS = {  # seconds of the phases of a node
    "start": 0.0,
    "signs": 0.1,
    "packed": 0.2,  # behind a barrier
    "sent": 0.5,
    "received": 0.9,
    "apply_start": 1.0,
    "applied": 1.25,
    "raw_start": 2.0,
    "raw_end": 2.35,
    "blocking_start": 3.0,
    "blocking_end": 3.2,
    "grpc_start": 4.0,
    "grpc_end": 4.5,
}


def row(shift: float = 0.0, tally: float = 0.04, **later: float) -> Row:
    """A repetition at one node, begun at ``shift``; ``later`` moves single marks."""
    return {**{k: shift + v + later.get(k, 0.0) for k, v in LENGTHS.items()}, "tally": tally}


def rows(**of_the_last: float) -> list[list[Row]]:
    """Of nodes that agree but for the last one, in five repetitions of which two were held up."""
    held = {"received": 50.0, "raw_end": 50.0, "applied": 50.0}
    return [
        [
            row(10.0 * index, **(held if index > 2 else of_the_last if node == NODES - 1 else {}))
            for index in range(5)
        ]
        for node in range(NODES)
    ]


def test_a_round_lasts_from_the_first_to_the_last_node() -> None:
    figures = bench_round._report(rows()).figures
    assert figures["round_seconds"] == pytest.approx(0.7)
    assert figures["floor_seconds"] == pytest.approx(0.35)
    assert figures["round_over_floor"] == pytest.approx(2.0)
    assert figures["step_seconds"] == pytest.approx(0.7 + 0.1 + 0.25), "what waits at a barrier is no step"
    late = bench_round._report(rows(packed=-0.1, sent=0.2, signs=0.05, applied=0.1)).figures
    assert late["round_seconds"] == pytest.approx(0.8), "the first that was ready was one of four"
    assert late["step_seconds"] == pytest.approx(0.8 + 0.15 + 0.35)
    assert late["floor_seconds"] == pytest.approx(0.35)


def test_every_floor_stands_beside_the_round() -> None:
    report = bench_round._report(rows())
    figures = report.figures
    assert figures["bare_grpc_seconds"] == pytest.approx(0.5)
    assert figures["blocking_floor_seconds"] == pytest.approx(0.2)
    assert figures["round_over_bare_grpc"] == pytest.approx(0.7 / 0.5)
    assert figures["bare_grpc_over_floor"] == pytest.approx(0.5 / 0.35)
    assert figures["round_over_blocking_floor"] == pytest.approx(3.5)
    assert figures["step_over_floor"] == pytest.approx(3.0)
    names = [name for name in figures if "_over_" in name]
    assert list(figures)[: len(names)] == names, "ratios come first"


def test_phases_are_those_of_a_node() -> None:
    report = bench_round._report(rows(sent=0.2))  # one of four: no median
    phases = {"pack": 0.1, "send": 0.3, "receive": 0.4, "apply": 0.25, "tally": 0.04}
    assert {name: report.figures[f"{name}_seconds"] for name in phases} == pytest.approx(phases)
    milliseconds = {str(name): value for name, value in report.tables[0].rows}
    assert milliseconds == pytest.approx(
        {name: 1e3 * seconds for name, seconds in phases.items()}
        | {"round": 700, "raw sockets, event loops": 350, "raw sockets, blocking": 200}
        | {"bare gRPC streams": 500}
    )


def test_a_round_of_more_than_three_floors_misses_the_bar() -> None:
    assert bench_round._report(rows()).missed() == []
    (missed,) = bench_round._report(rows(received=0.4)).missed()
    assert missed.startswith("round_over_floor is 3.14")


def test_nodes_that_have_measured_unlike_many_rounds_are_no_report() -> None:
    found = rows()
    found[-1].pop()
    with pytest.raises(ValueError, match="zip"):
        bench_round._report(found)


def test_the_run_is_one_that_the_coordinator_takes() -> None:
    run_file = RunFile.parse(bench_round.RUN_FILE)
    assert run_file.run.nodes == NODES
    tables = bench_round._tables()
    assert tables.nbytes == tables.result_nbytes == PAYLOAD
    kept = min(RING_ROUNDS, RING_BYTES // PAYLOAD)
    assert kept < bench_round.WARM_ROUNDS, "or new memory is taken while it measures"
