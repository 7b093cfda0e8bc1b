"""What a long command shows: a view that stays in place on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Final

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

LINE_SECONDS: Final = 2.0  # between two lines where there is no terminal


class Screen:
    """A view that stays in place on a terminal, and lines now and then elsewhere."""

    def __init__(self, console: Console, clock: Callable[[], float]) -> None:
        self._console = console
        self._clock = clock
        self._last = 0.0
        self._line = ""
        self._live: Live | None = None

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Show the view within the block; what was shown last stays."""
        if not self._console.is_terminal:
            yield
            return
        with Live(console=self._console, auto_refresh=False) as live:
            self._live = live
            try:
                yield
            finally:
                self._live = None

    def update(self, view: Callable[[], RenderableType], line: str, *, always: bool = False) -> None:
        """Show ``view`` or, elsewhere, ``line`` if the last one is old enough or ``always``."""
        if self._live is not None:
            self._live.update(view(), refresh=True)
        elif line != self._line and (always or self._clock() - self._last >= LINE_SECONDS):
            self._last, self._line = self._clock(), line
            self.say(line)

    def say(self, text: str) -> None:
        """A line of its own."""
        self._console.print(Text(text), soft_wrap=True)
