"""``python -m bench memory``: what a rank of an island holds, with every method, against the formula.

A node of one rank and one of four train two rounds of a model as ``atoll train`` does, on CPUs, where every
tensor counts that an operation has touched and that is still alive: between rounds, and at the most within
them. Activations are next to nothing: a rank reads one window of eight tokens.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch.distributed as dist
from torch import Tensor

from bench.island_ranks import Member, Ranks, world
from bench.live_bytes import LiveBytes
from bench.report import Report
from deploy.memory import RankBytes, rank_bytes
from node.exchange.base import RoundOrder, RoundResult
from node.exchange.filling import Filling
from node.exchange.local import LocalExchange
from node.island.ranks import IslandRanks
from node.model import model_on_meta
from node.ranks import Alone
from node.setting import Options, build
from node.worker import Worker
from protos.methods import PRESETS
from protos.runfile import RunFile

RANKS: Final = 4
ROUNDS: Final = 2  # the first of LoRDO only finds a basis
STEPS: Final = 2  # of the methods with local steps, which hold as much with more
SECONDS: Final = 300.0  # for the ranks to wait for each other
FULL: Final = {"d_model": 256, "layers": 8, "heads": 4, "context": 8}
QUICK: Final = {"d_model": 128, "layers": 8, "heads": 2, "context": 8}


@dataclass(frozen=True)
class Held:
    """Bytes on one rank, measured.

    Attributes:
        weights: storages of the parameters.
        gradients: of those.
        state: of all other tensors that a checkpoint names.
        resting: everything alive between two rounds.
        peak: the most within them.
    """

    weights: int
    gradients: int
    state: int
    resting: int
    peak: int


def run_file(name: str, shape: dict[str, Any]) -> RunFile:
    """A run of a preset."""
    method = {"name": name} | ({"local_steps": STEPS} if PRESETS[name].local_steps > 1 else {})  # type: ignore[index]
    return RunFile.model_validate(
        {
            "run": {"rounds": ROUNDS, "evaluate_every": 0, "validation_windows": 1},
            "model": shape,
            "data": {"batch": RANKS},
            "method": method,
        }
    )


def formula(run: RunFile, ranks: int) -> list[RankBytes]:
    """What each rank is to hold on CPUs."""
    return rank_bytes(run.method, model_on_meta(run.model), ranks, one_memory=True)


class Islands:
    """Processes that are nodes of one rank or of four, run by run."""

    def __init__(self, pool: Ranks) -> None:
        self._pool = pool
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        self._runs = 0

    def measure(self, run: RunFile, ranks: int) -> list[Held]:
        """What each rank holds while it trains."""
        self._runs += 1
        return self._pool.run(_train, ranks, run.to_toml(), self._store.port, self._runs)


class Returned(LocalExchange):
    """As alone, but the result is never the contribution itself, as none is that comes from elsewhere."""

    def reduce(
        self,
        order: RoundOrder,
        payload: Tensor | None,
        abstain_reason: str = "",
        filling: Filling | None = None,
    ) -> RoundResult:
        """See the base class."""
        result = super().reduce(order, payload, abstain_reason, filling)
        if result.payload is None or result.payload is not payload:
            return result
        return replace(result, payload=result.payload.clone())


def _train(member: Member, text: str, port: int, number: int) -> Held:
    run = RunFile.parse(text)
    ranks = _meet(member, port, number) if member.ranks > 1 else Alone()
    with LiveBytes() as live:
        setting = build(run, Options(device="cpu", threads=1), lambda event: None, ranks)
        optimizer = setting.optimizer
        exchange = Returned(
            optimizer.lane, rounds=ROUNDS, batch=run.data.batch, micro_steps=optimizer.micro_steps
        )
        worker = Worker(
            run,
            setting.model,
            setting.data,
            optimizer,
            exchange,
            ranks=ranks,
            device=setting.device,
            watch=setting.watch_gradients,
        )
        live.most = live.now()  # what was needed to build it is gone
        worker.run()
        gc.collect()
        peak, resting = live.most, live.now()
    ranks.close("measured")
    parameters = [p for group in optimizer.param_groups for p in group["params"] if not p.is_meta]
    weights = _storages(parameters)
    named = _storages([*optimizer.shared_tensors().values(), *optimizer.local_tensors().values()])
    return Held(
        weights=sum(weights.values()),
        gradients=sum(_storages(p.grad for p in parameters if p.grad is not None).values()),
        state=sum(nbytes for address, nbytes in named.items() if address not in weights),
        resting=resting,
        peak=peak,
    )


def _meet(member: Member, port: int, number: int) -> IslandRanks:
    """The ranks of a node as torchrun would have started them."""
    os.environ |= {
        "RANK": str(member.rank),
        "LOCAL_RANK": str(member.rank),
        "WORLD_SIZE": str(member.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": str(number),
    }
    return IslandRanks.from_environment(seconds=SECONDS)


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of the storages behind some tensors, by address."""
    return {s.data_ptr(): s.nbytes() for s in (tensor.untyped_storage() for tensor in tensors)}


def run(quick: bool) -> Report:
    """Every preset."""
    shape = QUICK if quick else FULL
    measured: dict[str, dict[int, list[Held]]] = {}
    with world(RANKS) as pool:
        islands = Islands(pool)
        for name in PRESETS:
            file = run_file(name, shape)
            measured[name] = {ranks: islands.measure(file, ranks) for ranks in (1, RANKS)}
    return fill(Report("memory"), shape, measured)


def fill(report: Report, shape: dict[str, Any], measured: dict[str, dict[int, list[Held]]]) -> Report:
    """Figures, bars and table of what was measured for each preset and number of ranks."""
    parameters = sum(p.numel() for p in model_on_meta(run_file("signum", shape).model).parameters())
    table = report.table(
        f"{parameters / 1e6:.1f} M parameters: bytes a parameter of the model on the fullest rank",
        "method", "1 rank", "formula", f"{RANKS} ranks", "formula", "of average", "at the most", "formula",
    )  # fmt: skip
    off, twice, uneven, peaks = [], [], [], []
    for name, found in measured.items():
        file = run_file(name, shape)
        expected = {ranks: formula(file, ranks) for ranks in found}
        for ranks, held in found.items():
            pairs = list(zip(held, expected[ranks], strict=True))
            off += [one.resting / other.resting for one, other in pairs]
            peaks += [one.peak / other.peak for one, other in pairs]
        alone, island = found[1][0], found[RANKS]
        twice.append(sum(one.state for one in island) / alone.state)
        fullest, most = max(one.resting for one in island), max(one.peak for one in island)
        uneven.append(fullest * RANKS / sum(one.resting for one in island))
        peak = max(one.peak for one in expected[RANKS])
        resting = [max(one.resting for one in expected[ranks]) for ranks in (1, RANKS)]
        table.row(
            name,
            *(value / parameters for value in (alone.resting, resting[0], fullest, resting[1])),
            uneven[-1],
            most / parameters,
            peak / parameters,
        )
        report.add(f"{name}_bytes_1", alone.resting / parameters)
        report.add(f"{name}_bytes_{RANKS}", fullest / parameters)
        report.add(f"{name}_peak_{RANKS}", most / parameters)
    report.add("resting_vs_formula_most", max(off), ceiling=1.01)
    report.add("resting_vs_formula_least", min(off), floor=0.99)
    report.add("state_of_all_ranks_vs_one", max(twice), ceiling=1.0)
    report.add("fullest_rank_vs_average", max(uneven), ceiling=1.05)
    report.add("peak_vs_formula_most", max(peaks), ceiling=1.0)
    report.add("peak_vs_formula_least", min(peaks), floor=0.8)
    report.add("parameters", parameters)
    report.note("between rounds: weights, gradients, state on the device and in host memory, contribution")
    report.note(
        "at the most: of one round; the formula has the weights and gradients of two blocks and the root"
    )
    return report
