"""The worker loop on a tiny model: catching up, loading and donating the shared state."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from node.checkpoint import Saving
from node.events import (
    Abstained,
    RoundDone,
    RoundMissed,
    StateLoaded,
    StateSent,
    TransferFailed,
)
from node.exchange.base import DonateOrder, ExchangeError, LoadOrder
from node.exchange.trouble import RoundLost, TransferError
from optim.methods import build_method
from protos.digests import state_digest
from protos.runfile import RunFile
from tests.node.tiny import (
    STOP,
    Node,
    ScriptedExchange,
    TinyModel,
    equal,
    opened,
    payload_of_round_0,
    run_file,
    schedule,
)

# ---------------------------------------------------------------------------------------------- catching up


def test_catching_up_applies_the_result_without_computing() -> None:
    run = run_file()
    result = payload_of_round_0(run)
    node = Node(run, ScriptedExchange([opened(0, result_ready=True), STOP], {0: result}))
    start = node.parameters()
    summary = node.run()
    assert node.exchange.contributions == [(0, None, "catching up")]
    assert node.data.read == [] and not node.of(Abstained)
    assert all(not tensor.any() for tensor in node.optimizer.local_tensors().values())
    assert not equal(node.parameters(), start)
    assert (summary.trained, summary.abstained, summary.round) == (0, 0, 1)
    (report,) = node.exchange.reports
    assert (report.round, report.tokens) == (0, 0) and math.isnan(report.loss)
    assert report.state_digest == state_digest(node.optimizer.shared_tensors())


def test_result_without_payload_changes_no_parameter() -> None:
    node = Node(run_file(), ScriptedExchange([opened(0), opened(1), STOP], {0: None, 1: None}))
    start = node.parameters()
    node.run()
    assert equal(node.parameters(), start)
    assert [event.counted for event in node.of(RoundDone)] == [False, False]


def test_round_that_was_applied_already_is_passed_over() -> None:
    node = Node(run_file(), ScriptedExchange([opened(0), opened(0, epoch=2), STOP], {0: None}))
    assert node.run().round == 1
    assert len(node.exchange.contributions) == 1


def test_round_that_is_too_far_ahead_is_an_error() -> None:
    node = Node(run_file(), ScriptedExchange([opened(3)], {}))
    with pytest.raises(ExchangeError, match="opened round 4, but this node's state is that after round 0"):
        node.run()


# ------------------------------------------------------------------------------------------ state transfers


def donor_state(run: RunFile) -> tuple[dict[str, torch.Tensor], str]:
    model = TinyModel(seed=7)
    tensors = build_method(run.method, model).shared_tensors()
    return tensors, state_digest(tensors)


def test_joiner_loads_the_state_and_trains_from_its_round() -> None:
    run = run_file()
    exchange = ScriptedExchange([LoadOrder("t", 5), opened(5), STOP], {5: None})
    tensors, digest = donor_state(run)
    exchange.states["t"] = tensors, digest
    node = Node(run, exchange)
    summary = node.run()
    assert exchange.readies == [(5, digest)]
    assert equal(node.optimizer.shared_tensors(), tensors)
    assert summary.round == 6 and summary.digest == digest
    (event,) = node.of(StateLoaded)
    assert (event.round, event.digest, event.nbytes) == (5, digest, sum(t.nbytes for t in tensors.values()))
    rates = [group["lr"] / group["initial_lr"] for group in node.optimizer.param_groups]
    assert rates == [schedule(run, 5)] * len(rates)


def test_broken_transfer_is_repeated_from_another_donor() -> None:
    run = run_file()
    tensors, digest = donor_state(run)
    exchange = ScriptedExchange([LoadOrder("cut", 5), LoadOrder("bad", 5), LoadOrder("good", 5), STOP], {})
    exchange.states = {
        "cut": TransferError("the donor died"),
        "bad": (tensors, "0123"),
        "good": (tensors, digest),
    }
    node = Node(run, exchange)
    node.run()
    reasons = [event.reason for event in node.of(TransferFailed)]
    assert reasons[0] == "the donor died"
    assert reasons[1] == f"the loaded state has the digest {digest}, the donor announced 0123"
    assert exchange.readies == [(5, digest)]


def test_half_loaded_state_is_neither_trained_nor_donated_nor_saved(tmp_path: Path) -> None:
    run = run_file()
    exchange = ScriptedExchange([LoadOrder("cut", 5), DonateOrder("d", 0), opened(0)], {})
    exchange.states["cut"] = TransferError("the donor died")
    node = Node(run, exchange, saving=Saving(tmp_path))
    with pytest.raises(ExchangeError, match="incomplete after a broken transfer"):
        node.run()
    node.worker.save()
    assert not exchange.donated and not exchange.contributions
    assert list(tmp_path.iterdir()) == []


def test_donor_sends_the_state_of_the_asked_round_only() -> None:
    run = run_file()
    orders = [opened(0), DonateOrder("wrong", 3), DonateOrder("broken", 1), DonateOrder("right", 1), STOP]
    exchange = ScriptedExchange(orders, {0: None})
    exchange.states["broken"] = TransferError("every joiner left")
    node = Node(run, exchange)
    node.run()
    digest = state_digest(node.optimizer.shared_tensors())
    assert exchange.donated == [(DonateOrder("right", 1), digest)]
    assert [event.reason for event in node.of(TransferFailed)] == [
        "asked for the state of round 3, this node holds that of round 1",
        "every joiner left",
    ]
    assert [event.round for event in node.of(StateSent)] == [1]


def test_lost_round_leaves_the_shared_state_and_waits_for_a_new_one() -> None:
    run = run_file()
    tensors, digest = donor_state(run)
    exchange = ScriptedExchange(
        [opened(0), LoadOrder("t", 4), opened(4), STOP], {0: RoundLost("cut off"), 4: None}
    )
    exchange.states["t"] = tensors, digest
    node = Node(run, exchange)
    start = node.parameters()
    seen: list[bool] = []
    node.worker._on_event = lambda event: (
        node.events.append(event),
        seen.append(equal(node.parameters(), start)),
    )[0]
    node.run()
    assert [event.round for event in node.of(RoundMissed)] == [0] and seen[0]
    assert [report.round for report in exchange.reports] == [4]
    assert any(
        tensor.any() for tensor in node.optimizer.local_tensors().values()
    )  # momenta are the node's own
