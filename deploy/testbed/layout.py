"""Who is where in a test bed: sites, their nodes and addresses, and the shape of each link. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from deploy.errors import UserError
from deploy.links.shape import Shape
from protos.units import parse_duration

COORDINATOR: Final = "coordinator"
OPERATOR: Final = "operator"  # where the bed itself looks at the run and probes the links from; never shaped
MOST_SITES: Final = 200
_NET: Final = "10.90"  # what all routers see
_INSIDE: Final = "10.91"  # behind a site's own translation of addresses
_NAME: Final = re.compile(r"[a-z][a-z0-9-]{0,13}")  # Linux gives an interface 15 characters


@dataclass(frozen=True)
class Addresses:
    """IPv4 addresses at the two ends of a link to the core: ``router`` is the core's.

    ``inside`` are those of a site behind NAT and of its gateway, of which the core knows nothing.
    """

    end: str
    router: str
    inside: tuple[str, str] | None = None

    @property
    def host(self) -> str:
        """Of whoever is at the end."""
        return self.end if self.inside is None else self.inside[0]


@dataclass(frozen=True)
class Link:
    """What joins a place to the core.

    Attributes:
        name: of the place, and of the core's interface.
        shape: of each of its two directions.
        nodes: that are there.
    """

    name: str
    addresses: Addresses
    shape: Shape
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layout:
    """All links of a test bed."""

    sites: tuple[Link, ...]
    coordinator: Link
    operator: Link

    @property
    def links(self) -> tuple[Link, ...]:
        """All of them."""
        return (*self.sites, self.coordinator, self.operator)

    @property
    def shaped(self) -> tuple[Link, ...]:
        """Those that can be shaped, cut and healed."""
        return (*self.sites, self.coordinator)

    @property
    def nodes(self) -> list[tuple[str, Link]]:
        """Every node with its site."""
        return [(node, site) for site in self.sites for node in site.nodes]

    def link(self, name: str) -> Link:
        """The link of that name.

        Raises:
            UserError: there is none.
        """
        for link in self.shaped:
            if link.name == name:
                return link
        raise UserError(f"no link {name!r}: there are {', '.join(link.name for link in self.shaped)}")


def site_names(count: int) -> list[str]:
    """``site-a``, ``site-b``, … ``site-z``, ``site-aa``, …"""
    return [f"site-{_letters(index)}" for index in range(count)]


def _letters(index: int) -> str:
    text = ""
    index += 1
    while index:
        index, rest = divmod(index - 1, 26)
        text = chr(ord("a") + rest) + text
    return text


def layout(
    sites: int,
    shape: Shape,
    *,
    nodes_per_site: int = 1,
    own: Mapping[str, Shape] | None = None,
    hub: Shape | None = None,
    nat: bool = False,
) -> Layout:
    """Lay out a test bed.

    Args:
        sites: how many.
        shape: of every site's link, each way.
        nodes_per_site: node processes of a site, which share its link.
        own: shapes of single sites instead.
        hub: of the coordinator's link; unlimited if None.
        nat: whether sites are behind a translation of addresses.

    Raises:
        UserError: too many sites, or ``own`` names one that is not there.
    """
    if not 1 <= sites <= MOST_SITES:
        raise UserError(f"--sites {sites}: from 1 to {MOST_SITES}")
    names, own = site_names(sites), own or {}
    for name in own:
        if name not in names:
            raise UserError(f"--site {name}: there are {', '.join(names)}")
    placed = tuple(
        Link(name, _addresses(index, nat), own.get(name, shape), _nodes(name, nodes_per_site))
        for index, name in enumerate(names, 1)
    )
    return Layout(
        placed,
        Link(COORDINATOR, _addresses(0, False), hub or Shape()),
        Link(OPERATOR, _addresses(MOST_SITES + 1, False), Shape()),
    )


def _nodes(site: str, count: int) -> tuple[str, ...]:
    return (site,) if count == 1 else tuple(f"{site}-{index}" for index in range(1, count + 1))


def _addresses(index: int, nat: bool) -> Addresses:
    inside = (f"{_INSIDE}.{index}.2", f"{_INSIDE}.{index}.1") if nat else None
    return Addresses(f"{_NET}.{index}.2", f"{_NET}.{index}.1", inside)


def parse_site(text: str, base: Shape) -> tuple[str, Shape]:
    """Read ``site-b=100mbit[,delay=50ms][,jitter=5ms][,loss=1%]``; what is left out is as in ``base``.

    Raises:
        UserError: not of that form.
    """
    name, equals, rest = text.partition("=")
    parts = [part.strip() for part in rest.split(",")]
    values = {"rate": ""}
    for index, part in enumerate(parts):
        key, given, value = part.partition("=")
        if not given and index == 0:
            values["rate"] = part
        elif given and key in ("rate", "delay", "jitter", "loss"):
            values[key] = value
        else:
            equals = ""
    if not equals or not _NAME.fullmatch(name):
        raise UserError(
            f"--site {text}: write for example site-b=100mbit or site-b=100mbit,delay=50ms,loss=1%"
        )
    return name, reshaped(base, values, f"--site {text}")


def parsed(values: Mapping[str, str], what: str) -> dict[str, Any]:
    """Those of rate, delay, jitter and loss that are given as texts, as a :class:`Shape` has them.

    Raises:
        UserError: one of them cannot be read; ``what`` is where it came from.
    """
    try:
        found: dict[str, Any] = {}
        for key, text in values.items():
            if text:
                # a jitter needs a delay, which another change may have set
                found[key] = (
                    parse_duration(text) if key == "jitter" else getattr(Shape.parse(**{key: text}), key)
                )
        return found
    except ValueError as error:
        raise UserError(f"{what}: {error}") from error


def reshaped(base: Shape, values: Mapping[str, str], what: str) -> Shape:
    """``base`` with those of rate, delay, jitter and loss that are given as texts; the rate ``unlimited`` is
    none.

    Raises:
        UserError: one of them cannot be read, or they do not go together; ``what`` is where they came from.
    """
    given = parsed(values, what)
    try:
        return replace(base, **given)
    except ValueError as error:
        raise UserError(f"{what}: {error}") from error


def as_json(shape: Shape) -> dict[str, float | int | None]:
    """A shape for programs: bits per second, seconds, share of 1."""
    return {"rate": shape.rate, "delay": shape.delay, "jitter": shape.jitter, "loss": shape.loss}
