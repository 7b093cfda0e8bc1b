"""The worker loop on a tiny model: catching up, loading and donating the shared state."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from node.checkpoint import Saving, find
from node.events import (
    Abstained,
    Notice,
    Replayed,
    RoundDone,
    RoundMissed,
    StateLoaded,
    StateSent,
    TransferFailed,
)
from node.exchange.base import (
    DonateOrder,
    ExchangeError,
    LoadOrder,
    Order,
    ReplayOrder,
    RoundResult,
)
from node.exchange.spool import Spool
from node.exchange.tensor_bytes import Row, byte_view
from node.exchange.trouble import Kind, RoundLost, TransferError, Trouble
from optim.methods import build_method
from protos.digests import state_digest
from protos.runfile import RunFile
from tests.node.tiny import (
    BATCH,
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


def test_download_that_fails_leaves_the_state_and_tells_what_is_held() -> None:
    run = run_file()
    tensors, digest = donor_state(run)
    exchange = ScriptedExchange([LoadOrder("cut", 5), LoadOrder("bad", 5), LoadOrder("good", 5), STOP], {})
    exchange.states = {
        "cut": TransferError("the snapshot is gone"),
        "bad": (tensors, "0123"),
        "good": (tensors, digest),
    }
    node = Node(run, exchange)
    before = state_digest(node.optimizer.shared_tensors())
    node.run()
    reasons = [event.reason for event in node.of(TransferFailed)]
    assert reasons[0] == "the snapshot is gone"
    assert f"has the digest {digest}, announced was 0123" in reasons[1]
    assert exchange.readies == [(0, before), (0, before), (5, digest)]


def test_node_whose_download_failed_trains_and_donates_and_saves_what_it_holds(tmp_path: Path) -> None:
    run = run_file()
    exchange = ScriptedExchange([LoadOrder("cut", 5), DonateOrder("d", 0, 0, 1), opened(0), STOP], {0: None})
    exchange.states["cut"] = TransferError("the snapshot is gone")
    node = Node(run, exchange, saving=Saving(tmp_path))
    assert node.run().round == 1
    assert len(exchange.donated) == len(exchange.contributions) == 1
    assert find(tmp_path).name == "round-00000001"


def test_half_loaded_state_is_of_no_use_any_more(tmp_path: Path) -> None:
    class Damaged(Spool):
        def read(self, offset: int, into: memoryview) -> None:
            super().read(offset, into)
            if self.checked:
                into[0] ^= 1

        def digest(self) -> str:
            found = super().digest()
            self.checked = True
            return found

        checked = False

    class Damaging(ScriptedExchange):
        def download(self, order: LoadOrder, rows: Sequence[Row]) -> Spool:
            whole, spool = super().download(order, rows), Damaged(rows, 0, 1)
            data = memoryview(bytearray(whole.nbytes))
            whole.read(0, data)
            whole.close()
            spool.write(0, data)
            spool.state_digest = whole.state_digest
            return spool

    exchange = Damaging([LoadOrder("t", 5)], {})
    exchange.states["t"] = donor_state(run_file())
    node = Node(run_file(), exchange, saving=Saving(tmp_path))
    with pytest.raises(ExchangeError, match="once it is loaded"):
        node.run()
    node.worker.save()
    assert not exchange.readies and list(tmp_path.iterdir()) == []
    assert [event.text for event in node.of(Notice)] == [
        "nothing is saved: the state of round 0 is incomplete"
    ]


def test_donor_keeps_its_part_of_the_state_of_the_asked_round_only() -> None:
    run = run_file()
    orders = [
        opened(0),
        DonateOrder("wrong", 3, 0, 1),
        DonateOrder("broken", 1, 0, 1),
        DonateOrder("right", 1, 0, 1),
        STOP,
    ]
    exchange = ScriptedExchange(orders, {0: payload_of_round_0(run)})
    exchange.states["broken"] = TransferError("nobody wants it")
    node = Node(run, exchange)
    node.run()
    shared = node.optimizer.shared_tensors()
    whole = b"".join(bytes(byte_view(shared[name])) for name in sorted(shared))
    digest = state_digest(shared)
    assert exchange.donated == [(order, digest, whole) for order in orders[2:4]]
    assert [event.reason for event in node.of(TransferFailed)] == [
        "asked for the state of round 3, this node holds that of round 1",
        "nobody wants it",
    ]
    assert [(event.round, event.nbytes) for event in node.of(StateSent)] == [(1, len(whole))]


# ------------------------------------------------------------------------------------------------- replays


def voted(run: RunFile, rounds: int) -> dict[int, torch.Tensor | Exception | None]:
    """The results of the first rounds of a run; nobody has contributed to round 1."""
    payload = payload_of_round_0(run)
    return {index: None if index == 1 else payload.roll(index) for index in range(rounds)}


def replayed(run: RunFile, *orders: Order, rounds: int = 4) -> Node:
    node = Node(run, ScriptedExchange([*orders, STOP], voted(run, rounds)))
    node.run()
    return node


@pytest.mark.parametrize("method", ["sign-muon", "muloco-1bit"])
def test_replay_leaves_the_state_of_a_node_that_was_there(method: str) -> None:
    run = run_file(method=method)
    there = replayed(run, *(opened(index, result_ready=True) for index in range(4)))
    node = replayed(run, ReplayOrder(0, 3, 36), ReplayOrder(1, 3))
    shared = node.optimizer.shared_tensors()
    assert equal(shared, there.optimizer.shared_tensors())
    assert node.exchange.replays == [ReplayOrder(0, 3, 36), ReplayOrder(3, 1)], "the overlap is left out"
    assert [round_index for round_index, _ in node.exchange.readies] == [3, 4]
    assert node.exchange.readies[1][1] == state_digest(shared)
    nbytes = node.optimizer.tables.of(0).result_nbytes
    told = [(event.first, event.count, event.nbytes) for event in node.of(Replayed)]
    assert told == [(0, 3, 2 * nbytes), (3, 1, nbytes)]
    assert not node.data.read and not node.exchange.contributions


def test_replay_of_what_is_held_already_says_so() -> None:
    node = replayed(run_file(), ReplayOrder(0, 2), ReplayOrder(0, 2))
    (first, second) = node.exchange.readies
    assert first == second and first[0] == 2


def test_replay_that_begins_behind_a_gap_is_not_possible() -> None:
    node = replayed(run_file(), ReplayOrder(2, 2))
    assert node.exchange.replays == []
    assert [round_index for round_index, _ in node.exchange.readies] == [0]
    (event,) = node.of(TransferFailed)
    assert "from round 3 on" in event.reason


def test_replay_that_breaks_off_leaves_the_state_between_two_rounds(tmp_path: Path) -> None:
    run = run_file()
    results = {**voted(run, 2), 2: TransferError("results before round 9 are not kept")}
    node = Node(run, ScriptedExchange([ReplayOrder(0, 4), STOP], results), saving=Saving(tmp_path))
    summary = node.run()
    there = replayed(run, *(opened(index, result_ready=True) for index in range(2)))
    assert equal(node.optimizer.shared_tensors(), there.optimizer.shared_tensors())
    assert node.exchange.readies == [(2, summary.digest)] and summary.round == 2
    assert find(tmp_path).name == "round-00000002"
    assert not node.of(Replayed)


def test_damaged_result_of_a_replay_ends_the_node_before_it_is_applied(tmp_path: Path) -> None:
    run = run_file()
    results = {**voted(run, 2), 2: Trouble(Kind.PROTOCOL, "the result of round 3 is damaged")}
    node = Node(run, ScriptedExchange([ReplayOrder(0, 4)], results), saving=Saving(tmp_path))
    with pytest.raises(Trouble, match="round 3 is damaged"):
        node.run()
    node.worker.save()
    assert find(tmp_path).name == "round-00000002"


def test_interrupt_ends_a_replay_after_the_round_that_is_applied(tmp_path: Path) -> None:
    class Interrupting(ScriptedExchange):
        def replay(self, order: ReplayOrder) -> Generator[RoundResult, None, None]:
            for result in super().replay(order):
                if result.round == 2:
                    node.worker.interrupt()
                yield result

    run = run_file()
    node = Node(run, Interrupting([ReplayOrder(0, 4)], voted(run, 4)), saving=Saving(tmp_path))
    summary = node.run()
    assert (summary.round, summary.reason) == (3, "interrupted by its user")
    assert find(tmp_path).name == "round-00000003"


def test_momenta_and_errors_stay_while_rounds_are_replayed() -> None:
    run = run_file(method="muloco-1bit")
    results: dict[int, torch.Tensor | Exception | None] = {0: RoundLost("cut off")}
    exchange = ScriptedExchange([opened(0, lease_count=30 * BATCH), STOP], results)
    node = Node(run, exchange)
    node.run()
    before = {name: tensor.clone() for name, tensor in node.optimizer.local_tensors().items()}
    again = ScriptedExchange([ReplayOrder(0, 2), STOP], voted(run, 2))
    node.worker._exchange = node.worker._lane = node.worker._held._exchange = again
    node.worker.run()
    after = node.optimizer.local_tensors()
    assert again.readies[0][0] == 2
    kept = [name for name in before if not name.endswith("/error")]
    assert kept and all(torch.equal(before[name], after[name]) for name in kept)
    errors = [name for name in before if name.endswith("/error")]
    assert errors and any(after[name].any() for name in errors), "what was not counted is sent again"


def test_order_for_other_samples_is_computed_afresh() -> None:
    run = run_file(method="muloco-1bit")
    steps = 30 * BATCH
    lost: dict[int, torch.Tensor | Exception | None] = {0: RoundLost("for other samples")}
    orders = [opened(0, lease_count=steps), opened(0, lease_start=9000, lease_count=steps), STOP]
    node = Node(run, ScriptedExchange(orders, lost))
    starts: list[dict[str, torch.Tensor]] = []
    begin = node.worker._training.begin

    def watched(*arguments: Any) -> Any:
        starts.append(node.parameters())
        return begin(*arguments)

    node.worker._training.begin = watched  # type: ignore[method-assign]
    node.run()
    assert equal(starts[0], starts[1])
    first, second = (payload for _, payload, _ in node.exchange.contributions)
    assert first is not None and second is not None and not torch.equal(first, second)


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
