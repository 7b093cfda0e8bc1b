"""Memory that a method takes: optimizer state of a node, and all that a rank of an island holds.

A rank keeps weights, gradients and state of the tensors it owns, and of nothing else; only what it computes
with is whole for a while.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Final

from optim.lordo.shapes import basis_shape, state_elements
from protos.codecs import CodecSpec, matrix_shape
from protos.methods import LOW_RANK, TORCH, VOTE, VOTED

if TYPE_CHECKING:
    from torch import nn

    from node.island.inventory import Weight
    from protos.buckets import Bucket, TableSchedule
    from protos.method_section import MethodConfig

FP32_BYTES = 4
SCRATCH: Final = 8  # fp32 copies of the largest tensor that a step, or the decoding of a result, has at once
_ADAMW = 2 * FP32_BYTES  # two moments an entry
_MOMENTUM = FP32_BYTES


@dataclass(frozen=True)
class StateBytes:
    """Bytes of state at one node.

    Attributes:
        device: beside the parameters, read and written in every step.
        host: in host memory, touched at an exchange: the shared parameters, error feedback, outer momentum.
            Payloads of a round come on top.
        known: False for a class of ``torch.optim``: its state is not counted.
    """

    device: int
    host: int
    known: bool = True


@dataclass(frozen=True)
class RankBytes:
    """Bytes on one rank of a node that trains in fp32, without activations.

    Attributes:
        weights: of the tensors it owns.
        gradients: of the same; they stay until the next step.
        state: of the same.
        contribution: what it writes for a round.
        passes: on top in forward and backward: weights and gradients that are whole meanwhile, those of what
            belongs to no block and of two blocks. Nothing for a node of one rank.
        step: on top in a step of a local optimizer.
        exchange: on top from a proposal to the end of its round.
    """

    weights: int
    gradients: int
    state: StateBytes
    contribution: int
    passes: int
    step: int
    exchange: int

    @property
    def resting(self) -> int:
        """Between two rounds."""
        return self.weights + self.gradients + self.state.device + self.state.host + self.contribution

    @property
    def peak(self) -> int:
        """The most in a round."""
        return self.resting + max(self.passes, self.step, self.exchange)


def rank_bytes(
    method: MethodConfig,
    model: nn.Module,
    ranks: int,
    *,
    one_memory: bool = False,
    between: bool = False,
) -> list[RankBytes]:
    """Memory of every rank of an island, from shapes alone. Imports torch.

    Args:
        method: of the run.
        model: may be on the meta device.
        ranks: of the island.
        one_memory: see :func:`state_bytes`.
        between: slices travel between nodes, so that rank 0 has the whole contribution and result beside its
            own part of them.

    Raises:
        ValueError: a method that does not fit the model.
    """
    from node.island.inventory import inventory_of
    from node.island.ownership import owners_of
    from node.island.planner_costs import gathered_bytes, price, rule_named
    from optim.methods import build_method

    weights, tables = inventory_of(model), build_method(method, model).tables
    owners = owners_of(weights, tables.tables, ranks)
    whole = int(gathered_bytes(price(weights, rule_named("muon")), FP32_BYTES)) if ranks > 1 else 0
    found = []
    for rank, lane in enumerate(lanes_of(tables, owners, ranks)):
        held = [weight for weight in weights if owners[weight.name] == rank]
        elements = sum(prod(weight.shape) for weight in held)
        leads = between and ranks > 1 and rank == 0
        scratch = SCRATCH * FP32_BYTES * max((prod(weight.shape) for weight in held), default=0)
        found.append(
            RankBytes(
                weights=FP32_BYTES * elements,
                gradients=FP32_BYTES * elements,
                state=state_bytes(
                    method, [(weight.role, weight.shape) for weight in held], one_memory=one_memory
                ),
                contribution=lane.nbytes + leads * tables.nbytes,
                passes=whole,
                step=scratch + _denominators(method, held) if method.has_local_steps else 0,
                exchange=scratch
                + lane.result_nbytes
                + leads * tables.result_nbytes
                + _proposed(method, held, lane),
            )
        )
    return found


def lanes_of(tables: TableSchedule, owners: Mapping[str, int], ranks: int) -> list[TableSchedule]:
    """What each rank carries of ``tables``: the buckets of the tensors it owns, with their scales
    (``BUCKET/scale``), moments and bases (``optimizer/TENSOR/KEY``)."""

    def home(bucket: Bucket) -> int:
        first = bucket.members[0].name
        return owners[first if first in owners else first.removeprefix("optimizer/").rpartition("/")[0]]

    buckets = [bucket for table in tables.tables for bucket in table.buckets]
    return [tables.part({bucket.name for bucket in buckets if home(bucket) == rank}) for rank in range(ranks)]


def _denominators(method: MethodConfig, held: Sequence[Weight]) -> int:
    """Of a local AdamW: one entry a parameter, of as many as it updates together."""
    from optim.local.adamw import CHUNK_ELEMENTS

    adamw = [w for w in held if w.role != "matrix" or method.optimizer == "adamw"]
    return FP32_BYTES * min(CHUNK_ELEMENTS, sum(prod(weight.shape) for weight in adamw))


def _proposed(method: MethodConfig, held: Sequence[Weight], lane: TableSchedule) -> int:
    """What error feedback keeps until the result is there: the proposal, uncoded and coded."""
    fed = {weight.name for weight in held if method.has_local_steps and _feeds_back(method, weight.role)}
    entries = [
        sum(m.elements for bucket in table.buckets for m in bucket.members if m.name in fed)
        for table in lane.tables
    ]
    return FP32_BYTES * max(entries) + lane.nbytes if fed else 0


def state_bytes(
    method: MethodConfig, tensors: Iterable[tuple[str, tuple[int, ...]]], *, one_memory: bool = False
) -> StateBytes:
    """State of ``method`` for tensors given as role (``matrix``, ``embedding``, ``vector``) and shape.

    ``one_memory``: the parameters are in host memory too, where a basis that all nodes share is not kept
    twice.
    """
    device = host = 0
    for role, shape in tensors:
        count = prod(shape)
        device += _device(method, role, shape, count)
        if method.has_local_steps:
            host += FP32_BYTES * count * (1 + (method.outer == "nesterov") + _feeds_back(method, role))
            host += FP32_BYTES * _encoder_entries(_codec(method, role), shape)
        if role == "matrix" and method.name in LOW_RANK:  # moments and bases that all nodes share
            host += FP32_BYTES * state_elements(shape, method.rank, direction=method.direction)
            if one_memory and method.name == "lordo" and method.basis == "global":
                host -= FP32_BYTES * prod(basis_shape(shape, method.rank))
    return StateBytes(device, host, known=not method.optimizer.startswith(TORCH))


def _device(method: MethodConfig, role: str, shape: tuple[int, ...], count: int) -> int:
    if role == "matrix":
        if method.name == "lowrank-ddp":
            return 0
        if method.name == "lordo":
            return FP32_BYTES * state_elements(shape, method.rank, direction=method.direction)
        if method.name in ("sign-muon", "signum", "ddp-muon"):
            return _MOMENTUM * count
        if method.has_local_steps and method.optimizer.startswith(TORCH):
            return 0
        return (_MOMENTUM if method.optimizer in ("muon", "sign-muon") else _ADAMW) * count
    if method.name in VOTED and not method.has_local_steps:
        reduction = method.embeddings if role == "embedding" else method.vectors
        return (_MOMENTUM if reduction == "vote" else _ADAMW) * count
    return _ADAMW * count


def _codec(method: MethodConfig, role: str) -> str:
    codecs = {"matrix": method.codec, "embedding": method.embedding_codec}
    return codecs.get(role, method.vector_codec)


def _encoder_entries(codec: str, shape: tuple[int, ...]) -> int:
    """Entries of the right factor from which the encoder of a low rank starts the next time."""
    if codec in VOTE:
        return 0
    spec = CodecSpec.parse(codec)
    return matrix_shape(shape)[1] * spec.rank(shape) if spec.kind == "lowrank" else 0


def _feeds_back(method: MethodConfig, role: str) -> bool:
    codec = _codec(method, role)
    if method.error_feedback is not None:
        return method.error_feedback
    return codec not in VOTE and not CodecSpec.parse(codec).exact
