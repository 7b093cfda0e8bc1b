"""Bare streams carry what a vote carries: a slice to each other node, and as much back."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable

import pytest

from bench.bare_mesh import BareMesh, Carrier, GrpcCarrier, Stream, SwarmCarrier

NODES = 3
SLICE = 250_000
CHUNK = 100_000
ROUNDS = 3


async def swapped(carrier: Callable[[str], Carrier]) -> list[int]:
    """What each of three nodes has received in a few rounds."""
    meshes = [BareMesh(carrier("127.0.0.1"), NODES, SLICE, CHUNK) for _ in range(NODES)]
    try:
        addresses = [await mesh.start() for mesh in meshes]
        for mesh, own in zip(meshes, addresses, strict=True):
            await mesh.meet([address for address in addresses if address != own])
        for _ in range(ROUNDS):
            await asyncio.gather(*(mesh.swap() for mesh in meshes))
        return [mesh.received for mesh in meshes]
    finally:
        for mesh in meshes:
            await mesh.close()


def test_each_node_gets_a_slice_of_every_other_and_its_answers() -> None:
    expected = ROUNDS * 2 * (NODES - 1) * SLICE
    assert asyncio.run(swapped(GrpcCarrier)) == [expected] * NODES


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("hivemind") is None, reason="hivemind is not installed")
def test_the_same_over_libp2ps_daemons() -> None:
    expected = ROUNDS * 2 * (NODES - 1) * SLICE
    assert asyncio.run(swapped(SwarmCarrier)) == [expected] * NODES


class Pipe:
    """A stream whose chunks come when they are let in, and that notes what leaves."""

    def __init__(self) -> None:
        self.coming: asyncio.Queue[int] = asyncio.Queue()
        self.sent: asyncio.Queue[int] = asyncio.Queue()

    async def send(self, chunk: bytes) -> None:
        self.sent.put_nowait(len(chunk))

    async def receive(self, nbytes: int) -> None:
        assert await self.coming.get() == nbytes

    async def close(self, *, caller: bool) -> None:
        assert not caller


class Standing:
    """A carrier through which a test is the other nodes."""

    def __init__(self) -> None:
        self.answer: Callable[[Stream], object] = lambda stream: None

    async def start(self, answer: Callable[[Stream], object]) -> str:
        self.answer = answer
        return ""

    async def meet(self, others: object) -> None: ...

    async def open(self, index: int) -> Stream:
        raise NotImplementedError

    async def close(self) -> None: ...


def test_a_chunk_of_the_answer_waits_for_that_of_all_others() -> None:
    async def run() -> None:
        carrier = Standing()
        mesh = BareMesh(carrier, NODES, SLICE, CHUNK)  # type: ignore[arg-type]
        await mesh.start()
        for _ in range(2):  # rounds
            fast, slow = Pipe(), Pipe()
            answers = [asyncio.ensure_future(carrier.answer(pipe)) for pipe in (fast, slow)]  # type: ignore[arg-type]
            for size in (CHUNK, CHUNK, SLICE - 2 * CHUNK):
                fast.coming.put_nowait(size)
            slow.coming.put_nowait(CHUNK)
            assert [await pipe.sent.get() for pipe in (fast, slow)] == [CHUNK, CHUNK]
            assert fast.sent.empty()
            for size in (CHUNK, SLICE - 2 * CHUNK):
                slow.coming.put_nowait(size)
            await asyncio.gather(*answers)
            assert fast.sent.qsize() == slow.sent.qsize() == 2

    asyncio.run(run())
