"""Who a node is: its key, in a file that it keeps, or one that ends with the process."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Final

from node.key_file import KeyFile, hold
from protos.identity import NodeKey

FILE: Final = "node.key"  # in the folder of the checkpoints


def held(path: Path) -> KeyFile[NodeKey]:
    """Take the key at ``path`` (PEM, PKCS #8), which is made if there is none.

    Raises:
        KeyFileError: another process uses it, others may read it, it is damaged, or it cannot be written.
    """
    return hold(path, lambda: NodeKey.new().to_pem(), NodeKey.from_pem, what="node")


def key_of(identity: Path | None, save: Path | None, stack: ExitStack) -> NodeKey:
    """The key at ``identity``, or in the folder ``save``, which is there, held until ``stack`` ends; without
    either a new one, that is kept nowhere.

    Raises:
        KeyFileError: as above.
    """
    path = identity or (save and save / FILE)
    if path is None:
        return NodeKey.new()
    file = held(path)
    stack.callback(file.release)
    return file.key
