"""Many simulated runs in a few processes: progress as they go, resumable, and ended cleanly by Ctrl-C."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from deploy.compare_outcome import Outcome, run_name, simulate, store, stored
from deploy.processes import PARENT_KEY, ProcessError, follow_parent
from protos.runfile import RunFile

if TYPE_CHECKING:
    from deploy.simulation import Build

LOOK_SECONDS: Final = 0.2  # between two looks at the progress
TELL_SECONDS: Final = 0.5  # between two messages of one process


@dataclass(frozen=True)
class Job:
    """A run to simulate; label and seed are unique.

    ``build`` makes the optimizer of a model where that is not the run file's: a function of a module, for it
    goes to another process by its name.
    """

    label: str
    runfile: RunFile
    build: Build | None = None

    @property
    def seed(self) -> int:
        """Of the run."""
        return self.runfile.run.seed

    @property
    def name(self) -> str:
        """For people."""
        return run_name(self.label, self.seed)

    def path(self, folder: Path) -> Path:
        """Where its outcome is kept."""
        return folder / f"{re.sub(r'[^A-Za-z0-9._-]', '_', self.label)}-seed{self.seed}.json"


class Watcher:
    """Told how the jobs go; this one keeps quiet."""

    def begin(self, jobs: int, known: int) -> None:
        """``known`` of the jobs are done already, by an earlier call."""

    def progress(self, name: str, share: float, loss: float) -> None:
        """A running job has done a share of its work."""

    def done(self, outcome: Outcome) -> None:
        """A job has ended."""


class Stopped(Exception):
    """Raised within a process whose work is no longer wanted."""


def run_jobs(
    jobs: Sequence[Job], processes: int, *, folder: Path | None = None, watcher: Watcher | None = None
) -> list[Outcome]:
    """Simulate all jobs, each on one thread of one of ``processes`` processes; outcomes in their order.

    Args:
        folder: outcomes are kept there; a job whose outcome is there already, of the same run digest, is not
            simulated again.

    Raises:
        ProcessError: a process died.
        KeyboardInterrupt: after the processes have ended; finished outcomes are in ``folder``.
    """
    watcher = watcher or Watcher()
    outcomes: dict[int, Outcome] = {}
    for index, job in enumerate(jobs):
        found = stored(job.path(folder), job.runfile.digest) if folder else None
        if found is not None:
            outcomes[index] = found
    todo = [index for index in range(len(jobs)) if index not in outcomes]
    watcher.begin(len(jobs), len(outcomes))
    if todo:
        with _interrupts_noted() as interrupted, _pool(min(processes, len(todo))) as (submit, news):
            pending = {submit(jobs[index]): index for index in todo}
            while pending:
                finished, _ = wait(pending, LOOK_SECONDS, FIRST_COMPLETED)
                if interrupted.is_set():
                    raise KeyboardInterrupt
                while not news.empty():
                    watcher.progress(*news.get())
                for future in finished:
                    index = pending.pop(future)
                    outcomes[index] = future.result()
                    if folder:
                        store(jobs[index].path(folder), outcomes[index])
                    watcher.done(outcomes[index])
    return [outcomes[index] for index in range(len(jobs))]


Submit = Callable[[Job], "Future[Outcome]"]


@contextlib.contextmanager
def _pool(processes: int) -> Iterator[tuple[Submit, Any]]:
    """Processes that simulate; an error within the block, or Ctrl-C, ends them after their present batch."""
    spawn = multiprocessing.get_context("spawn")
    # Without a lock, for a process that is killed while it holds one would stop all others.
    stop, news = spawn.RawValue("b", 0), spawn.SimpleQueue()
    with (
        _named_parent(),
        ProcessPoolExecutor(processes, mp_context=spawn, initializer=_begin, initargs=(stop, news)) as pool,
    ):

        def submit(job: Job) -> Future[Outcome]:
            with _interrupts_held():  # it may start a process, which must not die of a Ctrl-C before _begin
                return pool.submit(_simulate, job.label, job.runfile.to_toml(), job.build)

        try:
            yield submit, news
        except BrokenProcessPool as error:
            raise ProcessError(
                "a process that simulates a run was killed, probably for want of memory: use fewer jobs"
            ) from error
        finally:
            stop.value = 1
            pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _interrupts_noted() -> Iterator[threading.Event]:
    """The first Ctrl-C sets the event, a later one has its usual effect.

    Raised at any moment, it would now and then come within :func:`concurrent.futures.wait`, which then leaves
    the locks of its futures taken: the pool could not end any more.
    """
    interrupted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield interrupted
        return
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: FrameType | None) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C waits until the end of the block; processes started within never see it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _named_parent() -> Iterator[None]:
    """Processes started within take this one as the parent that they must not outlive."""
    before = os.environ.get(PARENT_KEY)
    os.environ[PARENT_KEY] = str(os.getpid())
    try:
        yield
    finally:
        if before is None:
            del os.environ[PARENT_KEY]
        else:
            os.environ[PARENT_KEY] = before


# ------------------------------------------------------------------------------- within the processes

_links: tuple[Any, Any] | None = None  # the stop event and the queue of news


def _begin(stop: Any, news: Any) -> None:
    """Set one of the processes up: the parent alone decides about Ctrl-C."""
    global _links
    with _interrupts_held():
        follow_parent()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    _links = (stop, news)
    warnings.simplefilter("ignore", UserWarning)  # what is unwise in a run file is said before it starts
    import torch

    torch.set_num_threads(1)


def _simulate(label: str, text: str, build: Build | None) -> Outcome:
    assert _links is not None, "_begin has not run in this process"
    stop, news = _links
    runfile = RunFile.parse(text, label)
    name, told = run_name(label, runfile.run.seed), time.monotonic()

    def progress(share: float, loss: float) -> None:
        nonlocal told
        if stop.value:
            raise Stopped
        now = time.monotonic()
        if now - told >= TELL_SECONDS:
            told = now
            news.put((name, share, loss))

    return simulate(label, runfile, progress, build=build)
