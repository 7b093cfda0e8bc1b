"""What the ranks of a node tell each other about a round, so that all of them come to the same end of it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from node.exchange.base import ExchangeError, RoundResult
from node.exchange.trouble import RoundLost, TransferError
from node.ranks import Ranks
from protos.digests import combine


def gathered(ranks: Ranks, what: str, mine: Any) -> list[Any]:
    """What every rank says, by rank: anything that JSON can hold.

    Raises:
        ExchangeError: a rank is gone, late, or says something else than JSON.
    """
    texts = ranks.gather(what, json.dumps(mine, separators=(",", ":")).encode())
    try:
        return [json.loads(text) for text in texts]
    except ValueError as error:
        raise ExchangeError(f"{what}: a rank of this node answers with something else: {error}") from error


@dataclass(frozen=True)
class LaneEnd:
    """How a round ended on one lane.

    Attributes:
        counted: whether the node's contribution is in the result.
        voters: whose contributions are.
        lost: why the round went on without the node.
        failed: why the lane cannot go on.
    """

    counted: bool = False
    voters: tuple[str, ...] = ()
    lost: str = ""
    failed: str = ""

    @classmethod
    def of(cls, outcome: RoundResult | ExchangeError) -> LaneEnd:
        """From what the lane returned or raised."""
        if isinstance(outcome, (RoundLost, TransferError)):
            return cls(lost=str(outcome) or "lost")
        if isinstance(outcome, ExchangeError):
            return cls(failed=str(outcome) or type(outcome).__name__)
        return cls(outcome.counted, outcome.voters)


def settle(round_index: int, ends: Sequence[LaneEnd]) -> bool:
    """Whether the node is in the result of a round whose lanes ended like that.

    Raises:
        ExchangeError: a lane failed, or the lanes bring results of different voters.
        RoundLost: a lane was lost: nothing of the result may be applied.
    """
    for rank, end in enumerate(ends):
        if end.failed:
            raise ExchangeError(f"the lane of rank {rank}: {end.failed}")
    for rank, end in enumerate(ends):
        if end.lost:
            raise RoundLost(f"the lane of rank {rank}: {end.lost}")
    if len({end.voters for end in ends}) > 1:
        said = "; ".join(f"rank {rank}: {', '.join(end.voters) or 'nobody'}" for rank, end in enumerate(ends))
        raise ExchangeError(f"round {round_index + 1} has other voters on other lanes ({said})")
    return any(end.counted for end in ends)


def settled(ranks: Ranks, round_index: int, outcome: RoundResult | ExchangeError) -> bool:
    """:func:`settle` of all lanes of the node, given how this rank's ended. A collective."""
    if ranks.size == 1:
        if isinstance(outcome, ExchangeError):
            raise outcome
        return outcome.counted
    said = gathered(ranks, f"the end of round {round_index + 1}", asdict(LaneEnd.of(outcome)))
    return settle(round_index, [LaneEnd(**{**end, "voters": tuple(end["voters"])}) for end in said])


@dataclass(frozen=True)
class Figures:
    """What a round came to, on one rank or on all together.

    Attributes:
        digests: of the tensors of the shared state, by name.
        loss: nats per token; NaN without tokens.
        tokens: predicted.
        compute, busy: CPU seconds in forward and backward, and altogether.
        up, down: bytes sent and received by the lanes since they were opened.
        change: square of the norm of what the round has changed of the weights; None: not measured.
        others_up, others_down: of the bytes, those of the ranks that do not lead.
    """

    digests: Mapping[str, str]
    loss: float
    tokens: int
    compute: float
    busy: float
    up: int
    down: int
    change: float | None = None
    others_up: int = 0
    others_down: int = 0

    @cached_property
    def digest(self) -> str:
        """Of the shared state; of this rank's part of it before :func:`together`."""
        return combine(self.digests)


def together(ranks: Ranks, round_index: int, mine: Figures) -> Figures:
    """The figures of the node. A collective.

    Raises:
        ExchangeError: two ranks hold a tensor of one name.
    """
    if ranks.size == 1:
        return mine
    return add_up([Figures(**said) for said in gathered(ranks, f"round {round_index + 1}", asdict(mine))])


def add_up(parts: Sequence[Figures]) -> Figures:
    """The figures of all ranks, added in their order; losses by tokens."""
    tokens = sum(part.tokens for part in parts)
    loss = sum(part.loss * (part.tokens / tokens) for part in parts if part.tokens) if tokens else math.nan
    changes = [part.change for part in parts if part.change is not None]
    return Figures(
        digests=disjoint([part.digests for part in parts]),
        loss=loss,
        tokens=tokens,
        compute=sum(part.compute for part in parts),
        busy=sum(part.busy for part in parts),
        up=sum(part.up for part in parts),
        down=sum(part.down for part in parts),
        change=sum(changes) if len(changes) == len(parts) else None,
        others_up=sum(part.up for part in parts[1:]),
        others_down=sum(part.down for part in parts[1:]),
    )


def disjoint(parts: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """All digests; raises :class:`ExchangeError` if two ranks hold a tensor of one name."""
    whole: dict[str, str] = {}
    for part in parts:
        if twice := sorted(whole.keys() & part.keys()):
            raise ExchangeError(f"two ranks of this node hold {twice[0]!r}: each tensor has one owner")
        whole |= part
    return whole
