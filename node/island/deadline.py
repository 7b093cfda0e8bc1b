"""Until when a collective may take, and who is missing when that has passed.

A process group fails a collective after its timeout, but its error does not say which rank did not come. So
the ranks that fail tell each other, by the store that they met at: each leaves a note of where it failed, and
whoever has left none within a moment is the one to look at.
"""

from __future__ import annotations

import re
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, Protocol, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

DEFAULT_SECONDS: Final = 300.0
GRACE_SECONDS: Final = 2.0  # for the notes of the others
_NOTE_BYTES: Final = 300
_POLL_SECONDS: Final = 0.05
_REMARKS: Final = re.compile(r"^\[[^]]*\.cc:\d+\] |\. This is typically .*$")  # of gloo: the place, advice


def cause(error: BaseException) -> str:
    """What a transport says of its failure, in one line, without its general remarks."""
    lines = str(error).strip().splitlines()
    return _REMARKS.sub("", lines[0]) if lines else type(error).__name__


class Notes(Protocol):
    """What is needed of a store (``torch.distributed.Store``)."""

    def set(self, key: str, value: str) -> None:
        """Keep ``value``."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""

    def get(self, key: str) -> bytes:
        """A value that is there."""


def timeout_of(group: dist.ProcessGroup) -> float | None:
    """Seconds after which the collectives of ``group`` fail by themselves; None where it does not tell."""
    known = []
    for kind in ("cpu", "cuda"):
        try:
            backend: Any = group._get_backend(torch.device(kind))
            known.append(backend.options._timeout.total_seconds())
        except (AttributeError, RuntimeError):
            continue
    return min(known, default=None)


def deadline(wanted: float | None, given: Sequence[float | None]) -> float:
    """Seconds that a collective may take: ``wanted``, or else the shortest of ``given`` (the timeouts of the
    groups that it goes by and of the default group) and :data:`DEFAULT_SECONDS`.

    Raises:
        ValueError: if ``wanted`` is not positive.
    """
    if wanted is None:
        return min([DEFAULT_SECONDS, *(seconds for seconds in given if seconds is not None)])
    if not wanted > 0:
        raise ValueError(f"timeout={wanted:g}: give the seconds that a collective may take, more than 0")
    return wanted


def set_deadline(wanted: float | None, groups: Sequence[dist.ProcessGroup]) -> float:
    """Give all ``groups`` the timeout that :func:`deadline` chooses for them; returns its seconds."""
    world = dist.group.WORLD
    seconds = deadline(wanted, [timeout_of(g) for g in (*groups, *([world] if world is not None else []))])
    for group in groups:
        if timeout_of(group) != seconds:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a backend without timeouts: nothing of it can wait
                c10d._set_pg_timeout(timedelta(seconds=seconds), group)
    return seconds


def default_store() -> Notes | None:
    """The store of the default process group, or None without one."""
    return cast(Notes, c10d._get_default_store()) if dist.is_initialized() else None


def word_of(
    ranks: Sequence[int],
    rank: int,
    said: str,
    store: Notes,
    *,
    grace: float = GRACE_SECONDS,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Leave a note that this rank failed, and say what the others' notes say.

    Args:
        ranks: global ranks that take part in what failed.
        rank: this one's.
        said: what failed here, and how.
        store: that all ranks share.
        grace: seconds that the others have.
        clock: monotonic seconds.
        sleep: waits for so many seconds.
    """
    others = [other for other in ranks if other != rank]
    notes: dict[int, str] = {}
    end = clock() + grace
    try:
        store.set(_key(rank), said[:_NOTE_BYTES])
        while len(notes) < len(others):
            for other in others:
                if other not in notes and store.check([_key(other)]):
                    notes[other] = store.get(_key(other)).decode(errors="replace")[:_NOTE_BYTES]
            if clock() >= end:
                break
            sleep(_POLL_SECONDS)
    except RuntimeError as error:  # its host went with the one that died
        return (
            f"The ranks' store is gone too ({cause(error)}): look at the log of the rank that holds it, "
            "often 0"
        )
    missing = [other for other in others if other not in notes]
    words = [f"rank {other} failed at: {note}" for other, note in sorted(notes.items())]
    if missing:
        which = f"rank {missing[0]} has" if len(missing) == 1 else f"ranks {missing} have"
        words.insert(0, f"{which} not come and reported no failure: dead, stuck, or at other work")
    return "; ".join(words)


def ask(ranks: Sequence[int], said: str) -> str:
    """:func:`word_of` the default group's ranks, given up in time though the store hangs; "" for one rank."""
    store, answers = default_store(), list[str]()
    if store is None or len(ranks) < 2:
        return ""
    work = (ranks, dist.get_rank(), said, store)
    thread = threading.Thread(target=lambda: answers.append(word_of(*work)), daemon=True)
    thread.start()
    thread.join(GRACE_SECONDS * 2)
    return answers[0] if answers else "The ranks' store does not answer either"


def _key(rank: int) -> str:
    return f"atoll/island/failed/{rank}"
