"""The reducer of a node: contributions to one slice of one round in, the slice of the result out.

As at a hub, pieces are made and published as soon as every voter has delivered them, on the assumption that
the voters stay who they are. If they change, or one has to deliver again, what was published is void and a
new attempt starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from node.exchange.peers.shelf import Stretch, cut_out
from node.exchange.peers.slice_contribution import Rows, SliceContribution
from node.exchange.peers.upload import SEND_BYTES
from optim import bits
from optim.aggregate import Aggregation, Bytes, ReducerMemory, TallyFunction
from optim.inspection import Inspection
from optim.pieces import Piece
from optim.reduction import Reduction, padding_bits
from optim.slices import Slice, pieces_within, slice_pieces
from protos import atoll_pb2 as pb
from protos.atoll_pb2 import Reduce, SliceNews, SliceRefusal
from protos.buckets import LINE_BYTES, BucketTable
from protos.frame_log import FrameLog
from protos.refusal import LATE, OVERSIZED, TRUNCATED, WRONG_ROUND, Refused
from protos.upload import end_frame
from protos.wire import CHUNK, decode_frame

Submit = Callable[[Callable[[], "list[bytes]"]], "Awaitable[list[bytes]]"]

Samples = tuple[int, int]  # first sample and number of samples

MAX_WORDS: Final = 256  # characters of a reason that is passed on
_INLINE_BYTES: Final = 4 << 20  # of votes: a millisecond of work is done at once, a thread costs as much
_FRAME_BYTES: Final = SEND_BYTES + (64 << 10)  # of the result: what one chunk of everybody lets be made


@dataclass(frozen=True)
class SliceWork:
    """What the slices of all rounds with one table share."""

    table: BucketTable
    pieces: Sequence[Piece]
    inspection: Inspection
    memory: ReducerMemory
    rows: Rows
    submit: Submit
    tally: TallyFunction = bits.tally

    @classmethod
    def of(cls, table: BucketTable, *, memory: ReducerMemory, rows: Rows, submit: Submit) -> SliceWork:
        """Derive the rest from the table."""
        return cls(table, slice_pieces(table), Inspection(table), memory, rows, submit)


class SliceReducer:
    """One slice of one round. Everything but the arithmetic is done on the event loop.

    Args:
        part: the slice.
        round_index: the round.
        work: what its table's slices share.
        changed: called when there is news, see :meth:`news`.

    Attributes:
        frames: of the slice's result, its END among them once it is whole.
        digest: xxh3_128 of that result, 16 bytes; empty until then.
        failed: why it cannot be made; empty if it can.
        committed: whether that result is the committed one.
        closed: why nothing more comes of it here.
    """

    def __init__(
        self, part: Slice, round_index: int, work: SliceWork, changed: Callable[[SliceReducer], None]
    ) -> None:
        self.part = part
        self.frames = FrameLog()
        self.digest = b""
        self.committed = False
        self.closed: Refused | None = None
        self._round = round_index
        self._work = work
        self._changed = changed
        self._pieces = pieces_within(work.pieces, part)
        self._padding = padding_bits(work.table, part.start, part.end)
        self._order: Reduce | None = None
        self._rows: dict[str, Bytes] = {}
        self._contributions: dict[str, SliceContribution] = {}
        self._arrived: list[str] = []
        self._refused: dict[str, Refused] = {}
        self._leases: dict[
            str, Samples
        ] = {}  # what that which each sender brings, or has brought, is made of
        self._wanted: dict[str, Samples] = {}  # what the voters' contributions have to be made of
        self._reduction: Reduction | None = None
        self._job: asyncio.Future[None] | None = None
        self._differing: list[int] = []
        self._compared = 0
        self._misfit = "" if _fits(part, self._pieces) else f"{part} does not lie between pieces of the table"
        self.failed = self._misfit

    @property
    def finished(self) -> list[Stretch]:
        """The slice's result in stretches, once it is whole; none before."""
        if not self.digest:
            return []
        frames = (decode_frame(message) for message in self.frames.frames)
        return [(self.part.out_start + frame.offset, frame.body) for frame in frames if frame.kind == CHUNK]

    # --------------------------------------------------------------------------------------------- events

    def order(self, order: Reduce) -> None:
        """With whose votes the result is made; the one with the same votes as before goes on."""
        if self.closed is not None or self.committed:
            return
        before, self._order = self._order, order
        self._wanted = {
            voter: (one.start, one.count) for voter, one in zip(order.voters, order.leases, strict=False)
        }
        if before is None or self.failed or _votes(before) != _votes(order):
            self.failed = self._misfit or _problem(order)
            self._form()
        if not self._advance():
            self.repeat()

    def repeat(self) -> None:
        """Tell again what there is to tell."""
        order = self._order
        told = self.digest or self.failed or self._refused or (order is not None and order.tell)
        if order is not None and told:
            self._changed(self)

    def accept(self, sender: str, nbytes: int, lease: Samples) -> SliceContribution | None:
        """A stream announces a contribution; ``None`` if there is a whole one of that sender already. One
        that is made of other samples voids what the sender has brought before, unless the result is whole
        and those it is made of are the ones that were ordered: no voter can have that taken back.

        Raises:
            Refused: it does not fit, the sender has been refused before, it is too late, or before its order.
        """
        if self.closed is not None:
            raise self.closed
        if self.committed:
            raise Refused(LATE, f"round {self._round + 1} is committed: fetch its result")
        before = self._leases.get(sender, lease)
        if before != lease:
            if self.digest and self._wanted.get(sender) == before:
                text = f"the result is made of the samples from {before[0]} on, as ordered: try again later"
                raise Refused(WRONG_ROUND, text, "UNAVAILABLE")
            self._void(sender)
        self._leases[sender] = lease
        if sender in self._refused:
            raise self._refused[sender]
        if nbytes != self.part.nbytes:
            kind = OVERSIZED if nbytes > self.part.nbytes else TRUNCATED
            text = f"a contribution to this slice has {self.part.nbytes} bytes, this one announces {nbytes}"
            refusal = Refused(kind, text)
            self.refuse(sender, self._contributions.get(sender), refusal)
            raise refusal
        if sender in self._arrived:
            return None
        if sender in self._contributions:
            self.lost(sender, self._contributions[sender])
        if sender not in self._rows:
            self._rows[sender] = self._work.rows.take(self.part.nbytes)
        contribution = SliceContribution(self._rows[sender], self._work.inspection, self.part.start)
        self._contributions[sender] = contribution
        return contribution

    def delivered(self, sender: str, contribution: SliceContribution) -> None:
        """More of a contribution has arrived."""
        if self._contributions.get(sender) is not contribution:
            return
        new = contribution.complete and sender not in self._arrived
        if new:
            self._arrived.append(sender)
        if not self._advance() and new and self._order is not None and self._order.tell:
            self._changed(self)

    def lost(self, sender: str, contribution: SliceContribution) -> None:
        """The stream of a contribution is gone; if it is unfinished it may be sent again."""
        if self._contributions.get(sender) is not contribution or contribution.complete:
            return
        self._drop(sender)

    def refuse(self, sender: str, contribution: SliceContribution | None, refusal: Refused) -> None:
        """A contribution is not taken, nor another one of this sender; a whole one that is here stays."""
        if sender in self._arrived or self._contributions.get(sender) is not contribution:
            return
        self._refused[sender] = refusal
        self._drop(sender)
        self._changed(self)

    def commit(self, digest: bytes) -> None:
        """The round is committed with a result whose slice has this digest; empty: none has its bounds."""
        if self.digest and self.digest == digest:
            self.committed = True
            if self._reduction is not None:
                self._reduction.commit()
            self._release()
            self.frames.nudge()
        else:
            self.close(Refused(LATE, f"round {self._round + 1} is committed with another result: fetch it"))

    def close(self, refusal: Refused) -> None:
        """Nothing more comes of it here; a result that is whole can still be fetched."""
        if self.closed is None:
            self.closed = refusal
            self._release()
            self.frames.nudge()

    def news(self) -> SliceNews:
        """All that is to be told; who is asked for it knows its place in the topology."""
        return SliceNews(
            round=self._round,
            arrived=self._arrived,
            refused=[
                SliceRefusal(node=node, kind=refusal.kind, reason=refusal.text[:MAX_WORDS])
                for node, refusal in self._refused.items()
                if self._wanted.get(node, self._leases[node]) == self._leases[node]
            ],
            leases=[
                pb.Lease(start=self._leases[sender][0], count=self._leases[sender][1])
                for sender in self._arrived
            ],
            attempt=self._order.attempt if self._order is not None else 0,
            digest=self.digest,
            differing=self._differing if self.digest else [],
            compared=self._compared if self.digest else 0,
            failed=self.failed,
        )

    def show(self, start: int, out_start: int) -> tuple[list[bytes], bytes] | None:
        """The line from ``start`` on of every voter's contribution, in slot order, and from ``out_start`` on
        of the result that was made of them; ``None``: it is not whole, or the line is not in this slice."""
        if self._order is None or not self._rows or not self.part.start <= start < self.part.end:
            return None
        found = cut_out(self.finished, out_start, out_start + LINE_BYTES)
        if found is None:
            return None
        first = start - self.part.start
        rows = [self._rows[voter][first : first + LINE_BYTES].tobytes() for voter in self._order.voters]
        return rows, b"".join(bytes(body) for _, body in found)

    def _void(self, sender: str) -> None:
        """What a sender has brought counts no more."""
        self._refused.pop(sender, None)
        if sender in self._arrived:
            self._arrived.remove(sender)
        self._drop(sender)

    def _drop(self, sender: str) -> None:
        contribution = self._contributions.pop(sender, None)
        if contribution is None:
            return
        contribution.detach()
        if self._reduction is not None and self._order is not None and sender in self._order.voters:
            self._form()  # a part of the row will be written again

    def _release(self) -> None:
        for contribution in self._contributions.values():
            contribution.detach()
        self._work.rows.give(self._rows.values())
        self._contributions, self._rows, self._reduction = {}, {}, None
        if self._job is not None:
            self._job.cancel()

    # --------------------------------------------------------------------------------------------- reduction

    def _form(self) -> None:
        """Start the reduction afresh."""
        self._reduction, self.digest = None, b""
        self.frames.restart()

    def _advance(self) -> bool:
        """Reduce what every voter has delivered, unless a job is running: its end comes back here. Whether
        that has led to news, which have been told."""
        order = self._order
        if self._job is not None or order is None or self.failed or self.committed or self.closed is not None:
            return False
        received = [
            self._contributions[voter].received
            for voter, lease in self._wanted.items()
            if voter in self._contributions and self._leases[voter] == lease
        ]
        if len(received) < len(order.voters):
            return False
        delivered = min(received)
        reduction = self._reduction
        if reduction is None:
            reduction = self._reduction = self._begin(order)
        cost = reduction.cost(delivered)
        if cost * len(received) > _INLINE_BYTES:
            self._job = asyncio.ensure_future(self._off_loop(reduction, delivered))
            return False
        if cost:
            try:
                self.frames.extend(reduction.advance(delivered))
            except Exception as error:
                return self._fail(error)
        return self._finish(reduction, order)

    def _begin(self, order: Reduce) -> Reduction:
        aggregation = Aggregation(
            self._work.table,
            len(order.voters),
            round_index=self._round,
            tally=self._work.tally,
            memory=self._work.memory,
            weights=list(order.weights),
            mean_weights=list(order.mean_weights),
        )
        return Reduction(
            self._pieces,
            aggregation,
            [self._rows[voter] for voter in order.voters],
            attempt=self.frames.attempt,
            frame_bytes=_FRAME_BYTES,
            phase=self._round,
        )

    async def _off_loop(self, reduction: Reduction, delivered: int) -> None:
        error: Exception | None = None
        frames: list[bytes] = []
        try:
            frames = await self._work.submit(lambda: reduction.advance(delivered))
        except Exception as raised:
            error = raised
        self._job = None
        if reduction is self._reduction:  # another attempt may have read rows that were written again
            if error is not None:
                self._fail(error)
            else:
                self.frames.extend(frames)
        self._advance()

    def _finish(self, reduction: Reduction, order: Reduce) -> bool:
        """Publish the end of a whole result, once it is known that every contribution in it was whole."""
        if self.digest or not reduction.done or not set(order.voters) <= set(self._arrived):
            return False
        digest = reduction.digest()
        self.digest = bytes.fromhex(digest)
        self._differing, self._compared = reduction.counts(self._padding)
        self.frames.extend([end_frame(digest, self.frames.attempt)])
        self._changed(self)
        return True

    def _fail(self, error: Exception) -> bool:
        self.failed = f"the reduction of round {self._round + 1} failed: {error!r}"[:MAX_WORDS]
        self._changed(self)
        return True


def _votes(order: Reduce) -> tuple[list[str], list[int], list[int], list[Samples]]:
    leases = [(one.start, one.count) for one in order.leases]
    return list(order.voters), list(order.weights), list(order.mean_weights), leases


def _problem(order: Reduce) -> str:
    """Why an order cannot be carried out; empty if it can."""
    voters, weights, mean_weights, leases = _votes(order)
    if not voters or len(set(voters)) != len(voters):
        return f"the order names {len(voters)} voters, {len(set(voters))} different ones"
    if not len(voters) == len(weights) == len(mean_weights) == len(leases):
        return (
            f"the order has {len(voters)} voters, {len(weights)} and {len(mean_weights)} weights, "
            f"{len(leases)} leases"
        )
    if not all(1 <= weight <= 65535 for weight in weights) or not all(mean_weights):
        return "the order has a weight that is out of bounds"
    return ""


def _fits(part: Slice, pieces: Sequence[Piece]) -> bool:
    """Whether ``pieces``, which begin within a slice, are all of it and need nothing else."""
    ends = [0, *(piece.end for piece in pieces)]
    return (
        [piece.start for piece in pieces] == ends[:-1]
        and ends[-1] == part.out_nbytes
        and all(piece.needs <= part.nbytes for piece in pieces)
        and all(own.start >= 0 for piece in pieces for own in piece.parts if own.rule != "basis")
    )
