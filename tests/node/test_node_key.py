"""A node's key: its file, who else may have it, and that joins are signed with it."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from deploy.errors import exit_code
from node.exchange.link import Limits, Link
from node.exchange.meter import Meter
from node.identity import FILE, held, key_of
from node.key_file import KeyFileError
from protos import atoll_pb2 as pb
from protos import wire
from protos.identity import NodeKey, signed
from tests.node.fake_hub import DEADLINE, FakeHub


def refused(path: Path) -> tuple[str, int]:
    with pytest.raises(KeyFileError) as caught:
        held(path)
    return str(caught.value), exit_code(caught.value)


def test_a_key_is_its_owners_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "node.key"
    first = held(path)
    assert path.stat().st_mode & 0o777 == 0o600
    text, code = refused(path)
    assert f"in use by another process ({os.getpid()})" in text and code == 28
    first.release()
    first.release()
    again = held(path)
    assert again.key.public == first.key.public
    again.release()


def test_another_process_is_kept_out(tmp_path: Path) -> None:
    path = tmp_path / "node.key"
    file = held(path)
    script = (
        "import sys; from pathlib import Path\n"
        "from deploy.errors import exit_code; from node.identity import held\n"
        "try: held(Path(sys.argv[1]))\n"
        "except Exception as error: sys.exit(exit_code(error))\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], timeout=120, check=False)
    assert done.returncode == 28
    file.release()


def test_what_is_no_key(tmp_path: Path) -> None:
    path = tmp_path / "node.key"
    held(path).release()
    os.chmod(path, 0o640)
    text, code = refused(path)
    assert f"chmod 600 {path}" in text and code == 29
    os.chmod(path, 0o600)
    other = generate_private_key(SECP256R1()).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    for data in (b"", b"key", bytes(1 << 20), path.read_bytes()[:-40], other):
        path.write_bytes(data)
        text, code = refused(path)
        assert "is no key of a node" in text and "new identity" in text and code == 29
    assert "cannot be used: No such file" in refused(tmp_path / "none" / "node.key")[0]


def test_where_the_key_is(tmp_path: Path) -> None:
    with ExitStack() as stack:
        kept = key_of(None, tmp_path, stack)
        chosen = key_of(tmp_path / "mine", tmp_path, stack)
        assert (tmp_path / FILE).exists() and (tmp_path / "mine").exists()
        assert kept.public != chosen.public
        assert key_of(None, None, stack).public != key_of(None, None, stack).public
    with ExitStack() as stack:
        assert key_of(None, tmp_path, stack).public == kept.public, "released, and the same again"


async def test_every_join_is_signed_anew() -> None:
    run = pb.GetRunReply(protocol=wire.PROTOCOL, run_file="x")
    hub = FakeHub(run=run).start()
    try:
        link = Link(hub.invite, Meter(), Limits(call=DEADLINE))
        link.key = NodeKey(bytes(range(32)))
        link.open()
        for nonce in (b"nonce", b"another"):
            run.nonce = nonce
            await link.join(pb.JoinRequest(run_digest="run"))
            joined = hub.joins.get(timeout=DEADLINE)
            assert joined.key == link.key.public and joined.nonce == nonce
            assert signed(joined.key, joined.signature, nonce, "run")
        await link.close()
    finally:
        hub.close()
