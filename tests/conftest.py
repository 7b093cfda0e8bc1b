"""Settings that all tests share."""

from __future__ import annotations

import signal

from hypothesis import settings

# A loaded machine may take its time over one example; the timeout of the whole test still holds.
settings.register_profile("atoll", parent=settings.default, deadline=None)
settings.load_profile("atoll")

# A shell's background job ignores Ctrl-C, and so would every process that the tests start and interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
