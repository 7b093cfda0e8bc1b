"""The parts of an exchange that need no network: results, tensor streams, retries, texts, meter."""

from __future__ import annotations

import asyncio

import grpc
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from node.exchange.meter import DIRECTIONS, KINDS, MESSAGE_PREFIX_BYTES, Meter
from node.exchange.result import ResultAssembly
from node.exchange.retry import Backoff, Patience, Timing, persist, within
from node.exchange.tensor_bytes import LayoutError, layout, total_bytes
from node.exchange.trouble import Kind, Trouble, diagnose
from protos import atoll_pb2 as pb
from protos import wire

# -------------------------------------------------------------------------------- results


@given(
    lengths=st.lists(st.integers(1, 300), max_size=8),
    restarts=st.lists(st.integers(0, 8), max_size=3),
    data=st.data(),
)
def test_only_the_chunks_of_the_last_attempt_make_the_result(
    lengths: list[int], restarts: list[int], data: st.DataObject
) -> None:
    total = sum(lengths)
    final = data.draw(st.binary(min_size=total, max_size=total))
    buffer = bytearray(total)
    assembly = ResultAssembly(memoryview(buffer), 3)
    for attempt, stop in enumerate(restarts):
        offset = 0
        for length in lengths[:stop]:
            void = bytes(length)
            assert assembly.add(wire.encode_frame(wire.CHUNK, void, attempt=attempt, offset=offset)) is None
            offset += length
        assert assembly.add(wire.encode_frame(wire.RESTART, attempt=attempt + 1)) is None
    offset = 0
    for length in lengths:
        body = final[offset : offset + length]
        assembly.add(wire.encode_frame(wire.CHUNK, body, attempt=len(restarts), offset=offset))
        offset += length
    commit = pb.Commit(round=3, nbytes=total, payload_digest=wire.payload_digest(final))
    assert assembly.add(wire.encode_frame(wire.COMMIT, commit.SerializeToString())) == commit
    assert bytes(buffer) == final


@given(message=st.binary(max_size=200))
def test_any_bytes_are_either_a_frame_or_an_error_in_words(message: bytes) -> None:
    assembly = ResultAssembly(memoryview(bytearray(64)), 0)
    try:
        assembly.add(message)
    except Trouble as trouble:
        assert trouble.kind is Kind.PROTOCOL and "was not applied" in str(trouble)


# ---------------------------------------------------------------------------------- layouts


def test_tensors_that_cannot_travel_are_named() -> None:
    with pytest.raises(LayoutError, match="'z': tensors of complex64 cannot travel"):
        total_bytes(layout({"z": torch.zeros(2, dtype=torch.complex64)}))


# ---------------------------------------------------------------------------------- retries


@given(failures=st.integers(1, 200), uniform=st.floats(0, 1, exclude_max=True))
def test_pauses_grow_to_a_cap_and_at_most_half_is_random(failures: int, uniform: float) -> None:
    backoff = Backoff(first=0.5, factor=2.0, cap=10.0)
    full = min(10.0, 0.5 * 2.0 ** (failures - 1))
    assert full / 2 <= backoff.pause(failures, uniform) <= full


class Clock:
    def __init__(self) -> None:
        self.time = 100.0
        self.said: list[str] = []

    async def sleep(self, seconds: float) -> None:
        self.time += seconds

    def patience(self, seconds: float) -> Patience:
        timing = Timing(
            now=lambda: self.time, sleep=self.sleep, uniform=lambda: 1.0, backoff=Backoff(first=1.0)
        )
        return Patience("the coordinator at h:1", seconds, timing, self.said.append)


def trouble(kind: Kind = Kind.NOBODY_LISTENS) -> Trouble:
    return Trouble(kind, "nothing listens at h:1: connection refused")


async def test_patience_counts_a_span_from_its_first_failure() -> None:
    clock = Clock()
    patience = clock.patience(4.0)
    clock.time += 1000.0  # all was well until now
    await patience.endure(trouble())
    await patience.endure(trouble())
    assert clock.said == [  # the second comes too soon to be told
        f"waiting for the coordinator at h:1: {trouble()}; trying again in 1 s, 4 s left"
    ]
    assert clock.time == 1103.0
    patience.reset()
    await patience.endure(trouble())
    assert clock.said[-1].endswith("trying again in 1 s, 4 s left")
    clock.time += 4.0
    with pytest.raises(
        Trouble, match="gave up on the coordinator at h:1 after 4 s, tried 2 times: nothing listens"
    ):
        await patience.endure(trouble())


async def test_what_cannot_pass_is_not_waited_for() -> None:
    clock = Clock()
    with pytest.raises(Trouble, match="nothing listens"):
        await clock.patience(60.0).endure(trouble(Kind.REFUSED))
    assert clock.said == []


async def test_attempts_are_repeated_until_one_succeeds() -> None:
    clock, outcomes = Clock(), [trouble(), trouble(), "here"]

    async def attempt() -> str:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Trouble):
            raise outcome
        return str(outcome)

    assert await persist(attempt, clock.patience(60.0)) == "here"
    assert clock.time == 103.0


async def test_deadlines_have_names() -> None:
    with pytest.raises(Trouble, match=r"a chunk of the upload took longer than 0.01 s") as caught:
        await within(0.01, "a chunk of the upload", asyncio.Event().wait())
    assert caught.value.kind is Kind.SILENT


async def test_a_cancellation_that_comes_as_the_work_ends_is_not_lost() -> None:
    done = asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(within(60.0, "it", done))
    await asyncio.sleep(0)
    done.set_result(None)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


# --------------------------------------------------------------------------------- texts

_CODES = grpc.StatusCode
_FAILED = "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.1:1: "
_AT = "example.org:4600"


@pytest.mark.parametrize(
    ("code", "details", "kind", "text"),
    [
        (
            _CODES.UNAVAILABLE,
            _FAILED + "Failed to connect to remote host: connect: Connection refused (111)",
            Kind.NOBODY_LISTENS,
            "nothing listens at example.org:4600: connection refused",
        ),
        (
            _CODES.UNAVAILABLE,
            "errors resolving nosuch:5000: [field:hostname lookup error:address lookup failed: not found]",
            Kind.NAME,
            "the host name 'example.org' does not resolve",
        ),
        (
            _CODES.UNAVAILABLE,
            "DNS resolution failed for example.org:4600: C-ares status is not ARES_SUCCESS",
            Kind.NAME,
            "does not resolve",
        ),
        (
            _CODES.UNAVAILABLE,
            _FAILED + "connection attempt timed out before receiving SETTINGS frame",
            Kind.SILENT,
            "accepts connections and stays silent",
        ),
        (
            _CODES.UNAVAILABLE,
            _FAILED + "Failed to connect to remote host: Timeout occurred: FD Shutdown",
            Kind.UNREACHABLE,
            "connecting timed out",
        ),
        (
            _CODES.UNAVAILABLE,
            _FAILED + "Failed to connect to remote host: connect: No route to host (113)",
            Kind.UNREACHABLE,
            "cannot be reached: connect: No route to host",
        ),
        (_CODES.UNAVAILABLE, "Failed parsing HTTP/2", Kind.STRANGER, "does not speak gRPC"),
        (_CODES.UNAVAILABLE, "Socket closed", Kind.BROKEN, "broke (Socket closed)"),
        (
            _CODES.DEADLINE_EXCEEDED,
            "Deadline Exceeded",
            Kind.SILENT,
            "no answer from example.org:4600 within 7 s",
        ),
        (_CODES.DEADLINE_EXCEEDED, "node-1 has not read", Kind.SILENT, "ended the call: node-1 has not read"),
        (_CODES.UNAUTHENTICATED, "the invite's token is not this run's", Kind.TOKEN, "the invite's token"),
        (_CODES.UNAUTHENTICATED, f"{wire.SESSION_UNKNOWN}unknown", Kind.SESSION_UNKNOWN, "node: unknown"),
        (_CODES.ALREADY_EXISTS, "node-0 has a session already", Kind.SESSION_BUSY, "has a session already"),
        (_CODES.UNIMPLEMENTED, "Received http2 header with status: 404", Kind.STRANGER, "http_proxy"),
        (_CODES.FAILED_PRECONDITION, "digests a and b differ", Kind.REFUSED, "digests a and b differ"),
        (_CODES.ABORTED, "another stream", Kind.BROKEN, "ended the call (another stream)"),
        (_CODES.INTERNAL, "Internal error from Core", Kind.HIDDEN, "while this node was sending"),
        (_CODES.INTERNAL, "the coordinator failed", Kind.FAULT, "failed: the coordinator failed"),
        (_CODES.UNKNOWN, None, Kind.FAULT, "failed: UNKNOWN"),
    ],
)
def test_every_failure_has_its_own_words(
    code: grpc.StatusCode, details: str | None, kind: Kind, text: str
) -> None:
    found = diagnose(code, details, _AT, seconds=7.0)
    assert found.kind is kind and text in str(found)


def test_another_node_is_called_by_its_name() -> None:
    for code, details, text in (
        (_CODES.UNAVAILABLE, "Socket closed", f"the connection to node-3 at {_AT} broke (Socket closed)"),
        (_CODES.UNIMPLEMENTED, "404", f"what answers at {_AT} is not an Atoll node of this version"),
        (_CODES.DEADLINE_EXCEEDED, "Deadline Exceeded", "or node-3 is overloaded"),
        (_CODES.ABORTED, "", f"node-3 at {_AT} ended the call"),
    ):
        assert text in str(diagnose(code, details, _AT, who="node-3"))


def test_ipv6_host_is_named_without_brackets() -> None:
    found = diagnose(_CODES.UNAVAILABLE, "DNS resolution failed", "[::1]:4600")
    assert "'::1'" in str(found)


# --------------------------------------------------------------------------- meter


def test_meter_adds_the_prefix_of_every_message_and_tells_its_listener() -> None:
    heard: list[tuple[str, str, int]] = []
    meter = Meter(lambda direction, kind, nbytes: heard.append((direction, kind, nbytes)))
    meter.add("up", "contribution", 100)
    meter.add("up", "control", 0)
    meter.add("down", "result", 7)
    assert (meter.total("up"), meter.total("down")) == (
        100 + 2 * MESSAGE_PREFIX_BYTES,
        7 + MESSAGE_PREFIX_BYTES,
    )
    assert heard == [("up", "contribution", 105), ("up", "control", 5), ("down", "result", 12)]
    counts = meter.counts()
    assert set(counts) == {(direction, kind) for direction in DIRECTIONS for kind in KINDS}
    counts["up", "state"] = 9
    assert meter.counts()["up", "state"] == 0
