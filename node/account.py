"""What a node did, told to the coordinator, to whoever listens, and at the end."""

from __future__ import annotations

import math
from collections.abc import Sequence

from node.clocks import Stopwatch
from node.evaluation import Validation
from node.events import RoundDone, Summary
from node.exchange.base import RoundResult, StopOrder, WorkReport
from node.joint import Figures
from node.training import Work


class Account:
    """Adds up the rounds of a node.

    Args:
        rounds: of the run.

    Attributes:
        abstained: rounds without a contribution, by the node's own choice.
        loss: nats per token in the last round in which something was predicted; NaN before.
        measured: the last validation loss.
    """

    def __init__(self, rounds: int) -> None:
        self.abstained = 0
        self.loss = math.nan
        self.measured = Validation(math.nan, math.nan)
        self._rounds = rounds
        self._trained = self._tokens = 0
        self._compute = self._busy = 0.0
        self._bytes = (0, 0)  # of all lanes, after the last round

    def round(
        self,
        work: Work,
        figures: Figures,
        result: RoundResult,
        watch: Stopwatch,
        measured: Validation | None,
    ) -> tuple[WorkReport, RoundDone]:
        """Count a round that has been applied; returns what the others and what listeners learn of it."""
        self._trained += result.counted
        self._tokens += figures.tokens
        self.loss = figures.loss if figures.tokens else self.loss
        self._compute += figures.compute
        self._busy += figures.busy
        report = WorkReport(
            round=result.round,
            state_digest=figures.digest,
            loss=figures.loss,
            tokens=figures.tokens,
            compute_seconds=figures.compute,
            busy_seconds=figures.busy,
            validation_loss=measured.loss if measured else None,
            bits_per_byte=measured.bits_per_byte if measured else None,
            bytes_up=figures.up,
            bytes_down=figures.down,
        )
        self._bytes = figures.up, figures.down
        done = RoundDone(
            round=result.round,
            rounds=self._rounds,
            loss=figures.loss,
            tokens=figures.tokens,
            counted=result.counted,
            voters=result.voters,
            agreement=result.agreement,
            reason=result.reason,
            digest=figures.digest,
            bytes_up=figures.up,
            bytes_down=figures.down,
            compute_seconds=figures.compute,
            busy_seconds=figures.busy,
            seconds=watch.seconds,
            began=watch.began,
            spans=watch.spans,
            validation_loss=report.validation_loss,
            bits_per_byte=report.bits_per_byte,
            micro_steps=work.done,
            skipped=work.skipped,
            update_norm=None if figures.change is None else math.sqrt(figures.change),
            others_up=figures.others_up,
            others_down=figures.others_down,
        )
        return report, done

    def evaluated(self, round_index: int, digest: str, busy: float) -> WorkReport:
        """Report :attr:`measured` after the last round, whose state has ``digest``."""
        self._busy += busy
        return WorkReport(
            round=round_index,
            state_digest=digest,
            loss=self.loss,
            tokens=0,
            compute_seconds=0.0,
            busy_seconds=busy,
            validation_loss=self.measured.loss,
            bits_per_byte=self.measured.bits_per_byte,
            bytes_up=self._bytes[0],
            bytes_down=self._bytes[1],
        )

    def summary(
        self, stop: StopOrder, round_index: int, digest: str, lanes: Sequence[tuple[int, int]], seconds: float
    ) -> Summary:
        """Of everything; ``lanes`` are the bytes that each sent and received, ``round_index`` comes next."""
        return Summary(
            done=stop.done,
            reason=stop.reason,
            round=round_index,
            trained=self._trained,
            abstained=self.abstained,
            tokens=self._tokens,
            loss=self.loss,
            validation_loss=self.measured.loss,
            bits_per_byte=self.measured.bits_per_byte,
            digest=digest,
            bytes_up=sum(up for up, _ in lanes),
            bytes_down=sum(down for _, down in lanes),
            seconds=seconds,
            compute_share=self._compute / self._busy if self._busy > 0 else 0.0,
        )
