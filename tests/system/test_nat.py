"""Nodes behind routers that translate addresses and let nobody in train with one that everybody reaches."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from bench.bed import Bed, Log
from bench.faults import Fault
from bench.forked import ForkedChildren
from deploy.links.shape import Shape
from deploy.processes import Child, Children
from deploy.testbed.layout import COORDINATOR, Layout, Link, layout
from deploy.testbed.namespace import Namespace, why_not
from deploy.testbed.nat import masquerade
from deploy.testbed.network import LAN, WAN, Network
from tests.system.notices import swarm_address, told

REASON = why_not() or ("iptables not found" if shutil.which("iptables") is None else None)

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]
NEEDS_SWARM = pytest.mark.skipif(
    importlib.util.find_spec("hivemind") is None, reason="hivemind is missing: pip install '.[swarm]'"
)

PACE = Fault(compute=0.03)  # or nodes that train leave one that starts no processor
PUBLIC, HIDDEN = "public", ("left", "right")
ROUNDS: Final = 6
SWARM_PORT: Final = 4701
CONNECT_SECONDS: Final = 1.0
ATTEMPTS: Final = 8  # of the doctor
CIRCUIT_BYTES: Final = 128 << 10  # that libp2p's own relays carry at most, in each direction
RUN = {
    "run": {"rounds": 1_000_000, "nodes": 3},
    "model": {"d_model": 128, "layers": 4, "heads": 4},
    "method": {"name": "sign-muon", "warmup": 0},
    "round": {"adaptive": False, "deadline": 30.0, "start_timeout": 100.0},
}


class Neighbourhood(Bed):
    """A run whose coordinator and first node are where all can call them; each other node has a router."""

    def __init__(self, folder: Path, children: Children, network: Network) -> None:
        self.network, self.plan = network, network.layout
        super().__init__(folder, children, command=(), host=self.plan.coordinator.addresses.end)
        self.log = Log(folder / "coordinator.jsonl")

    def begin(self, transport: str) -> None:
        self.write({**RUN, "exchange": {"transport": transport}})
        self.lead("--events", str(self.log.path), namespace=self.network.place(COORDINATOR).path)

    def place(self, name: str) -> Namespace:
        index = (PUBLIC, *HIDDEN).index(name)
        return self.network.place(self.plan.sites[index - 1].name if index else COORDINATOR)

    def take_part(self, name: str, *options: str) -> None:
        self.join(name, *options, fault=PACE, namespace=self.place(name).path)

    def reducers(self) -> list[list[str]]:
        """Of every topology."""
        made = [event for event in self.log.read() if event["event"] == "TopologyMade"]
        return [list(event["reducers"]) for event in made]

    def site(self, name: str) -> Link:
        """Where a hidden node is."""
        return self.plan.sites[HIDDEN.index(name)]

    def examine(self, name: str, attempt: int) -> Child:
        """Start `atoll doctor` where a node would be."""
        arguments = ("doctor", self.invite, "--json")
        return self.start(f"doctor-{name}-{attempt}", *arguments, namespace=self.place(name).path)

    def findings(self, name: str, attempt: int) -> list[str]:
        """What it has found."""
        text = (self.folder / f"doctor-{name}-{attempt}.log").read_text()
        found: list[dict[str, Any]] = json.loads(text[text.index("[\n") :])
        return [finding["text"] for finding in found]

    def train(self) -> None:
        for name in (PUBLIC, *HIDDEN):
            self.reached(name, ROUNDS)
        self.digests()
        last = self.rounds(PUBLIC)[ROUNDS]
        assert len(last["voters"]) == 3


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Neighbourhood]:
    plan: Layout = layout(len(HIDDEN), Shape(), nat=True)
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(Network(plan))
        children = stack.enter_context(ForkedChildren())
        yield Neighbourhood(tmp_path, children, network)


def connects(where: Namespace, address: tuple[str, int]) -> bool:
    def attempt() -> bool:
        try:
            socket.create_connection(address, CONNECT_SECONDS).close()
        except OSError:
            return False
        return True

    return where.call(attempt)


def nobody_gets_in(bed: Neighbourhood, name: str, port: int) -> None:
    """A node's port is open at home, and outside neither at its router's address nor, with a route, at its
    own."""
    site = bed.site(name)
    assert site.addresses.inside is not None
    (inside, _), outside = site.addresses.inside, site.addresses.end
    core, place = bed.network.core, bed.place(PUBLIC)
    core.run("ip", "route", "add", f"{inside}/32", "via", outside)
    try:
        assert connects(bed.place(name), (inside, port))
        assert not connects(place, (inside, port))
        assert not connects(place, (outside, port))
    finally:
        core.run("ip", "route", "del", f"{inside}/32")


@NEEDS_SWARM
def test_what_hidden_nodes_send_each_other_goes_through_a_public_one(bed: Neighbourhood) -> None:
    bed.begin("swarm")
    bed.take_part(PUBLIC, "--swarm-listen", f"0.0.0.0:{SWARM_PORT}")
    relay = swarm_address(bed, PUBLIC)
    for port, name in enumerate(HIDDEN, SWARM_PORT + 1):
        bed.take_part(name, "--swarm-listen", f"0.0.0.0:{port}", "--swarm-relay", relay)
    bed.train()
    peer = relay.rpartition("/")[2]
    for name, other in (HIDDEN, HIDDEN[::-1]):
        (joined,) = bed.events(other, "Joined")
        assert f"{joined['node']} is reached by the swarm through the relay {peer} now" in told(bed, name)
        assert not any("through the coordinator now" in text for text in told(bed, name))
    for port, name in enumerate(HIDDEN, SWARM_PORT + 1):
        nobody_gets_in(bed, name, port)

    bed.kill(bed.nodes[PUBLIC], signal.SIGINT)
    (words,) = [text for text in told(bed, PUBLIC) if "has carried" in text]
    assert int(words.split()[4].replace(",", "")) > 2 * CIRCUIT_BYTES, words


def test_hidden_nodes_meet_at_the_coordinator_and_call_who_can_be_called(bed: Neighbourhood) -> None:
    bed.begin("auto")
    for port, name in enumerate((PUBLIC, *HIDDEN), SWARM_PORT):
        bed.take_part(name, "--peer-listen", f"0.0.0.0:{port}")
    bed.train()
    names = {name: bed.events(name, "Joined")[0]["node"] for name in (PUBLIC, *HIDDEN)}
    assert names[PUBLIC] in bed.reducers()[-1]
    hidden = {names[name] for name in HIDDEN}
    assert not hidden & {node for made in bed.reducers() for node in made}, "from the first topology on"
    tried = (bed.folder / "coordinator.log").read_text()
    for name in HIDDEN:
        assert f"{names[name]} cannot be reached at" in tried
        assert not any(f"{names[PUBLIC]} is reached through" in text for text in told(bed, name))
    for port, name in enumerate(HIDDEN, SWARM_PORT + 1):
        nobody_gets_in(bed, name, port)


def test_hidden_nodes_train_at_the_hub(bed: Neighbourhood) -> None:
    bed.begin("hub")
    for name in (PUBLIC, *HIDDEN):
        bed.take_part(name)
    bed.train()


def test_the_doctor_tells_a_cone_from_a_symmetric_nat(bed: Neighbourhood) -> None:
    gateway = bed.network.gateway(bed.site("right").name)
    gateway.run("iptables", "-t", "nat", "--flush")
    masquerade(gateway, inside=LAN, outside=WAN, kind="symmetric")
    bed.begin("direct")
    bed.take_part(PUBLIC, "--peer-listen", f"0.0.0.0:{SWARM_PORT}")
    wanted = {"left": "the NAT is a cone for TCP", "right": "the NAT is symmetric for TCP"}
    found: dict[str, list[str]] = {}
    for attempt in range(ATTEMPTS):  # the node may not have been reached yet; a busy machine misses deadlines
        examined = [(name, bed.examine(name, attempt)) for name in wanted]
        for name, doctor in examined:
            bed.ended(doctor)
            found[name] = bed.findings(name, attempt)
        if all(any("for TCP" in text for text in texts) for texts in found.values()):
            break
    for name, words in wanted.items():
        (kind,) = [text for text in found[name] if "for TCP" in text]
        assert kind.startswith(words), found
        site = bed.site(name).addresses
        assert site.inside is not None
        assert any(f"behind a NAT: {site.inside[0]} here, {site.end} from outside" in t for t in found[name])
        assert any("Other nodes cannot connect to this machine" in text for text in found[name])
