"""A node whose optimizer a test can look into, in a run with a real coordinator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from node.checkpoint import Saving, find, load
from node.data import open_data
from node.events import Event, Joined, RoundDone
from node.exchange.base import RoundOrder, RoundResult
from node.exchange.filling import Filling
from node.exchange.hub import HubExchange
from node.exchange.session import Claim
from node.model import build_model
from node.worker import Summary, Worker
from optim.methods import build_method
from optim.round_optimizer import RoundOptimizer
from protos.digests import state_digest
from protos.invite import Invite
from protos.runfile import RunFile
from tests.node.fleet import LIMITS, TIMING
from tests.node.tiny import TinyData, TinyModel


def errors_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items() if name.endswith("/error")}


class Remembering(HubExchange):
    """Keeps the errors that a node holds when it contributes for the first time."""

    def __init__(self, invite: Invite, optimizer: RoundOptimizer) -> None:
        super().__init__(invite, limits=LIMITS, timing=TIMING)
        self._optimizer = optimizer
        self.errors: dict[str, torch.Tensor] = {}

    def reduce(
        self,
        order: RoundOrder,
        payload: torch.Tensor | None,
        abstain_reason: str = "",
        filling: Filling | None = None,
    ) -> RoundResult:
        if payload is not None and not self.errors:
            self.errors = errors_of(self._optimizer.local_tensors())
        return super().reduce(order, payload, abstain_reason, filling)


class Member:
    """A node of a run with a coordinator, fresh or from a checkpoint in ``folder``.

    Its model and data are tiny, or those of the run file.
    """

    def __init__(
        self,
        run: RunFile,
        invite: Invite,
        name: str,
        folder: Path,
        *,
        resume: bool = False,
        tiny: bool = True,
    ) -> None:
        self._run, self._folder, self._start = run, folder, 0
        self._model: Any = TinyModel()
        self._data: Any = TinyData()
        if not tiny:
            self._data = open_data(run.data, run.model.context)
            self._model = build_model(run.model, run.run.seed, vocab=self._data.vocab)
        self.optimizer = build_method(run.method, self._model)
        if resume:
            self.optimizer.prepare_load()
            self._start = load(
                find(folder),
                run_digest=run.digest,
                shared=self.optimizer.shared_tensors(),
                local=self.optimizer.local_tensors(),
                loaded=self.optimizer.loaded,
            ).round
        self.exchange = Remembering(invite, self.optimizer)
        shared = self.optimizer.shared_tensors()
        digest, nbytes = state_digest(shared), sum(tensor.nbytes for tensor in shared.values())
        data = "tiny" if tiny else self._data.digest
        table = self.optimizer.tables.digest
        claim = Claim(name, run.digest, table, data, "float32", digest, self._start, 1, state_bytes=nbytes)
        self.admission = self.exchange.join(claim, self.optimizer.tables)

    def train(self, listen: Callable[[Event], None], *, last: int = -1, counted: int = -1) -> Summary:
        """Until the end of the run, or round ``last``, or so many rounds that count; then save."""
        listen(Joined(self.admission.node, self.exchange.address, self.admission.needs_state))

        def hear(event: Event) -> None:
            listen(event)
            if isinstance(event, RoundDone):
                done.append(event.counted)
                if event.round == last or sum(done) == counted:
                    worker.interrupt()

        done: list[bool] = []

        worker = Worker(
            self._run,
            self._model,
            self._data,
            self.optimizer,
            self.exchange,
            round_index=self._start,
            on_event=hear,
            saving=Saving(self._folder),
        )
        try:
            return worker.run()
        finally:
            self.exchange.close("its work is done")
