"""The terminal that commands write to."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

PIPE_COLUMNS = 160  # pipes and logs get whole lines: rich would fold them at 80 columns


def console(*, stderr: bool = False) -> Console:
    """A rich console on stdout, or stderr. Imports rich when called."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else PIPE_COLUMNS)
