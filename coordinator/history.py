"""What nodes reported after each round: the loss curve, and the digests that must agree."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from coordinator.digests import Judgement, judge
from protos.atoll_pb2 import Curve, Report

CURVE_POINTS: Final = 512
KEPT_DIGESTS: Final = 1 << 16
OPEN_ROUNDS: Final = 16  # reports for older rounds no longer change anything


@dataclass
class Point:
    """Reports of one round.

    ``members`` had to report when it was committed, and a digest is agreed on by the most of them, whoever
    has left since; ``agreement`` is the mean over its voters, ``margin`` that over the bits, see
    :func:`margin`.
    """

    round: int
    members: tuple[str, ...]
    agreement: float
    losses: dict[str, float] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    tokens: int = 0
    validation_loss: float = math.nan
    bits_per_byte: float = math.nan
    judgement: Judgement = field(default_factory=lambda: Judgement(None, (), ""))
    margin: float = math.nan

    @property
    def loss(self) -> float:
        """Mean over those who reported a finite loss, nats per token; NaN if nobody did."""
        finite = [loss for loss in self.losses.values() if math.isfinite(loss)]
        return sum(finite) / len(finite) if finite else math.nan


def margin(agreements: Sequence[float], weights: Sequence[int]) -> float:
    """How far from a tie votes were: ``abs(sum(w * vote)) / sum(w)``, mean over the bits; NaN without votes.

    The vote of a bit is 1 or -1, and the result has the sign of the sum, so that the sum without its sign is
    that of ``w`` over the voters with the result's bit less that over the others. A mean over the bits makes
    of it what each voter's agreement tells: ``sum(w * (2 * agreement - 1)) / sum(w)``.

    Args:
        agreements: the share of each voter's bits that equal the result; NaN: nothing was voted.
        weights: of the voters, as they were counted.
    """
    total = sum(weights)
    if not total:
        return math.nan
    return sum(w * (2.0 * share - 1.0) for share, w in zip(agreements, weights, strict=True)) / total


class History:
    """The tail of a run's curve."""

    def __init__(self) -> None:
        self._points: OrderedDict[int, Point] = OrderedDict()
        self._tokens_before = 0  # of points that have left the tail
        self._agreed: OrderedDict[int, str] = OrderedDict()  # digest after a round
        self._fresh: list[tuple[int, str]] = []

    def begin(self, round_index: int, digest: str, agreed: Mapping[int, str] | None = None) -> None:
        """The first round to be committed is ``round_index``, on top of the state with this digest.

        ``agreed`` are all digests that are known after rounds that were committed before.
        """
        self._agreed = OrderedDict(sorted((agreed or {}).items()))
        if digest:
            self._agreed[round_index - 1] = digest

    def committed(
        self, round_index: int, members: Sequence[str], agreement: float, margin: float = math.nan
    ) -> None:
        """A round is valid; its members will report."""
        self._points[round_index] = Point(round_index, tuple(members), agreement, margin=margin)
        while len(self._points) > CURVE_POINTS:
            _, oldest = self._points.popitem(last=False)
            self._tokens_before += oldest.tokens

    def reported(self, node: str, report: Report) -> Judgement | None:
        """Take a report; the judgement on its round's digests, ``None`` if that takes no more reports."""
        point = self._points.get(report.round)
        if point is None or report.round < self.newest - OPEN_ROUNDS:
            return None
        if report.evaluated:  # also in a second report, of a node that was asked to evaluate at the end
            point.validation_loss = report.validation_loss
            point.bits_per_byte = report.bits_per_byte
        if node not in point.losses:
            point.losses[node] = report.loss
            point.tokens += report.tokens
        if node in point.digests:
            return None
        point.digests[node] = report.state_digest
        return self._judge(point)

    def retract(self, node: str) -> None:
        """A node has left the common state: what it told of its state is no more held against it, or for it,
        once it has loaded that."""
        for point in list(self._points.values())[-OPEN_ROUNDS:]:
            point.digests.pop(node, None)

    @property
    def agreed(self) -> dict[int, str]:
        """The digests that are known, by the round before."""
        return dict(self._agreed)

    def open(self, round_index: int) -> bool:
        """Whether reports may still settle the digest after a round."""
        return round_index in self._points and round_index >= self.newest - OPEN_ROUNDS

    def newly_agreed(self) -> list[tuple[int, str]]:
        """Rounds, and the digests after them, that have been agreed since the last call."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def _judge(self, point: Point) -> Judgement:
        others = tuple(node for node in point.digests if node not in point.members)
        point.judgement = judge(point.digests, point.members + others)
        agreed = point.judgement.agreed
        if agreed is not None and self._agreed.get(point.round) != agreed:
            self._agreed[point.round] = agreed
            self._fresh.append((point.round, agreed))
            while len(self._agreed) > KEPT_DIGESTS:
                self._agreed.popitem(last=False)
        return point.judgement

    @property
    def newest(self) -> int:
        """The last committed round, -1 before the first."""
        return next(reversed(self._points), -1)

    @property
    def agreed_digest(self) -> str:
        """The digest of the last committed round that is agreed; empty while it is open."""
        point = self._points.get(self.newest)
        return (point.judgement.agreed or "") if point else ""

    def digest_after(self, round_index: int) -> str:
        """The agreed digest of the shared state after a round; empty if unknown."""
        return self._agreed.get(round_index, "")

    @property
    def last_loss(self) -> float:
        """The newest mean loss."""
        return next((p.loss for p in reversed(self._points.values()) if not math.isnan(p.loss)), math.nan)

    @property
    def last_validation(self) -> tuple[float, float]:
        """The newest validation loss (nats per token) and bits per byte."""
        for point in reversed(self._points.values()):
            if not math.isnan(point.validation_loss):
                return point.validation_loss, point.bits_per_byte
        return math.nan, math.nan

    def losses(self, round_index: int) -> tuple[float, float]:
        """Training and validation loss of a round of the tail; NaN where not measured."""
        point = self._points.get(round_index)
        return (math.nan, math.nan) if point is None else (point.loss, point.validation_loss)

    @property
    def agreement(self) -> float:
        """Mean agreement of the last committed round."""
        point = self._points.get(self.newest)
        return point.agreement if point else math.nan

    @property
    def margin(self) -> float:
        """That of the last committed round, see :func:`margin`."""
        point = self._points.get(self.newest)
        return point.margin if point else math.nan

    @property
    def tokens(self) -> int:
        """In all reports."""
        return self._tokens_before + sum(point.tokens for point in list(self._points.values()))

    def curve(self) -> list[Curve]:
        """The tail, oldest first; tokens cumulative."""
        tokens, curve = self._tokens_before, []
        for point in self._points.values():
            tokens += point.tokens
            curve.append(
                Curve(
                    round=point.round,
                    loss=point.loss,
                    validation_loss=point.validation_loss,
                    bits_per_byte=point.bits_per_byte,
                    agreement=point.agreement,
                    tokens=tokens,
                )
            )
        return curve
