"""The methods a run can name: presets of the optimizers of this package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from optim.averaged import DDPAdamW, DDPMuon
from optim.exchanged import ExchangedOptimizer
from optim.sign_muon import SignMuon, Signum
from protos.methods import PRESETS, REDUCED_LR, VOTED, Coefficients, MethodName, Reduction, Scaling


class MethodLike(Protocol):
    """What :func:`build_method` reads; :class:`MethodConfig` documents the fields."""

    @property
    def name(self) -> MethodName: ...
    @property
    def lr(self) -> float | None: ...
    @property
    def embedding_lr(self) -> float | None: ...
    @property
    def vector_lr(self) -> float | None: ...
    @property
    def momentum(self) -> float: ...
    @property
    def nesterov(self) -> bool: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def ns_steps(self) -> int: ...
    @property
    def ns_coefficients(self) -> Coefficients: ...
    @property
    def scaling(self) -> Scaling | None: ...
    @property
    def embeddings(self) -> Reduction: ...
    @property
    def vectors(self) -> Reduction: ...
    @property
    def beta1(self) -> float: ...
    @property
    def beta2(self) -> float: ...
    @property
    def eps(self) -> float: ...


@dataclass(frozen=True)
class MethodConfig:
    """Choices of one method, for use without a run file. A field that a method has no use for is ignored.

    Attributes:
        name: ``sign-muon``, ``signum``, ``ddp-muon`` or ``ddp-adamw``.
        lr: of the matrices; ``None`` takes the method's default, as for the next two.
        embedding_lr: of the embeddings and the output head.
        vector_lr: of norms and biases.
        momentum, nesterov, weight_decay, ns_steps, ns_coefficients, beta1, beta2, eps: see
            :class:`optim.rules.RuleOptions`.
        scaling: of the matrices; ``None`` takes ``unit-gain`` for sign-muon, ``match-rms`` for ddp-muon and
            ``none`` for signum.
        embeddings, vectors: ``vote`` or ``mean``, for sign-muon and signum.
    """

    name: MethodName = "sign-muon"
    lr: float | None = None
    embedding_lr: float | None = None
    vector_lr: float | None = None
    momentum: float = 0.95
    nesterov: bool = True
    weight_decay: float = 0.0
    ns_steps: int = 5
    ns_coefficients: Coefficients = "polar-express"
    scaling: Scaling | None = None
    embeddings: Reduction = "vote"
    vectors: Reduction = "vote"
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8


def build_method(config: MethodLike, model: nn.Module) -> ExchangedOptimizer:
    """The optimizer that ``config`` names, over the trainable parameters of ``model``.

    Raises ``ValueError`` for an unknown method, options out of range, or a model that cannot be exchanged.
    """
    preset = PRESETS.get(config.name)
    if preset is None:
        raise ValueError(f"unknown method {config.name!r}: use one of {', '.join(PRESETS)}")
    voted = config.name in VOTED
    embeddings, vectors = (config.embeddings, config.vectors) if voted else ("mean", "mean")
    lr = preset.lr if config.lr is None else config.lr
    shared: dict[str, Any] = {
        "embedding_lr": REDUCED_LR[embeddings] if config.embedding_lr is None else config.embedding_lr,
        "vector_lr": REDUCED_LR[vectors] if config.vector_lr is None else config.vector_lr,
        "weight_decay": config.weight_decay,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
    }
    if config.name == "ddp-adamw":
        return DDPAdamW(model, lr, **shared)
    shared["momentum"], shared["nesterov"] = config.momentum, config.nesterov
    shared["scaling"] = preset.scaling if config.scaling is None else config.scaling
    if voted:
        shared["embeddings"], shared["vectors"] = embeddings, vectors
    if config.name == "signum":
        return Signum(model, lr, **shared)
    shared["ns_steps"], shared["ns_coefficients"] = config.ns_steps, config.ns_coefficients
    return DDPMuon(model, lr, **shared) if config.name == "ddp-muon" else SignMuon(model, lr, **shared)
