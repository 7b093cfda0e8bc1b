"""A model of a few lines, data without a corpus, an exchange that follows a script, and a worker on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from node.events import Event, Summary
from node.exchange.base import (
    DonateOrder,
    LoadOrder,
    Order,
    ReplayOrder,
    RoundOrder,
    RoundResult,
    StopOrder,
    WorkReport,
)
from node.exchange.filling import Filling
from node.exchange.local import LocalExchange
from node.exchange.spool import Spool
from node.exchange.tensor_bytes import Row, byte_view, total_bytes
from node.worker import Worker
from optim.methods import build_method
from optim.round_optimizer import RoundOptimizer
from optim.schedules import factor
from protos.runfile import RunFile
from protos.snapshots import chunks

VOCAB, CONTEXT, BATCH = 16, 4, 3
DEADLINE = 60.0


class TinyModel(nn.Module):
    """Predicts a token from the one before. Without an embedding: no gradient is exactly zero."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 12)
        self.norm = nn.LayerNorm(12)
        self.outer = nn.Linear(12, VOCAB)
        generator = torch.Generator().manual_seed(seed)  # torch's own is shared by the threads of a test
        for layer in (self.inner, self.outer):
            for parameter in layer.parameters():
                nn.init.uniform_(parameter, -0.3, 0.3, generator=generator)
        self.register_buffer("features", torch.randn(VOCAB, 8, generator=torch.Generator().manual_seed(1)))

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.norm(self.inner(self.features[tokens[:, :-1]])))
        return nn.functional.cross_entropy(self.outer(hidden).flatten(0, 1), tokens[:, 1:].flatten())


class TinyData:
    """Sample i is drawn from a generator seeded with i."""

    bytes_per_token = 2.0

    def __init__(self) -> None:
        self.read: list[tuple[int, int, int]] = []

    def batch(self, start: int, count: int, seed: int) -> torch.Tensor:
        self.read.append((start, count, seed))
        return torch.stack([self._sample(index + 1000 * seed) for index in range(start, start + count)])

    def validation(self, count: int) -> torch.Tensor:
        return torch.stack([self._sample(-1 - index) for index in range(count)])

    @staticmethod
    def _sample(index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index + (1 << 20))
        return torch.randint(0, VOCAB, (CONTEXT + 1,), generator=generator)


def run_file(
    rounds: int = 8, method: str = "sign-muon", settings: Mapping[str, Any] | None = None, **run: Any
) -> RunFile:
    """A run file whose model and data sections are not used; ``settings`` are those of the method."""
    return RunFile.model_validate(
        {
            "run": {
                "rounds": rounds,
                "nodes": 1,
                "evaluate_every": 0,
                "validation_windows": 5,
                "seed": 3,
                **run,
            },
            "data": {"batch": BATCH},
            "round": {"adaptive": False},  # every vote counts on a busy machine too
            "method": {"name": method, "warmup": min(2, rounds - 1), **(settings or {})},
        }
    )


class ScriptedExchange:
    """Gives the orders of a list; results and snapshots come from the test.

    ``states`` has the tensors and the announced digest of a snapshot, or what its transfer comes to instead.
    """

    def __init__(
        self, orders: Sequence[Order], results: Mapping[int, torch.Tensor | Exception | None]
    ) -> None:
        self._orders = list(orders)
        self._results = results
        self.states: dict[str, tuple[dict[str, torch.Tensor], str] | Exception] = {}
        self.contributions: list[tuple[int, torch.Tensor | None, str]] = []
        self.reports: list[WorkReport] = []
        self.donated: list[tuple[DonateOrder, str, bytes]] = []
        self.replays: list[ReplayOrder] = []
        self.readies: list[tuple[int, str]] = []

    def next_order(self) -> Order:
        return self._orders.pop(0)

    def reduce(
        self,
        order: RoundOrder,
        payload: torch.Tensor | None,
        abstain_reason: str = "",
        filling: Filling | None = None,
    ) -> RoundResult:
        if filling is not None and not filling.wait(DEADLINE):
            payload, abstain_reason = None, filling.reason
        self.contributions.append((order.round, None if payload is None else payload.clone(), abstain_reason))
        result = self._results[order.round]
        if isinstance(result, Exception):
            raise result
        return RoundResult(order.round, result, ("node-1",), (1,), False, math.nan, "scripted")

    def report(self, report: WorkReport) -> None:
        self.reports.append(report)

    def replay(self, order: ReplayOrder) -> Generator[RoundResult, None, None]:
        self.replays.append(order)
        for round_index in range(order.first, order.first + order.count):
            result = self._results[round_index]
            if isinstance(result, Exception):
                raise result
            voters = () if result is None else ("node-1",)
            yield RoundResult(round_index, result, voters, (1,) * len(voters), False, math.nan, "scripted")

    def donate(self, order: DonateOrder, spool: Spool, done: Callable[[str], None]) -> None:
        data = bytearray(spool.nbytes)
        spool.read(spool.start, memoryview(data))
        spool.close()
        self.donated.append((order, spool.state_digest, bytes(data)))
        failure = self.states.get(order.snapshot)
        done(str(failure) if isinstance(failure, Exception) else "")

    def download(self, order: LoadOrder, rows: Sequence[Row]) -> Spool:
        state = self.states[order.snapshot]
        if isinstance(state, Exception):
            raise state
        tensors, digest = state
        spool = Spool(rows, 0, chunks(total_bytes(rows)), state_digest=digest)
        data = b"".join(bytes(byte_view(tensors[row.name])) for row in rows)
        spool.write(0, memoryview(data))
        return spool

    def ready(self, round_index: int, state_digest: str) -> None:
        self.readies.append((round_index, state_digest))

    def reducer_tensors(self) -> dict[str, torch.Tensor]:
        return {}

    def bytes_counted(self) -> tuple[int, int]:
        return 11, 22

    def close(self, reason: str) -> None:
        pass


def opened(round_index: int, **changes: Any) -> RoundOrder:
    values: dict[str, Any] = {
        "epoch": 1,
        "members": ("node-0", "node-1"),
        "lease_start": round_index * BATCH,
        "lease_count": BATCH,
        "evaluate": False,
        "result_ready": False,
    }
    return RoundOrder(round=round_index, **{**values, **changes})


def alone(
    run: RunFile,
    optimizer: RoundOptimizer,
    *,
    start: int = 0,
    rounds: int | None = None,
    reducer: Mapping[str, torch.Tensor] | None = None,
) -> LocalExchange:
    """The local exchange of a run, or of its first ``rounds``; from ``start`` with ``reducer``."""
    return LocalExchange(
        optimizer.tables,
        rounds=run.run.rounds if rounds is None else rounds,
        batch=run.data.batch,
        micro_steps=optimizer.micro_steps,
        evaluate_every=run.run.evaluate_every,
        start=start,
        reducer=reducer,
    )


STOP = StopOrder(True, "all rounds are done", False)


class Node:
    """A worker with everything around it."""

    def __init__(self, run: RunFile, exchange: Any = None, *, start: int = 0, **options: Any) -> None:
        self.model = options.pop("model", None) or TinyModel()
        self.data = options.pop("data", None) or TinyData()
        self.optimizer: RoundOptimizer = options.pop("optimizer", None) or build_method(
            run.method, self.model
        )
        self.events: list[Event] = []
        rounds = options.pop("rounds", None)  # of an exchange that stops early
        self.exchange = exchange or alone(run, self.optimizer, start=start, rounds=rounds)
        self.worker = Worker(
            run,
            self.model,
            self.data,
            self.optimizer,
            self.exchange,
            round_index=start,
            on_event=self.events.append,
            **options,
        )

    def run(self) -> Summary:
        return self.worker.run()

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def schedule(run: RunFile, round_index: int) -> float:
    method = run.method
    return factor(
        round_index, run.run.rounds, warmup=method.warmup, shape=method.schedule, final=method.final
    )


def payload_of_round_0(run: RunFile) -> torch.Tensor:
    """What another node with other samples would contribute."""
    model = TinyModel()
    optimizer = build_method(run.method, model)
    model.loss(TinyData().batch(500, BATCH, 3)).backward()
    payload = torch.empty(optimizer.tables.nbytes, dtype=torch.uint8)
    assert optimizer.propose(0, payload)
    return payload
