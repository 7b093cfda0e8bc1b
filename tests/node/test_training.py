"""Rounds of several micro-steps on a tiny model: batches, rates, losses, bad gradients, progress."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from node.batches import micro_batches
from node.clocks import Clocks
from node.events import Abstained, MicroStep, Notice, RoundDone
from node.exchange.base import LoadOrder, StopOrder
from node.metrics import NodeMetrics
from node.training import NOTICE_SECONDS, PROGRESS_SECONDS, Work
from protos.digests import state_digest
from tests.node.local_sgd import RATE, LocalSgd, local_node, optimizer_of
from tests.node.tiny import (
    BATCH,
    CONTEXT,
    STOP,
    Node,
    ScriptedExchange,
    TinyData,
    TinyModel,
    equal,
    opened,
    run_file,
)

STEPS = 4


# ------------------------------------------------------------------------------------------------- batches


@given(start=st.integers(0, 1000), count=st.integers(1, 40), steps=st.integers(1, 40))
def test_samples_are_split_as_torch_splits_tensors_without_empty_batches(
    start: int, count: int, steps: int
) -> None:
    samples = torch.arange(start, start + count)
    expected = [part.tolist() for part in torch.tensor_split(samples, steps) if len(part)]
    batches = micro_batches(start, count, steps)
    assert [list(range(first, first + size)) for first, size in batches] == expected
    assert len(batches) == min(count, steps)


@given(losses=st.lists(st.tuples(st.floats(-5, 5), st.integers(1, 50)), min_size=1, max_size=20))
def test_loss_of_a_round_is_weighted_by_tokens(losses: list[tuple[float, int]]) -> None:
    work = Work(0)
    for loss, tokens in losses:
        work.count(loss, tokens)
    total = sum(tokens for _, tokens in losses)
    assert work.tokens == total
    assert work.loss == pytest.approx(sum(loss * tokens for loss, tokens in losses) / total, abs=1e-12)
    if len(losses) == 1:
        assert work.loss == losses[0][0]


def test_round_of_k_micro_steps_is_k_plain_steps_and_their_mean_written_out() -> None:
    rounds = 5
    node = local_node(rounds)
    model, data = TinyModel(), TinyData()
    momenta = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    losses = []
    for round_index in range(rounds):
        anchor = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        for step in range(STEPS):
            model.zero_grad()
            loss = model.loss(data.batch((round_index * STEPS + step) * BATCH, BATCH, 3))
            loss.backward()
            losses.append(float(loss.detach()))
            rate = RATE * (0.05 + 0.95 * (1.0 - (round_index + step / STEPS) / rounds))
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    momenta[name].mul_(0.5).add_(parameter.grad)
                    parameter -= momenta[name] * rate
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(anchor[name] - (anchor[name] - parameter))
    summary = node.run()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(node.parameters()[name], parameter.detach(), rtol=0, atol=1e-6)
    means = [sum(losses[index : index + STEPS]) / STEPS for index in range(0, len(losses), STEPS)]
    assert [event.loss for event in node.of(RoundDone)] == pytest.approx(means, rel=1e-5)
    assert means[-1] < means[0]
    assert node.data.read == [(index * BATCH, BATCH, 3) for index in range(rounds * STEPS)]
    assert summary.tokens == rounds * STEPS * BATCH * CONTEXT
    assert [(event.micro_steps, event.skipped) for event in node.of(RoundDone)] == [(STEPS, 0)] * rounds


def test_learning_rate_follows_the_micro_steps_and_is_the_rounds_own_when_the_result_is_applied() -> None:
    node = local_node(4)
    node.run()

    def rate(moment: float) -> float:
        return RATE * (0.05 + 0.95 * (1.0 - moment / 4))

    calls = optimizer_of(node).calls
    steps = [value for name, _, value in calls if name == "step"]
    assert steps == pytest.approx([rate(r + k / STEPS) for r in range(4) for k in range(STEPS)])
    assert [(name, number) for name, number, _ in calls[: STEPS + 2]] == [
        *(("step", index) for index in range(STEPS)),
        ("propose", 0),
        ("counted", 0),
    ]
    applied = [value for name, _, value in calls if name == "counted"]
    assert applied == pytest.approx(list(map(rate, range(4))))


def test_fewer_samples_than_micro_steps_make_fewer_steps() -> None:
    orders = [opened(0, lease_start=7, lease_count=2), STOP]
    node = local_node(exchange=ScriptedExchange(orders, {0: None}), send_after=2)
    node.run()
    assert node.data.read == [(7, 1, 3), (8, 1, 3)]
    (event,) = node.of(RoundDone)
    assert (event.micro_steps, event.tokens) == (2, 2 * CONTEXT)
    names = [name for name, _, _ in optimizer_of(node).calls]
    assert names == ["step", "propose", "step", "apply"]  # half of the steps are sent, as of four


# -------------------------------------------------------------------------------------------- bad gradients


class PoisonedModel(TinyModel):
    """Its loss is NaN in the given calls."""

    def __init__(self, poisoned: Callable[[int], bool]) -> None:
        super().__init__()
        self.calls, self._poisoned = 0, poisoned

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().loss(tokens) * (math.nan if self._poisoned(self.calls - 1) else 1.0)


class Ticking:
    """A wall clock that moves on by ``seconds`` whenever a loss is computed."""

    def __init__(self, seconds: float) -> None:
        self.now, self._seconds = 1000.0, seconds

    def clocks(self) -> Clocks:
        return Clocks(wall=lambda: self.now, cpu=lambda: 0.0)

    def model(self, poisoned: Callable[[int], bool] = lambda call: False) -> TinyModel:
        def tick(call: int) -> bool:
            self.now += self._seconds
            return poisoned(call)

        return PoisonedModel(tick)


def test_bad_micro_steps_are_left_out_counted_and_told_now_and_then() -> None:
    per_notice = 5  # rounds
    clock = Ticking(NOTICE_SECONDS / STEPS / per_notice)
    node = local_node(20, model=clock.model(lambda call: call % STEPS == 1), clocks=clock.clocks())
    summary = node.run()
    assert (summary.trained, summary.abstained) == (20, 0)
    assert [event.skipped for event in node.of(RoundDone)] == [1] * 20
    assert summary.tokens == 20 * (STEPS - 1) * BATCH * CONTEXT
    assert all(math.isfinite(event.loss) for event in node.of(RoundDone))
    texts = [event.text for event in node.of(Notice)]
    assert texts == [
        f"round {round_index + 1}: 1 of 4 micro-steps were left out, their gradients are not finite "
        f"({round_index + 1} so far)"
        for round_index in range(0, 20, per_notice)
    ]
    metrics = NodeMetrics()
    for event in node.events:
        metrics.observe(event)
    assert metrics.registry.get_sample_value("atoll_node_skipped_micro_steps_total") == 20


def test_node_without_a_finite_gradient_abstains_and_its_state_stands_still() -> None:
    node = local_node(3, model=PoisonedModel(lambda call: STEPS <= call < 2 * STEPS))
    summary = node.run()
    assert (summary.trained, summary.abstained) == (2, 1)
    (event,) = node.of(Abstained)
    assert (event.round, event.reason) == (1, "none of 4 gradients is finite (last loss nan)")
    first, second, third = node.of(RoundDone)
    assert first.digest == second.digest != third.digest
    assert math.isnan(second.loss) and second.tokens == 0
    assert summary.tokens == 2 * STEPS * BATCH * CONTEXT and not node.of(Notice)
    assert ("apply", 1) in {(name, number) for name, number, _ in optimizer_of(node).calls}


def test_result_of_local_steps_that_is_not_finite_is_an_abstention() -> None:
    class Exploding(LocalSgd):
        def local_step(self, round_index: int, micro_step: int) -> bool:
            finite = super().local_step(round_index, micro_step)
            if (round_index, micro_step) == (0, 1):
                with torch.no_grad():
                    next(iter(self._named.values())).fill_(math.inf)
            return finite

    model = TinyModel()
    node = Node(run_file(2), model=model, optimizer=Exploding(model, 2))
    node.run()
    (event,) = node.of(Abstained)
    assert event.reason.startswith("what 2 micro-steps have changed is not finite (last loss ")
    assert [event.counted for event in node.of(RoundDone)] == [False, True]
    assert all(tensor.isfinite().all() for tensor in node.parameters().values())


# ------------------------------------------------------------------------------------------------ progress


def test_long_round_tells_every_few_seconds_how_far_it_is() -> None:
    clock = Ticking(PROGRESS_SECONDS / 2.5)
    node = local_node(2, steps=10, model=clock.model(), clocks=clock.clocks())
    node.run()
    told = [(event.round, event.micro_step, event.micro_steps) for event in node.of(MicroStep)]
    assert told == [(r, k, 10) for r in range(2) for k in (3, 6, 9)]
    assert all(math.isfinite(event.loss) for event in node.of(MicroStep))


def test_short_rounds_and_rounds_of_one_step_tell_nothing_in_between() -> None:
    clock = Ticking(PROGRESS_SECONDS / 8)
    node = local_node(6, model=clock.model(), clocks=clock.clocks())
    node.run()
    slow = Ticking(PROGRESS_SECONDS * 3)
    single = Node(run_file(3), model=slow.model(), clocks=slow.clocks())
    single.run()
    assert not node.of(MicroStep) and not single.of(MicroStep)


# ---------------------------------------------------------------------------- evaluation, joiners, resuming


def test_validation_loss_is_that_of_the_shared_state() -> None:
    node = local_node(2, send_after=1, mix=0.5, run={"evaluate_every": 1, "validation_windows": 9})
    summary = node.run()
    own = node.parameters()
    shared = optimizer_of(node).shared_tensors()
    assert not equal(own, shared)
    other = TinyModel()
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            parameter.copy_(shared[name])
        expected = float(other.loss(TinyData().validation(9)))
        apart = float(node.model.loss(TinyData().validation(9)))
    assert summary.validation_loss == pytest.approx(expected, rel=1e-6)
    assert abs(apart - expected) > 1e-4


def test_joiner_brings_its_model_in_line_with_the_loaded_state() -> None:
    donor = LocalSgd(TinyModel(seed=7), STEPS).shared_tensors()
    exchange = ScriptedExchange([LoadOrder("t", 5), StopOrder(True, "done", False)], {})
    exchange.states["t"] = donor, state_digest(donor)
    node = local_node(exchange=exchange)
    node.run()
    assert equal(node.parameters(), donor)
    assert [name for name, _, _ in optimizer_of(node).calls] == ["loaded"]
