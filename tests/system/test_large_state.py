"""A state of 5 GB passes from node to node through files and the coordinator, without memory for it."""

from __future__ import annotations

import queue
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from node.exchange.base import DonateOrder, LoadOrder, RoundOrder, WorkReport
from node.exchange.hub import HubExchange
from node.exchange.session import Claim
from node.handover import Handover
from node.model import model_on_meta
from node.ranks import Alone
from node.state import SharedState
from node.whole_state import WholeState
from optim.methods import build_method
from protos.buckets import TableSchedule
from protos.invite import Invite
from protos.runfile import RunFile

MEBIBYTE = 1 << 20
PIECE = 64 * MEBIBYTE
STATE = 5 * 10**9
EXTRA = 200 * 10**6  # bytes of memory that the passage may cost
DISK = 4 * STATE  # the coordinator's file, the donor's and the joiner's, and some room
DEADLINE = 300.0  # seconds; only a hang reaches it


def peak_memory(pid: int | str) -> int:
    """Highest resident size of a process so far, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM")


def reset_peak(pid: int | str) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def claim(exchange: HubExchange, name: str, digest: str, nbytes: int) -> Claim:
    run = exchange.describe()
    digests = run.run_digest, run.table_digest, "d" * 64
    return Claim(name, *digests, "float32", digest, 0, 1, state_bytes=nbytes)


def tables_of(exchange: HubExchange) -> TableSchedule:
    run = RunFile.parse(exchange.describe().run_file)
    return build_method(run.method, model_on_meta(run.model)).tables


def passed_by(node: HubExchange, digest: str) -> DonateOrder:
    """Let rounds pass until the node is asked for its state."""
    while isinstance(order := node.next_order(), RoundOrder):
        node.reduce(order, None, "this test only moves the state")
        node.report(WorkReport(order.round, digest, 0.0, 0, 0.0, 0.0))
    assert isinstance(order, DonateOrder)
    return order


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc"
)
@pytest.mark.skipif(
    shutil.disk_usage(tempfile.gettempdir()).free < DISK, reason=f"needs {DISK / 1e9:.0f} GB of TMPDIR"
)
def test_a_state_of_5_gb_passes_with_less_than_200_mb(bed: Any) -> None:
    bed.lead(nodes=1, rounds=50)
    piece = torch.arange(PIECE, dtype=torch.int64).remainder_(251).to(torch.uint8)
    # Many names for one piece of memory: 5 GB travel, 64 MiB are held.
    names = [f"piece.{index:03}" for index in range(-(-STATE // PIECE))]
    ours = WholeState(SharedState(dict.fromkeys(names, piece)), Alone())
    received = torch.zeros_like(piece)
    theirs = WholeState(SharedState(dict.fromkeys(names, received)), Alone())
    assert ours.nbytes >= STATE
    digest, told = ours.digest(), queue.Queue[str]()

    donor, joiner = HubExchange(Invite.parse(bed.invite)), HubExchange(Invite.parse(bed.invite))
    try:
        tables = tables_of(donor)
        donor.join(claim(donor, "donor", digest, ours.nbytes), tables)
        order = donor.next_order()
        assert isinstance(order, RoundOrder) and order.round == 0
        # It does not hold the state that the run began with: replaying would not help it.
        joiner.join(claim(joiner, "joiner", "0" * 32, ours.nbytes), tables)
        donor.reduce(order, None, "this test only moves the state")
        donor.report(WorkReport(0, digest, 0.0, 0, 0.0, 0.0))
        give = passed_by(donor, digest)

        hub = bed.coordinator.pid
        for pid in (hub, "self"):
            reset_peak(pid)
        before = {pid: peak_memory(pid) for pid in (hub, "self")}
        Handover(ours, Alone(), donor).donate(give, digest, told.put)
        take = joiner.next_order()
        assert isinstance(take, LoadOrder) and take.round == give.round
        assert told.get(timeout=DEADLINE) == ""
        taking = Handover(theirs, Alone(), joiner)
        taking.download(take)
        assert taking.load(take) == digest
        assert torch.equal(received, piece)
        # Two nodes share this process.
        for pid, extra, who in ((hub, EXTRA, "coordinator"), ("self", 2 * EXTRA, "both nodes")):
            assert peak_memory(pid) - before[pid] < extra, who
        for counted in (donor.meter.total("up"), joiner.meter.total("down")):
            assert ours.nbytes <= counted < ours.nbytes * 1.001 + MEBIBYTE
    finally:
        joiner.close("done")
        donor.close("done")
