"""The round in flight: order of arrival, speculation, restarts, and members that are late, lost or back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.active_round import MAX_BROKEN_STREAMS
from coordinator.contribution import Contribution
from coordinator.journal import Done, JournalError
from coordinator.rounds import State
from protos.atoll_pb2 import ContributionHeader
from protos.lane_layout import LaneLayout
from protos.refusal import Refused
from protos.wire import decode_frame
from tests.coordinator.active_round_rig import Case
from tests.coordinator.contribution_rig import random_payload


@settings(max_examples=24)
@given(st.permutations(range(4)))
def test_the_order_of_arrival_changes_nothing(order: list[int]) -> None:
    case = Case(4)
    case.deliver(*order)
    assert case.closed[0].voters == ("n0", "n1", "n2", "n3")
    assert case.result() == case.expected(0, 1, 2, 3)


@settings(max_examples=40)
@given(st.data())
def test_interleaved_uploads_and_departures(data: st.DataObject) -> None:
    """Any interleaving of chunks with deaths, breaks, refusals, abstentions: one correct commit."""
    case = Case(4)
    uploads: dict[int, Contribution] = {}
    breaks = dict.fromkeys(range(4), 0)
    active = set(range(4))
    while active and not case.closed:
        i = data.draw(st.sampled_from(sorted(active)))
        event = data.draw(st.sampled_from(["finish"] * 2 + ["chunk"] * 6 + ["die", "break", "refuse"]))
        if i not in uploads:
            if event == "die" or (event == "refuse" and data.draw(st.booleans())):
                case.round.departed(f"n{i}")
                active.discard(i)
            elif event == "refuse":
                case.abstain(i)
                active.discard(i)
            else:
                uploads[i] = case.begin(i)
            continue
        contribution = uploads[i]
        if event == "chunk" and contribution.received < case.table.nbytes:
            case.upload(i, contribution, data.draw(st.integers(contribution.received + 1, case.table.nbytes)))
        elif event == "finish":
            case.finish(i, contribution)
            active.discard(i)
        elif event == "die":
            case.round.lost(f"n{i}", contribution)
            case.round.departed(f"n{i}")
            active.discard(i)
        elif event == "break" and breaks[i] + 1 < MAX_BROKEN_STREAMS:
            breaks[i] += 1
            case.round.lost(f"n{i}", contribution)
            del uploads[i]
        elif event == "refuse":
            case.round.refuse(f"n{i}", contribution)
            active.discard(i)
    assert len(case.closed) == 1
    verdict = case.closed[0]
    if verdict.action == "fail":
        assert not any(member.live for member in case.round.members.values())
        return
    voters = [int(node[1:]) for node in verdict.voters]
    states = {node: member.state for node, member in case.round.members.items()}
    assert all((states[f"n{i}"] is State.COMPLETE) == (i in voters) for i in range(4))
    assert case.round.result.committed
    assert case.result() == (case.expected(*voters) if voters else b"")


def test_pieces_are_published_as_soon_as_all_have_delivered_them() -> None:
    case = Case(2)
    a, b = case.begin(0), case.begin(1)
    case.upload(0, a, 200)
    assert case.published() == []
    case.upload(1, b, 100)
    assert case.published() == [64]
    case.upload(1, b, 512)
    assert case.published() == [64, 128]
    assert not case.round.result.committed
    case.finish(0, a)
    assert case.published() == [64, 128, 320]
    assert not case.round.result.committed  # the END of b is missing
    case.finish(1, b)
    assert case.round.result.committed and case.round.result.attempt == 0


def test_a_member_that_dies_after_pieces_were_sent_restarts_the_attempt() -> None:
    case = Case(3)
    uploads = [case.begin(i) for i in range(3)]
    for i, upload in enumerate(uploads):
        case.upload(i, upload, 256)
    assert case.published() == [256]
    case.round.lost("n1", uploads[1])
    case.round.departed("n1")
    assert case.round.result.attempt == 1
    for i in (0, 2):
        case.finish(i, uploads[i])
    assert case.closed[0].voters == ("n0", "n2")
    assert case.result() == case.expected(0, 2)
    assert {decode_frame(frame).attempt for frame in case.round.result.frames} == {1}


def test_a_member_that_dies_before_pieces_were_sent_costs_nothing() -> None:
    case = Case(3)
    uploads = [case.begin(i) for i in range(2)]
    case.upload(0, uploads[0], 256)
    case.round.departed("n2")
    assert case.round.result.attempt == 0
    for i in (0, 1):
        case.finish(i, uploads[i])
    assert case.round.result.attempt == 0
    assert case.result() == case.expected(0, 1)


def test_a_member_that_dies_after_its_contribution_still_counts() -> None:
    case = Case(3)
    case.deliver(1)
    case.round.departed("n1")
    case.deliver(0, 2)
    assert case.closed[0].voters == ("n0", "n1", "n2")
    assert case.result() == case.expected(0, 1, 2)


def test_a_broken_stream_may_be_sent_again_even_with_other_bytes() -> None:
    case = Case(2)
    a, b = case.begin(0), case.begin(1)
    case.upload(0, a, 256)
    case.upload(1, b, 256)
    case.round.lost("n1", b)
    other = random_payload(99, case.table)
    again = case.begin(1)
    case.finish(1, again, other)
    case.finish(0, a)
    assert case.result() == case.expected(0, 1, payloads=[case.payloads[0], other])
    assert case.round.result.attempt == 1


def test_a_stream_that_keeps_breaking_is_not_waited_for() -> None:
    case = Case(2)
    case.deliver(0)
    for _ in range(MAX_BROKEN_STREAMS):
        contribution = case.begin(1)
        case.upload(1, contribution, 64)
        case.round.lost("n1", contribution)
    assert case.closed[0].voters == ("n0",)


def test_the_end_of_an_old_stream_does_not_harm_the_new_one() -> None:
    case = Case(1)
    old = case.begin(0)
    case.upload(0, old, 64)
    case.round.lost("n0", old)
    new = case.begin(0)
    case.round.lost("n0", old)
    case.round.refuse("n0", old)
    case.finish(0, new)
    assert case.closed[0].voters == ("n0",)


def test_a_second_contribution_is_a_duplicate() -> None:
    case = Case(2)
    case.deliver(0)
    with pytest.raises(Refused, match="n0 has already delivered for round 6") as refused:
        case.begin(0)
    assert refused.value.kind == "duplicate"
    case.abstain(0)  # asking for the result again is no contribution
    assert case.round.members["n0"].state is State.COMPLETE


def test_after_a_refusal_there_is_no_second_try() -> None:
    case = Case(2)
    contribution = case.begin(0)
    case.round.refuse("n0", contribution)
    with pytest.raises(Refused) as refused:
        case.begin(0)
    assert refused.value.kind == "duplicate"
    case.deliver(1)
    assert case.closed[0].voters == ("n1",)


def test_another_epoch_is_refused() -> None:
    case = Case(2)
    with pytest.raises(Refused, match="belongs to epoch 2, the header says 1"):
        header = ContributionHeader(round=5, epoch=1, abstain=True)
        case.round.accept("n0", header, LaneLayout(case.table))


def test_the_deadline_drops_who_is_late() -> None:
    case = Case(3)
    slow = case.begin(2)
    case.upload(2, slow, 256)
    case.deliver(0)
    case.timer.advance(4.0)
    case.deliver(1)
    assert case.published() == [256]  # of three voters, void soon
    case.timer.advance(5.9)
    assert not case.closed
    case.timer.advance(0.1)
    verdict = case.closed[0]
    assert (verdict.voters, verdict.silent) == (("n0", "n1"), ("n2",))
    assert case.result() == case.expected(0, 1)
    assert case.round.result.attempt == 1
    case.finish(2, slow)  # too late, ignored
    assert len(case.closed) == 1 and case.result() == case.expected(0, 1)


def test_a_lagging_member_counts_if_it_comes_in_time() -> None:
    case = Case(3, lagging=[1])
    case.deliver(0)
    case.deliver(1)
    case.deliver(2)
    assert case.closed[0].voters == ("n0", "n1", "n2")
    assert case.result() == case.expected(0, 1, 2)


def test_nobody_waits_for_a_lagging_member() -> None:
    case = Case(3, lagging=[1])
    case.upload(1, case.begin(1), 64)
    case.deliver(0, 2)
    assert case.closed[0].voters == ("n0", "n2")


def test_everybody_abstains() -> None:
    case = Case(2)
    case.abstain(0)
    assert not case.closed
    case.abstain(1)
    assert case.closed[0].voters == ()
    assert case.round.result.committed and case.round.result.frames == []


def test_everybody_dies() -> None:
    case = Case(2)
    case.deliver(0)
    case.round.departed("n0")
    case.round.departed("n1")
    assert [verdict.action for verdict in case.closed] == ["fail"]
    assert not case.round.result.committed


def test_a_stopped_process_does_not_count_its_own_absence() -> None:
    """The deadline rings 100 s late: what has arrived meanwhile must be read before anybody is dropped."""
    case = Case(3)
    case.deliver(0, 1)
    case.timer.oversleep(110.0)
    assert not case.closed
    case.deliver(2)
    assert case.closed[0].voters == ("n0", "n1", "n2")


def test_after_its_absence_the_deadline_holds_again() -> None:
    case = Case(3)
    case.deliver(0, 1)
    case.timer.oversleep(110.0)
    case.timer.advance(1.0)
    assert case.closed[0].silent == ("n2",)


# ---------------------------------------------------------------------------------------- kept, then told


def test_a_round_is_announced_when_it_is_kept() -> None:
    kept: list[Done] = []
    case = Case(2, keep=lambda active, done: kept.append(done))
    case.deliver(0, 1)
    result = case.round.result
    assert case.round.closing and case.round.settled and result.payload
    assert not result.committed and not case.closed
    case.round.departed("n0")
    case.timer.advance(1000.0)
    assert len(kept) == 1 and not case.closed, "nothing of it changes any more"
    kept[0](None)
    assert result.committed and case.closed[0].voters == ("n0", "n1")


def test_a_round_that_cannot_be_kept_is_not_announced() -> None:
    kept: list[Done] = []
    case = Case(2, keep=lambda active, done: kept.append(done))
    case.deliver(0, 1)
    kept[0](JournalError("the disk is full"))
    assert [(verdict.action, verdict.reason) for verdict in case.closed] == [("fail", "the disk is full")]
    assert case.round.settled and not case.round.result.committed


def test_a_round_that_is_kept_after_it_was_stopped_is_not_announced() -> None:
    kept: list[Done] = []
    case = Case(2, keep=lambda active, done: kept.append(done))
    case.deliver(0, 1)
    case.round.stop(Refused("", "over", "UNAVAILABLE"))
    kept[0](None)
    assert not case.round.result.committed and not case.closed


# ------------------------------------------------------------------------------------------- back again


def test_a_member_that_is_back_is_waited_for_again() -> None:
    case = Case(3)
    case.upload(0, case.begin(0), 64)
    case.round.departed("n0")
    case.deliver(1)
    assert case.round.returned("n0", 1) and not case.round.returned("n0", 1)
    case.deliver(2)
    assert not case.closed
    case.deliver(0)
    assert case.closed[0].voters == ("n0", "n1", "n2") and case.result() == case.expected(0, 1, 2)


def test_a_member_whose_contribution_is_here_is_not_asked_for_another() -> None:
    case = Case(2)
    case.deliver(0)
    case.round.departed("n0")
    assert case.round.returned("n0", 1)
    with pytest.raises(Refused, match="already delivered"):
        case.begin(0)
    case.deliver(1)
    assert case.closed[0].voters == ("n0", "n1")


def test_who_has_no_seat_gets_none() -> None:
    kept: list[Done] = []
    case = Case(3, keep=lambda active, done: kept.append(done))
    assert not case.round.returned("stranger", 1) and not case.round.returned("n0", 1)
    for node in ("n0", "n1"):
        case.round.departed(node)
    assert not case.round.returned("n0", 2), "of another weight"
    case.deliver(2)
    assert case.round.closing and not case.round.returned("n1", 1), "too late"
    kept[0](None)
    assert case.closed[0].voters == ("n2",)
