"""Who may act: the admin token, compared in constant time, and a limit on wrong ones."""

from __future__ import annotations

import hashlib
import hmac
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

FREE_TRIES: Final = 5  # wrong tokens of one source before it has to wait
FIRST_WAIT: Final = 10.0  # seconds; twice as long after each further one
LONGEST_WAIT: Final = 600.0
FORGET_SECONDS: Final = 3600.0  # after the last wrong one
MAX_SOURCES: Final = 1024
MAX_TOKEN: Final = 256  # characters that are looked at


@dataclass
class _Tries:
    wrong: int = 0
    last: float = 0.0
    until: float = 0.0


class Guard:
    """Tells the administrator from others.

    Args:
        token: the secret; not kept, only its digest.
        now: monotonic seconds.
    """

    def __init__(self, token: str, now: Callable[[], float]) -> None:
        self._digest = _digest(token)
        self._now = now
        self._sources: OrderedDict[str, _Tries] = OrderedDict()

    def refusal(self, source: str, token: str) -> str:
        """Why ``source``, an address, is not let in with ``token``; empty if it is.

        While a source has to wait, the right token does not help either: else waiting would tell nothing.
        """
        now = self._now()
        tries = self._sources.setdefault(source, _Tries())
        self._sources.move_to_end(source)
        while len(self._sources) > MAX_SOURCES:
            self._sources.popitem(last=False)
        if now - tries.last > FORGET_SECONDS:
            tries.wrong = 0
        if now < tries.until:
            return f"too many wrong tokens; try again in {tries.until - now:.0f} s"
        if hmac.compare_digest(self._digest, _digest(token[:MAX_TOKEN])):
            tries.wrong = 0
            return ""
        tries.wrong, tries.last = tries.wrong + 1, now
        if (beyond := tries.wrong - FREE_TRIES) >= 0:
            tries.until = now + min(LONGEST_WAIT, FIRST_WAIT * 2.0 ** min(beyond, 30))
        return "this is not the admin token"


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
