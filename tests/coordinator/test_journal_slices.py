"""Rounds whose results lie at nodes: the journal keeps their facts, and knows that it has no payload."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from coordinator.journal import Journal, JournalError, Kept, MemoryJournal, SliceRecord
from coordinator.journal_reading import JournalReader
from tests.coordinator.journal_rig import (
    START,
    Desk,
    commit,
    filled,
    load,
    open_journal,
    payload,
    round_record,
)

SLICES = (SliceRecord(0, 64, b"\x01" * 16, "node-0"), SliceRecord(64, 100, b"\x02" * 16, "node-1"))


def sliced(journal: Journal, round_index: int) -> list[JournalError | None]:
    answers: list[JournalError | None] = []
    record = round_record(round_index, payload(round_index), slices=SLICES)
    journal.commit(record, [], None, answers.append)  # type: ignore[arg-type]
    return answers


def test_facts_are_kept_and_payloads_are_not(tmp_path: Path) -> None:
    desk, reference = Desk(), MemoryJournal()
    reference.begin(START)
    journal = filled(tmp_path / "journal", desk, 2)
    desk.run(sliced(journal, 2))
    assert journal.first_kept(3) == 3 and journal.first_kept(2) == 0
    assert load(journal, desk, 2) == Kept(round_record(2, payload(2), slices=SLICES), b"")
    assert commit(journal, desk, 3) is None
    assert journal.first_kept(4) == 3
    journal.close()
    again = open_journal(tmp_path / "journal", desk)
    assert again.recovered is not None and again.recovered.round == 4
    assert again.first_kept(4) == 3 and again.first_kept(2) == 0
    kept = load(again, desk, 2)
    assert kept is not None and kept.record.slices == SLICES
    again.close()
    with JournalReader(tmp_path / "journal") as reader:
        assert [record.slices for record in reader.ledger.rounds()] == [(), (), SLICES, ()]


def test_the_memory_journal_does_likewise() -> None:
    journal = MemoryJournal()
    journal.begin(START)
    sliced(journal, 0)
    assert journal.first_kept(1) == 1


def test_a_journal_of_the_first_format_is_read_and_taken_up(tmp_path: Path) -> None:
    desk = Desk()
    filled(tmp_path / "journal", desk, 3).close()
    with sqlite3.connect(tmp_path / "journal" / "journal.sqlite") as db:
        db.execute("ALTER TABLE rounds DROP COLUMN slices")
        db.execute("UPDATE meta SET value = '1' WHERE key = 'format'")
    db.close()
    with JournalReader(tmp_path / "journal") as reader:
        assert len(list(reader.ledger.rounds())) == 3
    journal = open_journal(tmp_path / "journal", desk)
    assert journal.first_kept(3) == 0
    desk.run(sliced(journal, 3))
    journal.close()
    with JournalReader(tmp_path / "journal") as reader:
        assert [bool(record.slices) for record in reader.ledger.rounds()] == [False, False, False, True]


@pytest.mark.parametrize("extra", [b"x"])
def test_a_sliced_round_has_no_payload(tmp_path: Path, extra: bytes) -> None:
    journal = filled(tmp_path / "journal", Desk(), 0)
    record = round_record(0, payload(0), slices=SLICES)
    with pytest.raises(ValueError, match="has 1 bytes here, not 0"):
        journal.commit(record, [memoryview(extra)], None, lambda error: None)
    journal.close()
