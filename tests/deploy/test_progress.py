from __future__ import annotations

import io
import math
from dataclasses import replace
from pathlib import Path
from typing import get_args

from rich.console import Console

from deploy.progress import Progress, all_of, round_line, sentence
from node import events

ROUND = events.RoundDone(
    round=4,
    rounds=10,
    loss=2.5,
    tokens=4000,
    counted=True,
    voters=("node-0", "node-1", "node-2"),
    agreement=0.75,
    reason="all 3 have voted",
    digest="ab" * 16,
    bytes_up=1_000_000,
    bytes_down=900_000,
    compute_seconds=0.4,
    busy_seconds=0.5,
    seconds={"compute": 0.4, "exchange": 0.1},
)
EVENTS: list[events.Event] = [
    events.Notice("waiting for the coordinator at 192.0.2.7:4600"),
    events.Started("run", "sign-muon", 117_056, 14_656, "cpu", 1, 0, 14_656),
    events.Joined("node-0", "192.0.2.7:4600", True),
    events.Abstained(3, "the gradient is not finite"),
    ROUND,
    events.MicroStep(5, 40, 100, 2.4),
    events.RoundMissed(5, "too late"),
    events.Replayed(5, 3, 44_000, 0.5),
    events.StateLoaded(6, 5_000_000_000, "cd" * 16, 40.0),
    events.StateSent(6, 5_000_000_000, 40.0),
    events.TransferFailed(6, "the donor left"),
    events.Evaluated(9, 2.0, 2.885),
    events.Saved(10, Path("saves/round-00000010")),
    events.Resumed(10, Path("saves/round-00000010")),
    events.Stopped(True, "all 10 rounds are done"),
]


def test_every_event_has_a_sentence() -> None:
    assert {type(event) for event in EVENTS} == set(get_args(events.Event))
    for event in EVENTS:
        text = sentence(event)
        assert text and "\n" not in text and not text.startswith(type(event).__name__)
    assert sentence(EVENTS[-2]) == f"resumed from {Path('saves/round-00000010')} at round 10"
    assert sentence(EVENTS[-1]) == "done: all 10 rounds are done"
    assert sentence(events.Stopped(False, "the digest differs")) == "stopped: the digest differs"


def test_rounds_are_counted_from_1_and_states_by_the_rounds_in_them() -> None:
    said = [sentence(event) for event in EVENTS]
    assert "round 4: nothing contributed, the gradient is not finite" in said
    assert "round 6 was decided without this node: too late" in said
    assert "caught up with rounds 6 to 8: 44 kB in 500 ms" in said
    assert sentence(events.Replayed(5, 1, 44_000, 0.5)).startswith("caught up with round 6: 44 kB")
    assert sentence(events.Replayed(5, 0, 0, 0.1)).startswith("nothing to catch up with: ")
    assert any(text.startswith("state after round 6 loaded") for text in said)
    assert any(text.startswith("after round 10: validation 2.000") for text in said)


def test_the_start_tells_both_ways() -> None:
    start = events.Started("run", "lordo", 117_056, 59_000, "cpu", 2, 0, 61_000)
    assert "59 kB up, 61 kB down a round, cpu, 2 threads" in sentence(start)
    assert "59 kB each way a round" in sentence(replace(start, result_bytes=59_000))


def test_a_round_in_one_line() -> None:
    assert round_line(ROUND) == (
        "round 5/10 loss 2.500 voters 3 agreement 75.0 % sent 1 MB received 900 kB 8,000 tokens/s"
    )
    alone = replace(
        ROUND, voters=("local",), bytes_up=0, bytes_down=0, validation_loss=2.0, bits_per_byte=2.885
    )
    assert round_line(alone) == "round 5/10 loss 2.500 validation 2.000 (2.885 bits/byte) 8,000 tokens/s"
    assert "loss – voters 3 agreement 75.0 % not counted" in round_line(
        replace(ROUND, counted=False, loss=math.nan)
    )
    caught_up = replace(ROUND, counted=False, loss=math.nan, tokens=0, bytes_up=400)
    assert round_line(caught_up) == (
        "round 5/10 voters 3 agreement 75.0 % not counted sent 400 B received 900 kB"
    )
    means = round_line(replace(ROUND, agreement=math.nan, micro_steps=16, skipped=2))
    assert "voters 3 steps left out 2/16 sent 1 MB" in means and "agreement" not in means


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _console(terminal: bool) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=100, color_system=None), out


def test_in_a_pipe_rounds_are_thinned_out() -> None:
    console, out = _console(terminal=False)
    clock = _Clock()
    with Progress(console, clock=clock) as progress:
        for index in range(10):
            clock.now = index * 0.5
            validation = 2.0 if index == 3 else None
            progress(replace(ROUND, round=index, validation_loss=validation))
    lines = out.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/10", "4/10", "8/10", "10/10"]


def test_steps_within_a_long_round_are_told_like_rounds() -> None:
    console, out = _console(terminal=False)
    clock = _Clock()
    with Progress(console, clock=clock) as progress:
        for step in (10, 20, 30, 40):
            clock.now = step / 10
            progress(events.MicroStep(5, step, 100, 2.4))
    assert out.getvalue().splitlines() == [f"round 6: step {step}/100 loss 2.400" for step in (10, 30)]


def test_quiet_leaves_rounds_out() -> None:
    console, out = _console(terminal=False)
    with Progress(console, quiet=True) as progress:
        for event in EVENTS:
            progress(event)
    assert (
        "round 5/10" not in out.getvalue() and "step 40" not in out.getvalue() and "joined" in out.getvalue()
    )


def test_on_a_terminal_rounds_share_one_line() -> None:
    console, out = _console(terminal=True)
    clock = _Clock()
    with Progress(console, clock=clock) as progress:
        progress(events.Notice("[red]hello"))
        for index in range(10):
            clock.now = float(index)
            progress(replace(ROUND, round=index))
    text = out.getvalue()
    assert "[red]hello" in text, "text of peers is not markup"
    assert text.count("\n") <= 3 and "round 10/10" in text and "round 2/10" in text


def test_all_listeners_hear_everything() -> None:
    first: list[events.Event] = []
    second: list[events.Event] = []
    tell = all_of([first.append, second.append])
    for event in EVENTS:
        tell(event)
    assert first == second == EVENTS
