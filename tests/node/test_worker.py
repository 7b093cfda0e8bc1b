"""The worker loop on a tiny model: against plain loops, bad gradients, evaluation, clocks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from node.checkpoint import Saving, find, load
from node.clocks import Clocks
from node.events import (
    Abstained,
    Evaluated,
    Notice,
    RoundDone,
    Saved,
    Stopped,
)
from node.exchange.base import RoundOrder, RoundResult, StopOrder
from optim.methods import build_method
from protos.digests import state_digest
from tests.node.tiny import (
    BATCH,
    STOP,
    Node,
    ScriptedExchange,
    TinyData,
    TinyModel,
    equal,
    opened,
    payload_of_round_0,
    run_file,
    schedule,
)

METHODS = ("sign-muon", "signum", "ddp-muon", "ddp-adamw")


# --------------------------------------------------------------------------------------------- world size 1


def test_world_size_1_is_signum_written_out_by_hand() -> None:
    run = run_file(rounds=12, method="signum")
    node = Node(run)
    model, data = TinyModel(), TinyData()
    momenta = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    losses = []
    for round_index in range(12):
        loss = model.loss(data.batch(round_index * BATCH, BATCH, run.run.seed))
        model.zero_grad()
        loss.backward()
        losses.append(float(loss.detach()))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                momenta[name].lerp_(parameter.grad, 1 - 0.95)
                direction = parameter.grad.lerp(momenta[name], 0.95)
                rate = run.method.lr if name in ("inner.weight", "outer.weight") else run.method.vector_lr
                if name == "outer.weight":
                    rate = run.method.embedding_lr  # the output head
                parameter -= torch.sign(direction) * (rate * schedule(run, round_index))
    summary = node.run()
    assert equal(node.parameters(), {name: p.detach() for name, p in model.named_parameters()})
    assert [event.loss for event in node.of(RoundDone)] == losses
    assert (summary.done, summary.round, summary.trained, summary.abstained) == (True, 12, 12, 0)
    assert summary.tokens == 12 * BATCH * 4
    assert node.data.read == [(index * BATCH, BATCH, 3) for index in range(12)]


@pytest.mark.parametrize("method", METHODS)
def test_world_size_1_is_the_plain_torch_loop_with_the_same_optimizer(method: str) -> None:
    run = run_file(rounds=10, method=method)
    node = Node(run)
    model, data = TinyModel(), TinyData()
    optimizer = build_method(run.method, model)
    base = [group["lr"] for group in optimizer.param_groups]
    for round_index in range(10):
        for group, rate in zip(optimizer.param_groups, base, strict=True):
            group["lr"] = rate * schedule(run, round_index)
        optimizer.zero_grad()
        model.loss(data.batch(round_index * BATCH, BATCH, run.run.seed)).backward()
        optimizer.step()
    summary = node.run()
    assert equal(node.optimizer.shared_tensors(), optimizer.shared_tensors())
    assert equal(node.optimizer.local_tensors(), optimizer.local_tensors())
    assert summary.digest == state_digest(optimizer.shared_tensors())
    assert [event.digest for event in node.of(RoundDone)][-1] == summary.digest
    assert len({event.digest for event in node.of(RoundDone)}) == 10


@pytest.mark.parametrize("method", METHODS)
def test_resumed_run_equals_the_uninterrupted_one(method: str, tmp_path: Path) -> None:
    run = run_file(rounds=9, method=method)
    whole = Node(run)
    whole.run()

    first = Node(run, saving=Saving(tmp_path), rounds=5)
    assert first.run().round == 5
    assert [event.round for event in first.of(Saved)] == [5]

    second = Node(run, start=5, model=TinyModel(seed=99))
    meta = load(
        find(tmp_path),
        run_digest=run.digest,
        shared=second.optimizer.shared_tensors(),
        local=second.optimizer.local_tensors(),
    )
    assert meta.round == 5
    summary = second.run()
    assert equal(second.optimizer.shared_tensors(), whole.optimizer.shared_tensors())
    assert equal(second.optimizer.local_tensors(), whole.optimizer.local_tensors())
    assert summary.digest == whole.of(RoundDone)[-1].digest
    assert [event.loss for event in second.of(RoundDone)] == [event.loss for event in whole.of(RoundDone)][5:]


def test_checkpoints_are_written_every_so_many_rounds_and_at_the_end(tmp_path: Path) -> None:
    node = Node(run_file(rounds=7), saving=Saving(tmp_path, every=3))
    node.run()
    assert [event.round for event in node.of(Saved)] == [3, 6, 7]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["round-00000006", "round-00000007"]


def test_a_last_round_that_is_saved_in_its_turn_is_not_saved_again(tmp_path: Path) -> None:
    node = Node(run_file(rounds=6), saving=Saving(tmp_path, every=3))
    node.run()
    assert [event.round for event in node.of(Saved)] == [3, 6]


# -------------------------------------------------------------------------------------------- bad gradients


class PoisonedModel(TinyModel):
    """Its loss is not finite in the given calls."""

    def __init__(self, poisoned: set[int], value: float) -> None:
        super().__init__()
        self.calls, self._poisoned, self._value = 0, poisoned, value

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().loss(tokens) * (self._value if self.calls - 1 in self._poisoned else 1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_node_abstains_from_a_bad_batch_and_training_goes_on(value: float) -> None:
    run = run_file(rounds=6)
    node = Node(run, model=PoisonedModel({2, 3}, value))
    before: list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = []
    exchange = node.exchange
    reduce = exchange.reduce

    def spy(order: RoundOrder, payload: torch.Tensor | None, *rest: Any) -> RoundResult:
        local = {name: tensor.clone() for name, tensor in node.optimizer.local_tensors().items()}
        before.append((node.parameters(), local))
        return reduce(order, payload, *rest)

    exchange.reduce = spy
    summary = node.run()
    assert [event.round for event in node.of(Abstained)] == [2, 3]
    assert "the gradient is not finite" in node.of(Abstained)[0].reason
    assert (summary.trained, summary.abstained, summary.round) == (4, 2, 6)
    losses = [event.loss for event in node.of(RoundDone)]
    assert [math.isnan(loss) for loss in losses] == [False, False, True, True, False, False]
    assert [event.voters for event in node.of(RoundDone)][2:5] == [(), (), ("node-0",)]
    for name in before[2][0]:  # parameters and momenta stood still through both rounds
        assert torch.equal(before[2][0][name], before[3][0][name])
    assert equal(before[1][1], before[2][1]) and equal(before[2][1], before[3][1])
    digests = [event.digest for event in node.of(RoundDone)]
    assert digests[1] == digests[2] == digests[3] != digests[4]
    assert summary.tokens == 4 * BATCH * 4


def test_node_without_samples_abstains() -> None:
    node = Node(run_file(), ScriptedExchange([opened(0, lease_count=0), STOP], {0: None}))
    node.run()
    assert node.exchange.contributions == [(0, None, "no samples were leased to this node")]
    assert node.data.read == []


# ----------------------------------------------------------------------------------------------- evaluation


def test_validation_loss_is_the_mean_over_all_windows_in_nats_and_bits() -> None:
    run = run_file(rounds=4, evaluate_every=2, validation_windows=37)
    node = Node(run)
    summary = node.run()
    measured = {event.round: event.validation_loss for event in node.of(RoundDone) if event.validation_loss}
    assert list(measured) == [1, 3]
    with torch.no_grad():
        whole = float(node.model.loss(TinyData().validation(37)))
    assert measured[3] == pytest.approx(whole, rel=1e-6)
    assert summary.validation_loss == measured[3]
    assert summary.bits_per_byte == pytest.approx(whole / math.log(2) / 2.0, rel=1e-6)
    assert node.model.training


def test_stop_may_ask_for_a_last_evaluation() -> None:
    exchange = ScriptedExchange([opened(0), StopOrder(True, "done", True)], {0: None})
    node = Node(run_file(), exchange)
    summary = node.run()
    first, last = exchange.reports
    assert first.validation_loss is None
    assert (last.round, last.tokens, last.state_digest) == (0, 0, first.state_digest)
    assert last.validation_loss == summary.validation_loss == node.of(Evaluated)[0].validation_loss
    assert node.of(Stopped) == [Stopped(True, "done")]


# ------------------------------------------------------------------------------ clocks, reports, interrupts


def test_phases_and_the_share_of_compute_come_from_the_given_clocks() -> None:
    ticks = {"wall": 0.0, "cpu": 0.0}

    def clock(name: str) -> float:
        ticks[name] += 1.0
        return ticks[name]

    node = Node(run_file(rounds=3), clocks=Clocks(wall=lambda: clock("wall"), cpu=lambda: clock("cpu")))
    summary = node.run()
    event = node.of(RoundDone)[0]
    assert event.seconds == dict.fromkeys(("data", "compute", "propose", "exchange", "apply", "digest"), 1.0)
    assert (event.compute_seconds, event.busy_seconds) == (1.0, 3.0)
    assert summary.compute_share == pytest.approx(1 / 3)


def test_reports_carry_what_the_node_did() -> None:
    exchange = ScriptedExchange([opened(0), STOP], {0: payload_of_round_0(run_file())})
    node = Node(run_file(), exchange)
    node.run()
    (report,) = exchange.reports
    (event,) = node.of(RoundDone)
    assert (report.round, report.tokens, report.loss) == (0, BATCH * 4, event.loss)
    assert report.state_digest == state_digest(node.optimizer.shared_tensors()) == event.digest
    assert (event.bytes_up, event.bytes_down) == (11, 22)


def test_interrupt_ends_the_loop_after_the_round_in_progress(tmp_path: Path) -> None:
    node = Node(run_file(rounds=8), saving=Saving(tmp_path))
    node.worker._on_event = lambda event: (
        node.events.append(event),
        node.worker.interrupt() if isinstance(event, RoundDone) and event.round == 2 else None,
    )[0]
    summary = node.run()
    assert (summary.done, summary.round, summary.reason) == (False, 3, "interrupted by its user")
    assert find(tmp_path).name == "round-00000003"


def test_interrupted_wait_for_a_commit_saves_the_shared_state_and_tells_of_the_momenta(
    tmp_path: Path,
) -> None:
    class Interrupted(ScriptedExchange):
        def reduce(self, order: RoundOrder, payload: torch.Tensor | None, *rest: Any) -> RoundResult:
            assert node.worker.waiting
            raise KeyboardInterrupt

    run = run_file()
    node = Node(run, Interrupted([opened(0)], {}), saving=Saving(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        node.run()
    assert not node.worker.waiting
    node.worker.save()
    meta = load(
        find(tmp_path),
        run_digest=run.digest,
        shared=node.optimizer.shared_tensors(),
        local=node.optimizer.local_tensors(),
    )
    assert meta.round == 0
    assert [event.text for event in node.of(Notice)] == [
        "the stop came within round 1: the saved momenta are one gradient ahead"
    ]
