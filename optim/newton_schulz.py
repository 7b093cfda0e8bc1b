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
PLAIN_NORMS = (2.0**-30, 2.0**30)  # of which the squares neither overflow nor vanish


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
    headroom = _headroom(coefficients)
    if form == "gram" or (form == "auto" and _suits_gram(small, large, steps, dtype)):
        return _by_gram([x], triples, headroom, eps)[0]
    tall = x.shape[-2] > x.shape[-1]
    x = _iterate(_normalise(x.mT if tall else x, dtype, eps, headroom), triples)
    return x.mT if tall else x


def _headroom(coefficients: Coefficients) -> float:
    return POLAR_EXPRESS_HEADROOM if coefficients == "polar-express" else 1.0


def _suits_gram(small: int, large: int, steps: int, dtype: torch.dtype) -> bool:
    return dtype == torch.float32 and large >= 2 * small and steps <= GRAM_STEPS


def _normalise(x: Tensor, dtype: torch.dtype, eps: float, headroom: float) -> Tensor:
    """``x`` divided by ``headroom`` times its Frobenius norm, matrix by matrix."""
    if eps > 0.0:
        x = x.to(dtype)
        norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps)
    else:
        looks = x.device.type == "cpu" and x.dtype == dtype == torch.float32
        x = x if looks else _near_one(x).to(dtype)
        norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
        if looks and not _plain(norm):
            x = _near_one(x)
            norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    return x / _scale(norm, headroom)


def _scale(norm: Tensor, headroom: float) -> Tensor:
    """What matrices of such norms are divided by; those of zeros by anything but zero."""
    norm = torch.where(norm > 0, norm, torch.ones_like(norm))
    return norm * headroom if headroom != 1.0 else norm


def _near_one(x: Tensor) -> Tensor:
    """Every matrix times the power of two, which is exact, that brings its largest entry near 1: squares then
    neither overflow nor vanish."""
    largest = x.abs().amax(dim=(-2, -1), keepdim=True)
    _, exponent = torch.frexp(largest)
    return x * torch.ldexp(torch.ones_like(largest), -exponent.clamp(-120, 120))


def _plain(norms: Tensor) -> bool:
    """Whether matrices of these norms need no :func:`_near_one`, which changes no bit of the result then. Off
    the CPU such a look costs more than it saves."""
    low, high = torch.aminmax(norms)
    return low.item() >= PLAIN_NORMS[0] and high.item() <= PLAIN_NORMS[1]


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


def _by_gram(xs: Sequence[Tensor], triples: Sequence[Triple], headroom: float, eps: float) -> list[Tensor]:
    """The same polynomial in fp32, accumulated as an ``m x m`` factor: all its parts commute with the Gram
    matrix. Only that one is scaled, and its trace is the squared norm: the matrices are read twice, as they
    are.

    ``xs`` is one matrix, or stacks of one shape up to transposition; so are the results.
    """
    xs = [x.to(torch.float32) for x in xs]
    if eps > 0.0:
        xs = [_normalise(x, torch.float32, eps, headroom) for x in xs]
        return _times(_factor(_grams(xs), triples), xs)
    looks = xs[0].device.type == "cpu"
    xs = xs if looks else [_near_one(x) for x in xs]
    gram = _grams(xs)
    norm = _root_of_trace(gram)
    if looks and not _plain(norm):
        xs = [_near_one(x) for x in xs]
        gram = _grams(xs)
        norm = _root_of_trace(gram)
    norm = _scale(norm, headroom)
    return _times(_factor(gram.div_(norm.square()), triples).div_(norm), xs)


def _grams(xs: Sequence[Tensor]) -> Tensor:
    """The Gram matrices of the short sides of all slices."""
    product, _ = _products(xs[0])
    small = min(xs[0].shape[-2:])
    gram = xs[0].new_empty(*([sum(len(x) for x in xs)] if xs[0].ndim == 3 else []), small, small)
    for x, part in zip(xs, _parts(gram, xs), strict=True):
        tall = x.shape[-2] > x.shape[-1]
        product(*((x.mT, x) if tall else (x, x.mT)), out=part)
    return gram


def _times(factor: Tensor, xs: Sequence[Tensor]) -> list[Tensor]:
    """Every slice, along its short side, times its factor."""
    product, _ = _products(factor)
    return [
        product(x, part) if x.shape[-2] > x.shape[-1] else product(part, x)
        for x, part in zip(xs, _parts(factor, xs), strict=True)
    ]


def _parts(factor: Tensor, xs: Sequence[Tensor]) -> Sequence[Tensor]:
    return [factor] if len(xs) == 1 else torch.split(factor, [len(x) for x in xs])


def _root_of_trace(gram: Tensor) -> Tensor:
    return gram.diagonal(dim1=-2, dim2=-1).sum(-1).sqrt()[..., None, None]


def _factor(gram: Tensor, triples: Sequence[Triple]) -> Tensor:
    """What all iterations together multiply by; ``gram`` is overwritten."""
    product, add_product = _products(gram)
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
    return total


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
    few, many = sorted(matrices[0].shape[-2:])
    device = matrices[0].device
    small = device.type == "cpu" and few < STACK_ROWS
    if len(matrices) == 1 and not small:
        return [iterate(matrices[0]).contiguous()]
    parts = [matrix if matrix.ndim == 3 else matrix.unsqueeze(0) for matrix in matrices]
    precision = default_dtype(device) if dtype is None else dtype
    if small and few > 0 and steps > 0 and _suits_gram(few, many, steps, precision):
        factors = _by_gram(parts, iteration_triples(coefficients, steps), _headroom(coefficients), eps)
        return [factor.view(matrix.shape) for matrix, factor in zip(matrices, factors, strict=True)]
    parts = [part.mT if part.shape[-2] > part.shape[-1] else part for part in parts]
    results = []
    for matrix, factor in zip(
        matrices, torch.split(iterate(torch.cat(parts)), [len(p) for p in parts]), strict=True
    ):
        factor = factor.mT if matrix.shape[-2] > matrix.shape[-1] else factor
        results.append(factor.reshape(matrix.shape).contiguous())
    return results
