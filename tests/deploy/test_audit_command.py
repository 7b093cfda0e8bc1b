"""`atoll audit`: what it prints, and its exit code."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from deploy.cli import app
from tests.coordinator.journal_rig import START, Desk, commit, open_journal

runner = CliRunner()


def journal(folder: Path, *, wrong: bool) -> Path:
    """Two rounds; in a wrong one the second trains samples of the first once more."""
    desk = Desk()
    opened = open_journal(folder, desk)
    opened.begin(START)
    assert commit(opened, desk, 0) is None
    trained = (("a", 8, 8), ("b", 24, 8)) if wrong else (("a", 16, 8), ("b", 24, 8))
    assert commit(opened, desk, 1, trained=trained) is None
    opened.close()
    return folder


def test_a_journal_in_order(tmp_path: Path) -> None:
    folder = journal(tmp_path / "reef.journal", wrong=False)
    result = runner.invoke(app, ["audit", str(folder)])
    assert result.exit_code == 0, result.output
    assert "2 committed, round 3 is next" in result.output and "16 by a" in result.output
    assert "32 leased: 32 trained, 0 to be handed out again" in result.output
    assert "nothing is wrong" in result.output
    values = json.loads(runner.invoke(app, ["audit", str(folder), "--json"]).output)
    assert values["holds"] and values["violations"] == [] and values["results"] == {"whole": 2, "lost": 0}
    assert values["samples"]["by_node"] == {"a": 16, "b": 16}


def test_a_violation_names_rounds_and_nodes_and_is_exit_code_1(tmp_path: Path) -> None:
    folder = journal(tmp_path / "reef.journal", wrong=True)
    result = runner.invoke(app, ["audit", str(folder)])
    assert result.exit_code == 1 and "nothing is wrong" not in result.output
    assert "twice: samples 8 to 15 trained by b in round 1 and by a in round 2" in result.output
    result = runner.invoke(app, ["audit", str(folder), "--json"])
    assert result.exit_code == 1
    first, second = json.loads(result.output)["violations"]
    assert (first["kind"], first["rounds"], first["nodes"]) == ("twice", [0, 1], ["b", "a"])
    assert second["kind"] == "account" and "samples 16 to 23" in second["text"]


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    result = runner.invoke(app, ["audit", str(tmp_path)])
    assert result.exit_code == 17 and "is no journal" in result.output and "Traceback" not in result.output
