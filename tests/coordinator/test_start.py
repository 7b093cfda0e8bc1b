"""With which state a run begins, and who is told what."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coordinator.start import Claim, ahead, choose, conflict

claims = st.lists(
    st.builds(Claim, st.uuids().map(str), st.integers(0, 4), st.sampled_from("ab"), st.integers(0, 99)),
    min_size=1,
)


@given(claims)
def test_the_latest_state_is_taken_and_no_sample_is_read_twice(given: list[Claim]) -> None:
    start = choose(given)
    assert start.round == max(claim.round for claim in given)
    assert start.samples == (max(claim.samples for claim in given) if start.round else 0)
    assert start.holders
    for claim in given:
        holds = (claim.round, claim.digest) == (start.round, start.digest)
        assert holds == (claim.node in start.holders)
        refused = conflict(claim.round, claim.digest, start)
        assert (refused is not None) == (claim.round == start.round and not holds)


def test_the_first_of_those_with_the_latest_state_is_right() -> None:
    start = choose([Claim("fresh", 0, "i", 0), Claim("one", 7, "x", 60), Claim("two", 7, "y", 64)])
    assert (start.digest, start.samples, start.holders) == ("x", 64, ("one",))
    assert start.reason == ("going on from the state after 7 rounds, held by one; 2 other nodes will load it")
    assert "x on one" in (conflict(7, "y", start) or "")


def test_nobody_and_everybody_afresh() -> None:
    nobody = choose([])
    assert conflict(0, "any", nobody) is None and conflict(7, "any", nobody) is None
    fresh = choose([Claim("one", 0, "i", 0), Claim("two", 0, "i", 3)])  # two was in a first round before
    assert (fresh.round, fresh.samples, fresh.reason) == (0, 0, "all nodes start afresh")
    assert "same seed" in (conflict(0, "j", fresh) or "")


def test_a_run_that_has_begun_never_goes_back() -> None:
    assert ahead(3, 3) is None and ahead(0, 3) is None
    text = ahead(4, 3)
    assert text is not None and "after 4 rounds" in text and "committed 3" in text
    assert "start the coordinator again" in text and "without --resume" in text
