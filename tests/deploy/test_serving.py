from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.journal import JournalError
from coordinator.journal_file import FileJournal
from coordinator.service import Outcome
from coordinator.token_file import TokenFile
from deploy.costs import run_costs
from deploy.serving import (
    Choices,
    JsonFormatter,
    coordinate,
    each_round,
    exit_code,
    join_command,
    metrics_address,
    opened,
)
from deploy.status import StatusClient
from protos.address import Address
from protos.invite import Invite
from protos.runfile import RunFile
from tests.coordinator.journal_rig import START, Desk, commit, roster
from tests.waiting import until

ROOT = Path(__file__).parents[2]
DEADLINE = 120.0


def test_where_metrics_are_served() -> None:
    listen, run = Address("192.0.2.7", 4600), RunFile()
    assert metrics_address(run, Choices(), listen) == Address("192.0.2.7", 9464)
    assert metrics_address(run, Choices(metrics="off"), listen) is None
    assert metrics_address(run, Choices(metrics="127.0.0.1:0"), listen) == Address("127.0.0.1", 0)
    off = RunFile.parse("[coordinator]\nmetrics = 'off'\n")
    assert metrics_address(off, Choices(), listen) is None


@pytest.mark.parametrize(
    ("phase", "reason", "code"),
    [
        ("done", "all 9 rounds are committed", 0),
        ("failed", "the coordinator was stopped (SIGINT)", 130),
        ("suspended", "the coordinator was suspended (SIGTERM)", 143),
        ("suspended", "the journal in x cannot be written", 1),
        ("failed", "only 1 of 3 nodes came", 1),
    ],
)
def test_exit_codes(phase: str, reason: str, code: int) -> None:
    assert exit_code(Outcome(phase, reason, 9)) == code


def test_what_a_round_carries_in_words() -> None:
    assert each_round(run_costs(RunFile())) == "14.7 kB each way a round"
    lordo = each_round(run_costs(RunFile.model_validate({"method": {"name": "lordo"}})))
    assert lordo.endswith(" down a round of 32 steps") and " up, " in lordo


def test_how_a_node_is_started() -> None:
    assert join_command(RunFile()) == "atoll join"
    own = {"model": {"name": "own", "tensors": ["fc.weight matrix 4x4"]}}
    assert join_command(RunFile.model_validate(own)) == "python SCRIPT"


def test_log_lines_as_json() -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        record = logging.LogRecord("atoll", logging.WARNING, "x.py", 1, "node %s", ("a",), sys.exc_info())
    record.created = 0.0
    values = json.loads(JsonFormatter().format(record))
    assert values.pop("error").endswith("ValueError: broken")
    assert values == {
        "time": "1970-01-01T00:00:00.000+00:00",
        "level": "warning",
        "logger": "atoll",
        "message": "node a",
    }


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(
        "[run]\nname = 'small'\nnodes = 2\nrounds = 5\n[model]\nd_model = 16\nlayers = 1\nheads = 1\n"
    )
    return path


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Whatever a test starts ends with it."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=DEADLINE)


def _coordinator(run_file: Path, *arguments: str) -> subprocess.Popen[str]:
    journal = str(run_file.with_name("journal"))
    command = [
        *(sys.executable, "-m", "deploy.cli", "coordinator", str(run_file)),
        *("--metrics", "off", "--journal", journal, *arguments),
    ]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


def _invite(path: Path, process: subprocess.Popen[str]) -> Invite:
    until(path.exists, "the invite", watch=process, fate=lambda: process.communicate()[0])
    return Invite.parse(path.read_text())


@pytest.mark.parametrize("host", ["[::1]", "0.0.0.0"])
def test_a_coordinator_on_any_free_port(
    host: str, run_file: Path, tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    if host == "[::1]" and not _has_ipv6():
        pytest.skip("this machine has no IPv6 loopback")
    file = tmp_path / "invite"
    process = _coordinator(
        run_file, "--listen", f"{host}:0", "--token", "secret",
        "--advertise", host if host != "0.0.0.0" else "127.0.0.1", "--invite-file", str(file),
    )  # fmt: skip
    started.append(process)
    invite = _invite(file, process)
    assert invite.port > 0 and invite.token == "secret"
    with StatusClient(invite) as client:
        reply = client.fetch(30)
    assert (reply.run, reply.phase, reply.rounds, reply.reason) == ("small", "gathering", 5, "0 of 2 nodes")
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 130, text
    assert f"atoll join {invite}" in text and f"listening on {host}:{invite.port}" in text
    assert "this machine only" in text and "Traceback" not in text
    assert not file.exists()


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def test_a_port_in_use(run_file: Path, started: list[subprocess.Popen[str]]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = _coordinator(run_file, "--listen", f"127.0.0.1:{port}")
        started.append(process)
        text, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 13
    journal, problem = text.splitlines()
    assert journal == f"journal in {run_file.with_name('journal')}" and f"port {port} is in use" in problem
    (token,) = TokenFile(run_file.with_name("journal")).book.tokens
    assert (token.name, token.role) == ("default", "node")


def test_a_coordinator_that_is_started_again(
    run_file: Path, tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    """Begun rounds are gone on with, the old invite is valid, and a second coordinator is refused."""
    runfile, choices = RunFile.load(run_file), Choices(journal=tmp_path / "journal")
    costs = run_costs(runfile)
    with opened(runfile, costs, choices) as folder:
        TokenFile(folder.path).edit(lambda book: book.given("default", "node", "kept", now=0.0))
        desk = Desk()
        journal = FileJournal(folder, desk.post)
        journal.begin(START)
        journal.roster(roster(3, "a", "b"))
        assert commit(journal, desk, 0) is None
        journal.close()
    (tmp_path / "journal" / "results" / "00000002.seg").write_bytes(b"torn")
    invite, events = tmp_path / "invite", tmp_path / "events.jsonl"
    process = _coordinator(
        run_file, "--listen", "127.0.0.1:0", "--invite-file", str(invite), "--events", str(events)
    )
    started.append(process)
    fresh = _invite(invite, process)
    with StatusClient(replace(fresh, token="kept")) as client:
        assert client.fetch(30).round == 1
    with pytest.raises(JournalError, match=f"in use by another coordinator, process {process.pid} on"):
        coordinate(runfile, choices, lambda line: None)
    process.send_signal(signal.SIGTERM)
    text, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 143, text
    first, _, rest = text.partition("\n")
    assert first == (
        f"going on from round 2 of the journal in {tmp_path / 'journal'} "
        "(4 B that are no whole result were cut from results/00000002.seg)"
    )
    assert "suspended after 1 rounds" in rest and "Traceback" not in rest
    assert '"RunResumed"' in events.read_text()
    with opened(runfile, costs, choices) as folder:
        assert folder.recovered is not None and not folder.ended
        names = [token.name for token in TokenFile(folder.path).book.tokens]
        assert names == ["default", "default-2"], "the first invite is valid still, and its secret not kept"


def test_a_run_that_has_ended_is_not_served_again(run_file: Path, tmp_path: Path) -> None:
    runfile, choices = RunFile.load(run_file), Choices(journal=tmp_path / "journal")
    with opened(runfile, run_costs(runfile), choices) as folder:
        desk = Desk()
        journal = FileJournal(folder, desk.post)
        journal.begin(START)
        for index in range(5):
            assert commit(journal, desk, index) is None
        journal.close()
        folder.mark_ended()
    lines: list[str] = []
    assert coordinate(runfile, choices, lines.append) == 0
    assert lines[0].startswith("going on from round 6 of the journal in ")
    assert lines[1].startswith("all 5 rounds are committed") and len(lines) == 2
