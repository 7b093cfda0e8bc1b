"""Links with names, in a TOML file: which interface each one is, and what it lets through."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from deploy.links.commands import Run, ShapingError
from deploy.links.interface import Interface, find, find_by_subnet
from deploy.links.shape import Shape

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DIRECTIONS: Final = ("out", "in", "both")
_KEYS: Final = ("interface", "subnet", "netns", "direction", "rate", "delay", "jitter", "loss")


@dataclass(frozen=True)
class Link:
    """An interface, and the shape that it shall have in the named direction: ``out``, ``in`` or ``both``."""

    shape: Shape
    direction: str = "both"
    interface: str | None = None
    subnet: str | None = None
    netns: str | None = None

    def find(self, run: Run) -> Interface:
        """The interface on this machine.

        Raises:
            ShapingError: it is not there, or none is named.
        """
        if (self.interface is None) == (self.subnet is None):
            raise ShapingError(
                "name the one interface to shape: --interface NAME, or --subnet 10.90.0.0/24 where names "
                "vary; 'ip -brief address' lists them"
            )
        if self.subnet is not None:
            return find_by_subnet(self.subnet, run, self.netns)
        assert self.interface is not None
        if self.interface == "all":
            raise ShapingError("there is no shaping of all interfaces: name each one that shall be shaped")
        return find(self.interface, run, self.netns)

    def shapes(self, before: tuple[Shape, Shape] | None = None) -> tuple[Shape | None, Shape | None]:
        """Of what goes out and what comes in; the direction that is not named stays as it was ``before``."""
        out, into = before or (None, None)
        return self.shape if self.direction != "in" else out, self.shape if self.direction != "out" else into


def make(values: dict[str, str], what: str) -> Link:
    """A link from texts, as they are given on the command line or in a file.

    Raises:
        ShapingError: a value that no link has, or nothing to set.
    """
    direction = values.get("direction") or "both"
    if direction not in DIRECTIONS:
        raise ShapingError(f"{what}: the direction is {direction!r}; it may be {', '.join(DIRECTIONS)}")
    try:
        shape = Shape.parse(**{key: values.get(key) or "" for key in ("rate", "delay", "jitter", "loss")})
    except ValueError as error:
        raise ShapingError(f"{what}: {error}") from None
    if not shape:
        raise ShapingError(f"{what}: nothing to set; give a rate, a delay or a loss, as in --rate 100mbit")
    where = {key: values.get(key) or None for key in ("interface", "subnet", "netns")}
    return Link(shape, direction, **where)


def load(path: Path) -> dict[str, Link]:
    """The links of a file, one table each: ``[site-a]``, ``interface = "eth1"``, ``rate = "1gbit"``.

    Raises:
        ShapingError: not TOML, an unknown key, or a value that no link has; the text says where.
    """
    try:
        tables: dict[str, Any] = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ShapingError(f"{path}: no such file; --links names the file of named links") from None
    except (ValueError, OSError) as error:
        raise ShapingError(f"{path}: {error}") from None
    links = {}
    for name, values in tables.items():
        where = f"{path}, [{name}]"
        if not isinstance(values, dict):
            raise ShapingError(
                f"{path}: {name!r} is not a table; write [NAME] and the link's values below it"
            )
        for key, value in values.items():
            if key not in _KEYS:
                raise ShapingError(f"{where}: unknown key {key!r}; the keys are {', '.join(_KEYS)}")
            if not isinstance(value, str):
                raise ShapingError(f'{where}: {key} must be a text with its unit, as in rate = "100mbit"')
        links[name] = make(values, where)
    return links


def choose(path: Path, names: list[str]) -> list[Link]:
    """The named links of a file.

    Raises:
        ShapingError: as :func:`load`, or a name that the file lacks.
    """
    links = load(path)
    missing = [name for name in names if name not in links]
    if missing:
        raise ShapingError(f"{path} has no link {', '.join(missing)}; it has {', '.join(links) or 'none'}")
    return [links[name] for name in names]
