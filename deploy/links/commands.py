"""The commands that links are made with, `tc`, `ip` and `iptables`: running them, and their arguments."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Final

from deploy.errors import UserError
from deploy.links.namespace import path_of
from deploy.links.shape import Shape

SECONDS: Final = 20.0  # for one command
FRAME: Final = 1514  # bytes of a full Ethernet frame, as the kernel counts it
SEGMENT_RATE: Final = 50_000_000  # bit/s from which a bucket holds a whole segment
SEGMENT: Final = 70_000  # bytes: 64 KiB that the network card cuts, with its headers
FAST: Final = 5_000_000_000  # bit/s from which 20 ms of queue suffice
UNLIMITED: Final = 10_000_000_000  # bit/s to reckon a queue with, where no rate is set
_PACKAGES: Final = {"tc": "iproute2", "ip": "iproute2", "nsenter": "util-linux"}

Run = Callable[..., str]  # words of a command -> its stdout; raises ShapingError


class ShapingError(UserError):
    """A link cannot be shaped; the text says what stands in the way and what to do about it."""


class CommandError(ShapingError):
    """A command that failed; ``answer`` is what it said."""

    def __init__(self, words: tuple[str, ...], answer: str) -> None:
        self.words, self.answer = words, answer
        super().__init__(f"{' '.join(words)}: {answer}{_advice(answer)}")


def run_command(*words: str) -> str:
    """Run a command and return its stdout.

    Raises:
        CommandError: it is not installed, failed, or did not end within 20 seconds.
    """
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        raise CommandError(words, f"no answer within {SECONDS:g} s") from None
    except FileNotFoundError:
        if not sys.platform.startswith("linux"):
            raise CommandError(words, "not found; links are shaped with tc, which only Linux has") from None
        package = _PACKAGES.get(words[0], words[0])
        raise CommandError(words, f"not found; install {package}, as in 'apt install {package}'") from None
    if done.returncode:
        raise CommandError(words, done.stderr.strip() or f"exit code {done.returncode}")
    return done.stdout


@contextlib.contextmanager
def signals_held_back() -> Iterator[None]:
    """Hold back what would end the process; the commands that it starts inherit that."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def tc(netns: str | None, *words: str) -> tuple[str, ...]:
    """A ``tc`` command within a network namespace, by name or path; ``None``: that of the caller."""
    return (*_within(netns), "tc", *words)


def ip(netns: str | None, *words: str) -> tuple[str, ...]:
    """An ``ip`` command within a network namespace."""
    return (*_within(netns), "ip", *words)


def iptables(netns: str | None, *words: str, program: str = "iptables") -> tuple[str, ...]:
    """An ``iptables`` command on the table ``mangle`` within a network namespace."""
    return (*_within(netns), program, "-w", "-t", "mangle", *words)


def _within(netns: str | None) -> tuple[str, ...]:
    return ("nsenter", f"--net={path_of(netns)}") if netns else ()


def bucket_bytes(bits_per_second: int, frame: int = FRAME) -> int:
    """Bytes that may pass at once over a link of that rate.

    The bucket holds what 2 ms let through, and a whole 64 KiB segment where the rate is 50 Mbit/s or more;
    a smaller one makes the kernel cut segments, which costs CPU time and a tenth of the rate. Three of the
    interface's frames go in whatever the rate: what is larger than the bucket would never pass.
    """
    whole = SEGMENT if bits_per_second >= SEGMENT_RATE else 0
    return max(bits_per_second // 8 // 500, 3 * frame, whole)


def token_bucket(bits_per_second: int, frame: int = FRAME) -> tuple[str, ...]:
    """The arguments of ``tc`` for a link of that rate, over an interface with such frames in bytes."""
    burst = bucket_bytes(bits_per_second, frame)
    latency = "20ms" if bits_per_second >= FAST else "50ms"
    return ("tbf", "rate", f"{bits_per_second}bit", "burst", str(burst), "latency", latency)


def emulator(shape: Shape) -> tuple[str, ...]:
    """The arguments of ``tc`` for delay, jitter and loss by netem.

    Its queue must hold what is under way for the delay, and what waits for the rate behind it.
    """
    seconds = shape.delay + shape.jitter + 0.05
    limit = int((shape.rate or UNLIMITED) * seconds / 8 / 1500) + 1000
    words = ["netem", "limit", str(limit)]
    if shape.delay:
        words += ["delay", f"{round(shape.delay * 1e6)}us"]
        words += [f"{round(shape.jitter * 1e6)}us"] if shape.jitter else []
    if shape.loss:
        words += ["loss", f"{shape.loss * 100:.6g}%"]
    return tuple(words)


def _advice(answer: str) -> str:
    lowered = answer.lower()
    if (
        "operation not permitted" in lowered
        or "permission denied" in lowered
        or "you must be root" in lowered
    ):
        return "; links are shaped by root, or in a container with the capability NET_ADMIN"
    if "kind is unknown" in lowered or "unknown device type" in lowered or "no chain/target" in lowered:
        return "; this kernel lacks it, or its module is not loaded: see 'Throttling' in docs/testbed.md"
    if "nsenter: cannot open" in lowered:
        return "; 'ip netns' lists the namespaces with names"
    return ""
