"""Orders of the coordinator, as its messages say them."""

from __future__ import annotations

from node.exchange.base import DonateOrder, LoadOrder, Order, ReplayOrder, RoundOrder, StopOrder
from protos import atoll_pb2 as pb


def order_of(message: pb.CoordinatorMessage, generation: int) -> Order | None:
    """The order in a message; ``None`` if it is none, or of a kind that a later version may have added."""
    kind = message.WhichOneof("kind")
    if kind == "round_open":
        opened = message.round_open
        return RoundOrder(
            round=opened.round,
            epoch=opened.epoch,
            members=tuple(opened.members),
            lease_start=opened.lease_start,
            lease_count=opened.lease_count,
            evaluate=opened.evaluate,
            result_ready=opened.result_ready,
            frontier=opened.frontier,
            topology=opened.topology,
            generation=generation,
        )
    if kind == "donate":
        donate = message.donate
        return DonateOrder(donate.snapshot, donate.round, donate.first, donate.count)
    if kind == "load_state":
        load = message.load_state
        return LoadOrder(load.snapshot, load.round, load.frontier)
    if kind == "replay":
        return ReplayOrder(message.replay.first, message.replay.count, message.replay.frontier)
    if kind == "stop":
        return StopOrder(message.stop.done, message.stop.reason, message.stop.evaluate)
    return None
