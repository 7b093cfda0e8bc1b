"""LoRDO as an ordinary optimizer: low-rank steps for matrices, AdamW for the rest, a sync every K steps."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from optim.local.adamw import AdamWInner
from optim.local.layout import LocalGroup
from optim.local.local_steps import LocalSteps
from optim.lordo.inner import LowRankAdam, LowRankOptions
from optim.lordo.shapes import AN_EIGHTH
from optim.newton_schulz import Coefficients
from optim.reduce import Reduction
from optim.roles import Role, classify
from protos.buckets import MeanRule
from protos.methods import REDUCED_LR, Basis, Direction, Outer


class LoRDO(LocalSteps):
    """Low-rank distributed optimisation with infrequent communication.

    Usable without a network, in any PyTorch loop; a single process is one node::

        optimizer = LoRDO(model, lr=2e-2, rank=16, local_steps=32)
        for batch in batches:
            optimizer.zero_grad()
            model(batch).mean().backward()
            optimizer.step()

    The gradient of the first ``step()`` only finds the bases, and from then on every 32nd is a sync. With
    several nodes ``reduce`` is what exchanges (:class:`optim.reduce.Reduction`), or a worker calls
    ``local_step``, ``propose`` and ``apply`` itself.

    Memory of a matrix of ``m <= n``, in fp32 numbers: on its device ``2 r n + r m`` beside weight and
    gradient (``r n + r m`` with the direction ``muon``; Adam ``2 m n``), in host memory the shared weights of
    the last sync ``m n``, the shared moments ``2 r n`` and basis ``r m``, and ``m n`` more for a lossy codec
    with error feedback. Embeddings, norms and biases have AdamW's two moments, which stay at home. Of a
    matrix travel the pseudo-gradient and ``2 r n`` numbers up and down, and ``r m`` down.

    Args:
        model: its parameters are sorted by :func:`optim.roles.classify`.
        lr: of the matrices; larger than Adam's, for a low-rank step has an RMS of ``sqrt(r / m)``.
        embedding_lr, vector_lr: of AdamW; ``None`` is 6e-3.
        weight_decay: decoupled, of matrices and embeddings, applied at syncs: it stays out of the bases.
        local_steps: K.
        rank, betas, eps, omega, mu, basis, direction, moments_codec, ns_steps, ns_coefficients: see
            :class:`optim.lordo.inner.LowRankOptions`.
        projection_feedback: its ``error_feedback``.
        codec, embedding_codec, vector_codec: how pseudo-gradients travel, see :mod:`protos.codecs`. The
            global basis needs a mean: no votes for matrices.
        error_feedback: of the codecs; see :class:`optim.local.layout.LocalGroup`.
        outer, outer_lr, outer_momentum: see :class:`optim.local.outer.OuterStep`. The basis follows the mean
            pseudo-gradient, not the outer momentum.
        auxiliary_betas, auxiliary_eps: of AdamW.
        overlap, mix, rule, reduce: see :class:`optim.local.local_steps.LocalSteps`.
        overrides: see :func:`optim.roles.classify`.

    Raises:
        ValueError: for options out of range and parameters that cannot be exchanged.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 2e-2,
        *,
        embedding_lr: float | None = None,
        vector_lr: float | None = None,
        weight_decay: float = 0.0,
        local_steps: int = 32,
        rank: int = AN_EIGHTH,
        betas: tuple[float, float] = (0.908, 0.99),
        eps: float = 1e-8,
        omega: float = 0.9,
        mu: float = 1.0,
        basis: Basis = "global",
        direction: Direction = "adam",
        projection_feedback: bool = False,
        moments_codec: str = "fp32",
        ns_steps: int = 5,
        ns_coefficients: Coefficients = "polar-express",
        codec: str = "fp32",
        embedding_codec: str = "fp32",
        vector_codec: str = "fp32",
        error_feedback: bool | None = None,
        outer: Outer = "average",
        outer_lr: float = 1.0,
        outer_momentum: float = 0.5,
        auxiliary_betas: tuple[float, float] = (0.9, 0.95),
        auxiliary_eps: float = 1e-8,
        overlap: int = 0,
        mix: float | None = None,
        rule: MeanRule | None = None,
        overrides: Mapping[str, Role] | None = None,
        reduce: Reduction | None = None,
    ) -> None:
        roles = classify(model, overrides=overrides)
        options = LowRankOptions(
            rank=rank,
            betas=betas,
            eps=eps,
            omega=omega,
            mu=mu,
            basis=basis,
            direction=direction,
            error_feedback=projection_feedback,
            moments_codec=moments_codec,
            ns_steps=ns_steps,
            ns_coefficients=ns_coefficients,
        )
        matrices = [item for item in roles if item.role == "matrix"]
        groups = [
            LocalGroup(
                "matrices",
                LowRankAdam(matrices, local_steps=local_steps, options=options),
                lr,
                weight_decay,
                codec,
                error_feedback,
            )
        ]
        kinds: tuple[tuple[str, Role, float | None, float, str], ...] = (
            ("embeddings", "embedding", embedding_lr, weight_decay, embedding_codec),
            ("vectors", "vector", vector_lr, 0.0, vector_codec),
        )
        for name, role, rate, decay, how in kinds:
            inner = AdamWInner(
                [item for item in roles if item.role == role], betas=auxiliary_betas, eps=auxiliary_eps
            )
            rate = REDUCED_LR["mean"] if rate is None else rate
            groups.append(LocalGroup(name, inner, rate, decay, how, error_feedback))
        super().__init__(
            groups,
            local_steps=local_steps,
            outer=outer,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            overlap=overlap,
            mix=mix,
            rule=rule,
            reduce=reduce,
        )
