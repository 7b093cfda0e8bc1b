"""`atoll timeline`: what is read, drawn, said and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread
from typer.testing import CliRunner

from deploy.cli import app
from deploy.errors import UserError
from deploy.event_log import EventLog
from deploy.timeline import LOOKS, NodeLog, Panel, Round, draw, read, together
from node.events import Joined, Notice, RoundDone, Started

runner = CliRunner()
SPANS = (
    ("flight", 0.2, 0.9),
    ("data", 0.0, 0.1),
    ("compute", 0.1, 0.7),
    ("propose", 0.3, 0.5),
    ("exchange", 0.7, 0.9),
    ("apply", 0.9, 1.0),
)


def done(number: int, began: float, spans: Any = SPANS) -> RoundDone:
    return RoundDone(
        round=number,
        rounds=9,
        loss=1.0,
        tokens=1,
        counted=True,
        voters=("reef",),
        agreement=1.0,
        reason="",
        digest="",
        bytes_up=0,
        bytes_down=0,
        compute_seconds=0.1,
        busy_seconds=0.1,
        began=began,
        spans=spans,
    )


def log(path: Path, node: str, rounds: range, offset: float = 0.0) -> Path:
    with EventLog(path, node) as tell:
        tell(Notice("waiting"))
        tell(Joined(node, "there:1", False))
        for number in rounds:
            tell(done(number, 1e9 + number + offset))
    return path


def colors(path: Path) -> set[str]:
    image = (imread(path)[..., :3] * 255).round().astype(int).reshape(-1, 3)
    return {"#{:02x}{:02x}{:02x}".format(*row) for row in np.unique(image, axis=0)}


def test_a_log_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = log(tmp_path / "one.jsonl", "reef", range(3))
    expected = NodeLog.of("reef", [done(number, 1e9 + number) for number in range(3)])
    assert read(path) == expected
    assert expected.rounds[0] == Round(0, 1e9, SPANS) and expected.rounds[0].seconds == 1.0
    with path.open("a") as file:
        file.write('{"event": "RoundDo')  # the node is still writing
    assert read(path) == expected


def test_a_node_that_was_started_again_goes_on_with_its_round(tmp_path: Path) -> None:
    path = log(tmp_path / "one.jsonl", "reef", range(5))
    with EventLog(path, "reef") as tell:
        tell(Started("r", "signum", 1, 1, "cpu", 1, round=3))
        tell(done(3, 2e9))
    assert [(r.number, r.began) for r in read(path).rounds] == [
        (0, 1e9),
        (1, 1e9 + 1),
        (2, 1e9 + 2),
        (3, 2e9),
    ]


def test_the_same_rounds_of_all_nodes(tmp_path: Path) -> None:
    nodes = [
        read(log(tmp_path / "a", "reef", range(8))),
        read(log(tmp_path / "b", "lagoon", range(3, 9), -0.5)),
    ]

    def numbers(**choice: Any) -> list[list[int]]:
        return [[r.number for r in node.rounds] for node in together("", nodes, **choice).nodes]

    assert numbers() == [[4, 5, 6, 7]] * 2
    assert numbers(count=2) == [[6, 7]] * 2
    assert numbers(first=0, count=2) == [[3, 4]] * 2
    assert together("", nodes, first=0).began == 1e9 + 2.5
    with pytest.raises(UserError, match=r"logs of reef, lagoon hold rounds 4 to 8"):
        together("", nodes, first=8)
    with pytest.raises(UserError, match="no round that all have finished"):
        together("", [nodes[0], NodeLog("late", (Round(8, 1e9, SPANS),))])


def test_the_picture_shows_every_phase(tmp_path: Path) -> None:
    path = tmp_path / "new" / "timeline.png"
    node = NodeLog.of("reef", [done(number, 1e9 + 1.1 * number) for number in range(3)])
    panel = together("overlapped", [node])
    draw(path, "one", [panel])
    shown = colors(path)
    missing = {"digest", "evaluate"}  # of which the rounds have none
    assert {name for name, (color, _) in LOOKS.items() if color in shown} == set(LOOKS) - missing
    small = imread(path).shape[0]
    draw(path, "two", [panel, Panel("again", (node, node))])
    assert imread(path).shape[0] > 1.5 * small


def test_the_command(tmp_path: Path) -> None:
    logs = [log(tmp_path / name, name, range(6)) for name in ("reef", "lagoon")]
    out = tmp_path / "out.png"
    result = runner.invoke(app, ["timeline", *map(str, logs), "-o", str(out), "--from", "2", "--rounds", "3"])
    assert result.exit_code == 0, result.output
    assert result.output == f"wrote {out}: rounds 2 to 4 of reef, lagoon\n"
    assert out.stat().st_size > 10_000
    assert "Example: atoll timeline reef.jsonl" in runner.invoke(app, ["timeline", "--help"]).output


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[run]\nname = 'reef'\n", "is no log of events: line 1 is not an event"),
        (b'{"event": "Notice", "text": ""}\n{"round": 1}\n', "is no log of events: line 2"),
        (b"\xff\xfe\x00", "is no log of events"),
        (b"", "holds no finished round"),
        (b'{"event": "Notice", "text": "waiting"}\n', "holds no finished round"),
        (b'{"event": "RoundDone", "round": 0}\n', "an older version of Atoll"),
        (b'{"event": "RoundDone", "round": 0, "began": 1, "spans": []}\n', "an older version of Atoll"),
        (b'{"event": "RoundDone", "round": 0, "began": 1, "spans": [["a", 1]]}\n', "an older version"),
    ],
)
def test_other_files_are_refused_in_one_line(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(content)
    out = tmp_path / "out.png"
    result = runner.invoke(app, ["timeline", str(path), "-o", str(out)])
    assert result.exit_code == 12 and not out.exists()
    assert said in result.output and str(path) in result.output and result.output.count("\n") == 1


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    result = runner.invoke(app, ["timeline", str(tmp_path / "none.jsonl")])
    assert result.exit_code == 13 and "none.jsonl: No such file" in result.output
