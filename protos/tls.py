"""TLS of gRPC's connections: callers know whom they want to reach by the pin of its certificate.

gRPC cannot be told a pin, only certificates to trust. So a caller that knows no more than a pin looks at the
certificate first, in a handshake of its own; what has been seen once is kept in the process by its pin, which
is its digest.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, ParamSpec, TypeVar, cast

import grpc

from protos.address import Address
from protos.certificate import Credential, name_in, pem_of, pin_of
from protos.connecting import Cause, plaintext_at

P = ParamSpec("P")
T = TypeVar("T")

FETCH_SECONDS: Final = 10.0
_MAX_KNOWN: Final = 64

_known: dict[str, bytes] = {}  # certificates, DER, by pin


class ConnectError(RuntimeError):
    """A connection that did not come about; ``cause`` is one of :data:`~protos.connecting.Cause`."""

    cause: Cause = "BROKEN"
    refusal = ""  # by which deploy/errors.py finds its exit code; empty: an ordinary one

    def __init__(self, text: str, cause: Cause | None = None) -> None:
        super().__init__(text)
        self.cause = cause or self.cause


class WrongCertificate(ConnectError):
    """Another certificate than the pinned one."""

    cause = "CERTIFICATE"
    refusal = "wrong-pin"


class NotEncrypted(ConnectError):
    """TLS was asked for, and what listens there speaks something else."""

    cause = "PLAINTEXT"
    refusal = "tls-downgraded"


class Encrypted(ConnectError):
    """The invite is for an insecure coordinator, and what listens there speaks TLS."""

    cause = "ENCRYPTED"
    refusal = "tls-refused"


class HandshakeFailed(ConnectError):
    """Both speak TLS and do not come to terms, for instance because a certificate of the caller is asked
    for."""

    cause = "HANDSHAKE"
    refusal = "tls-refused"


@dataclass(frozen=True)
class ClientTls:
    """What a caller brings beside the pin.

    Attributes:
        ca: certificate of an authority (PEM): who is called shows a certificate that it has signed, for the
            host that is called; pins do not count then. Empty: they do.
        own: shown to whoever asks for a certificate of the caller; ``None``: nothing.
    """

    ca: bytes = b""
    own: Credential | None = None


PINNED: Final = ClientTls()


@dataclass(frozen=True)
class Channel:
    """How channels are made; ``credentials`` is ``None`` where there is no TLS."""

    credentials: grpc.ChannelCredentials | None = None
    options: tuple[tuple[str, Any], ...] = field(default=())

    def open(self, address: str, options: tuple[tuple[str, Any], ...]) -> grpc.Channel:
        """A channel for threads."""
        if self.credentials is None:
            return grpc.insecure_channel(address, options=options)
        return grpc.secure_channel(address, self.credentials, options=(*options, *self.options))

    def open_aio(self, address: str, options: tuple[tuple[str, Any], ...]) -> grpc.aio.Channel:
        """A channel for an event loop."""
        if self.credentials is None:
            return grpc.aio.insecure_channel(address, options=options)
        return grpc.aio.secure_channel(address, self.credentials, options=(*options, *self.options))


PLAINTEXT: Final = Channel()


def channel_to(der: bytes, client: ClientTls = PINNED) -> Channel:
    """Channels to whoever holds the key of this certificate, and to nobody else.

    Raises:
        CertificateError: it cannot be used.
    """
    name = name_in(der)
    return Channel(_credentials(pem_of(der), client), (("grpc.ssl_target_name_override", name),))


def channel_by(pin: str, client: ClientTls = PINNED) -> Channel | None:
    """Channels to who is called by a pin (empty: without TLS); ``None``: :func:`fetch` the certificate first.

    Raises:
        CertificateError: it cannot be used.
    """
    if not pin:
        return PLAINTEXT
    if client.ca:
        return Channel(_credentials(client.ca, client))
    der = _known.get(pin)
    return None if der is None else channel_to(der, client)


def remember(der: bytes) -> None:
    """A certificate that need not be fetched any more."""
    if len(_known) >= _MAX_KNOWN:
        del _known[next(iter(_known))]
    _known[pin_of(der)] = der


def fetch(address: Address, pin: str, client: ClientTls = PINNED, seconds: float = FETCH_SECONDS) -> None:
    """Get the certificate with a pin from who listens at ``address``; blocks for ``seconds`` at most, and for
    as long as the host name takes.

    Raises:
        ConnectError: nobody is there, or it has not got that certificate.
    """
    found = examine(address, asked=client.own is None, seconds=seconds)
    if not hmac.compare_digest(pin_of(found), pin):
        raise WrongCertificate(
            f"what answers at {address} is not the coordinator of the invite: its certificate has the pin "
            f"{pin_of(found)}, the invite names {pin}. If the coordinator was begun anew in another folder, "
            "ask for a new invite; if not, somebody stands in between"
        )
    remember(found)


def examine(address: Address, asked: bool = True, seconds: float = FETCH_SECONDS) -> bytes:
    """The certificate (DER) of who listens at ``address``, whoever that is; blocks.

    Args:
        address: of the other side.
        asked: look also whether it asks for a certificate of the caller.
        seconds: for connecting, for the handshake, and for the first word then.

    Raises:
        ConnectError: nobody is there, or it does not speak TLS as it is spoken here.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # whoever calls this compares
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    with _connected(address, seconds) as plain:
        try:
            with context.wrap_socket(plain, server_hostname=address.host) as shielded:
                der = shielded.getpeercert(binary_form=True)
                if asked:
                    _greeted(shielded, address)
        except TimeoutError:
            raise ConnectError(
                f"{address} accepts connections and stays silent: check that the port is right", "SILENT"
            ) from None
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise _failed(error, address) from None
    if der is None:
        raise HandshakeFailed(f"what answers at {address} shows no certificate")
    return der


def expects_tls(address: Address, seconds: float = FETCH_SECONDS) -> bool:
    """Whether who listens at ``address`` speaks TLS; blocks."""
    try:
        examine(address, asked=False, seconds=seconds)
    except HandshakeFailed:
        return True
    except ConnectError:
        return False
    return True


async def aside(work: Callable[P, T], *arguments: P.args, **more: P.kwargs) -> T:
    """Do what blocks in a thread of its own, which the end of the process does not wait for: for those of
    asyncio and of concurrent.futures it does."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if result.done():  # nobody waits any more
            return
        if error is None:
            result.set_result(cast("T", value))
        else:
            result.set_exception(error)

    def run() -> None:
        value, error = None, None
        try:
            value = work(*arguments, **more)
        except Exception as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, name="atoll-tls", daemon=True).start()
    return await result


def encrypted_there(address: str) -> Encrypted:
    """The invite is insecure, and what listens there is not."""
    return Encrypted(
        f"the invite is for an insecure coordinator (atoll+insecure://), and what listens at {address} "
        "speaks TLS: ask for the invite that this coordinator has printed (atoll://…)"
    )


def bind(server: grpc.Server | grpc.aio.Server, credential: Credential | None) -> Callable[[str], int]:
    """What has ``server`` take an address, with TLS, or without if there is no credential."""
    if credential is None:
        return server.add_insecure_port
    client_ca = credential.client_ca or None
    credentials = grpc.ssl_server_credentials(
        [(credential.key, credential.chain)], client_ca, require_client_auth=client_ca is not None
    )
    return lambda address: server.add_secure_port(address, credentials)


def _credentials(roots: bytes, client: ClientTls) -> grpc.ChannelCredentials:
    if client.own is None:
        return grpc.ssl_channel_credentials(roots)
    return grpc.ssl_channel_credentials(roots, client.own.key, client.own.chain)


def _connected(address: Address, seconds: float) -> socket.socket:
    try:
        return socket.create_connection((address.host, address.port), seconds)
    except socket.gaierror as error:
        text = f"the host name {address.host!r} does not resolve ({error.strerror}): check its spelling"
        raise ConnectError(f"{text} and this host's DNS", "NAME") from None
    except TimeoutError:
        text = f"{address} cannot be reached: connecting timed out, a firewall may drop it"
        raise ConnectError(text, "UNREACHABLE") from None
    except ConnectionRefusedError:
        text = f"nothing listens at {address}: connection refused"
        raise ConnectError(text, "NOBODY_LISTENS") from None
    except OSError as error:
        raise ConnectError(f"{address} cannot be reached: {error.strerror or error}", "UNREACHABLE") from None


def _greeted(shielded: ssl.SSLSocket, address: Address) -> None:
    """gRPC speaks first. In TLS 1.3 a caller learns only then that its certificate is missing."""
    try:
        word = shielded.recv(1)
    except TimeoutError:
        return  # whether gRPC is there shows in the first call
    except OSError:
        word = b""
    if not word:
        raise HandshakeFailed(
            f"what answers at {address} ends the connection after the handshake: it may ask for a "
            "certificate of this machine; give --tls-cert and --tls-key"
        )


def _failed(error: OSError | ValueError, address: Address) -> ConnectError:
    reason = str(getattr(error, "reason", None) or "")
    if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"):
        return NotEncrypted(plaintext_at(str(address)))
    if isinstance(error, ConnectionError) or "EOF" in reason:
        return ConnectError(f"the connection to {address} broke in the handshake of TLS")
    return HandshakeFailed(f"TLS with {address} failed: {reason or error}")
