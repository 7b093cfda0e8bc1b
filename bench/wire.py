"""What a round costs on the wire, counted: bits per parameter in each direction, and against fp32.

Real nodes exchange real rounds of a model of more than ten million parameters, embeddings and norms
included, through the coordinator on loopback. Bytes are counted twice: by every node's meter at the
transport, and by the kernel on the loopback interface, which also sees TCP/IP and HTTP/2 framing and whatever
else uses it meanwhile.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from multiprocessing.synchronize import Barrier
from typing import TYPE_CHECKING, Any, Final

from bench.namespaces import LOOPBACK, bytes_sent
from bench.processes import end, started
from bench.report import Report

if TYPE_CHECKING:
    from protos.runfile import RunFile

NODES: Final = 3
WARM_ROUNDS: Final = 2
WAIT: Final = 120.0
METHODS: Final = ("sign-muon", "ddp-adamw")

Channel = Any  # multiprocessing.Queue, which is not generic at run time


def run(quick: bool) -> Report:
    """Measure sign-muon against the fp32 mean of ddp-adamw through the same coordinator."""
    report = Report("wire")
    rounds = 3 if quick else 20
    counted = {method: _measure(method, rounds) for method in METHODS}
    votes, dense = counted["sign-muon"], counted["ddp-adamw"]
    up, down = (8 * votes[way] / (votes["parameters"] * rounds * NODES) for way in ("up", "down"))
    report.add("fp32_ratio", (dense["up"] + dense["down"]) / (votes["up"] + votes["down"]), floor=31.0)
    report.add("bits_per_param_up", up, ceiling=1.01)
    report.add("bits_per_param_down", down, ceiling=1.01)
    report.add("overhead_up", votes["up"] / (votes["payload"] * rounds * NODES) - 1, ceiling=0.01)
    report.add("overhead_down", votes["down"] / (votes["payload"] * rounds * NODES) - 1, ceiling=0.01)
    if votes["kernel"]:
        report.add("kernel_over_meter", votes["kernel"] / (votes["up"] + votes["down"]))
    report.add("parameters", int(votes["parameters"]))
    report.add("payload_bytes", int(votes["payload"]))
    table = report.table(
        f"{NODES} nodes, {rounds} rounds", "method", "bytes up", "bytes down", "bits/param up"
    )
    for method, of in counted.items():
        each = rounds * NODES
        table.row(method, of["up"] / each, of["down"] / each, 8 * of["up"] / of["parameters"] / each)
    report.note("bytes are a node's in one round: payload, framing of the protocol, session and reports")
    report.note("fp32_ratio compares with an fp32 mean of the same model through the same coordinator")
    return report


def _measure(method: str, rounds: int) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    results: Channel = context.Queue()
    barrier = context.Barrier(NODES)
    with contextlib.ExitStack() as stack:
        invite = stack.enter_context(started(context, _coordinate, method))
        nodes = [
            context.Process(target=_node, args=(index, invite, rounds, barrier, results), daemon=True)
            for index in range(NODES)
        ]
        for node in nodes:
            node.start()
        stack.callback(end, nodes)
        rows = [results.get(timeout=WAIT) for _ in nodes]
    total = {way: float(sum(row[way] for row in rows)) for way in ("up", "down")}
    kernel = max(row["kernel"] for row in rows)
    return {**total, "kernel": kernel, "parameters": rows[0]["parameters"], "payload": rows[0]["payload"]}


def _run_file(method: str) -> RunFile:
    from protos.runfile import RunFile

    return RunFile.parse(
        f"""
[run]
name = "bench-wire"
nodes = {NODES}
rounds = 1000000
evaluate_every = 0
[model]
d_model = 384
layers = 6
heads = 6
[method]
name = "{method}"
"""
    )


def _coordinate(method: str, ready: Channel) -> None:
    from coordinator.service import run_coordinator
    from node.model import model_on_meta
    from optim.methods import build_method
    from protos.address import Address
    from protos.invite import Invite

    run_file = _run_file(method)
    tables = build_method(run_file.method, model_on_meta(run_file.model)).tables
    run_coordinator(
        run_file,
        tables,
        "bench",
        listen=Address("127.0.0.1", 0),
        on_started=lambda s: ready.put(
            (method, tables.of(0).elements, str(Invite("bench", s.address.host, s.address.port)))
        ),
    )


def _node(index: int, ready: tuple[str, int, str], rounds: int, barrier: Barrier, results: Channel) -> None:
    import torch

    from bench.claim import claim
    from node.exchange.base import RoundOrder, WorkReport
    from node.exchange.hub import HubExchange
    from node.model import model_on_meta
    from optim.methods import build_method
    from protos.invite import Invite

    method, parameters, invite = ready
    run_file = _run_file(method)
    tables = build_method(run_file.method, model_on_meta(run_file.model)).tables
    table = tables.of(0)  # that of every round: both methods exchange the same in all of them
    generator = torch.Generator().manual_seed(index)
    payload = torch.zeros(table.nbytes, dtype=torch.uint8)
    for bucket, start in zip(table.buckets, table.offsets, strict=True):
        if bucket.reduce == "mean":
            payload[start : start + bucket.elements * 4].view(torch.float32).normal_(generator=generator)
        else:
            payload[start : start + bucket.elements // 8].random_(0, 256, generator=generator)
    exchange = HubExchange(Invite.parse(invite))
    try:
        exchange.join(claim(exchange.describe(), f"node {index}", 4 * parameters), tables)
        for number in range(WARM_ROUNDS + rounds):
            order = exchange.next_order()
            assert isinstance(order, RoundOrder) and order.round == number
            if number == WARM_ROUNDS:
                barrier.wait(WAIT)
                before, kernel = exchange.bytes_counted(), bytes_sent(LOOPBACK)
                barrier.wait(WAIT)
            result = exchange.reduce(order, payload)
            assert len(result.voters) == NODES, result.reason
            exchange.report(WorkReport(number, "0" * 32, 1.0, 1024, 0.1, 0.1))
        barrier.wait(WAIT)
        after, kernel = exchange.bytes_counted(), bytes_sent(LOOPBACK) - kernel
        barrier.wait(WAIT)
        results.put(
            {
                "up": after[0] - before[0],
                "down": after[1] - before[1],
                "kernel": kernel,
                "parameters": parameters,
                "payload": table.nbytes,
            }
        )
    finally:
        exchange.close("measured")
