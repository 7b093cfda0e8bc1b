"""`atoll replay`: logs merged by time, the scene at each moment, cuts, pipes and terminals."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from coordinator import events as of_coordinator
from deploy.cli import app
from deploy.errors import UserError
from deploy.event_log import EventLog
from deploy.moments import Moment, cut, read_moments
from deploy.replay import LONGEST_PAUSE, plain_line, play, view
from deploy.scene import Scene
from node import events as of_node
from tests.deploy.events_rig import BEGIN, Clock, of_a_node, of_the_coordinator, write

runner = CliRunner()


@pytest.fixture
def logs(tmp_path: Path) -> list[Path]:
    return [
        write(tmp_path / "coordinator.jsonl", "coordinator", of_the_coordinator()),
        write(tmp_path / "lagoon.jsonl", "lagoon", of_a_node()),
    ]


def quiet(text: str) -> None:
    raise AssertionError(text)


def scene(moments: list[Moment], until: float) -> Scene:
    now = Scene()
    for moment in moments:
        if moment.at <= BEGIN + until:
            now.take(moment)
    return now


def test_logs_are_merged_by_time(logs: list[Path]) -> None:
    moments = read_moments(logs, quiet)
    assert len(moments) == len(of_the_coordinator()) + len(of_a_node())
    assert [m.at for m in moments] == sorted(m.at for m in moments)
    assert {m.who for m in moments} == {"coordinator", "lagoon", "node-1"}


def test_a_clock_that_was_set_back_keeps_the_order_of_a_log(tmp_path: Path) -> None:
    clock = Clock()
    path = tmp_path / "one.jsonl"
    with EventLog(path, "reef", clock=clock) as log:
        for index, at in enumerate((5.0, -100.0, 6.0)):
            clock.now = BEGIN + at
            log(of_node.Notice(str(index)))
    assert [(m.at - BEGIN, m.event) for m in read_moments([path], quiet)] == [
        (5.0, of_node.Notice("0")),
        (5.0, of_node.Notice("1")),
        (6.0, of_node.Notice("2")),
    ]


def test_what_is_left_out_is_told(tmp_path: Path) -> None:
    path, notes = tmp_path / "one.jsonl", list[str]()
    path.write_text(
        '{"time": "2026-05-01T12:00:00Z", "who": "a", "event": "Notice", "text": "x"}\n'
        '{"time": "2026-05-01T12:00:01Z", "who": "a", "event": "Later"}\n'
        '{"time": "2026-05-01T12:00:01Z", "who": "a", "ev'
    )
    assert len(read_moments([path], notes.append)) == 1
    assert notes == [
        f"{path}: line 3 was never finished",
        f"{path}: events that this version does not know are left out: Later (1)",
    ]
    path.write_text('{"event": "Notice", "text": "x"}\n')
    with pytest.raises(UserError, match="line 1 does not say when"):
        read_moments([path], quiet)


def test_the_scene_at_each_moment(logs: list[Path]) -> None:
    moments = read_moments(logs, quiet)
    begun = scene(moments, 0.3)
    assert {node: one.state for node, one in begun.nodes.items()} == {
        "node-0": "joining",
        "node-1": "joining",
    }
    training = scene(moments, 4.2)
    assert (training.run, training.method, training.phase) == ("r", "sign-muon", "training")
    assert (training.open, training.committed, training.rounds) == (1, 2, 3)
    assert training.nodes["node-1"].voted == "yes" and training.nodes["node-1"].name == "lagoon"
    assert training.loss == pytest.approx(1.95), "node-1's own log says 2.0"
    end = scene(moments, 9.0)
    assert end.phase == "done" and end.committed == 3
    one = end.nodes["node-1"]
    assert (one.state, one.round, one.note) == ("left", 1, "no heartbeat for 15 s")
    assert end.nodes["node-0"].round == 2 and end.loss == pytest.approx(1.8)


def test_who_was_late_and_who_catches_up() -> None:
    now = Scene()
    for event in (
        of_coordinator.RoundOpened(0, 1, ("a", "b", "c"), ("c",), 1.0, "1 s"),
        of_coordinator.RoundCommitted(0, 1, ("a",), ("b",), "one", 1.0, 1.0, 9),
        of_coordinator.CatchUpPlanned("c", "replay", 4, 100, "cheaper"),
        of_coordinator.SnapshotBegun("s", 4, ("a",), 5_000_000),
        of_coordinator.DigestAgreed(0, "ab"),
    ):
        now.take(Moment(BEGIN, "coordinator", event))
    assert [(now.nodes[n].voted, now.nodes[n].state) for n in "abc"] == [
        ("yes", "active"),
        ("late", "active"),
        ("", "loading"),
    ]
    assert (
        now.nodes["c"].note == "replay, to round 4" and "5 MB from a" in now.snapshot and now.digest == "ab"
    )
    now.take(Moment(BEGIN, "coordinator", of_coordinator.RunResumed("r", "m", 1, 9, ("a",), "again")))
    assert now.phase == "gathering" and now.nodes["a"].note == "waiting for the coordinator"


def test_a_nodes_log_alone_is_a_run(logs: list[Path]) -> None:
    now = scene(read_moments(logs[1:], quiet), 9.0)
    assert (now.run, now.committed, now.rounds, now.phase) == ("r", 2, 3, "training")
    assert now.nodes["node-1"].voted == "yes" and "not finite" in now.nodes["node-1"].note


@pytest.mark.parametrize(
    ("start", "end", "begin", "last"),
    [
        (None, None, 0.0, 8.0),
        ("2", None, 3.0, 8.0),
        ("2", "2", 3.0, 4.2),
        ("12:00:03", "12:00:06", 3.0, 6.0),
        ("12:00:03.05", "2026-05-01 12:00:06.12", 4.0, 6.1),
        ("2026-05-01T12:00:07Z", None, 7.5, 8.0),
    ],
)
def test_a_part_of_a_run(
    logs: list[Path], start: str | None, end: str | None, begin: float, last: float
) -> None:
    moments = read_moments(logs, quiet)
    first, behind = cut(moments, start, end)
    assert moments[first].at - BEGIN == pytest.approx(begin, abs=1e-3)
    assert moments[behind - 1].at - BEGIN == pytest.approx(last, abs=1e-3)


def test_parts_that_are_not_there(logs: list[Path]) -> None:
    moments = read_moments(logs, quiet)
    for start, end in (("4", None), (None, "0"), ("3", "2"), ("13:00", None)):
        with pytest.raises(UserError, match="the logs go from 12:00:00 to 12:00:08 and hold rounds 1 to 3"):
            cut(moments, start, end)
    with pytest.raises(UserError, match="'noon' is neither a round nor a time"):
        cut(moments, "noon", None)
    with pytest.raises(UserError, match="the logs hold no events"):
        cut([], None, None)


def test_playing_takes_its_time(logs: list[Path]) -> None:
    moments = read_moments(logs, quiet)
    out = io.StringIO()
    slept = list[float]()
    console = Console(file=out, force_terminal=True, width=120, height=40, color_system=None)
    end = play(moments, console, speed=2.0, sleep=slept.append)
    assert sum(slept) == pytest.approx(8.0 / 2.0, abs=0.1)
    assert end.committed == 3 and "node-1" in out.getvalue() and "3 of 3 committed" in out.getvalue()
    late = [moments[0], Moment(moments[0].at + 1e6, "x", of_node.Notice("after a night"))]
    slept.clear()
    play(late, console, speed=1.0, sleep=slept.append)
    assert slept == [LONGEST_PAUSE]
    slept.clear()
    play(moments, console, speed=1.0, first=len(moments) - 2, sleep=slept.append)
    assert sum(slept) <= 0.51, "what was before is not shown"


def test_the_view_takes_text_of_peers_as_text() -> None:
    now = Scene()
    now.take(Moment(BEGIN, "coordinator", of_coordinator.NodeJoined("node-0", "[red]x", "a:1", 0)))
    console = Console(file=io.StringIO(), width=100, color_system=None)
    with console.capture() as captured:
        console.print(view(now))
    assert captured.get().count("[red]x") == 2 and "12:00:00.000 UTC" in captured.get()


def test_the_command_in_a_pipe(logs: list[Path]) -> None:
    result = runner.invoke(app, ["replay", *map(str, logs), "--from", "2", "--to", "2", "--speed", "0.001"])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0] == (
        "2026-05-01 12:00:03.000 coordinator round 2 opens with node-0, node-1; 60 s, the longest"
    )
    assert any("node-1      round 2/3 loss 2.000" in line for line in lines)
    help_text = runner.invoke(app, ["replay", "--help"]).output
    assert "Example: atoll replay coordinator.jsonl" in help_text and "--plain" in help_text


def test_other_files_are_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[run]\n")
    result = runner.invoke(app, ["replay", str(path)])
    assert result.exit_code == 12 and "is no log of events: line 1" in result.output
    assert result.output.count("\n") == 1
    assert plain_line(Moment(BEGIN, "a", of_node.Notice("b"))) == "2026-05-01 12:00:00.000 a           b"


def test_ctrl_c_is_clean(logs: list[Path]) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, height=40)

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play(read_moments(logs, quiet), console, speed=1.0, sleep=interrupted)
    shown, hidden = out.getvalue().rfind("\x1b[?25h"), out.getvalue().rfind("\x1b[?25l")
    assert shown > hidden >= 0, "the cursor is there again"
