"""Network namespaces behind thin links, for one measurement: a switch, and a namespace for every rank.

Everything is made inside namespaces of our own, with random names; the interfaces of the machine are not
touched. The names last only while the network is being built, with signals held back: afterwards the
namespaces live by open files of this process (and by the processes in them), so that they are gone with it
however it ends.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from deploy.links.commands import CommandError, run_command, signals_held_back, token_bucket
from deploy.links.namespace import NAMES, enter, inside, why_not

__all__ = [
    "NAMES",
    "NamespacesUnavailable",
    "address",
    "bytes_sent",
    "enter",
    "linked",
    "part",
    "set_link",
    "token_bucket",
    "why_not",
]

INTERFACE: Final = "eth0"  # a rank's own, in its namespace
LOOPBACK: Final = "lo" if sys.platform.startswith("linux") else "lo0"
SUBNET: Final = "10.77.0"
COUNTERS: Final = Path("/proc/self/net/dev")


def bytes_sent(interface: str) -> int:
    """Bytes that have left by an interface of this process's network namespace; 0 where nothing tells."""
    try:
        lines = COUNTERS.read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    return 0


class NamespacesUnavailable(RuntimeError):
    """Namespaces and links cannot be made here; the text says why."""


@contextlib.contextmanager
def linked(ranks: int, bits_per_second: int | Sequence[int], congestion: str = "") -> Iterator[list[str]]:
    """Namespaces joined by a switch, each behind a link of that rate, or of its own, in both directions.

    The rank ``i`` has the address :func:`address` of ``i``. ``congestion`` names TCP's congestion control
    between them; empty: the machine's.

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
        with signals_held_back():
            try:
                for name in (*names, hub):
                    _command("ip", "netns", "add", name)
                    held.append(os.open(NAMES / name, os.O_RDONLY | os.O_CLOEXEC))
                _build(hub, names, [token_bucket(rate) for rate in rates], congestion)
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
    try:
        inside(path, lambda: _command(*words))
    except OSError as error:
        raise NamespacesUnavailable(str(error)) from error


def _build(hub: str, names: list[str], shapes: list[tuple[str, ...]], congestion: str) -> None:
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
        if congestion:  # as a route's: a namespace may not choose any for all its sockets
            way = [f"{SUBNET}.0/24", "dev", INTERFACE]
            _command("ip", "-n", name, "route", "change", *way, "congctl", congestion)
        _command("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", *shape)
        _command("tc", "-n", hub, "qdisc", "add", "dev", port, "root", *shape)


def _command(*words: str) -> None:
    try:
        run_command(*words)
    except CommandError as error:
        raise NamespacesUnavailable(str(error)) from None
