"""What is known of a run from the statuses seen so far: its curve, pace and bytes a step."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from deploy.ring import Traffic
from protos import atoll_pb2 as pb

WINDOW_SECONDS = 10.0  # the pace is that of the last so many seconds,
MARKS = 3  # or of the last two rounds, where they take longer


@dataclass(frozen=True)
class Point:
    """One round: losses in nats per token (NaN where not measured), and tokens read by all nodes so far."""

    round: int
    loss: float
    validation_loss: float
    bits_per_byte: float
    agreement: float
    tokens: int


class History:
    """Collects statuses of one run, which show only a tail of its curve each. Times are monotonic seconds.

    Args:
        steps: batches that a node trains in a round.
    """

    def __init__(self, steps: int = 1) -> None:
        self.steps = steps
        self.reply = pb.StatusReply()
        self._points: dict[int, Point] = {}
        self._tokens = 0
        self._marks: deque[tuple[float, int, int]] = deque()  # time, rounds, tokens, whenever there are more

    def add(self, reply: pb.StatusReply, now: float) -> None:
        """Take a status in; points that come again replace their earlier form."""
        self.reply = reply
        for point in reply.curve:
            self._points[point.round] = Point(
                point.round,
                point.loss,
                point.validation_loss,
                point.bits_per_byte,
                point.agreement,
                point.tokens,
            )
        self._tokens = max((point.tokens for point in reply.curve), default=0)
        if reply.round > (self._marks[-1][1] if self._marks else 0):
            self._marks.append((now, reply.round, self._tokens))
        while len(self._marks) > MARKS and now - self._marks[0][0] > WINDOW_SECONDS:
            self._marks.popleft()

    @property
    def points(self) -> list[Point]:
        """All rounds seen, in order."""
        return [self._points[index] for index in sorted(self._points)]

    @property
    def checks(self) -> list[Point]:
        """The rounds with a validation loss, in order."""
        return [point for point in self.points if math.isfinite(point.validation_loss)]

    @property
    def loss(self) -> float:
        """Newest training loss, NaN before the first."""
        return next((p.loss for p in reversed(self.points) if math.isfinite(p.loss)), math.nan)

    @property
    def rounds_per_second(self) -> float:
        """From round to round over the last :data:`WINDOW_SECONDS`, or the whole run once it is done.

        NaN before the second round.
        """
        return self._rate(1)

    @property
    def tokens_per_second(self) -> float:
        """Read by all nodes together, over the same time."""
        return self._rate(2)

    def _rate(self, column: int) -> float:
        if self.reply.phase == "done" and self.reply.seconds > 0:  # the whole run's
            return (0, self.reply.round, self._tokens)[column] / self.reply.seconds
        if len(self._marks) < 2:
            return math.nan
        first, last = self._marks[0], self._marks[-1]
        seconds = last[0] - first[0]
        return (last[column] - first[column]) / seconds if seconds > 0 else math.nan

    @property
    def traffic(self) -> Traffic | None:
        """Mean bytes of a step at a node, counted at the transport; ``None`` before the first report.

        Bytes of a round are shared out to its steps. Meant for runs whose nodes have all been there since
        round 0.
        """
        nodes = [node for node in self.reply.nodes if node.bytes_up]
        if not nodes or not self.reply.parameters or not self.reply.round:
            return None
        # A node that reported round r last has taken part in r + 1 rounds.
        up = sum(node.bytes_up / (node.round + 1) for node in nodes) / len(nodes) / self.steps
        down = sum(node.bytes_down / (node.round + 1) for node in nodes) / len(nodes) / self.steps
        return Traffic(parameters=self.reply.parameters, nodes=len(nodes), up=up, down=down)

    @property
    def compute_share(self) -> float:
        """Mean share of the nodes' CPU time in forward and backward; NaN before the first report."""
        shares = [node.compute_share for node in self.reply.nodes if math.isfinite(node.compute_share)]
        return sum(shares) / len(shares) if shares else math.nan
