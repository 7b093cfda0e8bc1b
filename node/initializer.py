"""Random initial weights that are the same bits on every machine.

Nodes build the model from the run's seed instead of downloading it, so the seed has to mean the same bits
everywhere. ``torch.randn`` does not give that: its CPU kernel is another one with AVX2 than without, below 16
elements than above, and on CUDA. Here normals come from NumPy's ziggurat in float64 (exact arithmetic but for
a rare tail) and are rounded to the parameter's dtype once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_CHUNK = 1 << 18  # elements drawn at a time: bounds the float64 scratch to 2 MiB


def stream(seed: int, name: str) -> np.random.Generator:
    """The random stream of the tensor ``name``: PCG64 keyed by ``seed`` (>= 0) and the name's bytes.

    A stream per name makes a tensor's values independent of the order in which tensors are initialised.
    Raises ``ValueError`` for a negative seed.
    """
    if seed < 0:
        raise ValueError(f"the seed is {seed}; a seed is an integer of at least 0")
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, *name.encode()])))


def _fill_(tensor: Tensor, draw: Callable[[int], np.ndarray]) -> Tensor:
    with torch.no_grad():
        flat = torch.empty(tensor.numel(), dtype=torch.float32)
        for start in range(0, flat.numel(), _CHUNK):
            part = flat[start : start + _CHUNK]
            part.copy_(torch.from_numpy(draw(part.numel())))
        tensor.copy_(flat.view(tensor.shape))
    return tensor


def fill_normal_(tensor: Tensor, rng: np.random.Generator, *, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """Fill ``tensor`` (any floating dtype, any device but meta) in place with normals; returns it."""
    return _fill_(tensor, lambda count: rng.standard_normal(count) * std + mean)


def fill_uniform_(tensor: Tensor, rng: np.random.Generator, *, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Fill ``tensor`` in place with uniforms of [low, high); returns it."""
    return _fill_(tensor, lambda count: rng.random(count) * (high - low) + low)


class PortableRandom(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves its base untyped
    """While active, every ``normal_`` and ``uniform_`` of real tensors draws from one seeded NumPy stream.

    For models whose initialisation is somebody else's code. Other random operations keep torch's generator;
    seed that one as well (``torch.random.fork_rng``) to make them repeatable on one kind of machine.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rng = stream(seed, "torch.nn.init")

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        aten = torch.ops.aten
        if func is aten.normal_.default and not args[0].is_meta:
            mean, std = _two(args, kwargs, ("mean", 0.0), ("std", 1.0))
            return fill_normal_(args[0], self._rng, mean=mean, std=std)
        if func is aten.uniform_.default and not args[0].is_meta:
            low, high = _two(args, kwargs, ("from", 0.0), ("to", 1.0))
            return fill_uniform_(args[0], self._rng, low=low, high=high)
        return func(*args, **kwargs)


def _two(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], first: tuple[str, float], second: tuple[str, float]
) -> tuple[float, float]:
    """Positional or keyword values of a random operation's two parameters, behind the tensor."""
    values = [
        float(args[place] if len(args) > place else kwargs.get(name, default))
        for place, (name, default) in enumerate((first, second), start=1)
    ]
    return values[0], values[1]
