"""One vote of a GPT-2-sized model between four node processes and the coordinator, against raw sockets.

Every node packs the signs of 124 M fp32 directions, contributes them, receives the majority and applies it
to its weights. A *round* is what the nodes wait for: from the contribution handed over until the last of them
holds the committed result (send, tally, receive). A *step* adds the passes over the node's own memory,
packing and applying, which run side by side on as many cores as there are. In the same run the same nodes
move the same bytes over plain TCP sockets, see :mod:`bench.raw_sockets`: that is the floor. Bare gRPC streams
of the same chunks (:mod:`bench.bare_grpc`) show how much of the distance to it is gRPC's.

All of it is measured in the steady state: the first rounds of a run take new memory for the results that the
coordinator keeps for late nodes, and :data:`WARM_ROUNDS` of them, moved on every lane, are left out.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Sequence
from multiprocessing.synchronize import Barrier
from typing import Any, Final

from bench.bare_grpc import GrpcLane, grpc_hub
from bench.processes import end, started
from bench.raw_sockets import BlockingLane, LoopLane, blocking_hub, loop_hub
from bench.report import Report, median
from protos.buckets import Bucket, BucketTable, TableSchedule

NODES: Final = 4
PARAMETERS: Final = 124_439_808  # GPT-2 small
PAYLOAD: Final = -(-PARAMETERS // 512) * 64  # bytes
WARM_ROUNDS: Final = 20  # 17 results of this size fill the coordinator's ring
WAIT: Final = 120.0  # seconds at a barrier before the bench gives up

Channel = Any  # multiprocessing.Queue, which is not generic at run time
Row = dict[str, float]  # of one node and repetition: when a phase ended, on the machine's monotonic clock


def run(quick: bool) -> Report:
    """Measure; the full form takes more repetitions of the same size."""
    repeats = 5 if quick else 25
    context = multiprocessing.get_context("spawn")
    results: Channel = context.Queue()
    barrier = context.Barrier(NODES)
    with contextlib.ExitStack() as stack:
        invite = stack.enter_context(started(context, _coordinate))
        ports = [
            stack.enter_context(started(context, hub, NODES, PAYLOAD))
            for hub in (loop_hub, blocking_hub, grpc_hub)
        ]
        nodes = [
            context.Process(target=_node, args=(index, invite, ports, repeats, barrier, results), daemon=True)
            for index in range(NODES)
        ]
        for node in nodes:
            node.start()
        stack.callback(end, nodes)
        rows = [results.get(timeout=WAIT * 2) for _ in nodes]
    return _report(rows)


def _report(rows: Sequence[Sequence[Row]]) -> Report:
    """``rows[node][repetition]``."""
    repetitions = list(zip(*rows, strict=True))

    def span(first: str, last: str) -> float:
        """Seconds from the first node's ``first`` to the last node's ``last``."""
        return median([max(r[last] for r in of) - min(r[first] for r in of) for of in repetitions])

    def phase(first: str, last: str) -> float:
        return median([r[last] - r[first] for of in repetitions for r in of])

    floor, blocking = span("raw_start", "raw_end"), span("blocking_start", "blocking_end")
    bare = span("grpc_start", "grpc_end")
    seconds, step = span("packed", "received"), span("packed", "received") + span("start", "signs")
    step += span("apply_start", "applied")
    report = Report("round")
    report.add("round_over_floor", seconds / floor, ceiling=3.0)
    report.add("round_over_bare_grpc", seconds / bare)
    report.add("bare_grpc_over_floor", bare / floor)
    report.add("round_over_blocking_floor", seconds / blocking)
    report.add("step_over_floor", step / floor)
    report.add("round_seconds", seconds)
    report.add("step_seconds", step)
    report.add("floor_seconds", floor)
    report.add("blocking_floor_seconds", blocking)
    report.add("bare_grpc_seconds", bare)
    phases = {
        "pack": phase("start", "signs"),
        "send": phase("packed", "sent"),
        "receive": phase("sent", "received"),
        "apply": phase("apply_start", "applied"),
        "tally": median([r["tally"] for of in repetitions for r in of]),
    }
    title = f"{NODES} nodes, {PARAMETERS / 1e6:.0f} M parameters, loopback"
    table = report.table(title, "phase", "ms a node")
    for name, value in phases.items():
        report.add(f"{name}_seconds", value)
        table.row(name, value * 1e3)
    table.row("round", seconds * 1e3)
    table.row("raw sockets, event loops", floor * 1e3)
    table.row("raw sockets, blocking", blocking * 1e3)
    table.row("bare gRPC streams", bare * 1e3)
    report.note("a round is send, tally and receive of all nodes; a step adds packing and applying")
    report.note("receive ends with the commit and contains the tally; tally is CPU time, measured by itself")
    report.note("bare_grpc_over_floor is what gRPC costs by itself, with the same chunks and event loops")
    report.note(f"{os.cpu_count()} cores run {NODES} nodes and the coordinator")
    return report


def _node(
    index: int, invite: str, ports: Sequence[int], repeats: int, barrier: Barrier, results: Channel
) -> None:
    import numpy as np
    import torch

    from bench.claim import claim
    from node.exchange.base import RoundOrder
    from node.exchange.hub import HubExchange
    from node.exchange.tensor_bytes import byte_view
    from optim import bits
    from protos.invite import Invite

    torch.set_num_threads(1)
    direction = torch.randn(PARAMETERS, generator=torch.Generator().manual_seed(index))
    weights = torch.zeros(PARAMETERS)
    payload = torch.empty(PAYLOAD, dtype=torch.uint8)
    votes = [np.random.default_rng(i).integers(0, 256, PAYLOAD, np.uint8) for i in range(NODES)]
    lanes: dict[str, LoopLane | BlockingLane | GrpcLane] = {
        "raw": LoopLane(ports[0], PAYLOAD),
        "blocking": BlockingLane(ports[1], PAYLOAD),
        "grpc": GrpcLane(ports[2], PAYLOAD),
    }
    exchange = HubExchange(Invite.parse(invite))
    rows: list[Row] = []
    try:
        exchange.join(claim(exchange.describe(), f"node {index}", 4 * PARAMETERS), _tables())
        for repetition in range(WARM_ROUNDS + repeats):
            order = exchange.next_order()
            assert isinstance(order, RoundOrder)
            barrier.wait(WAIT)
            if 0 < repetition < WARM_ROUNDS:
                exchange.reduce(order, payload)
                for lane in lanes.values():
                    barrier.wait(WAIT)
                    lane.swap(byte_view(payload))
                continue
            row = {"start": time.monotonic()}
            bits.pack(direction, seed=bits.zero_seed(order.round, 0), out=payload)
            row["signs"] = time.monotonic()
            barrier.wait(WAIT)
            row["packed"] = time.monotonic()
            result = exchange.reduce(order, payload)
            row["received"] = time.monotonic()
            row["sent"] = exchange.sent_at
            assert result.payload is not None and len(result.voters) == NODES
            barrier.wait(WAIT)
            row["apply_start"] = time.monotonic()
            bits.apply_(weights, result.payload, step=1e-3, decay=0.9999)
            row["applied"] = time.monotonic()
            begin = time.thread_time()
            bits.tally(votes, casting=0)
            row["tally"] = time.thread_time() - begin
            for name, lane in lanes.items():
                barrier.wait(WAIT)
                row[f"{name}_start"] = time.monotonic()
                lane.swap(byte_view(payload))
                row[f"{name}_end"] = time.monotonic()
            if repetition:  # the first compiled the kernels
                rows.append(row)
        results.put(rows)
    finally:
        exchange.close("measured")
        for lane in lanes.values():
            lane.close()


RUN_FILE: Final = f"""
[run]
name = "bench-round"
nodes = {NODES}
rounds = 1000000
evaluate_every = 0
"""


def _tables() -> TableSchedule:
    return TableSchedule((BucketTable((Bucket.of("matrices", "majority", [("w", (PARAMETERS,))]),)),))


def _coordinate(ready: Channel) -> None:
    from coordinator.service import run_coordinator
    from protos.address import Address
    from protos.invite import Invite
    from protos.runfile import RunFile

    run_coordinator(
        RunFile.parse(RUN_FILE),
        _tables(),
        "bench",
        listen=Address("127.0.0.1", 0),
        on_started=lambda at: ready.put(str(Invite("bench", at.address.host, at.address.port))),
    )
