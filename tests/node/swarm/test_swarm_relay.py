"""Two nodes that only reach a third, which carries their stream."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from node.exchange.retry import within
from node.exchange.trouble import Trouble
from tests.node.swarm.swarm_rig import SECONDS, Site


async def _hello(caller: Site, called: Site) -> None:
    stream = await caller.swarm.carrier.open(await called.peer())
    data = os.urandom(50_000)
    await stream.write(data)
    assert await within(SECONDS, "an echo", stream.read()) == data
    await stream.end()
    assert await within(SECONDS, "the end", stream.read()) is None


async def test_who_does_not_listen_is_reached_through_a_relay(sockets: Path) -> None:
    relay = Site("relay", reachability="public")
    await relay.swarm.start()
    through = await relay.swarm.addresses()
    setting = {"listen": (), "relays": through, "reachability": "private"}
    hidden = [Site(name, relayed=True, **setting) for name in ("one", "two")] + [Site("strict", **setting)]
    try:
        for site in hidden:
            site.begin_with(through)
        await asyncio.gather(*(site.swarm.start() for site in hidden))
        one, two, strict = hidden
        for site in hidden:
            addresses = await site.swarm.addresses()
            assert addresses and all("/p2p-circuit/p2p/" in address for address in addresses)
        await _hello(one, two)
        await _hello(two, one)
        with pytest.raises(Trouble, match="no direct way"):
            await strict.swarm.carrier.open(await one.peer())
    finally:
        await asyncio.gather(*(site.swarm.close() for site in (relay, *hidden)))


NODE = """
import asyncio, json, sys
sys.path.insert(0, {root!r})
from node.exchange.peers.base import Peer
from node.exchange.swarm.setting import SwarmSetting
from node.exchange.swarm.swarm import Swarm
from tests.node.swarm.swarm_rig import echo

async def main():
    setting = json.loads(sys.argv[1])
    swarm = Swarm(SwarmSetting(**{{k: tuple(v) if isinstance(v, list) else v for k, v in setting.items()}}),
                  "token", "node", echo, say=lambda text: print(text, file=sys.stderr))
    await swarm.start()
    print(json.dumps([swarm.peer, await swarm.addresses()]), flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        peer, addresses = json.loads(line)
        stream = await swarm.carrier.open(Peer("other", swarm=peer, swarm_addresses=tuple(addresses)))
        await stream.write(bytes(50_000))
        print(json.dumps(len(await stream.read())), flush=True)
        await stream.end()
    await swarm.close()

asyncio.run(main())
"""


class Namespaces:
    """A machine in the middle that does not forward, and two beside it that reach nothing else."""

    names = ("atsw-r", "atsw-a", "atsw-b")

    def __enter__(self) -> Namespaces:
        middle = self.names[0]
        for name in self.names:
            self._ip("netns", "add", name)
            self._ip("-n", name, "link", "set", "lo", "up")
        for number, name in enumerate(self.names[1:], start=1):
            self._ip("-n", name, "link", "add", "e0", "type", "veth", "peer", f"e{number}", "netns", middle)
            for where, link, host in ((name, "e0", 2), (middle, f"e{number}", 1)):
                self._ip("-n", where, "addr", "add", f"10.91.{number}.{host}/24", "dev", link)
                self._ip("-n", where, "link", "set", link, "up")
            self._ip("-n", name, "route", "add", "default", "via", f"10.91.{number}.1")
        subprocess.run(
            ["ip", "netns", "exec", middle, "sh", "-c", "echo 0 > /proc/sys/net/ipv4/ip_forward"], check=True
        )
        return self

    def __exit__(self, *error: object) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False)

    @staticmethod
    def _ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)


class Node:
    """A process in a namespace."""

    def __init__(self, namespace: str, folder: Path, **setting: Any) -> None:
        script = folder / "node.py"
        script.write_text(NODE.format(root=os.getcwd()))
        self.process = subprocess.Popen(
            ["ip", "netns", "exec", namespace, sys.executable, str(script), json.dumps(setting)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(folder)},
        )

    def line(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def send(self, value: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(value) + "\n")
        self.process.stdin.flush()

    def close(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            assert self.process.wait(SECONDS) == 0
        finally:
            self.process.kill()


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("ip"), reason="needs root and iproute2")
def test_networks_without_a_way_between_them_are_joined_by_a_relay(sockets: Path) -> None:
    with Namespaces(), contextlib.ExitStack() as stack:
        relay = Node("atsw-r", sockets, listen=["0.0.0.0"], reachability="public")
        stack.callback(relay.close)
        _, through = relay.line()
        nodes = []
        for name in ("atsw-a", "atsw-b"):
            near = [text for text in through if f"/10.91.{len(nodes) + 1}." in text]
            setting = {"bootstrap": near, "relays": near, "reachability": "private", "relayed": True}
            nodes.append(Node(name, sockets, **setting))
            stack.callback(nodes[-1].close)
        (one, _), (two, addresses) = (node.line() for node in nodes)
        assert one != two
        # The relay is known to each network by another address.
        here = [text.replace("/10.91.2.", "/10.91.1.") for text in addresses if "p2p-circuit" in text]
        nodes[0].send([two, here])
        assert nodes[0].line() == 50_000
    (sockets / "node.py").unlink()
