"""`atoll testbed` from its command line: links that are cut and healed, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from deploy.errors import UserError
from deploy.testbed.control import ask
from deploy.testbed.namespace import why_not
from tests.waiting import until

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow

DEADLINE = 240.0  # for what takes ten seconds on two idle cores
SMALL = ["--set", "model.d_model=32", "--set", "model.layers=1", "--set", "model.heads=2"]
SMALL += ["--set", "model.context=32", "--set", "data.batch=2", "--set", "run.validation_windows=2"]
SMALL += ["--set", "round.adaptive=false"]
MEGABIT = 1e6
ROUNDS = 120
LINKS = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


class Terminal:
    """Runs `atoll testbed` with a folder for its runtime files of its own."""

    def __init__(self, folder: Path) -> None:
        self.out = folder / "out"
        self.state = folder / "run"
        self.environment = {**os.environ, "XDG_RUNTIME_DIR": str(self.state), "OMP_NUM_THREADS": "1"}
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [*self._command, "--sites", "2", "--out", str(self.out), *SMALL, *arguments]
        process = subprocess.Popen(
            command, cwd=ROOT, env=self.environment, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.started.append(process)
        return process

    def ask(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """What another terminal is told."""
        return subprocess.run(
            [*self._command, *arguments], cwd=ROOT, env=self.environment, text=True, capture_output=True
        )

    def show(self) -> dict[str, Any]:
        """How the bed stands, without a process for each look; empty before it answers."""
        for socket in self.state.glob("atoll/testbed-*/control"):
            with contextlib.suppress(UserError):
                return ask(socket, {"do": "show"})
        return {}

    def wait(self, process: subprocess.Popen[str], rounds: int) -> None:
        """Until both nodes have applied so many rounds."""
        logs = [self.out / f"{name}.jsonl" for name in ("site-a", "site-b")]

        def applied() -> bool:
            return all(log.exists() and log.read_text().count('"RoundDone"') >= rounds for log in logs)

        until(applied, f"{rounds} rounds", watch=process, fate=lambda: process.communicate()[0])

    def left(self) -> list[str]:
        """Files that say that a bed runs or ran."""
        return [str(path) for path in self.state.rglob("*") if path.is_file()]

    _command = (sys.executable, "-m", "deploy.cli", "testbed")


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    made = Terminal(tmp_path)
    yield made
    for process in made.started:
        if process.poll() is None:
            process.kill()  # its children follow their parent
        process.communicate(timeout=DEADLINE)


def _gone(family: list[psutil.Process]) -> None:
    """Wait until all have ended; whether anybody has asked for their exit codes is not our matter."""

    def alive() -> list[str]:
        found = []
        for child in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
                    found.append(" ".join(child.cmdline()))
        return found

    until(lambda: not alive(), "the end of all processes", fate=lambda: str(alive()))


@pytest.mark.root
@LINKS
def test_a_killed_bed_leaves_nothing_and_the_next_one_says_so(terminal: Terminal) -> None:
    process = terminal.start("--rate", "50mbit", "--delay", "2ms", "--no-probe", "--rounds", "100000")
    terminal.wait(process, 2)
    family = psutil.Process(process.pid).children(recursive=True)
    assert terminal.ask("link", "site-b", "--down").stdout == "site-b: cut\n"
    assert not terminal.show()["links"]["site-b"]["up"]
    process.kill()
    process.communicate()
    _gone(family)
    assert terminal.left() and (terminal.out / "invite").exists(), "it had no time to tidy up"
    assert "no test bed runs here" in terminal.ask("show").stderr
    ours = {"wan", "site-a", "site-b", "coordinator", "operator"}
    assert not ours & psutil.net_if_addrs().keys(), "this machine's own namespace has never seen any of it"

    again = terminal.start("--plain", "--rounds", "2")
    text, _ = again.communicate(timeout=DEADLINE)
    assert again.returncode == 0 and "equal after 2 of 2 rounds" in text, text
    assert f"a test bed (process {process.pid}) was killed" in text
    assert not terminal.left() and not (terminal.out / "invite").exists()


@pytest.mark.root
@LINKS
def test_a_link_is_cut_by_a_script_and_healed_from_another_terminal(
    tmp_path: Path, terminal: Terminal
) -> None:
    script = tmp_path / "script.toml"
    script.write_text('[[action]]\nround = 10\nlink = "site-b"\ndown = true\n')
    again = terminal.start(
        "--rate", "20mbit", "--delay", "5ms", "--rounds", str(ROUNDS), "--script", str(script)
    )
    until(
        lambda: not terminal.show().get("links", {}).get("site-b", {"up": True})["up"],
        "the cut of the script", watch=again, fate=lambda: again.communicate()[0],
    )  # fmt: skip
    assert terminal.ask("link", "site-b", "--up", "--rate", "10mbit").stdout.startswith("site-b: 10 Mbit/s")
    text, _ = again.communicate(timeout=DEADLINE)
    assert again.returncode == 0, text
    assert f"round {ROUNDS}/{ROUNDS}" in text and f"equal after {ROUNDS} of {ROUNDS} rounds" in text
    assert "Traceback" not in text
    assert not terminal.left() and not (terminal.out / "invite").exists()

    values = json.loads((terminal.out / "results.json").read_text())
    assert values["complete"] and values["shaped"] and values["probed"] and len(values["rounds"]) == ROUNDS
    assert [event["what"] for event in values["events"]] == ["site-b: cut", "site-b: 10 Mbit/s, 5 ms delay"]
    cut, healed = (event["round"] for event in values["events"])
    assert 10 <= cut <= healed <= cut + 1 < ROUNDS, "at most the round that had just ended"
    for name in ("site-a", "site-b"):
        link = values["links"][name]
        assert 18 * MEGABIT <= link["probe"]["up"] <= 22 * MEGABIT
        assert 18 * MEGABIT <= link["probe"]["down"] <= 22 * MEGABIT
        assert 0.0095 <= link["probe"]["rtt"]["least"] <= 0.0125
        for way in ("sent", "received"):
            assert link["interface"][way] > link["metered"][way] > 0


def test_plain_processes_where_there_are_no_links(terminal: Terminal) -> None:
    process = terminal.start("--plain", "--rounds", "100000")
    terminal.wait(process, 2)
    assert terminal.show()["plain"] == "asked for with --plain"
    refused = terminal.ask("link", "site-b", "--down")
    assert refused.returncode == 12 and "there is no link to change" in refused.stderr
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) == 3, "a coordinator and two nodes"
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 130 and "Traceback" not in text, text
    assert "plain processes without links: asked for with --plain" in text
    assert "stopped after" in text and "their numbers:" in text
    values = json.loads((terminal.out / "results.json").read_text())
    assert not values["complete"] and len(values["rounds"]) >= 2
    _gone(family)
    assert not terminal.left() and not (terminal.out / "invite").exists()


def test_a_script_needs_links(tmp_path: Path, terminal: Terminal) -> None:
    script = tmp_path / "script.toml"
    script.write_text('[[action]]\nround = 3\nlink = "site-b"\ndown = true\n')
    process = terminal.start("--plain", "--script", str(script))
    text, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 12 and "a script changes links, and there are none" in text
