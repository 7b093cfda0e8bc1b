"""TLS from the command line: what a coordinator makes, keeps and says, and what who calls it is told."""

from __future__ import annotations

import logging
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from coordinator.service import Outcome, Started
from deploy import serving
from deploy.cli import app
from deploy.errors import UserError
from deploy.invitation import client_tls
from deploy.serving import CERTIFICATE, Choices, coordinate, given_credential
from deploy.status import StatusClient, StatusError
from protos import atoll_pb2 as pb
from protos import tls
from protos.address import Address
from protos.certificate import CertificateError, Credential, made
from protos.invite import Invite
from protos.runfile import RunFile
from protos.tls import ClientTls
from protos.wire import CONTROL_SERVICE
from tests.authority import Authority

OURS = made()
HOST = "127.0.0.1"
Serve = Callable[[Credential | None], Invite]


class Unnarrated:
    """In place of the thread that narrates a run."""

    def __init__(self, *of: object) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *of: object) -> None:
        pass


@pytest.fixture
def coordinated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[list[str], Any]]:
    """Runs 'atoll coordinator' up to where it would listen: what it says, and with which credential."""
    passed: list[Credential | None] = []

    def run(*_: object, on_started: Callable[[Started], None], credential: Any, **others: object) -> Outcome:
        on_started(Started(Address(HOST, 4600), None))
        passed.append(credential)
        return Outcome("suspended", "SIGTERM", 0)

    monkeypatch.setattr(serving, "run_coordinator", run)
    monkeypatch.setattr(serving, "Narrator", Unnarrated)

    def start(**choices: Any) -> tuple[list[str], Any]:
        said: list[str] = []
        chosen = Choices(
            Address(HOST, 0), journal=tmp_path / "journal", dashboard="off", token="secret", **choices
        )
        coordinate(RunFile.parse("[model]\nd_model = 16\nlayers = 1\nheads = 1\n"), chosen, said.append)
        return said, passed[-1]

    return start


def invite_in(said: list[str]) -> Invite:
    return Invite.parse(next(line for line in said if "atoll join" in line).split()[-1])


def test_a_certificate_is_made_and_kept_unless_told_otherwise(
    coordinated: Callable[..., tuple[list[str], Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said, credential = coordinated()
    assert f"listening on {HOST}:4600 with TLS" in said
    assert invite_in(said).pin == credential.pin
    assert stat.S_IMODE((tmp_path / "journal" / CERTIFICATE).stat().st_mode) == 0o600
    again, _ = coordinated()
    assert invite_in(again) == invite_in(said), "invites stay valid over restarts"
    assert "INSECURE" not in " ".join(said) + caplog.text

    with caplog.at_level(logging.WARNING):
        said, credential = coordinated(insecure=True)
    assert credential is None and invite_in(said).insecure
    assert any("atoll+insecure://" in line for line in said)
    assert any("listening on" in line and "INSECURE" in line for line in said) and "INSECURE" in caplog.text


def test_a_certificate_that_is_given(
    coordinated: Callable[..., tuple[list[str], Any]], tmp_path: Path
) -> None:
    authority = Authority()
    signed = authority.signs("gpu1.example.org")
    files = {name: tmp_path / name for name in ("cert", "key", "ca")}
    for file, content in zip(files.values(), (signed.chain, signed.key, authority.pem), strict=True):
        file.write_bytes(content)
    said, credential = coordinated(tls_cert=files["cert"], tls_key=files["key"], tls_client_ca=files["ca"])
    assert credential == replace(signed, client_ca=authority.pem) and invite_in(said).pin == signed.pin
    assert f"listening on {HOST}:4600 with TLS; nodes have to show a certificate" in said
    assert not (tmp_path / "journal" / CERTIFICATE).exists()

    for wrong in ({"tls_cert": files["cert"]}, {"tls_client_ca": files["ca"]}):
        with pytest.raises(UserError, match="--tls-cert and --tls-key"):
            given_credential(Choices(**wrong))
    with pytest.raises(UserError, match="exclude each other"):
        given_credential(Choices(insecure=True, tls_key=files["key"]))
    with pytest.raises(CertificateError, match=f"{files['ca']}.*names no host|{files['ca']}"):
        given_credential(Choices(tls_cert=files["ca"], tls_key=files["key"]))

    invite = Invite("t", HOST, 1, OURS.pin)
    assert client_tls(invite, None, None, None) == ClientTls()
    assert client_tls(invite, files["ca"], files["cert"], files["key"]) == ClientTls(authority.pem, signed)
    with pytest.raises(UserError, match="go together"):
        client_tls(invite, None, files["cert"], None)
    with pytest.raises(UserError, match="insecure coordinator"):
        client_tls(replace(invite, pin=""), files["ca"], None, None)


def _status(request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusReply:
    return pb.StatusReply(run="r", round=7, security="tls")


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Coordinators that answer for their status; the invites to them."""
    monkeypatch.setattr(tls, "_known", {})
    handler = grpc.unary_unary_rpc_method_handler(
        _status, pb.StatusRequest.FromString, pb.StatusReply.SerializeToString
    )
    with ExitStack() as stack:

        def start(credential: Credential | None) -> Invite:
            server = grpc.server(ThreadPoolExecutor(1))
            stack.callback(lambda: server.stop(None).wait(5))
            methods = grpc.method_handlers_generic_handler(CONTROL_SERVICE, {"GetStatus": handler})
            server.add_generic_rpc_handlers((methods,))
            port = tls.bind(server, credential)(f"{HOST}:0")
            server.start()
            return Invite("t", HOST, port, "" if credential is None else credential.pin)

        yield start


def refused(invite: Invite, client: ClientTls = tls.PINNED) -> StatusError:
    with StatusClient(invite, client) as asking, pytest.raises(StatusError) as caught:
        asking.fetch(30.0)
    return caught.value


def test_the_status_over_tls_and_every_way_not_to_get_it(serve: Serve) -> None:
    invite, open_ = serve(OURS), serve(None)
    with StatusClient(invite) as client:
        assert client.fetch(30.0).round == 7
    assert refused(replace(invite, pin=made().pin)).refusal == "wrong-pin"
    assert refused(replace(invite, pin="")).refusal == "tls-refused"
    assert refused(replace(open_, pin=made().pin)).refusal == "tls-downgraded"
    assert refused(replace(open_, pin=OURS.pin)).refusal == "tls-downgraded", "also if it is known"
    nobody = refused(Invite("t", HOST, 1, made().pin))
    assert nobody.refusal == "" and f"no coordinator answers at {HOST}:1" in str(nobody)
    authority, other = Authority(), Authority()
    mutual = serve(replace(authority.signs("localhost"), client_ca=authority.pem))
    named, own = replace(mutual, host="localhost"), authority.signs("node")
    with StatusClient(named, ClientTls(authority.pem, own)) as client:
        assert client.fetch(30.0).round == 7
    assert refused(named, ClientTls(authority.pem)).refusal == "tls-refused"
    assert refused(named, ClientTls(other.pem, own)).refusal == "wrong-pin"


def test_each_has_an_exit_code_of_its_own(serve: Serve) -> None:
    invite, runner = serve(OURS), CliRunner()
    codes = [
        runner.invoke(app, ["status", str(asked)]).exit_code
        for asked in (
            invite,
            replace(invite, pin=made().pin),
            replace(invite, pin=""),
            replace(serve(None), pin=made().pin),
        )
    ]
    assert codes == [0, 24, 25, 26]
    shown = runner.invoke(app, ["status", str(invite)]).stdout
    assert "security" in shown and "TLS" in shown and "INSECURE" not in shown
