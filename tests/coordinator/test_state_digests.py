"""Who has left the common state."""

from __future__ import annotations

import pytest

from coordinator.digests import judge

M = ("a", "b", "c", "d")


@pytest.mark.parametrize(
    ("reports", "members", "agreed", "deviants"),
    [
        ({}, M, None, ()),
        ({"a": "1"}, M, None, ()),
        ({"a": "1", "b": "1"}, M, None, ()),  # half is no majority
        ({"a": "1", "b": "2", "c": "1"}, M, None, ()),
        ({"a": "1", "b": "1", "c": "1"}, M, "1", ()),
        ({"a": "1", "b": "2", "c": "1", "d": "1"}, M, "1", ("b",)),
        ({"b": "1", "c": "1", "d": "1", "a": "2"}, M, "1", ("a",)),
        ({"a": "1", "b": "2"}, ("a", "b"), "1", ("b",)),  # the lowest slot decides between two
        ({"b": "2", "a": "1"}, ("a", "b"), "1", ("b",)),  # whoever came first
        ({"d": "2", "c": "2", "b": "1", "a": "1"}, M, "1", ("c", "d")),
        ({"a": "1", "b": "2", "c": "3"}, ("a", "b", "c"), "1", ("b", "c")),
        ({"a": "1"}, ("a",), "1", ()),
        ({"z": "9"}, ("a",), None, ()),  # a stranger's digest says nothing
    ],
)
def test_judgement(
    reports: dict[str, str], members: tuple[str, ...], agreed: str | None, deviants: tuple[str, ...]
) -> None:
    judgement = judge(reports, members)
    assert (judgement.agreed, judgement.deviants) == (agreed, deviants)
    assert judgement.reason
    for node in deviants:
        assert node in judgement.reason and str(agreed) in judgement.reason
