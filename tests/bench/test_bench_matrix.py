"""A case that fails ends its scene, and neither the other cases nor what was found before."""

from __future__ import annotations

from typing import Any, cast

import pytest

from bench.bed import BedError
from bench.matrix import Case, Course, Scene, all_cases
from coordinator.audit import Audit, Violation

CASES = [Case("node", phase, "kill") for phase in ("computing", "sending", "waiting")]


class FakeScene:
    """Plays cases but for those that ``fail``; with ``differ`` its nodes have different states."""

    def __init__(self, fail: str = "", *, differ: bool = False) -> None:
        self.standstills: dict[Case, float] = {}
        self.ends: list[str] = []
        self._fail, self._differ = fail, differ

    def play(self, case: Case) -> None:
        if case.phase == self._fail:
            raise BedError("round 5 of a did not come")
        self.standstills[case] = 1.5

    def close(self) -> Audit:
        return self._end("closed")

    def give_up(self) -> Audit:
        return self._end("given up")

    def _end(self, how: str) -> Audit:
        self.ends.append(how)
        if self._differ:
            raise BedError("after round 3 b has another state")
        return Audit(rounds=4, trained=8, violations=[Violation("twice", "sample 3 was trained twice")])


def played(course: Course, scene: Any) -> FakeScene:
    course.go_on(cast(Scene, scene))
    return cast(FakeScene, scene)


def test_all_cases_of_a_scene_are_played_and_audited_once() -> None:
    course = Course([*CASES])
    assert played(course, FakeScene()).ends == ["closed"]
    assert (course.cases, course.failures) == ([], [])
    assert course.standstills == dict.fromkeys(CASES, 1.5)
    assert (course.rounds, course.trained, len(course.violations)) == (4, 8, 1)


def test_the_cases_after_one_that_failed_are_left_for_the_next_scene(
    capsys: pytest.CaptureFixture[str],
) -> None:
    course = Course([*CASES])
    assert played(course, FakeScene("sending")).ends == ["given up"]
    assert course.failures == ["node-sending-kill: round 5 of a did not come"]
    assert course.cases == CASES[2:] and len(course.violations) == 1, "what was played before is audited"
    assert played(course, FakeScene()).ends == ["closed"]
    assert course.cases == [] and len(course.failures) == 1
    assert list(course.standstills) == [CASES[0], CASES[2]]
    assert (course.rounds, course.trained) == (8, 16)
    told = capsys.readouterr().err
    assert "node-computing-kill: 1.5 s; 2 to go" in told and "FAILED: node-sending-kill" in told


def test_states_that_differ_in_the_end_are_a_failure() -> None:
    course = Course([*CASES])
    played(course, FakeScene(differ=True))
    assert course.failures == ["in the end: after round 3 b has another state"]
    assert len(course.standstills) == 3 and course.rounds == 0


def test_every_phase_meets_every_event() -> None:
    cases = all_cases(cuts=True)
    assert len(cases) == len(set(cases)) == 13 * 3
    assert len(all_cases(cuts=False)) == 13 * 2
