"""Logs of events: one format for all processes, trouble that stops nothing, and docs/events.md."""

from __future__ import annotations

import errno
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

import deploy
from coordinator import events as of_coordinator
from deploy.errors import UserError
from deploy.event_log import KINDS, EventLog, EventsLost, read_lines
from deploy.event_table import markdown
from deploy.event_words import names, sentence
from node import events as of_node
from tests.deploy.events_rig import BEGIN, EVERY, Clock, done

NODE: list[of_node.Event] = [
    of_node.Notice("waiting"),
    of_node.Joined("node-0", "192.0.2.7:4600", True),
    done(0),
    of_node.Saved(10, Path("saves/round-00000010")),
    of_node.Evaluated(9, 2.0, 2.885),
    of_node.Stopped(True, "all 10 rounds are done"),
]


def values(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_has_time_who_and_event_first(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "events.jsonl"
    with EventLog(path, "reef", clock=Clock()) as log:
        log(NODE[0])
        assert path.read_text() == (
            '{"time": "2026-05-01T12:00:00.000Z", "who": "reef", "event": "Notice", "text": "waiting"}\n'
        )
        for event in NODE[1:]:
            log(event)
        log(replace(done(1), loss=math.nan))
    log(NODE[0])  # after the end: ignored
    lines = values(path)
    assert [line["event"] for line in lines[:-1]] == [type(event).__name__ for event in NODE]
    assert [line["who"] for line in lines] == ["reef"] + ["node-0"] * 6, "as it is called in the run"
    assert lines[2]["seconds"] == {"compute": 0.5, "exchange": 0.1} and lines[2]["voters"] == [
        "node-0",
        "node-1",
    ]
    assert lines[3]["path"] == str(Path("saves/round-00000010"))
    assert lines[-1]["loss"] is None


def test_events_come_back_as_they_were(tmp_path: Path) -> None:
    assert {type(event) for event in EVERY} == set(get_args(of_coordinator.Event))
    path = tmp_path / "events.jsonl"
    with EventLog(path, "coordinator", clock=Clock()) as log:
        for event in [*EVERY, *NODE]:
            log(event)
    lines = list(read_lines(path))
    assert {line.at for line in lines} == {BEGIN}
    assert [repr(line.event()) for line in lines] == [repr(event) for event in [*EVERY, *NODE]]
    assert repr(lines[8].event()).count("nan") == 2


def test_a_log_is_appended_to_and_a_line_cut_short_is_left_out(tmp_path: Path) -> None:
    path, notes = tmp_path / "events.jsonl", list[str]()
    for text in ("first", "second"):
        with EventLog(path, "reef") as log:
            log(of_node.Notice(text))
        with path.open("ab") as file:
            file.write(b'{"time": "2026')  # the process was killed
    assert [line.event() for line in read_lines(path, notes.append)] == [
        of_node.Notice("first"),
        of_node.Notice("second"),
    ]
    assert notes == [f"{path}: line 2 was never finished", f"{path}: line 4 was never finished"]


def test_unknown_events_and_fields(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(
        '{"time": "2026-05-01T12:00:00Z", "event": "Later", "x": 1}\n'
        '{"event": "Notice", "text": "hello", "more": 2}\n'
        '{"event": "Notice"}\n'
    )
    first, second, third = read_lines(path)
    assert first.event() is None and first.at == BEGIN and first.who == ""
    assert second.event() == of_node.Notice("hello") and math.isnan(second.at)
    assert third.event() is None, "a field is missing"


class Disk:
    """A file whose writing fails as told: with an error, or after some bytes."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("ab", buffering=0)
        self.answers: list[int | OSError | None] = []
        self.closed = False

    def write(self, data: bytes) -> int | None:
        answer = self.answers.pop(0) if self.answers else len(data)
        if isinstance(answer, OSError):
            raise answer
        return answer and self.file.write(data[:answer])

    def close(self) -> None:
        self.closed = True
        self.file.close()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_told_once_and_what_was_lost_is_counted(tmp_path: Path) -> None:
    path, told, notes = tmp_path / "events.jsonl", list[str](), list[str]()
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with EventLog(path, "reef", warn=told.append) as log:
        disk = Disk(path)
        log._file.close()
        log._file = disk  # type: ignore[assignment]
        log(of_node.Notice("a"))
        disk.answers = [9, full, full, full, None]
        for text in "bcdef":  # b is cut short, then there is no room, then a pipe is full
            log(of_node.Notice(text))
        log(of_node.Notice("g"))
    assert told == [f"events are being lost, the run goes on: {path}: only a part of a line could be written"]
    events = [line.event() for line in read_lines(path, notes.append)]
    assert events == [of_node.Notice("a"), EventsLost(5), of_node.Notice("g")]
    assert notes == [f"{path}: line 2 was never finished"]


def test_a_closed_pipe_stops_nothing(tmp_path: Path) -> None:
    path, told = tmp_path / "pipe", list[str]()
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with EventLog(path, "reef", warn=told.append) as log:
        log(of_node.Notice("a"))
        assert b'"text": "a"' in os.read(reader, 1000)
        os.close(reader)
        for _ in range(3):
            log(of_node.Notice("b"))
    assert told == [f"events are being lost, the run goes on: {path}: Broken pipe"]


def test_a_log_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="events cannot be written"):
        EventLog(tmp_path / "file" / "events.jsonl", "reef")


def test_every_event_of_the_coordinator_has_a_sentence() -> None:
    said = [sentence(event) for event in EVERY]
    assert all(
        text and "\n" not in text and type(e).__name__ not in text
        for text, e in zip(said, EVERY, strict=True)
    )
    assert said[2] == "node-0 (reef) has joined from [::1]:5000 with the state after round 0"
    assert "round 2 opens with node-0, node-1, not waiting for node-1; 0.7 s: median" in said
    assert "round 2 committed after 1.5 s: all 2 contributions are in" in said
    assert "journal: the disk is full; the run cannot go on" in said
    assert sentence(EventsLost(5)) == "5 events before this one could not be written"
    assert sentence(NODE[0]) == "waiting"
    assert names(()) == "nobody" and names(tuple("abcdefghij")).endswith("h and 2 more")


def test_no_name_means_two_things() -> None:
    kinds = [*get_args(of_coordinator.Event), *get_args(of_node.Event), EventsLost]
    assert len(KINDS) == len(kinds)


def test_the_page_about_events_is_up_to_date() -> None:
    page = (Path(deploy.__file__).parent.parent / "docs" / "events.md").read_text(encoding="utf-8")
    assert page == markdown(), "run python -m deploy.event_table > docs/events.md"
    assert all(f"| `{name}` |" in page for name in KINDS)
    assert "`deadline` (the longest, seconds)" in page
