from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread
from rich.console import Console

from deploy import demo_results
from deploy.demo_results import Course, Results, agreement_of, course_of, with_ring_bytes
from deploy.event_log import EventReader

PARAMETERS = 4096
PAYLOAD = PARAMETERS // 8


def _log(node: int, rounds: int = 8, nodes: int = 3) -> list[dict[str, Any]]:
    """The events of one node as they stand in its file."""
    log: list[dict[str, Any]] = [{"event": "Started", "parameters": PARAMETERS, "round": 0}]
    for index in range(rounds):
        measured = index % nodes == node
        log.append(
            {
                "event": "RoundDone",
                "round": index,
                "rounds": rounds,
                "loss": 5.0 - 0.5 * index + 0.1 * (node - 1),
                "tokens": 100,
                "counted": True,
                "agreement": 0.7 + 0.1 * node,
                "digest": f"{index:032x}",
                "bytes_up": (index + 1) * PAYLOAD,
                "bytes_down": (index + 1) * PAYLOAD + 8,
                "compute_seconds": 0.8,
                "busy_seconds": 1.0,
                "seconds": {"compute": 0.9, "exchange": 0.2},
                "validation_loss": 4.0 - 0.25 * index if measured else None,
                "bits_per_byte": 6.0 if measured else None,
            }
        )
    return [*log, {"event": "Stopped", "done": True, "reason": "all rounds are done"}]


LOGS = [_log(node) for node in range(3)]


def _results(baseline: bool = True) -> Results:
    alone = with_ring_bytes(course_of("ddp-muon", [_log(0, nodes=1)], 5.0), 3)
    votes = course_of("sign-muon", LOGS, 4.0)
    return Results(votes, agreement_of(LOGS), alone if baseline else None, "ROMEO:\nWhat light", 12.0)


def test_the_course_is_put_together_from_all_nodes() -> None:
    course = course_of("sign-muon", LOGS, 4.0)
    assert course.steps == list(range(1, 9))
    assert course.losses == pytest.approx([5.0 - 0.5 * index for index in range(8)])
    assert [(step, loss) for step, loss, _ in course.checks] == [(i + 1, 4.0 - 0.25 * i) for i in range(8)]
    assert (course.validation_loss, course.bits_per_byte) == (2.25, 6.0)
    assert course.tokens == 8 * 300
    assert course.compute_share == pytest.approx(0.8) and course.busy_seconds == pytest.approx(8 * 3)
    assert course.agreement == pytest.approx(0.8)
    assert course.step_bytes_up == PAYLOAD and course.step_bytes_down == PAYLOAD + 1


def test_rounds_of_several_steps_count_as_so_many() -> None:
    logs = [[dict(event) for event in log] for log in LOGS]
    for log in logs:
        for event in log[1:-1]:
            event["micro_steps"] = 1 if event["round"] == 0 else 4
            event["agreement"] = math.nan
    course = course_of("lordo", logs, 4.0)
    assert course.steps == [1, 5, 9, 13, 17, 21, 25, 29] and course.last_step == 29
    assert [step for step, _, _ in course.checks] == course.steps
    assert course.step_bytes_up == pytest.approx(8 * PAYLOAD / 29)
    results = Results(course, agreement_of(logs), None, "", 1.0)
    console = Console(width=120, no_color=True, color_system=None)
    with console.capture() as capture:
        console.print(demo_results.summary(results))
    cells = [line.split() for line in capture.get().splitlines()]
    rows = {row[0]: row[-1] for row in cells if len(row) == 2}
    assert (rows["steps"], rows["exchanges"]) == ("29", "8")
    assert "agreement" not in capture.get()


def test_a_round_without_a_loss_leaves_a_gap() -> None:
    logs = [[dict(event) for event in log] for log in LOGS]
    for log in logs:
        log[3]["loss"] = None
    logs[0][4]["loss"] = None
    losses = course_of("sign-muon", logs, 4.0).losses
    assert math.isnan(losses[2])
    assert losses[3] == pytest.approx(3.5 + 0.05), "the mean of the other two"


def test_a_log_without_its_start() -> None:
    with pytest.raises(ValueError, match="lacks its start"):
        course_of("sign-muon", [*LOGS, []], 1.0)


def test_digests_are_compared_round_by_round() -> None:
    assert agreement_of(LOGS).holds
    assert agreement_of(LOGS).digest == f"{7:032x}"
    logs = [[dict(event) for event in log] for log in LOGS]
    logs[1][5]["digest"] = "0" * 32
    agreement = agreement_of(logs)
    assert (agreement.rounds, agreement.equal, agreement.holds) == (8, 7, False)
    assert not agreement_of([[], []]).holds, "nothing compared is nothing shown"


def test_bytes_against_the_ring() -> None:
    results = _results()
    assert results.ring_ratio == pytest.approx(2 * 8 * PARAMETERS * 2 / 3 / (2 * PAYLOAD + 1))
    assert results.baseline is not None
    assert results.baseline.step_bytes == pytest.approx(2 * 8 * PARAMETERS * 2 / 3)


def test_numbers_as_json() -> None:
    values = json.loads(_results().to_json())
    assert values["digests_equal"] is True and values["rounds_compared"] == 8
    assert values["votes"]["validation_loss"] == 2.25 and values["votes"]["processes"] == 3
    assert values["bits_per_parameter"] == pytest.approx(2.0, rel=1e-2)
    assert values["baseline"]["agreement"] is not None
    assert json.loads(_results(baseline=False).to_json())["baseline"] is None
    lost = Results(Course("m", 1, 10), agreement_of([]), None, "", 1.0)
    assert json.loads(lost.to_json())["ring_fp32_ratio"] is None


@pytest.mark.parametrize("baseline", [True, False])
def test_the_summary(baseline: bool) -> None:
    console = Console(width=120, no_color=True, color_system=None)
    with console.capture() as capture:
        console.print(demo_results.summary(_results(baseline)))
    text = capture.get()
    for expected in ("sign-muon, 3 nodes", "6.000", "2.250", "2,400", "1.02 kB", "80.0 %", "600"):
        assert expected in text, expected
    assert ("ddp-muon, 1 process" in text) is baseline
    assert ("fp32 ring" in text) is baseline


def test_the_verdict() -> None:
    assert "all 3 nodes held the same bits after each of 8 rounds" in demo_results.verdict(_results())
    logs = [[dict(event) for event in log] for log in LOGS]
    logs[1][5]["digest"] = "0" * 32
    differing = Results(course_of("sign-muon", logs, 4.0), agreement_of(logs), None, "", 1.0)
    assert "DIFFERED: equal digests in 7 of 8 rounds" in demo_results.verdict(differing)


def test_the_picture_is_written(tmp_path: Path) -> None:
    demo_results.draw(_results(), tmp_path / "demo.png")
    assert imread(tmp_path / "demo.png").shape[1] > 900


def test_an_event_log_is_read_as_it_grows(tmp_path: Path) -> None:
    reader = EventReader(tmp_path / "events.jsonl")
    assert reader.new() == []
    with reader.path.open("w") as file:
        file.write('{"event": "Started"}\n{"event": ')
        file.flush()
        assert reader.new() == [{"event": "Started"}]
        assert reader.new() == []
        file.write('"Stopped"}\n')
        file.flush()
        assert reader.new() == [{"event": "Stopped"}]
