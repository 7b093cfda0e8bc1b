"""The choices of a method: what may be left out, what takes its place, and what does not go together."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from protos.methods import (
    LOW_RANK,
    OPTIMIZERS,
    OUTER_LR,
    PRESETS,
    REDUCED_LR,
    SHORT_MOMENTUM,
    TORCH,
    VOTE,
    VOTED,
    WITH_STEPS,
    Basis,
    Coefficients,
    Direction,
    MethodName,
    Outer,
    Reduction,
    Scaling,
    betas,
    local_steps_of,
    merge_share,
    omega_of,
)


class MethodLike(Protocol):
    """What :func:`optim.methods.build_method` reads; :class:`MethodConfig` documents the fields."""

    @property
    def name(self) -> MethodName: ...
    @property
    def local_steps(self) -> int | None: ...
    @property
    def optimizer(self) -> str | None: ...
    @property
    def optimizer_options(self) -> Mapping[str, Any]: ...
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
    def beta1(self) -> float | None: ...
    @property
    def beta2(self) -> float | None: ...
    @property
    def eps(self) -> float: ...
    @property
    def codec(self) -> str | None: ...
    @property
    def embedding_codec(self) -> str | None: ...
    @property
    def vector_codec(self) -> str | None: ...
    @property
    def error_feedback(self) -> bool | None: ...
    @property
    def outer(self) -> Outer | None: ...
    @property
    def outer_lr(self) -> float | None: ...
    @property
    def outer_momentum(self) -> float | None: ...
    @property
    def rank(self) -> int: ...
    @property
    def omega(self) -> float | None: ...
    @property
    def mu(self) -> float: ...
    @property
    def basis(self) -> Basis: ...
    @property
    def direction(self) -> Direction: ...
    @property
    def moments_codec(self) -> str: ...
    @property
    def basis_every(self) -> int: ...
    @property
    def fragments(self) -> int: ...
    @property
    def overlap(self) -> int: ...
    @property
    def mix(self) -> float | None: ...
    @property
    def delay(self) -> int: ...
    @property
    def clip(self) -> float: ...
    @property
    def trim(self) -> int: ...


@dataclass(frozen=True)
class MethodConfig:
    """Choices of one method, for use without a run file. A field that a method has no use for is ignored.

    Attributes:
        name: one of :data:`protos.methods.PRESETS`; where a field is ``None``, it has the answer.
        local_steps: K, the steps between two exchanges of the same parameters.
        optimizer: local optimizer of the matrices: ``adamw``, ``muon``, ``sign-muon``, or ``torch:`` and a
            class of ``torch.optim``; ``lordo`` for that method only.
        optimizer_options: further arguments of that class.
        lr: of the matrices.
        embedding_lr: of the embeddings and the output head.
        vector_lr: of norms and biases.
        momentum, nesterov, weight_decay, ns_steps, ns_coefficients, beta1, beta2, eps: see
            :class:`optim.rules.RuleOptions`. The betas and ``eps`` are those of the low-rank moments in
            low-rank methods.
        scaling: of the matrices.
        embeddings, vectors: ``vote`` or ``mean``, for ``sign-muon`` and ``signum`` in every step.
        codec, embedding_codec, vector_codec, error_feedback: see :class:`optim.local.layout.LocalGroup`.
        outer, outer_lr, outer_momentum: see :class:`optim.local.outer.OuterStep`; the momentum is 0.5 if
            ``None``, as for a short run.
        rank, omega, mu, basis, direction, moments_codec: see :class:`optim.lordo.inner.LowRankOptions`.
        basis_every: rounds between two bases of ``lowrank-ddp``.
        fragments, overlap, mix: see :class:`optim.local.local_steps.LocalSteps`.
        delay: 0 or 1, see :class:`optim.every_step.EveryStep`.
        clip, trim: see :class:`protos.buckets.MeanRule`.
    """

    name: MethodName = "sign-muon"
    local_steps: int | None = None
    optimizer: str | None = None
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
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
    beta1: float | None = None
    beta2: float | None = None
    eps: float = 1e-8
    codec: str | None = None
    embedding_codec: str | None = None
    vector_codec: str | None = None
    error_feedback: bool | None = None
    outer: Outer | None = None
    outer_lr: float | None = None
    outer_momentum: float | None = None
    rank: int = 0
    omega: float | None = None
    mu: float = 1.0
    basis: Basis = "global"
    direction: Direction = "adam"
    moments_codec: str = "fp32"
    basis_every: int = 16
    fragments: int = 1
    overlap: int = 0
    mix: float | None = None
    delay: int = 0
    clip: float = 0.0
    trim: int = 0


@dataclass(frozen=True)
class Choices:
    """A method with every question answered; the fields are those of :class:`MethodConfig`."""

    name: MethodName
    local_steps: int
    optimizer: str
    optimizer_options: Mapping[str, Any]
    lr: float
    embedding_lr: float
    vector_lr: float
    scaling: Scaling
    embeddings: Reduction
    vectors: Reduction
    betas: tuple[float, float]
    codec: str
    embedding_codec: str
    vector_codec: str
    outer: Outer
    outer_lr: float
    outer_momentum: float
    omega: float
    mix: float

    @property
    def local(self) -> bool:
        """Whether pseudo-gradients of local steps travel."""
        return local_steps_of(self.name, self.local_steps)


def resolve(config: MethodLike) -> Choices:
    """Fill in what ``config`` leaves to its preset.

    Raises:
        ValueError: for a method or an optimizer that does not exist, and for choices that make no sense
            together.
    """
    preset = PRESETS.get(config.name)
    if preset is None:
        raise ValueError(f"unknown method {config.name!r}: use one of {', '.join(PRESETS)}")
    steps = _or(config.local_steps, preset.local_steps)
    local = local_steps_of(config.name, steps)
    optimizer = _or(config.optimizer, preset.optimizer)
    voted = config.name in VOTED and not local
    embeddings, vectors = (config.embeddings, config.vectors) if voted else ("mean", "mean")
    lr, scaling = preset.lr, preset.scaling
    if optimizer != preset.optimizer and optimizer in OPTIMIZERS:
        lr, scaling = OPTIMIZERS[optimizer]
    default_betas = betas(config.name)
    outer = _or(config.outer, preset.outer)
    choices = Choices(
        name=config.name,
        local_steps=steps,
        optimizer=optimizer,
        optimizer_options=config.optimizer_options,
        lr=_or(config.lr, lr),
        embedding_lr=_or(config.embedding_lr, REDUCED_LR[embeddings]),
        vector_lr=_or(config.vector_lr, REDUCED_LR[vectors]),
        scaling=_or(config.scaling, scaling),
        embeddings=embeddings,
        vectors=vectors,
        betas=(_or(config.beta1, default_betas[0]), _or(config.beta2, default_betas[1])),
        codec=_or(config.codec, preset.codec),
        embedding_codec=_or(config.embedding_codec, preset.embedding_codec),
        vector_codec=_or(config.vector_codec, preset.vector_codec),
        outer=outer,
        outer_lr=_or(config.outer_lr, OUTER_LR.get(outer, 1.0)),
        outer_momentum=_or(config.outer_momentum, SHORT_MOMENTUM),
        omega=_or(config.omega, omega_of(config.name)),
        mix=_or(config.mix, merge_share(config.overlap)),
    )
    _check(choices, config)
    return choices


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _check(choices: Choices, config: MethodLike) -> None:
    """Raise ``ValueError`` for choices that make no sense together."""
    name, steps, optimizer = choices.name, choices.local_steps, choices.optimizer
    if steps < 1:
        raise ValueError(f"local_steps must be at least 1, not {steps}")
    if steps > 1 and name in WITH_STEPS:
        raise ValueError(
            f"{name} exchanges in every step, not after {steps}: for local steps use {WITH_STEPS[name]}"
        )
    if config.clip < 0.0 or config.trim < 0:
        raise ValueError(f"clip and trim must not be negative: {config.clip}, {config.trim}")
    if config.delay not in (0, 1):
        raise ValueError(f"delay must be 0 or 1, not {config.delay}")
    if config.delay and choices.local:
        raise ValueError(
            f"{name} makes local steps, of which some can run during the exchange: use overlap, not delay"
        )
    if name == "lowrank-ddp" and config.direction != "adam":
        raise ValueError(f"lowrank-ddp has the direction adam only, not {config.direction!r}: use lordo")
    if not choices.local:
        if optimizer != PRESETS[name].optimizer:
            raise ValueError(
                f"{name} has no local optimizer to choose: leave optimizer out, not {optimizer!r}"
            )
        return
    if optimizer not in OPTIMIZERS and not optimizer.startswith(TORCH):
        close = difflib.get_close_matches(optimizer.lower(), OPTIMIZERS, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}?" if close else f"use one of {', '.join(OPTIMIZERS)}"
        raise ValueError(
            f"unknown local optimizer {optimizer!r}: {hint} A class of torch.optim is written {TORCH}Adagrad"
        )
    if (optimizer == "lordo") != (name == "lordo"):
        raise ValueError(
            f"{name} cannot have the local optimizer {optimizer!r}: the method lordo exchanges the basis "
            "that its optimizer needs, and no other does"
        )
    if optimizer.startswith(TORCH) and config.lr is None:
        raise ValueError(f"lr must be given with {optimizer}: nobody has measured its best value")
    if config.optimizer_options and not optimizer.startswith(TORCH):
        raise ValueError(f"optimizer_options are for classes of torch.optim, not for {optimizer}")
    if name == "lordo" and config.basis == "global" and choices.codec in VOTE:
        raise ValueError(
            f"lordo cannot vote (codec = {choices.codec!r}): its basis follows from the mean "
            "pseudo-gradient; 1bit takes as few bytes"
        )


def auxiliary_betas(choices: Choices) -> tuple[float, float]:
    """Betas of AdamW on embeddings and vectors; in low-rank methods not those of the low-rank moments."""
    return betas("") if choices.name in LOW_RANK else choices.betas
