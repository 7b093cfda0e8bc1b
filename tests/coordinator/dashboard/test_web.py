"""The dashboard over HTTP: who is answered, with which headers, and that it costs nothing before."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from coordinator.dashboard.server import DashboardError, DashboardServer
from protos.address import Address
from tests.coordinator.dashboard.dashboard_rig import ACCESS, STRANGER, TOKEN, Stage

pytest.importorskip("nicegui")

SECONDS = 60.0


def get(url: str, **headers: str) -> tuple[int, dict[str, str], str]:
    request = urllib.request.Request(url, headers={k.replace("_", "-"): v for k, v in headers.items()})
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as reply:
            return reply.status, {k.lower(): v for k, v in reply.headers.items()}, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, {k.lower(): v for k, v in error.headers.items()}, error.read().decode()


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage(["host-0", STRANGER]) as running:
        running.play(3)
        yield running


def test_the_page(stage: Stage) -> None:
    status, headers, text = get(stage.url)
    assert status == 200 and "data-test" in text
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    assert "unsafe-inline" not in policy["script-src"]
    nonce = re.search(r"'nonce-([^']+)'", policy["script-src"])
    assert nonce is not None
    scripts = re.findall(r"<script\b[^>]*", text)
    assert scripts and all(f'nonce="{nonce[1]}"' in tag for tag in scripts)
    assert headers["x-frame-options"] == "DENY" and headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-store" and "set-cookie" not in headers
    assert headers["content-length"] == str(len(text.encode()))
    assert nonce[1] not in get(stage.url)[2], "every answer has its own"


def test_no_text_of_a_stranger_and_no_secret_is_in_the_page_as_sent(stage: Stage) -> None:
    _, headers, text = get(stage.url)
    assert "onerror" not in text and "host-0" not in text
    assert TOKEN not in text and TOKEN not in str(headers)


def test_everything_comes_from_here(stage: Stage) -> None:
    _, _, text = get(stage.url)
    sources = re.findall(r"""(?:src|href)=["']([^"']+)""", text) + re.findall(r'url\("([^"]+)"\)', text)
    imports = re.search(r'\{"imports": (\{.*?\})\}', text, re.S)
    assert sources and imports is not None and "://" not in imports[1]
    assert all(source.startswith("/") for source in sources)
    assert all(get(stage.url + source)[0] == 200 for source in sources)


def test_another_sites_page_is_not_answered(stage: Stage) -> None:
    host = str(stage.dashboard.address)
    assert get(stage.url, Host="evil.example")[0] == 403
    assert get(stage.url, Origin="http://evil.example")[0] == 403
    assert get(stage.url, Origin="null")[0] == 403
    assert get(stage.url, Origin=f"http://{host}")[0] == 200
    assert get(stage.url, Host=f"localhost:{stage.dashboard.address.port}")[0] == 200
    assert get(f"{stage.url}/nothing")[0] == 404
    assert get(f"{stage.url}/docs")[0] == 404
    assert b" 403 " in upgrade(stage, "http://evil.example")
    assert b" 101 " in upgrade(stage, stage.url)


def upgrade(stage: Stage, origin: str) -> bytes:
    """The first line of the answer to a page that wants a WebSocket."""
    address = stage.dashboard.address
    with socket.create_connection((address.host, address.port), SECONDS) as connection:
        lines = (
            "GET /_nicegui_ws/socket.io/?EIO=4&transport=websocket HTTP/1.1",
            f"Host: {address}",
            f"Origin: {origin}",
            "Upgrade: websocket",
            "Connection: Upgrade",
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
            "Sec-WebSocket-Version: 13",
        )
        connection.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
        return connection.recv(4096).partition(b"\r\n")[0]


def test_a_busy_port_is_named_or_another_one_taken(stage: Stage) -> None:
    taken = stage.dashboard.address

    def second(*, exact: bool) -> DashboardServer:
        loop = stage._loop
        recorder = stage.recorder
        return stage.ask(lambda: DashboardServer(stage.hub, recorder, loop, taken, ACCESS, exact=exact))

    with pytest.raises(DashboardError, match=f"{taken}: the port is in use; choose another"):
        second(exact=True)
    other = second(exact=False)
    try:
        assert other.address.port not in (0, taken.port)
    finally:
        other.close()


def test_a_second_coordinator_of_a_process_has_its_page_once_the_first_is_gone() -> None:
    """In a fresh process, as the page of this one is served."""
    code = (
        "from tests.coordinator.dashboard.dashboard_rig import Stage\n"
        "import sys, urllib.request\n"
        "for _ in range(2):\n"
        "    with Stage(['host']) as stage:\n"
        "        assert 'nicegui' not in sys.modules or _, 'nothing is loaded before somebody looks'\n"
        "        print(urllib.request.urlopen(stage.url, timeout=60).status)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=4 * SECONDS)
    assert done.stdout.split() == ["200", "200"], done.stderr


def test_nobody_looked() -> None:
    before = threading.active_count()
    with Stage(["host"]) as stage:
        stage.play(2)
        address: Address = stage.dashboard.address
    assert threading.active_count() == before
    with socket.socket() as probe:
        probe.bind((address.host, address.port))
