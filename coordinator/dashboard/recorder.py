"""What a dashboard remembers of a run: its last rounds, its last events, and the bytes behind each loss."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from coordinator import events
from coordinator.events import Event, Listener

ROUNDS: Final = 120
EVENTS: Final = 300  # of rounds, and as many others: rounds come too often to share their place
OPEN_ROUNDS: Final = 16  # whose losses may still change
CURVE_POINTS: Final = 1024  # beyond twice as many every other one is left out

QUIET: Final = (events.NodeReported, events.DigestAgreed)  # too many to be read
CATEGORIES: Final[tuple[tuple[str, tuple[type, ...]], ...]] = (
    ("rounds", (events.RoundOpened, events.RoundCommitted)),
    ("nodes", (events.NodeJoined, events.NodeRejoined, events.NodeLeft)),
    (
        "trouble",
        (
            events.NodeDeviated,
            events.NodeSuspected,
            events.SliceDisputed,
            events.JournalTrouble,
            events.SnapshotFailed,
        ),
    ),
    (
        "states",
        (events.CatchUpPlanned, events.SnapshotBegun, events.SnapshotComplete),
    ),
    ("admin", (events.RunPaused, events.RunUnpaused, events.NodeExpelled)),
)


def category(event: Event) -> str:
    """The kind of an event, for filtering."""
    return next((name for name, kinds in CATEGORIES if isinstance(event, kinds)), "run")


@dataclass(frozen=True)
class EventView:
    """An event in words: the ``number``-th that was kept; ``at`` in seconds since 1970."""

    number: int
    at: float
    category: str
    text: str


@dataclass(frozen=True)
class RoundView:
    """A committed round, in seconds.

    Attributes:
        opened: when, since 1970.
        between: from the commit before to its opening; NaN if that is not known.
        training: from its opening to the first contribution.
        closing: from there to the commit.
        members, voters: how many.
        nbytes: of its result.
        agreement: mean share of voted bits that equal the result.
    """

    round: int
    opened: float
    between: float
    training: float
    closing: float
    members: int
    voters: int
    nbytes: int
    agreement: float
    reason: str


@dataclass(frozen=True)
class CurvePoint:
    """Losses after a round (nats per token, NaN where not measured), and the bytes that all nodes
    had sent and received by then; what goes from one to another counts at both."""

    round: int
    nbytes: int
    loss: float
    validation_loss: float


class Recorder:
    """A listener that remembers; for one loop, and cheap enough for every event of a run.

    Args:
        sentence: puts an event into words.
        listener: is told as well.
        now: the run's clock, monotonic.
        wall: seconds since 1970.

    Attributes:
        moved: bytes that all nodes have sent and received so far.
        losses: training and validation loss of a recent round.
        rounds: the last ones.
    """

    def __init__(
        self,
        sentence: Callable[[Event], str],
        listener: Listener,
        *,
        now: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._sentence = sentence
        self._listener = listener
        self._now = now
        self._wall = wall
        self._of_rounds: deque[EventView] = deque(maxlen=EVENTS)
        self._events: deque[EventView] = deque(maxlen=EVENTS)
        self._numbers = itertools.count()
        self._committed_at = math.nan
        self._members = 0
        self._bytes: dict[int, int] = {}  # by round, of those whose losses may still change
        self._settled: list[CurvePoint] = []
        self._stride = 1
        self.rounds: deque[RoundView] = deque(maxlen=ROUNDS)
        self.moved: Callable[[], int] = lambda: 0
        self.losses: Callable[[int], tuple[float, float]] = lambda round_index: (math.nan, math.nan)

    def __call__(self, event: Event) -> None:
        self._listener(event)
        if isinstance(event, events.RoundOpened):
            self._members = len(event.members)
        elif isinstance(event, events.RoundCommitted):
            self._commit(event)
        if not isinstance(event, QUIET):
            kind = category(event)
            kept = self._of_rounds if kind == "rounds" else self._events
            kept.append(EventView(next(self._numbers), self._wall(), kind, self._sentence(event)))

    def happened(self) -> tuple[EventView, ...]:
        """The last ones, newest first."""
        both = [*self._of_rounds, *self._events]
        return tuple(sorted(both, key=lambda event: event.number, reverse=True))

    def points(self) -> tuple[CurvePoint, ...]:
        """The curve of the whole run, as far as this coordinator has seen it; thinned where it is long."""
        return (*self._settled, *(self._point(*item) for item in self._bytes.items()))

    def pace(self, count: int = 8) -> float:
        """Mean seconds from one commit to the next over the last rounds; NaN before the second."""
        last = [r for r in list(self.rounds)[-count:] if math.isfinite(r.between)]
        if not last:
            return math.nan
        return sum(r.between + r.training + r.closing for r in last) / len(last)

    def _commit(self, event: events.RoundCommitted) -> None:
        now = self._now()
        closing = min(event.after_first, event.seconds)
        between = now - event.seconds - self._committed_at
        self.rounds.append(
            RoundView(
                round=event.round,
                opened=self._wall() - event.seconds,
                between=between if math.isnan(between) else max(0.0, between),
                training=event.seconds - closing,
                closing=closing,
                members=self._members,
                voters=len(event.voters),
                nbytes=event.nbytes,
                agreement=event.agreement,
                reason=event.reason,
            )
        )
        self._committed_at = now
        self._bytes[event.round] = self.moved()
        self._settle()

    def _settle(self) -> None:
        """Keep points that no report can change any more; of a long curve every other one."""
        while len(self._bytes) > OPEN_ROUNDS:
            index = next(iter(self._bytes))
            point = self._point(index, self._bytes.pop(index))
            if self._wanted(point):
                self._settled.append(point)
        if len(self._settled) > 2 * CURVE_POINTS:
            self._stride *= 2
            self._settled = [point for point in self._settled if self._wanted(point)][-2 * CURVE_POINTS :]

    def _wanted(self, point: CurvePoint) -> bool:
        return point.round % self._stride == 0 or math.isfinite(point.validation_loss)

    def _point(self, round_index: int, nbytes: int) -> CurvePoint:
        return CurvePoint(round_index, nbytes, *self.losses(round_index))
