"""Links as they were asked for and as they are: rates, delays, jitter and losses, measured over one cable.

Two namespaces of our own, joined by a cable, of which one end is shaped. A rate is that of one TCP
connection, a delay that of UDP datagrams there and back. What the machine does without a shape stands beside
it: no link can be faster than that.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from bench.report import Report, median
from deploy.links.kernel import Kernel, probe_apart
from deploy.links.measuring import rate, round_trips
from deploy.links.namespace import inside
from deploy.links.shape import Shape
from deploy.links.shaping import shape
from deploy.testbed.namespace import Namespace, why_not
from protos.units import format_duration, format_rate

RATES: Final = (10**6, 10**7, 10**8, 10**9, 10**10)
LONG: Final = (10**8, 10**9)  # with a delay
DELAYS: Final = (0.001, 0.01, 0.05, 0.2)  # seconds, one way
LOSSES: Final = (0.01, 0.1)
SHARE: Final = 0.05  # by which a rate may be off
EXCESS: Final = 0.002  # seconds by which the median of round trips may be longer
TRIES: Final = 3
HERE, THERE = "10.79.0.1", "10.79.0.2"
NAME: Final = "wan"
_BUFFERS: Final = {"tcp_rmem": "4096 131072 134217728", "tcp_wmem": "4096 65536 134217728"}


def run(quick: bool) -> Report:
    """Measure; without root, namespaces or ``tc`` only say why not."""
    report = Report("links")
    reason = why_not()
    if reason is not None:
        report.note(f"no figures: {reason}")
        return report
    kernel = probe_apart()
    for sentence in kernel.sentences():
        report.note(sentence)
    seconds = 0.5 if quick else 3.0
    with _cable() as (here, there):
        _rates(report, here, there, kernel, RATES[1:4] if quick else RATES, seconds)
        if kernel.holds:
            _delays(report, here, there, kernel, DELAYS[1:2] if quick else DELAYS)
            _long(report, here, there, kernel, LONG[:1] if quick else LONG, seconds)
            _jitter(report, here, there, kernel, 50 if quick else 500)
            _losses(report, here, there, kernel, 500 if quick else 5000)
    return report


@contextlib.contextmanager
def _cable() -> Iterator[tuple[str, str]]:
    with Namespace() as here, Namespace() as there:
        peer = ("peer", "name", NAME, "netns", there.path)
        here.run("ip", "link", "add", "name", NAME, "type", "veth", *peer)
        for namespace, address in ((here, HERE), (there, THERE)):
            namespace.run("ip", "address", "add", f"{address}/24", "dev", NAME)
            namespace.run("ip", "link", "set", "dev", NAME, "up")
            inside(namespace.path, _long_links)
        yield here.path, there.path


def _long_links() -> None:
    """Let TCP have as much under way as a fast link of great length holds."""
    for name, value in _BUFFERS.items():
        Path("/proc/sys/net/ipv4", name).write_text(value)


def _rates(
    report: Report, here: str, there: str, kernel: Kernel, rates: tuple[int, ...], seconds: float
) -> None:
    free = median([rate(here, there, THERE, seconds=seconds) for _ in range(TRIES)])
    table = report.table("rates: measured / asked", "asked", "going out", "coming in")
    for asked in rates:
        shares = []
        for way in ("out", "in"):
            wanted = Shape(rate=asked)
            if way == "in" and kernel.ifb is not None:
                continue
            ends = (wanted, None) if way == "out" else (None, wanted)
            with shape(NAME, *ends, netns=here if way == "out" else there, kernel=kernel):
                samples = [rate(here, there, THERE, seconds=seconds) / asked for _ in range(TRIES)]
            shares.append(median(samples))
            bar = {"floor": 1 - SHARE, "ceiling": 1 + SHARE} if asked <= free / 2 else {}
            report.add(f"rate_{way}_{asked // 10**6}mbit", shares[-1], **bar)
        table.row(format_rate(asked), *shares, *["no ifb"] * (2 - len(shares)))
    table.row("no limit", free / 1e9, "Gbit/s")
    report.add("unshaped_gbit", free / 1e9)


def _delays(report: Report, here: str, there: str, kernel: Kernel, delays: tuple[float, ...]) -> None:
    table = report.table("round trips: excess over what was asked, ms", "asked", "least", "median", "most")
    for delay in delays:
        with shape(NAME, Shape(delay=delay), None, netns=here, kernel=kernel):
            times = round_trips(here, there, THERE, count=100, interval=0.02)
        excess = [(seconds - delay) * 1e3 for seconds in times]
        table.row(format_duration(delay), min(excess), median(excess), max(excess))
        report.add(f"excess_ms_{delay * 1e3:g}ms", median(excess), floor=0, ceiling=EXCESS * 1e3)


def _long(
    report: Report, here: str, there: str, kernel: Kernel, rates: tuple[int, ...], seconds: float
) -> None:
    table = report.table("50 ms round trip: measured / asked", "rate", "share")
    for asked in rates:
        wanted = Shape(rate=asked, delay=0.05)
        with shape(NAME, wanted, None, netns=here, kernel=kernel):
            share = median(
                [rate(here, there, THERE, seconds=seconds, warm=3.0) / asked for _ in range(TRIES)]
            )
        table.row(format_rate(asked), share)
        report.add(f"rate_50ms_{asked // 10**6}mbit", share, floor=1 - SHARE, ceiling=1 + SHARE)


def _jitter(report: Report, here: str, there: str, kernel: Kernel, count: int) -> None:
    wanted = Shape(delay=0.02, jitter=0.01)
    with shape(NAME, wanted, None, netns=here, kernel=kernel):
        times = sorted(round_trips(here, there, THERE, count=count, interval=0.02))
    table = report.table("20 ± 10 ms: round trips, ms", "least", "median", "most")
    table.row(f"{times[0] * 1e3:.2f}", median(times) * 1e3, times[-1] * 1e3)
    for name, seconds in (("least", times[0]), ("median", median(times)), ("most", times[-1])):
        report.add(f"jitter_{name}_ms", seconds * 1e3)


def _losses(report: Report, here: str, there: str, kernel: Kernel, count: int) -> None:
    table = report.table(f"lost of {count} datagrams", "asked", "share")
    for loss in LOSSES:
        with shape(NAME, Shape(loss=loss), None, netns=here, kernel=kernel):
            times = round_trips(here, there, THERE, count=count, interval=0.001)
        lost = times.count(math.inf) / count
        off = 4 * math.sqrt(loss * (1 - loss) / count)  # four standard deviations
        table.row(f"{loss:.0%}", lost)
        report.add(f"lost_{loss * 100:g}_percent", lost, floor=loss - off, ceiling=loss + off)
