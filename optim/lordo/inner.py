"""LoRDO's local optimizer: Adam in a low-rank subspace that all nodes share, plus a full-rank term.

For a matrix W of ``m <= n``, gradient G and orthonormal basis Q (``m x r``), a local step is ::

    g = Q^T G,   u <- b1 u + (1 - b1) g,   v <- b2 v + (1 - b2) g * g
    W <- W - lr [ (1 - omega) G / (mu (sqrt(v_col) + eps)) + omega Q (u_hat / (sqrt(v_hat) + eps)) ]

with ``u_hat = u / (1 - b1^t)``, ``v_hat = v / (1 - b2^t)`` and ``v_col`` the mean of ``v_hat`` over the
rank, so that both terms have the same scale at ``mu = 1``; columns of which the subspace sees next to nothing
are held down by :data:`optim.lordo.shapes.LONGEST`. For ``m > n`` it is the same with W and G transposed.
Without the full-rank (quasi-hyperbolic) term the weights never leave the span of the first basis: every
pseudo-gradient lies in it, and so does the next basis.

At a sync u and v are averaged, the basis of the mean pseudo-gradient is found at one place and broadcast, and
every node rotates the moments into it (:mod:`optim.lordo.rotation`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from optim.adamw import integer_power
from optim.lordo.basis import compute_basis
from optim.lordo.rotation import LARGEST, rotate_first, rotate_moments
from optim.lordo.shapes import AN_EIGHTH, LONGEST, basis_shape, moment_shape, rank_of
from optim.lordo.tables import sync_buckets
from optim.muon import muon_scale
from optim.newton_schulz import Coefficients, iteration_triples, newton_schulz
from optim.roles import ParameterRole, held
from optim.rules import MATCH_RMS
from protos.buckets import Bucket
from protos.codecs import CodecSpec, matrix_shape
from protos.methods import Basis, Direction

F32 = npt.NDArray[np.float32]
KINDS_WITH_EXPONENT: Final = ("fp32", "bf16")  # keep the ratio of small and large entries


@dataclass(frozen=True)
class LowRankOptions:
    """Options of :class:`LowRankAdam`; raises ``ValueError`` for values out of range.

    Attributes:
        rank: r; clamped to the shorter side of each matrix. 0 is an eighth of that side.
        betas, eps: of the moments. ``1 - b1 <= sqrt(1 - b2)`` keeps the first step after a turn of the basis,
            which may start from moments of zero, no longer than an ordinary one.
        omega: share of the low-rank term: 1 is low-rank only, 0 a normalised gradient without momentum.
        mu: damping of the full-rank term; 0.1 makes it ten times stronger.
        basis: ``global``, or ``local``: each node takes the basis of its own last gradient every K steps, and
            moments stay at home.
        direction: ``adam``, or ``muon``: ``0.2 sqrt(max(m, n))`` times the polar factor of u in place of
            ``u_hat / sqrt(v_hat)``. There is no v then, and G in the full-rank term is scaled to an RMS of
            0.2.
        error_feedback: add what the projection of earlier gradients left out to the next one. It has no
            effect until the basis changes, and then arrives all at once (measured: 0.025 nats worse).
        moments_codec: how moments travel. Codecs with a common scale send the root of v, and v is kept at or
            above the square of the mean, so that small entries cannot become zero divisors.
        ns_steps, ns_coefficients: of the polar factor.
    """

    rank: int = AN_EIGHTH
    betas: tuple[float, float] = (0.908, 0.99)
    eps: float = 1e-8
    omega: float = 0.9
    mu: float = 1.0
    basis: Basis = "global"
    direction: Direction = "adam"
    error_feedback: bool = False
    moments_codec: str = "fp32"
    ns_steps: int = 5
    ns_coefficients: Coefficients = "polar-express"

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ValueError(f"the rank must be at least 1, or 0 for an eighth, not {self.rank}")
        for name, beta in (("betas[0]", self.betas[0]), ("betas[1]", self.betas[1])):
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"{name} must be in [0, 1), not {beta}")
        if not 0.0 <= self.eps < math.inf:
            raise ValueError(f"eps must be finite and not negative, not {self.eps}")
        if not 0.0 <= self.omega <= 1.0:
            raise ValueError(f"omega must be between 0 and 1, not {self.omega}")
        if not 0.0 < self.mu < math.inf:
            raise ValueError(f"mu must be positive and finite, not {self.mu}")
        if self.basis not in get_args(Basis):
            raise ValueError(f"unknown basis {self.basis!r}: use one of {', '.join(get_args(Basis))}")
        if self.direction not in get_args(Direction):
            raise ValueError(
                f"unknown direction {self.direction!r}: use one of {', '.join(get_args(Direction))}"
            )
        CodecSpec.parse(self.moments_codec)
        iteration_triples(self.ns_coefficients, self.ns_steps)


class LowRankAdam:
    """An :class:`optim.local.inner.Inner` for matrices.

    State of a matrix, in fp32: on the device of the parameter the basis and the moments that local steps move
    (:func:`optim.lordo.shapes.state_elements`); in host memory the basis and the moments of the last sync,
    which are shared state. Matrices of more than two dimensions count as the first by all others.

    Args:
        roles: the matrices.
        local_steps: K: steps between two syncs of a matrix, by which the common step counter moves. A node
            that left out a step still counts K, so that bias corrections agree.
        options: see :class:`LowRankOptions`.

    Attributes:
        roles: the matrices, in the order of their names.

    Raises:
        ValueError: for a parameter with fewer than two dimensions, or ``local_steps`` below 1.
    """

    def __init__(
        self,
        roles: Sequence[ParameterRole],
        *,
        local_steps: int = 32,
        options: LowRankOptions | None = None,
    ) -> None:
        if local_steps < 1:
            raise ValueError(f"local_steps must be at least 1, not {local_steps}")
        self.options = LowRankOptions() if options is None else options
        self._local_steps = local_steps
        self.roles = tuple(sorted(roles, key=lambda role: role.name))
        for role in self.roles:
            if role.parameter.ndim < 2:
                raise ValueError(f"{role.name}: a low-rank optimizer needs a matrix, not {role.shape}")
        self._matrices = [_Matrix(role, self.options) for role in held(self.roles)]
        self._by_name = {matrix.role.name: matrix for matrix in self._matrices}
        self._by_bucket = {
            bucket.name: (matrix, bucket.name.rpartition("/")[2])
            for matrix in self._matrices
            for bucket in self.buckets(matrix.role)
        }

    @property
    def bootstrap(self) -> bool:
        """Whether the first basis is that of the mean of all nodes' first gradients."""
        return self.options.basis == "global"

    # ------------------------------------------------------------------ local steps

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One local step on every matrix from its gradient; a missing one counts as zero."""
        for matrix in self._matrices:
            gradient = matrix.gradient()
            if not self.bootstrap and int(matrix.steps) == 0:
                matrix.live_basis.copy_(_basis_of(gradient, self.options.rank))
            self._update(matrix, gradient, lr)
            if not self.bootstrap and int(matrix.steps) % self._local_steps == 0:
                self._turn_local(matrix, gradient)

    def _update(self, matrix: _Matrix, gradient: Tensor, lr: float) -> None:
        options = self.options
        beta1, beta2 = options.betas
        matrix.steps += 1
        count, longest = int(matrix.steps), LONGEST * math.sqrt(gradient.shape[0])
        signal = gradient if matrix.error is None else gradient + matrix.error
        projected = matrix.live_basis.T @ signal
        if matrix.error is not None:
            torch.addmm(signal, matrix.live_basis, projected, alpha=-1.0, out=matrix.error)
        matrix.live_first.lerp_(projected, 1.0 - beta1)
        if matrix.live_second is None:
            direction = newton_schulz(
                matrix.live_first, steps=options.ns_steps, coefficients=options.ns_coefficients
            ).to(gradient.dtype)
            direction.mul_(muon_scale("match_rms_adamw", *gradient.shape))
            rms = torch.linalg.vector_norm(gradient) / math.sqrt(gradient.numel())
            weight = MATCH_RMS / (options.mu * (rms + options.eps))
        else:
            second = matrix.live_second.mul_(beta2).addcmul_(projected, projected, value=1.0 - beta2)
            corrected = second / (1.0 - integer_power(beta2, count))
            column = corrected.mean(dim=0).sqrt_().add_(options.eps)
            root = corrected.sqrt_().add_(options.eps)
            direction = (matrix.live_first / (1.0 - integer_power(beta1, count))).div_(root)
            direction.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)  # where eps is 0 and v too
            column = torch.maximum(column, torch.linalg.vector_norm(gradient, dim=0).div_(longest))
            weight = 1.0 / (options.mu * column)
        target = matrix.wide(matrix.role.parameter.detach())
        if options.omega < 1.0:
            weight.nan_to_num_(nan=0.0, posinf=0.0)
            target.addcmul_(gradient, weight, value=-lr * (1.0 - options.omega))
        if options.omega > 0.0:
            target.addmm_(matrix.live_basis, direction, alpha=-lr * options.omega)

    def _turn_local(self, matrix: _Matrix, gradient: Tensor) -> None:
        """Take the basis of this node's own gradient; a full decomposition, for one gradient is too noisy to
        follow."""
        old, new = _host(matrix.live_basis), _basis_of(gradient, self.options.rank).numpy()
        first, second = _host(matrix.live_first), matrix.live_second
        if second is None:
            matrix.live_first.copy_(torch.from_numpy(rotate_first(first, old, new)))
        else:
            turned = rotate_moments(
                first, _host(second), old, new, step=int(matrix.steps), betas=self.options.betas
            )
            matrix.live_first.copy_(torch.from_numpy(turned[0]))
            second.copy_(torch.from_numpy(turned[1]))
        matrix.live_basis.copy_(torch.from_numpy(new))

    # ------------------------------------------------------------------ syncs

    def buckets(self, role: ParameterRole) -> list[Bucket]:
        """Basis and moments of a matrix; nothing for local bases."""
        if self.options.basis == "local":
            return []
        options = self.options
        return sync_buckets(role, options.rank, direction=options.direction, codec=options.moments_codec)

    def contribute(self, bucket: Bucket) -> F32:
        """The moment of this node that ``bucket`` names."""
        matrix, key = self._by_bucket[bucket.name]
        if key == "exp_avg":
            return _host(matrix.live_first)
        assert matrix.live_second is not None
        values = _host(matrix.live_second)
        return values if self._keeps_ratios else np.sqrt(values)

    @torch.no_grad()
    def take(self, role: ParameterRole, results: Mapping[str, F32], round_index: int) -> None:
        """Take the mean moments of a round and turn them into its basis; round 0 only brings the basis."""
        if self.options.basis == "local":
            return
        matrix = self._by_name[role.name]
        prefix = f"optimizer/{role.name}/"
        new, old = results[f"{prefix}basis"], matrix.basis.numpy()
        if round_index > 0:
            matrix.count += self._local_steps
            first = results[f"{prefix}exp_avg"]
            if matrix.second is None:
                matrix.first.copy_(_tensor(rotate_first(first, old, new)))
            else:
                count, betas = int(matrix.count), self.options.betas
                second = self._received(first, results[f"{prefix}exp_avg_sq"], count)
                turned = rotate_moments(first, second, old, new, step=count, betas=betas)
                matrix.first.copy_(_tensor(turned[0]))
                matrix.second.copy_(_tensor(turned[1]))
        matrix.basis.copy_(_tensor(new))
        matrix.refresh()

    @property
    def _keeps_ratios(self) -> bool:
        return CodecSpec.parse(self.options.moments_codec).kind in KINDS_WITH_EXPONENT

    def _received(self, first: F32, second: F32, count: int) -> F32:
        if CodecSpec.parse(self.options.moments_codec).exact:
            return second
        wide = second.astype(np.float64)
        if not self._keeps_ratios:
            wide = np.square(wide)
        beta1, beta2 = self.options.betas
        mean = first.astype(np.float64) / (1.0 - integer_power(beta1, count))
        floor = np.square(mean) * (1.0 - integer_power(beta2, count))
        return np.minimum(np.maximum(wide, floor), LARGEST).astype(np.float32)

    # ------------------------------------------------------------------ state

    def shared_tensors(self) -> dict[str, Tensor]:
        """Basis, moments and step count of the last sync; nothing for local bases."""
        if self.options.basis == "local":
            return {}
        return _named((matrix.role.name, matrix.shared()) for matrix in self._matrices)

    def local_tensors(self) -> dict[str, Tensor]:
        """The moments that local steps move, and the error feedback; with local bases also these."""
        local = self.options.basis == "local"
        return _named((matrix.role.name, matrix.local(with_basis=local)) for matrix in self._matrices)

    def prepare_load(self) -> None:
        """Every tensor exists from the start."""

    def loaded(self) -> None:
        """The shared tensors were overwritten: continue from them."""
        if self.options.basis == "global":
            for matrix in self._matrices:
                matrix.refresh()

    def restart(self) -> None:
        """Replace local state that is not finite: moments by those of the last sync, the error by zero."""
        for matrix in self._matrices:
            moments = [matrix.live_basis, matrix.live_first]
            moments += [] if matrix.live_second is None else [matrix.live_second]
            if not all(bool(tensor.isfinite().all()) for tensor in moments):
                matrix.refresh()
            if matrix.error is not None and not bool(matrix.error.isfinite().all()):
                matrix.error.zero_()


class _Matrix:
    """One matrix and its state: ``live`` tensors on its device, the others shared and on the host.

    With local bases the shared ones keep their start values: an identity as basis, moments and count zero.
    """

    def __init__(self, role: ParameterRole, options: LowRankOptions) -> None:
        self.role = role
        device = role.parameter.device
        moment = moment_shape(role.shape, options.rank)
        with_second = options.direction == "adam"
        # A round 0 without result leaves this basis: arbitrary, but the same on all nodes.
        self.basis = torch.eye(*basis_shape(role.shape, options.rank))
        self.first = torch.zeros(moment)
        self.second = torch.zeros(moment) if with_second else None
        self.count = torch.zeros((), dtype=torch.int64)
        alone = options.basis == "local" or self.basis.device != device
        self.live_basis = self.basis.to(device, copy=True) if alone else self.basis
        self.live_first = torch.zeros(moment, device=device)
        self.live_second = torch.zeros(moment, device=device) if with_second else None
        self.steps = torch.zeros((), dtype=torch.int64)
        short, long = sorted(matrix_shape(role.shape))
        self.error = torch.zeros(short, long, device=device) if options.error_feedback else None

    def wide(self, tensor: Tensor) -> Tensor:
        """A view of a tensor like the parameter with the shorter side first."""
        rows, columns = matrix_shape(self.role.shape)
        matrix = tensor.view(rows, columns)
        return matrix if rows <= columns else matrix.T

    def gradient(self) -> Tensor:
        """The gradient, shorter side first."""
        gradient = self.role.parameter.grad
        if gradient is None:
            gradient = torch.zeros_like(self.role.parameter)
        return self.wide(gradient.contiguous())

    def refresh(self) -> None:
        """Continue from the state of the last sync."""
        if self.live_basis is not self.basis:
            self.live_basis.copy_(self.basis)
        self.live_first.copy_(self.first)
        if self.live_second is not None and self.second is not None:
            self.live_second.copy_(self.second)
        self.steps.copy_(self.count)

    def shared(self) -> dict[str, Tensor]:
        """State under its keys."""
        found = {"basis": self.basis, "exp_avg": self.first, "step": self.count}
        return found if self.second is None else {**found, "exp_avg_sq": self.second}

    def local(self, *, with_basis: bool) -> dict[str, Tensor]:
        """State of this node under its keys."""
        found = {"local_exp_avg": self.live_first, "local_step": self.steps}
        if self.live_second is not None:
            found["local_exp_avg_sq"] = self.live_second
        if with_basis:
            found["local_basis"] = self.live_basis
        if self.error is not None:
            found["projection_error"] = self.error
        return found


def _named(states: Iterable[tuple[str, dict[str, Tensor]]]) -> dict[str, Tensor]:
    return {f"optimizer/{name}/{key}": tensor for name, state in states for key, tensor in state.items()}


def _basis_of(gradient: Tensor, rank: int) -> Tensor:
    matrix = _host(gradient.contiguous())
    return torch.from_numpy(compute_basis(matrix, rank_of(matrix.shape, rank), None))


def _host(tensor: Tensor) -> F32:
    """The values in host memory; a view of them where they are there already."""
    values: F32 = tensor.detach().cpu().numpy()
    return values


def _tensor(values: F32) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
