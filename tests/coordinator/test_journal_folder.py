"""The journal's folder: what lies in it, and which folders are refused, in words that help."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from coordinator.journal import JournalError
from coordinator.journal_folder import JournalFolder
from tests.coordinator.journal_rig import DEADLINE, RUN_TOML, Desk, commit, filled, open_journal
from tests.waiting import until

ROOT = Path(__file__).parents[2]


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_what_lies_in_the_folder(tmp_path: Path, desk: Desk) -> None:
    folder = tmp_path / "reef.journal"
    journal = filled(folder, desk, 0)
    for index in range(4):
        assert commit(journal, desk, index, memory={"x": np.ones(3, np.float32)}) is None
    journal.close()
    with JournalFolder.open(folder, run_digest="run", table_digest="tables", run_toml=RUN_TOML) as opened:
        assert not opened.ended
        secret = opened.swarm_secret()
        opened.mark_ended()
    files = ["journal.sqlite", "lock", "reducer", "results", "run.toml", "swarm-secret"]
    assert sorted(os.listdir(folder)) == files
    assert stat.S_IMODE((folder / "swarm-secret").stat().st_mode) == 0o600
    assert (folder / "run.toml").read_text() == RUN_TOML
    assert sorted(os.listdir(folder / "reducer")) == ["00000002.safetensors", "00000003.safetensors"]
    assert os.listdir(folder / "results") == ["00000001.seg"]
    with JournalFolder.open(folder, run_digest="run", table_digest="tables", run_toml=RUN_TOML) as opened:
        assert opened.swarm_secret() == secret and opened.ended


def refused(folder: Path, **choices: str) -> str:
    with pytest.raises(JournalError) as caught:
        open_journal(folder, Desk(), **choices)
    return str(caught.value)


def test_folders_that_are_refused(tmp_path: Path, desk: Desk) -> None:
    folder = tmp_path / "journal"
    filled(folder, desk, 1).close()
    assert "is of another run" in refused(folder, run_digest="other")
    assert "give another folder with --journal" in refused(folder, run_digest="other")
    assert "lays results out otherwise" in refused(folder, table_digest="other")
    with sqlite3.connect(folder / "journal.sqlite") as db:
        db.execute("UPDATE meta SET value = '3' WHERE key = 'format'")
    db.close()
    assert "has format 3, written by a newer Atoll" in refused(folder)
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").write_text("x")
    assert "is no journal, it holds 'thesis.tex'" in refused(home)
    assert "is a file" in refused(home / "thesis.tex")
    assert sorted(os.listdir(home)) == ["lock", "thesis.tex"]


@pytest.mark.parametrize("where", ["head", "middle"])
def test_a_damaged_database_is_refused(where: str, tmp_path: Path, desk: Desk) -> None:
    folder = tmp_path / "journal"
    filled(folder, desk, 40).close()
    path = folder / "journal.sqlite"
    content = bytearray(path.read_bytes())
    start = 0 if where == "head" else len(content) // 2
    content[start : start + 3000] = bytes(range(250)) * 12
    path.write_bytes(content)
    text = refused(folder)
    assert f"{path} is damaged" in text and "or give another folder with --journal" in text


HOLDER = """
import sys, time
from pathlib import Path
from coordinator.journal_folder import JournalFolder
with JournalFolder.open(Path(sys.argv[1]), run_digest="run", table_digest="tables", run_toml=""):
    Path(sys.argv[2]).touch()
    time.sleep(600)
"""


def test_a_second_coordinator_is_refused_until_the_first_has_ended(tmp_path: Path, desk: Desk) -> None:
    folder, ready = tmp_path / "journal", tmp_path / "ready"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder), str(ready)], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    try:
        until(ready.exists, "the first has opened it", watch=holder)
        text = refused(folder)
        assert (
            f"in use by another coordinator, process {holder.pid} on " in text
            and "stop that one first" in text
        )
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate(timeout=DEADLINE)
    open_journal(folder, desk).close()
