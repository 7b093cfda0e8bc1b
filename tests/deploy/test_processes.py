from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.processes import (
    Children,
    Grace,
    ProcessError,
    follow_parent,
    tail,
    unwinding_signals,
    watch_parent,
)
from tests.waiting import until

QUICK = Grace(interrupt=0.3, terminate=0.3, kill=5.0)
DEADLINE = 100.0


def _python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", textwrap.dedent(code)]


def _until(condition: Callable[[], bool], what: str) -> None:
    until(condition, what, deadline=DEADLINE)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    try:
        return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _says(log: Path, word: str) -> Callable[[], bool]:
    return lambda: log.exists() and word in log.read_text()


SLEEPER = "import time; print('up', flush=True); time.sleep(60)"
STUBBORN = """
    import signal, time
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print('up', flush=True)
    time.sleep(60)
"""
TOLD = """
    import signal, time
    signal.signal(signal.SIGINT, lambda number, frame: print('told', flush=True))
    print('up', flush=True)
    while True:
        time.sleep(60)
"""
POLITE = """
    import time
    try:
        print('up', flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        print('left', flush=True)
"""


def test_leaving_the_block_interrupts_and_waits(tmp_path: Path) -> None:
    with Children() as children:
        child = children.start("polite", _python(POLITE), log=tmp_path / "log" / "polite.txt")
        _until(_says(child.log, "up"), "start")
        assert child.code is None
        children.check()
    assert child.code == 0
    assert child.tail().splitlines() == ["up", "left"]


def test_a_failure_in_the_block_ends_them_too(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="broken"), Children(QUICK) as children:
        first = children.start("first", _python(SLEEPER), log=tmp_path / "1")
        second = children.start("second", _python(SLEEPER), log=tmp_path / "2")
        raise ValueError("broken")
    assert first.code is not None and second.code is not None


def test_one_that_ignores_signals_is_killed(tmp_path: Path) -> None:
    with Children(QUICK) as children:
        child = children.start("stubborn", _python(STUBBORN), log=tmp_path / "log")
        _until(_says(child.log, "up"), "start")
    assert child.code == -signal.SIGKILL
    assert "killed by SIGKILL" in child.fate()


def test_a_second_interrupt_kills_at_once(tmp_path: Path) -> None:
    children = Children(Grace(interrupt=DEADLINE, terminate=DEADLINE, kill=DEADLINE))
    child = children.start("stubborn", _python(TOLD), log=tmp_path / "log")
    _until(_says(child.log, "up"), "start")

    def again() -> None:
        _until(_says(child.log, "told"), "the first interrupt")  # which stop() has sent: it waits now
        os.kill(os.getpid(), signal.SIGALRM)

    second = threading.Thread(target=again)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            second.start()
            children.stop()
    finally:
        second.join()
        signal.signal(signal.SIGALRM, before)
    assert child.code == -signal.SIGKILL


def test_children_have_a_group_of_their_own(tmp_path: Path) -> None:
    with Children() as children:
        child = children.start("sleeper", _python(SLEEPER), log=tmp_path / "log")
        assert os.getpgid(child.pid) == child.pid != os.getpgid(0)


def test_check_shows_the_last_lines_of_one_that_died(tmp_path: Path) -> None:
    with Children() as children:
        code = "for i in range(40): print('line', i)\nraise SystemExit(3)"
        child = children.start("node-1", [sys.executable, "-c", code], log=tmp_path / "log")
        assert children.wait(child, DEADLINE) == 3
        with pytest.raises(ProcessError) as caught:
            children.check()
    text = str(caught.value)
    assert "node-1 ended with exit code 3" in text
    assert text.endswith("line 39") and "line 28" in text and "line 27" not in text


def test_wait_has_a_deadline(tmp_path: Path) -> None:
    with Children() as children:
        child = children.start("sleeper", _python(SLEEPER), log=tmp_path / "log")
        with pytest.raises(ProcessError, match=r"sleeper has not ended within 0\.05 s"):
            children.wait(child, 0.05)


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    with Children() as children, pytest.raises(ProcessError, match="cannot start ghost"):
        children.start("ghost", [str(tmp_path / "missing")], log=tmp_path / "log")


def test_tail_reads_the_end_only(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("x" * 100_000 + "\nlast\n")
    assert tail(path, 1) == "last"
    assert len(tail(path, 2)) < 20_000
    assert tail(tmp_path / "missing", 3) == ""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent death signal is Linux's")
def test_a_killed_parent_takes_its_children_along(tmp_path: Path) -> None:
    log, root = tmp_path / "log", Path(__file__).parents[2]
    child = (
        "import os, time; from deploy.processes import follow_parent; assert follow_parent();"
        "print('pid', os.getpid(), flush=True); time.sleep(60)"
    )
    parent = f"""
        import sys, time
        from pathlib import Path
        from deploy.processes import Children
        with Children() as children:
            command = [sys.executable, "-c", {child!r}]
            children.start("child", command, log=Path({str(log)!r}), directory=Path({str(root)!r}))
            time.sleep(60)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(parent)], cwd=root)
    try:
        _until(_says(log, "\n"), "child")
        pid = int(log.read_text().split()[1])
        assert _alive(pid)
    finally:
        process.kill()
        process.wait(DEADLINE)
    _until(lambda: not _alive(pid), "end of the child")


def test_without_a_named_parent_nothing_is_followed() -> None:
    assert follow_parent({}) is False
    assert follow_parent({"ATOLL_PARENT_PID": "soon"}) is False


def test_where_the_kernel_does_not_help_a_thread_watches() -> None:
    parents, ended = iter([7, 7, 1]), threading.Event()
    watch_parent(7, lambda: next(parents), ended.set, poll_seconds=0.001)
    assert ended.wait(DEADLINE)
    assert next(parents, None) is None


def test_sigterm_unwinds(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught, unwinding_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(DEADLINE)
    assert caught.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
