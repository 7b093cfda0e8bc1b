"""Bytes of optimizer state that a method keeps at a node, beside the parameters and their gradients."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from optim.lordo.shapes import state_elements
from protos.codecs import CodecSpec, matrix_shape
from protos.methods import TORCH, VOTE, VOTED

if TYPE_CHECKING:
    from protos.method_section import MethodConfig

FP32_BYTES = 4
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


def state_bytes(method: MethodConfig, tensors: Iterable[tuple[str, tuple[int, ...]]]) -> StateBytes:
    """State of ``method`` for tensors given as role (``matrix``, ``embedding``, ``vector``) and shape."""
    device = host = 0
    for role, shape in tensors:
        count = prod(shape)
        device += _device(method, role, shape, count)
        if method.has_local_steps:
            host += FP32_BYTES * count * (1 + (method.outer == "nesterov") + _feeds_back(method, role))
            host += FP32_BYTES * _encoder_entries(_codec(method, role), shape)
        if role == "matrix" and _shares_low_rank(method):
            host += FP32_BYTES * state_elements(shape, method.rank, direction=method.direction)
    return StateBytes(device, host, known=not method.optimizer.startswith(TORCH))


def _shares_low_rank(method: MethodConfig) -> bool:
    """Whether moments and bases are shared state, which lies in host memory."""
    return method.name == "lowrank-ddp" or (method.name == "lordo" and method.basis == "global")


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
