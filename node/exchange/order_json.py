"""Orders as JSON: what the leader of an island passes on to its other ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any, Final

from node.exchange.base import DonateOrder, LoadOrder, Order, ReplayOrder, RoundOrder, StopOrder

MAX_ORDER_BYTES: Final = 1 << 20

_KINDS: Final[dict[str, type[Order]]] = {
    "round": RoundOrder,
    "donate": DonateOrder,
    "load": LoadOrder,
    "replay": ReplayOrder,
    "stop": StopOrder,
}
_CHECKS: Final[dict[str, Callable[[Any], bool]]] = {  # by annotation
    "int": lambda value: type(value) is int and 0 <= value < 1 << 64,
    "bool": lambda value: type(value) is bool,
    "str": lambda value: type(value) is str,
    "tuple[str, ...]": lambda value: type(value) is list and all(type(entry) is str for entry in value),
}


def order_to_json(order: Order) -> str:
    """The text of an order."""
    (kind,) = (name for name, order_type in _KINDS.items() if type(order) is order_type)
    return json.dumps({"kind": kind, **asdict(order)}, separators=(",", ":"))


def order_from_json(text: str | bytes) -> Order:
    """Parse what :func:`order_to_json` wrote.

    Raises:
        ValueError: anything else; the text says what.
    """
    if len(text) > MAX_ORDER_BYTES:
        raise ValueError(f"an order has at most {MAX_ORDER_BYTES} bytes, this one {len(text)}")
    try:
        values: Any = json.loads(text)
    except RecursionError:
        raise ValueError("an order is not nested so deeply") from None
    named = values.get("kind") if isinstance(values, dict) else None
    if not isinstance(named, str) or named not in _KINDS:
        raise ValueError(f"this is no order: {str(text[:80])!r}")
    kind = values.pop("kind")
    order_type = _KINDS[kind]
    wanted = {field.name: str(field.type) for field in fields(order_type)}
    if values.keys() != wanted.keys():
        raise ValueError(f"an order of kind {kind} has the fields {sorted(wanted)}, not {sorted(values)}")
    for name, annotation in wanted.items():
        if not _CHECKS[annotation](values[name]):
            raise ValueError(f"{name} of an order must be {annotation}, not {values[name]!r}")
    build: Callable[..., Order] = order_type
    return build(**{name: tuple(v) if type(v) is list else v for name, v in values.items()})
