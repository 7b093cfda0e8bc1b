"""What the ranks of a node do when its leader has no more orders: they save together, and end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from node.checkpoint import Saving, newest
from node.events import Notice
from node.exchange.base import ExchangeError, LoadOrder, Order, StopOrder
from node.exchange.order_json import order_from_json, order_to_json
from node.ranks import Ranks
from tests.node.tiny import Node, ScriptedExchange, TinyModel, run_file
from tests.node.virtual_ranks import on_all


class Orders:
    """Ranks that also share orders, as messages."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.rank, self.size, self.agree, self.gather = ranks.rank, ranks.size, ranks.agree, ranks.gather

    def share(self, order: Order | None) -> Order:
        text = b"" if order is None else order_to_json(order).encode()
        return order_from_json(self._ranks.gather("the next order", text)[0].decode())

    def close(self, reason: str) -> None:
        pass


class Ending(ScriptedExchange):
    """The leader's exchange; the coordinator has something else than an order for it."""

    def __init__(self, orders: list[Order], end: BaseException) -> None:
        super().__init__(orders, {})
        self._end = end

    def next_order(self) -> Order:
        if not self._orders:
            raise self._end
        return super().next_order()

    def download(self, order: LoadOrder, rows: Any) -> Any:
        raise self._end


def node_of(ranks: Ranks, leading: Ending, folder: Path) -> Node:
    """Rank 0 holds all of the model."""
    own = leading if ranks.rank == 0 else ScriptedExchange([], {})
    model = TinyModel() if ranks.rank == 0 else TinyModel().to("meta")
    node = Node(run_file(), own, model=model, ranks=Orders(ranks), lane=own, saving=Saving(folder))
    if ranks.rank:
        node.worker._exchange = None
    return node


def test_ranks_that_lose_their_run_save_before_they_end(tmp_path: Path) -> None:
    lost = ExchangeError("the coordinator is gone")

    def run(ranks: Ranks) -> Any:
        return node_of(ranks, Ending([], lost), tmp_path).run()

    leader, follower = on_all(2, run)
    assert leader is lost
    assert not follower.done and follower.reason == str(lost)
    assert newest(tmp_path) is not None


def test_an_interrupted_download_leaves_the_state_that_all_ranks_save(tmp_path: Path) -> None:
    def run(ranks: Ranks) -> Any:
        node = node_of(ranks, Ending([LoadOrder("t", 3)], KeyboardInterrupt()), tmp_path)
        return node.run(), [event.text for event in node.of(Notice)]

    for summary, notices in on_all(2, run):  # type: ignore[misc]
        assert not summary.done and not notices
    saved = newest(tmp_path)
    assert saved is not None and saved.name == "round-00000000"


def test_a_stop_is_for_all_ranks(tmp_path: Path) -> None:
    def run(ranks: Ranks) -> Any:
        orders: list[Order] = [StopOrder(False, "as told", False)]
        return node_of(ranks, Ending(orders, AssertionError("one order is enough")), tmp_path).run()

    assert [summary.reason for summary in on_all(2, run)] == ["as told", "as told"]  # type: ignore[union-attr]
