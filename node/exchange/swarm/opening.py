"""The first bytes of a raw stream of the swarm: who calls, what for, and whether it is welcome.

An opening is 40 bytes of the caller: magic, what for, and a proof that only holds between these two peers,
which libp2p has told each other apart. The answer is a byte, 0 for welcome, the length of a text (two bytes,
little-endian), and the text: the address that the caller is seen at, or why it is not welcome.

Behind an opening that names a third peer comes that one's id: a byte of length, and text.
"""

from __future__ import annotations

import asyncio
import hmac
from dataclasses import dataclass
from typing import Final

from node.exchange.swarm.multiaddress import MAX_TEXT, is_peer_id
from node.exchange.swarm.secret import PROOF_BYTES, RunSecret
from node.exchange.trouble import Kind, Trouble

MESSAGES: Final = b"m"
LOOK: Final = b"l"  # only asks at what address the caller is seen
ONWARD: Final = b"o"  # asks a relay to carry a stream to a third peer
CARRIED: Final = b"c"  # a relay says for whom it calls

_MAGIC: Final = b"atollS1"
_OPENING_BYTES: Final = len(_MAGIC) + 1 + PROOF_BYTES
_WELCOME: Final = b"\0"
_REFUSED: Final = b"\1"


@dataclass(frozen=True)
class Opening:
    """What a caller wants.

    Attributes:
        purpose: one of the letters above, if nothing is wrong.
        other: the third peer that it names.
        problem: why it is not welcome; empty: nothing is wrong with it.
    """

    purpose: bytes
    other: str = ""
    problem: str = ""


def opening(secret: RunSecret, caller: str, callee: str, purpose: bytes, other: str = "") -> bytes:
    """What ``caller`` begins with; both are peer ids, as is ``other``."""
    head = _MAGIC + purpose + secret.proof(caller, callee, purpose)
    return head + bytes((len(other),)) + other.encode() if other else head


async def read_opening(
    reader: asyncio.StreamReader, secret: RunSecret, caller: str, callee: str, *, carried: bool
) -> Opening:
    """What comes of ``caller``; ``carried``: by a relay, which it cannot ask for anything then.

    Raises:
        EOFError: it ends before.
        OSError: it breaks.
    """
    head = await reader.readexactly(_OPENING_BYTES)
    purpose, other = head[len(_MAGIC) : len(_MAGIC) + 1], ""
    known = (MESSAGES,) if carried else (MESSAGES, LOOK, ONWARD, CARRIED)
    if not head.startswith(_MAGIC) or purpose not in known:
        return Opening(purpose, problem="it has another version of Atoll")
    if not hmac.compare_digest(head[-PROOF_BYTES:], secret.proof(caller, callee, purpose)):
        return Opening(purpose, problem="that peer does not have the token of this run's invite")
    if purpose in (ONWARD, CARRIED):
        other = (await reader.readexactly((await reader.readexactly(1))[0])).decode("ascii", "replace")
        if not is_peer_id(other):
            return Opening(purpose, other, "a third peer without a peer id")
    return Opening(purpose, other)


def answer(text: str, *, welcome: bool) -> bytes:
    """The answer; what is too long of the text is cut off."""
    words = text[:MAX_TEXT].encode()[:MAX_TEXT]
    return (_WELCOME if welcome else _REFUSED) + len(words).to_bytes(2, "little") + words


async def read_answer(reader: asyncio.StreamReader, callee: str) -> str:
    """The address at which ``callee`` sees this side.

    Raises:
        Trouble: this side is not welcome.
        EOFError: it ends before.
        OSError: it breaks.
    """
    head = await reader.readexactly(3)
    said = await reader.readexactly(min(int.from_bytes(head[1:], "little"), MAX_TEXT))
    words = said.decode("utf-8", "replace")
    if head[:1] != _WELCOME:
        plain = "".join(letter for letter in words if letter.isprintable())
        kind = Kind.TOKEN if "invite" in plain else Kind.REFUSED
        raise Trouble(kind, f"the peer {callee} refused: {plain}")
    return words
