"""Inputs for fuzzing: valid ones that have been damaged, and messages of the right kind with any values.

The generator is plain Python: it needs no instrumented build and runs wherever Atoll does.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

NUMBERS: Final = (0, 1, 2, 63, 64, 127, 128, 255, 256, 1000, 65535, 65536, (1 << 31) - 1, 1 << 31)
LARGE: Final = ((1 << 32) - 1, 1 << 32, 1 << 46, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
REALS: Final = (0.0, -1.0, 1.5, 1e300, float("nan"), float("inf"), float("-inf"))
WORDS: Final = ("", "node-0", "node-1", "run", "table", "float32", "\u202e", "\0", "../../x", "a" * 300, "ä")
MAX_INPUT: Final = 1 << 16
_FRAME: Final = struct.Struct("<H")  # length of one message in an input of several


def joined(messages: Sequence[bytes]) -> bytes:
    """Several messages as one input."""
    return b"".join(_FRAME.pack(len(message) & 0xFFFF) + message[:0xFFFF] for message in messages)


def split(data: bytes) -> list[bytes]:
    """The messages of an input; any bytes are some."""
    messages, place = [], 0
    while place + _FRAME.size <= len(data):
        (length,) = _FRAME.unpack_from(data, place)
        place += _FRAME.size
        messages.append(data[place : place + length])
        place += length
    return messages


class Mutator:
    """Damages inputs, reproducibly.

    Args:
        seeds: valid inputs.
        rng: all randomness.
        made: makes a fresh input instead of damaging one, now and then.
    """

    def __init__(
        self, seeds: Sequence[bytes], rng: random.Random, made: Callable[[random.Random], bytes] | None = None
    ) -> None:
        self._seeds, self._rng, self._made = list(seeds), rng, made
        self._ways = (
            *(self._flip, self._set, self._number, self._cut, self._insert, self._repeat, self._drop),
            self._splice,
        )

    def next(self) -> bytes:
        """The next input."""
        rng = self._rng
        chance = rng.random()
        if chance < 0.05:
            return rng.randbytes(rng.choice((0, 1, 15, 16, 17, 64, 300)))
        if self._made is not None and chance < 0.25:
            data = bytearray(self._made(rng))
        else:
            data = bytearray(rng.choice(self._seeds))
        for _ in range(rng.choice((0, 1, 1, 1, 2, 3, 8))):
            rng.choice(self._ways)(data)
        return bytes(data[:MAX_INPUT])

    def _place(self, data: bytearray) -> int:
        return (
            self._rng.randrange(len(data) + 1)
            if len(data) < 64 or self._rng.random() < 0.5
            else (
                self._rng.randrange(64)  # headers matter more than bodies
            )
        )

    def _flip(self, data: bytearray) -> None:
        if data:
            data[self._place(data) % len(data)] ^= 1 << self._rng.randrange(8)

    def _set(self, data: bytearray) -> None:
        if data:
            data[self._place(data) % len(data)] = self._rng.choice((0, 1, 127, 128, 254, 255))

    def _number(self, data: bytearray) -> None:
        width = self._rng.choice((1, 2, 4, 8))
        value = self._rng.choice(NUMBERS + LARGE) & ((1 << (8 * width)) - 1)
        place = self._place(data)
        data[place : place + width] = value.to_bytes(width, "little")

    def _cut(self, data: bytearray) -> None:
        del data[self._place(data) :]

    def _insert(self, data: bytearray) -> None:
        place = self._place(data)
        data[place:place] = self._rng.randbytes(self._rng.choice((1, 2, 8, 64)))

    def _repeat(self, data: bytearray) -> None:
        place = self._place(data)
        data[place:place] = data[place : place + self._rng.choice((1, 16, 64, 256))]

    def _drop(self, data: bytearray) -> None:
        place = self._place(data)
        del data[place : place + self._rng.choice((1, 2, 8, 64))]

    def _splice(self, data: bytearray) -> None:
        other = self._rng.choice(self._seeds)
        place = self._rng.randrange(len(other) + 1)
        data[self._place(data) :] = other[place:]


def any_message(kind: type[Message], rng: random.Random, depth: int = 3) -> Message:
    """A message whose fields are there or not, with any values of their types."""
    message = kind()
    _fill(message, rng, depth)
    return message


def _fill(message: Any, rng: random.Random, depth: int) -> None:
    for field in message.DESCRIPTOR.fields:
        if rng.random() < 0.3:
            continue
        nested = field.type == FieldDescriptor.TYPE_MESSAGE
        if nested and (depth == 0 or field.message_type.GetOptions().map_entry):
            continue
        if field.is_repeated:
            for _ in range(rng.choice((0, 1, 1, 2, 3, 17))):
                if nested:
                    _fill(getattr(message, field.name).add(), rng, depth - 1)
                else:
                    getattr(message, field.name).append(_value(field, rng))
        elif nested:
            part = getattr(message, field.name)
            part.SetInParent()
            _fill(part, rng, depth - 1)
        else:
            setattr(message, field.name, _value(field, rng))


def _value(field: FieldDescriptor, rng: random.Random) -> Any:
    kind = field.type
    if kind == FieldDescriptor.TYPE_STRING:
        return rng.choice(WORDS)
    if kind == FieldDescriptor.TYPE_BYTES:
        return rng.randbytes(rng.choice((0, 1, 16, 32, 200)))
    if kind == FieldDescriptor.TYPE_BOOL:
        return rng.random() < 0.5
    if kind in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return rng.choice(REALS)
    if kind == FieldDescriptor.TYPE_UINT32:
        return rng.choice(NUMBERS)
    return rng.choice(NUMBERS[:4] if rng.random() < 0.6 else NUMBERS + LARGE)
