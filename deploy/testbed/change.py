"""A change of a link while a run goes on, from another terminal or from a script: cut, healed, degraded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from deploy.errors import UserError
from deploy.links.shape import Shape
from deploy.testbed.layout import parsed, reshaped

SHAPES: Final = ("rate", "delay", "jitter", "loss")


@dataclass(frozen=True)
class State:
    """How a link is now: its shape each way, and whether anything passes at all."""

    shape: Shape
    up: bool = True

    @property
    def text(self) -> str:
        """In words."""
        return str(self.shape) if self.up else "cut"


@dataclass(frozen=True)
class Change:
    """What to do with a link. ``None`` and texts that are empty leave things as they are.

    Attributes:
        link: its name.
        up: False cuts it, True heals it.
        rate, delay, jitter, loss: as texts, both ways.
        reset: back to how the link was at the start, before the others are applied.
    """

    link: str
    up: bool | None = None
    rate: str = ""
    delay: str = ""
    jitter: str = ""
    loss: str = ""
    reset: bool = False

    def __post_init__(self) -> None:
        if self.up is None and not self.reset and not any(getattr(self, key) for key in SHAPES):
            raise UserError(
                f"nothing to do with {self.link}: give up, down, reset, rate, delay, jitter or loss"
            )
        parsed({key: getattr(self, key) for key in SHAPES}, self.link)  # what cannot be read is found at once

    def after(self, now: State, start: State) -> State:
        """The link's state after the change.

        Raises:
            UserError: a text that cannot be read.
        """
        base = start if self.reset else now
        texts = {key: str(getattr(self, key)) for key in SHAPES}
        state = replace(base, shape=reshaped(base.shape, texts, self.link))
        return state if self.up is None else replace(state, up=self.up)

    def to_json(self) -> dict[str, Any]:
        """What :meth:`from_json` reads."""
        values: dict[str, Any] = {key: getattr(self, key) for key in SHAPES if getattr(self, key)}
        if self.up is not None:
            values["up"] = self.up
        if self.reset:
            values["reset"] = True
        return {"link": self.link, **values}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Change:
        """Read a change: ``link`` and some of ``up``, ``down``, ``reset``, ``rate``, ``delay``, ``jitter``,
        ``loss``.

        Raises:
            UserError: a key that is unknown, or a value of another kind.
        """
        link = values.get("link")
        if not isinstance(link, str) or not link:
            raise UserError("a change needs link = and the name of a link, such as 'site-b'")
        given: dict[str, Any] = {}
        for key, value in values.items():
            if key == "link":
                continue
            if key in SHAPES:
                if not isinstance(value, str):
                    raise UserError(
                        f"{link}: {key} = {value!r} is no text; write for example {_EXAMPLES[key]!r}"
                    )
                given[key] = value
            elif key in ("up", "down", "reset"):
                if value is not True and not (key == "up" and value is False):
                    raise UserError(f"{link}: {key} = {value!r}; write {key} = true")
                if key == "reset":
                    given[key] = True
                elif "up" in given:
                    raise UserError(f"{link}: up and down at once")
                else:
                    given["up"] = (key == "up") == value
            else:
                raise UserError(
                    f"{link}: unknown key {key!r}; there are up, down, reset, {', '.join(SHAPES)}"
                )
        return cls(link, **given)


_EXAMPLES: Final = {"rate": "10mbit", "delay": "40ms", "jitter": "5ms", "loss": "1%"}
