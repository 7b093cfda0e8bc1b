"""The topology map as a drawing: where nodes and links are, how wide, and in which words. Pure."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Final

from coordinator.dashboard.snapshot import COORDINATOR, LinkView, NodeView, Snapshot
from coordinator.dashboard.words import percent, rate

CARDS: Final = 10  # nodes that are drawn as cards; more of them stand as dots on a ring
LABELS: Final = 120  # nodes beyond which dots have no label
WIDTH: Final = 880.0
HEIGHT: Final = 560.0
RING_HEIGHT: Final = 820.0
CARD: Final = (156.0, 52.0)
STROKES: Final = (1.25, 5.0)  # of an idle link, and of the fastest one
LITTLE: Final = 10_000.0  # bytes per second, which are drawn thin whatever else there is
NAMED_LINKS: Final = 15  # between nodes, beyond which they have no labels
DETOUR: Final = 160.0  # of a link's middle point around the coordinator
NAME: Final = 15  # characters
RING_NAME: Final = 14
RING_LABEL: Final = 186.0  # room for a name and a rate


@dataclass(frozen=True)
class Mark:
    """A node, or the coordinator: a card of a size, or a dot; ``text`` is turned by ``angle`` degrees."""

    id: str
    x: float
    y: float
    shape: str  # "card", "dot" or "hub"
    state: str
    text: str
    detail: str
    title: str
    angle: float = 0.0
    anchor: str = "middle"
    reduces: bool = False


@dataclass(frozen=True)
class Line:
    """A link as an SVG path; ``label`` stands at ``x``, ``y``."""

    id: str
    path: str
    kind: str
    width: float
    moving: bool
    title: str
    label: str
    x: float
    y: float


@dataclass(frozen=True)
class Scene:
    """A drawing of ``width`` by ``height``."""

    width: float
    height: float
    marks: tuple[Mark, ...]
    lines: tuple[Line, ...]

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def scene(snapshot: Snapshot) -> Scene:
    """The map of a run: the coordinator in the middle, the present nodes around it."""
    nodes = [node for node in snapshot.nodes if node.state != "left"]
    compact = len(nodes) > CARDS
    height = RING_HEIGHT if compact else HEIGHT
    center = (WIDTH / 2, height / 2)
    places = {COORDINATOR: center} | {
        node.node: _place(index, len(nodes), center, compact) for index, node in enumerate(nodes)
    }
    links = _merged(snapshot.links)
    named = not compact and sum(link.target != COORDINATOR for link, _, _ in links) <= NAMED_LINKS
    fastest = max([LITTLE, *(up + down for _, up, down in links)])
    lines = [
        _line(link, up, down, places, fastest, compact, named, center)
        for link, up, down in links
        if link.source in places and link.target in places
    ]
    marks = [_hub(snapshot, center)]
    for index, node in enumerate(nodes):
        marks.append(_dot(node, index, len(nodes), places) if compact else _card(node, places))
    return Scene(WIDTH, height, tuple(marks), tuple(lines))


def _angle(index: int, count: int) -> float:
    first = {2: -math.pi, 4: -3 * math.pi / 4}.get(count, -math.pi / 2)
    return 2 * math.pi * index / count + first


def _place(index: int, count: int, center: tuple[float, float], compact: bool) -> tuple[float, float]:
    if compact:
        radius_x = radius_y = RING_HEIGHT / 2 - RING_LABEL
    else:
        radius_x, radius_y = WIDTH / 2 - CARD[0] / 2 - 14, HEIGHT / 2 - CARD[1] / 2 - 14
    x, y = math.cos(_angle(index, count)), math.sin(_angle(index, count))
    if not compact:  # cards fill the drawing whatever their number
        x = _stretched(x, [math.cos(_angle(i, count)) for i in range(count)])
        y = _stretched(y, [math.sin(_angle(i, count)) for i in range(count)])
    return (round(center[0] + radius_x * x, 1), round(center[1] + radius_y * y, 1))


def _stretched(value: float, all_values: list[float]) -> float:
    """``value`` where the furthest on its side is at 1."""
    furthest = max(abs(other) for other in all_values if other * value >= 0)
    return value / furthest if furthest > 1e-9 else 0.0


def _merged(links: tuple[LinkView, ...]) -> list[tuple[LinkView, float, float]]:
    """One line between two nodes, whatever travels on it in whose name; rates from and to its source."""
    found: dict[tuple[str, str], tuple[LinkView, float, float]] = {}
    for link in links:
        back = found.get((link.target, link.source))
        if back is not None:
            first, up, down = back
            found[(link.target, link.source)] = (first, up + link.rate_down, down + link.rate_up)
        else:
            found[(link.source, link.target)] = (link, link.rate_up, link.rate_down)
    return list(found.values())


def _line(
    link: LinkView,
    up: float,
    down: float,
    places: dict[str, tuple[float, float]],
    fastest: float,
    compact: bool,
    named: bool,
    center: tuple[float, float],
) -> Line:
    (x1, y1), (x2, y2) = places[link.source], places[link.target]
    to_hub = link.target == COORDINATOR
    share = math.sqrt((up + down) / fastest)
    if to_hub:
        path = f"M{x1} {y1}L{x2} {y2}"
        x, y = x1 + (x2 - x1) * 0.56, y1 + (y2 - y1) * 0.56
    else:
        aside = _aside((x1, y1), (x2, y2), center, compact)
        path = f"M{x1} {y1}Q{aside[0]:.1f} {aside[1]:.1f} {x2} {y2}"
        x, y = (x1 + 2 * aside[0] + x2) / 4, (y1 + 2 * aside[1] + y2) / 4
    between = "measured" if to_hub else "by its slices"
    way = "control" if to_hub and link.way != COORDINATOR else link.way
    title = (
        f"{link.source} – {link.target} ({way}): {rate(up)} from {link.source}, {rate(down)} to it, {between}"
    )
    label = ""
    if to_hub and not compact:
        label = f"↑ {rate(up)}  ↓ {rate(down)}"
    elif named and up + down >= 1:
        label = rate(up + down)
    width = STROKES[0] + (STROKES[1] - STROKES[0]) * share
    return Line(
        id=f"{link.source}>{link.target}",
        path=path,
        kind="hub" if to_hub else link.way,
        width=round(width, 2),
        moving=up + down >= 1,
        title=title,
        label=label,
        x=round(x, 1),
        y=round(y, 1),
    )


def _aside(
    start: tuple[float, float], end: tuple[float, float], center: tuple[float, float], compact: bool
) -> tuple[float, float]:
    """The point towards which a link between two nodes is bent: outwards, or around the coordinator."""
    x, y = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
    dx, dy = x - center[0], y - center[1]
    length = math.hypot(dx, dy)
    if length > 60:
        bend = 32 if compact else 16
        return x + dx / length * bend, y + dy / length * bend
    along = math.hypot(end[0] - start[0], end[1] - start[1]) or 1.0
    across = (-(end[1] - start[1]) / along, (end[0] - start[0]) / along)
    return x + across[0] * DETOUR, y + across[1] * DETOUR


def _hub(snapshot: Snapshot, center: tuple[float, float]) -> Mark:
    traffic = f"↓ {rate(snapshot.rate_in)}  ↑ {rate(snapshot.rate_out)}"
    return Mark(
        id=COORDINATOR,
        x=center[0],
        y=center[1],
        shape="hub",
        state=snapshot.phase,
        text="coordinator",
        detail=traffic,
        title=f"The coordinator receives {rate(snapshot.rate_in)} and sends {rate(snapshot.rate_out)}.",
    )


def _title(node: NodeView) -> str:
    text = f"{node.node} ({node.name}), {node.state}, ↑ {rate(node.rate_up)}, ↓ {rate(node.rate_down)}"
    return f"{text}, reduces {percent(node.reduces)} of a round" if node.reduces else text


def _card(node: NodeView, places: dict[str, tuple[float, float]]) -> Mark:
    x, y = places[node.node]
    detail = f"{node.node} · {node.state}"
    if node.reduces:
        detail = f"{node.node} · reduces {100 * node.reduces:.0f} %"
    return Mark(
        id=node.node,
        x=x,
        y=y,
        shape="card",
        state=node.state,
        text=_short(node.name, NAME) or node.node,
        detail=detail,
        title=_title(node),
        reduces=node.reduces > 0,
    )


def _dot(node: NodeView, index: int, count: int, places: dict[str, tuple[float, float]]) -> Mark:
    x, y = places[node.node]
    angle = math.degrees(_angle(index, count))
    left = math.cos(math.radians(angle)) < -1e-9
    labelled = count <= LABELS
    return Mark(
        id=node.node,
        x=x,
        y=y,
        shape="dot",
        state=node.state,
        text=(_short(node.name, RING_NAME) or node.node) if labelled else "",
        detail=rate(node.rate_up + node.rate_down) if labelled and node.rate_up + node.rate_down > 0 else "",
        title=_title(node),
        angle=round(angle + 180 if left else angle, 2),
        anchor="end" if left else "start",
        reduces=node.reduces > 0,
    )


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
