"""The journal on disk is the one in memory, whatever ends its process and whatever befalls its files."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from coordinator.journal import JournalError, Kept, MemoryJournal, Recovered, RoundRecord, StartRecord
from coordinator.journal_file import KEPT_ROUNDS, FileJournal
from coordinator.journal_folder import JournalFolder
from coordinator.segments import HEADER_BYTES
from tests.coordinator.journal_rig import (
    START,
    Desk,
    Disk,
    WholeJournal,
    commit,
    filled,
    load,
    open_journal,
    payload,
    reopened,
    roster,
    round_record,
)


@pytest.fixture
def desk() -> Desk:
    return Desk()


def plain(record: RoundRecord | None) -> RoundRecord | None:
    """NaN equals nothing: as a text it equals itself."""
    if record is None:
        return None
    shares: Any = tuple("nan" if math.isnan(share) else share for share in record.agreement)
    return replace(record, agreement=shares)


def same(one: Recovered | None, other: Recovered | None) -> None:
    assert (one is None) == (other is None)
    if one is None or other is None:
        return
    assert {key: array.tobytes() for key, array in one.memory.items()} == {
        key: array.tobytes() for key, array in other.memory.items()
    }
    assert replace(one, memory={}, notes=(), last=plain(one.last)) == replace(
        other, memory={}, notes=(), last=plain(other.last)
    )


@contextlib.contextmanager
def copied(folder: Path) -> Iterator[Path]:
    """A copy of a folder as it lies there."""
    with tempfile.TemporaryDirectory() as scratch:
        yield Path(shutil.copytree(folder, Path(scratch) / "journal"))


class Journals(RuleBasedStateMachine):
    """Both journals get the same calls; the one on disk is opened again now and then."""

    folder: Path

    def __init__(self) -> None:
        super().__init__()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.desk = Desk()
        self.reference = MemoryJournal()
        self.journal = open_journal(self.folder, self.desk)

    def teardown(self) -> None:
        self.journal.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def begun(self) -> bool:
        return self.reference.start is not None

    @rule(round_index=st.integers(0, 3), samples=st.integers(0, 9))
    def begin(self, round_index: int, samples: int) -> None:
        for journal in (self.reference, self.journal):
            journal.begin(StartRecord(round_index, "ab" * 16, samples, "data", 1 << 40))

    @precondition(lambda self: self.begun)
    @rule(epoch=st.integers(0, 9), nodes=st.lists(st.sampled_from("abc"), unique=True))
    def roster(self, epoch: int, nodes: list[str]) -> None:
        for journal in (self.reference, self.journal):
            journal.roster(roster(epoch, *nodes))

    @precondition(lambda self: self.begun)
    @rule(
        data=st.binary(max_size=300),
        memory=st.none() | st.dictionaries(st.sampled_from(["x", "y/z"]), st.integers(1, 5), max_size=2),
        share=st.sampled_from([0.5, math.nan]),
        returned=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=2).map(tuple),
    )
    def commit(
        self, data: bytes, memory: dict[str, int] | None, share: float, returned: tuple[tuple[int, int], ...]
    ) -> None:
        arrays = memory and {key: np.full((size, 2), size, np.float32) for key, size in memory.items()}
        fields = {"agreement": (share, 0.25), "returned": returned, "memory": arrays}
        round_index = self.reference.next
        for journal in (self.reference, self.journal):
            assert commit(journal, self.desk, round_index, data, **fields) is None

    @precondition(lambda self: self.begun)
    @rule(back=st.integers(1, 4), digest=st.text("0123456789abcdef", min_size=1, max_size=4))
    def agreed(self, back: int, digest: str) -> None:
        for journal in (self.reference, self.journal):
            journal.agreed(max(0, self.reference.next - back), digest)

    @precondition(lambda self: self.begun)
    @rule(rounds=st.integers(1, 3), samples=st.integers(0, 99))
    def skipped(self, rounds: int, samples: int) -> None:
        assert self.reference.recovered is not None
        round_index, behind = self.reference.next + rounds, self.reference.recovered.samples + samples
        for journal in (self.reference, self.journal):
            journal.skipped(round_index, behind)

    @rule()
    def reopen(self) -> None:
        self.journal.close()
        self.desk.rest()
        self.journal = open_journal(self.folder, self.desk)
        same(self.journal.recovered, self.reference.recovered)
        assert self.journal.recovered is None or not self.journal.recovered.notes

    @rule()
    def killed(self) -> None:
        """The files as they lie there are what a killed process leaves."""
        load(self.journal, self.desk, -1)  # behind all that was written
        with copied(self.folder) as copy:
            other = open_journal(copy, Desk())
            same(other.recovered, self.reference.recovered)
            other.close()

    @rule(round_index=st.integers(0, 20))
    def look(self, round_index: int) -> None:
        assert self.journal.first_kept(round_index) == self.reference.first_kept(round_index)
        one, other = load(self.journal, self.desk, round_index), load(self.reference, self.desk, round_index)
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.payload == other.payload and plain(one.record) == plain(other.record)


def test_the_journal_on_disk_is_that_in_memory(tmp_path: Path) -> None:
    Journals.folder = tmp_path / "journal"
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Journals, settings=settings(max_examples=15, stateful_step_count=14, deadline=None)
    )


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
