"""A script: changes of links at given times or rounds, so that a run can be had again."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.errors import UserError
from deploy.testbed.change import Change
from protos.units import UnitError, parse_duration

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Action:
    """A change, and when: once ``round`` rounds are committed, or ``seconds`` after the first round began."""

    change: Change
    round: int | None = None
    seconds: float | None = None

    def due(self, rounds: int, seconds: float) -> bool:
        """Whether it is time, after so many rounds and seconds."""
        if self.round is not None:
            return rounds >= self.round
        return self.seconds is not None and seconds >= self.seconds


class Script:
    """Actions, which are done as their times come; those of the same time in their order."""

    def __init__(self, actions: Sequence[Action] = ()) -> None:
        self.left = list(actions)

    def due(self, rounds: int, seconds: float) -> list[Action]:
        """Those whose time has come since the last call."""
        now = [action for action in self.left if action.due(rounds, seconds)]
        self.left = [action for action in self.left if not action.due(rounds, seconds)]
        return now

    @classmethod
    def load(cls, path: Path, links: Sequence[str]) -> Script:
        """Read a script::

            [[action]]
            round = 8           # after 8 rounds; or at = "20s" after the first began
            link = "site-b"
            down = true         # or up, reset, rate = "10mbit", delay, jitter, loss

        Args:
            path: of the file.
            links: that there are.

        Raises:
            UserError: it cannot be read, or is no such script; the text names the action.
        """
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"the script {path} cannot be read: {error.strerror or error}") from error
        except ValueError as error:
            raise UserError(f"the script {path} is no TOML: {error}") from error
        actions = values.get("action")
        if set(values) != {"action"} or not isinstance(actions, list) or not actions:
            raise UserError(f"the script {path} has to consist of tables [[action]]")
        read = []
        for number, one in enumerate(actions, 1):
            try:
                read.append(_action(one, links))
            except (UserError, UnitError) as error:
                raise UserError(f"the script {path}, action {number}: {error}") from error
        return cls(read)


def _action(values: Any, links: Sequence[str]) -> Action:
    if not isinstance(values, Mapping):
        raise UserError("is no table")
    rest = {key: value for key, value in values.items() if key not in ("at", "round")}
    change = Change.from_json(rest)
    if change.link not in links:
        raise UserError(f"no link {change.link!r}: there are {', '.join(links)}")
    at, after = values.get("at"), values.get("round")
    if (at is None) == (after is None):
        raise UserError('give either round = 8 or at = "20s"')
    if at is not None:
        if not isinstance(at, str):
            raise UserError(f'at = {at!r} is no text; write for example "20s"')
        return Action(change, seconds=parse_duration(at))
    if not isinstance(after, int) or isinstance(after, bool) or after < 0:
        raise UserError(f"round = {after!r} is no whole number from 0 on")
    return Action(change, round=after)
