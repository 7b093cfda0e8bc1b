"""A state of 5 GB passes from node to node through files and the coordinator, without memory for it."""

from __future__ import annotations

import queue
import shutil
import tempfile
import threading
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
LOOK = 0.01  # seconds between looks at memory
DEADLINE = 300.0  # seconds; only a hang reaches it


class Peaks:
    """The most anonymous memory of processes while it is entered, beyond what they had before; in bytes.

    Looked at in a thread: the kernel's own peak (``VmHWM``) counts pages of files as well, as libraries',
    which it takes away and brings back as it likes.
    """

    def __init__(self, *pids: int | str) -> None:
        self._before = {pid: anonymous(pid) for pid in pids}
        self._most = dict(self._before)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Peaks:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()

    def grown(self, pid: int | str) -> int:
        return self._most[pid] - self._before[pid]

    def _look(self) -> None:
        while not self._done.wait(LOOK):
            for pid, most in self._most.items():
                self._most[pid] = max(most, anonymous(pid))


def anonymous(pid: int | str) -> int:
    """Memory of a process that no file stands behind, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


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
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from Linux's /proc")
@pytest.mark.skipif(
    shutil.disk_usage(tempfile.gettempdir()).free < DISK, reason=f"needs {DISK / 1e9:.0f} GB of TMPDIR"
)
def test_a_state_of_5_gb_passes_with_less_than_200_mb(bed: Any) -> None:
    bed.lead(nodes=1, rounds=50, limits={"state": 2 * STATE})
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
        with Peaks(hub, "self") as peaks:
            Handover(ours, Alone(), donor).donate(give, digest, told.put)
            assert told.get(timeout=DEADLINE) == ""  # else nobody would ever order the download
            take = joiner.next_order()
            assert isinstance(take, LoadOrder) and take.round == give.round
            taking = Handover(theirs, Alone(), joiner)
            taking.download(take)
            assert taking.load(take) == digest
        assert torch.equal(received, piece)
        assert peaks.grown(hub) < EXTRA, "coordinator"
        # Two nodes and their test share this process. A download reads ahead by the window of
        # DOWNLOAD_OPTIONS; what a thread of gRPC has read is freed into that thread's arena, and glibc keeps
        # some of it: 360 MB in all beside six busy processes, 180 to 280 beside two. A node that held
        # the state would have the whole of it.
        assert peaks.grown("self") < STATE / 10, "two nodes"
        for counted in (donor.meter.total("up"), joiner.meter.total("down")):
            assert ours.nbytes <= counted < ours.nbytes * 1.001 + MEBIBYTE
    finally:
        joiner.close("done")
        donor.close("done")
