"""The local exchange: the orders of a coordinator, its reduction, and its memory."""

from __future__ import annotations

import pytest
import torch

from node.exchange.base import ExchangeError, RoundOrder, StopOrder
from node.exchange.local import LocalExchange
from protos.buckets import Bucket, BucketTable, TableSchedule
from tests.node.hub_rig import pattern, report, tables

ONE = tables(64)


def local_orders(exchange: LocalExchange) -> list[RoundOrder]:
    orders = []
    while isinstance(order := exchange.next_order(), RoundOrder):
        assert exchange.next_order() == order  # asking again changes nothing
        orders.append(order)
        exchange.reduce(order, torch.zeros(64, dtype=torch.uint8))
    assert isinstance(order, StopOrder) and order.done and order.reason == "all 7 rounds are done"
    return orders


def test_local_exchange_gives_the_orders_of_a_coordinator() -> None:
    orders = local_orders(LocalExchange(ONE, rounds=7, batch=3, evaluate_every=2))
    assert [order.round for order in orders] == list(range(7))
    assert [(order.lease_start, order.lease_count) for order in orders] == [(3 * r, 3) for r in range(7)]
    assert [order.round for order in orders if order.evaluate] == [1, 3, 5, 6]
    assert local_orders(LocalExchange(ONE, rounds=7, batch=3, evaluate_every=2, start=4)) == orders[4:]
    assert [o.round for o in local_orders(LocalExchange(ONE, rounds=7, batch=3)) if o.evaluate] == [6]


def test_rounds_of_several_micro_steps_read_that_many_batches() -> None:
    def micro_steps(round_index: int) -> int:
        return 1 if round_index == 0 else 4

    orders = local_orders(LocalExchange(ONE, rounds=7, batch=3, micro_steps=micro_steps))
    assert [(o.lease_start, o.lease_count) for o in orders[:3]] == [(0, 3), (3, 12), (15, 12)]
    resumed = LocalExchange(ONE, rounds=7, batch=3, micro_steps=micro_steps, start=5)
    assert local_orders(resumed) == orders[5:]


def test_result_of_votes_and_exact_means_is_the_payload_and_an_abstention_has_none() -> None:
    exchange = LocalExchange(ONE, rounds=2, batch=1)
    payload = torch.arange(64, dtype=torch.uint8)
    order = exchange.next_order()
    assert isinstance(order, RoundOrder)
    result = exchange.reduce(order, payload)
    assert result.payload is payload and result.counted and result.voters == ("node-0",)
    assert not exchange.reducer_tensors()
    with pytest.raises(ExchangeError, match="round 0 was contributed to, round 1 is open"):
        exchange.reduce(order, payload)
    order = exchange.next_order()
    assert isinstance(order, RoundOrder)
    result = exchange.reduce(order, None, "not finite")
    assert result.payload is None and not result.counted and result.reason == "no voters: not finite"
    assert exchange.bytes_counted() == (0, 0)


def test_every_round_has_the_sizes_of_its_own_table_and_losses_are_carried_on() -> None:
    wide = BucketTable((Bucket.of("a", "mean", [("a", (7, 30))], result="int8"),))
    plain = BucketTable((Bucket.of("b", "mean", [("b", (96,))]),))
    schedule = TableSchedule((wide, plain), (0, 1))

    def values(table: BucketTable, seed: int) -> torch.Tensor:
        bucket = table.buckets[0]
        out = torch.zeros(table.nbytes, dtype=torch.uint8)
        generator = torch.Generator().manual_seed(seed)
        out[: 4 * bucket.elements] = torch.randn(bucket.elements, generator=generator).view(torch.uint8)
        return out

    def results(exchange: LocalExchange) -> list[torch.Tensor]:
        found = []
        while isinstance(order := exchange.next_order(), RoundOrder):
            result = exchange.reduce(order, values(schedule.of(order.round), order.round)).payload
            assert result is not None and result.numel() == schedule.of(order.round).result_nbytes
            found.append(result.clone())
        return found

    def exchange(rounds: int, start: int = 0, **options: dict[str, torch.Tensor]) -> LocalExchange:
        return LocalExchange(schedule, rounds=rounds, batch=1, start=start, **options)

    whole = results(exchange(6))
    first = exchange(3)
    results(first)
    kept = {name: tensor.clone() for name, tensor in first.reducer_tensors().items()}
    assert kept and all(tensor.any() for tensor in kept.values())
    resumed = results(exchange(6, start=3, reducer=kept))
    assert all(torch.equal(left, right) for left, right in zip(whole[3:], resumed, strict=True))
    forgetful = results(exchange(6, start=3))
    assert not all(torch.equal(left, right) for left, right in zip(whole[3:], forgetful, strict=True))


def test_memory_moves_on_once_a_round_is_applied() -> None:
    """An interrupt may come between: the checkpoint is then of the state before the round."""
    coded = TableSchedule((BucketTable((Bucket.of("a", "mean", [("a", (64,))], result="1bit"),)),))
    exchange = LocalExchange(coded, rounds=2, batch=1)
    order = exchange.next_order()
    assert isinstance(order, RoundOrder)
    exchange.reduce(order, torch.arange(64.0).view(torch.uint8))
    assert not exchange.reducer_tensors()
    exchange.report(report(0, "s1"))
    assert exchange.reducer_tensors()


def test_local_exchange_refuses_impossible_runs() -> None:
    with pytest.raises(ValueError, match="cannot start at round 8"):
        LocalExchange(ONE, rounds=7, batch=1, start=8)
    with pytest.raises(ValueError, match="at least one sample"):
        LocalExchange(ONE, rounds=7, batch=0)


def test_payload_of_another_size_is_refused_where_it_would_be_decoded() -> None:
    coded = TableSchedule((BucketTable((Bucket.of("a", "mean", [("a", (64,))], codec="int8"),)),))
    exchange = LocalExchange(coded, rounds=1, batch=1)
    order = exchange.next_order()
    assert isinstance(order, RoundOrder)
    with pytest.raises(ValueError, match="the bucket table needs 128"):
        exchange.reduce(order, pattern(64))
