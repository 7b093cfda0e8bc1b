"""The low-rank local optimizer by itself: options, edge cases, what travels, and its memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from optim.lordo.basis import overlap
from optim.lordo.inner import LowRankAdam, LowRankOptions
from optim.lordo.reference import Settings
from optim.lordo.shapes import AN_EIGHTH, rank_of, state_elements
from optim.newton_schulz import newton_schulz
from optim.roles import ParameterRole, classify
from protos.buckets import BucketTable
from tests.optim.lordo_rig import Matrix, build, quadratic, start, train

SETTINGS = Settings(rank=3, local_steps=5, lr=0.03)


def roles_of(*shapes: tuple[int, ...]) -> tuple[ParameterRole, ...]:
    model = nn.Module()
    for index, shape in enumerate(shapes):
        tensor = torch.randn(shape, generator=torch.Generator().manual_seed(index))
        model.register_parameter(f"weight{index}", nn.Parameter(tensor))
    return classify(model, overrides={"*": "matrix"})


def gradient_like(parameter: Tensor, seed: int) -> Tensor:
    return torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(8, 20), (20, 8)])
@pytest.mark.parametrize("direction", ["adam", "muon"])
def test_memory_is_what_the_formula_says(shape: tuple[int, int], direction) -> None:
    for feedback in (False, True):
        options = LowRankOptions(rank=4, direction=direction, error_feedback=feedback)
        inner = LowRankAdam(roles_of(shape), options=options)
        local = [tensor for tensor in inner.local_tensors().values() if tensor.is_floating_point()]
        basis = inner.shared_tensors()["optimizer/weight0/basis"]
        assert all(tensor.dtype == torch.float32 for tensor in local)
        elements = sum(tensor.numel() for tensor in local) + basis.numel()
        assert elements == state_elements(shape, 4, direction=direction, error_feedback=feedback)
        shared = sum(tensor.numel() for tensor in inner.shared_tensors().values() if tensor.ndim)
        assert shared == state_elements(shape, 4, direction=direction)
        assert all(tensor.device.type == "cpu" for tensor in inner.shared_tensors().values())


def test_the_muon_direction_is_the_polar_factor_of_the_moment() -> None:
    (role,) = roles_of((6, 10))
    options = LowRankOptions(rank=3, direction="muon", omega=0.7, mu=0.5)
    inner = LowRankAdam([role], options=options)
    moment, weight = torch.zeros(3, 10), role.parameter.detach().clone()
    for step in range(3):
        role.parameter.grad = gradient = gradient_like(role.parameter, step)
        inner.step(0.1)
        moment = moment * options.betas[0] + gradient[:3] * (1 - options.betas[0])  # the first basis is I
        low = torch.zeros(6, 10)
        low[:3] = 0.2 * 10**0.5 * newton_schulz(moment)
        full = 0.2 * gradient / (0.5 * gradient.square().mean().sqrt())
        weight -= 0.1 * (0.7 * low + 0.3 * full)
    torch.testing.assert_close(role.parameter.detach(), weight, atol=1e-4, rtol=1e-4)
    assert {bucket.name.rpartition("/")[2] for bucket in inner.buckets(role)} == {"basis", "exp_avg"}


@pytest.mark.parametrize("shape", [(8, 13), (13, 8)])
def test_the_muon_direction_trains_through_rounds(shape: tuple[int, int]) -> None:
    weight, gradient = start(*shape), quadratic(*shape)
    settings = replace(SETTINGS, lr=0.15)
    history = train([build(settings, weight, direction="muon") for _ in range(2)], gradient, 12)
    assert not any("exp_avg_sq" in key for key in history[-1].shared)
    calm = quadratic(*shape, noise=0.0)
    after = history[-1].shared["weight"].double().numpy()
    assert np.linalg.norm(calm(0, after, 0)) < 0.7 * np.linalg.norm(calm(0, weight, 0))


def test_local_bases_are_each_nodes_own_and_nothing_extra_travels() -> None:
    weight, gradient = start(8, 13), quadratic(8, 13, noise=3.0)
    nodes = [build(SETTINGS, weight, basis="local") for _ in range(2)]
    assert nodes[0].micro_steps(0) == 5  # nothing to agree on first
    table = nodes[0].tables.of(0)
    assert [bucket.name for bucket in table.buckets] == ["weight"]
    bases: list[list[np.ndarray]] = [[], []]

    def watch(step: int) -> None:
        for found, node in zip(bases, nodes, strict=True):
            found.append(node.local_tensors()["optimizer/weight/local_basis"].numpy().copy())

    history = train(nodes, gradient, 3, watch)
    assert set(history[-1].shared) == {"weight"}
    assert overlap(bases[0][-1], bases[1][-1]) < 0.95
    # in each round the first node makes its five steps, then the second; both find their first basis at once
    turns = [
        [step for step, (old, new) in enumerate(pairwise(found), 1) if not np.array_equal(old, new)]
        for found in bases
    ]
    assert turns == [[4, 14, 24], [5, 9, 19, 29]]


def test_a_local_basis_is_that_of_the_last_gradient_of_a_round() -> None:
    (role,) = roles_of((6, 10))
    inner = LowRankAdam([role], local_steps=2, options=LowRankOptions(rank=2, basis="local"))
    for step in range(4):
        role.parameter.grad = gradient_like(role.parameter, step)
        inner.step(0.1)
        left = torch.linalg.svd(gradient_like(role.parameter, step - 1 + step % 2))[0][:, :2]
        basis = inner.local_tensors()["optimizer/weight0/local_basis"].numpy()
        if step:
            assert overlap(left.numpy(), basis) > 1 - 1e-5


def test_shapes_that_are_not_simple_matrices() -> None:
    roles = roles_of((4, 3, 3, 3), (5, 1), (1, 7), (2, 2))
    inner = LowRankAdam(roles, options=LowRankOptions(rank=3))
    for role in roles:
        role.parameter.grad = gradient_like(role.parameter, 1)
    before = [role.parameter.detach().clone() for role in roles]
    inner.step(0.1)
    for role, old in zip(roles, before, strict=True):
        assert torch.isfinite(role.parameter).all() and not torch.equal(role.parameter, old)
    shared = inner.shared_tensors()
    assert shared["optimizer/weight0/basis"].shape == (4, 3)
    assert shared["optimizer/weight0/exp_avg"].shape == (3, 27)
    assert shared["optimizer/weight1/basis"].shape == (1, 1)
    assert shared["optimizer/weight2/exp_avg"].shape == (1, 7)
    with pytest.raises(ValueError, match="needs a matrix"):
        LowRankAdam([replace(roles[0], parameter=nn.Parameter(torch.zeros(3)))])


def test_zero_and_missing_gradients_move_nothing_at_first() -> None:
    for omega, eps in ((0.9, 1e-8), (0.9, 0.0), (0.0, 0.0)):
        roles = roles_of((4, 6), (6, 4))
        inner = LowRankAdam(roles, options=LowRankOptions(rank=2, omega=omega, eps=eps))
        before = [role.parameter.detach().clone() for role in roles]
        roles[0].parameter.grad = torch.zeros(4, 6)
        inner.step(0.1)
        assert all(torch.equal(r.parameter, old) for r, old in zip(roles, before, strict=True))


def test_a_missing_gradient_counts_as_zero() -> None:
    outcomes = []
    for second in (None, torch.zeros(4, 6)):
        (role,) = roles_of((4, 6))
        inner = LowRankAdam([role], options=LowRankOptions(rank=2))
        for gradient in (gradient_like(role.parameter, 0), second):
            role.parameter.grad = gradient
            inner.step(0.1)
        outcomes.append(role.parameter.detach().clone())
    assert torch.equal(*outcomes)


def test_only_first_and_second_moment_and_no_basis_are_sent() -> None:
    roles = roles_of((30, 50))
    inner = LowRankAdam(roles, options=LowRankOptions(rank=8))
    roles[0].parameter.grad = gradient_like(roles[0].parameter, 0)
    inner.step(0.1)
    buckets = inner.buckets(roles[0])
    values = {bucket.name: inner.contribute(bucket) for bucket in buckets if bucket.reduce == "mean"}
    projected = roles[0].parameter.grad[:8].numpy()
    first, second = (values[f"optimizer/weight0/{key}"] for key in ("exp_avg", "exp_avg_sq"))
    np.testing.assert_allclose(first, (1 - 0.908) * projected, rtol=1e-5)
    np.testing.assert_allclose(second, (1 - 0.99) * projected**2, rtol=1e-5)


def up(size: int) -> int:
    return -(-size // 64) * 64


@pytest.mark.parametrize("direction", ["adam", "muon"])
def test_l13_bytes_of_a_sync_are_those_of_the_formula(direction) -> None:
    node = build(replace(SETTINGS, rank=4), start(32, 48), direction=direction)
    table = node.tables.of(5)
    moments = 2 if direction == "adam" else 1
    assert table.nbytes == 4 * (32 * 48 + moments * 4 * 48)
    assert table.result_nbytes == table.nbytes + 4 * 4 * 32
    odd = build(replace(SETTINGS, rank=3), start(7, 11), direction=direction, codec="int8").tables.of(1)
    assert odd.nbytes == up(4 + 77) + moments * up(4 * 3 * 11)
    assert odd.result_nbytes == odd.nbytes + up(4 * 3 * 7)
    assert BucketTable.from_json(table.to_json()) == table


@pytest.mark.parametrize("codec", ["bf16", "int8:64", "int4:64"])
def test_lossy_moments_stay_usable(codec: str) -> None:
    weight, gradient = start(8, 40), quadratic(8, 40)

    def spread(worker: int, value: np.ndarray, step: int) -> np.ndarray:
        return gradient(worker, value, step) * np.logspace(0, -5, 40)  # v spans ten decades

    exact = train([build(SETTINGS, weight) for _ in range(2)], spread, 8)[-1]
    nodes = [build(SETTINGS, weight, moments_codec=codec) for _ in range(2)]
    lossy = train(nodes, spread, 8)[-1]
    assert (lossy.state("exp_avg_sq") >= 0).all()
    step = np.abs(lossy.state("exp_avg")) / np.sqrt(lossy.state("exp_avg_sq") + 1e-30)
    assert step.max() < 4  # no small entry has become a zero divisor
    moved = np.linalg.norm(exact.shared["weight"].numpy() - weight)
    off = np.linalg.norm(lossy.shared["weight"].numpy() - exact.shared["weight"].numpy())
    assert off < {"bf16": 0.02, "int8:64": 0.3, "int4:64": 0.6}[codec] * moved


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4"])
def test_moments_of_a_peer_that_lies_stay_finite(codec: str) -> None:
    """Whatever a result holds that may be decoded; the square of a root must not overflow either."""
    largest, name = np.finfo(np.float32).max, "optimizer/weight0/"
    (role,) = roles_of((4, 6))
    inner = LowRankAdam([role], local_steps=3, options=LowRankOptions(rank=2, moments_codec=codec))
    for round_index, basis in enumerate([np.eye(4, 2), np.eye(4, 2), np.eye(4, 2)[::-1]]):
        results = {
            name + "basis": np.ascontiguousarray(basis, np.float32),
            name + "exp_avg": np.full((2, 6), largest, np.float32),
            name + "exp_avg_sq": np.full((2, 6), -largest, np.float32),
        }
        inner.take(role, results, round_index)
        assert all(bool(tensor.isfinite().all()) for tensor in inner.shared_tensors().values())


def test_a_gradient_that_is_not_finite_is_left_out() -> None:
    node = build(SETTINGS, start(8, 13))
    train([node], quadratic(8, 13), 2)
    state = {key: value.clone() for key, value in node.local_tensors().items()}
    parameter = node.param_groups[0]["params"][0]
    before = parameter.detach().clone()
    parameter.grad = torch.full_like(parameter, float("nan"))
    assert not node.local_step(2, 0)
    assert torch.equal(parameter, before)
    assert all(torch.equal(state[key], value) for key, value in node.local_tensors().items())


def test_state_that_is_not_finite_restarts_from_the_last_sync() -> None:
    node = build(replace(SETTINGS, error_feedback=True), start(8, 13))
    train([node], quadratic(8, 13), 3)
    local, shared = node.local_tensors(), node.shared_tensors()
    local["optimizer/weight/local_exp_avg_sq"][1, 2] = float("inf")
    local["optimizer/weight/projection_error"][0, 0] = float("nan")
    payload = torch.empty(node.tables.of(3).nbytes, dtype=torch.uint8)
    assert not node.propose(3, payload)
    node.apply(3, None)
    assert torch.equal(local["optimizer/weight/local_exp_avg_sq"], shared["optimizer/weight/exp_avg_sq"])
    assert torch.equal(local["optimizer/weight/local_exp_avg"], shared["optimizer/weight/exp_avg"])
    assert not local["optimizer/weight/projection_error"].any()
    assert node.propose(4, payload)


def test_a_first_round_without_result_leaves_a_basis_that_all_nodes_know() -> None:
    nodes = [build(SETTINGS, start(8, 13)) for _ in range(2)]
    for node in nodes:
        node.apply(0, None)
    assert torch.equal(nodes[0].shared_tensors()["optimizer/weight/basis"], torch.eye(8, 3))
    gradient = quadratic(8, 13)
    for node in nodes:
        parameter = node.param_groups[0]["params"][0]
        for step in range(5):
            parameter.grad = torch.tensor(gradient(0, parameter.detach().numpy(), step), dtype=torch.float32)
            assert node.local_step(1, step)
        assert torch.isfinite(parameter).all()
        assert (parameter.detach() - torch.tensor(start(8, 13))).abs().max() < 1.0


def test_a_node_that_only_applies_stays_identical() -> None:
    gradient, weight = quadratic(8, 13), start(8, 13)
    worker, spectator = build(SETTINGS, weight), build(SETTINGS, weight)
    original = worker.apply

    def apply(round_index: int, payload: Tensor | None, *, counted: bool = True) -> None:
        original(round_index, payload, counted=counted)
        spectator.apply(round_index, payload)

    worker.apply = apply  # type: ignore[method-assign]
    train([worker], gradient, 4)
    ours, theirs = worker.shared_tensors(), spectator.shared_tensors()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    # and so is its next round
    a, b = train([worker], gradient, 1), train([spectator], gradient, 1)
    assert all(torch.equal(a[-1].shared[key], b[-1].shared[key]) for key in a[-1].shared)


def test_loaded_shared_state_reaches_the_local_steps() -> None:
    gradient, weight = quadratic(8, 13), start(8, 13)
    worker, joiner = build(SETTINGS, weight), build(SETTINGS, weight * 0)
    train([worker], gradient, 4)
    for key, tensor in joiner.shared_tensors().items():
        tensor.copy_(worker.shared_tensors()[key])
    joiner.loaded()
    local, wanted = joiner.local_tensors(), worker.local_tensors()
    assert all(torch.equal(local[key], wanted[key]) for key in wanted)
    for node in (worker, joiner):
        parameter = node.param_groups[0]["params"][0]
        parameter.grad = torch.ones_like(parameter)
        assert node.local_step(4, 0)
    assert torch.equal(worker.param_groups[0]["params"][0], joiner.param_groups[0]["params"][0])


def test_tables_on_the_meta_device_are_the_same() -> None:
    roles = [replace(role, parameter=role.parameter.to("meta")) for role in roles_of((6, 9), (9, 6))]
    inner, real = LowRankAdam(roles), LowRankAdam(roles_of((6, 9), (9, 6)))
    assert [inner.buckets(role) for role in inner.roles] == [real.buckets(role) for role in real.roles]
    assert not inner.shared_tensors() and not inner.local_tensors()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": -1}, "rank"),
        ({"omega": 1.5}, "omega"),
        ({"mu": 0.0}, "mu"),
        ({"eps": -1.0}, "eps"),
        ({"betas": (1.0, 0.9)}, r"betas\[0\]"),
        ({"basis": "mine"}, "basis"),
        ({"direction": "sideways"}, "direction"),
        ({"moments_codec": "int3"}, "unknown codec"),
        ({"ns_steps": -1}, "Newton-Schulz"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LowRankOptions(**options)  # type: ignore[arg-type]


def test_local_steps_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="local_steps"):
        LowRankAdam(roles_of((3, 4)), local_steps=0)


def test_a_model_of_one_matrix_is_a_matrix() -> None:
    assert [role.role for role in classify(Matrix(start(3, 4)))] == ["matrix"]


def test_without_a_rank_each_matrix_has_an_eighth_of_its_shorter_side() -> None:
    assert [rank_of(shape, AN_EIGHTH) for shape in ((64, 176), (176, 64), (7, 100), (33, 2, 4))] == [
        8,
        8,
        1,
        1,
    ]
    assert [rank_of(shape, 8) for shape in ((64, 176), (5, 100))] == [8, 5]
    assert LowRankOptions().rank == AN_EIGHTH
