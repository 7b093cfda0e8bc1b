"""Presence: who is in the swarm, and where the coordinator is, in a hash table that all nodes hold together.

What is read there was written by other nodes: it is checked, and only ever taken as a hint.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

from node.exchange.retry import Timing, within
from node.exchange.swarm.daemon import Daemon
from node.exchange.swarm.library import hivemind
from node.exchange.swarm.multiaddress import MAX_ADDRESSES, is_peer_id, parse_with_peer
from node.exchange.swarm.phases import SwarmTrouble
from node.exchange.swarm.secret import RunSecret, authorizer
from node.exchange.trouble import Kind, Trouble
from protos.address import Address

MAX_RECORD: Final = 1000  # bytes; larger values are slow to spread, and hivemind loses the largest
_MAX_RECORDS: Final = 1000
_MAX_NAME: Final = 100
_ROUND_SECONDS: Final = 10.0  # between two times that a node says it is there
_LIFE_SECONDS: Final = 45.0  # of what it says
_CALL_SECONDS: Final = 10.0
_LET_IN_SECONDS: Final = 6.0  # for one of the peers to begin with to answer
_LET_IN_PAUSE: Final = 1.0


@dataclass(frozen=True)
class Present:
    """A node that is in the swarm.

    Attributes:
        peer: its peer id.
        node: its name, as it says.
        addresses: multiaddresses, each with that peer id.
    """

    peer: str
    node: str
    addresses: tuple[str, ...]

    def to_bytes(self) -> bytes:
        """For the table; addresses are left out from the end where they are too many."""
        for count in range(min(len(self.addresses), MAX_ADDRESSES), -1, -1):
            record = {"node": self.node[:_MAX_NAME], "addresses": list(self.addresses[:count])}
            data = json.dumps(record, separators=(",", ":")).encode()
            if len(data) <= MAX_RECORD:
                break
        return data

    @classmethod
    def parse(cls, peer: object, data: object) -> Present:
        """Read what another node wrote.

        Raises:
            ValueError: it is no such record.
        """
        fields = _record(data, {"node": str, "addresses": list})
        if not isinstance(peer, str) or not is_peer_id(peer):
            raise ValueError("a record of presence without a peer id")
        node, addresses = fields["node"], fields["addresses"]
        if len(node) > _MAX_NAME or not node.isprintable() or len(addresses) > MAX_ADDRESSES:
            raise ValueError("a record of presence with a name or with addresses that are too long")
        for address in addresses:
            if not isinstance(address, str) or parse_with_peer(address).peer != peer:
                raise ValueError("a record of presence with an address of somebody else")
        return cls(peer, node, tuple(addresses))


def coordinator_record(address: str) -> bytes:
    """For the table: the coordinator listens at ``address`` (HOST:PORT)."""
    return json.dumps({"coordinator": str(Address.parse(address))}).encode()


def parse_coordinator(data: object) -> str:
    """Read what :func:`coordinator_record` wrote.

    Raises:
        ValueError: it is no such record, or the address is none that can be dialled.
    """
    address = Address.parse(_record(data, {"coordinator": str})["coordinator"])
    if address.is_unspecified or not address.port:
        raise ValueError(f"{address} cannot be dialled")
    return str(address)


class Presence:
    """This node's part of the table.

    Args:
        daemon: not started yet.
        secret: of the run: others neither read the table nor write to it.
        node: name that it is known by.
        look: asks a peer how it sees this node.
        timing: clock and sleep.
    """

    def __init__(
        self,
        daemon: Daemon,
        secret: RunSecret,
        node: str,
        look: Callable[[str], Awaitable[None]],
        *,
        timing: Timing | None = None,
    ) -> None:
        self._daemon, self._secret, self._node, self._look = daemon, secret, node, look
        self._timing = timing or Timing()
        self._authorizer: Any = None
        self._table: Any = None
        self._coordinator = ""
        self._present: dict[str, Present] = {}
        self._going: asyncio.Task[None] | None = None
        self._again = asyncio.Event()
        daemon.on_up(self._join)
        daemon.on_down(self._lose)
        daemon.known = lambda: [text for other in self._present.values() for text in other.addresses]

    @property
    def present(self) -> tuple[Present, ...]:
        """The nodes that were there when last looked, without this one."""
        return tuple(self._present.values())

    def coordinator_is(self, address: str) -> None:
        """Tell the others where the coordinator is (HOST:PORT) as long as this is known; empty: it is not.

        Raises:
            AddressError: ``address`` is none.
        """
        if address:
            coordinator_record(address)
        self._coordinator = address
        self._again.set()

    async def find_coordinator(self) -> tuple[str, ...]:
        """Addresses (HOST:PORT) of the coordinator, what others have confirmed last first.

        Raises:
            Trouble: the table cannot be asked.
        """
        found: dict[str, float] = {}
        for _, data, until in await self._read("coordinator"):
            with contextlib.suppress(ValueError):
                address = parse_coordinator(data)
                found[address] = max(until, found.get(address, 0.0))
        return tuple(sorted(found, key=lambda address: -found[address]))

    async def refresh(self) -> None:
        """Look who is there, now.

        Raises:
            Trouble: the table cannot be asked.
        """
        present = {}
        for peer, data, _ in await self._read("present"):
            with contextlib.suppress(ValueError):
                other = Present.parse(peer, data)
                if other.peer != self._daemon.peer:
                    present[other.peer] = other
        self._present = present

    async def close(self) -> None:
        """Say nothing more."""
        if self._going is not None:
            self._going.cancel()
            await asyncio.wait({self._going})
            self._going = None
        table, self._table = self._table, None
        if table is not None:
            _drop(table)
            with contextlib.suppress(Exception):  # of a daemon that may be gone
                await within(_CALL_SECONDS / 5, "the hash table's end", table.shutdown())

    async def _join(self, p2p: Any) -> None:
        if self._authorizer is None:
            self._authorizer = await asyncio.to_thread(authorizer, self._secret)
        bootstrap = [
            parse_with_peer(text).peer for text in (*self._daemon.setting.bootstrap, *self._daemon.known())
        ]
        others = sorted({peer for peer in bootstrap if peer != self._daemon.peer})
        table = await hivemind().DHTNode.create(p2p, authorizer=self._authorizer, wait_timeout=5.0)
        try:
            if others:
                await self._let_in(table, others)
        except Exception as error:  # an error of hivemind's about clocks and firewalls, or nobody answered
            _drop(table)
            words = str(error)
            advice = (
                "set this machine's clock (NTP)"
                if "local time" in words
                else "do they run, and is the invite of the same run as theirs?"
            )
            raise SwarmTrouble(
                "bootstrap",
                f"the peers to begin with do not let this node in ({words[:200]}): {advice}",
                Kind.REFUSED,
            ) from error
        self._table = table
        for peer in {parse_with_peer(text).peer for text in self._daemon.setting.bootstrap}:
            with contextlib.suppress(Trouble):
                await self._look(peer)
        self._again.set()
        if self._going is None:
            self._going = asyncio.create_task(self._go())

    async def _let_in(self, table: Any, others: list[str]) -> None:
        """Meet one of those to begin with, who may have started a moment ago and have no table yet."""
        until = self._timing.now() + _LET_IN_SECONDS
        protocol = table.protocol
        peers = [hivemind().PeerID.from_base58(peer) for peer in others]
        while not any(await asyncio.gather(*(protocol.call_ping(peer, validate=True) for peer in peers))):
            if self._timing.now() > until:
                raise RuntimeError("none of them answers")
            await self._timing.sleep(_LET_IN_PAUSE)
        with contextlib.suppress(Trouble):
            await within(_LET_IN_PAUSE, "a look around", table.find_nearest_nodes([table.node_id]))

    def _lose(self) -> None:
        table, self._table = self._table, None
        if table is not None:
            _drop(table)

    async def _go(self) -> None:
        """Say every now and then that this node is there, and heal a table that has come apart."""
        while True:
            self._again.clear()
            with contextlib.suppress(Trouble):
                await self._publish()
                await self.refresh()
                await self._heal()
            waiting = asyncio.ensure_future(self._again.wait())
            sleeping = asyncio.ensure_future(self._timing.sleep(_ROUND_SECONDS))
            try:
                await asyncio.wait({waiting, sleeping}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                waiting.cancel()
                sleeping.cancel()

    async def _publish(self) -> None:
        addresses = await self._daemon.addresses()
        await self._write("present", Present(self._daemon.peer, self._node, addresses).to_bytes())
        if self._coordinator:
            await self._write("coordinator", coordinator_record(self._coordinator))

    async def _heal(self) -> None:
        for text in (*self._daemon.setting.bootstrap, *self._daemon.known()):
            address = parse_with_peer(text)
            if self._table is None or address.peer == self._daemon.peer:
                continue
            if (
                self._table.protocol.routing_table.get(peer_id=hivemind().PeerID.from_base58(address.peer))
                is None
            ):
                with contextlib.suppress(Trouble):
                    await self._daemon.connect(address.peer, [address])
                    await self._asked(
                        self._table.protocol.call_ping(hivemind().PeerID.from_base58(address.peer))
                    )

    async def _write(self, what: str, data: bytes) -> None:
        until = hivemind().now() + _LIFE_SECONDS
        # Its answer says nothing: it is yes even where nobody else took the value.
        await self._asked(self._open().store(self._secret.label(what), data, until, subkey=self._daemon.peer))

    async def _read(self, what: str) -> list[tuple[object, object, float]]:
        answer = await self._asked(self._open().get(self._secret.label(what), latest=True))
        if answer is None or not hasattr(answer.value, "items"):
            return []
        latest = hivemind().now() + 2 * _LIFE_SECONDS
        records = [(key, entry.value, float(entry.expiration_time)) for key, entry in answer.value.items()]
        return [record for record in records[:_MAX_RECORDS] if record[2] < latest]

    def _open(self) -> Any:
        if self._table is None:
            raise Trouble(Kind.BROKEN, "this node is not in the swarm at the moment")
        return self._table

    async def _asked(self, call: Awaitable[Any]) -> Any:
        try:
            return await within(_CALL_SECONDS, "the swarm's hash table", call)
        except Trouble:
            raise
        except Exception as error:  # hivemind's, for instance of a record that it cannot read
            raise Trouble(Kind.BROKEN, f"the swarm's hash table failed: {error!r}"[:300]) from error


def _drop(table: Any) -> None:
    table.is_alive = False
    if table.cache_refresh_task is not None:
        table.cache_refresh_task.cancel()


def _record(data: object, kinds: dict[str, type]) -> dict[str, Any]:
    if not isinstance(data, bytes) or len(data) > MAX_RECORD:
        raise ValueError(f"a record of the swarm has at most {MAX_RECORD} bytes")
    try:
        fields: Any = json.loads(data)
    except RecursionError as error:
        raise ValueError("a record of the swarm that is nested without end") from error
    if not isinstance(fields, dict) or {name: type(value) for name, value in fields.items()} != kinds:
        raise ValueError(f"a record of the swarm has the fields {', '.join(kinds)}")
    return fields
