"""hivemind, loaded when it is first wanted, and kept quiet."""

from __future__ import annotations

import functools
import logging
import warnings
from dataclasses import dataclass
from typing import Any

from node.exchange.swarm.phases import SwarmTrouble
from protos import extras


@dataclass(frozen=True)
class Library:
    """What is used of hivemind.

    Attributes:
        P2P: starts libp2p's daemon and talks to it.
        ControlFailure: raised where the daemon says that it could not do what it was asked for.
        PeerID: of libp2p.
        DHTNode: a node of the distributed hash table, in this event loop.
        TokenAuthorizerBase: signs what nodes of that table say, and checks it.
        AccessToken: the message that such an authorizer hands out.
        RSAPrivateKey: key of a peer.
        PrivateKeyFile: the message that a file of such a key holds.
        now: clock of the table, in seconds.
    """

    P2P: Any
    ControlFailure: type[Exception]
    PeerID: Any
    DHTNode: Any
    TokenAuthorizerBase: Any
    AccessToken: Any
    RSAPrivateKey: Any
    PrivateKeyFile: Any
    now: Any


@functools.lru_cache(maxsize=1)
def hivemind() -> Library:
    """Load it; takes seconds the first time, so not in the network thread.

    Raises:
        SwarmTrouble: it is not installed.
    """
    # What it does on import is said to vanish from torch and from Python one day; the pinned ones have it.
    for message in ("`torch.jit.script` is deprecated", r"path is deprecated\. Use files"):
        warnings.filterwarnings("ignore", message, DeprecationWarning)
    try:
        from hivemind.dht.node import DHTNode
        from hivemind.p2p import P2P, PeerID
        from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure
        from hivemind.proto.auth_pb2 import AccessToken
        from hivemind.proto.crypto_pb2 import PrivateKey
        from hivemind.utils import get_dht_time
        from hivemind.utils.auth import TokenAuthorizerBase
        from hivemind.utils.crypto import RSAPrivateKey
        from hivemind.utils.logging import use_hivemind_log_handler
    except ImportError as error:
        raise SwarmTrouble(
            "daemon", f"hivemind cannot be loaded ({error}): install it with {extras.hint('swarm')}"
        ) from error
    logging.addLevelName(logging.WARNING, "WARNING")  # it has changed that name for the whole process
    use_hivemind_log_handler("nowhere")
    logging.getLogger("hivemind").setLevel(logging.ERROR)  # its warnings are about peers that have left
    logging.getLogger("asyncio").addFilter(_worth_telling)
    return Library(
        P2P,
        ControlFailure,
        PeerID,
        DHTNode,
        TokenAuthorizerBase,
        AccessToken,
        RSAPrivateKey,
        PrivateKey,
        get_dht_time,
    )


def _worth_telling(record: logging.LogRecord) -> bool:
    """Not that a search in the table, at its end, leaves a task behind that waits for an event of its own."""
    text = record.getMessage()
    return not ("Task was destroyed but it is pending" in text and "coro=<Event.wait()" in text)
