"""Optimizers that agree on one bit per parameter: Sign-Muon and Signum."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from optim.exchanged import ExchangedOptimizer
from optim.newton_schulz import Coefficients
from optim.reduce import Reduction, identity
from optim.roles import ParameterRole, Role, classify
from protos.methods import REDUCED_LR, Scaling
from protos.methods import Reduction as Travel


def auxiliary_groups(
    roles: tuple[ParameterRole, ...],
    *,
    embeddings: Travel,
    vectors: Travel,
    embedding_lr: float | None,
    vector_lr: float | None,
    weight_decay: float,
    **options: Any,
) -> list[dict[str, Any]]:
    """Parameter groups of everything that is not a matrix.

    Weight decay acts on embeddings, never on vectors. ``None`` as a learning rate takes
    :data:`protos.methods.REDUCED_LR`.
    ``options`` are further fields of :class:`optim.rules.RuleOptions`.
    Raises ``ValueError`` if ``embeddings`` or ``vectors`` is neither ``vote`` nor ``mean``.
    """
    groups = []
    choices: tuple[tuple[str, Role, Travel, float | None, float], ...] = (
        ("embeddings", "embedding", embeddings, embedding_lr, weight_decay),
        ("vectors", "vector", vectors, vector_lr, 0.0),
    )
    for name, role, travel, lr, decay in choices:
        if travel not in ("vote", "mean"):
            raise ValueError(f"{name} travel by 'vote' or 'mean', not {travel!r}")
        groups.append(
            {
                **options,
                "name": name,
                "roles": [item for item in roles if item.role == role],
                "rule": "vote-sign" if travel == "vote" else "mean-adamw",
                "lr": REDUCED_LR[travel] if lr is None else lr,
                "weight_decay": decay,
                "scaling": "none",
            }
        )
    return groups


class SignMuon(ExchangedOptimizer):
    """Majority vote over the signs of Muon's polar factor (SignMuon, arXiv 2605.16311).

    Per matrix and node: moving average of the local gradient, Nesterov, polar factor, sign; the majority
    ``V`` of the nodes moves the weight by ``W (1 - lr wd) - lr scale V``. The sign comes *after* the polar
    factor. Embeddings and vectors vote by the sign of their momentum with learning rates of their own.
    Differences from the paper: decay is decoupled (a coupled one only turns a direction that does not depend
    on magnitude), five iterations instead of one (one leaves the signs of the momentum almost as they are,
    which is Signum), and a step that does not grow with the layer's width.

    The step does not shrink near an optimum: use a schedule that decays (:mod:`optim.schedules`).

    Args:
        model: its parameters are sorted by :func:`optim.roles.classify`.
        lr: of the matrices; with ``unit-gain`` the entries move by ``lr / sqrt(fan_in)``.
        embedding_lr, vector_lr: ``None`` is 2e-3 for votes and 6e-3 for AdamW.
        momentum, nesterov, weight_decay, ns_steps, ns_coefficients, ns_dtype, scaling, betas, eps: see
            :class:`optim.rules.RuleOptions`. Vectors never decay.
        embeddings, vectors: ``"vote"``, or ``"mean"`` for AdamW on the mean fp32 gradient.
        overrides, blocks: see :func:`optim.roles.classify`.
        reduce: the exchange used by ``step()``.

    Raises:
        ValueError: for options out of range and parameters that cannot be exchanged.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.032,
        *,
        embedding_lr: float | None = None,
        vector_lr: float | None = None,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        ns_steps: int = 5,
        ns_coefficients: Coefficients = "polar-express",
        ns_dtype: str = "float32",
        scaling: Scaling = "unit-gain",
        embeddings: Travel = "vote",
        vectors: Travel = "vote",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        overrides: Mapping[str, Role] | None = None,
        blocks: Mapping[str, int] | None = None,
        reduce: Reduction = identity,
    ) -> None:
        if ns_steps == 1:
            warnings.warn(
                "one Newton-Schulz step hardly changes the signs of the momentum, so that Sign-Muon behaves "
                "like Signum: use 5 steps",
                stacklevel=2,
            )
        roles = classify(model, overrides=overrides, blocks=blocks)
        common = {"momentum": momentum, "nesterov": nesterov, "betas": tuple(betas), "eps": eps}
        matrices = {
            **common,
            "name": "matrices",
            "roles": [item for item in roles if item.role == "matrix"],
            "rule": "vote-polar",
            "lr": lr,
            "weight_decay": weight_decay,
            "ns_steps": ns_steps,
            "ns_coefficients": ns_coefficients,
            "ns_dtype": ns_dtype,
            "scaling": scaling,
        }
        auxiliary = auxiliary_groups(
            roles,
            embeddings=embeddings,
            vectors=vectors,
            embedding_lr=embedding_lr,
            vector_lr=vector_lr,
            weight_decay=weight_decay,
            **common,
        )
        super().__init__([matrices, *auxiliary], reduce=reduce)


class Signum(ExchangedOptimizer):
    """Majority vote over the signs of the momentum, without a polar factor (Signum, arXiv 1810.05291).

    Arguments as in :class:`SignMuon`; by default every entry of a matrix moves by ``lr``.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        *,
        embedding_lr: float | None = None,
        vector_lr: float | None = None,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        scaling: Scaling = "none",
        embeddings: Travel = "vote",
        vectors: Travel = "vote",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        overrides: Mapping[str, Role] | None = None,
        reduce: Reduction = identity,
    ) -> None:
        roles = classify(model, overrides=overrides)
        common = {"momentum": momentum, "nesterov": nesterov, "betas": tuple(betas), "eps": eps}
        matrices = {
            **common,
            "name": "matrices",
            "roles": [item for item in roles if item.role == "matrix"],
            "rule": "vote-sign",
            "lr": lr,
            "weight_decay": weight_decay,
            "scaling": scaling,
        }
        auxiliary = auxiliary_groups(
            roles,
            embeddings=embeddings,
            vectors=vectors,
            embedding_lr=embedding_lr,
            vector_lr=vector_lr,
            weight_decay=weight_decay,
            **common,
        )
        super().__init__([matrices, *auxiliary], reduce=reduce)
