"""The methods a run can name: presets of the optimizers of this package."""

from __future__ import annotations

from typing import Any

from torch import nn

from optim.averaged import DDPAdamW, DDPMuon
from optim.every_step import EveryStep
from optim.exchanged import ExchangedOptimizer
from optim.local.adamw import AdamWInner
from optim.local.inner import Inner
from optim.local.layout import LocalGroup
from optim.local.local_steps import LocalSteps
from optim.local.polar import MuonInner
from optim.local.torch_class import TorchInner
from optim.lordo.inner import LowRankAdam, LowRankOptions
from optim.lordo.low_rank_ddp import LowRankDDP
from optim.method_config import Choices, MethodConfig, MethodLike, auxiliary_betas, resolve
from optim.roles import ParameterRole, by_role, classify
from optim.round_optimizer import RoundOptimizer
from optim.sign_muon import SignMuon, Signum
from protos.buckets import MeanRule
from protos.methods import TORCH

__all__ = ["MethodConfig", "MethodLike", "build_method"]


def build_method(config: MethodLike, model: nn.Module) -> RoundOptimizer:
    """The optimizer that ``config`` names, over the trainable parameters of ``model``.

    Parameters on the meta device are held by another rank of an island: they have their places in ``tables``
    and cost no memory here.

    Raises ``ValueError`` for an unknown method, options out of range or that make no sense together, or a
    model that cannot be exchanged.
    """
    choices = resolve(config)
    rule = MeanRule(config.clip, config.trim)
    if choices.local:
        return _local_steps(config, choices, model, rule)
    rates = {"embedding_lr": choices.embedding_lr, "vector_lr": choices.vector_lr}
    shared: dict[str, Any] = {**rates, "weight_decay": config.weight_decay}
    optimizer: EveryStep
    if config.name == "lowrank-ddp":
        if rule != MeanRule():
            raise ValueError("clip and trim are not possible with lowrank-ddp: leave them out")
        optimizer = LowRankDDP(
            model,
            choices.lr,
            **shared,
            rank=config.rank,
            basis_every=config.basis_every,
            omega=choices.omega,
            mu=config.mu,
            betas=choices.betas,
            eps=config.eps,
            auxiliary_betas=auxiliary_betas(choices),
        )
    else:
        optimizer = _exchanged(config, choices, model, shared | {"betas": choices.betas, "eps": config.eps})
        optimizer.use_rule(rule)
    optimizer.delay = config.delay
    return optimizer


def _exchanged(
    config: MethodLike, choices: Choices, model: nn.Module, shared: dict[str, Any]
) -> ExchangedOptimizer:
    """Methods that vote on or average something of every single gradient."""
    if config.name == "ddp-adamw":
        return DDPAdamW(model, choices.lr, **shared)
    shared |= {"momentum": config.momentum, "nesterov": config.nesterov, "scaling": choices.scaling}
    votes: dict[str, Any] = {"embeddings": choices.embeddings, "vectors": choices.vectors}
    if config.name == "signum":
        return Signum(model, choices.lr, **shared, **votes)
    shared |= {"ns_steps": config.ns_steps, "ns_coefficients": config.ns_coefficients}
    if config.name == "ddp-muon":
        return DDPMuon(model, choices.lr, **shared)
    return SignMuon(model, choices.lr, **shared, **votes)


def _local_steps(config: MethodLike, choices: Choices, model: nn.Module, rule: MeanRule) -> LocalSteps:
    """Methods with local steps: the chosen optimizer for matrices, AdamW for everything else."""
    roles = classify(model)
    matrices = list(by_role(roles, "matrix"))
    betas, decay = auxiliary_betas(choices), config.weight_decay
    eps = 1e-8 if choices.optimizer == "lordo" else config.eps
    embeddings = AdamWInner(list(by_role(roles, "embedding")), betas=betas, eps=eps)
    vectors = AdamWInner(list(by_role(roles, "vector")), betas=betas, eps=eps)
    feedback = config.error_feedback
    groups = [
        LocalGroup("matrices", _inner(config, choices, matrices), choices.lr, decay, choices.codec, feedback),
        LocalGroup("embeddings", embeddings, choices.embedding_lr, decay, choices.embedding_codec, feedback),
        LocalGroup("vectors", vectors, choices.vector_lr, 0.0, choices.vector_codec, feedback),
    ]
    return LocalSteps(
        groups,
        local_steps=choices.local_steps,
        outer=choices.outer,
        outer_lr=choices.outer_lr,
        outer_momentum=choices.outer_momentum,
        fragments=config.fragments,
        overlap=config.overlap,
        mix=choices.mix,
        rule=rule,
    )


def _inner(config: MethodLike, choices: Choices, matrices: list[ParameterRole]) -> Inner:
    """The local optimizer of the matrices."""
    if choices.optimizer == "adamw":
        return AdamWInner(matrices, betas=choices.betas, eps=config.eps)
    if choices.optimizer == "lordo":
        options = LowRankOptions(
            rank=config.rank,
            betas=choices.betas,
            eps=config.eps,
            omega=choices.omega,
            mu=config.mu,
            basis=config.basis,
            direction=config.direction,
            moments_codec=config.moments_codec,
            ns_steps=config.ns_steps,
            ns_coefficients=config.ns_coefficients,
        )
        return LowRankAdam(matrices, local_steps=choices.local_steps, options=options)
    if choices.optimizer.startswith(TORCH):
        return TorchInner(matrices, choices.optimizer[len(TORCH) :], choices.optimizer_options)
    return MuonInner(
        matrices,
        signed=choices.optimizer == "sign-muon",
        momentum=config.momentum,
        nesterov=config.nesterov,
        ns_steps=config.ns_steps,
        ns_coefficients=config.ns_coefficients,
        scaling=choices.scaling,
    )
