"""Settings that all tests share."""

from __future__ import annotations

from hypothesis import settings

# A loaded machine may take its time over one example; the timeout of the whole test still holds.
settings.register_profile("atoll", parent=settings.default, deadline=None)
settings.load_profile("atoll")
