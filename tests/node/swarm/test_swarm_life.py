"""A node's coming and going: identity, phases that fail, and what is left of a process that was killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from node.exchange.retry import Timing
from node.exchange.swarm import process
from node.exchange.swarm.daemon import Daemon
from node.exchange.swarm.folder import SocketFolder
from node.exchange.swarm.identity import Identity, hold
from node.exchange.swarm.library import hivemind
from node.exchange.swarm.multiaddress import Multiaddress
from node.exchange.swarm.phases import SwarmTrouble
from node.exchange.swarm.setting import SwarmSetting
from tests.node.swarm.swarm_rig import SECONDS, Site, children_named

ENDINGS = ("leave", "return", "SIGINT", "SIGTERM", "SIGKILL")

NODE = """
import json, sys
from node.exchange.network import process_network
from node.exchange.swarm.setting import SwarmSetting
from node.exchange.swarm.swarm import Swarm
from tests.node.swarm.swarm_rig import echo

network = process_network().open()
swarm = Swarm(SwarmSetting(listen=("127.0.0.1",)), "token", "node", echo, say=print)
network.call(swarm.start(), 120, "the start")
print(json.dumps([swarm.daemon.pid, swarm.peer]), flush=True)
if sys.stdin.readline() == "leave\\n":
    network.call(swarm.close(), 60, "the end")
network.close()
"""


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Identity]:
    identity = hold(tmp_path_factory.mktemp("key") / "node.key")
    yield identity
    identity.release()


def test_a_key_is_its_owners_and_stays(key: Identity) -> None:
    assert key.path.stat().st_mode & 0o777 in (0o600, 0o400)
    peer = key.peer
    with pytest.raises(SwarmTrouble, match=f"in use by another process .{os.getpid()}.") as caught:
        hold(key.path)
    assert caught.value.phase == "identity" and not caught.value.passing
    key.release()
    again = hold(key.path)
    assert again.peer == peer
    again.release()


def test_a_key_that_others_read_or_that_is_damaged_is_refused(tmp_path: Path, key: Identity) -> None:
    path = tmp_path / "node.key"
    whole = key.path.read_bytes()
    for damaged in (b"", b"no key", whole[: len(whole) // 2], whole + bytes(1 << 15)):
        path.write_bytes(damaged)
        path.chmod(0o600)
        with pytest.raises(SwarmTrouble, match="is no key of a peer"):
            hold(path)
    path.write_bytes(whole)
    path.chmod(0o640)
    with pytest.raises(SwarmTrouble, match="can be read by others"):
        hold(path)
    path.chmod(0o400)
    other = hold(path)
    assert other.peer == key.peer
    other.release()
    with pytest.raises(SwarmTrouble, match="cannot be used: No such file"):
        hold(tmp_path / "none" / "node.key")


def test_folders_of_killed_processes_are_swept_up(sockets: Path) -> None:
    mine = SocketFolder()
    left, young = sockets / "atoll-swarm-left", sockets / "atoll-swarm-young"
    for folder in (left, young):
        folder.mkdir(mode=0o700)
    for folder in (left, mine.path):
        os.utime(folder, (1.0, 1.0))
    second = SocketFolder()
    assert mine.path.exists() and young.exists() and not left.exists()
    assert mine.path.stat().st_mode & 0o777 == 0o700
    for folder in (mine, second):
        folder.remove()
        folder.remove()
    young.rmdir()


async def test_a_port_that_is_taken_names_its_phase(sockets: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        daemon = Daemon(SwarmSetting(("127.0.0.1",), server.getsockname()[1]), lambda _: None)
        with pytest.raises(SwarmTrouble, match="phase listen: cannot listen at port"):
            await daemon.start()


async def test_failing_phases_leave_nothing_behind(sockets: Path) -> None:
    nobody = "/ip4/127.0.0.1/tcp/9/p2p/QmVvbzNhJvkVWD3uTNHUGo6JrqmfYQbGVSRTdZxpBwdvyU"
    for phase, text, setting in (
        ("bootstrap", "none of the peers to begin with can be reached", {"bootstrap": (nobody,)}),
        (
            "relay",
            "did not take this node on",
            {"relays": (nobody,), "reachability": "private", "relay_seconds": 0.2},
        ),
    ):
        said: list[str] = []
        setting = {"listen": ("127.0.0.1",), "bootstrap_seconds": 0.5, **setting}
        daemon = Daemon(SwarmSetting(**setting), said.append, Timing())  # type: ignore[arg-type]
        with pytest.raises(SwarmTrouble, match=text) as caught:
            await daemon.start()
        assert caught.value.phase == phase
        assert not children_named("p2pd")


@pytest.mark.slow
def test_the_daemon_ends_with_its_process_however_that_ends(sockets: Path) -> None:
    """In the network thread of processes of their own, on the loop that nodes use."""
    environment = {**os.environ, "TMPDIR": str(sockets), "PYTHONPATH": os.getcwd()}
    with ExitStack() as stack:
        nodes = {}
        for ending in ENDINGS:
            nodes[ending] = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", NODE],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env=environment,
                    text=True,
                )
            )
            stack.callback(nodes[ending].kill)
        told = [json.loads(node.stdout.readline()) for node in nodes.values() if node.stdout]
        daemons = [psutil.Process(pid) for pid, _ in told]
        assert {daemon.name() for daemon in daemons} == {"p2pd"}
        assert len({peer for _, peer in told}) == len(ENDINGS)
        for ending, node in nodes.items():
            if ending.startswith("SIG"):
                node.send_signal(signal.Signals[ending])
            elif node.stdin is not None:
                node.stdin.write(f"{ending}\n")
                node.stdin.flush()
        codes = {ending: node.wait(SECONDS) for ending, node in nodes.items()}
        _, alive = psutil.wait_procs(daemons, SECONDS)
        assert not alive
    assert codes["leave"] == codes["return"] == 0
    assert (codes["SIGTERM"], codes["SIGKILL"]) == (-signal.SIGTERM, -signal.SIGKILL)
    # Where nothing of the process runs any more, the next one sweeps up.
    left = list(sockets.iterdir())
    assert len(left) == 2
    for folder in left:
        os.utime(folder, (1.0, 1.0))
    SocketFolder().remove()
    assert not list(sockets.iterdir())


@pytest.mark.parametrize(
    ("words", "taken"),
    [
        ([process._NO_TABLE, process._NO_TABLE, ""], True),
        ([process._NO_TABLE, "routing: not found", ""], False),
        ([process._NO_TABLE] * process._TABLE_TRIES + [""], False),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_an_empty_table_is_no_answer_about_a_key(
    words: list[str], taken: bool, key: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_TABLE_PAUSE", 0.0)

    async def connect(peer: Any, addresses: list[Any]) -> None:
        assert str(peer) == key.peer and not addresses
        if word := words.pop(0):
            raise hivemind().ControlFailure(f"Connect failed. msg={word}")

    p2p = SimpleNamespace(_client=SimpleNamespace(connect=connect))
    assert await process._answers(p2p, key.peer) is taken


@pytest.mark.asyncio(loop_scope="module")
async def test_a_copy_of_a_key_is_found_out(sites: list[Site], tmp_path: Path, key: Identity) -> None:
    """On another machine no lock tells, but the swarm does."""
    key.release()
    copy = tmp_path / "copy.key"
    copy.write_bytes(key.path.read_bytes())
    copy.chmod(0o600)
    first, second = Site("first", identity=key.path), Site("second", identity=copy)
    try:
        for site in (first, second):
            site.begin_with(await sites[0].swarm.addresses())
        await first.swarm.start()
        assert first.swarm.peer == key.peer
        # The peer that both begin with knows the first; its start alone does not say that it does by now.
        at = map(Multiaddress.parse, await first.swarm.addresses())
        await sites[0].swarm.daemon.connect(first.swarm.peer, at)
        with pytest.raises(SwarmTrouble, match="another peer uses the identity"):
            await second.swarm.start()
    finally:
        await first.swarm.close()
        await second.swarm.close()
