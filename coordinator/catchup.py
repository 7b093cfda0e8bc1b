"""How a node comes to hold the present state, and when a snapshot is worth its bytes: pure decisions.

The state of a round is what nodes hold before it; the result of a round turns its state into the next one's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from protos.buckets import TableSchedule
from protos.units import format_bytes

REPLAYED_STATES: Final = 8  # results of as many bytes as this many states ask for a snapshot


@dataclass(frozen=True)
class CatchUp:
    """What a node has to do.

    Attributes:
        action: ``"replay"`` results on what it holds, ``"load"`` a kept snapshot and replay from there, or
            wait for a new ``"snapshot"``.
        snapshot: round of the kept snapshot to load.
        nbytes: that the node downloads.
        reason: in words.
    """

    action: Literal["replay", "load", "snapshot"]
    snapshot: int | None
    nbytes: int
    reason: str


def plan(
    held: int | None,
    committed: int,
    *,
    first_kept: int,
    result_bytes: Callable[[int, int], int],
    snapshots: Sequence[int],
    state_bytes: int,
    training: bool = True,
) -> CatchUp:
    """Choose the way to the state of round ``committed`` on which the fewest bytes travel.

    A kept snapshot travels once, down to the node. A new one is first sent up by nodes that are training, so
    it counts twice; if as many bytes travel either way, nobody is asked for one.

    Args:
        held: round of a trusted state that the node holds, ``None``: it holds none.
        committed: the next round to commit: results of all before it exist.
        first_kept: first round from which on all results are kept; ``committed``: none is.
        result_bytes: bytes of the results of the rounds from its first argument on, before its second.
        snapshots: rounds of the states that are kept.
        state_bytes: of a state.
        training: nodes can still be asked for a new snapshot. After the end that is chosen for want of any
            other way, and cannot be gone.
    """
    ways: list[tuple[int, CatchUp]] = []
    if held is not None and first_kept <= held <= committed:
        nbytes = result_bytes(held, committed)
        text = f"it replays {committed - held} rounds, {format_bytes(nbytes)}"
        ways.append((nbytes, CatchUp("replay", None, nbytes, text)))
    usable = [snapshot for snapshot in snapshots if first_kept <= snapshot <= committed]
    if usable:
        best = max(usable)
        nbytes = state_bytes + result_bytes(best, committed)
        text = (
            f"it loads the snapshot after {best} rounds and replays {committed - best}, "
            f"{format_bytes(nbytes)}"
        )
        ways.append((nbytes, CatchUp("load", best, nbytes, text)))
    if training or not ways:
        text = f"a snapshot of {format_bytes(state_bytes)} is made for it"
        ways.append((2 * state_bytes, CatchUp("snapshot", None, state_bytes, text)))
    _, way = min(ways, key=lambda entry: entry[0])  # the first of equal ones
    return CatchUp(
        way.action, way.snapshot, way.nbytes, f"{_where(held, committed, first_kept)}: {way.reason}"
    )


def _where(held: int | None, committed: int, first_kept: int) -> str:
    if held is None:
        return "it holds no state of this run"
    if held > committed:
        return f"its state is that after {held} rounds, {committed} are committed"
    if held < first_kept:
        return f"its state is that after {held} rounds, results are kept since round {first_kept + 1}"
    return f"its state is {committed - held} rounds old"


def result_bytes(tables: TableSchedule) -> Callable[[int, int], int]:
    """The function of that name for :func:`plan`, of a run in which every round has voters."""
    sizes = [tables.tables[index].result_nbytes for index in tables.cycle]
    sums = list(itertools.accumulate(sizes, initial=0))

    def before(round_index: int) -> int:
        cycles, rest = divmod(round_index, len(sizes))
        return cycles * sums[-1] + sums[rest]

    return lambda first, end: before(end) - before(first)


def snapshot_due(
    round_index: int, last: int | None, every: int, *, result_bytes_since: int, state_bytes: int
) -> str:
    """Why a snapshot of the state of ``round_index`` should be made for those who may come, or ``""``.

    Args:
        round_index: the next round to open.
        last: round of the last snapshot, ``None``: there is none.
        every: rounds between two; 0: when it has become much dearer to replay than to load, which bounds what
            has to be kept and replayed by a constant number of states.
        result_bytes_since: of the results since the last snapshot, or since the start of the run.
        state_bytes: of a state.
    """
    since = round_index - (last or 0)
    after = "the start" if last is None else f"that after {last}"
    if since <= 0:
        return ""
    if every:
        return f"{since} rounds since {after}: one is due every {every}" if since >= every else ""
    if result_bytes_since > REPLAYED_STATES * state_bytes:
        return (
            f"the results since {after} have {format_bytes(result_bytes_since)}, more than "
            f"{REPLAYED_STATES} states of {format_bytes(state_bytes)}"
        )
    return ""
