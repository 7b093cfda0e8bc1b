"""A run of several nodes in one process: what real nodes and their coordinator compute, without a network.

Every simulated node has its own momenta, error feedback and (with local steps) weights; it trains with the
code of a real one. Samples are leased from the coordinator's book and contributions are reduced by the
definition that the coordinator is held to. So, on one kind of machine and with as many threads, the losses
and the state digests are those of real processes, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from coordinator.leases import LeaseBook
from coordinator.rounds import evaluates, evaluator
from node.clocks import Clocks, Stopwatch
from node.data import open_data
from node.evaluation import Data, Evaluator, Validation
from node.exchange.base import RoundOrder
from node.language import LanguageModel
from node.model import build_model
from node.state import SharedState
from node.training import Training, Work
from optim.aggregate import ReducerMemory
from optim.methods import build_method
from optim.reduce import reduce_payloads
from optim.round_optimizer import RoundOptimizer
from optim.schedules import factor, set_learning_rates
from protos.runfile import RunFile

Build = Callable[[nn.Module], RoundOptimizer]

VOTE_WEIGHT: Final = 1  # of every node
EPOCH: Final = 1  # of the roster: nobody comes or goes


class ReplicasDiffer(RuntimeError):
    """The shared state is not the same on all nodes: a defect, never a matter of data."""


@dataclass(frozen=True)
class RoundRecord:
    """A round, and what has come together since the first.

    Attributes:
        round: its number, from 0.
        steps: batches that a node has trained so far.
        tokens: predicted by all nodes so far, in contributions that were counted.
        bytes_up, bytes_down: payload that a node has sent and received so far.
        loss: nats per token, the mean over the nodes and batches of this round; NaN if nobody contributed.
        validation: measured after this round; ``None`` in most rounds.
        counted: how many contributions are in the result.
    """

    round: int
    steps: int
    tokens: int
    bytes_up: int
    bytes_down: int
    loss: float
    validation: Validation | None
    counted: int


@dataclass(frozen=True)
class _Node:
    """One simulated node."""

    name: str
    model: LanguageModel
    optimizer: RoundOptimizer
    training: Training
    evaluator: Evaluator


class Simulation:
    """The nodes of one run, on the CPU and in the calling thread.

    Args:
        runfile: of the run. Deadlines and addresses have no effect: nobody is late.
        data: the run's; opened if not given.
        build: makes the optimizer of a model; that of the run file if not given.
        share: let the nodes of a method without local steps use one model, and one optimizer where a node has
            no state of its own. Their weights are equal in any case, and one update then serves all: nothing
            but the time changes.
        on_step: called before every batch of every node, for progress; what it raises ends the run.

    Attributes:
        parameters: trained entries of the model.
    """

    def __init__(
        self,
        runfile: RunFile,
        *,
        data: Data | None = None,
        build: Build | None = None,
        share: bool = True,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        opened = open_data(runfile.data, runfile.model.context)
        self._data = opened if data is None else data
        self._vocab = opened.vocab
        self._runfile = runfile
        self._on_step = on_step
        self._leases = LeaseBook()
        self._memory = ReducerMemory()
        self._build = build or (lambda model: build_method(runfile.method, model))
        model = self._model()
        first = self._node(0, model, self._build(model))
        self._nodes = [first]
        stateless = not first.optimizer.local_tensors()
        late = stateless and runfile.method.delay  # what a node keeps then is a gradient of its own
        alike = share and not runfile.method.has_local_steps and not late
        for index in range(1, runfile.run.nodes):
            model = first.model if alike else self._model()
            one = alike and stateless
            self._nodes.append(self._node(index, model, first.optimizer if one else self._build(model)))
        self._replicas = [first] if alike else self._nodes
        self._states = [SharedState(node.optimizer.shared_tensors()) for node in self._replicas]
        self.parameters = sum(p.numel() for p in first.model.parameters() if p.requires_grad)

    def _model(self) -> LanguageModel:
        return build_model(self._runfile.model, self._runfile.run.seed, vocab=self._vocab)

    def _node(self, index: int, model: LanguageModel, optimizer: RoundOptimizer) -> _Node:
        run, place, clocks = self._runfile.run, torch.device("cpu"), Clocks()

        def begin_step(moment: float) -> None:
            self._on_step()
            self._set_rate(optimizer, moment)

        training = Training(
            model,
            self._data,
            optimizer,
            seed=run.seed,
            set_rate=begin_step,
            device=place,
            clocks=clocks,
            watch=Stopwatch(clocks.wall),
            on_event=lambda event: None,
        )
        measure = Evaluator(model, self._data, run.validation_windows, place)
        return _Node(f"node-{index}", model, optimizer, training, measure)

    # ------------------------------------------------------------------------------------- state

    @property
    def optimizers(self) -> tuple[RoundOptimizer, ...]:
        """Those of the nodes, in the order of their leases."""
        return tuple(node.optimizer for node in self._nodes)

    @property
    def state_bytes(self) -> int:
        """What a node's optimizer keeps beside the model's parameters, at present."""
        node = self._nodes[0]
        weights = {parameter.untyped_storage().data_ptr() for parameter in node.model.parameters()}
        kept = {**node.optimizer.shared_tensors(), **node.optimizer.local_tensors()}
        return sum(x.nbytes for x in kept.values() if x.untyped_storage().data_ptr() not in weights)

    def shared_tensors(self) -> Mapping[str, torch.Tensor]:
        """The shared state by name, live."""
        return self._states[0].tensors

    def digest(self) -> str:
        """The digest of the shared state.

        Raises:
            ReplicasDiffer: it is not the same on all nodes.
        """
        digests = [state.digest() for state in self._states]
        if len(set(digests)) > 1:
            raise ReplicasDiffer(f"the shared state differs between the nodes: {', '.join(digests)}")
        return digests[0]

    # ------------------------------------------------------------------------------------- rounds

    def rounds(self) -> Iterator[RoundRecord]:
        """Train to the end of the run; yields after every round."""
        steps = tokens = up = down = 0
        for index in range(self._runfile.run.rounds):
            optimizer = self._nodes[0].optimizer
            table, micro = optimizer.tables.of(index), optimizer.micro_steps(index)
            works, counted = self._exchange(index, micro)
            steps += micro
            tokens += sum(work.tokens for work in works)
            if counted:  # with a delay, the first round has nothing to send
                up += table.nbytes
                down += table.result_nbytes
            yield RoundRecord(
                round=index,
                steps=steps,
                tokens=tokens,
                bytes_up=up,
                bytes_down=down,
                loss=_mean_loss(works),
                validation=self._measure(index),
                counted=counted,
            )

    def _exchange(self, index: int, micro: int) -> tuple[list[Work], int]:
        """Train, contribute, reduce and apply; returns what the nodes did and how many are in the result."""
        members = tuple(node.name for node in self._nodes)
        wanted = self._runfile.data.batch * micro
        leases = [self._leases.take(name, index, wanted) for name in members]
        works = []
        for node, lease in zip(self._nodes, leases, strict=True):
            order = RoundOrder(index, EPOCH, members, lease.start, lease.count, False, False)
            work = node.training.begin(order)
            node.training.finish(work)
            works.append(work)
        payloads = [work.payload for work in works]
        voters, result = self._reduce(index, payloads, [lease.count for lease in leases])
        self._leases.settle(index, [members[place] for place in voters])
        for place, node in enumerate(self._replicas):
            self._set_rate(node.optimizer, index)
            node.optimizer.apply(index, result, counted=place in voters)
            node.training.ahead = 0
        return works, len(voters)

    def _reduce(
        self, index: int, payloads: Sequence[torch.Tensor | None], samples: Sequence[int]
    ) -> tuple[list[int], torch.Tensor | None]:
        """The coordinator's part: who of the nodes is counted, by place, and what the result is.

        Args:
            index: of the round.
            payloads: of all nodes; ``None`` from one that abstains.
            samples: that each has trained on.
        """
        voters = [place for place, payload in enumerate(payloads) if payload is not None]
        result = reduce_payloads(
            self._nodes[0].optimizer.tables.of(index),
            [payload for payload in payloads if payload is not None],
            round_index=index,
            weights=[VOTE_WEIGHT] * len(voters),
            mean_weights=[VOTE_WEIGHT * samples[place] for place in voters],
            memory=self._memory,
        )
        return voters, result

    def _set_rate(self, optimizer: RoundOptimizer, moment: float) -> None:
        """``moment`` in rounds: a fraction is a batch within one."""
        run, method = self._runfile.run, self._runfile.method
        shape, warmup, final = method.schedule, method.warmup, method.final
        set_learning_rates(optimizer, factor(moment, run.rounds, warmup=warmup, shape=shape, final=final))

    def _measure(self, index: int) -> Validation | None:
        run = self._runfile.run
        if not evaluates(index, run.rounds, run.evaluate_every):
            return None
        name = evaluator(index, run.evaluate_every, [node.name for node in self._nodes])
        node = next(node for node in self._nodes if node.name == name)
        with node.optimizer.evaluating():
            return node.evaluator.measure()


def _mean_loss(works: Sequence[Work]) -> float:
    """Of all tokens trained on in a round."""
    tokens = sum(work.tokens for work in works)
    return sum(work.loss * work.tokens for work in works if work.tokens) / tokens if tokens else math.nan
