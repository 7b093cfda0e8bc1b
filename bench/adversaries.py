"""Simulated runs some of whose nodes are not honest: what they send, who is named, what the loss comes to."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from coordinator.ballots import UNKNOWN, Former, Sampler, judge_words
from coordinator.contribution import check_header
from coordinator.ramp import LARGEST, ramped
from coordinator.suspicion import PENALTY, Sighting, Suspicions, Thresholds
from deploy.simulation import VOTE_WEIGHT, Simulation
from optim.aggregate import Bytes, ReducerMemory
from optim.inspection import Inspection
from optim.reduce import reduce_payloads
from protos.atoll_pb2 import ContributionHeader
from protos.buckets import BucketTable
from protos.lane_layout import layout_of
from protos.refusal import Refused
from protos.runfile import RunFile

LARGE: Final = 10.0  # by what false means are longer than honest ones


@dataclass
class Sent:
    """What a node sends in a round: nothing, or a payload and the weight that it claims for it."""

    payload: Bytes | None
    weight: int = VOTE_WEIGHT


class Adversary(ABC):
    """A node that trains like the others and then sends something else."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._kept: dict[str, Bytes] = {}  # the first payload of each table

    @abstractmethod
    def send(self, table: BucketTable, payload: Bytes, others: Sequence[Bytes]) -> Sent:
        """Make something of an honest payload, and of those that came before."""

    def _means(self, table: BucketTable, payload: Bytes) -> list[np.ndarray]:
        """The values of its means that travel as fp32, to be changed in place."""
        places = zip(table.buckets, table.offsets, strict=True)
        return [
            payload[offset : offset + 4 * bucket.elements].view("<f4")
            for bucket, offset in places
            if bucket.reduce == "mean" and bucket.codec == "fp32"
        ]

    def _votes(self, table: BucketTable, payload: Bytes) -> list[Bytes]:
        """The bytes of its majority buckets."""
        places = zip(table.buckets, table.offsets, strict=True)
        return [
            payload[offset : offset + bucket.nbytes]
            for bucket, offset in places
            if bucket.reduce == "majority"
        ]


class Flip(Adversary):
    """The opposite of all signs; means ten times as long as well."""

    def send(self, table: BucketTable, payload: Bytes, others: Sequence[Bytes]) -> Sent:
        for votes in self._votes(table, payload):
            votes ^= 255
        for means in self._means(table, payload):
            means *= -LARGE
        return Sent(payload)


class Random(Adversary):
    """Fair coins; normal numbers ten times as long as the means."""

    def send(self, table: BucketTable, payload: Bytes, others: Sequence[Bytes]) -> Sent:
        for votes in self._votes(table, payload):
            votes[:] = self._rng.integers(0, 256, len(votes), dtype=np.uint8)
        for means in self._means(table, payload):
            scale = LARGE * math.sqrt(float(np.square(means, dtype=np.float64).mean()))
            means[:] = scale * self._rng.standard_normal(len(means), np.float32)
        return Sent(payload)


class Zeros(Adversary):
    """Nothing but bits that are 0, which all vote -1."""

    def send(self, table: BucketTable, payload: Bytes, others: Sequence[Bytes]) -> Sent:
        payload[:] = 0
        return Sent(payload)


class NotFinite(Adversary):
    """NaN in all means; of a gradient of NaN there are no signs, and the node abstains."""

    def send(self, table: BucketTable, payload: Bytes, others: Sequence[Bytes]) -> Sent:
        means = self._means(table, payload)
        for values in means:
            values[:] = np.nan
        return Sent(payload if means else None)


class Heavy(Flip):
    """The opposite, with the largest weight that a message holds."""

    def send(self, table: BucketTable, payload: Bytes, others: Sequence[Bytes]) -> Sent:
        return Sent(super().send(table, payload, others).payload, LARGEST)


class Replay(Adversary):
    """Its first contribution, again and again."""

    def send(self, table: BucketTable, payload: Bytes, others: Sequence[Bytes]) -> Sent:
        return Sent(self._kept.setdefault(table.digest, payload).copy())


class Copy(Adversary):
    """The contribution of the first node, which it has got hold of, instead of any work of its own."""

    def send(self, table: BucketTable, payload: Bytes, others: Sequence[Bytes]) -> Sent:
        return Sent(others[0].copy())


ADVERSARIES: Final[dict[str, Callable[[int], Adversary]]] = {
    "flip": Flip,
    "random": Random,
    "zeros": Zeros,
    "nan": NotFinite,
    "heavy": Heavy,
    "replay": Replay,
    "copy": Copy,
}


class Attacked(Simulation):
    """A simulated run whose last nodes are adversaries, which deliver after the others.

    What the coordinator refuses is not counted, and it looks at the votes as it does in real runs.

    Args:
        runfile: of the run; its [byzantine] says what is done.
        adversaries: names out of :data:`ADVERSARIES`, of the last nodes.

    Attributes:
        named: of each node that has come under suspicion the round, from 0, in which it first did.
        causes: of these, the cause at that time.
    """

    def __init__(self, runfile: RunFile, adversaries: Sequence[str]) -> None:
        super().__init__(runfile)
        first = runfile.run.nodes - len(adversaries)
        self._false = {first + i: ADVERSARIES[name](i) for i, name in enumerate(adversaries)}
        self._sampler = Sampler(b"a secret of the coordinator")
        self._former = Former()
        self._suspicions = Suspicions(Thresholds.of(runfile.byzantine))
        self._actions: dict[int, str] = {}
        self._means_memory = ReducerMemory()
        self.named: dict[int, int] = {}
        self.causes: dict[int, str] = {}

    @property
    def honest(self) -> range:
        """The places of honest nodes."""
        return range(len(self._nodes) - len(self._false))

    def _reduce(
        self, index: int, payloads: Sequence[torch.Tensor | None], samples: Sequence[int]
    ) -> tuple[list[int], torch.Tensor | None]:
        table = self._nodes[0].optimizer.tables.of(index)
        counted: dict[int, Bytes] = {}
        seen: dict[int, Sighting] = {}
        for place, payload in enumerate(payloads):
            if self._actions.get(place) == "expel":
                continue
            sent = self._sent(place, table, payload, list(counted.values()))
            if sent.payload is None:
                seen[place] = Sighting(abstained=True)
                continue
            try:
                _check(table, sent)
            except Refused:
                seen[place] = Sighting(invalid=True)
            else:
                counted[place] = sent.payload
        voters, penalties = list(counted), [self._penalty(place) for place in counted]
        self._look(index, table, counted, seen)  # what follows holds from the next round on
        result = reduce_payloads(
            table,
            [torch.from_numpy(payload) for payload in counted.values()],
            round_index=index,
            weights=ramped([VOTE_WEIGHT] * len(voters), [(1, penalty) for penalty in penalties]),
            mean_weights=[
                samples[place] * PENALTY // penalty for place, penalty in zip(voters, penalties, strict=True)
            ],
            memory=self._means_memory,
        )
        return voters, result

    def _sent(
        self, place: int, table: BucketTable, payload: torch.Tensor | None, others: Sequence[Bytes]
    ) -> Sent:
        if payload is None:
            return Sent(None)
        honest: Bytes = payload.numpy().copy()
        adversary = self._false.get(place)
        return Sent(honest) if adversary is None else adversary.send(table, honest, others)

    def _penalty(self, place: int) -> int:
        return PENALTY if self._actions.get(place) == "downweight" else 1

    def _look(
        self, index: int, table: BucketTable, counted: Mapping[int, Bytes], seen: dict[int, Sighting]
    ) -> None:
        """Judge the nodes by what they have sent; ``seen`` is completed."""
        rows = list(counted.values())
        words = self._sampler.take(table, rows) if rows else None
        ballots = [UNKNOWN] * len(rows)
        if words is not None:
            ballots = judge_words(words, range(len(rows)), self._former, table.digest)
        seen |= {place: Sighting(ballot) for place, ballot in zip(counted, ballots, strict=True)}
        self._suspicions.saw({str(place): sighting for place, sighting in seen.items()})
        for node, found in self._suspicions.judge([str(place) for place in seen]).items():
            self._actions[int(node)] = found.action
            if found.action != "none" and int(node) not in self.named:
                self.named[int(node)], self.causes[int(node)] = index, found.cause


def _check(table: BucketTable, sent: Sent) -> None:
    """As the coordinator does; raises :class:`Refused`."""
    assert sent.payload is not None
    header = ContributionHeader(
        table_digest=table.digest, nbytes=table.nbytes, weight=sent.weight, epoch=1, round=0
    )
    check_header(header, table, layout_of(header, table), VOTE_WEIGHT)
    Inspection(table).check(sent.payload, 0, len(sent.payload))
