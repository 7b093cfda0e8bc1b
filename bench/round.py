"""One vote of a GPT-2-sized model between four node processes and the coordinator, against raw sockets.

Every node packs the signs of 124 M fp32 directions, contributes them, receives the majority and applies it
to its weights. Beside each round, in the same run, the same nodes move the same bytes over plain TCP sockets:
up from all nodes, then down to all of them. That is the floor: whatever a round takes above it is the price
of gRPC, packing, tallying and applying.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import threading
import time
from multiprocessing.synchronize import Barrier
from typing import Any, Final

from bench.processes import end, started
from bench.report import Report, median

NODES: Final = 4
PARAMETERS: Final = 124_439_808  # GPT-2 small
WAIT: Final = 120.0  # seconds at a barrier before the bench gives up
PHASES: Final = ("pack", "send", "receive", "apply")
BUCKET: Final = "matrices"

Channel = Any  # multiprocessing.Queue, which is not generic at run time


def run(quick: bool) -> Report:
    """Measure; the full form takes more repetitions of the same size."""
    repeats = 5 if quick else 15
    context = multiprocessing.get_context("spawn")
    results: Channel = context.Queue()
    barrier = context.Barrier(NODES)
    with contextlib.ExitStack() as stack:
        invite = stack.enter_context(started(context, _coordinate))
        port = stack.enter_context(started(context, _raw_hub))
        nodes = [
            context.Process(target=_node, args=(index, invite, port, repeats, barrier, results), daemon=True)
            for index in range(NODES)
        ]
        for node in nodes:
            node.start()
        stack.callback(end, nodes)
        rows = [results.get(timeout=WAIT * 2) for _ in nodes]
    return _report(rows)


def _report(rows: list[list[dict[str, float]]]) -> Report:
    """``rows[node][repetition]``: start and end of each phase on the machine's monotonic clock."""
    report = Report("round")
    rounds = list(zip(*rows, strict=True))
    seconds = [max(r["applied"] for r in of) - min(r["start"] for r in of) for of in rounds]
    exchanges = [max(r["received"] for r in of) - min(r["packed"] for r in of) for of in rounds]
    floors = [max(r["raw_end"] for r in of) - min(r["raw_start"] for r in of) for of in rounds]
    report.add("round_over_floor", median(seconds) / median(floors), ceiling=3.0)
    report.add("exchange_over_floor", median(exchanges) / median(floors))
    report.add("round_seconds", median(seconds))
    report.add("exchange_seconds", median(exchanges))
    report.add("floor_seconds", median(floors))
    phases = {
        "pack": [r["packed"] - r["start"] for of in rounds for r in of],
        "send": [r["sent"] - r["packed"] for of in rounds for r in of],
        "receive": [r["received"] - r["sent"] for of in rounds for r in of],
        "apply": [r["applied"] - r["received"] for of in rounds for r in of],
        "tally": [r["tally"] for of in rounds for r in of],
    }
    table = report.table(
        f"{NODES} nodes, {PARAMETERS / 1e6:.0f} M parameters, loopback", "phase", "ms a node"
    )
    for phase, values in phases.items():
        report.add(f"{phase}_seconds", median(values))
        table.row(phase, median(values) * 1e3)
    table.row("round", median(seconds) * 1e3)
    table.row("raw sockets", median(floors) * 1e3)
    report.note("a round lasts from the first node's packing to the last node's weights")
    report.note("phases are medians of a node; receive ends with the commit and contains the tally")
    report.note("tally is the CPU time of one tally of as many votes, measured by itself")
    report.note(f"{os.cpu_count()} cores run {NODES} nodes and the coordinator")
    return report


# ------------------------------------------------------------------------------------------------- the nodes


def _node(index: int, invite: str, port: int, repeats: int, barrier: Barrier, results: Channel) -> None:
    import numpy as np
    import torch

    from node.exchange.base import RoundOrder
    from node.exchange.hub import HubExchange
    from node.exchange.session import Claim
    from node.exchange.tensor_bytes import byte_view
    from optim import bits
    from protos.invite import Invite

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(index)
    direction = torch.randn(PARAMETERS, generator=generator)
    weights = torch.zeros(PARAMETERS)
    payload = torch.empty(bits.packed_nbytes(PARAMETERS), dtype=torch.uint8)
    votes = [np.random.default_rng(i).integers(0, 256, payload.numel(), np.uint8) for i in range(NODES)]

    exchange = HubExchange(Invite.parse(invite))
    raw = socket.create_connection(("127.0.0.1", port))
    received = bytearray(payload.numel())
    rows: list[dict[str, float]] = []
    try:
        told = exchange.describe()
        claim = Claim(
            f"node {index}", told.run_digest, told.table_digest, "0" * 64, "float32", "0" * 32, 0, 1
        )
        exchange.join(claim, payload.numel())
        for repetition in range(repeats + 1):
            order = exchange.next_order()
            assert isinstance(order, RoundOrder)
            barrier.wait(WAIT)
            row = {"start": time.monotonic()}
            bits.pack(direction, seed=bits.zero_seed(order.round, 0), out=payload)
            barrier.wait(WAIT)
            row["packed"] = time.monotonic()
            result = exchange.reduce(order, payload)
            row["received"] = time.monotonic()
            row["sent"] = exchange.sent_at
            assert result.payload is not None and len(result.voters) == NODES
            bits.apply_(weights, result.payload, step=1e-3, decay=0.9999)
            row["applied"] = time.monotonic()
            begin = time.thread_time()
            bits.tally(votes, casting=0)
            row["tally"] = time.thread_time() - begin
            barrier.wait(WAIT)
            row["raw_start"] = time.monotonic()
            raw.sendall(byte_view(payload))
            _receive(raw, received)
            row["raw_end"] = time.monotonic()
            if repetition:  # the first compiles, connects and touches memory for the first time
                rows.append(row)
        results.put(rows)
    finally:
        exchange.close("measured")
        raw.close()


def _receive(connection: socket.socket, into: bytearray) -> None:
    view = memoryview(into)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionError("the raw connection ended early")
        view = view[count:]


# -------------------------------------------------------------------------------------------- the other side

RUN_FILE: Final = f"""
[run]
name = "bench-round"
nodes = {NODES}
rounds = 1000000
evaluate_every = 0
"""


def _coordinate(ready: Channel) -> None:
    from coordinator.service import run_coordinator
    from protos.address import Address
    from protos.buckets import Bucket, BucketTable
    from protos.invite import Invite
    from protos.runfile import RunFile

    token = "bench"
    table = BucketTable((Bucket.of(BUCKET, "majority", [("w", (PARAMETERS,))]),))
    run_coordinator(
        RunFile.parse(RUN_FILE),
        table,
        token,
        listen=Address("127.0.0.1", 0),
        on_started=lambda s: ready.put(str(Invite(token, s.address.host, s.address.port))),
    )


def _raw_hub(ready: Channel) -> None:
    """Receive from every node, then send as much back to each: what the hub does, without doing anything."""
    nbytes = -(-PARAMETERS // 512) * 64
    listener = socket.create_server(("127.0.0.1", 0))
    ready.put(listener.getsockname()[1])
    gate = threading.Barrier(NODES)

    def serve(connection: socket.socket) -> None:
        buffer = bytearray(nbytes)
        with contextlib.suppress(ConnectionError, threading.BrokenBarrierError), connection:
            while True:
                _receive(connection, buffer)
                gate.wait(WAIT)
                connection.sendall(buffer)

    threads = [threading.Thread(target=serve, args=(listener.accept()[0],)) for _ in range(NODES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
