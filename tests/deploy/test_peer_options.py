"""The options of `atoll join` that say how other nodes reach this one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import node.launch
from deploy.cli import app
from node.events import Listener, Summary
from node.exchange.peers.setting import ANYWHERE, PeerSetting
from node.launch import Options
from protos.address import Address
from protos.invite import Invite
from protos.sections import ExchangeConfig
from tests.node.tiny import run_file

INVITE = "atoll+insecure://secret@127.0.0.1:1"
PEER = "/ip4/192.0.2.7/tcp/4601/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
runner = CliRunner()


class Reached(Exception):
    pass


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Options]]:
    """What a command that gets as far as joining has made of its options."""
    found: list[Options] = []

    def join(invite: Invite, options: Options, on_event: Listener) -> Summary:
        found.append(options)
        raise Reached

    monkeypatch.setattr(node.launch, "join", join)
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield found
    root.handlers[:] = handlers
    root.setLevel(level)


def test_nothing_is_chosen_by_default(chosen: list[Options]) -> None:
    runner.invoke(app, ["join", INVITE])
    (options,) = chosen
    assert options.transport is None
    assert options.peers.listen == ANYWHERE and options.peers.announced is None
    assert options.peers.uplink == options.peers.downlink == 0


def test_everything_can_be(chosen: list[Options], tmp_path: Path) -> None:
    arguments = {
        "--transport": "swarm",
        "--peer-listen": "127.0.0.1:4700",
        "--peer-address": "example.org:4701",
        "--uplink": "20 Mbit/s",
        "--downlink": "100 MB/s",
        "--swarm-listen": "127.0.0.1:4702",
        "--swarm-bootstrap": PEER,
        "--swarm-relay": PEER,
        "--swarm-identity": str(tmp_path / "key"),
    }
    runner.invoke(app, ["join", INVITE, *(word for pair in arguments.items() for word in pair)])
    (options,) = chosen
    peers = options.peers
    assert options.transport == "swarm"
    assert peers.listen == Address("127.0.0.1", 4700) and peers.announced == Address("example.org", 4701)
    assert (peers.uplink, peers.downlink) == (2.5e6, 1e8)
    assert peers.swarm is not None and peers.swarm.identity == tmp_path / "key"
    assert peers.swarm.listen == ("127.0.0.1",) and peers.swarm.port == 4702
    assert peers.swarm.bootstrap == peers.swarm.relays == (PEER,)
    assert peers.swarm.reachability == "private"  # others than relays do not reach it


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--transport", "pigeon"], "--transport is auto, direct, swarm or hub, not 'pigeon'"),
        (["--uplink", "fast"], "'fast' is not a rate"),
        (["--downlink", "0 Mbit/s"], "--downlink is the rate of a link that carries something"),
        (["--peer-listen", "here"], "here"),
        (["--swarm-bootstrap", "192.0.2.7:4601"], "192.0.2.7:4601"),
    ],
)
def test_what_makes_no_sense_is_said(arguments: list[str], words: str, chosen: list[Options]) -> None:
    result = runner.invoke(app, ["join", INVITE, *arguments])
    assert result.exit_code == 12 and not chosen
    assert words in " ".join(result.output.split()) and "Traceback" not in result.output


@pytest.mark.parametrize(
    ("run", "own", "found"),
    [
        ("hub", None, "hub"),
        ("hub", "direct", "hub"),
        ("direct", None, "direct"),
        ("direct", "hub", "hub"),
        ("auto", "swarm", "swarm"),
    ],
)
def test_the_run_file_decides_whether_slices_travel_at_all(run: str, own: str | None, found: str) -> None:
    runfile = run_file()
    runfile = runfile.model_copy(update={"exchange": ExchangeConfig(transport=run)})  # type: ignore[arg-type]
    options = Options(transport=own, peers=PeerSetting(uplink=3.0))  # type: ignore[arg-type]
    setting = node.launch._peers(runfile, options)
    assert (setting.transport, setting.uplink) == (found, 3.0)
