"""Bytes by the other end, direction and kind."""

from __future__ import annotations

import pytest

from protos.buckets import Bucket, BucketTable
from protos.traffic import MAX_PEERS, OTHERS, PREFIX_BYTES, Traffic

TABLE = BucketTable((Bucket.of("w", "majority", [("w", (4096,))]), Bucket.of("b", "mean", [("b", (384,))])))


def counts(traffic: Traffic) -> dict[tuple[str, str, str], float]:
    return {(peer, direction, kind): nbytes for peer, direction, kind, nbytes in traffic.counts()}


def test_contributions_and_results_are_split_as_their_payload_is() -> None:
    traffic = Traffic()
    traffic.compose(TABLE)
    assert (TABLE.buckets[0].nbytes, TABLE.nbytes) == (512, 2048)
    traffic.add("node-1", "sent", "contribution", 2048 - PREFIX_BYTES)
    traffic.add("node-1", "received", "result", 4096 - PREFIX_BYTES)
    traffic.add("node-1", "received", "state", 100)
    traffic.add("coordinator", "sent", "control", 10)
    traffic.count("coordinator", "sent", "control", 1)
    assert counts(traffic) == pytest.approx(
        {
            ("node-1", "sent", "vote"): 512,
            ("node-1", "sent", "mean"): 1536,
            ("node-1", "received", "vote"): 1024,
            ("node-1", "received", "mean"): 3072,
            ("node-1", "received", "state"): 105,
            ("coordinator", "sent", "control"): 16,
        }
    )


def test_another_table_splits_what_comes_after_it() -> None:
    traffic = Traffic()
    traffic.compose(TABLE)
    traffic.count("a", "sent", "contribution", 1000)
    traffic.compose(BucketTable(TABLE.buckets[:1]))
    traffic.count("a", "sent", "contribution", 1000)
    assert counts(traffic) == pytest.approx({("a", "sent", "vote"): 1250, ("a", "sent", "mean"): 750})


def test_no_number_of_peers_makes_more_series_than_are_bounded() -> None:
    traffic = Traffic()
    for index in range(MAX_PEERS + 50):
        for _ in range(2):
            traffic.count(f"node-{index}", "sent", "control", 1)
    found = counts(traffic)
    assert len(found) == MAX_PEERS + 1
    assert found[f"node-{MAX_PEERS - 1}", "sent", "control"] == 2
    assert found[OTHERS, "sent", "control"] == 100
