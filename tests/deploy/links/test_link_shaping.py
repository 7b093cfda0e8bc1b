"""Shaping on a machine that is made up: what is set, found again, changed and taken away."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.links.commands import ShapingError
from deploy.links.interface import find, find_by_subnet, look, shaped_interfaces
from deploy.links.kernel import Kernel, probe
from deploy.links.shape import OPEN, Shape
from deploy.links.shaping import clear, current, queue_lines, shape
from tests.deploy.links.machine_rig import FakeDelays, Machine

FULL = Shape(100_000_000, 0.04, 0.005, 0.01)
SLOW = Shape(rate=1_000_000)
KERNELS = {"netem": Machine, "queues": lambda: Machine("netem"), "rates": lambda: Machine("netem", "NFQUEUE")}


@pytest.fixture(params=sorted(KERNELS))
def machine(request: pytest.FixtureRequest) -> Machine:
    return KERNELS[request.param]()


def test_shapes_are_found_as_they_were_set_and_undone(machine: Machine) -> None:
    delays = FakeDelays()
    with shape("eth1", FULL, SLOW, run=machine, delays=delays) as shaped:
        held = probe(machine).holds
        expected = FULL if held else Shape(rate=FULL.rate)
        assert current("eth1", run=machine, delays=delays) == (expected, SLOW)
        assert look(find("eth1", machine), machine).kept is False
        assert shaped_interfaces(machine) == ["eth1"]
        assert any("only the rate is set" in note for note in shaped.notes) == (not held)
    assert machine.bare and not delays.running and not delays.holders
    shaped.undo()


SHAPES = st.sampled_from([None, SLOW, Shape(rate=10**9), Shape(delay=0.01), Shape(10**7, 0.02, 0.01), FULL])


@given(st.lists(st.tuples(SHAPES, SHAPES), min_size=1, max_size=6), st.sampled_from(["netem", "queues"]))
def test_any_changes_end_in_what_was_asked_last(
    changes: list[tuple[Shape | None, Shape | None]], kernel: str
) -> None:
    machine, delays = KERNELS[kernel](), FakeDelays()
    with shape("eth1", *changes[0], run=machine, delays=delays) as shaped:
        for out, into in changes:
            shaped.change(out, into)
            assert current("eth1", run=machine, delays=delays) == (out or OPEN, into or OPEN)
            asked_to_wait = any(part is not None and part.held for part in (out, into))
            assert bool(delays.running) == (asked_to_wait and kernel == "queues")
    assert machine.bare and not delays.running


def test_a_new_rate_changes_the_qdisc_in_place() -> None:
    machine = Machine()
    with shape("eth1", FULL, None, run=machine, delays=FakeDelays()) as shaped:
        for rate in (10**10, 50_000_000):
            machine.ran.clear()
            shaped.change(Shape(rate, 0.02), None)
            assert [command.split()[2] for command in machine.ran] == ["change", "change"]


@pytest.mark.parametrize(("rate", "verbs"), [(49_000_000, ["del", "add"]), (51_000_000, ["change"])])
def test_a_bucket_too_small_for_what_may_wait_comes_with_an_empty_queue(rate: int, verbs: list[str]) -> None:
    machine = Machine()
    with shape("eth1", Shape(rate=10**9), None, run=machine, delays=FakeDelays()) as shaped:
        machine.ran.clear()
        shaped.change(Shape(rate=rate), None)
        assert [command.split()[2] for command in machine.ran] == verbs


def test_netem_comes_first_and_the_rate_below_it() -> None:
    machine = Machine()
    with shape("eth1", FULL, None, run=machine, delays=FakeDelays()):
        netem, bucket = machine.qdiscs
        assert netem["kind"] == "netem" and netem["root"]
        assert bucket["kind"] == "tbf" and bucket["parent"] == f"{netem['handle']}1"


def test_own_packets_get_lost_on_their_way_out_but_wait_on_the_way_back() -> None:
    link = find("eth1", Machine())
    lines = queue_lines(link, FULL, SLOW)
    delay, jitter, loss = FULL.delay, FULL.jitter, FULL.loss
    assert list(lines.values()) == [(delay, jitter, loss), (delay, jitter, 0.0), (0.0, 0.0, loss)]
    machine = Machine("netem")
    with shape("eth1", FULL, SLOW, run=machine, delays=FakeDelays()):
        for rules in machine.rules.values():
            assert [rule.split()[:3] for rule in rules] == [
                ["FORWARD", "-o", "eth1"],
                ["INPUT", "-i", "eth1"],
                ["OUTPUT", "-o", "eth1"],
            ]
            assert all("--queue-bypass" in rule for rule in rules)  # a dead process lets everything pass


def test_a_kernel_without_ifb_shapes_what_goes_out_and_says_why_not_more() -> None:
    machine = Machine("ifb")
    with shape("eth1", FULL, None, run=machine, delays=FakeDelays()):
        pass
    with pytest.raises(ShapingError, match=r"comes in through eth1.*modprobe ifb.*--direction out"):
        shape("eth1", SLOW, SLOW, run=machine, delays=FakeDelays())
    assert machine.bare


def test_only_the_named_interface_is_touched(machine: Machine) -> None:
    machine.add_qdisc("eth0", "fq", "8001:")
    before = list(machine.qdiscs)
    with shape("eth1", FULL, FULL, run=machine, delays=FakeDelays()):
        others = [qdisc for qdisc in machine.qdiscs if qdisc["dev"] not in ("eth1", "atollifb3")]
        assert others == before
        assert not any("eth0" in command for command in machine.ran)
    assert machine.qdiscs == before


def test_a_qdisc_of_somebody_else_is_refused_and_taken_only_when_told() -> None:
    machine, delays = Machine(), FakeDelays()
    machine.add_qdisc("eth1", "fq_codel", "8001:")
    with pytest.raises(ShapingError, match=r"the qdisc fq_codel 8001:.*--replace"):
        shape("eth1", SLOW, None, run=machine, delays=delays)
    assert [qdisc["handle"] for qdisc in machine.qdiscs] == ["8001:"] and not delays.holders
    assert clear("eth1", run=machine, delays=delays) is False
    assert [qdisc["handle"] for qdisc in machine.qdiscs] == ["8001:"]
    with shape("eth1", SLOW, None, replace=True, run=machine, delays=delays) as shaped:
        assert "does not put that back" in shaped.notes[0]
    assert machine.bare


def test_an_ingress_qdisc_of_somebody_else_is_refused() -> None:
    machine = Machine()
    machine("tc", "qdisc", "add", "dev", "eth1", "handle", "ffff:", "ingress")
    with pytest.raises(ShapingError, match="filters of others"):
        shape("eth1", None, SLOW, run=machine, delays=FakeDelays())
    with shape("eth1", None, SLOW, replace=True, run=machine, delays=FakeDelays()):
        assert current("eth1", run=machine, delays=FakeDelays()) == (OPEN, SLOW)


def test_what_a_killed_process_left_is_removed_and_said(machine: Machine) -> None:
    delays = FakeDelays()
    shape("eth1", FULL, SLOW, run=machine, delays=delays)
    delays.kill()
    with shape("eth1", SLOW, None, run=machine, delays=delays) as shaped:
        assert shaped.notes[0].startswith(
            "removed what a process that was killed had left on eth1 (100 Mbit/s"
        )
        assert current("eth1", run=machine, delays=delays) == (SLOW, OPEN)
    assert machine.bare


@pytest.mark.parametrize("kernel", sorted(KERNELS))
def test_clear_takes_the_rest_of_a_killed_process_away(kernel: str) -> None:
    machine, delays = KERNELS[kernel](), FakeDelays()
    shape("eth1", Shape(SLOW.rate, 0.01), Shape(SLOW.rate, 0.01), run=machine, delays=delays)
    delays.kill()
    assert clear("eth1", run=machine, delays=delays) is True
    assert machine.bare
    assert clear("eth1", run=machine, delays=delays) is False


def test_an_interface_that_a_process_holds_is_left_to_it(machine: Machine) -> None:
    delays = FakeDelays()
    with shape("eth1", SLOW, None, run=machine, delays=delays):
        with pytest.raises(ShapingError, match="process 77 holds eth1"):
            shape("eth1", FULL, None, run=machine, delays=delays)
        with pytest.raises(ShapingError, match="process 77 holds eth1"):
            clear("eth1", run=machine, delays=delays)
        assert current("eth1", run=machine, delays=delays) == (SLOW, OPEN)


def test_what_is_kept_stays_until_it_is_cleared(machine: Machine) -> None:
    delays = FakeDelays()
    with shape("eth1", FULL, None, kept=True, run=machine, delays=delays):
        pass
    assert not machine.bare and not delays.holders and not any(delays.started)
    again = shape("eth1", SLOW, None, kept=True, run=machine, delays=delays)
    assert again.notes[0].startswith("replaced what was set on eth1 before (100 Mbit/s")
    assert current("eth1", run=machine, delays=delays) == (SLOW, OPEN)
    assert clear("eth1", run=machine, delays=delays) and machine.bare


@pytest.mark.parametrize("broken", ["qdisc add dev eth1 root", "type ifb", "filter add", "-A FORWARD"])
def test_a_command_that_fails_leaves_nothing_behind(broken: str) -> None:
    machine, delays = Machine("netem"), FakeDelays()
    kernel = probe(machine)
    machine.fails = broken
    with pytest.raises(ShapingError, match="broken"):
        shape("eth1", FULL, FULL, kernel=kernel, run=machine, delays=delays)
    assert machine.bare and not delays.running and not delays.holders


def test_undo_of_an_interface_that_is_gone_is_quiet() -> None:
    machine = Machine()
    shaped = shape("eth1", SLOW, None, run=machine, delays=FakeDelays())
    machine.qdiscs.clear()
    del machine.links["eth1"]
    shaped.undo()
    assert not machine.qdiscs


def test_a_machine_without_ip6tables_or_iptables_still_works() -> None:
    machine, delays = Machine("netem", "ip6tables"), FakeDelays()
    with shape("eth1", FULL, None, run=machine, delays=delays):
        assert machine.rules["iptables"] and not machine.rules["ip6tables"]
    machine = Machine("netem", "iptables", "ip6tables")
    with shape("eth1", FULL, None, run=machine, delays=delays) as shaped:
        assert "no NFQUEUE (not found); only the rate is set" in shaped.notes[0]


def test_errors_say_what_to_do() -> None:
    machine = Machine(root=False)
    with pytest.raises(ShapingError, match=r"no interface 'eth7'; there are lo, eth0, eth1"):
        shape("eth7", SLOW, None, run=machine, delays=FakeDelays())
    with pytest.raises(ShapingError, match=r"not permitted; links are shaped by root, .*NET_ADMIN"):
        shape("eth1", SLOW, None, run=machine, delays=FakeDelays())
    with pytest.raises(ShapingError, match=r"kind is unknown\.; this kernel lacks it"):
        shape("eth1", SLOW, None, run=Machine("tbf"), delays=FakeDelays())


def test_an_interface_is_found_by_its_subnet() -> None:
    machine = Machine()
    assert find_by_subnet("10.90.0.0/24", machine) == find("eth1", machine)
    with pytest.raises(ShapingError, match=r"no interface has an address of 10\.1\.0\.0/16; there are 127"):
        find_by_subnet("10.1.0.0/16", machine)
    with pytest.raises(ShapingError, match="lo and eth0 and eth1 have"):
        find_by_subnet("0.0.0.0/0", machine)
    with pytest.raises(ShapingError, match=r"10\.90\.0\.0/24"):
        find_by_subnet("the lab", machine)


def test_a_probe_tells_what_is_missing_and_leaves_nothing() -> None:
    machine = Machine()
    assert probe(machine) == Kernel() and machine.bare
    machine = Machine("netem", "ifb", "NFQUEUE")
    kernel = probe(machine)
    assert machine.bare and kernel.tbf is None and not kernel.holds
    assert [sentence.split(": ")[1][:3] for sentence in kernel.sentences()] == ["yes", "no ", "no ", "no "]
