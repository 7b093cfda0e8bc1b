"""Polar factors by Newton-Schulz iterations: the orthogonal part ``U V^T`` of a matrix ``U S V^T``.

Two coefficient sets: the five-step *quintic* of Muon (Keller Jordan, "Muon: An optimizer for hidden layers in
neural networks") and *Polar Express* (Amsel et al., arXiv 2505.16932; the triples are those used by Dion),
whose five triples differ and come about twice as close to the exact factor at the same cost.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

Triple = tuple[float, float, float]
Coefficients = Literal["polar-express", "quintic"] | Triple
Form = Literal["auto", "ordinary", "gram"]

QUINTIC: Triple = (3.4445, -4.7750, 2.0315)
POLAR_EXPRESS: tuple[Triple, ...] = (
    (8.1566, -22.4833, 15.8788),
    (4.0429, -2.8089, 0.5000),
    (3.8917, -2.7725, 0.5061),
    (3.2858, -2.3681, 0.4645),
    (2.3465, -1.7098, 0.4232),
)
# The fifth triple maps 1 to 1.06, so repeating it never settles at 1; this one does.
POLISH: Triple = (1.875, -1.25, 0.375)
POLAR_EXPRESS_HEADROOM = (
    1.02  # keeps the largest singular value inside the interval the triples were fitted for
)

STACK_ROWS = 128  # on a CPU, batched products beat a loop only below this many rows
STACK_ELEMENTS = 1 << 25  # bounds the working memory of one stack
MAX_STEPS = 100
GRAM_STEPS = 5  # a Gram matrix squares the condition number: with more steps the ordinary form is more exact


def iteration_triples(coefficients: Coefficients, steps: int) -> tuple[Triple, ...]:
    """The ``(a, b, c)`` of each of ``steps`` iterations.

    Polar Express beyond its five triples continues with a polynomial that converges to 1. Raises
    ``ValueError`` for an unknown set or a step count outside 0..99.
    """
    if not 0 <= steps < MAX_STEPS:
        raise ValueError(f"Newton-Schulz steps must be between 0 and {MAX_STEPS - 1}, not {steps}")
    if coefficients == "quintic":
        return (QUINTIC,) * steps
    if coefficients == "polar-express":
        return POLAR_EXPRESS[:steps] + (POLISH,) * (steps - len(POLAR_EXPRESS))
    if isinstance(coefficients, str) or len(coefficients) != 3:
        raise ValueError(
            f"Newton-Schulz coefficients must be 'polar-express', 'quintic' or three numbers, "
            f"not {coefficients!r}"
        )
    a, b, c = coefficients
    return ((float(a), float(b), float(c)),) * steps


def default_dtype(device: torch.device) -> torch.dtype:
    """fp32 on a CPU, where bf16 products without AMX are about 1.7 times slower; bf16 on CUDA."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def newton_schulz_reference(
    x: Tensor, *, steps: int = 5, coefficients: Coefficients = "polar-express"
) -> Tensor:
    """The iteration as the papers write it, for one ``m x n`` matrix in its own dtype; tests compare with
    it."""
    norm = torch.linalg.matrix_norm(x)
    if norm == 0 or steps == 0:
        return x.clone()
    headroom = POLAR_EXPRESS_HEADROOM if coefficients == "polar-express" else 1.0
    x = x / (headroom * norm)
    for a, b, c in iteration_triples(coefficients, steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def newton_schulz(
    x: Tensor,
    *,
    steps: int = 5,
    coefficients: Coefficients = "polar-express",
    dtype: torch.dtype | None = None,
    eps: float = 0.0,
    form: Form = "auto",
) -> Tensor:
    """Approximate polar factor of every matrix in ``x``.

    Args:
        x: floating point, shape ``(m, n)`` or ``(batch, m, n)``; left unchanged. Entries must be finite.
        steps: iterations; 0 returns ``x`` itself (in ``dtype``), so that its signs are the signs of ``x``.
        coefficients: ``"polar-express"``, ``"quintic"``, or one triple for all steps.
        dtype: ``torch.float32`` or ``torch.bfloat16``, the precision of the products and of the result;
            ``None`` takes :func:`default_dtype`.
        eps: 0 (the default) scales every matrix by a power of two first, so that the result does not depend
            on the magnitude of ``x``, however tiny or huge. A positive value clamps the Frobenius norm from
            below instead, as ``torch.optim.Muon`` does.
        form: ``"gram"`` iterates on the small Gram matrix, 0.6 times the work at a side ratio of 4;
            ``"auto"`` uses it in fp32 from a ratio of 2 on, for at most five steps. In bf16 it diverges and
            is refused.

    Returns:
        A tensor of the shape of ``x``, in ``dtype``. A zero matrix gives zeros; zero rows and columns stay
        zero.

    Raises:
        ValueError: for any argument outside these ranges.
    """
    if x.ndim not in (2, 3) or not x.is_floating_point():
        raise ValueError(
            f"Newton-Schulz needs a floating-point tensor of shape (m, n) or (batch, m, n), "
            f"not {x.dtype} {tuple(x.shape)}"
        )
    dtype = default_dtype(x.device) if dtype is None else dtype
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"Newton-Schulz runs in float32 or bfloat16, not {dtype}")
    if form == "gram" and dtype != torch.float32:
        raise ValueError("the Gram form diverges in bfloat16: use float32 or form='ordinary'")
    triples = iteration_triples(coefficients, steps)
    if steps == 0 or x.numel() == 0:
        return x.to(dtype, copy=True)
    small, large = sorted(x.shape[-2:])
    if x.ndim == 3 and x.device.type == "cpu" and small >= STACK_ROWS:
        options = {"steps": steps, "coefficients": coefficients, "dtype": dtype, "eps": eps, "form": form}
        return torch.stack([newton_schulz(matrix, **options) for matrix in x])  # type: ignore[arg-type]
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = _normalise(x, dtype, eps, POLAR_EXPRESS_HEADROOM if coefficients == "polar-express" else 1.0)
    use_gram = form == "gram" or (
        form == "auto" and dtype == torch.float32 and large >= 2 * small and steps <= GRAM_STEPS
    )
    x = _iterate_on_gram(x, triples) if use_gram else _iterate(x, triples)
    return x.mT if tall else x


def _normalise(x: Tensor, dtype: torch.dtype, eps: float, headroom: float) -> Tensor:
    """``x`` divided by ``headroom`` times its Frobenius norm, matrix by matrix."""
    if eps > 0.0:
        x = x.to(dtype)
        norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps)
    else:
        # An exact power of two brings the largest entry near 1: squares then neither overflow nor vanish.
        largest = x.abs().amax(dim=(-2, -1), keepdim=True)
        _, exponent = torch.frexp(largest)
        x = (x * torch.ldexp(torch.ones_like(largest), -exponent.clamp(-120, 120))).to(dtype)
        norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
        norm = torch.where(norm > 0, norm, torch.ones_like(norm))
    scaled: Tensor = x / (norm * headroom if headroom != 1.0 else norm)
    return scaled


def _products(x: Tensor) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """``A B`` and ``beta C + alpha A B`` for one matrix or a stack."""
    return (torch.mm, torch.addmm) if x.ndim == 2 else (torch.bmm, torch.baddbmm)


def _iterate(x: Tensor, triples: Sequence[Triple]) -> Tensor:
    """The iteration in three buffers; ``x`` is overwritten."""
    product, add_product = _products(x)
    gram = product(x, x.mT)
    factor, spare = torch.empty_like(gram), torch.empty_like(x)
    for index, (a, b, c) in enumerate(triples):
        if index:
            product(x, x.mT, out=gram)
        add_product(gram, gram, gram, beta=b, alpha=c, out=factor)
        add_product(x, factor, x, beta=a, out=spare)
        x, spare = spare, x
    return x


def _iterate_on_gram(x: Tensor, triples: Sequence[Triple]) -> Tensor:
    """The same polynomial, accumulated as an ``m x m`` factor: all its parts commute with the Gram matrix."""
    product, add_product = _products(x)
    gram = product(x, x.mT)
    factor, spare, total = (torch.empty_like(gram) for _ in range(3))
    for index, (a, b, c) in enumerate(triples):
        add_product(gram, gram, gram, beta=b, alpha=c, out=factor)
        factor.diagonal(dim1=-2, dim2=-1).add_(a)
        if index + 1 < len(triples):
            product(factor, gram, out=spare)
            product(spare, factor, out=gram)
        if index == 0:
            total, factor = factor, total
        else:
            product(factor, total, out=spare)
            total, spare = spare, total
    return product(total, x)


def plan_stacks(
    shapes: Sequence[tuple[int, int, int]],
    device: torch.device,
    *,
    elements: int | None = None,
    members: int = sys.maxsize,
) -> list[list[int]]:
    """Which tensors to orthogonalise together.

    Args:
        shapes: ``(slices, rows, columns)`` of each tensor.
        device: where they live.
        elements: most in one stack, but of a single tensor; ``STACK_ELEMENTS`` if ``None``.
        members: most in one stack.

    Returns:
        Lists of indices into ``shapes``, in order of first appearance. Members of one list have equal slices
        up to transposition; large matrices on a CPU stay alone.
    """
    elements = STACK_ELEMENTS if elements is None else elements
    stacks: list[list[int]] = []
    open_stack: dict[tuple[int, int], tuple[list[int], int]] = {}
    for index, (slices, rows, columns) in enumerate(shapes):
        small, large = sorted((rows, columns))
        size = slices * rows * columns
        stack, held = open_stack.get((small, large), ([], elements))
        full = held + size > elements or len(stack) == members
        if full or (device.type == "cpu" and small >= STACK_ROWS):
            stack, held = [], 0
            stacks.append(stack)
        stack.append(index)
        open_stack[small, large] = (stack, held + size)
    return stacks


def polar_factors(
    matrices: Sequence[Tensor],
    *,
    steps: int = 5,
    coefficients: Coefficients = "polar-express",
    dtype: torch.dtype | None = None,
    eps: float = 0.0,
) -> list[Tensor]:
    """Polar factors of tensors whose slices are equal up to transposition, computed as one stack.

    Args:
        matrices: each ``(rows, columns)`` or ``(slices, rows, columns)``, grouped by :func:`plan_stacks`.
        steps, coefficients, dtype, eps: as in :func:`newton_schulz`.

    Returns:
        One contiguous tensor per input, of its shape, in ``dtype``.

    Raises:
        ValueError: if the slices do not fit together.
    """
    sides = {tuple(sorted(matrix.shape[-2:])) for matrix in matrices}
    if len(sides) > 1:
        raise ValueError(f"one stack holds slices of one shape up to transposition, not {sorted(sides)}")

    def iterate(x: Tensor) -> Tensor:
        return newton_schulz(x, steps=steps, coefficients=coefficients, dtype=dtype, eps=eps)

    # A small matrix on a CPU takes the way of a stack, however many are in it: in a thread of its own, its
    # bits are then the same whatever it is stacked with, so wherever the matrices of a model are shared out.
    small = matrices[0].device.type == "cpu" and min(matrices[0].shape[-2:]) < STACK_ROWS
    if len(matrices) == 1 and not small:
        return [iterate(matrices[0]).contiguous()]
    parts = []
    for matrix in matrices:
        part = matrix if matrix.ndim == 3 else matrix.unsqueeze(0)
        parts.append(part.mT if part.shape[-2] > part.shape[-1] else part)
    factors = torch.split(iterate(torch.cat(parts)), [part.shape[0] for part in parts])
    results = []
    for matrix, factor in zip(matrices, factors, strict=True):
        factor = factor.mT if matrix.shape[-2] > matrix.shape[-1] else factor
        results.append(factor.reshape(matrix.shape).contiguous())
    return results
