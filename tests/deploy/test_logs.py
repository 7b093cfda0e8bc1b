"""What processes keep by themselves: where it goes, what is in it; trouble with it does not touch the run."""

from __future__ import annotations

import csv
import errno
import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.events import NodeReported, RoundCommitted
from deploy.event_log import EventLog
from deploy.logs import EVENTS, PARENT, ROUNDS, KeptLogs, LogFolder
from deploy.options import OFF
from deploy.run_table import RunTable
from deploy.writers import CsvWriter, Feed
from node.events import Notice, RoundDone, Started

STARTED = Started("reef", "sign-muon", 100, 64, "cpu", 1, 0)


def done(round_index: int) -> RoundDone:
    return RoundDone(
        **{"round": round_index, "rounds": 9, "loss": 2.5, "tokens": 64, "counted": True},
        **{"voters": ("a", "b"), "agreement": 0.75, "reason": "all are in", "digest": "d"},
        **{"bytes_up": 10, "bytes_down": 20, "compute_seconds": 1.0, "busy_seconds": 2.0},
    )


def of_a_node(path: Path) -> Feed:
    return Feed(CsvWriter(path), str(path))


def kept(folder: LogFolder, said: list[str], **more: Any) -> KeptLogs:
    return KeptLogs(folder, "left", said.append, **{"rounds": of_a_node, **more})


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_start_has_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    with kept(LogFolder(), said) as first, kept(LogFolder(), said) as second:
        first(STARTED)
        second(STARTED)
        first(done(0))
        second(done(0))
        second(done(1))
    folders = [PARENT / "reef-left", PARENT / "reef-left-2"]
    assert said == [f"logs are in {folder}: {ROUNDS}, {EVENTS}" for folder in reversed(folders)]
    for folder, rounds in zip(folders, (["1"], ["1", "2"]), strict=True):
        assert [row["round"] for row in table(folder / ROUNDS)] == rounds
        assert [line["event"] for line in lines(folder / EVENTS)] == ["Started", *["RoundDone"] * len(rounds)]


def test_with_checkpoints_it_goes_beside_them_and_on(tmp_path: Path) -> None:
    save = tmp_path / "checkpoints"
    for round_index in (0, 1):
        with kept(LogFolder(save), []) as logs:
            logs(STARTED)
            logs(done(round_index))
    assert [row["round"] for row in table(save / ROUNDS)] == ["1", "2"]
    assert len(lines(save / EVENTS)) == 4
    with kept(LogFolder(save, str(tmp_path / "elsewhere")), []) as logs:
        logs(STARTED)
    assert (tmp_path / "elsewhere" / "reef-left" / EVENTS).exists() and len(lines(save / EVENTS)) == 4


def test_events_before_the_start_keep_their_time(tmp_path: Path) -> None:
    times = iter((1.0, 5.0, 6.0))
    with kept(LogFolder(tmp_path), [], clock=lambda: next(times)) as logs:
        logs(Notice("waiting for the coordinator"))
        assert not (tmp_path / EVENTS).exists()
        logs(STARTED)
        logs(done(0))
    assert [(line["event"], line["time"][17:19]) for line in lines(tmp_path / EVENTS)] == [
        ("Notice", "01"),
        ("Started", "05"),
        ("RoundDone", "06"),
    ]


def test_nothing_is_made_that_is_not_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    for folder, more in (
        (LogFolder(tmp_path / "save", OFF), {}),
        (LogFolder(parent=OFF), {}),
        (LogFolder(), {"rounds": None, "events": False}),
    ):
        with kept(folder, said, **more) as logs:
            logs(STARTED)
            logs(done(0))
    with kept(LogFolder(), said) as logs:
        logs(Notice("the coordinator is not there"))
    assert not said and not list(tmp_path.iterdir())
    with kept(LogFolder(), said, rounds=None) as logs:
        logs(STARTED)
    assert [path.name for path in (PARENT / "reef-left").iterdir()] == [EVENTS]


@pytest.mark.parametrize("name", ["../../up", "a/b", "..", "a b\n"])
def test_no_name_leads_out_of_the_folder(name: str, tmp_path: Path) -> None:
    made = LogFolder(parent=str(tmp_path)).make(name)
    assert made.parent == tmp_path and made.is_dir() and made.resolve().parent == tmp_path.resolve()


def test_a_folder_that_cannot_be_written_is_told_of_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Path, *args: Any, **options: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(self))

    said: list[str] = []
    with monkeypatch.context() as read_only, kept(LogFolder(parent=str(tmp_path / "logs")), said) as logs:
        read_only.setattr(Path, "mkdir", refused)
        logs(STARTED)
        logs(done(0))
    assert said == [
        f"no logs are kept, the run goes on: {tmp_path / 'logs'}: Read-only file system; give --log-dir DIR, "
        "or --log-dir off"
    ]
    (tmp_path / EVENTS).mkdir()  # in the way
    said.clear()
    with kept(LogFolder(tmp_path), said) as logs:
        logs(STARTED)
        logs(done(0))
    (told,) = said
    assert told.startswith("no logs are kept, the run goes on: events cannot be written to ")


def test_a_full_disk_is_told_of_and_the_run_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    for name in (ROUNDS, EVENTS):
        (tmp_path / name).symlink_to(full)
    said: list[str] = []
    with kept(LogFolder(tmp_path), said) as logs:
        for event in (STARTED, done(0), done(1)):
            logs(event)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2 and all("No space left on device" in text and "goes on" in text for text in told)


def test_events_are_bounded_and_the_latest_are_kept(tmp_path: Path) -> None:
    path = tmp_path / EVENTS
    with EventLog(path, "left", keep=1000) as log:
        for index in range(60):
            log(Notice(f"{index}"))
    former = tmp_path / "events.1.jsonl"
    texts = [line["text"] for line in [*lines(former), *lines(path)]]
    assert texts == [str(index) for index in range(60 - len(texts), 60)] and len(texts) < 60
    assert 900 < former.stat().st_size <= 1000 and path.stat().st_size <= 1000
    assert sorted(tmp_path.iterdir()) == [former, path]


def test_the_table_of_a_run(tmp_path: Path) -> None:
    path = tmp_path / ROUNDS
    with RunTable(path) as tell:
        for round_index in (4, 5):
            tell(
                RoundCommitted(
                    *(round_index, 1, ("a", "b"), ("c",), "all are in", 0.5, 0.25, 640),
                    agreement=0.75,
                )
            )
            tell(NodeReported("a", round_index, 2.0, "d"))
            tell(NodeReported("b", round_index, 3.0, "d", 2.25, 3.5))
            tell(NodeReported("late", round_index - 1, 9.0, "d"))
            tell(NodeReported("idle", round_index, float("nan"), "d"))
            written = path.read_text().splitlines()
            assert len(written) == 2 * (round_index - 4), "a round is written with its reports"
    first, second = table(path)
    assert (first["round"], second["round"]) == ("5", "6")
    assert (first["loss"], first["validation_loss"], first["reports"]) == ("2.5", "2.25", "2")
    assert (first["voters"], first["silent"], first["agreement"], first["margin"]) == ("2", "1", "0.75", "")


def test_a_run_without_rounds_has_an_empty_table(tmp_path: Path) -> None:
    with RunTable(tmp_path / ROUNDS):
        pass
    assert table(tmp_path / ROUNDS) == []
