"""Where in its work a process is hit: it stops itself there, and whoever started it does the rest.

A process that has stopped (SIGSTOP) can be killed, left for a while, or cut off from the network before it
goes on, all of it at a point that no clock decides.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import random
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final


@dataclass(frozen=True)
class Point:
    """A function or method, before or after a call of which a process may stop; where there is a point
    ``since``, only once it has come there."""

    module: str
    name: str  # dotted
    after: bool = False
    since: str = ""


POINTS: Final[dict[str, Point]] = {
    # of a node
    "joining": Point("node.launch", "_claim", after=True),  # model and data are there
    "computing": Point("node.language", "LanguageModel.loss", after=True),
    "sending": Point("node.exchange.contributor", "Contributor._mark_sent"),  # its last frame is missing
    "waiting": Point("node.exchange.bulk", "_upload", after=True),
    "receiving": Point("node.exchange.result", "ResultAssembly.add", since="sending"),  # and not in a replay
    "applying": Point("optim.round_optimizer", "RoundOptimizer.apply", since="sending"),
    "uploading": Point("node.exchange.chunks_up", "_load"),  # a chunk, after the header
    "loading": Point("node.exchange.chunks_down", "SnapshotAssembly.add"),
    "replaying": Point("node.exchange.replay", "Replay._fetch"),
    # of a node that reduces a slice
    "ordered": Point("node.exchange.peers.desk", "Desk.reduce", after=True),  # and has no contribution
    "collecting": Point("node.exchange.peers.slice_reducer", "SliceReducer.delivered", after=True),
    "reduced": Point("optim.reduction", "Reduction.digest", after=True),  # and has told nobody
    "told": Point("node.exchange.peers.upload", "SliceAssembly._end", after=True, since="reduced"),
    "committed": Point("node.exchange.peers.desk", "Desk.committed", since="reduced"),
    # of the coordinator
    "gathering": Point("coordinator.gathering", "Gathering._returning", after=True),
    "open": Point("coordinator.open_round", "OpenRound.begin", after=True),
    "delivered": Point("coordinator.active_round", "ActiveRound.delivered", after=True),
    "journaling": Point("coordinator.journal_file", "FileJournal._commit"),  # settled, and not yet on disk
    "journaled": Point("coordinator.journal_file", "FileJournal._commit", after=True),  # and not yet told
}


@dataclass(frozen=True)
class Fault:
    """A process stops itself at ``point`` when it comes there for the ``times``-th time.

    Attributes:
        point: a key of :data:`POINTS`; empty for none.
        heartbeat: seconds between two heartbeats of a coordinator, instead of its own; 0 leaves them.
        failing: share of the contributions of a node that fail.
        seed: of that.
        compute: seconds that a forward pass takes longer, as if a device were at work that is not this
            machine's processor.
    """

    point: str = ""
    times: int = 1
    heartbeat: float = 0.0
    failing: float = 0.0
    seed: int = 0
    compute: float = 0.0


NONE: Final = Fault()


def arm(fault: Fault) -> None:
    """Prepare this process."""
    if fault.point:
        point = POINTS[fault.point]
        begun = threading.Event()
        if point.since:
            _wrap(POINTS[point.since], _noting(begun))
        else:
            begun.set()
        _wrap(point, _stopping(point.after, fault.times, begun))
    if fault.heartbeat:
        _beat(fault.heartbeat)
    if fault.failing:
        _fail(fault.failing, random.Random(fault.seed))
    if fault.compute:
        _wrap(Point("node.language", "LanguageModel.loss"), _lasting(fault.compute))


def stopped(pid: int) -> bool:
    """Whether a process has stopped."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] == "T"


def _wrap(point: Point, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    owner: Any = importlib.import_module(point.module)
    *path, name = point.name.split(".")
    for part in path:
        owner = getattr(owner, part)
    kinds = [owner, *_heirs(owner)] if inspect.isclass(owner) else [owner]
    found = [kind for kind in kinds if name in vars(kind)]
    if not found:
        raise AttributeError(f"there is no {point.name} in {point.module} any more")
    for kind in found:
        setattr(kind, name, wrapper(getattr(kind, name)))


def _heirs(kind: type[Any]) -> list[type[Any]]:
    return [heir for child in kind.__subclasses__() for heir in (child, *_heirs(child))]


def _noting(begun: threading.Event) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def wrapper(go_on: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(go_on)
        def calling(*args: Any, **kwargs: Any) -> Any:
            begun.set()
            return go_on(*args, **kwargs)

        return calling

    return wrapper


def _stopping(
    after: bool, times: int, begun: threading.Event
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    left = [times]

    def come() -> None:
        if not begun.is_set():
            return
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGSTOP)

    def wrapper(go_on: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(go_on)
        async def awaiting(*args: Any, **kwargs: Any) -> Any:
            if not after:
                come()
            result = await go_on(*args, **kwargs)
            if after:
                come()
            return result

        @functools.wraps(go_on)
        def calling(*args: Any, **kwargs: Any) -> Any:
            if not after:
                come()
            result = go_on(*args, **kwargs)
            if after:
                come()
            return result

        return awaiting if inspect.iscoroutinefunction(go_on) else calling

    return wrapper


def _lasting(seconds: float) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def wrapper(go_on: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(go_on)
        def calling(*args: Any, **kwargs: Any) -> Any:
            time.sleep(seconds)
            return go_on(*args, **kwargs)

        return calling

    return wrapper


def _beat(seconds: float) -> None:
    from coordinator.plan import RunPlan

    of = RunPlan.of
    RunPlan.of = lambda *args, **kwargs: replace(of(*args, **kwargs), heartbeat=seconds)  # type: ignore[method-assign]


def _fail(share: float, chance: random.Random) -> None:
    """Let that share of a node's contributions fail.

    Of every two one breaks all connections of the node as it begins, and one is refused, as its payload does
    not have its digest. The node tries again soon.
    """
    from node.exchange.link import Link
    from node.exchange.retry import Backoff
    from protos import wire
    from protos.atoll_pb2 import ContributionEnd

    exchange, encode = Link.exchange, wire.encode_frame
    damage = [False]

    def contributing(link: Link, secret: str) -> Any:
        draw = chance.random()
        damage[0] = share / 2 <= draw < share
        call = exchange(link, secret)
        if draw < share / 2:
            _hang_up()
        return call

    def encoding(kind: int, body: bytes | bytearray | memoryview = b"", **place: int) -> bytes:
        if kind == wire.END and damage[0]:
            damage[0] = False
            body = ContributionEnd(payload_digest="0" * 32).SerializeToString()
        return encode(kind, body, **place)

    Link.exchange = contributing  # type: ignore[assignment,method-assign]
    wire.encode_frame = encoding
    Backoff.__init__.__defaults__ = (0.01, 2.0, 0.1)


def _hang_up() -> None:
    """Break this process's connections, as a router does that forgets them."""
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if not stat.S_ISSOCK(os.fstat(int(entry)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(entry))) as held:
                if held.family in (socket.AF_INET, socket.AF_INET6) and held.type == socket.SOCK_STREAM:
                    held.shutdown(socket.SHUT_RDWR)
