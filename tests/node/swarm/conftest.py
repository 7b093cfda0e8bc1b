"""Nodes of a swarm on loopback, and what they may not leave behind."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

pytest.importorskip("hivemind")

from tests.node.swarm.swarm_rig import Site, children_named


@pytest.fixture(scope="module")
def sockets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where daemons keep their sockets; short, as such paths must be. Nothing may be left in it."""
    tmp_path_factory.getbasetemp()  # made where it usually is
    folder = Path(tempfile.mkdtemp(prefix="at-", dir="/tmp"))
    before, usual = set(Path("/tmp").glob("hivemind-*")), tempfile.tempdir
    tempfile.tempdir = str(folder)
    yield folder
    tempfile.tempdir = usual
    left = [*folder.iterdir(), *(set(Path("/tmp").glob("hivemind-*")) - before)]
    shutil.rmtree(folder)
    assert not left
    assert not children_named("p2pd")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sites(sockets: Path) -> AsyncIterator[list[Site]]:
    """Two nodes of one run, the second of which began with the first, for all tests of a module."""
    one = Site("one")
    two = Site("two")
    try:
        await one.swarm.start()
        two.begin_with(await one.swarm.addresses())
        await two.swarm.start()
        yield [one, two]
    finally:
        await asyncio.gather(one.swarm.close(), two.swarm.close())
