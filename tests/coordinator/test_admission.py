"""Who may join, and what the others are told."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.admission import RunFacts, refusal
from coordinator.start import Claim, Start, choose
from protos.wire import PROTOCOL
from tests.coordinator.contribution_rig import schedule, voted_table
from tests.coordinator.coordinator_rig import join_request

TABLE = schedule(voted_table())
NOBODY = choose(())


def held(round_index: int, digest: str) -> Start:
    """What a run would begin with that one node has come to."""
    return choose([Claim("node-0", round_index, digest, 0)])


def facts(**changes: Any) -> RunFacts:
    values: dict[str, Any] = {
        "run_digest": "run-digest",
        "table_digest": TABLE.digest,
        "dtype": "float32",
        "data_digest": "data",
        "rounds": 9,
        "start": held(0, "s0"),
    }
    return RunFacts(**{**values, **changes})


def test_who_fits_is_admitted() -> None:
    assert refusal(join_request(TABLE), facts()) is None
    assert refusal(join_request(TABLE, weight=65535), facts()) is None
    assert refusal(join_request(TABLE, ranks=1024, batch=2**20), facts()) is None


def test_the_first_node_defines_data_and_state() -> None:
    assert refusal(join_request(TABLE, data_digest="x"), facts(data_digest="")) is None
    assert refusal(join_request(TABLE, state_digest="x"), facts(start=NOBODY)) is None
    assert refusal(join_request(TABLE, state_digest="x", round=7), facts(start=NOBODY)) is None


@pytest.mark.parametrize(
    ("claim", "known", "both"),
    [
        ({"run_digest": "other-run"}, {}, ("other-run", "run-digest")),
        ({"table_digest": "other-table"}, {}, ("other-table", TABLE.digest)),
        ({"dtype": "bfloat16"}, {}, ("bfloat16", "float32")),
        ({"data_digest": "other-data"}, {"data_digest": "the-data"}, ("other-data", "the-data")),
        ({"data_digest": "other-data"}, {"data_digest": "d", "committed": 3}, ("other-data", "d")),
        ({"state_digest": "other-state"}, {"start": held(0, "the-state")}, ("other-state", "the-state")),
        ({"state_digest": "a", "round": 7}, {"start": held(7, "b")}, ("7 rounds is a", "b on node-0")),
        ({"round": 7}, {"committed": 5}, ("after 7 rounds", "has committed 5")),
        ({"protocol": 99}, {}, ("protocol 99", f"protocol {PROTOCOL}")),
    ],
)
def test_a_difference_is_refused_with_both_values_and_advice(
    claim: dict[str, Any], known: dict[str, Any], both: tuple[str, str]
) -> None:
    text = refusal(join_request(TABLE, **claim), facts(**known))
    assert text is not None
    assert both[0] in text and both[1] in text
    assert ": " in text  # what to do follows


@pytest.mark.parametrize(
    ("claim", "words"),
    [
        ({"weight": 0}, "1 to 65535, not 0"),
        ({"weight": 65536}, "1 to 65535, not 65536"),
        ({"name": "n" * 129}, "at most 128 characters"),
        ({"name": "a\nb"}, "printable"),
        ({"data_digest": ""}, "digest of its data"),
        ({"state_digest": ""}, "digest of the state"),
        ({"state_digest": "s" * 129}, "state_digest has more than 128"),
        ({"round": 10}, "state after 10 rounds, the run has 9"),
        ({"samples": 2**60 + 1}, "at most 1152921504606846976 samples"),
        ({"ranks": 1025}, "at most 1024 ranks, not 1025"),
        ({"batch": 2**20 + 1}, "1 to 1048576 samples, not 1048577"),
    ],
)
def test_nonsense_is_refused(claim: dict[str, Any], words: str) -> None:
    text = refusal(join_request(TABLE, **claim), facts(data_digest="", start=NOBODY))
    assert text is not None and words in text


@pytest.mark.parametrize("round_index", [0, 3, 8])
def test_before_the_beginning_another_round_than_the_latest_is_no_conflict(round_index: int) -> None:
    claim = join_request(TABLE, state_digest="x", round=round_index)
    assert refusal(claim, facts(start=held(7, "y"))) is None


@pytest.mark.parametrize("round_index", [0, 5])
def test_a_newcomer_to_a_running_run_may_hold_any_state_up_to_the_present_one(round_index: int) -> None:
    claim = join_request(TABLE, state_digest="x", round=round_index)
    assert refusal(claim, facts(committed=5)) is None
