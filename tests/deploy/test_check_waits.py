"""`atoll run check` shows every wait of a run in one line."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from deploy.cli import app

runner = CliRunner()


def test_check_prints_all_waits_in_a_line(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[round]\ndeadline = "90s"\nstart_timeout = "5 min"\n')
    result = runner.invoke(app, ["run", "check", str(file)])
    assert result.exit_code == 0, result.output
    (line,) = (line for line in result.output.splitlines() if line.startswith("waits: "))
    assert line.removeprefix("waits: ").split("; ") == [
        "heartbeat 5 s",
        "departure of a silent node 15 s",
        "others of a round, at most 1 min 30 s ([round] deadline)",
        "first of a round, or a quorum 5 min ([round] start_timeout)",
        "a node for a result 13 min 30 s",
    ]
    found = json.loads(runner.invoke(app, ["run", "check", str(file), "--json"]).output)["waits"]
    assert list(found.values()) == [5.0, 15.0, 90.0, 300.0, 810.0]
