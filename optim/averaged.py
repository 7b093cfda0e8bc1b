"""The full-precision baselines: the mean fp32 gradient of all nodes, then Muon or AdamW."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from optim.exchanged import ExchangedOptimizer
from optim.newton_schulz import Coefficients
from optim.reduce import Reduction, identity
from optim.roles import Role, classify
from optim.sign_muon import auxiliary_groups
from protos.methods import Scaling


class DDPMuon(ExchangedOptimizer):
    """Muon on the mean gradient for matrices, AdamW on the mean gradient for everything else.

    Every node computes the polar factors itself, and matrix products round differently on unlike processors:
    replicas are bit-identical only on equal hardware, torch builds and thread counts.

    Args:
        model: its parameters are sorted by :func:`optim.roles.classify`.
        lr: of the matrices, before the shape factor of ``scaling`` (``match-rms``: ``0.2 * sqrt(max(m,
            n))``).
        embedding_lr, vector_lr: of AdamW; ``None`` is 6e-3.
        momentum, nesterov, weight_decay, ns_steps, ns_coefficients, ns_dtype, betas, eps: see
            :class:`optim.rules.RuleOptions`. Vectors never decay.
        overrides, blocks: see :func:`optim.roles.classify`.
        reduce: the exchange used by ``step()``.

    Raises:
        ValueError: for options out of range and parameters that cannot be exchanged.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-2,
        *,
        embedding_lr: float | None = None,
        vector_lr: float | None = None,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        ns_steps: int = 5,
        ns_coefficients: Coefficients = "polar-express",
        ns_dtype: str = "float32",
        scaling: Scaling = "match-rms",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        overrides: Mapping[str, Role] | None = None,
        blocks: Mapping[str, int] | None = None,
        reduce: Reduction = identity,
    ) -> None:
        roles = classify(model, overrides=overrides, blocks=blocks)
        matrices = {
            "name": "matrices",
            "roles": [item for item in roles if item.role == "matrix"],
            "rule": "mean-muon",
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "ns_steps": ns_steps,
            "ns_coefficients": ns_coefficients,
            "ns_dtype": ns_dtype,
            "scaling": scaling,
        }
        auxiliary = auxiliary_groups(
            roles,
            embeddings="mean",
            vectors="mean",
            embedding_lr=embedding_lr,
            vector_lr=vector_lr,
            weight_decay=weight_decay,
            betas=tuple(betas),
            eps=eps,
        )
        super().__init__([matrices, *auxiliary], reduce=reduce)


class DDPAdamW(ExchangedOptimizer):
    """AdamW on the mean gradient for every parameter, in operations that round alike on all hardware.

    Arguments as in :class:`DDPMuon`; ``embedding_lr`` and ``vector_lr`` default to 6e-3 too.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 6e-3,
        *,
        embedding_lr: float | None = None,
        vector_lr: float | None = None,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        overrides: Mapping[str, Role] | None = None,
        reduce: Reduction = identity,
    ) -> None:
        roles = classify(model, overrides=overrides)
        matrices = {
            "name": "matrices",
            "roles": [item for item in roles if item.role == "matrix"],
            "rule": "mean-adamw",
            "lr": lr,
            "weight_decay": weight_decay,
            "betas": tuple(betas),
            "eps": eps,
        }
        auxiliary = auxiliary_groups(
            roles,
            embeddings="mean",
            vectors="mean",
            embedding_lr=embedding_lr,
            vector_lr=vector_lr,
            weight_decay=weight_decay,
            betas=tuple(betas),
            eps=eps,
        )
        super().__init__([matrices, *auxiliary], reduce=reduce)
