"""Codecs by name: how the entries of a bucket become bytes, and exactly how many bytes that is.

Only names and sizes: node, coordinator and planner agree on them without numerics (``optim.codecs`` has
those). A name is a kind with an optional whole number, ``"int8"``, ``"int4:64"``, ``"lowrank:8"``, or a low
rank and what its residual is encoded with, ``"lowrank:8+1bit"``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["fp32", "bf16", "int8", "int4", "2bit", "ternary", "1bit", "1bit-row", "lowrank"]

BLOCK: Final = 256  # elements that share a scale in int8 and int4, where the name says nothing else
LINE_ELEMENTS: Final = 512  # packed signs are padded to this many elements: 64 bytes
LINE_BYTES: Final = 64
SCALE_BYTES: Final = 4  # a scale is a little-endian fp32
FACTOR_BYTES: Final = 2  # an entry of a low-rank factor is a little-endian int16
TRITS: Final = 5  # ternary entries in a byte: 3^5 = 243

_SIMPLE: Final = ("fp32", "bf16", "2bit", "ternary", "1bit", "1bit-row")
_NAME: Final = re.compile(
    r"(?P<kind>fp32|bf16|int8|int4|2bit|ternary|1bit-row|1bit|lowrank)(?::(?P<number>\d{1,5}))?"
)


class CodecError(ValueError):
    """A codec name that means nothing, or a codec that a shape cannot have; the text says what to write."""


def round_up(value: int, multiple: int) -> int:
    """The next multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns in which a codec sees a tensor: the first dimension by all others, a vector as one
    row."""
    if len(shape) < 2:
        return 1, shape[0] if shape else 1
    columns = 1
    for size in shape[1:]:
        columns *= size
    return shape[0], columns


@dataclass(frozen=True)
class CodecSpec:
    """A parsed codec name.

    Attributes:
        kind: the family.
        number: block length of ``int8`` and ``int4``, rank of ``lowrank``; 0 elsewhere.
        residual: what encodes the rest that a low rank leaves, or ``None``.
    """

    kind: Kind
    number: int = 0
    residual: CodecSpec | None = None

    @classmethod
    def parse(cls, name: str) -> CodecSpec:
        """Parse a codec name; raises :class:`CodecError` with the names there are."""
        head, plus, tail = name.partition("+")
        match = _NAME.fullmatch(head)
        if match is None:
            raise CodecError(
                f"unknown codec {name!r}: use fp32, bf16, int8, int4, 2bit, ternary, 1bit, 1bit-row, "
                "lowrank:RANK or lowrank:RANK+CODEC (int8:64 and int4:64 choose the block length)"
            )
        kind, number = match["kind"], int(match["number"] or 0)
        if kind in _SIMPLE and match["number"]:
            raise CodecError(f"codec {name!r}: {kind} takes no number")
        if kind == "lowrank" and number < 1:
            raise CodecError(f"codec {name!r}: write the rank, at least 1, as in lowrank:8")
        if kind in ("int8", "int4"):
            number = number or BLOCK
            if number < 2 or number % 2:
                raise CodecError(f"codec {name!r}: the block length must be even and at least 2")
        residual = None
        if plus:
            if kind != "lowrank":
                raise CodecError(f"codec {name!r}: only lowrank leaves a residual, as in lowrank:8+1bit")
            residual = cls.parse(tail)
            if residual.kind == "lowrank":
                raise CodecError(f"codec {name!r}: the residual of a low rank needs a codec of another kind")
        return cls(kind, number, residual)  # type: ignore[arg-type]

    def __str__(self) -> str:
        number = (
            f":{self.number}" if self.number and not (self.number == BLOCK and self.kind != "lowrank") else ""
        )
        return f"{self.kind}{number}" + (f"+{self.residual}" if self.residual else "")

    @property
    def exact(self) -> bool:
        """Whether decoding gives back the very bits that were encoded."""
        return self.kind == "fp32"

    def rank(self, shape: tuple[int, ...]) -> int:
        """Rank of ``lowrank`` for a tensor: at most its shorter side."""
        return min(self.number, *matrix_shape(shape))

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of an encoded tensor, without the padding of its bucket.

        ========== ==========================================================================
        codec      bytes for m x n
        ========== ==========================================================================
        fp32       4 mn
        bf16       2 mn
        int8:B     ceil(mn / B) scales of 4, then mn
        int4:B     ceil(mn / B) scales of 4, then ceil(mn / 2)
        2bit       m scales of 4, then ceil(mn / 4)
        ternary    m scales of 4, then ceil(mn / 5)
        1bit       packed signs (64 for each 512 begun entries), then a scale of 4
        1bit-row   packed signs, then m scales of 4
        lowrank:R  2 scales of 4, then 2 r (m + n) with r = min(R, m, n); then its residual
        ========== ==========================================================================
        """
        rows, columns = matrix_shape(shape)
        count = rows * columns
        signs = round_up(count, LINE_ELEMENTS) // 8
        if self.kind == "fp32":
            return 4 * count
        if self.kind == "bf16":
            return 2 * count
        if self.kind == "int8":
            return SCALE_BYTES * -(-count // self.number) + count
        if self.kind == "int4":
            return SCALE_BYTES * -(-count // self.number) + -(-count // 2)
        if self.kind == "2bit":
            return SCALE_BYTES * rows + -(-count // 4)
        if self.kind == "ternary":
            return SCALE_BYTES * rows + -(-count // TRITS)
        if self.kind == "1bit":
            return signs + SCALE_BYTES
        if self.kind == "1bit-row":
            return signs + SCALE_BYTES * rows
        factors = 2 * SCALE_BYTES + FACTOR_BYTES * self.rank(shape) * (rows + columns)
        return factors + (self.residual.nbytes(shape) if self.residual else 0)
