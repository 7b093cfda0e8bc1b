"""Who may join, and what the others are told."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.admission import RunFacts, refusal
from tests.coordinator.coordinator_rig import join_request, schedule, voted_table

TABLE = schedule(voted_table())


def facts(**changes: Any) -> RunFacts:
    values: dict[str, Any] = {
        "run_digest": "run-digest",
        "table_digest": TABLE.digest,
        "dtype": "float32",
        "data_digest": "data",
        "state_digest": "s0",
        "started": False,
    }
    return RunFacts(**{**values, **changes})


def test_who_fits_is_admitted() -> None:
    assert refusal(join_request(TABLE), facts()) is None
    assert refusal(join_request(TABLE, weight=65535), facts()) is None


def test_the_first_node_defines_data_and_state() -> None:
    assert refusal(join_request(TABLE, data_digest="x"), facts(data_digest="")) is None
    assert refusal(join_request(TABLE, state_digest="x"), facts(state_digest="")) is None


@pytest.mark.parametrize(
    ("claim", "known", "both"),
    [
        ({"run_digest": "other-run"}, {}, ("other-run", "run-digest")),
        ({"table_digest": "other-table"}, {}, ("other-table", TABLE.digest)),
        ({"dtype": "bfloat16"}, {}, ("bfloat16", "float32")),
        ({"data_digest": "other-data"}, {"data_digest": "the-data"}, ("other-data", "the-data")),
        ({"data_digest": "other-data"}, {"data_digest": "d", "started": True}, ("other-data", "d")),
        ({"state_digest": "other-state"}, {"state_digest": "the-state"}, ("other-state", "the-state")),
        ({"protocol": 99}, {}, ("protocol 99", "protocol 1")),
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
        ({"round": 7}, "holds the state of round 7"),
    ],
)
def test_nonsense_is_refused(claim: dict[str, Any], words: str) -> None:
    text = refusal(join_request(TABLE, **claim), facts(data_digest="", state_digest=""))
    assert text is not None and words in text


def test_a_newcomer_to_a_running_run_may_hold_any_state() -> None:
    assert refusal(join_request(TABLE, state_digest="x", round=0), facts(started=True)) is None
    assert refusal(join_request(TABLE, state_digest="", round=9), facts(started=True)) is None
