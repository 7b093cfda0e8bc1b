"""The journal on disk is the one in memory, whatever ends its process."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from coordinator.journal import MemoryJournal, Recovered, RoundRecord, StartRecord
from tests.coordinator.journal_rig import Desk, commit, copied, load, open_journal, roster


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
