"""The tensors of a model that a script of the user brings, as a run file lists them.

One text a tensor, ``"layers.0.weight matrix 64x32"``: its name, its role and its shape, in the order in which
the model has registered them. From these, nodes and coordinator derive what travels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

OWN: Final = "own"  # as [model] name
ROLES: Final = ("matrix", "embedding", "vector")
SCALAR: Final = "scalar"


class ModelTensor(NamedTuple):
    """A trainable tensor: its name, its role (see :mod:`optim.roles`) and its shape."""

    name: str
    role: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} {self.role} {'x'.join(map(str, self.shape)) or SCALAR}"

    @classmethod
    def parse(cls, text: str) -> ModelTensor:
        """Read what ``str()`` has written.

        Raises:
            ValueError: it is something else; says what.
        """
        name, role, sizes = [*text.rsplit(" ", 2), "", ""][:3]
        numbers = [] if sizes == SCALAR else sizes.split("x")
        if not name.strip() or not all(number.isascii() and number.isdigit() for number in numbers):
            raise ValueError(f"{text!r} is not a name, a role and a shape such as 'fc.weight matrix 64x32'")
        if role not in ROLES:
            raise ValueError(f"{text!r}: a role is one of {', '.join(ROLES)}, not {role!r}")
        shape = tuple(map(int, numbers))
        if any(size < 1 for size in shape) or (len(shape) < 2 and role != "vector"):
            raise ValueError(f"{text!r}: no {role} has the shape {sizes}")
        return cls(name, role, shape)


def parse_all(texts: Iterable[str]) -> Iterator[ModelTensor]:
    """Read the texts of a model; each name is there once.

    Raises:
        ValueError: one is something else, or is there twice.
    """
    seen: set[str] = set()
    for text in texts:
        tensor = ModelTensor.parse(text)
        if tensor.name in seen:
            raise ValueError(f"{tensor.name!r} is listed twice")
        seen.add(tensor.name)
        yield tensor
