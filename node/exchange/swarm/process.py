"""libp2p's daemon as a process: started with what hivemind does not pass on, and ended for sure."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import shutil
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

from node.exchange.retry import within
from node.exchange.swarm.identity import Identity
from node.exchange.swarm.library import hivemind
from node.exchange.swarm.multiaddress import peer_bytes
from node.exchange.swarm.phases import SwarmTrouble
from node.exchange.swarm.setting import SwarmSetting
from node.exchange.trouble import Kind, Trouble

_END_SECONDS: Final = 5.0
_SILENT_ENDS: Final = 3  # of daemons in a row that are borne
_SPAWN_TRIES: Final = 50
_SPAWN_PAUSE: Final = 0.02  # seconds
_NO_TABLE: Final = "failed to find any peer in table"  # libp2p's words
_TABLE_TRIES: Final = 50
_TABLE_PAUSE: Final = 0.1  # seconds


class Process:
    """A running daemon.

    Attributes:
        p2p: hivemind's client of it.
        relays: peers that have taken this node on.
    """

    def __init__(self, p2p: Any, relays: set[str]) -> None:
        self.p2p, self.relays = p2p, relays

    @property
    def pid(self) -> int:
        """Of the process."""
        return int(self.p2p._child.pid)

    async def wait(self) -> str:
        """Until it has ended, or hears nothing more: hivemind stops reading what it says for good when an
        answer comes to a call that was just cancelled. In words, which of the two."""
        ended = asyncio.ensure_future(self.p2p._child.wait())
        reading = self.p2p._client.control._read_task
        try:
            await asyncio.wait({ended, reading}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done() and not reading.cancelled():
                reading.exception()  # seen
                await asyncio.wait({ended}, timeout=_END_SECONDS)  # the one often follows from the other
            return f"has ended (exit code {ended.result()})" if ended.done() else "is not heard any more"
        finally:
            ended.cancel()

    async def end(self) -> None:
        """End it, by force if it does not hear."""
        await _end(self.p2p)


async def start(
    setting: SwarmSetting,
    relays: Sequence[str],
    identity: Identity,
    port: int,
    folder: Path,
    changed: Callable[[], None],
) -> Process:
    """Start the daemon; it knows nobody yet. It ends with this process, however that ends.

    Args:
        setting: what to listen at, and so on.
        relays: that are to take this node on, an address each; where one of several does not answer, it
            takes three minutes until the others are asked.
        identity: whose key.
        port: that is free.
        folder: for its sockets.
        changed: called when one has taken this node on, or does no more.

    Raises:
        SwarmTrouble: it did not start.
    """
    held: set[str] = set()
    started: list[Any] = []
    said: list[str] = []

    def listen(line: str) -> None:
        del said[:-4]
        said.append(line)
        if (news := _relay_news(line)) is not None:
            peer, taken = news
            (held.add if taken else held.discard)(peer)
            changed()

    options: dict[str, Any] = {}
    if relays:
        options["relayDiscovery"] = (
            False  # the search for others delays the first reservation by three minutes
        )
    client = _client(folder, options, listen, started)
    try:
        create = functools.partial(
            client.create,
            host_maddrs=setting.listening(port) or None,
            no_listen=not setting.listen,
            announce_maddrs=setting.announce or None,
            identity_path=str(identity.path),
            force_reachability=None if setting.reachability == "auto" else setting.reachability,
            auto_nat=True,  # with this option routers are opened towards each other too
            nat_port_map=setting.map_port,
            use_auto_relay=bool(relays),
            trusted_relays=relays or None,
            startup_timeout=setting.daemon_seconds,
            check_if_identity_free=False,
        )
        p2p = await _alive(lambda: _alone(create), started)
    except BaseException as error:
        for begun in started:
            await _end(begun)
        if not isinstance(error, Exception):
            raise
        words = "; ".join([str(error), *said[-2:]])[:400]
        if "listen" in words.lower() and "address" in words.lower():
            raise SwarmTrouble(
                "listen", f"libp2p cannot listen at {', '.join(setting.listening(port))} ({words})"
            ) from error
        raise SwarmTrouble(
            "daemon",
            f"libp2p's process p2pd did not start ({words}); on a busy machine it takes longer, see "
            f"daemon_seconds ({setting.daemon_seconds:g} s)",
        ) from error
    return Process(p2p, held)


async def _alive(create: Callable[[], Awaitable[Any]], started: list[Any]) -> Any:
    """Now and then p2pd ends before it has said a word, most of all where several start at the same time;
    the next one lives."""
    for _ in range(_SILENT_ENDS):
        try:
            return await create()
        except Exception as error:
            if not str(error).endswith("failed to start: None"):
                raise
            while started:
                await _end(started.pop())
    return await create()


async def _alone(create: Callable[[], Awaitable[Any]]) -> Any:
    """uvloop refuses to start a process at the very moment when another loop of this process does."""
    for _ in range(_SPAWN_TRIES):
        try:
            return await create()
        except RuntimeError as error:
            if "Racing with another loop" not in str(error):
                raise
            await asyncio.sleep(_SPAWN_PAUSE)
    return await create()


def _client(folder: Path, options: dict[str, Any], listen: Callable[[str], None], started: list[Any]) -> Any:
    """hivemind's client, with its sockets in ``folder``, ``options`` for the daemon, whose lines go to
    ``listen``; every one is noted in ``started``, as ``create`` returns it only if all went well."""
    base: Any = hivemind().P2P

    class Client(base):  # type: ignore[misc]
        _UNIX_SOCKET_PREFIX = f"/unix{folder}/"

        def __init__(self) -> None:
            super().__init__()
            started.append(self)

        def _make_process_args(self, *args: Any, **others: Any) -> list[str]:
            plain: list[str] = base._make_process_args(*args, **{**others, **options})
            # Which relay has taken it on the daemon only says in its log: it lists none among the addresses
            # of a private network.
            return [shutil.which("env") or "/usr/bin/env", "GOLOG_LOG_LEVEL=error,autorelay=debug", *plain]

        def _log_p2pd_message(self, line: str) -> None:
            listen(line)

    return Client


async def _end(client: Any) -> None:
    with contextlib.suppress(Trouble):
        await within(_END_SECONDS, "p2pd to end", client.shutdown())
    child = client._child
    if child is not None and child.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        with contextlib.suppress(Trouble):
            await within(_END_SECONDS, "p2pd to be killed", child.wait())


def _relay_news(line: str) -> tuple[str, bool] | None:
    """Whether a line of the daemon's log says that a relay has taken this node on (or no more), and which."""
    if '"autorelay"' not in line:
        return None
    try:
        record = json.loads(line)
        text, peer = record["msg"], str(record.get("id", ""))
    except (ValueError, KeyError):
        return None
    if text == "adding new relay":
        return peer, True
    return (
        (peer, False)
        if text in ("disconnected from relay", "failed to refresh relay slot reservation")
        else None
    )


async def _answers(p2p: Any, peer: str) -> bool:
    """Whether somebody answers to this peer id. hivemind's own look takes a daemon whose routing table is
    still empty, as it has just come up, for a swarm in which nobody does."""
    library, tries = hivemind(), _TABLE_TRIES
    while True:
        try:
            await p2p._client.connect(library.PeerID(peer_bytes(peer)), [])
        except library.ControlFailure as error:
            tries -= 1
            if _NO_TABLE not in str(error) or not tries:
                return False
            await asyncio.sleep(_TABLE_PAUSE)
        else:
            return True


async def identity_is_free(setting: SwarmSetting, identity: Identity, folder: Path) -> bool:
    """Whether nobody in the swarm answers to this identity: a copy of the key on another machine would.

    Raises:
        Trouble: no peer to begin with answers.
    """
    started: list[Any] = []

    async def taken() -> bool:
        p2p = await _client(folder, {}, lambda _: None, started).create(
            initial_peers=setting.bootstrap,
            dht_mode="client",
            tls=True,
            use_auto_relay=False,
            use_ipfs=False,
            use_relay=True,
        )
        return await _answers(p2p, identity.peer)

    try:
        return not await within(setting.daemon_seconds, "a peer to begin with", taken())
    except Trouble:
        raise
    except Exception as error:  # of the daemon that it starts for this
        raise SwarmTrouble(
            "bootstrap",
            f"none of {', '.join(setting.bootstrap)} answers ({str(error)[:200]}); check that they run and "
            "that their ports are open",
            Kind.NOBODY_LISTENS,
        ) from error
    finally:
        for client in started:
            await _end(client)
