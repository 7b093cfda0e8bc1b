"""What the processes of ``python -m bench exchange`` do: coordinators, and ranks that take part in exchanges.

A rank is a node of several runs at once, one for each way that a vote can go, and a rank of gloo.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
import torch.distributed as dist

from bench.island_ranks import Member
from bench.namespaces import bytes_sent, enter
from deploy.processes import cpu_seconds
from protos.buckets import Bucket, BucketTable, TableSchedule

if TYPE_CHECKING:
    from bench.bare_mesh import BareMesh
    from node.exchange.hub import HubExchange

Carried = Literal["hub", "direct", "swarm"]
TOKEN: Final = "bench"
WAIT: Final = 120.0

Channel = Any  # multiprocessing.Queue, which is not generic at run time


@dataclass(frozen=True)
class Call:
    """One exchange, as one rank sees it.

    Attributes:
        start: when the payload was ready, on the machine's monotonic clock.
        end: when the result was in this process's memory.
        sent: bytes that left by the rank's interface; on loopback those of all ranks.
        up: bytes of the vote and its results, counted at the transport.
        down: likewise, received.
        control: bytes of everything else, both ways.
        cpu: seconds of CPU time of the rank, its daemon included, until all ranks were done.
    """

    start: float
    end: float
    sent: int
    up: int = 0
    down: int = 0
    control: int = 0
    cpu: float = 0.0


def daemons() -> list[int]:
    """The processes that this one has started."""
    found = (path.read_text().split() for path in Path("/proc/self/task").glob("*/children"))
    return [int(pid) for pids in found for pid in pids]


def tables(elements: int) -> TableSchedule:
    """One matrix whose signs are voted on."""
    return TableSchedule((BucketTable((Bucket.of("matrices", "majority", [("w", (elements,))]),)),))


def coordinate(
    transport: Carried,
    nodes: int,
    elements: int,
    host: str,
    namespace: str,
    ready: Channel,
    *,
    secure: bool = False,
) -> None:
    """A coordinator of a run without end; puts its invite and its process id into ``ready``. With ``secure``
    connections have TLS, those between nodes too."""
    if namespace:
        enter(namespace)
    from coordinator.service import Started, run_coordinator
    from protos.address import Address
    from protos.certificate import made
    from protos.invite import Invite
    from protos.runfile import RunFile

    run_file = f"""
[run]
name = "bench-exchange"
nodes = {nodes}
rounds = 1000000
evaluate_every = 0
[round]
deadline = 600.0
start_timeout = 900.0
adaptive = false
[exchange]
transport = "{transport}"
"""
    credential = made() if secure else None

    def listening(at: Started) -> None:
        pin = "" if credential is None else credential.pin
        ready.put((str(Invite(TOKEN, at.address.host, at.address.port, pin)), os.getpid()))

    run_coordinator(
        RunFile.parse(run_file),
        tables(elements),
        TOKEN,
        listen=Address(host, 0),
        on_started=listening,
        credential=credential,
    )


class _Standing:
    """What a rank holds between calls."""

    def __init__(self) -> None:
        self.exchanges: dict[str, HubExchange] = {}
        self.meshes: dict[str, BareMesh] = {}
        self.generator = torch.Generator()
        self.payload = torch.empty(0)
        self.dense = torch.empty(0)


_standing: Final = _Standing()


def join(
    member: Member,
    name: str,
    carried: Carried,
    invite: str,
    elements: int,
    hosts: Sequence[str],
    folder: str,
) -> None:
    """Become a node of the run of ``invite``; :func:`vote` takes part in its rounds under ``name``.

    Args:
        member: this rank, which listens at its one of ``hosts``.
        name: of the contender.
        carried: the transport.
        invite: of the run's coordinator.
        elements: that are voted on.
        hosts: of all ranks.
        folder: for what the exchange says.
    """
    from bench.claim import claim
    from node.exchange.hub import HubExchange
    from node.exchange.peers.setting import PeerSetting
    from node.exchange.swarm.setting import SwarmSetting
    from protos.address import Address
    from protos.invite import Invite
    from protos.limits import state_limit

    host = hosts[member.rank]
    if not len(_standing.payload):
        _standing.generator.manual_seed(member.rank)
        _standing.payload = torch.empty(tables(elements).of(0).nbytes, dtype=torch.uint8)
    peers = None
    if carried != "hub":
        swarm = SwarmSetting(listen=(host,), quic=False, reachability="public")
        peers = PeerSetting(carried, Address(host, 0), swarm=swarm if carried == "swarm" else None)
    log = Path(folder) / f"{name}-{member.rank}.log"

    def say(text: str) -> None:
        with log.open("a") as file:
            file.write(f"{time.monotonic():.3f} {text}\n")

    exchange = HubExchange(Invite.parse(invite), say=say)
    _standing.exchanges[name] = exchange
    told = exchange.describe()
    # Of a state so large that the coordinator never wants a snapshot of it.
    mine = claim(told, f"node {member.rank}", state_bytes=state_limit(elements))
    exchange.join(mine, tables(elements), peers=peers)
    gc.collect()
    gc.freeze()  # what torch has imported: to look through it takes Python 0.2 s, in the midst of a round


def vote(member: Member, name: str) -> Call:
    """One round of a run that this rank has joined: contribution in memory to result in memory. Each round
    has other votes: whoever casts those of former rounds is under suspicion."""
    from node.exchange.base import RoundOrder, WorkReport

    exchange = _standing.exchanges[name]
    order = exchange.next_order()
    assert isinstance(order, RoundOrder), order
    _standing.payload.random_(0, 256, generator=_standing.generator)
    counts = exchange.meter.counts()  # before the barrier: behind it another rank's first bytes may be here
    member.barrier()
    sent = bytes_sent(member.interface)
    processes = [os.getpid(), *(daemons() if name == "swarm" else [])]
    cpu = sum(map(cpu_seconds, processes))
    start = time.monotonic()
    result = exchange.reduce(order, _standing.payload)
    end = time.monotonic()
    assert result.payload is not None and len(result.voters) == member.ranks, result.reason
    exchange.report(WorkReport(order.round, "0" * 32, 1.0, 1024, 0.1, 0.1))
    member.barrier()  # its report is on the way, and the last frames of other ranks have left
    cpu = sum(map(cpu_seconds, processes)) - cpu
    counted = {key: after - counts[key] for key, after in exchange.meter.counts().items()}
    data = {way: sum(counted[way, kind] for kind in ("contribution", "result")) for way in ("up", "down")}
    control = sum(counted.values()) - sum(data.values())
    return Call(start, end, bytes_sent(member.interface) - sent, data["up"], data["down"], control, cpu)


def join_bare(member: Member, name: str, carried: Carried, elements: int, hosts: Sequence[str]) -> str:
    """Become a node of a mesh of bare streams, see :mod:`bench.bare_mesh`; where the others reach it."""
    from bench.bare_mesh import BareMesh, GrpcCarrier, SwarmCarrier
    from node.exchange.network import process_network

    slice_bytes = tables(elements).of(0).nbytes // member.ranks

    async def started() -> str:
        host = hosts[member.rank]
        carrier = SwarmCarrier(host) if carried == "swarm" else GrpcCarrier(host)
        mesh = _standing.meshes[name] = BareMesh(carrier, member.ranks, slice_bytes)
        return await mesh.start()

    return process_network().open().call(started(), WAIT, "the start of a bare mesh")


def meet_bare(member: Member, name: str, addresses: Sequence[str]) -> None:
    """Connect to the others, whose addresses :func:`join_bare` has returned on each rank."""
    from node.exchange.network import process_network

    others = [address for rank, address in enumerate(addresses) if rank != member.rank]
    process_network().call(_standing.meshes[name].meet(others), WAIT, "the connections of a bare mesh")


def swap_bare(member: Member, name: str) -> Call:
    """The bytes of one vote over the bare streams."""
    from node.exchange.network import process_network

    mesh, network = _standing.meshes[name], process_network()
    processes = [os.getpid(), *daemons()]
    member.barrier()
    sent, cpu = bytes_sent(member.interface), sum(map(cpu_seconds, processes))
    start = time.monotonic()
    network.call(mesh.swap(), WAIT, "a bare mesh")
    end = time.monotonic()
    member.barrier()
    cpu = sum(map(cpu_seconds, processes)) - cpu
    return Call(start, end, bytes_sent(member.interface) - sent, cpu=cpu)


def all_reduce(member: Member, elements: int) -> Call:
    """gloo's sum of as many fp32 values."""
    if len(_standing.dense) != elements:
        _standing.dense = torch.full((elements,), 1e-9)
    member.barrier()
    sent, start = bytes_sent(member.interface), time.monotonic()
    dist.all_reduce(_standing.dense, group=member.group)
    end = time.monotonic()
    member.barrier()
    return Call(start, end, bytes_sent(member.interface) - sent)


def leave(member: Member) -> None:
    """End every exchange of this rank."""
    from node.exchange.network import process_network

    for mesh in _standing.meshes.values():
        process_network().call(mesh.close(), WAIT, "the end of a bare mesh")
        process_network().close()
    _standing.meshes.clear()
    for exchange in _standing.exchanges.values():
        exchange.close("measured")
    _standing.exchanges.clear()
