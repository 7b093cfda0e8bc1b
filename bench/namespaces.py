"""Network namespaces behind thin links, for one measurement: a switch, and a namespace for every rank.

Everything is made inside namespaces of our own, with random names; the interfaces of the machine are not
touched. The names last only while the network is being built, with signals held back: afterwards the
namespaces live by open files of this process (and by the processes in them), so that they are gone with it
however it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

INTERFACE: Final = "eth0"  # a rank's own, in its namespace
SUBNET: Final = "10.77.0"
COMMAND_SECONDS: Final = 20.0
NAMES: Final = Path("/run/netns")
CLONE_NEWNET: Final = 0x40000000


class NamespacesUnavailable(RuntimeError):
    """Namespaces and links cannot be made here; the text says why."""


def why_not() -> str | None:
    """Why namespaces cannot be made by this process, or None if nothing speaks against it."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are a thing of Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"{' and '.join(missing)} (iproute2) not found" if missing else None


def token_bucket(bits_per_second: int) -> list[str]:
    """The arguments of ``tc`` for a link of that rate.

    The bucket holds what 2 ms let through, and a whole 64 KiB segment where the rate is 50 Mbit/s or more;
    a smaller one makes the kernel cut segments, which costs CPU time and a tenth of the rate.
    """
    burst = max(bits_per_second // 8 // 500, 3 * 1514, 70_000 if bits_per_second >= 50_000_000 else 0)
    return ["tbf", "rate", f"{bits_per_second}bit", "burst", str(burst), "latency", "50ms"]


@contextlib.contextmanager
def linked(ranks: int, bits_per_second: int | Sequence[int]) -> Iterator[list[str]]:
    """Namespaces joined by a switch, each behind a link of that rate, or of its own, in both directions.

    The rank ``i`` has the address :func:`address` of ``i``.

    Yields:
        For each rank a path for :func:`enter`, valid within the context.

    Raises:
        NamespacesUnavailable: if they cannot be made.
    """
    reason = why_not()
    if reason is not None:
        raise NamespacesUnavailable(reason)
    rates = [bits_per_second] * ranks if isinstance(bits_per_second, int) else list(bits_per_second)
    tag = secrets.token_hex(4)
    hub, names = f"atoll-{tag}-hub", [f"atoll-{tag}-{rank}" for rank in range(ranks)]
    held: list[int] = []
    try:
        with _without_signals():
            try:
                for name in (*names, hub):
                    _command("ip", "netns", "add", name)
                    held.append(os.open(NAMES / name, os.O_RDONLY | os.O_CLOEXEC))
                _build(hub, names, [token_bucket(rate) for rate in rates])
            finally:
                for name in (*names, hub):
                    if (NAMES / name).exists():
                        _command("ip", "netns", "delete", name)
        yield [f"/proc/{os.getpid()}/fd/{file}" for file in held[:ranks]]
    finally:
        for file in held:
            os.close(file)


def address(rank: int) -> str:
    """Of a rank's interface, as all of them see it."""
    return f"{SUBNET}.{rank + 1}"


def enter(path: str) -> None:
    """Move this thread, and the threads that it will start, into a namespace of :func:`linked`.

    Raises ``OSError`` if the system refuses.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        libc = ctypes.CDLL(None, use_errno=True)  # os.setns came with Python 3.12
        if libc.setns(file, CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"cannot enter the network namespace {path}: {os.strerror(number)}")
    finally:
        os.close(file)


def set_link(path: str, *, up: bool) -> None:
    """Take the link of a namespace of :func:`linked` down, or up again.

    Raises:
        NamespacesUnavailable: if that cannot be done.
    """
    _within(path, "ip", "link", "set", "dev", INTERFACE, "up" if up else "down")


def part(path: str, address: str) -> None:
    """Leave a namespace of :func:`linked` without a route to the address of another.

    Raises:
        NamespacesUnavailable: if that cannot be done.
    """
    _within(path, "ip", "route", "add", "unreachable", address)


def _within(path: str, *words: str) -> None:
    problem: list[BaseException] = []

    def work() -> None:
        try:
            enter(path)
            _command(*words)
        except (NamespacesUnavailable, OSError) as error:
            problem.append(error)

    thread = threading.Thread(target=work, name="bench-link")  # it alone moves
    thread.start()
    thread.join()
    if problem:
        raise NamespacesUnavailable(str(problem[0])) from problem[0]


def _build(hub: str, names: list[str], shapes: list[list[str]]) -> None:
    _command("ip", "-n", hub, "link", "add", "name", "switch", "type", "bridge")
    _command("ip", "-n", hub, "link", "set", "dev", "switch", "up")
    for rank, (name, shape) in enumerate(zip(names, shapes, strict=True)):
        port = f"port{rank}"
        pair = ["name", port, "type", "veth", "peer", "name", INTERFACE, "netns", name]
        _command("ip", "-n", hub, "link", "add", *pair)
        _command("ip", "-n", hub, "link", "set", "dev", port, "master", "switch", "up")
        _command("ip", "-n", name, "address", "add", f"{address(rank)}/24", "dev", INTERFACE)
        for interface in ("lo", INTERFACE):
            _command("ip", "-n", name, "link", "set", "dev", interface, "up")
        _command("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", *shape)
        _command("tc", "-n", hub, "qdisc", "add", "dev", port, "root", *shape)


def _command(*words: str) -> None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_SECONDS)
    except subprocess.TimeoutExpired:
        raise NamespacesUnavailable(f"{' '.join(words)}: no answer in {COMMAND_SECONDS:g} s") from None
    if done.returncode:
        raise NamespacesUnavailable(f"{' '.join(words)}: {done.stderr.strip() or done.returncode}")


@contextlib.contextmanager
def _without_signals() -> Iterator[None]:
    """Hold back what would end the process; the commands that it starts inherit that."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
