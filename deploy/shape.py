"""A decoder for a number of parameters: what `atoll plan` counts with where no model is named."""

from __future__ import annotations

import math
from typing import Final

from deploy.errors import UserError
from node.shapes import default_ff
from protos.sections import ModelConfig
from protos.units import format_count

LARGE: Final = 20_000_000  # parameters from which on the tokens are those of a tokenizer
TOKENS: Final = 32_768  # of such a tokenizer
BYTES: Final = 256
LARGEST: Final = 10**13
_WIDTH_PER_LAYER: Final = 96  # d_model / layers of the usual decoders, within a factor of 2


def parameters(d_model: int, layers: int, vocab: int) -> int:
    """Parameters of the core's decoder with a tied embedding."""
    layer = 4 * d_model**2 + 3 * d_model * default_ff(d_model) + 2 * d_model
    return vocab * d_model + layers * layer + d_model


def shape_for(count: int, vocab: int | None = None) -> ModelConfig:
    """The decoder nearest to ``count`` parameters with a usual ratio of width to depth.

    Args:
        count: parameters, the embedding included.
        vocab: token ids; 32,768 from 20 million parameters on, else 256, where ``None``.

    Raises:
        UserError: so few or so many parameters that no usual decoder has them.
    """
    ids = (TOKENS if count >= LARGE else BYTES) if vocab is None else vocab
    smallest = parameters(16, 1, ids)
    if not smallest <= count <= LARGEST:
        raise UserError(
            f"no usual decoder with {ids:,} token ids has {count:,} parameters; "
            f"give from {format_count(smallest)} to {format_count(LARGEST)}"
        )
    _, d_model, layers = min(_candidates(count, ids))
    width = 128 if d_model % 128 == 0 and d_model >= 1024 else (64 if d_model % 64 == 0 else 16)
    return ModelConfig(d_model=d_model, layers=layers, heads=d_model // width, context=64, vocab=ids)


def _candidates(count: int, vocab: int) -> list[tuple[float, int, int]]:
    """Widths and depths with their distance from what is wanted; a per cent of parameters weighs as much as a
    tenth of the ratio of width to depth."""
    found = []
    grid = 16 if count < LARGE else 64
    for d_model in range(grid, 65536, grid):
        left = count - vocab * d_model
        each = parameters(d_model, 2, vocab) - parameters(d_model, 1, vocab)
        for layers in {max(1, left // each), max(1, left // each + 1)}:
            size = abs(math.log(parameters(d_model, layers, vocab) / count))
            ratio = abs(math.log(d_model / layers / _WIDTH_PER_LAYER))
            found.append((100 * size + 10 * max(0.0, ratio - math.log(2)) + ratio, d_model, layers))
        if left < 0:
            break
    return found
