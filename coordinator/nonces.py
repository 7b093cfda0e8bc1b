"""Nonces: each lets one join in, once and soon. Pure: clock and randomness are given.

A nonce carries the time of its making and a MAC, so those that are given out take no memory, however many
somebody asks for; only those that have been spent are remembered, until they would be too old anyhow.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections import deque
from collections.abc import Callable
from typing import Final, Literal

SECONDS: Final = 60.0  # of a nonce
MAX_SPENT: Final = 1 << 16
_TIME_BYTES: Final = 8
_RANDOM_BYTES: Final = 16
_MAC_BYTES: Final = 16
NONCE_BYTES: Final = _TIME_BYTES + _RANDOM_BYTES + _MAC_BYTES

Verdict = Literal["fresh", "spent", "old", "strange", "busy"]


class Nonces:
    """Those of a coordinator.

    Args:
        secret: random bytes of this process.
        now: monotonic seconds.
        random: so many random bytes.
        seconds: for which one may be used.
    """

    def __init__(
        self,
        secret: bytes,
        now: Callable[[], float],
        random: Callable[[int], bytes],
        seconds: float = SECONDS,
    ) -> None:
        self._secret, self._now, self._random, self._seconds = secret, now, random, seconds
        self._spent: set[bytes] = set()
        self._order: deque[tuple[float, bytes]] = deque()  # when each was made

    def make(self) -> bytes:
        """A new one, :data:`NONCE_BYTES` long."""
        made = math.floor(self._now() * 1e3)
        body = made.to_bytes(_TIME_BYTES, "big") + self._random(_RANDOM_BYTES)
        return body + self._mac(body)

    def spend(self, nonce: bytes) -> Verdict:
        """Use one. ``fresh``: it was good, and is so no more. ``spent``: it was used before. ``old``: its
        time is over. ``strange``: it is not of this coordinator. ``busy``: too many are spent at once."""
        now = self._now()
        body, mac = nonce[:-_MAC_BYTES], nonce[-_MAC_BYTES:]
        if len(nonce) != NONCE_BYTES or not hmac.compare_digest(mac, self._mac(body)):
            return "strange"
        made = int.from_bytes(body[:_TIME_BYTES], "big") / 1e3
        while self._order and now - self._order[0][0] > 2 * self._seconds:
            self._spent.discard(self._order.popleft()[1])
        if nonce in self._spent:
            return "spent"
        if now - made > self._seconds:
            return "old"
        if len(self._spent) >= MAX_SPENT:
            return "busy"
        self._spent.add(nonce)
        self._order.append((now, nonce))
        return "fresh"

    def _mac(self, body: bytes) -> bytes:
        return hashlib.blake2b(body, key=self._secret, digest_size=_MAC_BYTES).digest()
