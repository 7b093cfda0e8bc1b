"""The [byzantine] section of the run file: what is done about nodes whose votes are not honest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pydantic import Field

from protos.problems import Problem
from protos.section import Section


class ByzantineConfig(Section):
    """What is done about nodes that are under suspicion. A node's suspicion is 0 while its votes are like
    the others', 1 if they are as good as coins or always constant, copied, replayed or refused, 2 if they are
    the opposite. This section is not part of the run's digest."""

    title = "byzantine"

    warn: float = Field(
        default=0.8,
        ge=0,
        le=2,
        description="Suspicion from which on a node is named in log, events and metrics; 0: never.",
    )
    downweight: float = Field(
        default=0.0,
        ge=0,
        le=2,
        description="Suspicion from which on a node's contributions count one sixteenth; 0: never.",
    )
    expel: float = Field(
        default=0.0,
        ge=0,
        le=2,
        description="Suspicion from which on a node is expelled, and refused until the run ends; 0: never.",
    )
    window: int = Field(
        default=16, ge=4, le=1024, description="Rounds of a node by which it is judged: the last ones."
    )
    max_weight: int = Field(
        default=1,
        ge=1,
        le=65535,
        description="Largest weight with which a node may join.",
    )

    retally: int = Field(
        default=64,
        ge=0,
        le=256,
        description="Lines of 64 bytes of a round between nodes that are reduced a second time; 0: none.",
    )
    retally_cost: float = Field(
        default=0.0002,
        gt=0,
        le=10,
        description="Share of a contribution sent for that at most: small models, in some rounds only.",
    )

    def broken_rules(self) -> Iterable[Iterator[Problem]]:
        return self._broken_order("downweight"), self._broken_order("expel")

    def _broken_order(self, key: str) -> Iterator[Problem]:
        value, warn = getattr(self, key), self.warn
        if not value:
            return
        if not warn:
            rule = "cannot be done with warn = 0: nobody would see why"
            yield Problem(self.title, key, rule, "give warn a value, for example 0.8", value)
        elif value < warn:
            rule = f"must not be less than warn = {warn:g}: a node is named before more is done about it"
            yield Problem(self.title, key, rule, f"at least {warn:g}", value)
