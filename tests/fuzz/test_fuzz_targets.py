"""Every reader of a peer's bytes against damaged inputs: a small part of ``python -m bench fuzz``."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import fuzz as bench
from bench.fuzzing.engine import fuzz
from bench.fuzzing.inputs import MAX_INPUT, Mutator, any_message, joined, split
from bench.fuzzing.streams import Coordinator
from bench.fuzzing.targets import TARGETS, Target
from node.exchange.news import SessionNews
from node.exchange.order_json import order_from_json
from protos import atoll_pb2 as pb
from protos.identity import NodeKey, signed
from protos.wire import FrameError

FEW = 120  # inputs; the slow readers get fewer
_CHECKS: dict[str, Any] = {}  # of the targets, kept from one input to the next


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_valid_inputs_are_taken(target: Target) -> None:
    check = target.make()
    for seed in target.seeds:
        try:
            check(seed)
        except target.errors:
            # A seed that is refused would leave everything behind the refusal without inputs.
            assert target.name in ("certificate of a node", "slice of a result"), target.name


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_damaged_inputs_are_refused_in_order(target: Target) -> None:
    outcome = fuzz(target, max(5, int(FEW * min(1.0, target.share))))
    assert not outcome.findings, outcome.findings[0]
    assert outcome.inputs


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@given(data=st.binary(max_size=400))
@settings(max_examples=10, deadline=None)
def test_any_bytes_are_refused_in_order(target: Target, data: bytes) -> None:
    check = _CHECKS.setdefault(target.name, None) or target.make()
    _CHECKS[target.name] = check
    with contextlib.suppress(*target.errors):
        check(data)


def test_a_finding_is_kept_with_its_input() -> None:
    def broken(data: bytes) -> None:
        if len(data) > 3:
            raise KeyError("a bug")
        raise FrameError("as it should be")

    outcome = fuzz(Target("broken", lambda: broken, [b"ab", b"abcd"], (FrameError,)), 60)
    assert outcome.findings and outcome.refused
    assert all(len(one.data) > 3 and "KeyError" in one.what for one in outcome.findings)


def test_what_takes_long_is_a_finding() -> None:
    clock = iter(range(0, 10_000, 3))
    outcome = fuzz(Target("slow", lambda: lambda data: None, [b"a"]), 5, now=lambda: float(next(clock)))
    assert not outcome.findings
    clock = iter(range(0, 10_000, 6))
    outcome = fuzz(Target("slow", lambda: lambda data: None, [b"a"]), 5, now=lambda: float(next(clock)))
    assert len(outcome.findings) == 5


def test_inputs_are_reproducible_and_bounded() -> None:
    target = next(target for target in TARGETS if target.name == "coordinator")
    makers = [Mutator(target.seeds, random.Random(7), target.made) for _ in range(2)]
    inputs = [[maker.next() for _ in range(300)] for maker in makers]
    assert inputs[0] == inputs[1]
    assert max(map(len, inputs[0])) <= MAX_INPUT
    assert len(set(inputs[0])) > 200


@given(st.lists(st.binary(max_size=50), max_size=5), st.binary(max_size=3))
def test_messages_of_an_input(messages: list[bytes], rest: bytes) -> None:
    assert split(joined(messages)) == messages
    assert split(joined(messages) + rest)[: len(messages)] == messages


def test_messages_of_a_kind_have_every_field_now_and_then() -> None:
    rng, seen = random.Random(1), set()
    for _ in range(100):
        seen |= {field.name for field, _ in any_message(pb.JoinRequest, rng).ListFields()}
    assert seen == {field.name for field in pb.JoinRequest.DESCRIPTOR.fields}


def test_the_coordinator_that_is_fuzzed_takes_contributions() -> None:
    coordinator = Coordinator()
    target = next(target for target in TARGETS if target.name == "coordinator")
    coordinator(target.seeds[1])
    active = coordinator.hub.run.active
    assert active is not None
    assert [member.state.value for member in active.members.values()].count("complete") == 1


def test_shares_make_all_inputs() -> None:
    counts = bench.shares(TARGETS, 1000)
    assert sum(counts) >= 1000 and min(counts) >= 1


def test_a_guided_process_tells_its_inputs_or_its_crash() -> None:
    fine = bench.read_guided("frame", 10, 0, "INFO: x\nDone 10 runs in 0 second(s)\n")
    assert (fine.inputs, fine.findings) == (10, [])
    assert bench.read_guided("frame", 10, 77, "=== Uncaught Python exception: ===\nKeyError\n").findings


@pytest.mark.parametrize(
    "key",
    [
        bytes(32),  # found by fuzzing: the signature below is good for one message in four
        b"\x01" + bytes(31),
        b"\x01" + bytes(30) + b"\x80",
        b"\xec" + b"\xff" * 30 + b"\x7f",
        b"\xed" + b"\xff" * 30 + b"\x7f",
        b"\xee" + b"\xff" * 30 + b"\xff",
        bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"),
        bytes.fromhex("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a"),
    ],
)
def test_keys_that_everybody_can_sign_for_are_no_keys(key: bytes) -> None:
    everybodys = b"\x01" + bytes(63)
    assert not any(signed(key, everybodys, bytes((number,)), "run") for number in range(64))


def test_other_keys_still_sign() -> None:
    for _ in range(20):
        key = NodeKey.new()
        assert signed(key.public, key.sign(b"nonce", "run"), b"nonce", "run")
        assert not signed(key.public, key.sign(b"nonce", "run"), b"other", "run")


@pytest.mark.parametrize("read", [order_from_json, SessionNews.from_json])
@pytest.mark.parametrize(
    "text", ['{"kind": ["round"]}', '{"kind": {}}', "[" * 20_000, '{"a":' * 20_000, "\ud800"]
)
def test_json_of_other_ranks_is_refused_in_order(read: Callable[[str], object], text: str) -> None:
    with pytest.raises(ValueError):  # the first was found by fuzzing
        read(text)
