"""Newton-Schulz: the fast forms against the written-out one, and both against the polar factor by SVD."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from optim import newton_schulz as ns
from optim.newton_schulz import newton_schulz, newton_schulz_reference, plan_stacks, polar_factors

CPU = torch.device("cpu")


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def with_spectrum(rows: int, columns: int, power: float) -> Tensor:
    """A matrix whose singular values fall as ``i ** -power``."""
    u, s, v = torch.linalg.svd(gaussian(rows, columns), full_matrices=False)
    return u @ torch.diag(torch.arange(1, s.numel() + 1) ** -power) @ v


def exact_polar(x: Tensor) -> Tensor:
    u, _, v = torch.linalg.svd(x.double(), full_matrices=False)
    return u @ v


def relative_error(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("coefficients", ["quintic", "polar-express", (3.4445, -4.7750, 2.0315)])
@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (40, 16), (1, 7), (7, 1), (1, 1)])
@pytest.mark.parametrize("form", ["ordinary", "gram", "auto"])
def test_forms_equal_the_reference(shape: tuple[int, int], coefficients, form) -> None:
    x = gaussian(*shape)
    for steps in (0, 1, 2, 5):
        fast = newton_schulz(x, steps=steps, coefficients=coefficients, form=form)
        slow = newton_schulz_reference(x.double(), steps=steps, coefficients=coefficients)
        torch.testing.assert_close(fast.double(), slow, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("power", "quintic", "polar_express"),
    [(None, (0.10, 0.20), (0.05, 0.12)), (1.0, (0.12, 0.35), (0.05, 0.12))],
)
def test_five_steps_come_as_close_as_reported(power, quintic, polar_express) -> None:
    x = gaussian(192, 768) if power is None else with_spectrum(192, 768, power)
    exact = exact_polar(x)
    low, high = quintic
    assert low < relative_error(newton_schulz(x, coefficients="quintic"), exact) < high
    low, high = polar_express
    assert low < relative_error(newton_schulz(x, coefficients="polar-express"), exact) < high


def test_polar_express_beyond_five_steps_converges() -> None:
    x = with_spectrum(64, 64, 1.0)
    assert relative_error(newton_schulz(x, steps=8), exact_polar(x)) < 1e-4


def test_one_quintic_step_keeps_the_signs_of_a_gaussian() -> None:
    # why one step makes Sign-Muon a Signum: the signs stay those of the input, far from the polar factor's
    x = gaussian(192, 192)
    one = newton_schulz(x, steps=1, coefficients="quintic").sign()
    assert (one != x.sign()).float().mean() < 0.005
    assert (one != exact_polar(x).sign()).float().mean() > 0.1


def test_bfloat16_is_close_to_float32_and_refuses_the_gram_form() -> None:
    x = gaussian(48, 160)
    low = newton_schulz(x, dtype=torch.bfloat16)
    assert low.dtype == torch.bfloat16
    assert relative_error(low.float(), exact_polar(x)) < 0.15
    with pytest.raises(ValueError, match="diverges in bfloat16"):
        newton_schulz(x, dtype=torch.bfloat16, form="gram")


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (16, 16)])
def test_zero_matrices_rows_and_columns_stay_zero(shape: tuple[int, int]) -> None:
    assert torch.equal(newton_schulz(torch.zeros(shape)), torch.zeros(shape))
    x = gaussian(*shape)
    x[3] = 0.0
    x[:, 5] = 0.0
    for form in ("ordinary", "gram"):
        polar = newton_schulz(x, form=form)
        assert torch.isfinite(polar).all()
        assert not polar[3].any() and not polar[:, 5].any()
        assert int((polar == 0).sum()) == shape[0] + shape[1] - 1


def test_a_zero_slice_does_not_disturb_its_stack() -> None:
    x = gaussian(3, 8, 20)
    x[1] = 0.0
    polar = newton_schulz(x)
    assert not polar[1].any()
    assert torch.equal(polar[0], newton_schulz(x[0])) and torch.equal(polar[2], newton_schulz(x[2]))


@pytest.mark.parametrize("exponent", [-100, -60, -36, -34, -1, 1, 24, 26, 60, 120])
@pytest.mark.parametrize("coefficients", ["quintic", "polar-express"])
@pytest.mark.parametrize("shape", [(12, 40), (40, 12), (20, 20)])
def test_powers_of_two_do_not_change_a_bit(shape, exponent: int, coefficients) -> None:
    # on both sides of PLAIN_NORMS, the norm of x itself is near 2^4.5
    x = gaussian(*shape).clamp(-4, 4)
    scaled = x * 2.0**exponent
    assert torch.equal(
        newton_schulz(scaled, coefficients=coefficients), newton_schulz(x, coefficients=coefficients)
    )


def test_magnitudes_at_the_ends_of_float32() -> None:
    x = gaussian(12, 40)
    polar = newton_schulz(x)
    for scale in (1e-37, 1e-30, 1e30, 1e37):
        torch.testing.assert_close(newton_schulz(x * scale), polar, atol=1e-4, rtol=1e-4)
        mixed = newton_schulz(torch.stack([x, x * scale]))
        torch.testing.assert_close(mixed, torch.stack([polar, polar]), atol=1e-4, rtol=1e-4)
    subnormal = torch.full((4, 4), 1e-44)
    assert torch.isfinite(newton_schulz(subnormal)).all() and newton_schulz(subnormal).all()


def test_eps_clamps_the_norm() -> None:
    x = gaussian(6, 6) * 1e-12
    assert newton_schulz(x, eps=1e-7, coefficients="quintic").norm() < 0.1
    assert newton_schulz(x, coefficients="quintic").norm() > 1.0
    for shape in ((6, 6), (6, 15), (15, 6)):
        assert newton_schulz(gaussian(*shape) * 1e-12, eps=1e-7, coefficients="quintic").norm() < 0.1
        y = gaussian(*shape)
        torch.testing.assert_close(
            newton_schulz(y, eps=1e-7, coefficients="quintic"), newton_schulz(y, coefficients="quintic")
        )


def test_the_input_is_left_alone() -> None:
    for shape in ((5, 9), (9, 5), (2, 9, 5)):
        x = gaussian(*shape)
        before = x.clone()
        for options in ({}, {"eps": 1e-7}, {"steps": 0}, {"dtype": torch.bfloat16}):
            result = newton_schulz(x, **options)
            result.mul_(0.0)
            assert torch.equal(x, before)


@pytest.mark.parametrize("large", [20, ns.STACK_ROWS + 2])
def test_a_batch_equals_its_slices(large: int) -> None:
    x = gaussian(3, large, large + 8)
    batch = newton_schulz(x)
    for index in range(3):
        torch.testing.assert_close(batch[index], newton_schulz(x[index]), atol=1e-5, rtol=1e-5)
    tall = newton_schulz(x.mT.contiguous())
    torch.testing.assert_close(tall, batch.mT, atol=1e-5, rtol=1e-5)


def test_polar_factors_of_a_mixed_stack() -> None:
    matrices = [gaussian(12, 30, seed=1), gaussian(30, 12, seed=2), gaussian(4, 12, 30, seed=3)]
    factors = polar_factors(matrices)
    for matrix, factor in zip(matrices, factors, strict=True):
        assert factor.shape == matrix.shape and factor.is_contiguous()
        torch.testing.assert_close(factor, newton_schulz(matrix), atol=1e-5, rtol=1e-5)
        (alone,) = polar_factors([matrix])
        assert torch.equal(factor, alone)  # whatever it is stacked with
    with pytest.raises(ValueError, match="one shape up to transposition"):
        polar_factors([gaussian(3, 4), gaussian(3, 5)])


def test_stacks_hold_equal_shapes_and_leave_large_matrices_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    big = ns.STACK_ROWS
    shapes = [(1, 8, 16), (1, big, big), (1, 16, 8), (1, 8, 8), (1, big, big), (3, 8, 16)]
    assert plan_stacks(shapes, CPU) == [[0, 2, 5], [1], [3], [4]]
    cuda = plan_stacks(shapes, torch.device("cuda"))
    assert cuda == [[0, 2, 5], [1, 4], [3]]
    monkeypatch.setattr(ns, "STACK_ELEMENTS", 256)
    assert plan_stacks(shapes[:3], CPU) == [[0, 2], [1]]
    monkeypatch.setattr(ns, "STACK_ELEMENTS", 255)
    assert plan_stacks(shapes[:3], CPU) == [[0], [1], [2]]


def bad_calls() -> Iterator[tuple[dict, str]]:
    yield {"x": torch.zeros(3)}, "floating-point tensor of shape"
    yield {"x": torch.zeros(3, 3, dtype=torch.int32)}, "int32"
    yield {"steps": -1}, "between 0 and 99"
    yield {"steps": 100}, "between 0 and 99"
    yield {"coefficients": "septic"}, "septic"
    yield {"coefficients": (1.0, 2.0)}, "three numbers"
    yield {"dtype": torch.float16}, "float16"


@pytest.mark.parametrize(("options", "message"), list(bad_calls()))
def test_bad_arguments_are_named(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        newton_schulz(**{"x": torch.zeros(3, 3), **options})


def test_an_empty_matrix_is_returned() -> None:
    assert newton_schulz(torch.zeros(0, 4)).shape == (0, 4)


def test_default_precision_follows_the_device() -> None:
    assert ns.default_dtype(CPU) == torch.float32
    assert ns.default_dtype(torch.device("cuda")) == torch.bfloat16
