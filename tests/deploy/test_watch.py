from __future__ import annotations

import io
import json
from collections.abc import Sequence

import pytest
from rich.console import Console

from deploy.status import StatusError
from deploy.watch import follow
from protos import atoll_pb2 as pb

GONE = StatusError("no coordinator answers at 192.0.2.7:4600")


class _Script:
    """Plays statuses back; the clock is the number of looks."""

    def __init__(self, *steps: pb.StatusReply | StatusError) -> None:
        self._steps = list(steps)
        self.slept: list[float] = []

    def fetch(self) -> pb.StatusReply:
        step = self._steps.pop(0)
        if isinstance(step, StatusError):
            raise step
        return step


def _at(round_index: int, phase: str = "training") -> pb.StatusReply:
    return pb.StatusReply(phase=phase, round=round_index, rounds=3)


def _follow(
    script: _Script, terminal: bool = False, as_json: bool = False
) -> tuple[pb.StatusReply, Sequence[str]]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120, color_system=None)
    last = follow(script, console, 0.5, as_json, script.slept.append)
    return last, out.getvalue().splitlines()


def test_one_line_for_each_change_until_the_end() -> None:
    script = _Script(_at(0, "gathering"), _at(1), _at(1), _at(2), _at(3, "done"))
    last, lines = _follow(script)
    assert last.phase == "done"
    assert [line.split(" nodes")[0] for line in lines] == [
        "gathering round 0/3",
        "training round 1/3",
        "training round 2/3",
        "done round 3/3",
    ]
    assert script.slept == [0.5] * 4


def test_json_is_one_object_a_look() -> None:
    _, lines = _follow(_Script(_at(1), _at(1), _at(3, "failed")), as_json=True)
    assert [json.loads(line)["round"] for line in lines] == [1, 1, 3]


def test_a_terminal_shows_the_tables() -> None:
    _, lines = _follow(_Script(_at(1), _at(3, "done")), terminal=True)
    assert any("3 of 3 committed" in line for line in lines)


def test_a_short_silence_is_borne() -> None:
    last, _ = _follow(_Script(_at(1), GONE, GONE, _at(2), GONE, GONE, _at(3, "done")))
    assert last.round == 3


def test_a_long_silence_is_an_error() -> None:
    with pytest.raises(StatusError, match="no coordinator answers"):
        _follow(_Script(_at(1), GONE, GONE, GONE))


def test_a_coordinator_that_is_not_there_is_an_error_at_once() -> None:
    with pytest.raises(StatusError, match="no coordinator answers"):
        _follow(_Script(GONE))
