"""What is fuzzed: every function that reads bytes of a peer, each with the errors that it may raise.

Anything else that is raised, an input that takes long, or memory that grows, is a finding.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import xxhash
from google.protobuf.message import DecodeError, Message

from bench.fuzzing.inputs import any_message, joined, split
from bench.fuzzing.streams import STATE_BYTES, join_request, of_hub, of_snapshot, of_state, of_swarm
from bench.fuzzing.tables import CODED, DIGEST, mixed_payload
from coordinator.contribution import Contribution, check_header, parse_header
from coordinator.manifest import check_manifest, manifest_of, parse_chunks_header
from coordinator.tokens import TokenBook, TokenError
from node.exchange.base import RoundOrder
from node.exchange.news import SessionNews
from node.exchange.order_json import order_from_json, order_to_json
from node.exchange.peers.hello import read_hello, trusted
from node.exchange.peers.plan import Plan
from node.exchange.peers.upload import SliceAssembly
from node.exchange.result import ResultAssembly
from node.exchange.swarm.multiaddress import Multiaddress, is_peer_id, parse_with_peer
from node.exchange.trouble import Trouble
from optim.codecs import codec_of
from optim.inspection import Inspection
from protos import atoll_pb2 as pb
from protos import wire
from protos.address import Address, AddressError, peer, port_of
from protos.certificate import CertificateError, name_in, pem_of
from protos.identity import signed
from protos.invite import Invite, InviteError
from protos.lane_layout import LaneLayout, layout_of
from protos.refusal import Refused
from protos.runfile import RunFile, RunFileError

Check = Callable[[bytes], None]
Errors = tuple[type[BaseException], ...]


@dataclass(frozen=True)
class Target:
    """One reader of bytes.

    Attributes:
        name: of it.
        make: makes a fresh one.
        seeds: valid inputs.
        errors: that it may raise.
        made: makes an input of the right form with any values; ``None``: seeds are damaged alone.
        share: of all inputs, relative to the others: less for those that take long.
    """

    name: str
    make: Callable[[], Check]
    seeds: Sequence[bytes]
    errors: Errors = ()
    made: Callable[[random.Random], bytes] | None = None
    share: float = 1.0


def _fresh(kind: type[Message], frame: int | None = None) -> Callable[[random.Random], bytes]:
    def made(rng: random.Random) -> bytes:
        body = any_message(kind, rng).SerializeToString()
        return body if frame is None else wire.encode_frame(frame, body)

    return made


def _stateless(check: Check) -> Callable[[], Check]:
    return lambda: check


def _frame(data: bytes) -> None:
    frame = wire.decode_frame(data)
    assert wire.encode_frame(frame.kind, frame.body, attempt=frame.attempt, offset=frame.offset) == data


_INSPECTION: Final = Inspection(CODED)
_LANE: Final = LaneLayout(CODED)


def _contribution(data: bytes) -> None:
    row = np.zeros(CODED.nbytes, np.uint8)
    contribution = Contribution(row, _INSPECTION, _LANE)
    for message in split(data):
        contribution.feed(wire.decode_frame(message))
    assert contribution.received <= CODED.nbytes


def _contribution_header(data: bytes) -> None:
    header = parse_header(wire.decode_frame(data))
    check_header(header, CODED, layout_of(header, CODED), 1)


def _codecs(data: bytes) -> None:
    for bucket in CODED.buckets:
        if bucket.reduce == "mean":
            codec = codec_of(bucket.codec, bucket.shape)
            part = np.frombuffer(data.ljust(codec.nbytes, b"\0")[: codec.nbytes], np.uint8)
            if not codec.problem(part):
                assert np.isfinite(codec.decode(part)).all()


def _hello(data: bytes) -> None:
    hello = read_hello(data, DIGEST)
    trusted(hello, [_PLAN], "node-0", local=False)


_NODES: Final = [
    pb.PeerNode(node=f"node-{i}", call_token=b"c" * 16, accept_token=b"a" * 16) for i in range(2)
]
_SLICE: Final = pb.SliceOf(reducer="node-1", end=CODED.nbytes, out_end=CODED.result_nbytes)
_TOPOLOGY: Final = pb.Topology(
    number=1, nodes=_NODES, tables=[pb.TableSlices(table_digest=CODED.digest, slices=[_SLICE])]
)
_PLAN: Final = Plan.of(_TOPOLOGY, "node-0")


def _topology(data: bytes) -> None:
    Plan.of(pb.Topology.FromString(data), "node-0", _PLAN).shares(CODED)


def _result(data: bytes) -> None:
    assembly = ResultAssembly(memoryview(bytearray(256)), 3)
    for message in split(data):
        assembly.add(message)


def _slice(data: bytes) -> None:
    assembly = SliceAssembly(memoryview(bytearray(256)), "a slice", base=64)
    for message in split(data):
        assembly.add(message)


def _manifest(data: bytes) -> None:
    check_manifest(manifest_of(parse_chunks_header(wire.decode_frame(data))))


def _order(data: bytes) -> None:
    order_from_json(data)


def _news(data: bytes) -> None:
    SessionNews.from_json(data)


def _texts(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    peer(text), port_of(text), is_peer_id(text)
    for parse in (Address.parse, Invite.parse, Multiaddress.parse, parse_with_peer):
        try:
            parse(text)
        except (AddressError, InviteError, ValueError):
            continue


def _run_file(data: bytes) -> None:
    RunFile.parse(data.decode("utf-8", "replace"))


def _certificate(data: bytes) -> None:
    pem_of(data)
    name_in(data)


def _signature(data: bytes) -> None:
    assert not signed(data[:32], data[32:96], b"nonce", DIGEST)


def _tokens(data: bytes) -> None:
    TokenBook.from_json(json.loads(data))


def _end(kind: int, body: bytes = b"", offset: int = 0) -> bytes:
    return wire.encode_frame(kind, body, offset=offset)


def _upload(payload: bytes, size: int = 128) -> list[bytes]:
    chunks = [
        wire.encode_frame(wire.CHUNK, payload[at : at + size], offset=at)
        for at in range(0, len(payload), size)
    ]
    end = pb.ContributionEnd(payload_digest=wire.payload_digest(payload))
    return [*chunks, _end(wire.END, end.SerializeToString())]


def _committed() -> list[bytes]:
    payload = bytes(range(256))
    commit = pb.Commit(
        round=3, voters=["node-0"], weights=[1], nbytes=256, payload_digest=wire.payload_digest(payload)
    )
    frames = [wire.encode_frame(wire.CHUNK, payload[at : at + 64], offset=at) for at in range(0, 256, 64)]
    return [*frames, _end(wire.COMMIT, commit.SerializeToString())]


_HEADER: Final = pb.ContributionHeader(
    round=0, epoch=1, table_digest=CODED.digest, nbytes=CODED.nbytes, weight=1, part=False
)
_HELLO: Final = pb.PeerHello(
    protocol=wire.PROTOCOL, run_digest=DIGEST, sender="node-1", token=b"a" * 16, slice=pb.SliceUp(nbytes=64)
)
_CHUNKS: Final = pb.ChunksHeader(
    snapshot="round-0-0",
    state_digest="d" * 64,
    nbytes=24,
    tensors=[pb.StateTensor(name="a", dtype="float32", shape=[2, 3])],
    count=1,
)
_ORDER: Final = RoundOrder(1, 2, ("node-0",), 3, 4, False, False)
_PEER_ID: Final = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"

_STATE: Final = bytes(range(STATE_BYTES))


def _donated() -> list[bytes]:
    end = pb.ChunksEnd(digests=[xxhash.xxh3_128_digest(_STATE)])
    return [
        wire.encode_frame(wire.HEADER, _CHUNKS.SerializeToString()),
        wire.encode_frame(wire.CHUNK, _STATE),
        wire.encode_frame(wire.END, end.SerializeToString()),
    ]


def _stored() -> list[bytes]:
    manifest = pb.Manifest(
        snapshot=_CHUNKS.snapshot,
        state_digest=_CHUNKS.state_digest,
        nbytes=STATE_BYTES,
        tensors=_CHUNKS.tensors,
        digests=[xxhash.xxh3_128_digest(_STATE)],
    )
    return [
        wire.encode_frame(wire.HEADER, manifest.SerializeToString()),
        wire.encode_frame(wire.CHUNK, _STATE),
        wire.encode_frame(wire.END),
    ]


_MARKS: Final = b"\xff\xff\xff\xff\xfc\xff\xff\xff"  # no more messages, and goodbye


def _record(message: bytes) -> bytes:
    return len(message).to_bytes(4, "little") + message


def _call(kind: int, body: bytes | Message) -> bytes:
    return bytes((kind,)) + (body if isinstance(body, bytes) else body.SerializeToString())


_CONTRIBUTION: Final = [
    _call(3, frame)
    for frame in (wire.encode_frame(wire.HEADER, _HEADER.SerializeToString()), *_upload(mixed_payload()))
]
_CALLS: Final = [
    joined([_call(0, join_request())]),
    joined(_CONTRIBUTION),
    joined([*_CONTRIBUTION[:2], _call(5, b""), *_CONTRIBUTION]),
    joined([_call(1, pb.NodeMessage(report=pb.Report(round=0, state_digest="s1", loss=1.0, tokens=8)))]),
    joined([_call(1, pb.NodeMessage(ready=pb.Ready(round=0, state_digest="s0"))), _call(7, b"")]),
    joined([_call(1, pb.NodeMessage(endpoint=pb.Endpoint(direct=":5000", uplink=1e6)))]),
    joined([_call(1, pb.NodeMessage(leave=pb.Leave(reason="done"))), _call(7, b"")]),
    joined([_call(6, pb.ResultsRequest(first=0, count=1))]),
]
_KINDS: Final = (
    (0, pb.JoinRequest, None),
    (1, pb.NodeMessage, None),
    (1, pb.NodeMessage, None),
    (3, pb.ContributionHeader, wire.HEADER),
    (3, pb.ContributionEnd, wire.END),
    (6, pb.ResultsRequest, None),
    (6, pb.ChunksHeader, wire.HEADER),
)


def _any_call(rng: random.Random) -> bytes:
    calls = []
    for _ in range(rng.choice((1, 1, 2, 4))):
        kind, message, frame = rng.choice(_KINDS)
        calls.append(_call(kind, _fresh(message, frame)(rng)))
    return joined(calls)


TARGETS: Final = (
    Target("frame", _stateless(_frame), [_end(wire.HEADER, b"abc"), _end(wire.CHUNK, bytes(64), 64)],
           (wire.FrameError,), share=3),
    Target("contribution", _stateless(_contribution), [joined(_upload(mixed_payload()))],
           (wire.FrameError, Refused)),
    Target("contribution header", _stateless(_contribution_header),
           [_end(wire.HEADER, _HEADER.SerializeToString())], (wire.FrameError, Refused),
           _fresh(pb.ContributionHeader, wire.HEADER)),
    Target("codecs", _stateless(_codecs), [mixed_payload()]),
    Target("hello of a node", _stateless(_hello), [_end(wire.HEADER, _HELLO.SerializeToString())], (Refused,),
           _fresh(pb.PeerHello, wire.HEADER)),
    Target("topology", _stateless(_topology), [_TOPOLOGY.SerializeToString()], (DecodeError, Trouble),
           _fresh(pb.Topology)),
    Target("result", _stateless(_result), [joined(_committed())], (Trouble,)),
    Target("slice of a result", _stateless(_slice), [joined([_end(wire.CHUNK, bytes(256), 64)])],
           (Trouble, Refused)),
    Target("manifest", _stateless(_manifest), [_end(wire.HEADER, _CHUNKS.SerializeToString())],
           (wire.FrameError, Refused), _fresh(pb.ChunksHeader, wire.HEADER)),
    Target("order between ranks", _stateless(_order), [order_to_json(_ORDER).encode()], (ValueError,)),
    Target("news between ranks", _stateless(_news), [SessionNews().to_json().encode()], (ValueError,)),
    Target("addresses and invites", _stateless(_texts), [
        b"[2001:db8::7]:4600", b"example.org:80", b"ipv6:%5B::1%5D:5000",
        b"atoll://Zx3kabc@192.0.2.7:4600/" + b"A" * 43, b"atoll+insecure://Zx3k@192.0.2.7:4600",
        f"/ip4/192.0.2.7/tcp/4600/p2p/{_PEER_ID}".encode(),
    ]),
    Target("run file", _stateless(_run_file), [RunFile().to_toml().encode()], (RunFileError,), share=0.03),
    Target("certificate of a node", _stateless(_certificate), [b"\x30\x82\x01\x50" + bytes(336)],
           (CertificateError, ValueError), share=0.3),
    Target("signature of a node", _stateless(_signature), [bytes(96)], share=0.3),
    Target("book of tokens", _stateless(_tokens), [json.dumps(TokenBook().to_json()).encode()],
           (TokenError, ValueError)),
    Target("coordinator", of_hub, _CALLS, made=_any_call, share=0.5),
    Target("upload of a snapshot", of_snapshot, [joined(_donated())], (Refused,), share=0.5),
    Target("download of a snapshot", of_state, [joined(_stored())], (Trouble,), share=0.5),
    Target("records of the swarm", of_swarm, [_record(b"abc") + _MARKS], share=0.3),
)  # fmt: skip
