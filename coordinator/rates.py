"""Rates: how often somebody may do something. Decisions alone; the clock is passed in."""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from protos.address import peer

MAX_KEYS: Final = 65_536  # that are remembered: whoever has asked for nothing for longest is forgotten
_NETWORK_BITS: Final = 64  # of an IPv6 address: a customer is given all the rest


class TokenBucket:
    """A bucket that fills at a steady rate up to a minute's worth, and from which each act takes.

    Args:
        a_minute: how much flows in.
        now: seconds on any monotonic clock.
    """

    def __init__(self, a_minute: float, now: float) -> None:
        self._rate = a_minute / 60
        self._size = self._level = max(1.0, a_minute)
        self._at = now

    def take(self, now: float, cost: float = 1.0) -> bool:
        """Take ``cost``; ``False``, and nothing is taken, if there is not so much."""
        if self._filled(now) < cost:
            return False
        self._level -= cost
        return True

    def wait(self, now: float, cost: float = 1.0) -> float:
        """Take ``cost`` in any case; how many seconds have to pass before that is right."""
        self._level = self._filled(now) - cost
        return max(0.0, -self._level / self._rate)

    def _filled(self, now: float) -> float:
        self._level = min(self._size, self._level + max(0.0, now - self._at) * self._rate)
        self._at = max(self._at, now)
        return self._level


class Rates:
    """One such bucket for everybody, made when it is needed; bounded in number.

    Args:
        a_minute: for each.
        now: seconds on a monotonic clock.
    """

    def __init__(self, a_minute: float, now: Callable[[], float], *, keys: int = MAX_KEYS) -> None:
        self._a_minute, self._now, self._keys = a_minute, now, keys
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, key: str, cost: float = 1.0) -> bool:
        """See :meth:`TokenBucket.take`."""
        return self._of(key).take(self._now(), cost)

    def wait(self, key: str, cost: float = 1.0) -> float:
        """See :meth:`TokenBucket.wait`."""
        return self._of(key).wait(self._now(), cost)

    def _of(self, key: str) -> TokenBucket:
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = TokenBucket(self._a_minute, self._now())
            if len(self._buckets) > self._keys:
                self._buckets.popitem(last=False)
        else:
            self._buckets.move_to_end(key)
        return bucket


def origin(host: str) -> str:
    """Whom an IP address is counted as: itself, or for IPv6 its network."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((int(address), _NETWORK_BITS), strict=False))


def caller(peer_name: str) -> tuple[str, int]:
    """Origin and port of a caller as gRPC names it; port 0 if it has none."""
    host, _, port = peer(peer_name).rpartition(":")
    return origin(host.strip("[]")), int(port) if port.isdigit() else 0
