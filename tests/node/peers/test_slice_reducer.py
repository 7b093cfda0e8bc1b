"""Slices that are reduced by nodes make, bit for bit, what the hub would make."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.exchange.peers import slice_reducer
from node.exchange.peers.slice_contribution import Rows
from node.exchange.peers.slice_reducer import SliceReducer, SliceWork
from optim.aggregate import ReducerMemory
from optim.slices import Slice
from protos import wire
from protos.buckets import BucketTable
from protos.refusal import Refused
from tests.coordinator.contribution_rig import voted_table
from tests.node.peers.desk_rig import TABLES, at_the_hub, order, payloads, slices, until, upload_frames

VOTERS = ["a", "b", "c"]


async def at_once(work: Callable[[], list[bytes]]) -> list[bytes]:
    return work()


class Slices:
    """Reducers of all slices of a round, perhaps at different nodes."""

    def __init__(
        self,
        table: BucketTable,
        parts: list[Slice],
        *,
        memory: list[ReducerMemory] | None = None,
        **values: Any,
    ) -> None:
        self.table, self.parts = table, parts
        self.rows = values.get("rows", Rows())
        self.news: list[SliceReducer] = []
        memory = memory or [ReducerMemory()]
        self.reducers = [
            SliceReducer(
                part,
                values.get("round_index", 0),
                SliceWork.of(
                    table,
                    memory=memory[index % len(memory)],
                    rows=self.rows,
                    submit=values.get("submit", at_once),
                ),
                self.news.append,
            )
            for index, part in enumerate(parts)
        ]

    def feed(self, sender: str, payload: bytes, seed: int = 0, size: int = 1000) -> list[Callable[[], None]]:
        """The steps of a sender, slice by slice in any order, each slice's frames in theirs."""
        chance = random.Random(seed)
        lanes = []
        for reducer in self.reducers:
            body = payload[reducer.part.start : reducer.part.end]
            taken = reducer.accept(sender, len(body), (0, 1))
            assert taken is not None
            lanes.append([(reducer, taken, frame) for frame in upload_frames(body, size)])
        steps = []
        while lanes := [lane for lane in lanes if lane]:
            steps.append(chance.choice(lanes).pop(0))

        def step(reducer: SliceReducer, taken: Any, frame: bytes) -> Callable[[], None]:
            def run() -> None:
                taken.feed(wire.decode_frame(frame))
                reducer.delivered(sender, taken)

            return run

        return [step(*one) for one in steps]

    @property
    def result(self) -> bytes:
        return b"".join(bytes(body) for reducer in self.reducers for _, body in reducer.finished)

    def commit(self) -> None:
        for reducer in self.reducers:
            reducer.commit(reducer.digest)


@settings(max_examples=25)
@given(
    st.sampled_from(sorted(TABLES)),
    st.integers(1, 6),
    st.integers(0, 2**16),
    st.lists(st.tuples(st.integers(1, 65535), st.integers(1, 2**40)), min_size=1, max_size=5),
    st.integers(0, 9),
)
def test_any_slicing_and_any_order_of_arrival_make_the_hubs_bytes(
    name: str, cuts: int, seed: int, weights: list[tuple[int, int]], first_round: int
) -> None:
    """Two rounds, so that what the reducers remember is theirs as well."""

    async def check() -> None:
        table, voters = TABLES[name], [f"n{i}" for i in range(len(weights))]
        parts = slices(table, cuts, seed)
        votes, means = [w for w, _ in weights], [m for _, m in weights]
        hub, nodes = ReducerMemory(), [ReducerMemory() for _ in parts]  # each bucket stays with its node
        for round_index in (first_round, first_round + 1):
            rows = payloads(table, len(voters), seed + round_index)
            expected = at_the_hub(
                table, rows, round_index=round_index, weights=votes, mean_weights=means, memory=hub
            )
            site = Slices(table, parts, memory=nodes, round_index=round_index)
            chance = random.Random(seed)
            told = chance.choice([True, False])  # whether the order comes before the contributions
            orders = order(voters, round_index=round_index, weights=votes, mean_weights=means)
            for reducer in site.reducers if told else []:
                reducer.order(orders)
            pending = [
                site.feed(voter, row, seed + i, chance.randint(table.nbytes // 20, table.nbytes))
                for i, (voter, row) in enumerate(zip(voters, rows, strict=True))
            ]
            while pending := [steps for steps in pending if steps]:
                chance.choice(pending).pop(0)()
            for reducer in [] if told else site.reducers:
                reducer.order(orders)
            await until(lambda site=site: all(reducer.digest for reducer in site.reducers))
            assert site.result == expected
            for reducer, part in zip(site.reducers, parts, strict=True):
                body = expected[part.out_start : part.out_end]
                assert reducer.digest == bytes.fromhex(wire.payload_digest(body))
                assert reducer.news().digest == reducer.digest
            site.commit()
            assert all(reducer.committed for reducer in site.reducers)

    asyncio.run(check())


async def test_the_counts_of_slices_add_up_to_the_agreement_at_the_hub() -> None:
    table = TABLES["mixed"]
    rows = payloads(table, 3)
    clean = []
    for row in map(bytearray, rows):  # pad bits are 0 on the wire
        row[62] &= 0x0F
        row[63] = 0
        row[192 + 137] &= 0x0F
        row[192 + 138 :] = bytes(192 - 138)
        clean.append(bytes(row))
    site = Slices(table, slices(table, 4, 3))
    assert len(site.parts) > 2
    for voter, row in zip(VOTERS, clean, strict=True):
        for step in site.feed(voter, row):
            step()
    for reducer in site.reducers:
        reducer.order(order(VOTERS))
    news = [reducer.news() for reducer in site.reducers]
    assert sum(one.compared for one in news) == 500 + 1100
    result = site.result
    for index, row in enumerate(clean):
        votes = [(x[:64] + x[192:]) for x in (row, result)]
        differing = sum((x ^ y).bit_count() for x, y in zip(*votes, strict=True))
        assert sum(one.differing[index] for one in news) == differing > 0


async def test_other_voters_void_what_was_published() -> None:
    table = TABLES["voted"]
    rows = payloads(table, 3)
    site = Slices(table, slices(table, 1))
    (reducer,) = site.reducers
    reducer.order(order(VOTERS))
    feeds = [site.feed(voter, row, size=500) for voter, row in zip(VOTERS, rows, strict=True)]
    for steps in feeds[:2]:
        while steps:
            steps.pop(0)()
    for _ in range(len(feeds[2]) // 2):
        feeds[2].pop(0)()
    assert reducer.frames.frames and reducer.frames.attempt == 0 and not reducer.digest
    reducer.order(order(["a", "b"], attempt=2))
    assert reducer.frames.attempt == 1 and site.result == at_the_hub(table, rows[:2])
    assert (reducer.news().attempt, site.news[-1]) == (2, reducer)
    while feeds[2]:
        feeds[2].pop(0)()
    reducer.order(order(VOTERS, attempt=3))
    assert reducer.frames.attempt == 2 and site.result == at_the_hub(table, rows)


async def test_an_order_with_the_same_votes_keeps_the_result() -> None:
    site = Slices(TABLES["mixed"], slices(TABLES["mixed"], 1))
    (reducer,) = site.reducers
    reducer.order(order(["a"]))
    for step in site.feed("a", payloads(site.table, 1)[0]):
        step()
    digest, told = reducer.digest, len(site.news)
    reducer.order(order(["a"], attempt=5, topology=2))
    assert reducer.frames.attempt == 0 and reducer.digest == digest
    assert len(site.news) == told + 1 and reducer.news().attempt == 5


async def test_a_sender_that_dies_and_comes_again_voids_what_it_had_a_part_in() -> None:
    table = TABLES["voted"]
    rows = payloads(table, 2)
    site = Slices(table, slices(table, 1))
    (reducer,) = site.reducers
    reducer.order(order(["a", "b"]))
    for step in site.feed("a", rows[0]):
        step()
    taken = reducer.accept("b", table.nbytes, (0, 1))
    assert taken is not None
    taken.feed(wire.decode_frame(upload_frames(bytes(table.nbytes), 9600)[0]))
    reducer.delivered("b", taken)
    assert reducer.frames.frames
    reducer.lost("b", taken)
    assert not reducer.frames.frames and reducer.frames.attempt == 1
    for step in site.feed("b", rows[1]):
        step()
    taken.feed(
        wire.decode_frame(upload_frames(bytes(table.nbytes), 9600)[1])
    )  # its stream is read a last time
    assert site.result == at_the_hub(table, rows)


async def test_arrivals_are_told_if_that_is_wanted() -> None:
    site = Slices(TABLES["mixed"], slices(TABLES["mixed"], 1))
    (reducer,) = site.reducers
    rows = payloads(site.table, 2)
    reducer.order(order(["a", "b"]))
    for step in site.feed("a", rows[0]):
        step()
    assert not site.news
    reducer.order(order(["a", "b"], attempt=2, tell=True))
    assert len(site.news) == 1 and list(reducer.news().arrived) == ["a"]
    for step in site.feed("c", rows[0]):
        step()
    assert len(site.news) == 2 and list(reducer.news().arrived) == ["a", "c"]
    for step in site.feed("b", rows[1]):
        step()
    assert len(site.news) == 3 and reducer.news().digest


async def test_large_work_is_done_off_the_loop_one_job_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slice_reducer, "_INLINE_BYTES", 256 << 10)
    table = voted_table(8192)  # 512 KiB
    rows = payloads(table, 2)
    jobs: list[tuple[Callable[[], list[bytes]], asyncio.Future[list[bytes]]]] = []

    def submit(work: Callable[[], list[bytes]]) -> asyncio.Future[list[bytes]]:
        future: asyncio.Future[list[bytes]] = asyncio.get_running_loop().create_future()
        jobs.append((work, future))
        return future

    site = Slices(table, slices(table, 1), submit=submit)
    (reducer,) = site.reducers
    reducer.order(order(["a", "b"]))
    feeds = [site.feed(name, row, size=200_000) for name, row in zip("ab", rows, strict=True)]
    for step in [*feeds[0], *feeds[1]]:
        step()
    await until(lambda: jobs)
    assert len(jobs) == 1 and not reducer.digest
    while not reducer.digest:
        work, future = jobs.pop()
        future.set_result(work())
        await until(lambda: jobs or reducer.digest)
    assert site.result == at_the_hub(table, rows) and not jobs


async def test_a_job_of_voters_who_are_no_more_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slice_reducer, "_INLINE_BYTES", 256 << 10)
    table = voted_table(8192)
    rows = payloads(table, 2)
    futures: list[asyncio.Future[list[bytes]]] = []
    work: list[Callable[[], list[bytes]]] = []

    def submit(job: Callable[[], list[bytes]]) -> asyncio.Future[list[bytes]]:
        work.append(job)
        futures.append(asyncio.get_running_loop().create_future())
        return futures[-1]

    site = Slices(table, slices(table, 1), submit=submit)
    (reducer,) = site.reducers
    reducer.order(order(["a", "b"]))
    for name, row in zip("ab", rows, strict=True):
        for step in site.feed(name, row, size=10_000_000):
            step()
    await until(lambda: futures)
    reducer.order(order(["b"], attempt=2))
    futures[0].set_exception(RuntimeError("read rows that were being written"))
    await until(lambda: len(futures) == 2)
    assert not reducer.failed and not reducer.frames.frames
    futures[1].set_result(work[1]())
    await until(lambda: reducer.digest)
    assert site.result == rows[1]


async def test_a_reduction_that_fails_is_told_and_may_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Slices(TABLES["mixed"], slices(TABLES["mixed"], 1))
    (reducer,) = site.reducers
    reducer.order(order(["a"]))
    with monkeypatch.context() as patch:
        patch.setattr("optim.aggregate.mean_into", lambda *_: 1 / 0)
        for step in site.feed("a", payloads(site.table, 1)[0]):
            step()
    assert "ZeroDivisionError" in reducer.news().failed and len(site.news) == 1
    reducer.order(order(["a"], attempt=2))
    assert not reducer.news().failed and reducer.digest


@pytest.mark.parametrize(
    "changes",
    [{"voters": []}, {"voters": ["a", "a"]}, {"weights": [1]}, {"weights": [0, 1]}, {"mean_weights": [0, 1]}],
)
async def test_orders_that_cannot_be_carried_out(changes: dict[str, Any]) -> None:
    site = Slices(TABLES["mixed"], slices(TABLES["mixed"], 1))
    (reducer,) = site.reducers
    reducer.order(order(**{"voters": ["a", "b"], **changes}))
    assert reducer.news().failed and site.news == [reducer]
    reducer.order(order(["a", "b"], attempt=2))
    assert not reducer.news().failed


@pytest.mark.parametrize("shift", [(32, 0, 32, 0), (0, -32, 0, -32), (0, 0, 32, 0), (64, 0, 0, 0)])
async def test_a_slice_between_no_pieces_is_no_slice(shift: tuple[int, int, int, int]) -> None:
    table = TABLES["coded"]
    part = slices(table, 2, 5)[-1]
    odd = Slice(
        *(a + b for a, b in zip((part.start, part.end, part.out_start, part.out_end), shift, strict=True))
    )
    site = Slices(table, [odd])
    site.reducers[0].order(order(["a"]))
    assert "does not lie between pieces" in site.reducers[0].news().failed


async def test_rows_are_used_again_and_never_by_two() -> None:
    table, rows = TABLES["mixed"], Rows()
    parts = slices(table, 1)
    for round_index in range(3):
        site = Slices(table, parts, rows=rows, round_index=round_index)
        assert rows.nbytes == (2 * table.nbytes if round_index else 0)
        for name, row in zip("ab", payloads(table, 2, round_index), strict=True):
            for step in site.feed(name, row):
                step()
        assert rows.nbytes == 0
        straggler = site.reducers[0].accept("c", table.nbytes, (0, 1))
        site.reducers[0].order(order(["a", "b"], round_index=round_index))
        expected = site.result
        site.commit()
        assert rows.nbytes == 3 * table.nbytes
        assert straggler is not None and not straggler.wanted
        straggler.feed(wire.decode_frame(upload_frames(b"\xff" * table.nbytes)[0]))  # to nobody's row
        assert site.result == expected
        rows.keep([])
        rows.give([rows.take(table.nbytes) for _ in range(2)])
    rows.keep([1])
    assert rows.nbytes == 0


async def test_a_result_that_is_not_the_committed_one_leaves_no_trace() -> None:
    table = TABLES["coded"]
    memory = [ReducerMemory()]
    site = Slices(table, slices(table, 1), memory=memory)
    (reducer,) = site.reducers
    reducer.order(order(["a"]))
    for step in site.feed("a", payloads(table, 1)[0]):
        step()
    reducer.commit(b"another one")
    assert not memory[0].arrays() and reducer.closed is not None and reducer.closed.kind == "late"
    with pytest.raises(Refused, match="another result"):
        reducer.accept("b", table.nbytes, (0, 1))


async def test_pieces_that_are_ready_together_are_sent_in_one_frame() -> None:
    table = voted_table(lines=15_000)  # 960 kB
    site = Slices(table, slices(table, 1))
    (reducer,) = site.reducers
    reducer.order(order(["a", "b"]))
    for sender, payload in zip("ab", payloads(table, 2), strict=True):
        for step in site.feed(sender, payload, size=300_000):
            step()
    await until(lambda: reducer.digest)
    frames = [wire.decode_frame(frame) for frame in reducer.frames.frames[:-1]]
    assert len(frames) == 4 and sum(len(frame.body) for frame in frames) == table.nbytes
