"""The journal on disk: when a round is kept, damage, disks that fail, and what it lets go."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.journal import JournalError, Kept
from coordinator.journal_file import KEPT_ROUNDS, FileJournal
from coordinator.journal_folder import JournalFolder
from coordinator.segments import HEADER_BYTES
from tests.coordinator.journal_rig import (
    START,
    Desk,
    Disk,
    WholeJournal,
    commit,
    copied,
    filled,
    load,
    open_journal,
    payload,
    reopened,
    round_record,
)


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_a_round_is_answered_once_it_would_survive(tmp_path: Path, desk: Desk) -> None:
    """At each answer a copy of the files is taken, and holds the round."""
    journal = open_journal(tmp_path / "journal", desk)
    journal.begin(START)
    seen: list[int] = []

    def done(error: BaseException | None) -> None:
        assert error is None
        with copied(tmp_path / "journal") as copy:
            other, found = reopened(copy, Desk())
            other.close()
            seen.append(found.round)

    for index in range(3):
        data = payload(index)
        journal.commit(round_record(index, data), [memoryview(data)], None, done)
    desk.run(seen, 3)
    journal.close()
    assert seen[0] >= 1 and seen[1] >= 2 and seen[2] == 3


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_segment_cut_at_any_byte_keeps_what_lies_before(data: st.DataObject, whole: Path) -> None:
    desk = Desk()
    with copied(whole) as folder:
        newest = sorted((folder / "results").iterdir())[-1]
        size = data.draw(st.integers(0, newest.stat().st_size), label="size")
        os.truncate(newest, size)
        rounds = 4 + size // (HEADER_BYTES + 100)  # four lie in the segment before
        journal, found = reopened(folder, desk, keep_bytes=8 * 500)
        assert found.round == 7 and found.last == round_record(6, payload(6))
        assert bool(found.notes) == (rounds < 7)
        for index in range(7):
            kept = load(journal, desk, index)
            assert (kept is None) == (index >= rounds)
            assert kept is None or kept.payload == payload(index)
        assert journal.first_kept(rounds) == 0
        assert journal.first_kept(7) == (7 if rounds < 7 else 0)
        assert commit(journal, desk, 7) is None
        journal.close()
        journal, found = reopened(folder, desk, keep_bytes=8 * 500)
        assert found.round == 8 and not found.notes
        assert load(journal, desk, 7) == Kept(round_record(7, payload(7)), payload(7))
        journal.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal of 7 rounds in two segments."""
    folder = tmp_path_factory.mktemp("whole") / "journal"
    filled(folder, Desk(), 7, keep_bytes=8 * 500).close()
    assert len(os.listdir(folder / "results")) == 2
    return folder


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damage_makes_a_wrong_payload(data: st.DataObject, whole: Path) -> None:
    desk = Desk()
    with copied(whole) as folder:
        path = data.draw(st.sampled_from(sorted((folder / "results").iterdir())), label="file")
        content = bytearray(path.read_bytes())
        place = data.draw(st.integers(0, len(content) - 1), label="byte")
        content[place] ^= data.draw(st.integers(1, 255), label="bits")
        path.write_bytes(content)
        damaged = place // (HEADER_BYTES + 100) + (4 if path.name == "00000002.seg" else 0)
        journal, found = reopened(folder, desk, keep_bytes=8 * 500)
        assert found.round == 7
        for index in range(7):
            kept = load(journal, desk, index)
            assert (kept is None) == (index == damaged)
            assert kept is None or kept.payload == payload(index)
        desk.rest()
        assert journal.first_kept(7) == damaged + 1
        assert journal.first_kept(damaged) == 0 and journal.first_kept(damaged + 1) == damaged + 1
        journal.close()
        journal, found = reopened(folder, desk, keep_bytes=8 * 500)
        assert journal.first_kept(7) == damaged + 1 and not found.notes
        journal.close()


def test_damage_is_told(tmp_path: Path, desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "journal"
    filled(folder, desk, 6).close()
    path = folder / "results" / "00000001.seg"
    content = bytearray(path.read_bytes())
    content[2 * (HEADER_BYTES + 100) + 77] ^= 1
    path.write_bytes(content + b"half a record")
    journal, found = reopened(folder, desk)
    assert found.notes == (
        "13 B that are no whole result were cut from results/00000001.seg",
        "damaged results: round 3; who has not got them loads a later state",
    )
    content[4 * (HEADER_BYTES + 100) + 3] ^= 1
    path.write_bytes(content)
    assert load(journal, desk, 4) is None
    assert (
        "the result of round 5 is damaged" in caplog.text
        and "no record of round 5 begins there" in caplog.text
    )
    journal.close()


def test_a_round_that_was_written_in_part_never_was(tmp_path: Path, desk: Desk) -> None:
    """Killed behind any byte of the payload, or before the row: the round is opened again."""
    folder = tmp_path / "journal"
    for room in (1, HEADER_BYTES, HEADER_BYTES + 50):
        shutil.rmtree(folder, ignore_errors=True)
        filled(folder, desk, 2).close()
        disk = Disk(room)
        journal, _ = reopened(folder, desk, opener=disk.open)
        error = commit(journal, desk, 2)
        assert isinstance(error, JournalError)
        journal.close()
        journal, found = reopened(folder, desk)
        assert found.round == 2 and found.trained == 32
        assert found.notes == (f"{room} B that are no whole result were cut from results/00000001.seg",)
        other = payload(99, 40)
        assert commit(journal, desk, 2, other) is None
        kept = load(journal, desk, 2)
        assert kept is not None and kept.payload == other
        journal.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_fails(code: int, tmp_path: Path, desk: Desk) -> None:
    folder = tmp_path / "journal"
    disk = Disk(room=3 * (HEADER_BYTES + 100) + 9, code=code)
    journal = filled(folder, desk, 3, opener=disk.open)
    error = commit(journal, desk, 3)
    assert isinstance(error, JournalError) and str(folder) in str(error)
    full = "the disk is full" in str(error) and "are free there. Free some space" in str(error)
    assert full == (code != errno.EIO)
    assert "start the coordinator again with the same command" in str(error)
    disk.room = 1 << 20
    journal.agreed(2, "ff" * 16)
    assert commit(journal, desk, 4) is error, "nothing is taken after an error: the order would break"
    assert load(journal, desk, 2) is not None
    journal.close()
    journal, found = reopened(folder, desk)
    assert found.round == 3 and not found.digests
    assert commit(journal, desk, 3) is None
    journal.close()


def test_a_database_that_takes_no_more(tmp_path: Path, desk: Desk) -> None:
    folder = tmp_path / "journal"
    journal = filled(folder, desk, 1)
    tables = journal._folder.tables
    pages = tables._db.execute("PRAGMA page_count").fetchone()[0]
    tables._db.execute(f"PRAGMA max_page_count = {pages}")
    error = commit(journal, desk, 1, reason="x" * 100_000)
    assert isinstance(error, JournalError) and "the disk is full" in str(error)
    journal.close()
    journal, found = reopened(folder, desk)
    assert found.round == 1 and found.trained == 16 and len(found.notes) == 1
    journal.close()


def test_the_oldest_results_go_when_there_are_too_many(tmp_path: Path, desk: Desk) -> None:
    """A segment takes 5 results here, 100 of them are what may be kept."""
    folder, size = tmp_path / "journal", HEADER_BYTES + 100
    journal = filled(folder, desk, 150, keep_bytes=100 * size)
    load(journal, desk, -1)
    assert journal.first_kept(150) == 0, "nothing says that anything may go"
    journal.forget(60)
    assert commit(journal, desk, 150) is None
    load(journal, desk, -1)
    first = journal.first_kept(151)
    assert 48 <= first <= 60 and load(journal, desk, first) is not None
    assert load(journal, desk, first - 1) is None
    for index in range(151, 400):
        assert commit(journal, desk, index) is None
    load(journal, desk, -1)
    kept = 400 - journal.first_kept(400)
    assert 180 <= kept <= 200, "behind the mark they go at twice the size"
    held = sum(path.stat().st_size for path in (folder / "results").iterdir())
    assert held <= 2 * 100 * size
    journal.close()
    journal, found = reopened(folder, desk, keep_bytes=100 * size)
    assert 400 - journal.first_kept(400) == kept and not found.notes and found.trained == 400 * 16
    journal.close()


def test_the_last_results_stay_however_little_is_kept(tmp_path: Path, desk: Desk) -> None:
    journal = filled(tmp_path / "journal", desk, 0, keep_bytes=1)
    for index in range(KEPT_ROUNDS + 20):
        journal.forget(index)
        assert commit(journal, desk, index) is None
    load(journal, desk, -1)
    assert journal.first_kept(KEPT_ROUNDS + 20) == 20
    journal.close()


def test_the_reducers_memory_comes_back_or_is_told_to_be_damaged(tmp_path: Path, desk: Desk) -> None:
    folder = tmp_path / "journal"
    journal = filled(folder, desk, 0)
    memory = {"a": np.linspace(0, 1, 7, dtype=np.float32), "b/c": np.eye(3, dtype=np.float32)[:, ::2]}
    assert commit(journal, desk, 0, memory=memory) is None
    assert commit(journal, desk, 1) is None
    journal.close()
    journal, found = reopened(folder, desk)
    journal.close()
    assert {key: array.tolist() for key, array in found.memory.items()} == {
        key: array.tolist() for key, array in memory.items()
    }
    path = folder / "reducer" / "00000000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    journal, found = reopened(folder, desk)
    journal.close()
    assert not found.memory and found.round == 2
    assert [note for note in found.notes if "the reducer's memory after round 1 is damaged" in note]


def test_a_run_that_begins_anew_forgets_the_one_before(tmp_path: Path, desk: Desk) -> None:
    folder = tmp_path / "journal"
    journal = filled(folder, desk, 3)
    journal.begin(replace(START, round=5, samples=80))
    assert journal.first_kept(3) == 3 and load(journal, desk, 1) is None
    assert not os.listdir(folder / "results")
    assert commit(journal, desk, 5) is None
    journal.close()
    journal, found = reopened(folder, desk)
    journal.close()
    assert (found.start.round, found.round, found.trained, found.samples) == (5, 6, 16, 96)


def test_calls_out_of_order_are_refused(tmp_path: Path, desk: Desk) -> None:
    journal = open_journal(tmp_path / "journal", desk)
    with pytest.raises(ValueError, match="not the next"):
        commit(journal, desk, 0)
    journal.begin(START)
    with pytest.raises(ValueError, match="not the next"):
        commit(journal, desk, 1)
    with pytest.raises(ValueError, match="has 100 bytes here, not 7"):
        commit(journal, desk, 0, nbytes=7)
    with pytest.raises(ValueError, match="is not ahead"):
        journal.skipped(0, 0)
    journal.close()


def test_an_answer_to_a_loop_that_has_closed_is_dropped(tmp_path: Path) -> None:
    def closed(*_: object) -> None:
        raise RuntimeError("Event loop is closed")

    folder = JournalFolder.open(tmp_path / "journal", run_digest="run", table_digest="tables", run_toml="")
    journal: FileJournal = WholeJournal(folder, closed)
    journal.begin(START)
    data = payload(0)
    journal.commit(round_record(0, data), [memoryview(data)], None, lambda error: None)
    journal.close()
    journal, found = reopened(tmp_path / "journal", Desk())
    journal.close()
    assert found.round == 1
