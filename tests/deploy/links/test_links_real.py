"""Links between namespaces of our own, shaped for real and measured with sockets; nothing else is touched."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from deploy.links.commands import ShapingError, ip, iptables, run_command, tc
from deploy.links.interface import TABLES, find, look
from deploy.links.kernel import Kernel, probe_apart
from deploy.links.measuring import rate, round_trips
from deploy.links.shape import OPEN, Shape
from deploy.links.shaping import PROCESSES, clear, current, shape
from deploy.testbed.namespace import Namespace, why_not
from tests.waiting import until

ROOT = Path(__file__).parents[3]
NO_LINKS = why_not()
KERNEL = Kernel() if NO_LINKS else probe_apart()
pytestmark = [pytest.mark.root, pytest.mark.skipif(NO_LINKS is not None, reason=str(NO_LINKS))]
needs_ifb = pytest.mark.skipif(KERNEL.ifb is not None, reason=f"no ifb in this kernel: {KERNEL.ifb}")
needs_holding = pytest.mark.skipif(not KERNEL.holds, reason=f"no delays in this kernel: {KERNEL.nfqueue}")
HERE, THERE = "10.78.0.1", "10.78.0.2"
NAME = "wan"


@dataclass(frozen=True)
class Pair:
    """Two namespaces with a cable between them."""

    here: str
    there: str

    def state(self) -> tuple[str, str, str]:
        """All that shaping could leave behind."""
        tables = ""
        for program in TABLES:
            with contextlib.suppress(ShapingError):  # not installed
                tables += run_command(*iptables(self.here, "-S", program=program))
        return (
            run_command(*tc(self.here, "qdisc", "show")),
            run_command(*ip(self.here, "-br", "link")),
            tables,
        )

    def carries(self) -> bool:
        """Whether the kernel says of both ends that the cable is plugged in: it does so a while later."""
        shown = [
            run_command(*ip(path, "-br", "link", "show", "dev", NAME)) for path in (self.here, self.there)
        ]
        return all(line.split()[1] == "UP" for line in shown)


@pytest.fixture
def pair() -> Iterator[Pair]:
    with Namespace() as here, Namespace() as there:
        peer = ("peer", "name", NAME, "netns", there.path)
        here.run("ip", "link", "add", "name", NAME, "type", "veth", *peer)
        for namespace, address in ((here, HERE), (there, THERE)):
            namespace.run("ip", "address", "add", f"{address}/24", "dev", NAME)
            namespace.run("ip", "link", "set", "dev", NAME, "up")
        made = Pair(here.path, there.path)
        until(made.carries, "the carrier of both ends")
        yield made


def within(pair: Pair, wanted: int, share: float) -> tuple[bool, float]:
    """Whether a rate is measured as wanted, in one of three tries; and the last one."""
    measured = math.nan
    for _ in range(3):
        measured = rate(pair.here, pair.there, THERE, seconds=1.0)
        if abs(measured / wanted - 1) <= share:
            return True, measured
    return False, measured


@pytest.mark.parametrize("text", ["10mbit", "100mbit", "1gbit"])
def test_a_rate_is_kept_within_five_percent(pair: Pair, text: str) -> None:
    wanted = Shape.parse(text)
    assert wanted.rate is not None
    before = pair.state()
    with shape(NAME, wanted, None, netns=pair.here, kernel=KERNEL):
        holds, measured = within(pair, wanted.rate, 0.05)
        assert holds, f"{measured:.0f} bit/s"
        assert current(NAME, netns=pair.here) == (wanted, OPEN)
    assert pair.state() == before


@needs_ifb
def test_what_comes_in_is_shaped_too(pair: Pair) -> None:
    wanted = Shape(rate=50_000_000)
    with shape(NAME, None, wanted, netns=pair.there, kernel=KERNEL) as shaped:
        assert wanted.rate is not None
        holds, measured = within(pair, wanted.rate, 0.05)
        assert holds, f"{measured:.0f} bit/s"
        shaped.change(None, Shape(rate=20_000_000))
        holds, measured = within(pair, 20_000_000, 0.05)
        assert holds, f"{measured:.0f} bit/s after the change"


def test_a_thinner_link_is_not_blocked_by_what_waits_for_it(pair: Pair) -> None:
    def waiting() -> bool:
        qdiscs = json.loads(run_command(*tc(pair.here, "-s", "-j", "qdisc", "show", "dev", NAME)))
        return any(qdisc["qlen"] for qdisc in qdiscs)

    with shape(NAME, Shape(rate=100_000_000), None, netns=pair.here, kernel=KERNEL) as shaped:
        with ThreadPoolExecutor(1) as threads:
            traffic = threads.submit(rate, pair.here, pair.there, THERE, seconds=1.0, warm=0.0)
            until(waiting, "segments that wait for their rate")
            shaped.change(Shape(rate=10_000_000), None)
            traffic.result()
        holds, measured = within(pair, 10_000_000, 0.05)
        assert holds, f"{measured:.0f} bit/s"


@needs_ifb
@needs_holding
def test_delays_of_both_directions_add_up_to_the_round_trip(pair: Pair) -> None:
    before = pair.state()
    with shape(NAME, Shape(delay=0.02), Shape(delay=0.03), netns=pair.here, kernel=KERNEL) as shaped:
        times = round_trips(pair.here, pair.there, THERE)
        assert 0.05 <= min(times) < 0.055
        shaped.change(Shape(delay=0.005), None)
        assert 0.005 <= min(round_trips(pair.here, pair.there, THERE)) < 0.01
    assert pair.state() == before


@needs_holding
def test_packets_get_lost_as_often_as_asked(pair: Pair) -> None:
    with shape(NAME, Shape(loss=0.2), None, netns=pair.here, kernel=KERNEL) as shaped:
        times = round_trips(pair.here, pair.there, THERE, count=1000, interval=0.001)
        assert 0.15 < times.count(math.inf) / len(times) < 0.25  # four standard deviations
        shaped.change(Shape(loss=1), None)
        assert round_trips(pair.here, pair.there, THERE, count=3, interval=0.001) == [math.inf] * 3


@needs_holding
def test_a_process_that_dies_lets_everything_pass(pair: Pair) -> None:
    with shape(NAME, Shape(delay=0.1), None, netns=pair.here, kernel=KERNEL):
        if KERNEL.netem is None:
            pytest.skip("netem delays in this kernel, and no process of ours")
        link = find(NAME, run_command, pair.here)
        assert min(round_trips(pair.here, pair.there, THERE, count=1)) >= 0.1
        process = PROCESSES._owned[link]
        process.kill()
        process.wait(10)
        assert min(round_trips(pair.here, pair.there, THERE, count=5)) < 0.1
        assert look(link, run_command).rules  # still there, and in nobody's way


def throttle(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deploy.cli", "throttle", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


@contextlib.contextmanager
def running(pair: Pair, *words: str) -> Iterator[subprocess.Popen[str]]:
    """`atoll throttle run`, once it says that the shape is set."""
    command = [
        sys.executable,
        "-m",
        "deploy.cli",
        "throttle",
        "run",
        "-i",
        NAME,
        "--netns",
        pair.here,
        *words,
    ]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if "until Ctrl-C" in line:
                    break
            yield process
        finally:
            process.kill()


def processes_in(netns: str) -> list[int]:
    """The processes of a namespace."""
    wanted = os.stat(netns).st_ino
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if os.stat(entry / "ns" / "net").st_ino == wanted:
                found.append(int(entry.name))
    return found


@needs_ifb
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_run_undoes_everything_when_it_is_told_to_end(pair: Pair, number: signal.Signals) -> None:
    before = pair.state()
    with running(pair, "--rate", "10mbit", "--delay", "5ms") as process:
        assert pair.state() != before
        (link,) = json.loads(throttle("show", "--netns", pair.here, "--json").stdout)["links"]
        assert link["holder"] == process.pid and link["out"]["rate"] == 10_000_000
        refused = throttle("set", "-i", NAME, "--netns", pair.here, "--rate", "1gbit")
        assert refused.returncode == 12 and f"process {process.pid} holds {NAME}" in refused.stderr
        process.send_signal(number)
        assert process.wait(30) == 128 + number
    assert pair.state() == before and not processes_in(pair.here)


@needs_ifb
def test_what_a_killed_run_leaves_is_cleaned_up_and_said(pair: Pair) -> None:
    before = pair.state()
    with running(pair, "--rate", "10mbit", "--delay", "5ms") as process:
        process.kill()
        process.wait(30)
    until(lambda: not processes_in(pair.here), "the end of the process that delays packets")
    assert pair.state() != before
    assert "left by a process that was killed" in throttle("show", "--netns", pair.here).stdout
    with running(pair, "--rate", "20mbit") as process:
        assert current(NAME, netns=pair.here)[0] == Shape(rate=20_000_000)
        process.kill()
        process.wait(30)
    again = throttle("run", "-i", NAME, "--netns", pair.here, "--rate", "1gbit", "--for", "1ms")
    assert f"removed what a process that was killed had left on {NAME}" in again.stderr
    assert pair.state() == before


@needs_ifb
def test_what_is_set_outlives_the_command_until_it_is_cleared(pair: Pair) -> None:
    before = pair.state()
    done = throttle(
        "set", "--subnet", "10.78.0.0/24", "--netns", pair.here, "--rate", "1gbit", "--delay", "10ms"
    )
    assert done.returncode == 0, done.stderr
    if KERNEL.holds:
        assert 0.02 <= min(round_trips(pair.here, pair.there, THERE, count=5)) < 0.04
    assert clear(NAME, netns=pair.here) is True
    assert pair.state() == before and not processes_in(pair.here)
    assert clear(NAME, netns=pair.here) is False
