"""How a node tells about its work: sentences, and one moving line on a terminal."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from deploy.table import number, percent, ways
from node import events
from protos.units import format_bytes, format_duration

LINE_SECONDS = 2.0  # between two lines about rounds, where they scroll
REFRESH_SECONDS = 0.1  # between two states of the moving line


def sentence(event: events.Event) -> str:
    """``event`` in words, one line."""
    if isinstance(event, events.Notice):
        return event.text
    if isinstance(event, events.Started):
        return (
            f"{event.run}: {event.method}, {event.parameters:,} parameters, "
            f"{ways(event.payload_bytes, event.result_bytes)} a round, {event.device}, "
            f"{f'{event.ranks} ranks of ' if event.ranks > 1 else ''}"
            f"{event.threads} {'thread' if event.threads == 1 else 'threads'}"
        )
    if isinstance(event, events.Resumed):
        return f"resumed from {event.path} at round {event.round}"
    if isinstance(event, events.Joined):
        state = "; the state of the run comes from another node first" if event.needs_state else ""
        return f"joined {event.address} as {event.node}{state}"
    if isinstance(event, events.Abstained):
        return f"round {event.round + 1}: nothing contributed, {event.reason}"
    if isinstance(event, events.MicroStep):
        step = f"step {event.micro_step}/{event.micro_steps}"
        return f"round {event.round + 1}: {step} loss {number(event.loss)}"
    if isinstance(event, events.RoundDone):
        return round_line(event)
    if isinstance(event, events.RoundMissed):
        return f"round {event.round + 1} was decided without this node: {event.reason}"
    if isinstance(event, events.Replayed):
        if not event.count:
            return f"nothing to catch up with: the state after round {event.first} is the latest"
        last = event.first + event.count
        rounds = f"rounds {event.first + 1} to {last}" if event.count != 1 else f"round {last}"
        return f"caught up with {rounds}: {_transfer(event.nbytes, event.seconds)}"
    if isinstance(event, events.StateLoaded):
        return f"state after round {event.round} loaded: {_transfer(event.nbytes, event.seconds)}"
    if isinstance(event, events.StateSent):
        return f"state after round {event.round} sent to a newcomer: {_transfer(event.nbytes, event.seconds)}"
    if isinstance(event, events.TransferFailed):
        return f"the transfer of the state after round {event.round} broke off: {event.reason}"
    if isinstance(event, events.Evaluated):
        return (
            f"after round {event.round + 1}: validation {number(event.validation_loss)} nats, "
            f"{number(event.bits_per_byte)} bits per byte"
        )
    if isinstance(event, events.Saved):
        return f"saved {event.path}"
    return f"{'done' if event.done else 'stopped'}: {event.reason}"


def round_line(event: events.RoundDone) -> str:
    """A round in one line."""
    line = f"round {event.round + 1}/{event.rounds}"
    if event.tokens or math.isfinite(event.loss):  # a round caught up with is applied, not trained
        line += f" loss {number(event.loss)}"
    if event.validation_loss is not None:
        line += f" validation {number(event.validation_loss)}"
        if event.bits_per_byte is not None:
            line += f" ({number(event.bits_per_byte)} bits/byte)"
    if len(event.voters) > 1:
        line += f" voters {len(event.voters)}"
        if math.isfinite(event.agreement):  # only where a majority decides
            line += f" agreement {percent(event.agreement)}"
    if event.skipped:
        line += f" steps left out {event.skipped}/{event.micro_steps}"
    if not event.counted:
        line += " not counted"
    if event.bytes_up or event.bytes_down:
        line += f" sent {format_bytes(event.bytes_up)} received {format_bytes(event.bytes_down)}"
    seconds = sum(event.seconds.values()) - event.seconds.get("evaluate", 0.0)
    if seconds > 0 and event.tokens:
        line += f" {event.tokens / seconds:,.0f} tokens/s"
    return line


def _transfer(nbytes: int, seconds: float) -> str:
    return f"{format_bytes(nbytes)} in {format_duration(seconds)}"


class Progress:
    """A listener that shows events. Use as a context manager; safe to call from any thread.

    On a terminal rounds share one line that moves with them; elsewhere a round has a line of its own at most
    every :data:`LINE_SECONDS`, or when it brings a validation loss. ``quiet`` leaves rounds out.
    """

    def __init__(
        self, console: Console, *, quiet: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._quiet = quiet
        self._clock = clock
        self._lock = threading.Lock()
        self._last = -math.inf
        self._live: Live | None = None
        if console.is_terminal and not quiet:
            self._live = Live(Text(), console=console, auto_refresh=False)

    def __call__(self, event: events.Event) -> None:
        with self._lock:
            if isinstance(event, events.RoundDone):
                last = event.round + 1 == event.rounds
                self._moved(event, last=last, telling=last or event.validation_loss is not None)
            elif isinstance(event, events.MicroStep):
                self._moved(event)
            else:
                self._console.print(Text(sentence(event)), soft_wrap=True)

    def _moved(
        self, event: events.RoundDone | events.MicroStep, *, last: bool = False, telling: bool = False
    ) -> None:
        now = self._clock()
        if self._quiet:
            return
        if self._live is not None:
            if last or now - self._last >= REFRESH_SECONDS:
                self._last = now
                text = Text(sentence(event), no_wrap=True, overflow="ellipsis")
                self._live.update(text, refresh=True)
        elif telling or now - self._last >= LINE_SECONDS:
            self._last = now
            self._console.print(Text(sentence(event)), soft_wrap=True)

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()


def all_of(listeners: Sequence[events.Listener]) -> events.Listener:
    """One listener that hands each event to every one of ``listeners``."""

    def tell(event: events.Event) -> None:
        for listener in listeners:
            listener(event)

    return tell
