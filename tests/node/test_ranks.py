"""The ranks of an island: what they share, agree on and gather, and what they do when one is gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from node.exchange.base import (
    DonateOrder,
    ExchangeError,
    LoadOrder,
    Order,
    ReplayOrder,
    RoundOrder,
    StopOrder,
)
from node.exchange.order_json import MAX_ORDER_BYTES, order_from_json, order_to_json
from node.island.broadcast import Receiver, Sender
from node.island.ranks import IslandRanks
from node.ranks import Alone, Ranks
from tests.waiting import free_port

DEADLINE = 100.0
ROUND = RoundOrder(3, 2, ("node-0", "node-1"), 12, 4, True, False, generation=5)
STOP = StopOrder(False, "interrupted", False)

# ---------------------------------------------------------------------------------------- orders as text

numbers = st.integers(0, (1 << 64) - 1)
orders = st.one_of(
    st.builds(
        RoundOrder,
        numbers,
        numbers,
        st.lists(st.text(), max_size=4).map(tuple),
        numbers,
        numbers,
        st.booleans(),
        st.booleans(),
        numbers,
    ),
    st.builds(DonateOrder, st.text(), numbers, numbers, numbers),
    st.builds(LoadOrder, st.text(), numbers, numbers),
    st.builds(ReplayOrder, numbers, numbers, numbers),
    st.builds(StopOrder, st.booleans(), st.text(), st.booleans()),
)


@given(orders)
def test_orders_survive_their_way(order: Order) -> None:
    again = order_from_json(order_to_json(order).encode())
    assert again == order and type(again) is type(order)
    if isinstance(again, RoundOrder) and isinstance(order, RoundOrder):
        assert again.generation == order.generation


@pytest.mark.parametrize(
    ("order", "changes", "text"),
    [
        (ROUND, {"round": -1}, "round of an order must be int, not -1"),
        (ROUND, {"round": True}, "round of an order must be int, not True"),
        (ROUND, {"lease_count": 1.5}, "lease_count of an order must be int, not 1.5"),
        (ROUND, {"epoch": 1 << 64}, "epoch of an order must be int"),
        (ROUND, {"members": ["a", 1]}, "members of an order must be tuple"),
        (ROUND, {"members": "ab"}, "members of an order must be tuple"),
        (STOP, {"done": 1}, "done of an order must be bool, not 1"),
        (STOP, {"reason": None}, "reason of an order must be str, not None"),
        (STOP, {"more": 1}, r"kind stop has the fields \['done', 'evaluate', 'reason'\]"),
        (STOP, {"kind": "load"}, "kind load has the fields"),
        (STOP, {"kind": "dance"}, "this is no order"),
    ],
)
def test_other_orders_are_not_taken(order: Order, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        order_from_json(json.dumps({**json.loads(order_to_json(order)), **changes}))


@pytest.mark.parametrize("text", ["", "[]", "{}", '"order"', "{", " " * (MAX_ORDER_BYTES + 1)])
def test_what_is_no_order_is_not_taken(text: str) -> None:
    with pytest.raises(ValueError):
        order_from_json(text)


# -------------------------------------------------------------------------------------- ranks in threads


class Island:
    """Three ranks in the threads of this process."""

    SIZE = 3

    def __init__(self) -> None:
        self.store: Any = dist.HashStore()  # type: ignore[attr-defined]
        self.pool = ThreadPoolExecutor(self.SIZE)
        self.made: list[IslandRanks] = []

    def ranks(self, *, seconds: float = DEADLINE, silence: float = DEADLINE) -> list[IslandRanks]:
        def build(rank: int) -> IslandRanks:
            group: Any = dist.ProcessGroupGloo(self.store, rank, self.SIZE, timedelta(seconds=seconds))
            return IslandRanks(
                rank, self.SIZE, lambda: self.store, group, seconds=seconds, silence=silence, beat=0.02
            )

        self.made = self.all(build)
        return self.made

    def all(self, act: Callable[[int], Any]) -> list[Any]:
        """What ``act`` returns for every rank, or raises."""

        def safely(rank: int) -> Any:
            try:
                return act(rank)
            except ExchangeError as error:
                return error

        return [future.result(DEADLINE) for future in [self.pool.submit(safely, r) for r in range(self.SIZE)]]

    def close(self) -> None:
        for one in self.made:
            one.close("test over")
        self.pool.shutdown()


@pytest.fixture
def island() -> Iterator[Island]:
    made = Island()
    yield made
    made.close()


def test_all_ranks_get_the_leaders_orders_in_turn_and_the_store_keeps_none(island: Island) -> None:
    ranks: list[IslandRanks] = island.ranks()
    given = [
        ROUND,
        LoadOrder("t", 4),
        DonateOrder("u", 4, 0, 2),
        ReplayOrder(2, 2),
        *(replace(ROUND, round=r) for r in range(9)),
        STOP,
    ]

    def follow(rank: int) -> list[Order]:
        return [ranks[rank].share(order if rank == 0 else None) for order in given]

    assert island.all(follow) == [given] * island.SIZE
    for one in ranks:
        one.close("done")
    left = island.store.num_keys()
    assert left < len(given), "what all have read is removed, but for the last words"
    with pytest.raises(ValueError, match="rank 0 gives the order"):
        ranks[0].share(None)
    with pytest.raises(ValueError, match="no other rank"):
        ranks[1].share(STOP)


def test_agreement_needs_every_rank(island: Island) -> None:
    ranks = island.ranks()
    assert island.all(lambda rank: ranks[rank].agree(True)) == [True] * 3
    assert island.all(lambda rank: ranks[rank].agree(rank != 1)) == [False] * 3


def test_answers_of_any_size_are_gathered_by_rank(island: Island) -> None:
    ranks = island.ranks()
    for answers in ([b"", b"", b""], [b"a", b"", b"ccc"], [bytes(70_000), b"\xff" * 3, b"x"]):
        assert island.all(lambda rank, a=answers: ranks[rank].gather("answer", a[rank])) == [answers] * 3


def test_ranks_that_are_at_different_steps_say_which(island: Island) -> None:
    ranks = island.ranks()
    errors = island.all(lambda rank: ranks[rank].gather("digests" if rank else "losses", b""))
    assert "rank 0 is at losses, rank 1 at something else" in str(errors[0])
    assert "rank 1 is at digests, rank 0 at something else" in str(errors[1])


def test_answer_that_is_too_long_is_refused_by_all(island: Island, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.island.ranks.MAX_ANSWER_BYTES", 10)
    ranks = island.ranks()
    errors = island.all(lambda rank: ranks[rank].gather("digests", bytes(11 if rank == 1 else 1)))
    assert all("rank 1 gives 11 bytes for digests; at most 10" in str(error) for error in errors)


def test_rank_that_does_not_come_is_named_with_what_it_was_asked_for(island: Island) -> None:
    ranks = island.ranks(seconds=1.0)  # in which the other two come
    errors = island.all(lambda rank: None if rank == 2 else ranks[rank].gather("digests", b""))
    for rank in (0, 1):
        assert f"digests: rank {rank} waits in vain for the other ranks" in str(errors[rank])
        assert "rank 2 has not come" in str(errors[rank])


def test_leader_that_ends_tells_those_who_wait_for_its_order(island: Island) -> None:
    ranks = island.ranks()

    def act(rank: int) -> Any:
        return ranks[0].close("the coordinator refused it") if rank == 0 else ranks[rank].share(None)

    for error in island.all(act)[1:]:
        assert "the next order will not come: rank 0 has ended (the coordinator refused it)" in str(error)
    with pytest.raises(ExchangeError, match="have been told that nothing more comes"):
        ranks[0].share(STOP)
    ranks[0].close("twice does no harm")


class Recorder:
    """A store that keeps a record, and may fail."""

    def __init__(self) -> None:
        self._store: Any = dist.HashStore()  # type: ignore[attr-defined]
        self.sets: list[str] = []
        self.enough = threading.Event()
        self.broken = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def set(self, key: str, value: str) -> None:
        if self.broken:
            raise RuntimeError("Connection reset by peer\nand a trace")
        self._store.set(key, value)
        self.sets.append(value)
        if len(self.sets) >= 5:
            self.enough.set()


def test_leader_is_waited_for_while_it_lives_and_not_longer() -> None:
    store = Recorder()
    receiver = Receiver(store, "order", 1, silence=0.2)
    with pytest.raises(ExchangeError, match=r"the next order will not come: rank 0.* the limit is 0.2 s"):
        receiver.receive("the next order")
    sender = Sender(store, "order", 1, every=0.01)
    assert store.enough.wait(DEADLINE), "signs of life"
    sender.send("come")
    assert receiver.receive("the next order") == "come"
    store.broken = True  # the leader can tell nobody any more
    with pytest.raises(ExchangeError, match="no sign of life"):
        receiver.receive("the next order")
    with pytest.raises(ExchangeError, match=r"cannot be told anything: Connection reset by peer$"):
        sender.send("gone")
    sender.close("done")


def test_reader_that_leaves_ends_with_the_next_sign_of_life() -> None:
    store = Recorder()
    receiver = Receiver(store, "order", 1, silence=DEADLINE)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(receiver.receive, "the next order")
        receiver.close()
        sender = Sender(store, "order", 1, every=0.01)
        with pytest.raises(ExchangeError, match="this rank is leaving"):
            waiting.result(DEADLINE)
    sender.close("done")


def test_messages_without_readers_go_nowhere_and_long_ones_are_refused() -> None:
    store = Recorder()
    sender = Sender(store, "order", 0)
    sender.send("x")
    with pytest.raises(ValueError, match="less than 1048576 bytes"):
        sender.send("x" * (1 << 20))
    sender.close("done")
    assert not store.sets


@pytest.mark.parametrize("island_of_one", [False, True])
def test_single_rank_needs_nobody(island_of_one: bool) -> None:
    ranks: Ranks = Alone()
    if island_of_one:
        store: Any = dist.HashStore()  # type: ignore[attr-defined]
        ranks = IslandRanks(0, 1, lambda: store, None, seconds=DEADLINE)
    assert (ranks.rank, ranks.size) == (0, 1)
    assert ranks.share(STOP) == STOP
    assert ranks.agree(True) and not ranks.agree(False)
    assert ranks.gather("digest", b"abc") == [b"abc"] and ranks.gather("digest", b"") == [b""]
    ranks.close("done")


# ------------------------------------------------------------------------------------- ranks as processes

SCRIPT = """
import os, signal, sys
from node.exchange.base import ExchangeError, StopOrder
from node.island.ranks import IslandRanks

ranks = IslandRanks.from_environment(seconds=30.0)
order = ranks.share(StopOrder(True, "all is done", False) if ranks.rank == 0 else None)
print(order.reason, ranks.gather("rank", str(ranks.rank).encode()), flush=True)
try:
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.gather("digests", b"x")
except ExchangeError as error:
    print("ENDED", error, flush=True)
ranks.close("the end")
"""


def test_processes_meet_by_torchruns_environment_and_miss_one_that_was_killed(tmp_path: Path) -> None:
    port = free_port()
    root = str(Path(__file__).parents[2])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env={
                **os.environ,
                "PYTHONPATH": root,
                "OMP_NUM_THREADS": "1",
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=2 * DEADLINE) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    (out, err), (other, _) = outputs
    assert (ranks[0].returncode, ranks[1].returncode) == (0, -signal.SIGKILL), err
    assert other == "all is done [b'0', b'1']\n"
    assert out.startswith(f"{other}ENDED digests: rank 0 waits in vain for the other ranks of this node"), err
    assert "rank 1 has not come" in out and ".cc:" not in out
    assert "waitForInput" not in err, "waiting writes nothing into the log"


def test_process_without_torchrun_is_told_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ExchangeError, match=r"\(WORLD_SIZE, MASTER_ADDR, MASTER_PORT is missing\).*torchrun"):
        IslandRanks.from_environment(seconds=1.0)
