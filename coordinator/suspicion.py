"""How far a node is under suspicion, from what its last rounds tell, and what follows from that. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, get_args

from coordinator.ballots import UNKNOWN, Ballot

if TYPE_CHECKING:
    from protos.byzantine_section import ByzantineConfig

Cause = Literal["disagrees", "constant", "copies", "replays", "invalid", "abstains", "lies"]
Action = Literal["none", "warn", "downweight", "expel"]

CAUSES: Final[tuple[Cause, ...]] = get_args(Cause)
PENALTY: Final = 16  # a node whose weight is lowered counts one sixteenth
LEAST_ROUNDS: Final = 8  # of a node, before anything is said of it; or the whole window, if that is shorter
EXPLAINED: Final = 0.5  # share of the rounds in which there is a better reason than disagreement
SIGNAL: Final = 3.0  # standard errors by which typical votes must differ from coins

_WORDS: Final[Mapping[Cause, str]] = {
    "disagrees": "its votes agree with the others' less than they do among themselves "
    "(1: as a coin's would, 2: it votes the opposite)",
    "constant": "nearly all bits of its votes are the same",
    "copies": "its votes are those of nodes that delivered before",
    "replays": "its votes are those of former rounds",
    "invalid": "its contributions were refused",
    "abstains": "it abstains",
    "lies": "it does not tell the truth about slices",
}


@dataclass(frozen=True)
class Thresholds:
    """From which suspicion on something is done; 0: that is never done.

    Attributes:
        warn: a node is named, in the log, the events and the metrics.
        downweight: its votes and means count one sixteenth.
        expel: it has to leave, for good.
        window: rounds of a node that are looked at.
    """

    warn: float = 0.8
    downweight: float = 0.0
    expel: float = 0.0
    window: int = 16

    @classmethod
    def of(cls, config: ByzantineConfig) -> Thresholds:
        """Those of a run file."""
        return cls(config.warn, config.downweight, config.expel, config.window)


DEFAULTS: Final = Thresholds()


@dataclass(frozen=True)
class Sighting:
    """A node in one round: what its votes tell, or why there are none."""

    ballot: Ballot = UNKNOWN
    invalid: bool = False
    abstained: bool = False


@dataclass(frozen=True)
class Suspicion:
    """What is thought of a node, and why, in words."""

    action: Action
    cause: Cause
    score: float
    reason: str


class Suspicions:
    """What is thought of all nodes."""

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._seen: dict[str, deque[Sighting]] = {}
        self._liars: dict[str, str] = {}

    def lied(self, node: str, reason: str) -> None:
        """It is certain that a node does not tell the truth about a slice."""
        self._liars[node] = reason

    def saw(self, sightings: Mapping[str, Sighting]) -> None:
        """A round has been committed."""
        for node, sighting in sightings.items():
            if node not in self._seen:
                self._seen[node] = deque(maxlen=self._thresholds.window)
            self._seen[node].append(sighting)

    def forget_all_but(self, nodes: Collection[str]) -> None:
        """The others will not come back."""
        self._seen = {node: seen for node, seen in self._seen.items() if node in nodes}
        self._liars = {node: reason for node, reason in self._liars.items() if node in nodes}

    def scores(self, node: str) -> dict[Cause, float]:
        """By cause: of ``disagrees`` from 0 (like the others) over 1 (a coin) to 2 (the opposite), of the
        others the share of the last rounds in which it was so; of ``lies`` 2 if it is certain, else 0."""
        seen = tuple(self._seen.get(node, ()))  # metrics are read in another thread
        rounds = max(1, len(seen))
        return {
            "disagrees": _disagreement([sighting.ballot for sighting in seen]),
            "constant": sum(sighting.ballot.constant for sighting in seen) / rounds,
            "copies": sum(sighting.ballot.copied is not None for sighting in seen) / rounds,
            "replays": sum(sighting.ballot.replayed for sighting in seen) / rounds,
            "invalid": sum(sighting.invalid for sighting in seen) / rounds,
            "abstains": sum(sighting.abstained for sighting in seen) / rounds,
            "lies": 2.0 if node in self._liars else 0.0,
        }

    def judge(self, nodes: Collection[str]) -> dict[str, Suspicion]:
        """Of each of ``nodes`` what is to be done. Where half of them or more are under suspicion, or no
        three would stay, nobody can say who is wrong: they are named, no more."""
        found = {node: self._judge(node) for node in nodes}
        named = sum(suspicion.action != "none" for suspicion in found.values())
        expelled = sum(suspicion.action == "expel" for suspicion in found.values())
        if 2 * named >= len(nodes) or len(nodes) - expelled < 3:
            return {
                node: Suspicion("warn", one.cause, one.score, one.reason) if one.action != "none" else one
                for node, one in found.items()
            }
        return found

    def _judge(self, node: str) -> Suspicion:
        scores, limits = self.scores(node), self._thresholds
        # Whoever replays a vote or casts a constant one disagrees as well: that is no reason of its own then.
        cause = max(CAUSES[1:], key=scores.__getitem__)
        if scores[cause] < EXPLAINED:
            cause = max(CAUSES, key=scores.__getitem__)
        score, rounds = max(scores.values()), len(self._seen.get(node, ()))
        reason = f"{_WORDS[cause]}: {scores[cause]:.2f} in its last {rounds} rounds"
        if cause == "lies" and node in self._liars:
            reason = f"{_WORDS[cause]}: {self._liars[node]}"
        action: Action = "none"
        if rounds >= min(LEAST_ROUNDS, limits.window) or node in self._liars:
            for name, limit in (
                ("warn", limits.warn),
                ("downweight", limits.downweight),
                ("expel", limits.expel),
            ):
                if limit and score >= limit:
                    action = name  # type: ignore[assignment]
        return Suspicion(action, cause, score, reason)


def _disagreement(ballots: Collection[Ballot]) -> float:
    """How much less often a node's bits equal the others', in parts of what makes those more than coins."""
    known = [one for one in ballots if math.isfinite(one.gap) and math.isfinite(one.typical)]
    if not known:
        return 0.0
    typical = sum(one.typical for one in known)
    if typical <= SIGNAL * sum(one.noise for one in known):
        return 0.0  # the votes of all are hardly more than coins: nobody can be told from them
    return min(2.0, max(0.0, sum(one.gap for one in known) / typical))
