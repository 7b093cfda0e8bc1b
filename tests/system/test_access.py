"""Who is let in, with real processes: each refusal has an exit code of its own, and the log tells of it."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from protos.invite import Invite
from tests.starting import Start, starting
from tests.waiting import until

ROOT = Path(__file__).parents[2]
DEADLINE = 120.0
RUN = """
[run]
nodes = 2
rounds = 3
evaluate_every = 0
[model]
d_model = 16
layers = 1
heads = 1
context = 16
[data]
batch = 2
"""
# Whoever has listened to a join sends the same message again.
REPLAY = """
import asyncio, sys
from deploy.errors import exit_code
from node.exchange.link import Limits, Link
from node.exchange.meter import Meter
from node.exchange.trouble import Trouble
from protos import atoll_pb2 as pb
from protos.invite import Invite

async def main():
    link = Link(Invite.parse(sys.argv[1]), Meter(), Limits())
    link.open()
    told = await link.get_run()
    heard = pb.JoinRequest(protocol=told.protocol, run_digest=told.run_digest, key=link.key.public,
                           nonce=told.nonce, signature=link.key.sign(told.nonce, told.run_digest))
    codes = []
    for _ in range(2):
        try:
            await link._unary("Join", heard, pb.JoinReply)
        except Trouble as trouble:
            codes.append(exit_code(trouble))
    await link.close()
    return codes

first, second = asyncio.run(main())
assert first == 32, first  # it says too little of itself to be admitted, but is who it says
sys.exit(second)
"""


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts python with some arguments; whatever is left ends with the test."""
    with starting(deadline=DEADLINE) as run:
        yield run


def told(path: Path) -> list[dict[str, Any]]:
    """The events in a log, whole lines only."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def test_every_refusal_has_its_exit_code(tmp_path: Path, start: Start) -> None:
    def atoll(*arguments: str) -> subprocess.Popen[str]:
        return start("-m", "deploy.cli", *arguments)

    def made(*options: str) -> str:
        process = atoll("invite", "create", str(journal), "--json", *options)
        text, _ = process.communicate(timeout=DEADLINE)
        assert process.returncode == 0, text
        return str(json.loads(text)["invite"])

    def ends(process: subprocess.Popen[str]) -> int:
        process.communicate(timeout=DEADLINE)
        return process.returncode

    def has(path: Path, name: str, **values: object) -> Callable[[], bool]:
        wanted = {"event": name, **values}
        return lambda: any(wanted.items() <= event.items() for event in told(path))

    journal, file, log = tmp_path / "journal", tmp_path / "invite", tmp_path / "log.jsonl"
    (tmp_path / "run.toml").write_text(RUN)
    coordinator = atoll(
        "coordinator", str(tmp_path / "run.toml"), "--listen", "127.0.0.1:0", "--metrics", "off",
        "--dashboard", "off", "--journal", str(journal), "--invite-file", str(file), "--events", str(log),
    )  # fmt: skip
    until(file.exists, "the invite", watch=coordinator, fate=lambda: coordinator.communicate()[0])
    invite = Invite.parse(file.read_text())
    assert invite.token not in (journal / "tokens.json").read_text()

    alice, observer, brief = made("--name", "alice"), made("--role", "observer"), made("--expires", "1ms")
    joined = tmp_path / "alice.jsonl"
    node = atoll("join", alice, "--identity", str(tmp_path / "key"), "--events", str(joined))
    until(has(joined, "Joined"), "the node", watch=node, fate=lambda: node.communicate()[0])
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    shutil.copy2(tmp_path / "key", tmp_path / "stolen")

    wrong = str(Invite("wrong", invite.host, invite.port, invite.pin))
    started = {  # all at once
        20: atoll("status", wrong),
        21: atoll("status", brief),
        23: atoll("join", observer),
        27: start("-c", REPLAY, str(invite)),
        28: atoll("join", str(invite), "--identity", str(tmp_path / "stolen")),
        0: atoll("status", observer),
    }
    assert {code: ends(process) for code, process in started.items()} == {code: code for code in started}

    assert node.poll() is None
    assert ends(atoll("invite", "revoke", str(journal), "alice")) == 0
    assert ends(node) == 22  # its session has been ended, and it may not come back
    assert ends(atoll("status", alice)) == 22
    coordinator.send_signal(signal.SIGINT)
    assert ends(coordinator) == 130
    for kind in ("bad-token", "token-expired", "token-revoked", "wrong-role", "replayed-join", "key-in-use"):
        assert has(log, "AccessRefused", kind=kind)(), kind
    assert has(log, "TokenAdded", token="alice")() and has(log, "TokenEnded", token="alice")()
    assert has(log, "TokenUsed", token="alice", role="node")() and has(log, "NodeJoined", token="alice")()
    assert has(log, "NodeLeft", reason="its token alice was revoked")()
