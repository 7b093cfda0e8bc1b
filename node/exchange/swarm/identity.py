"""Identity: the key file that a node's peer id comes from, held by one process at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from node import key_file
from node.exchange.swarm.library import hivemind
from node.exchange.swarm.phases import SwarmTrouble
from node.exchange.trouble import Kind

_RSA: Final = 0  # libp2p's number of that kind of key


class Identity:
    """A key file in use, from :func:`hold` until :meth:`release`.

    Attributes:
        path: of the key.
        peer: its peer id.
    """

    def __init__(self, file: key_file.KeyFile[str]) -> None:
        self.path, self.peer = file.path, file.key
        self.release = file.release


def hold(path: Path) -> Identity:
    """Take the key at ``path``, which is made if there is none; blocks for tenths of a second then.

    Raises:
        SwarmTrouble: another process uses it, others may read it, it is damaged, or it cannot be written.
    """
    try:
        return Identity(key_file.hold(path, _made, _peer, what="peer"))
    except key_file.KeyFileError as error:
        raise SwarmTrouble("identity", str(error), Kind.REFUSED) from error


def _made() -> bytes:
    library = hivemind()
    key = library.PrivateKeyFile(key_type=_RSA, data=library.RSAPrivateKey().to_bytes())
    return bytes(key.SerializeToString())


def _peer(data: bytes) -> str:
    return str(hivemind().PeerID.from_identity(data).to_base58())
