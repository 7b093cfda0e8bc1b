"""The whole algorithm in fp64 NumPy for one matrix, all workers in one process; tests hold the product to it.

LoRDO: low-rank distributed optimisation with infrequent communication. Moments rotate as in LDAdam (arXiv
2410.16103); the second moment of the full-rank term, which the paper leaves open, is the mean over the rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optim.lordo.shapes import LONGEST

F64 = NDArray[np.float64]
Gradient = Callable[[int, F64, int], F64]  # worker, weights, micro-step -> gradient
FindBasis = Callable[[F64, int, "F64 | None"], F64]  # matrix, rank, previous basis -> orthonormal basis


@dataclass(frozen=True)
class Settings:
    """Choices of a run: ``lr`` is eta, ``local_steps`` K, and ``omega`` the share of the low-rank term."""

    rank: int
    local_steps: int
    lr: float
    betas: tuple[float, float] = (0.908, 0.99)
    eps: float = 1e-8
    omega: float = 0.9
    mu: float = 1.0
    weight_decay: float = 0.0
    error_feedback: bool = False


@dataclass
class Sync:
    """What all workers hold after a round; moments ``[r, n]`` for a left projection, ``[m, r]`` for a right
    one."""

    weight: F64
    basis: F64
    first: F64
    second: F64
    delta: F64
    workers: list[F64]  # the weights of each just before


def leading_directions(matrix: F64, rank: int, previous: F64 | None = None) -> F64:
    """The singular vectors of the shorter side, by a full decomposition."""
    left, _, right = np.linalg.svd(matrix, full_matrices=False)
    return left[:, :rank] if matrix.shape[0] <= matrix.shape[1] else right[:rank].T


def rotate(first: F64, second: F64, turn: F64, step: int, betas: tuple[float, float]) -> tuple[F64, F64]:
    """Moments ``[r, n]`` in a new basis; ``turn = new^T old``."""
    c1, c2 = 1 - betas[0] ** step, 1 - betas[1] ** step
    turned = turn @ first
    variance = (turn * turn) @ (second / c2 - (first / c1) ** 2)
    return turned, c2 * np.abs(variance + (turned / c1) ** 2)


def lordo(
    gradient: Gradient,
    weight: F64,
    workers: int,
    rounds: int,
    settings: Settings,
    find_basis: FindBasis = leading_directions,
) -> list[Sync]:
    """Train ``weight`` and return the state after each of ``rounds`` rounds; round 0 only finds the first
    basis.

    ``gradient(worker, weights, micro_step)`` is called once for each worker at micro-step 0 (for the basis),
    and then for micro-steps 1, 2, ...
    """
    left = weight.shape[0] <= weight.shape[1]
    rank, (b1, b2), eps = min(settings.rank, *weight.shape), settings.betas, settings.eps

    def project(basis: F64, matrix: F64) -> F64:
        return basis.T @ matrix if left else matrix @ basis

    def lift(basis: F64, low: F64) -> F64:
        return basis @ low if left else low @ basis.T

    delta = np.mean([gradient(i, weight, 0) for i in range(workers)], axis=0)
    basis = find_basis(delta, rank, None)
    first = np.zeros_like(project(basis, weight))
    second = np.zeros_like(first)
    errors = [np.zeros_like(weight) for _ in range(workers)]
    history = [Sync(weight, basis, first, second, delta, [weight] * workers)]
    step = 0
    for _ in range(1, rounds):
        ends: list[tuple[F64, F64, F64]] = []
        for i in range(workers):
            w, u, v = weight.copy(), first.copy(), second.copy()
            for t in range(step + 1, step + settings.local_steps + 1):
                g = gradient(i, w, t)
                a = g + errors[i] if settings.error_feedback else g
                low = project(basis, a)
                if settings.error_feedback:
                    errors[i] = a - lift(basis, low)
                u = b1 * u + (1 - b1) * low
                v = b2 * v + (1 - b2) * low * low
                u_hat, v_hat = u / (1 - b1**t), v / (1 - b2**t)
                axis = 0 if left else 1
                column = np.sqrt(v_hat.mean(axis=axis, keepdims=True)) + eps
                rms = np.sqrt((g * g).mean(axis=axis, keepdims=True))
                full = g / (settings.mu * np.maximum(column, rms / LONGEST))
                w = w - settings.lr * (
                    (1 - settings.omega) * full + settings.omega * lift(basis, u_hat / (np.sqrt(v_hat) + eps))
                )
            ends.append((w, u, v))
        step += settings.local_steps
        delta = weight - _mean(ends, 0)
        first, second = _mean(ends, 1), _mean(ends, 2)
        old, basis = basis, find_basis(delta, rank, basis)
        turn = basis.T @ old
        if left:
            first, second = rotate(first, second, turn, step, settings.betas)
        else:
            turned = rotate(first.T, second.T, turn, step, settings.betas)
            first, second = turned[0].T, turned[1].T
        decay = (1 - settings.lr * settings.weight_decay) ** settings.local_steps
        weight = weight * decay - delta
        history.append(Sync(weight, basis, first, second, delta, [end[0] for end in ends]))
    return history


def _mean(ends: list[tuple[Any, ...]], index: int) -> F64:
    mean: F64 = np.mean([end[index] for end in ends], axis=0)
    return mean
