"""Which tokens train and which validate: every 20th block is held out.

Both sides are read as one stream each, their blocks back to back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

BLOCK = 8192
PERIOD = 20
HELD_OUT = 10
RULE = "block b validates if b % 20 == 10; blocks of 8192 tokens, of a text below 11 blocks its 11th part"


@dataclass(frozen=True)
class Split:
    """The split of ``tokens`` tokens (at least 11) into a training and a validation stream.

    Blocks have 8,192 tokens; a text that has no 11th block of that size is cut into 11.
    """

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens <= HELD_OUT:
            raise ValueError(f"{self.tokens} tokens cannot be split; it takes at least {HELD_OUT + 1}")

    @property
    def block(self) -> int:
        """Tokens in a block."""
        return min(BLOCK, self.tokens // (HELD_OUT + 1))

    @property
    def validation_tokens(self) -> int:
        """Length of the validation stream."""
        periods, rest = divmod(self.tokens, PERIOD * self.block)
        return periods * self.block + min(max(rest - HELD_OUT * self.block, 0), self.block)

    @property
    def train_tokens(self) -> int:
        """Length of the training stream."""
        return self.tokens - self.validation_tokens

    def train_ranges(self, start: int, length: int) -> Iterator[tuple[int, int]]:
        """Token ranges (first, end) that positions ``start`` … ``start + length - 1`` of training have."""
        while length > 0:
            period, within = divmod(start, (PERIOD - 1) * self.block)
            first = period * PERIOD * self.block + within
            held_out = (period * PERIOD + HELD_OUT) * self.block
            if first >= held_out:
                first += self.block
                held_out += PERIOD * self.block
            run = min(length, held_out - first)
            yield first, first + run
            start, length = start + run, length - run

    def validation_ranges(self, start: int, length: int) -> Iterator[tuple[int, int]]:
        """The same for the validation stream."""
        while length > 0:
            index, within = divmod(start, self.block)
            first = (index * PERIOD + HELD_OUT) * self.block + within
            run = min(length, self.block - within)
            yield first, first + run
            start, length = start + run, length - run
