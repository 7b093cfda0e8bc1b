"""LoRDO against its fp64 reference, and the identities that hold for the algorithm, and that do not."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from optim.lordo.basis import overlap
from optim.lordo.ldadam import turn_and_project
from optim.lordo.reference import F64, Gradient, Settings, lordo
from optim.lordo.shapes import moment_shape
from optim.lordo.subspace_step import subspace_step
from tests.optim.lordo_rig import build, quadratic, start, train, transposed, warm_basis

SETTINGS = Settings(rank=3, local_steps=5, lr=0.03)


def product_equals_reference(
    shape: tuple[int, int],
    workers: int,
    settings: Settings,
    rounds: int = 6,
    gradient: Gradient | None = None,
) -> None:
    weight, gradient = start(*shape), gradient or quadratic(*shape)
    wanted = lordo(gradient, weight, workers, rounds, settings, warm_basis)
    nodes = [build(settings, weight) for _ in range(workers)]
    history = train(nodes, gradient, rounds)
    left = shape[0] <= shape[1]
    for got, exact in zip(history, wanted, strict=True):
        np.testing.assert_allclose(got.shared["weight"].numpy(), exact.weight, atol=2e-5)
        np.testing.assert_allclose(got.state("basis"), exact.basis, atol=2e-4)
        np.testing.assert_allclose(got.state("exp_avg"), exact.first if left else exact.first.T, atol=2e-4)
        second = exact.second if left else exact.second.T
        np.testing.assert_allclose(got.state("exp_avg_sq"), second, atol=2e-4)
        for end, own in zip(got.ends, exact.workers, strict=True):
            np.testing.assert_allclose(end.numpy(), own, atol=2e-5)
    assert int(history[-1].shared["optimizer/weight/step"]) == (rounds - 1) * settings.local_steps
    assert np.abs(wanted[-1].weight - weight).max() > 2 * settings.lr  # it went somewhere


@pytest.mark.parametrize("shape", [(8, 13), (13, 8), (9, 9)])
@pytest.mark.parametrize("workers", [1, 3])
def test_product_equals_reference(shape: tuple[int, int], workers: int) -> None:
    product_equals_reference(shape, workers, SETTINGS)


@pytest.mark.parametrize(
    "changes",
    [
        {"omega": 1.0},
        {"omega": 0.0},
        {"mu": 0.1, "lr": 0.01},
        {"weight_decay": 0.5},
        {"error_feedback": True},
        {"rank": 99},
        {"local_steps": 1},
        {"betas": (0.9, 0.95), "eps": 1e-4},
    ],
)
def test_product_equals_reference_with_other_settings(changes: dict[str, object]) -> None:
    product_equals_reference((8, 13), 2, replace(SETTINGS, **changes))


def test_a_column_outside_of_the_subspace_does_not_explode() -> None:
    # the last columns have no energy in the subspace that the first gradient shows, so that their v is 0
    def gradient(worker: int, weight: F64, step: int) -> F64:
        value = np.zeros((6, 9))
        value[0, :5] = 1.0
        if step:
            value[3, 5:] = 1e-3
        return value

    settings = Settings(rank=1, local_steps=4, lr=0.01)
    end = lordo(gradient, start(6, 9), 1, 2, settings, warm_basis)[-1].workers[0]
    assert np.abs(end - start(6, 9)).max() < 4 * 0.01 * 10 * np.sqrt(6)
    product_equals_reference((6, 9), 1, settings, 2, gradient)


# ---------------------------------------------------------------------- identities that hold


def adam(gradient: Gradient, weight: F64, steps: int, settings: Settings, workers: int = 1) -> F64:
    """Adam on the mean gradient, with bias correction."""
    (b1, b2), u, v = settings.betas, np.zeros_like(weight), np.zeros_like(weight)
    for t in range(1, steps + 1):
        g = np.mean([gradient(worker, weight, t) for worker in range(workers)], axis=0)
        u, v = b1 * u + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        step = (u / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + settings.eps)
        weight = weight - settings.lr * step
    return weight


def relative(left: F64, right: F64, origin: F64) -> float:
    """Distance of two end points, as a share of the way."""
    return float(np.linalg.norm(left - right) / np.linalg.norm(right - origin))


def signed_permutation(size: int) -> F64:
    rng = np.random.default_rng(3)
    return np.eye(size)[rng.permutation(size)] * rng.choice([-1.0, 1.0], size)


@pytest.mark.parametrize("local_steps", [1, 4])
@pytest.mark.parametrize("basis", [np.eye(6), signed_permutation(6)])
def test_l1_l2_a_full_basis_of_unit_vectors_is_adam(local_steps: int, basis: F64) -> None:
    settings = replace(SETTINGS, rank=6, local_steps=local_steps, omega=1.0)
    weight, gradient = start(6, 9), quadratic(6, 9)
    end = lordo(gradient, weight, 1, 1 + 12 // local_steps, settings, lambda *_: basis)[-1].weight
    np.testing.assert_allclose(end, adam(gradient, weight, 12, settings), atol=1e-13)


def test_l3_a_full_basis_of_singular_vectors_is_not_adam() -> None:
    """Adam scales entry by entry, which depends on the axes: in those of the singular vectors it is another
    algorithm (a one-sided SOAP). Making these equal would break the algorithm."""
    settings = replace(SETTINGS, rank=6, local_steps=1, omega=1.0)
    weight, gradient = start(6, 9), quadratic(6, 9)
    end = lordo(gradient, weight, 1, 13, settings)[-1].weight
    assert relative(end, adam(gradient, weight, 12, settings), weight) > 0.1


def test_l4_workers_with_unlike_batches_are_not_adam_on_the_mean() -> None:
    """Every worker divides by the root of its own second moment, which is larger than that of the mean
    gradient; only the first moments are linear. No error: steps are shorter, and want a larger rate."""
    settings = replace(SETTINGS, rank=6, local_steps=1, omega=1.0)
    weight, gradient = start(6, 9), quadratic(6, 9, noise=2.0)
    history = lordo(gradient, weight, 4, 13, settings, lambda *_: np.eye(6))
    assert relative(history[-1].weight, adam(gradient, weight, 12, settings, workers=4), weight) > 0.1
    first = np.zeros_like(weight)
    for t, before in enumerate(history[:-1], start=1):
        mean = np.mean([gradient(worker, before.weight, t) for worker in range(4)], axis=0)
        first = settings.betas[0] * first + (1 - settings.betas[0]) * mean
    np.testing.assert_allclose(history[-1].first, first, atol=1e-13)


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_l5_workers_with_identical_batches_are_one_worker(workers: int) -> None:
    weight, gradient = start(8, 13), quadratic(8, 13, workers=1)
    alone = train([build(SETTINGS, weight)], gradient, 4)[-1].shared
    together = train([build(SETTINGS, weight) for _ in range(workers)], gradient, 4)[-1].shared
    for key, value in alone.items():  # the mean of three equal fp32 numbers is exact in fp64
        assert torch.equal(value, together[key]), key


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("shape", [(8, 13), (13, 8)])
def test_l6_without_full_rank_term_the_weights_never_leave_the_first_subspace(
    shape: tuple[int, int], feedback: bool
) -> None:
    settings = replace(SETTINGS, omega=1.0, error_feedback=feedback)
    weight, gradient = start(*shape), quadratic(*shape)
    history = lordo(gradient, weight, 3, 9, settings)
    first = history[0].basis

    def outside(change: F64, basis: F64) -> float:
        wide = change if shape[0] <= shape[1] else change.T
        return float(np.linalg.norm(wide - basis @ (basis.T @ wide)) / np.linalg.norm(wide))

    for sync in history[1:]:
        assert outside(sync.weight - weight, first) < 1e-12
        assert abs(overlap(sync.basis, first) - 1.0) < 1e-12
    # the product, in fp32
    rounds = train([build(settings, weight) for _ in range(3)], gradient, 9)
    for got in rounds[1:]:
        assert outside(got.shared["weight"].double().numpy() - weight, rounds[0].state("basis")) < 1e-5
        assert abs(overlap(got.state("basis"), rounds[0].state("basis")) - 1.0) < 1e-4


def test_l7_with_the_full_rank_term_the_subspace_turns() -> None:
    weight, gradient = start(24, 40), quadratic(24, 40)
    history = lordo(gradient, weight, 3, 9, SETTINGS)
    rounds = train([build(SETTINGS, weight) for _ in range(3)], gradient, 9)
    for before, after in pairwise(history):
        assert np.linalg.matrix_rank(after.delta, tol=1e-6) > SETTINGS.rank
        assert overlap(before.basis, after.basis) < 0.999
    for earlier, later in pairwise(rounds):
        assert overlap(earlier.state("basis"), later.state("basis")) < 0.999


def test_l8_error_feedback_does_nothing_within_a_round() -> None:
    weight, gradient = start(8, 13), quadratic(8, 13)
    without = lordo(gradient, weight, 1, 3, SETTINGS)
    feedback = lordo(gradient, weight, 1, 3, replace(SETTINGS, error_feedback=True))
    np.testing.assert_allclose(without[1].workers[0], feedback[1].workers[0], atol=1e-13)
    assert np.abs(without[2].workers[0] - feedback[2].workers[0]).max() > 1e-3  # then it turns

    node = build(replace(SETTINGS, error_feedback=True), weight)
    residuals = []

    def watch(step: int) -> None:
        error = node.local_tensors()["optimizer/weight/projection_error"]
        basis = node.shared_tensors()["optimizer/weight/basis"]
        residuals.append(float((basis.T @ error).norm()))
        if step:
            assert float(error.norm()) > 0.1

    train([node], gradient, 2, watch)
    assert max(residuals) < 1e-4


@pytest.mark.parametrize("shape", [(8, 13), (13, 8)])
def test_l10_without_low_rank_term_it_is_a_normalised_gradient(shape: tuple[int, int]) -> None:
    settings = replace(SETTINGS, omega=0.0, local_steps=3)
    weight, gradient = start(*shape), quadratic(*shape)
    basis = lordo(gradient, weight, 1, 1, settings)[0].basis
    mixed = basis @ np.linalg.qr(np.random.default_rng(1).standard_normal((3, 3)))[0]
    ends = [lordo(gradient, weight, 1, 2, settings, lambda *_, q=q: q)[-1].workers[0] for q in (basis, mixed)]
    np.testing.assert_allclose(ends[0], ends[1], atol=1e-13)  # any basis of the span gives the same

    one = lordo(gradient, weight, 1, 2, replace(settings, local_steps=1), lambda *_: basis)[-1].workers[0]
    change, value = one - weight, gradient(0, weight, 1)
    wide, change = (value, change) if shape[0] <= shape[1] else (value.T, change.T)
    column = np.sqrt(((basis.T @ wide) ** 2).mean(axis=0))  # of the first step: v_hat = g^2
    np.testing.assert_allclose(change, -settings.lr * wide / (column + settings.eps), rtol=1e-9)


def test_l11_ldadam_is_another_algorithm() -> None:
    """With K = 1 and one worker LoRDO takes the basis of the last *update*, after it; LDAdam that of momentum
    and gradient, before it. Not to be unified."""
    settings = replace(SETTINGS, local_steps=1, omega=1.0, lr=0.05)
    weight, gradient = start(8, 13), quadratic(8, 13)
    wanted = weight.astype(np.float32)
    state = {
        "basis": np.eye(8, 3, dtype=np.float32),
        "first": np.zeros(moment_shape((8, 13), 3), np.float32),
        "second": np.zeros(moment_shape((8, 13), 3), np.float32),
    }
    error = np.zeros((8, 13), np.float32)
    for t in range(1, 13):
        value = gradient(0, wanted.astype(np.float64), t).astype(np.float32)
        low = turn_and_project(value, **state, error=error, step=t - 1, betas=settings.betas)
        tensors = {key: torch.from_numpy(array) for key, array in state.items()}
        update = subspace_step(
            torch.from_numpy(low), None, **tensors, step=t, lr=0.05, betas=settings.betas, eps=1e-8,
            omega=1.0, mu=1.0,
        )  # fmt: skip
        wanted = wanted - update.numpy()
    end = lordo(gradient, weight, 1, 13, settings)[-1].weight
    assert relative(end, wanted.astype(np.float64), weight) > 0.1


@pytest.mark.parametrize("workers", [2, 3])
def test_l12_all_nodes_hold_the_same_after_every_sync(workers: int) -> None:
    nodes = [build(SETTINGS, start(8, 13)) for _ in range(workers)]
    history = train(nodes, quadratic(8, 13), 4)  # asserts it in every round
    assert {"weight", *(f"optimizer/weight/{key}" for key in ("basis", "exp_avg", "exp_avg_sq", "step"))} == (
        history[-1].shared.keys()
    )
    parameters = [node.param_groups[0]["params"][0] for node in nodes]
    assert all(torch.equal(parameter, parameters[0]) for parameter in parameters)
    assert not torch.equal(history[-1].ends[0], history[-1].ends[1])  # local steps differed


@pytest.mark.parametrize("settings", [SETTINGS, replace(SETTINGS, omega=1.0), replace(SETTINGS, omega=0.0)])
def test_l15_the_transposed_problem_has_the_transposed_trajectory(settings: Settings) -> None:
    weight, gradient = start(8, 13), quadratic(8, 13)
    upright = lordo(gradient, weight, 2, 5, settings)
    tipped = lordo(transposed(gradient), weight.T, 2, 5, settings)
    for a, b in zip(upright, tipped, strict=True):
        np.testing.assert_allclose(a.weight, b.weight.T, atol=1e-11)
    one = train([build(settings, weight) for _ in range(2)], gradient, 5)
    other = train([build(settings, weight.T.copy()) for _ in range(2)], transposed(gradient), 5)
    for left, right in zip(one, other, strict=True):
        np.testing.assert_allclose(left.shared["weight"], right.shared["weight"].T, atol=2e-5)
        np.testing.assert_allclose(left.state("exp_avg"), right.state("exp_avg"), atol=2e-4)


def test_weight_decay_stays_out_of_the_pseudo_gradient() -> None:
    """It would hide stagnation: decay alone has full rank."""
    settings = replace(SETTINGS, omega=1.0, weight_decay=0.5)
    weight, gradient = start(8, 13), quadratic(8, 13)
    rounds = train([build(settings, weight)], gradient, 6)
    for got in rounds[1:]:
        assert abs(overlap(got.state("basis"), rounds[0].state("basis")) - 1.0) < 1e-4
    idle = train([build(settings, weight)], lambda *_: np.zeros((8, 13)), 3)
    factor = np.float32((1 - settings.lr * settings.weight_decay) ** settings.local_steps)
    np.testing.assert_allclose(idle[1].shared["weight"], weight * factor, rtol=1e-6)
    np.testing.assert_array_equal(idle[2].state("basis"), idle[0].state("basis"))
