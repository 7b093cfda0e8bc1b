"""A state of 5 GB passes from node to node through the coordinator in chunks, without memory for it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from node.exchange.base import DonateOrder, LoadOrder, RoundOrder
from node.exchange.hub import HubExchange
from node.exchange.session import Claim
from node.model import model_on_meta
from optim.methods import build_method
from protos.buckets import TableSchedule
from protos.invite import Invite
from protos.runfile import RunFile

MEBIBYTE = 1 << 20
PIECE = 64 * MEBIBYTE
STATE = 5 * 10**9
EXTRA = 200 * 10**6  # bytes of memory that the passage may cost


def peak_memory(pid: int | str) -> int:
    """Highest resident size of a process so far, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM")


def reset_peak(pid: int | str) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def claim(exchange: HubExchange, name: str) -> Claim:
    run = exchange.describe()
    return Claim(name, run.run_digest, run.table_digest, "d" * 64, "float32", "a" * 32, 0, 1)


def tables_of(exchange: HubExchange) -> TableSchedule:
    run = RunFile.parse(exchange.describe().run_file)
    return build_method(run.method, model_on_meta(run.model)).tables


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc"
)
def test_a_state_of_5_gb_passes_with_less_than_200_mb(bed):
    bed.lead(nodes=1, rounds=3)
    piece = torch.arange(PIECE, dtype=torch.int64).remainder_(251).to(torch.uint8)
    # Many names for one piece of memory: 5 GB travel, 64 MiB are held.
    state = {f"piece.{index:03}": piece for index in range(-(-STATE // PIECE))}
    nbytes = len(state) * PIECE
    assert nbytes >= STATE
    received = torch.zeros_like(piece)
    target = dict.fromkeys(state, received)

    donor, joiner = HubExchange(Invite.parse(bed.invite)), HubExchange(Invite.parse(bed.invite))
    try:
        tables = tables_of(donor)
        donor.join(claim(donor, "donor"), tables)
        order = donor.next_order()
        assert isinstance(order, RoundOrder) and order.round == 0
        joiner.join(claim(joiner, "joiner"), tables)
        donor.reduce(order, None, "this test only moves the state")
        give, take = donor.next_order(), joiner.next_order()
        while isinstance(give, RoundOrder):  # the joiner may have come after the next round was opened
            donor.reduce(give, None, "this test only moves the state")
            give = donor.next_order()
        assert isinstance(give, DonateOrder) and isinstance(take, LoadOrder)

        hub = bed.coordinator.pid
        for pid in (hub, "self"):
            reset_peak(pid)
        before = {pid: peak_memory(pid) for pid in (hub, "self")}
        upload = threading.Thread(target=donor.donate, args=(give, state, "b" * 32), daemon=True)
        upload.start()
        assert joiner.load(take, target) == "b" * 32
        upload.join(30)
        assert not upload.is_alive()
        assert torch.equal(received, piece)
        # Two nodes share this process.
        for pid, extra, who in ((hub, EXTRA, "coordinator"), ("self", 2 * EXTRA, "both nodes")):
            assert peak_memory(pid) - before[pid] < extra, who
        assert donor.meter.total("up") >= nbytes and joiner.meter.total("down") >= nbytes
        assert donor.meter.total("up") < nbytes * 1.001 + MEBIBYTE
    finally:
        joiner.close("done")
        donor.close("done")
