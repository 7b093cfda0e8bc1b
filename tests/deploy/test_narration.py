from __future__ import annotations

import threading

from deploy.narration import PROGRESS_SECONDS, Narrator, changes
from deploy.status import StatusError
from protos import atoll_pb2 as pb


def _node(index: int, state: str = "active", round_index: int = 0) -> pb.NodeStatus:
    return pb.NodeStatus(
        node=f"node-{index}",
        name=f"reef-{index}",
        state=state,
        round=round_index,
        address=f"192.0.2.{index}:5000",
    )


def _status(
    phase: str, *nodes: pb.NodeStatus, reason: str = "", round_index: int = 0, **counters: int
) -> pb.StatusReply:
    return pb.StatusReply(
        phase=phase, reason=reason, round=round_index, rounds=9, nodes=nodes, counters=counters
    )


def test_comings_and_goings() -> None:
    nothing = _status("gathering")
    one = _status("gathering", _node(0, "joining"), reason="1 of 2 nodes")
    both = _status("training", _node(0), _node(1), reason="round 0")
    gone = _status("training", _node(0, "lagging"), _node(1, "left", 7), reason="round 8")
    assert changes(nothing, one) == [
        "node-0 (reef-0) has joined from 192.0.2.0:5000",
        "gathering: 1 of 2 nodes",
    ]
    assert changes(one, both) == [
        "node-0 (reef-0) is active",
        "node-1 (reef-1) has joined from 192.0.2.1:5000",
        "node-1 (reef-1) is active",
        "training: round 0",
    ]
    assert changes(both, gone) == [
        "node-0 (reef-0) lags: it is not waited for until it contributes in time again",
        "node-1 (reef-1) has left after round 8",
    ]
    assert changes(gone, gone) == []


def test_the_first_abstention_of_a_node_is_told() -> None:
    before, first, more = (
        pb.NodeStatus(node="node-0", name="reef", state="active", abstained=n) for n in range(3)
    )
    assert changes(_status("training", before), _status("training", first)) == [
        "node-0 (reef) has contributed nothing to a round; its own log says why"
    ]
    assert changes(_status("training", first), _status("training", more)) == []


def test_refusals_are_counted() -> None:
    before, after = _status("training", late=2), _status("training", late=5, truncated=1)
    assert changes(before, after) == [
        "refused or ignored, late: 3 more, 5 in all",
        "refused or ignored, truncated: 1 more, 1 in all",
    ]


class _Script:
    def __init__(self, *steps: pb.StatusReply | StatusError) -> None:
        self.steps = list(steps)

    def fetch(self) -> pb.StatusReply:
        step = self.steps.pop(0)
        if isinstance(step, StatusError):
            raise step
        return step


def test_progress_is_told_now_and_then_and_at_the_end() -> None:
    told: list[str] = []
    now = [0.0]
    rounds = [_status("training", _node(0), round_index=r) for r in range(1, 9)]
    script = _Script(
        rounds[0], rounds[1], StatusError("gone"), rounds[2], rounds[3], _status("done", round_index=9)
    )
    narrator = Narrator(script, told.append, lambda: now[0])
    for _ in range(6):
        narrator.look()
        now[0] += PROGRESS_SECONDS / 4
    progress = [line.split(" nodes")[0] for line in told if " nodes" in line]
    assert progress == ["training round 1/9", "training round 4/9", "done round 9/9"]
    assert told[-2] == "done"


def test_the_thread_looks_until_the_block_ends() -> None:
    heard = threading.Event()

    class Source:
        def fetch(self) -> pb.StatusReply:
            return _status("gathering", _node(0, "joining"), reason="1 of 3 nodes")

    with Narrator(Source(), lambda text: heard.set()) as narrator:
        assert heard.wait(20)
    assert not narrator._thread.is_alive()
