"""The daemon's life: started in phases, watched, started again when it dies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final

from node.exchange.retry import Patience, Say, Timing, persist, within
from node.exchange.swarm import ports, process
from node.exchange.swarm.folder import SocketFolder
from node.exchange.swarm.identity import Identity, hold
from node.exchange.swarm.library import hivemind
from node.exchange.swarm.multiaddress import Multiaddress, parse_with_peer, peer_bytes
from node.exchange.swarm.phases import SwarmTrouble
from node.exchange.swarm.setting import SwarmSetting
from node.exchange.trouble import Kind, Trouble

_DIAL_SECONDS: Final = 10.0
_UP_SECONDS: Final = 30.0  # for one of the things to do after a start

Up = Callable[[Any], Awaitable[None]]


class Daemon:
    """libp2p in a process of its own, for one node; used in the network thread only.

    Args:
        setting: how the node takes part.
        say: receives a sentence when the daemon died, and when it is back.
        timing: clock, sleep, randomness.
    """

    def __init__(self, setting: SwarmSetting, say: Say, timing: Timing | None = None) -> None:
        self._setting, self._say = setting, say
        self._timing = timing or Timing()
        self._folder: SocketFolder | None = None
        self._identity: Identity | None = None
        self._process: process.Process | None = None
        self._port = 0
        self._up: list[Up] = []
        self._down: list[Callable[[], None]] = []
        self._watching: asyncio.Task[None] | None = None
        self._relays_changed = asyncio.Event()
        self._seen: set[str] = set()
        self.known: Callable[[], Iterable[str]] = lambda: ()

    @property
    def setting(self) -> SwarmSetting:
        """How the node takes part."""
        return self._setting

    @property
    def peer(self) -> str:
        """The node's peer id; empty before :meth:`start`."""
        return self._identity.peer if self._identity is not None else ""

    @property
    def port(self) -> int:
        """That it listens at."""
        return self._port

    @property
    def pid(self) -> int:
        """Of the present process; 0: there is none."""
        return self._process.pid if self._process is not None else 0

    @property
    def p2p(self) -> Any:
        """hivemind's client of the present process.

        Raises:
            SwarmTrouble: there is none.
        """
        if self._process is None:
            raise SwarmTrouble("daemon", "libp2p's process is not running; it is started again", Kind.BROKEN)
        return self._process.p2p

    def on_up(self, action: Up) -> None:
        """Call ``action`` with the client after every start; before :meth:`start` only."""
        self._up.append(action)

    def on_down(self, action: Callable[[], None]) -> None:
        """Call ``action`` when the process has died or is ended."""
        self._down.append(action)

    async def start(self) -> None:
        """Get into the swarm.

        Raises:
            SwarmTrouble: not possible; its phase and text say why. Nothing is left behind.
        """
        try:
            await asyncio.to_thread(hivemind)
            self._folder = await asyncio.to_thread(SocketFolder)
            path = self._setting.identity or self._folder.path / "identity"
            self._identity = await asyncio.to_thread(hold, path)
            self._port = ports.choose(self._setting.listen, self._setting.port, self._setting.quic)
            if self._setting.identity is not None and self._setting.bootstrap:
                await self._check_identity()
            await self._bring_up(self._setting.bootstrap_seconds)
        except BaseException:
            await self.close()
            raise
        self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Leave the swarm. Safe to call twice."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})
            self._watching = None
        await self._bring_down()
        if self._identity is not None:
            self._identity.release()
        if self._folder is not None:
            self._folder.remove()

    async def connect(self, peer: str, addresses: Iterable[Multiaddress]) -> None:
        """Have a connection to ``peer``.

        Raises:
            Trouble: it cannot be reached.
        """
        client = self.p2p._client
        known = [address.without_peer() for address in addresses]
        try:
            await within(
                _DIAL_SECONDS,
                f"a connection to {peer}",
                client.connect(hivemind().PeerID(peer_bytes(peer)), known),
            )
        except Trouble:
            raise
        except Exception as error:  # hivemind's, or of the socket to the daemon
            raise Trouble(
                Kind.UNREACHABLE, f"the peer {peer} cannot be reached: {dial_words(error)}"
            ) from error

    async def disconnect(self, peer: str) -> None:
        """End the connections to ``peer``, with all their streams; whatever keeps that from happening is left
        to the next :meth:`connect`."""
        with contextlib.suppress(Exception):  # hivemind's, or of the socket to the daemon
            call = self.p2p._client.disconnect(hivemind().PeerID(peer_bytes(peer)))
            await within(_DIAL_SECONDS, f"the end of the connection to {peer}", call)

    async def addresses(self) -> tuple[str, ...]:
        """Where others may reach this node, each with its peer id: what libp2p knows, what other peers see,
        and the relays; loopback only if there is nothing else."""
        _, listening = await within(_DIAL_SECONDS, "the daemon's addresses", self.p2p._client.identify())
        texts = [*self._setting.announce, *map(str, listening)]
        if self._setting.listen:
            for host in sorted(self._seen):
                part = f"/ip{6 if ':' in host else 4}/{host}"
                texts.append(f"{part}/tcp/{self._port}")
                texts += [f"{part}/udp/{self._port}/quic-v1"] * self._setting.quic
        held = self._process.relays if self._process is not None else set()
        texts += [
            f"{text}/p2p-circuit" for text in self._setting.relays if parse_with_peer(text).peer in held
        ]
        found: dict[str, bool] = {}
        for text in texts:
            with contextlib.suppress(ValueError):  # what libp2p listens at and the swarm does not use
                address = Multiaddress.parse(text)
                if address.peer != self.peer:
                    address = Multiaddress.parse(f"{text}/p2p/{self.peer}")
                found[str(address)] = address.host.startswith("127.") or address.host == "::1"
        outside = [text for text, loopback in found.items() if not loopback or "p2p-circuit" in text]
        return tuple(outside or found)

    def seen_from(self, address: str) -> None:
        """Another peer sees this node at ``address``."""
        with contextlib.suppress(ValueError):
            seen = Multiaddress.parse(address)
            if not seen.relayed and seen.parts[0][0] in ("ip4", "ip6"):
                self._seen.add(seen.host)

    async def _check_identity(self) -> None:
        assert self._identity is not None and self._folder is not None
        patience = self._patience(self._setting.bootstrap_seconds)
        identity, folder = self._identity, self._folder.path
        if not await persist(lambda: process.identity_is_free(self._setting, identity, folder), patience):
            raise SwarmTrouble(
                "identity",
                f"another peer uses the identity of {identity.path}: end it, or give this node its own key",
                Kind.REFUSED,
            )

    async def _bring_up(self, bootstrap_seconds: float) -> None:
        relays = self._setting.relay_peers()
        if self._setting.reachability != "private" or not relays:
            await self._start_process(relays, bootstrap_seconds)
        for left in reversed(range(len(relays) if self._process is None else 0)):
            relay = relays[-1 - left]
            await self._start_process((relay,), bootstrap_seconds)
            try:
                await self._wait_for_relay(relay)
                break
            except SwarmTrouble as trouble:
                if not left:
                    raise
                self._say(f"{trouble}; trying the next one")
                await self._bring_down()
        for action in self._up:
            try:
                await within(_UP_SECONDS, "the swarm's handlers", action(self.p2p))
            except Trouble:
                raise
            except Exception as error:  # hivemind's, or of the socket to the daemon
                raise SwarmTrouble(
                    "daemon", f"libp2p's process does not obey: {dial_words(error)}"
                ) from error

    async def _start_process(self, relays: Sequence[str], bootstrap_seconds: float) -> None:
        assert self._identity is not None and self._folder is not None
        self._process = await process.start(
            self._setting, relays, self._identity, self._port, self._folder.path, self._relays_changed.set
        )
        try:
            await persist(self._bootstrap, self._patience(bootstrap_seconds))
        except Trouble as gave_up:
            raise gave_up.__cause__ or gave_up from None  # which names the phase

    async def _bring_down(self) -> None:
        running, self._process = self._process, None
        for action in self._down:
            action()
        if running is not None:
            await running.end()

    def _patience(self, seconds: float) -> Patience:
        return Patience("the swarm", seconds, self._timing, self._say)

    async def _bootstrap(self) -> None:
        """Connect to those to begin with; one is enough. Again later: to those that were met since."""
        wanted: dict[str, list[Multiaddress]] = {}
        for text in (*self._setting.bootstrap, *self.known()):
            address = parse_with_peer(text)
            if address.peer != self.peer:
                wanted.setdefault(address.peer, []).append(address)
        if not wanted:
            return
        calls = (self.connect(peer, addresses) for peer, addresses in wanted.items())
        failures = [
            error for error in await asyncio.gather(*calls, return_exceptions=True) if error is not None
        ]
        for error in failures:
            if not isinstance(error, Trouble):
                raise error
        if len(failures) == len(wanted):
            raise SwarmTrouble(
                "bootstrap",
                f"none of the peers to begin with can be reached: {'; '.join(map(str, failures[:3]))}; "
                "check that they run, their addresses and their ports",
                Kind.NOBODY_LISTENS,
            )

    async def _wait_for_relay(self, relay: str) -> None:
        assert self._process is not None
        running = self._process

        async def taken_on() -> None:
            while not running.relays:
                self._relays_changed.clear()
                await self._relays_changed.wait()

        try:
            await within(self._setting.relay_seconds, "a relay", taken_on())
        except Trouble as error:
            raise SwarmTrouble(
                "relay",
                f"{relay} did not take this node on within {self._setting.relay_seconds:g} s: a relay must "
                "be reachable from here, and run with reachability public",
                Kind.SILENT,
            ) from error

    async def _watch(self) -> None:
        failures = 0
        while True:
            if self._process is not None:
                end = await self._process.wait()
                self._say(f"libp2p's process p2pd {end}; starting it again")
            await self._bring_down()
            try:
                await self._bring_up(_DIAL_SECONDS)
            except Trouble as trouble:
                failures += 1
                pause = self._timing.backoff.pause(failures, self._timing.uniform())
                self._say(f"{trouble}; trying again in {pause:.2g} s")
                await self._bring_down()
                await self._timing.sleep(pause)
            else:
                failures = 0
                self._say("libp2p's process runs again")


def dial_words(error: BaseException) -> str:
    """What libp2p says of a failed call, in one line."""
    words = " ".join(str(error).replace("Connect failed. msg=", "").split())
    return words[:300] or type(error).__name__
