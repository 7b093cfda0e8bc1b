from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.errors import UserError
from deploy.testbed import home
from deploy.testbed.home import MARK, Home
from tests.waiting import until

ROOT = Path(__file__).parents[3]
HOLD = (
    "import sys, time; from pathlib import Path; from deploy.testbed.home import Home\n"
    "held = Home(Path(sys.argv[1])); print(held.mark, flush=True); time.sleep(600)"
)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def test_a_bed_is_found_while_it_runs(tmp_path: Path) -> None:
    with Home(tmp_path / "out") as held:
        assert not held.left
        assert home.find(None) == held.socket
        assert home.find(tmp_path / "out") == held.socket
        assert held.path.stat().st_mode & 0o777 == 0o700
        with pytest.raises(UserError, match="no test bed runs here with --out"):
            home.find(tmp_path / "other")
    assert not held.path.exists()
    with pytest.raises(UserError, match="no test bed runs here; 'atoll testbed' starts one"):
        home.find(None)


def _holder(out: Path) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(out)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_beds_are_told_apart(tmp_path: Path) -> None:
    process, _ = _holder(tmp_path / "one")
    try:
        with Home(tmp_path / "two"):
            with pytest.raises(UserError, match="2 test beds run: say with --out"):
                home.find(None)
            assert home.find(tmp_path / "one").parent.name == f"testbed-{process.pid}"
    finally:
        process.kill()
        process.communicate()


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are found by Linux's /proc")
def test_what_a_killed_bed_has_left_is_taken_away(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "invite").write_text("a token")
    process, mark = _holder(out)
    left = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"],
        env={**os.environ, MARK: mark},
        start_new_session=True,
    )
    try:
        environ = Path(f"/proc/{left.pid}/environ")  # empty for a moment after the start of the program
        until(lambda: MARK.encode() in environ.read_bytes(), "the environment of the process")
        assert list(home.clean()) == [], "it lives"
        process.kill()
        process.communicate()
        with Home(tmp_path / "next") as following:
            (sentence,) = following.left
        assert f"process {process.pid}" in sentence and "ended 1 of its processes" in sentence
        until(lambda: left.poll() is not None, "the end of the process")
        assert left.returncode == -signal.SIGKILL
        assert not (out / "invite").exists()
        assert not (tmp_path / "atoll" / f"testbed-{process.pid}").exists()
        assert list(home.clean()) == []
    finally:
        left.kill()
        left.wait()
