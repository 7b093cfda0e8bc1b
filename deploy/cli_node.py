"""The commands that train: `atoll join` and `atoll train`, as one process or as the ranks of one node."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from deploy.errors import INTERRUPTED, UserError
from deploy.options import (
    AccumulateOption,
    BatchOption,
    DataOption,
    DeviceOption,
    DownlinkOption,
    EventsOption,
    IdentityOption,
    InviteText,
    LogDirOption,
    LogOption,
    MetricsOption,
    NprocOption,
    PeerAddressOption,
    PeerListenOption,
    PrecisionOption,
    Quiet,
    ResumeOption,
    RunFilePath,
    SaveEvery,
    SaveOption,
    SwarmBootstrapOption,
    SwarmIdentityOption,
    SwarmListenOption,
    SwarmRelayOption,
    ThreadsOption,
    TlsCaOption,
    TlsCertOption,
    TlsKeyOption,
    TransportOption,
    UplinkOption,
)
from deploy.ranks import run_ranks, without_option
from deploy.terminal import console
from node.torchrun import leads, under_torchrun

if TYPE_CHECKING:
    from deploy.logs import LogFolder
    from node.events import Listener
    from node.exchange.peers.setting import Transport
    from node.setting import Precision
    from protos.address import Address


def join(
    invite: InviteText,
    name: Annotated[str, typer.Option(help="What the others see; the host's name if not given.")] = "",
    device: DeviceOption = "auto",
    threads: ThreadsOption = 0,
    save: SaveOption = None,
    save_every: SaveEvery = None,
    resume: ResumeOption = None,
    data: DataOption = None,
    weight: Annotated[int, typer.Option(min=1, max=65535, help="Weight of this node's vote.")] = 1,
    wait: Annotated[str, typer.Option(help="How long to wait for a coordinator that is not there.")] = "120s",
    nproc: NprocOption = 1,
    batch: BatchOption = 0,
    accumulate: AccumulateOption = 1,
    precision: PrecisionOption = "fp32",
    transport: TransportOption = "",
    peer_listen: PeerListenOption = None,
    peer_address: PeerAddressOption = None,
    uplink: UplinkOption = None,
    downlink: DownlinkOption = None,
    swarm_listen: SwarmListenOption = None,
    swarm_bootstrap: SwarmBootstrapOption = None,
    swarm_relay: SwarmRelayOption = None,
    swarm_identity: SwarmIdentityOption = None,
    identity: IdentityOption = None,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    metrics: MetricsOption = None,
    events: EventsOption = None,
    log: LogOption = None,
    log_dir: LogDirOption = None,
    quiet: Quiet = False,
) -> None:
    """Take part in a run. Ctrl-C leaves it cleanly."""
    from deploy.invitation import client_tls, given
    from protos.units import parse_duration

    patience = parse_duration(wait)
    where = given(invite, patience)
    tls = client_tls(where, tls_ca, tls_cert, tls_key)
    chosen, way = _precision(precision), _transport(transport)
    rates = _bytes_per_second(uplink, "--uplink"), _bytes_per_second(downlink, "--downlink")
    listen, announced = address(peer_listen), address(peer_address)
    relays = tuple(swarm_relay or ())
    bootstrap = tuple(dict.fromkeys((*(swarm_bootstrap or ()), *relays)))
    _spread(nproc)
    from deploy.logs import LogFolder
    from node.exchange.peers.setting import ANYWHERE, PeerSetting
    from node.exchange.swarm.setting import SwarmSetting
    from node.launch import Options
    from node.launch import join as join_run

    swarm_at = address(swarm_listen) or ANYWHERE
    try:
        swarm = SwarmSetting(
            listen=(swarm_at.host,),
            port=swarm_at.port,
            bootstrap=bootstrap,
            relays=relays,
            reachability="private" if relays else "auto",
            identity=swarm_identity,
        )
    except ValueError as error:
        raise UserError(str(error)) from error
    options = Options(
        name=name,
        device=device,
        threads=threads,
        save=save,
        save_every=save_every,
        resume=resume,
        data=data,
        weight=weight,
        wait=patience,
        batch=batch,
        accumulate=accumulate,
        precision=chosen,
        metrics=address(metrics),
        transport=way,
        identity=identity,
        tls=tls,
        peers=PeerSetting(
            listen=listen or ANYWHERE,
            announced=announced,
            uplink=rates[0],
            downlink=rates[1],
            swarm=swarm,
        ),
    )
    with _told(events, quiet, log or [], LogFolder(save, log_dir), name) as tell:
        try:
            summary = join_run(where, options, tell)
        except (KeyboardInterrupt, SystemExit) as signalled:
            typer.echo(f"left the run of {where.address}", err=True)
            raise typer.Exit(_code(signalled)) from None
    if not summary.done and leads():  # another rank's code would end the leader before it has taken leave
        raise typer.Exit(1)


def train(
    file: RunFilePath,
    device: DeviceOption = "auto",
    threads: ThreadsOption = 0,
    save: SaveOption = None,
    save_every: SaveEvery = None,
    resume: ResumeOption = None,
    data: DataOption = None,
    nproc: NprocOption = 1,
    batch: BatchOption = 0,
    accumulate: AccumulateOption = 1,
    precision: PrecisionOption = "fp32",
    metrics: MetricsOption = None,
    events: EventsOption = None,
    log: LogOption = None,
    log_dir: LogDirOption = None,
    quiet: Quiet = False,
) -> None:
    """Train on this machine alone, without a coordinator."""
    from protos.runfile import RunFile

    runfile, chosen = RunFile.load(file), _precision(precision)
    _spread(nproc)
    from deploy.logs import LogFolder
    from node.launch import Options
    from node.launch import train as train_alone

    options = Options(
        device=device,
        threads=threads,
        save=save,
        save_every=save_every,
        resume=resume,
        data=data,
        batch=batch,
        accumulate=accumulate,
        precision=chosen,
        metrics=address(metrics),
    )
    with _told(events, quiet, log or [], LogFolder(save, log_dir)) as tell:
        try:
            summary = train_alone(runfile, options, tell)
        except (KeyboardInterrupt, SystemExit) as signalled:
            saved = f"; the state is saved in {save}" if save else "; nothing is saved without --save"
            typer.echo(f"stopped before the end{saved}", err=True)
            raise typer.Exit(_code(signalled)) from None
    if not summary.done and leads():
        raise typer.Exit(1)


def _code(signalled: BaseException) -> int:
    """The exit code after Ctrl-C, or another signal."""
    code = signalled.code if isinstance(signalled, SystemExit) else INTERRUPTED
    return code if isinstance(code, int) else 1


def _precision(text: str) -> Precision:
    if text not in ("fp32", "bf16"):
        raise UserError(f"--precision is fp32 or bf16, not {text!r}")
    return cast("Precision", text)


def _transport(text: str) -> Transport | None:
    if text not in ("", "auto", "direct", "swarm", "hub"):
        raise UserError(f"--transport is auto, direct, swarm or hub, not {text!r}")
    return cast("Transport", text) if text else None


def _bytes_per_second(text: str | None, option: str) -> float:
    """A rate of a link; 0 if none is given."""
    from protos.units import parse_rate

    if text is None:
        return 0.0
    rate = parse_rate(text)
    if not rate:
        raise UserError(f"{option} is the rate of a link that carries something, not 0")
    return rate / 8


def _spread(nproc: int) -> None:
    """Start this command anew on several ranks, if that is wanted, and end with their exit code."""
    if nproc == 1:
        return
    if under_torchrun():
        raise UserError("torchrun has started the ranks already: leave --nproc out")
    raise typer.Exit(run_ranks(nproc, without_option(sys.argv[1:])))


@contextmanager
def _told(
    events: Path | None, quiet: bool, figures: list[str], folder: LogFolder, name: str = ""
) -> Iterator[Listener]:
    """A listener for the terminal, the logs, and what else is wanted; SIGTERM unwinds within."""
    from deploy.event_log import EventLog
    from deploy.logs import KeptLogs
    from deploy.processes import unwinding_signals
    from deploy.progress import Progress, all_of
    from deploy.writers import CSV, CsvWriter, Feed, opened
    from node.events import Notice

    with ExitStack() as stack:
        listeners: list[Listener] = []
        if leads():
            who = name or socket.gethostname()
            screen = stack.enter_context(Progress(console(), quiet=quiet))
            listeners.append(screen)
            if events is not None:
                listeners.append(stack.enter_context(EventLog(events, who)))
            listeners += [stack.enter_context(opened(place, who)) for place in figures]
            apart = any(place.startswith(CSV) for place in figures)
            logs = KeptLogs(
                folder,
                who,
                lambda text: screen(Notice(text)),
                rounds=None if apart else lambda path: Feed(CsvWriter(path), str(path)),
                events=events is None,
            )
            listeners.append(stack.enter_context(logs))
        stack.enter_context(unwinding_signals())
        yield all_of(listeners)


def address(text: str | None) -> Address | None:
    """HOST:PORT, if it is given."""
    from protos.address import Address

    return None if text is None else Address.parse(text)
