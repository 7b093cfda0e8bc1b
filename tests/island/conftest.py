"""Settings of the island's tests."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

from bench.island_ranks import OLD_NAMES


@pytest.fixture(autouse=True)
def _no_old_names() -> Iterator[None]:
    """Collectives by names that torch has given up are errors, in this process as in those of the pool."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", OLD_NAMES, FutureWarning)
        yield
