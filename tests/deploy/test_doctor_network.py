"""The network part of `atoll doctor`: every check on its own, and what is found out of a real coordinator."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coordinator.dialing import reach
from deploy import doctor_machine, doctor_network, doctor_probe
from deploy.accelerators import Accelerator
from deploy.cli import app
from deploy.doctor_facts import Answer, Connect, Lookup, NetworkFacts, Seen, Trial
from deploy.doctor_machine import MachineFacts
from deploy.finding import Finding
from node.exchange.peers.direct import DirectCarrier
from node.exchange.probing import Rate
from node.exchange.trouble import Kind
from protos.address import Address
from protos.certificate import made
from protos.invite import Invite
from protos.version import version_of
from protos.wire import PROTOCOL
from tests.coordinator.coordinator_rig import DEADLINE, soon
from tests.coordinator.server_rig import TOKEN, Site, site
from tests.waiting import free_port

HOST = "gpu1.example.org"
ANSWER = Answer(version_of("atoll"), PROTOCOL, "auto", "10.0.0.2", round_trip=0.02, skew=0.001)
FINE = NetworkFacts(
    f"{HOST}:4600",
    lookups=(Lookup("IPv4", ("10.0.0.1",), 0.01), Lookup("IPv6", problem="no address")),
    connects=(Connect("10.0.0.1:4600", 0.01, local="10.0.0.2"),),
    answer=ANSWER,
    listening=Trial("10.0.0.2:4700"),
    up=Rate(1_000_000, 1.0),
    down=Rate(2_000_000, 1.0),
    peers=(Trial("10.0.0.3:4700"),),
)
SHUT = Connect("10.0.0.1:4600", problem="Connection refused")
Check = Callable[[Any], Iterable[Finding]]


def only(check: Check, facts: object) -> Finding:
    (finding,) = check(facts)
    return finding


def answered(**changes: object) -> NetworkFacts:
    return replace(FINE, answer=replace(ANSWER, **changes))  # type: ignore[arg-type]


def test_a_machine_that_can_join() -> None:
    found = doctor_network.examine(FINE)
    assert {finding.level for finding in found} == {"ok"} and not any(finding.advice for finding in found)
    texts = "\n".join(finding.text for finding in found)
    for part in (
        f"{HOST} resolves to IPv4 10.0.0.1 in 10 ms",
        "10.0.0.1:4600 takes connections, after 10 ms",
        "the coordinator answers within 20 ms",
        f"protocol {PROTOCOL}",
        "clock is 1 ms ahead of the coordinator's (± 10 ms)",
        "no NAT: it is seen as 10.0.0.2. Other nodes can connect to this machine, at 10.0.0.2:4700",
        "carries 8 Mbit/s up and 16 Mbit/s down",
        "nodes that can be connected to from here: 10.0.0.3:4700",
    ):
        assert part in texts


def test_names() -> None:
    nothing = Lookup("IPv4", problem="not known")
    finding = only(doctor_network.names, NetworkFacts(f"{HOST}:4600", (nothing,)))
    assert finding.level == "bad" and "does not resolve (IPv4: not known)" in finding.text
    assert f"getent hosts {HOST}" in finding.advice and "--advertise" in finding.advice
    slow = replace(FINE, lookups=(Lookup("IPv4", ("10.0.0.1",), 2.5),))
    assert only(doctor_network.names, slow).level == "warn"
    number = replace(FINE, address="[::1]:4600", lookups=(nothing, Lookup("IPv6", ("::1",))))
    assert not list(doctor_network.names(number)), "an address is no name"


def test_ports() -> None:
    finding = only(doctor_network.ports, replace(FINE, connects=(SHUT,)))
    assert finding.level == "bad" and "Connection refused" in finding.text
    assert "--listen 0.0.0.0:4600" in finding.advice and "TCP port 4600" in finding.advice
    both = replace(FINE, connects=(Connect("[::1]:4600", problem="no route"), *FINE.connects))
    assert [finding.level for finding in doctor_network.ports(both)] == ["ok", "warn"]


@pytest.mark.parametrize("kind", list(Kind))
def test_troubles(kind: Kind) -> None:
    facts = replace(FINE, answer=None, trouble=(kind, "so it is"))
    finding = only(doctor_network.answers, facts)
    assert finding.level == "bad" and finding.text == "so it is" and finding.advice
    assert not list(doctor_network.answers(replace(facts, connects=(SHUT,)))), "said of the port already"
    proxied = only(doctor_network.answers, replace(facts, proxy="the proxy of http_proxy"))
    through = kind not in (Kind.TOKEN, Kind.REFUSED, Kind.FAULT)
    assert (f"add {HOST} to no_proxy" in proxied.advice) is through


def test_versions_and_clock() -> None:
    other = only(doctor_network.versions, answered(protocol=PROTOCOL + 1, version="9.9"))
    assert other.level == "bad" and other.advice.endswith("the wheel or the checkout of 9.9")
    assert only(doctor_network.versions, answered(version="9.9")).level == "warn"
    late = only(doctor_network.clock, answered(skew=-30.0))
    assert late.level == "warn" and "30 s behind" in late.text and "set-ntp" in late.advice
    assert only(doctor_network.clock, answered(skew=4.0, round_trip=5.0)).level == "ok", "not sure"
    assert only(doctor_network.answers, answered(round_trip=2.0)).level == "warn"


def test_nat_and_firewalls() -> None:
    behind = answered(host="203.0.113.9")
    closed = replace(behind, listening=Trial("203.0.113.9:4700", "no answer"))
    finding = only(doctor_network.translation, closed)
    assert finding.level == "warn" and "10.0.0.2 here, 203.0.113.9 from outside" in finding.text
    assert "forward a TCP port" in finding.advice and "--peer-address HOST:PORT" in finding.advice
    forwarded = only(doctor_network.translation, replace(behind, listening=Trial("203.0.113.9:4700")))
    assert forwarded.level == "ok" and "behind a NAT" in forwarded.text
    firewall = only(doctor_network.translation, replace(FINE, listening=Trial("x", "no answer")))
    assert firewall.level == "warn" and "this machine's firewall" in firewall.advice
    hub = replace(closed, answer=replace(ANSWER, host="203.0.113.9", transport="hub"))
    assert only(doctor_network.translation, hub).level == "ok", "nobody needs to connect to it"
    assert "no NAT" in only(doctor_network.translation, answered(host="2001:db8::1")).text, "another family"


HIDDEN = answered(host="203.0.113.9")


def seen(*ports: int) -> NetworkFacts:
    rows = [Seen(f"10.9.0.{i}:4600", 5000, f"203.0.113.9:{port}") for i, port in enumerate(ports)]
    return replace(HIDDEN, seen=tuple(rows), listening=Trial("203.0.113.9:4700", "no answer"))


def test_kinds_of_nat() -> None:
    assert not list(doctor_network.mapping(HIDDEN)), "nothing is known"
    assert not list(doctor_network.mapping(replace(FINE, seen=seen(5000).seen))), "there is none"
    keeps = only(doctor_network.mapping, seen(5000))
    assert keeps.level == "ok" and "keeps the port of a connection (5000 here" in keeps.text
    assert (
        "gives connections other ports (5000 here, 203.0.113.9:61"
        in only(doctor_network.mapping, seen(61000)).text
    )
    cone = only(doctor_network.mapping, seen(61000, 61000, 61000))
    assert cone.level == "ok" and "a cone for TCP: port 5000 here is 203.0.113.9:61000 for 3" in cone.text
    facts = seen(61000, 61001)
    symmetric = only(doctor_network.mapping, facts)
    assert symmetric.level == "warn" and "symmetric for TCP" in symmetric.text
    assert "203.0.113.9:61000 and 203.0.113.9:61001" in symmetric.text and "relay" in symmetric.advice
    forwarded = replace(facts, listening=Trial("203.0.113.9:4700"))
    assert only(doctor_network.mapping, forwarded).level == "ok", "others get through all the same"
    hub = replace(facts, answer=replace(ANSWER, host="203.0.113.9", transport="hub"))
    assert only(doctor_network.mapping, hub).level == "ok", "nobody needs to"


def test_bandwidth() -> None:
    thin = only(doctor_network.bandwidth, replace(FINE, up=Rate(10_000, 1.0)))
    assert thin.level == "warn" and 'atoll plan --uplink "80 kbit/s" --downlink "16 Mbit/s"' in thin.advice
    held = only(doctor_network.bandwidth, replace(FINE, up=Rate(10_000, 1.0, held=True)))
    assert held.level == "ok" and "at least 80 kbit/s up" in held.text
    nothing = only(doctor_network.bandwidth, replace(FINE, up=Rate()))
    assert nothing.level == "warn" and nothing.text.endswith("; down 16 Mbit/s")
    busy = only(doctor_network.bandwidth, replace(FINE, down=Rate(held=True)))
    assert busy.advice == "try again between two rounds"
    unknown = replace(FINE, up=None, down=None, unmeasured="somebody else measures")
    assert "somebody else measures" in only(doctor_network.bandwidth, unknown).text


def test_peers() -> None:
    facts = replace(FINE, peers=(Trial("a:1"), Trial("b:2", "no route")), more_peers=3)
    fine, other = doctor_network.peers(facts)
    assert fine.text.endswith("a:1 (3 more were not tried)")
    assert other.level == "warn" and "b:2 cannot" in other.text and "TCP to b:2" in other.advice


def machine(**changes: object) -> MachineFacts:
    facts = MachineFacts(
        accelerators=(Accelerator("H100", 79 << 30, 80 << 30),),
        torch_problem="",
        gpu="an NVIDIA driver",
        folder=Path("here"),
        disk_free=100 << 30,
        memory_free=32 << 30,
        versions=(("torch", "2.13.0"),),
        swarm=False,
    )
    return replace(facts, **changes)  # type: ignore[arg-type]


def test_machines() -> None:
    found = doctor_machine.examine(machine())
    assert {finding.level for finding in found} == {"ok"}
    assert found[0].text == "cuda:0 is H100, 84.8 GB of 85.9 GB free"
    assert "pip install 'PATH[swarm]'" in found[-1].text and "torch 2.13.0" in found[-1].text
    full = machine(accelerators=(Accelerator("H100", 1 << 30, 80 << 30),))
    assert only(doctor_machine.gpus, full).level == "warn"
    blind = only(doctor_machine.gpus, machine(accelerators=()))
    assert blind.level == "bad" and "built for CUDA" in blind.advice
    assert only(doctor_machine.gpus, machine(accelerators=(), gpu="")).level == "ok"
    broken = only(doctor_machine.gpus, machine(accelerators=None, torch_problem="no module"))
    assert broken.level == "bad" and "no module" in broken.text
    poor = doctor_machine.room(machine(disk_free=1, memory_free=1))
    assert [finding.level for finding in poor] == ["warn", "warn"]
    assert len(list(doctor_machine.room(machine(memory_free=None)))) == 1


def test_torch_is_asked_in_another_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with doctor_machine.Question() as question:
        devices, problem = question.answer(DEADLINE)
    assert devices is not None and not problem
    facts = doctor_machine.look(Path.cwd(), devices)
    assert facts.disk_free > 0 and dict(facts.versions)["torch"]
    with doctor_machine.Question() as question:
        assert question.answer(0.0) == (None, "importing it takes too long")
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho several lines >&2\necho no driver >&2\nexit 3\n")
    broken.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(broken))
    with doctor_machine.Question() as question:
        assert question.answer(DEADLINE) == (None, "no driver")


# ---------------------------------------------------------------------------------- a real coordinator


def invite(port: int, token: str = TOKEN, host: str = "127.0.0.1", pin: str = "") -> Invite:
    return Invite(token, host, port, pin)


async def looked(where: Invite, **options: Any) -> NetworkFacts:
    return await soon(doctor_probe.look(where, lambda text: None, **options))


@asynccontextmanager
async def reaching(**plan: Any) -> AsyncIterator[Site]:
    """A coordinator that tries addresses."""
    async with site(**plan) as made:
        made.hub.run.mesh.dial = lambda address, certificate: reach(
            address, "run-digest", certificate=certificate
        )
        yield made


async def test_what_is_found_out_of_a_coordinator() -> None:
    async with reaching() as made:
        made.hub.run.wall = lambda: 0.0
        facts = await looked(invite(made.server.address.port))
    assert facts.own == {"127.0.0.1"} and facts.trouble is None
    assert facts.answer is not None and facts.answer.host == "127.0.0.1" and facts.answer.skew > 1e9
    assert facts.listening is not None and facts.listening.why_not == ""
    assert only(doctor_network.encryption, facts).level == "warn", "this one is insecure"
    assert facts.up is not None and facts.up.per_second > 0
    assert facts.down is not None and facts.down.per_second > 0
    assert not made.hub.run.registry.nodes and not any(made.hub.run.counters.values())


async def test_nodes_are_tried_from_here(monkeypatch: pytest.MonkeyPatch) -> None:
    own, credential = made(), made()
    carrier = DirectCarrier(doctor_probe._nobody, "run-digest", credential=own)
    there = await carrier.listen(Address("127.0.0.1", 0))
    gone = f"127.0.0.1:{free_port()}"
    monkeypatch.setattr("coordinator.mesh.Mesh.reached", [(str(there), own.der), (gone, own.der), ("", b"")])
    monkeypatch.setattr(doctor_probe, "PEERS", 2)
    try:
        async with reaching(credential=credential) as here:
            port = here.server.address.port
            facts = await looked(invite(port, pin=credential.pin))
            wrong = await looked(invite(port, pin=own.pin))
    finally:
        await soon(carrier.close())
    assert wrong.trouble is not None and wrong.trouble[0] is Kind.CERTIFICATE
    assert facts.listening is not None and facts.listening.why_not == "" and not facts.insecure
    assert [bool(one.why_not) for one in facts.peers] == [False, True] and facts.more_peers == 1
    assert [one.by for one in facts.seen] == [f"127.0.0.1:{port}", str(there)]
    assert {one.address for one in facts.seen} == {f"127.0.0.1:{facts.seen[0].local}"}, "from one port"


async def test_where_this_machine_cannot_listen() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        where = Address("127.0.0.1", taken.getsockname()[1])
        async with reaching() as made:
            facts = await looked(invite(made.server.address.port), listen=where)
    assert facts.listening is not None and "--peer-listen" in facts.listening.why_not


async def test_what_goes_wrong_is_a_fact() -> None:
    async with reaching() as made:
        refused = await looked(invite(made.server.address.port, token="another"))
        assert refused.trouble is not None and refused.trouble[0] is Kind.TOKEN and refused.answer is None
    shut = await looked(invite(free_port()))
    assert "refused" in only(doctor_network.ports, shut).text.lower()
    nowhere = await looked(invite(4600, host="nowhere.invalid"))
    assert only(doctor_network.names, nowhere).level == "bad" and not nowhere.connects


async def test_somebody_who_says_nothing() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        facts = await looked(invite(silent.getsockname()[1]), budget=0.5)
    assert facts.trouble is not None and only(doctor_network.answers, facts).level == "bad"


class NoQuestion:
    def __enter__(self) -> NoQuestion:
        return self

    def __exit__(self, *of: object) -> None:
        pass

    def answer(self, seconds: float) -> tuple[tuple[Accelerator, ...], str]:
        return (), ""


async def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_machine, "Question", NoQuestion)
    runner = CliRunner()

    async def run(*arguments: str) -> Any:
        return await soon(asyncio.to_thread(runner.invoke, app, ["doctor", *arguments]))

    async with reaching() as made:
        port = made.server.address.port
        result = await run(str(invite(port)), "--json")
        found = {finding["text"]: finding["level"] for finding in json.loads(result.stdout)}
        assert found["gathering, 0 of 4 rounds: 0 of 3 nodes"] == "warn"
        assert any(text.startswith("the link to the coordinator carries") for text in found)
        result = await run(str(invite(port, "another")))
        assert result.exit_code == 1 and result.stdout.startswith("bad  the coordinator at")
        assert "ask for the run's present invite" in result.stdout and TOKEN not in result.output
        offline = await run(str(invite(port)), "--offline")
        assert offline.exit_code == 0 and "carries" not in offline.stdout
    result = await run(str(invite(port)))
    assert result.exit_code == 1 and "takes no connections" in result.stdout
    assert "--peer-listen" in (await run("--help")).stdout
