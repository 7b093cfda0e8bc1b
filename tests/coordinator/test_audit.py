"""The audit: it passes what a coordinator writes, and names whatever is not as it should be."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.audit import NAMED, Audit, Ledger, Skip, audit
from coordinator.journal import JournalError, RoundRecord
from coordinator.journal_reading import JournalReader
from coordinator.journal_tables import Tables
from coordinator.leases import LeaseBook
from coordinator.segments import HEADER_BYTES
from tests.coordinator.journal_rig import (
    START,
    Desk,
    commit,
    load,
    open_journal,
    payload,
    roster,
    round_record,
)


def records(count: int) -> list[RoundRecord]:
    return [round_record(index, payload(index)) for index in range(count)]


def checked(rounds: Sequence[RoundRecord], **fields: Any) -> Audit:
    return audit(Ledger(start=START, rounds=lambda: rounds, **fields))


def told(found: Audit) -> str:
    assert not found.holds
    return "\n".join(f"{wrong.kind}: {wrong.text}" for wrong in found.violations)


def test_a_run_as_it_should_be() -> None:
    found = checked(
        records(5),
        rosters=[roster(3, "a", "b")],
        digests=[(0, "x"), (1, "y")],
        results=[(0, None), (1, ""), (2, "")],
    )
    assert found.holds
    assert found == Audit(
        following=5, rounds=5, frontier=80, trained=80, shares={"a": 40, "b": 40}, agreed=2, kept=2, lost=1
    )


def test_a_run_without_rounds() -> None:
    assert audit(Ledger(replace(START, round=3, samples=48), lambda: [])) == Audit(
        first=3, following=3, frontier=48
    )


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_whatever_a_lease_book_does_is_in_order(seed: int) -> None:
    """Nodes take leases of unlike lengths, and some never deliver."""
    chance, book, rounds = random.Random(seed), LeaseBook(), []
    for index in range(chance.randint(0, 12)):
        members = [node for node in "abcd" if chance.random() < 0.8]
        for node in members:
            book.take(node, index, chance.randint(1, 9))
        trained = book.settle(index, {node for node in members if chance.random() < 0.7})
        rounds.append(
            round_record(
                index,
                payload(index) if trained else b"",
                voters=tuple(trained),
                weights=(1,) * len(trained),
                agreement=(1.0,) * len(trained),
                casting=0,
                trained=tuple((node, lease.start, lease.count) for node, lease in trained.items()),
                frontier=book.frontier,
                returned=tuple((lease.start, lease.count) for lease in book.returned),
            )
        )
    found = checked(rounds)
    assert found.holds, told(found)
    assert found.trained == book.trained and found.frontier == book.frontier
    assert found.trained + found.returned == found.frontier and not found.unknown
    voted = [index for index, record in enumerate(rounds) if record.voters]
    if voted:  # the same with a sample that somebody trains once more is not
        index = chance.choice(voted)
        node, start, _ = rounds[index].trained[0]
        again = round_record(
            len(rounds), payload(0), trained=(("x", start, 1), ("y", book.frontier, 1)), voters=("x", "y"),
            frontier=book.frontier + 1, returned=rounds[-1].returned,
        )  # fmt: skip
        wrong = checked([*rounds, again]).violations
        assert ("twice", (index, len(rounds)), (node, "x")) in [(v.kind, v.rounds, v.nodes) for v in wrong]


def test_samples_trained_twice_are_named_with_both_rounds_and_nodes() -> None:
    rounds = records(4)
    rounds[3] = replace(rounds[3], trained=(("a", 20, 8), ("b", 56, 8)))
    text = told(checked(rounds))
    assert "twice: samples 20 to 27 trained by a in round 2 and by b in round 2 and by a in round 4" in text
    assert "account: samples 48 to 55 below the frontier: neither trained nor returned" in text
    two = replace(rounds[0], trained=(("a", 0, 8), ("b", 7, 9)))
    wrong = checked([two]).violations
    assert [(violation.rounds, violation.nodes) for violation in wrong] == [((0, 0), ("a", "b"))]
    assert wrong[0].text == "sample 7 trained by a in round 1 and by b in round 1"


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"round": 2}, "order: round 3 follows where round 2 should"),
    ({"frontier": 8}, "order: round 2 ends with the frontier at sample 8, before it was at 16"),
    ({"trained": (("a", 16, 8), ("b", 24, 9))}, "frontier: round 2: b trained samples 24 to 32, the"),
    ({"trained": (("a", 16, 8), ("b", 24, 0))}, "frontier: round 2: b trained samples 24 to 23"),
    ({"trained": (("a", 16, 8), ("c", 24, 8))}, "voters: round 2: who voted and who trained differ: b, c"),
    ({"voters": ("a", "a")}, "voters: round 2: a voted twice"),
    ({"voters": ("a", "c"), "trained": (("a", 16, 8), ("c", 24, 8))}, "voters: round 2: c voted without"),
    ({"voters": (), "weights": (), "agreement": (), "trained": ()}, "voters: round 2: 0 voters and a result"),
    ({"weights": (1,)}, "weights: round 2: 2 voters, 1 weights, 2 shares"),
    ({"weights": (1, 0)}, "weights: round 2: b voted with weight 0"),
    ({"weights": (65536, 1)}, "weights: round 2: a voted with weight 65536"),
    ({"casting": 2}, "weights: round 2: the casting voter is 2 of 2"),
    ({"returned": ((30, 2),)}, "account: samples 30 to 31: trained, or returned before, and returned"),
    ({"returned": ((32, 1),)}, "account: samples 0 to 32 reach beyond samples 0 to 31"),
    ({"frontier": 40}, "account: samples 32 to 39 below the frontier: neither trained nor returned"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "text"), BROKEN, ids=[text[:40] for _, text in BROKEN])
def test_whatever_is_wrong_is_told(fields: dict[str, Any], text: str) -> None:
    rounds = records(2)
    found = checked([rounds[0], replace(rounds[1], **fields)], rosters=[roster(3, "a", "b")])
    assert text in told(found)


def test_states_and_results_that_are_wrong() -> None:
    found = checked(
        records(3), digests=[(0, "x"), (1, "x"), (1, "y"), (1, "x")], results=[(0, ""), (2, "its checksum")]
    )
    assert told(found).splitlines() == [
        "digests: after round 2 the nodes agreed on two states: x and y",
        "results: the result of round 3: its checksum",
    ]


def test_rounds_that_the_journal_has_lost() -> None:
    """Rounds 3 and 4 and what became of the samples 32 to 69 are not in it."""
    skips = [Skip(2, 4, 70)]
    later = round_record(4, payload(4), trained=(("a", 70, 8), ("b", 78, 8)), frontier=86)
    found = checked([*records(2), later], skips=skips)
    assert found.holds, told(found)
    assert (found.rounds, found.following, found.trained, found.unknown) == (3, 5, 48, 38)
    found = checked(records(2), skips=skips)
    assert found.holds and (found.following, found.frontier, found.unknown) == (4, 70, 38)
    # What a node had in hand of the lost rounds it trains now; what was leased before them nobody may.
    in_hand = replace(later, trained=(("a", 54, 8), ("b", 70, 8)), frontier=78, returned=((62, 8),))
    found = checked([*records(2), in_hand], skips=skips)
    assert found.holds, told(found)
    assert (found.trained, found.returned, found.unknown) == (48, 8, 22)
    again = replace(later, trained=(("a", 31, 8), ("b", 70, 16)))
    text = told(checked([*records(2), again], skips=skips))
    assert "twice: round 5: a trained samples 31 to 38, which rounds that this journal has lost" in text
    assert "twice: sample 31 trained by b in round 2 and by a in round 5" in text
    back = replace(later, trained=(("a", 60, 5), ("b", 65, 4)), frontier=69)
    text = told(checked([*records(2), back], skips=skips))
    assert "order: round 5 ends with the frontier at sample 69, before it was at 70" in text


def test_many_violations_of_a_kind_are_counted() -> None:
    found = checked(records(1), results=[(index, "torn") for index in range(NAMED + 5)])
    assert len(found.violations) == NAMED and found.untold == 5


# ------------------------------------------------------------------------------------------- of a folder


def written(folder: Path, rounds: int) -> None:
    desk = Desk()
    journal = open_journal(folder, desk)
    journal.begin(START)
    journal.roster(roster(3, "a", "b"))
    for index in range(rounds):
        assert commit(journal, desk, index) is None
        journal.agreed(index, f"{index:032x}")
    journal.close()


def of(folder: Path) -> Audit:
    with JournalReader(folder) as reader:
        return audit(reader.ledger)


def test_a_journal_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    written(folder, 6)
    before = sorted(os.listdir(folder))
    found = of(folder)
    assert found.holds, told(found)
    assert (found.rounds, found.trained, found.agreed, found.kept) == (6, 96, 6, 6)
    assert set(os.listdir(folder)) - set(before) <= {"journal.sqlite-wal", "journal.sqlite-shm"}
    content = bytearray((folder / "results" / "00000001.seg").read_bytes())
    content[HEADER_BYTES + 60] ^= 1
    (folder / "results" / "00000001.seg").write_bytes(content)
    assert "results: the result of round 1: " in told(of(folder))
    (folder / "results" / "00000001.seg").unlink()
    assert told(of(folder)).count("00000001.seg is gone") == 6


def test_a_result_that_is_not_the_announced_one(tmp_path: Path) -> None:
    desk = Desk()
    journal = open_journal(tmp_path / "journal", desk)
    journal.begin(START)
    assert commit(journal, desk, 0, digest="0" * 32) is None
    journal.close()
    assert "its digest is not the 00000000" in told(of(tmp_path / "journal"))


def test_a_coordinator_goes_on_while_its_journal_is_read(tmp_path: Path) -> None:
    """The reader sees what was there when it began; what is dropped meanwhile is no damage."""
    folder, desk = tmp_path / "journal", Desk()
    journal = open_journal(folder, desk, keep_bytes=40 * (HEADER_BYTES + 100))
    journal.begin(START)
    for index in range(50):
        assert commit(journal, desk, index) is None
    with JournalReader(folder) as reader:
        for index in range(50, 120):
            journal.forget(index)
            assert commit(journal, desk, index) is None
        load(journal, desk, -1)
        assert journal.first_kept(120) > 50, "all that the reader wants to read is gone"
        found = audit(reader.ledger)
    assert found.holds, told(found)
    assert (found.rounds, found.kept) == (50, 0)
    found = of(folder)
    assert found.holds and found.rounds == 120 and found.kept == 120 - journal.first_kept(120)
    journal.close()


def test_folders_that_cannot_be_audited(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="is no journal: it holds no"):
        of(tmp_path)
    open_journal(tmp_path / "new", Desk()).close()
    with pytest.raises(JournalError, match="has not begun"):
        of(tmp_path / "new")
    written(tmp_path / "newer", 1)
    tables = Tables(tmp_path / "newer" / "journal.sqlite")
    with tables.transaction(durable=False):
        tables.set_meta("format", "7")
    tables.close()
    with pytest.raises(JournalError, match="has format 7, this Atoll knows format 2: update Atoll"):
        of(tmp_path / "newer")
    (tmp_path / "newer" / "journal.sqlite").write_bytes(b"no database at all" * 100)
    with pytest.raises(JournalError, match="is damaged"):
        of(tmp_path / "newer")
