"""Bytes of every method for a step, counted at the transport of real nodes and compared with the formula.

Nodes train a few rounds of a model of some million parameters with every preset, through the coordinator on
loopback, one batch a round: what travels does not depend on how many steps lie between. A round's bytes are
divided by the preset's number of steps. Ratios are over both directions and, where the claims are, over the
matrices alone: embeddings are a small part of large models and most of the bytes of small ones.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from bench.report import Report
from coordinator.service import Started, run_coordinator
from node.events import Event, RoundDone
from node.launch import Options, join
from node.model import build_model, model_on_meta
from optim.methods import build_method
from optim.roles import classify
from protos.address import Address
from protos.buckets import BucketTable, TableSchedule
from protos.invite import Invite
from protos.methods import LOCAL, LOW_RANK, PRESETS, MethodName
from protos.runfile import RunFile

NODES: Final = 2
WAIT: Final = 300.0
TOKEN: Final = "bench"
RANK_SHARE: Final = 8  # the rank is this part of the model's width
LORDO_STEPS: Final = 32
FULL: Final = {"d_model": 384, "layers": 6, "heads": 6, "context": 16}
QUICK: Final = {"d_model": 192, "layers": 3, "heads": 3, "context": 16}
FULL_ROUNDS, QUICK_ROUNDS = 4, 3  # the first is not counted: connections and a first basis


@dataclass(frozen=True)
class Cost:
    """Bytes of one node in one step; ``up`` and ``down`` as counted, the others of both directions."""

    up: float
    down: float
    matrices: float
    formula_up: float
    formula_down: float

    @property
    def all(self) -> float:
        """Both directions."""
        return self.up + self.down

    @property
    def overhead(self) -> float:
        """What was counted beyond the formula, as a share of it."""
        return self.all / (self.formula_up + self.formula_down) - 1


def run(quick: bool) -> Report:
    """Every preset; quick: of a smaller model, in which padding and framing weigh more."""
    shape, rounds = (QUICK, QUICK_ROUNDS) if quick else (FULL, FULL_ROUNDS)
    costs = {name: measure(name, shape, rounds) for name in PRESETS}
    report = Report("bytes")

    def add(name: str, one: MethodName, other: MethodName, **bar: float) -> None:
        """How many times fewer bytes ``other`` moves than ``one``: matrices, then everything."""
        report.add(name, costs[one].matrices / costs[other].matrices, **bar)
        report.add(f"{name}_all", costs[one].all / costs[other].all)

    add("lordo_vs_fp32_ddp", "ddp-adamw", "lordo", floor=25.0)
    add("lordo_vs_lowrank_ddp", "lowrank-ddp", "lordo", floor=10.0)
    moments, with_basis = state_ratios(shape)
    report.add("lordo_state_vs_adam", moments, floor=8.0)
    report.add("lordo_state_with_basis_vs_adam", with_basis)
    add("muloco1bit_vs_fp32_ddp", "ddp-adamw", "muloco-1bit", floor=500.0)
    add("signmuon_vs_fp32_ddp", "ddp-adamw", "sign-muon", floor=31.0)
    report.add("overhead", max(cost.overhead for cost in costs.values()), ceiling=0.01)
    model = model_on_meta(_run_file("ddp-adamw", shape, 1).model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    report.add("parameters", parameters)
    table = report.table(
        f"{parameters / 1e6:.1f} M parameters, bytes of a node in one step",
        "method", "steps a round", "formula up", "counted up", "formula down", "counted down", "x fp32 DDP",
        "matrices alone",
    )  # fmt: skip
    dense = costs["ddp-adamw"]
    for name, cost in costs.items():
        table.row(
            name,
            steps_of(name),
            cost.formula_up,
            cost.up,
            cost.formula_down,
            cost.down,
            dense.all / cost.all,
            dense.matrices / cost.matrices,
        )
    report.note("formula: sizes of the bucket tables; counted: payload, framing, session and reports")
    report.note("rank of lordo and lowrank-ddp: an eighth of the width")
    report.note("lordo_state: both moments in the subspace against Adam's; then with the basis")
    return report


def steps_of(name: MethodName) -> int:
    """Steps of the preset between two exchanges."""
    return LORDO_STEPS if name == "lordo" else PRESETS[name].local_steps


def measure(name: MethodName, shape: dict[str, int], rounds: int) -> Cost:
    """Let nodes exchange ``rounds`` rounds of a preset and count the bytes from the second on."""
    run_file = _run_file(name, shape, rounds)
    model = model_on_meta(run_file.model)
    optimizer = build_method(run_file.method, model)
    tables = optimizer.tables
    up, down = exchanged(run_file, tables)
    counted = [tables.of(index) for index in range(1, rounds)]
    formula = (sum(t.nbytes for t in counted), sum(t.result_nbytes for t in counted))
    steps = steps_of(name)
    per_step = tuple(nbytes / steps for nbytes in tables.mean_nbytes)
    beyond = up / formula[0], down / formula[1]
    matrices = matrix_nbytes(tables, {role.name for role in classify(model) if role.role == "matrix"})
    return Cost(
        up=per_step[0] * beyond[0],
        down=per_step[1] * beyond[1],
        matrices=sum(nbytes / steps * share for nbytes, share in zip(matrices, beyond, strict=True)),
        formula_up=per_step[0],
        formula_down=per_step[1],
    )


def exchanged(run_file: RunFile, tables: TableSchedule) -> tuple[float, float]:
    """Bytes that a node sent and received in all rounds but the first, counted at its transport."""
    counts: dict[tuple[str, int], tuple[int, int]] = {}

    def listener(name: str) -> Any:
        def listen(event: Event) -> None:
            if isinstance(event, RoundDone):
                counts[name, event.round] = event.bytes_up, event.bytes_down

        return listen

    started: Future[Started] = Future()
    stop = threading.Event()
    names = [f"node {index}" for index in range(NODES)]
    with ThreadPoolExecutor(1 + NODES) as pool:
        outcome = pool.submit(
            run_coordinator,
            run_file,
            tables,
            TOKEN,
            listen=Address("127.0.0.1", 0),
            on_started=started.set_result,
            stop_event=stop,
        )
        outcome.add_done_callback(lambda ended: _pass_on(ended, started))
        try:
            invite = Invite(TOKEN, "127.0.0.1", started.result(WAIT).address.port)
            nodes = [
                pool.submit(join, invite, Options(name=name, device="cpu", threads=1), listener(name))
                for name in names
            ]
            for node in nodes:
                node.result(WAIT)
        finally:
            stop.set()
    last = run_file.run.rounds - 1
    sums = [sum(counts[name, last][way] - counts[name, 0][way] for name in names) for way in (0, 1)]
    return sums[0] / NODES, sums[1] / NODES


def matrix_nbytes(tables: TableSchedule, matrices: set[str]) -> tuple[float, float]:
    """Bytes of a contribution and of a result that belong to ``matrices``: a mean over the rounds."""
    rounds = [tables.tables[index] for index in tables.cycle]
    sums = [_matrix_nbytes(table, matrices) for table in rounds]
    up, down = (sum(pair[way] for pair in sums) / len(rounds) for way in (0, 1))
    return up, down


def _matrix_nbytes(table: BucketTable, matrices: set[str]) -> tuple[float, float]:
    up = down = 0.0
    for bucket in table.buckets:
        share = sum(m.elements for m in bucket.members if _owner(m.name, matrices)) / bucket.elements
        up += bucket.nbytes * share
        down += bucket.result_nbytes * share
    return up, down


def _owner(member: str, matrices: Iterable[str]) -> bool:
    """Whether what travels as ``member`` is a matrix, or state or scales of one."""
    name = member.removeprefix("optimizer/")
    return any(name == matrix or name.startswith(f"{matrix}/") for matrix in matrices)


def state_ratios(shape: dict[str, int]) -> tuple[float, float]:
    """Adam's moments of the matrices, in bytes, over LoRDO's; and over LoRDO's with the basis."""
    adam, lordo = _matrix_state("ddp-adamw", shape), _matrix_state("lordo", shape)
    full, low = (state["exp_avg"] + state["exp_avg_sq"] for state in (adam, lordo))
    return full / low, full / (low + lordo["basis"])


def _matrix_state(name: MethodName, shape: dict[str, int]) -> Counter[str]:
    """Bytes of a node's optimizer state of the matrices, by key."""
    run_file = _run_file(name, shape, 2)
    model = build_model(run_file.model, 0)
    optimizer = build_method(run_file.method, model)
    optimizer.prepare_load()
    tensors = {**optimizer.shared_tensors(), **optimizer.local_tensors()}
    sums: Counter[str] = Counter()
    for role in classify(model):
        prefix = f"optimizer/{role.name}/"
        if role.role == "matrix":
            own = {key: tensor for key, tensor in tensors.items() if key.startswith(prefix)}
            sums.update({key.removeprefix(prefix): tensor.nbytes for key, tensor in own.items()})
    return sums


def _run_file(name: MethodName, shape: dict[str, int], rounds: int) -> RunFile:
    method: dict[str, Any] = {"name": name}
    if name in LOCAL:
        method["local_steps"] = 1
    if name in LOW_RANK:
        method["rank"] = shape["d_model"] // RANK_SHARE
    if name == "lowrank-ddp":
        method["omega"] = 1.0  # with a full-rank term it sends the whole gradient
    return RunFile.model_validate(
        {
            "run": {"nodes": NODES, "rounds": rounds, "evaluate_every": 0, "validation_windows": 1},
            "model": shape,
            "data": {"batch": 1},
            "method": method,
            "round": {"deadline": WAIT, "start_timeout": WAIT, "adaptive": False},
        }
    )


def _pass_on(ended: Future[Any], started: Future[Started]) -> None:
    """A coordinator that never started must not be waited for."""
    if not started.done():
        started.set_exception(ended.exception() or RuntimeError("the coordinator ended at once"))
