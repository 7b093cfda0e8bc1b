"""What happens at a coordinator, told in one line an event: who came and left, phases, refusals, progress."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from deploy.status import StatusError
from deploy.table import present, progress_line, trained
from deploy.watch import ENDED, Source
from protos import atoll_pb2 as pb
from protos.address import peer

LOOK_SECONDS = 1.0
PROGRESS_SECONDS = 10.0  # between two lines about rounds


def changes(before: pb.StatusReply, after: pb.StatusReply) -> list[str]:
    """What has happened between two statuses, a sentence each, without the progress of rounds."""
    sentences: list[str] = []
    known = {node.node: node for node in before.nodes}
    for node in after.nodes:
        who = f"{node.node} ({node.name})"
        old = known.get(node.node)
        if old is None:
            sentences.append(f"{who} has joined from {peer(node.address)}")
        if node.state != (old.state if old else "joining"):
            sentences.append(_state(who, node))
        if node.abstained and not (old and old.abstained):
            sentences.append(f"{who} has contributed nothing to a round; its own log says why")
    if after.phase != before.phase or (after.phase == "gathering" and present(after) != present(before)):
        sentences.append(f"{after.phase}: {after.reason}" if after.reason else after.phase)
    for kind in sorted(after.counters):
        more = after.counters[kind] - before.counters.get(kind, 0)
        if more > 0:
            sentences.append(f"refused or ignored, {kind}: {more} more, {after.counters[kind]} in all")
    return sentences


def _state(who: str, node: pb.NodeStatus) -> str:
    if node.state == "lagging":
        return f"{who} lags: it is not waited for until it contributes in time again"
    if node.state == "left":
        return f"{who} has left" + (f" after round {trained(node)}" if trained(node) else "")
    return f"{who} is {node.state}"


class Narrator:
    """Looks at a run from a thread of its own and tells what has changed. Use as a context manager.

    Args:
        source: where statuses come from.
        tell: gets the sentences.
        clock: monotonic seconds.
    """

    def __init__(
        self, source: Source, tell: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._source = source
        self._tell = tell
        self._clock = clock
        self._before = pb.StatusReply(phase="gathering")
        self._told_at, self._told_round = -PROGRESS_SECONDS, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="atoll-narrator", daemon=True)

    def look(self) -> None:
        """Tell what is new. A status that cannot be had is passed over: the next look tells more."""
        try:
            after = self._source.fetch()
        except StatusError:
            return
        for sentence in changes(self._before, after):
            self._tell(sentence)
        now, ends = self._clock(), after.phase in ENDED and self._before.phase not in ENDED
        if after.round > self._told_round and (ends or now - self._told_at >= PROGRESS_SECONDS):
            self._told_at, self._told_round = now, after.round
            self._tell(progress_line(after))
        self._before = after

    def _follow(self) -> None:
        while not self._stop.wait(LOOK_SECONDS):
            self.look()

    def __enter__(self) -> Narrator:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join(2 * LOOK_SECONDS)
