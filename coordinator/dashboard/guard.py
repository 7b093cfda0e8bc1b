"""Who may act: administrators, by their tokens, and a limit on wrong ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

FREE_TRIES: Final = 5  # wrong tokens of one source before it has to wait
FIRST_WAIT: Final = 10.0  # seconds; twice as long after each further one
LONGEST_WAIT: Final = 600.0
FORGET_SECONDS: Final = 3600.0  # after the last wrong one
MAX_SOURCES: Final = 1024
MAX_TOKEN: Final = 512  # characters that are looked at


@dataclass
class _Tries:
    wrong: int = 0
    last: float = 0.0
    until: float = 0.0


class Guard:
    """Tells the administrator from others.

    Args:
        name_of: the name of the administrator's token with a secret; empty: it is none.
        now: monotonic seconds.
        valid: whether the token of a name still is an administrator's.
    """

    def __init__(
        self,
        name_of: Callable[[str], str],
        now: Callable[[], float],
        valid: Callable[[str], bool] = lambda name: True,
    ) -> None:
        self._name_of = name_of
        self._now = now
        self.valid = valid
        self._sources: OrderedDict[str, _Tries] = OrderedDict()

    def admit(self, source: str, token: str) -> tuple[str, str]:
        """The name of ``token``, or of an invite that holds it, and why ``source``, an address, is not let in
        with it; one of them is empty.

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
            return "", f"too many wrong tokens; try again in {tries.until - now:.0f} s"
        if name := self._name_of(_secret(token[:MAX_TOKEN])):
            tries.wrong = 0
            return name, ""
        tries.wrong, tries.last = tries.wrong + 1, now
        if (beyond := tries.wrong - FREE_TRIES) >= 0:
            tries.until = now + min(LONGEST_WAIT, FIRST_WAIT * 2.0 ** min(beyond, 30))
        return "", "this is not the admin token"


def _secret(text: str) -> str:
    """The token in what somebody has typed, which may be an invite."""
    scheme, separator, rest = text.strip().partition("://")
    return rest.rpartition("@")[0] if separator else scheme
