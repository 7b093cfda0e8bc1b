from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from deploy.demo import Demo, Options
from deploy.processes import Children, ProcessError
from deploy.status import StatusError
from protos import atoll_pb2 as pb

LATE = StatusError("the coordinator at 127.0.0.1:4600 did not answer within 5 s")
PATIENCE = 100.0


class _Coordinator:
    """Plays statuses back, the last one for ever; an unanswered look costs 5 s of its clock."""

    def __init__(self, *steps: pb.StatusReply | StatusError) -> None:
        self._steps = list(steps)
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def fetch(self) -> pb.StatusReply:
        step = self._steps.pop(0) if len(self._steps) > 1 else self._steps[0]
        if isinstance(step, StatusError):
            self.now += 5
            raise step
        return step


def _follow(tmp_path: Path, *steps: pb.StatusReply | StatusError) -> tuple[Demo, float]:
    """The demo after all steps, and how long it took."""
    coordinator = _Coordinator(*steps)
    console = Console(file=io.StringIO(), width=80)
    demo = Demo(Options(tmp_path), console, coordinator.clock, coordinator.sleep)
    with Children() as children:
        demo.follow(children, coordinator, PATIENCE)
    return demo, coordinator.now


def _at(rounds: int, phase: str = "training") -> pb.StatusReply:
    return pb.StatusReply(phase=phase, round=rounds, rounds=3)


def test_late_answers_of_a_busy_machine_are_borne(tmp_path: Path) -> None:
    demo, seconds = _follow(tmp_path, LATE, _at(1), *[LATE] * 15, _at(2), *[LATE] * 15, _at(3, "done"))
    assert demo.history.reply.round == 3 and seconds > PATIENCE


def test_a_coordinator_that_never_answers_is_given_up(tmp_path: Path) -> None:
    with pytest.raises(StatusError, match="did not answer"):
        _follow(tmp_path, _at(1), LATE)


def test_a_run_without_a_new_round_is_given_up(tmp_path: Path) -> None:
    with pytest.raises(ProcessError, match="no new round for 100 s"):
        _follow(tmp_path, _at(1))
