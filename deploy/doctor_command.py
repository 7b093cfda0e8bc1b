"""The command `atoll doctor`."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.options import Json, TlsCaOption, TlsCertOption, TlsKeyOption
from deploy.terminal import console

if TYPE_CHECKING:
    from collections.abc import Callable

    from deploy.finding import Finding
    from protos.invite import Invite
    from protos.tls import ClientTls

EXAMPLES = (
    "Examples: atoll doctor atoll://TOKEN@gpu1.example.org:4600/PIN\n\n"
    "atoll doctor atoll://TOKEN@gpu1.example.org:4600/PIN --peer-listen 0.0.0.0:4700\n\n"
    "atoll doctor journal coordinator.jsonl reef.jsonl lagoon.jsonl"
)
STATUS_SECONDS = 2.5  # for the status of a coordinator that has answered just before
_SPARE_SECONDS = 5.0  # beyond the deadlines of all steps: only a defect takes them
_COLORS = {"ok": typer.colors.GREEN, "warn": typer.colors.YELLOW, "bad": typer.colors.RED}


def doctor(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="The invite of a run, the folder of a coordinator's journal, logs of events.",
        ),
    ],
    peer_listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Where this machine would listen for other nodes: the coordinator tries to connect to that "
            "port; any free one, if not given.",
        ),
    ] = None,
    offline: Annotated[
        bool,
        typer.Option(
            "--offline",
            help="Ask a run for its status only: test neither the way to its coordinator nor this machine.",
        ),
    ] = False,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    as_json: Json = False,
) -> None:
    """Say what is wrong with a run, or with this machine's way to it, and what to do about it.

    With an invite: name, ports, NAT, clock, bandwidth, other nodes, GPU, disk, versions; in 15 seconds at
    most. Exit code 1 if something is wrong.
    """
    from deploy.doctor import examine
    from deploy.evidence import gather, invite_of
    from deploy.finding import Finding, worst_first
    from deploy.invitation import client_tls
    from deploy.status import TIMEOUT_SECONDS, StatusError
    from protos.tls import PINNED

    def note(text: str) -> None:
        typer.echo(f"note: {text}", err=True)

    invite, others = invite_of(sources)
    tls = PINNED if invite is None else client_tls(invite, tls_ca, tls_cert, tls_key)
    if invite is None or offline:
        findings = examine(gather(sources, note, TIMEOUT_SECONDS, tls))
    else:
        with console(stderr=True).status("looking at this machine") as moving:
            findings, answered = _surroundings(invite, tls, peer_listen, moving.update)
        try:
            findings += examine(gather(sources if answered else others, note, STATUS_SECONDS, tls))
        except StatusError as error:
            findings += examine(gather(others, note))
            findings.append(Finding("bad", str(error), "try again, and look at the coordinator's load"))
    findings = worst_first(findings)
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            _tell(finding)
    if any(finding.level == "bad" for finding in findings):
        raise typer.Exit(1)


def _surroundings(
    invite: Invite, tls: ClientTls, peer_listen: str | None, say: Callable[[str], None]
) -> tuple[list[Finding], bool]:
    """What is found between this machine and the coordinator, and whether that answers."""
    from deploy import doctor_machine, doctor_network, doctor_probe
    from node.exchange.network import process_network
    from node.exchange.peers.setting import ANYWHERE
    from protos.address import Address

    listen = ANYWHERE if peer_listen is None else Address.parse(peer_listen)
    budget = doctor_probe.BUDGET
    end = time.monotonic() + budget
    with doctor_machine.Question() as question:
        network = process_network().open()
        try:
            looking = doctor_probe.look(invite, say, listen=listen, budget=budget, tls=tls)
            facts = network.call(looking, budget + _SPARE_SECONDS, "looking at the network")
        finally:
            network.close()
        say("waiting for torch")
        devices, problem = question.answer(max(1.0, end - time.monotonic()))
    machine = doctor_machine.look(Path.cwd(), devices, problem)
    findings = [*doctor_network.examine(facts), *doctor_machine.examine(machine)]
    return findings, facts.answer is not None


def _tell(finding: Finding) -> None:
    level = typer.style(f"{finding.level:<5}", fg=_COLORS[finding.level])
    typer.echo(f"{level}{finding.text}")
    if finding.advice:
        typer.echo(f"     {finding.advice}")
