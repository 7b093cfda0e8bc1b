"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from protos.methods import PRESETS

OFF: Final = "off"  # instead of a place: nothing is served or kept

RunFilePath = Annotated[Path, typer.Argument(metavar="FILE", help="The run file, TOML.")]
InviteText = Annotated[
    str,
    typer.Argument(
        metavar="INVITE",
        envvar="ATOLL_INVITE",
        help="What the coordinator printed: atoll://…, or @FILE that holds it.",
    ),
]
TlsCaOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Certificate of an authority, PEM: the coordinator has to show one that it has signed, for the "
        "invite's host, instead of the one that the invite names.",
    ),
]
TlsCertOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Certificate of this machine, for a coordinator that asks for one."),
]
TlsKeyOption = Annotated[Path | None, typer.Option(metavar="FILE", help="Its key, PEM.")]
_METHODS: Final = f"{', '.join(PRESETS)}."
MethodOption = Annotated[str, typer.Option(help=_METHODS)]
MethodIfGiven = Annotated[str | None, typer.Option(help=_METHODS)]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="SECTION.KEY=VALUE", help="Any value of the run file. May be given several times."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout instead of tables.")]

DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
ThreadsOption = Annotated[int, typer.Option(min=0, help="CPU threads of torch; 0 leaves torch's choice.")]
SaveOption = Annotated[Path | None, typer.Option(metavar="DIR", help="Write checkpoints there.")]
SaveEvery = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Rounds between two checkpoints, 0 only at the stop; if not given, as often as the validation "
        "loss is measured, or 50.",
    ),
]
ResumeOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Checkpoint, or folder of checkpoints, to start from; that of --save may still be empty.",
    ),
]
DataOption = Annotated[
    str | None, typer.Option(metavar="PATH", help="Where the run's text or tokens lie on this machine.")
]
MetricsOption = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Serve Prometheus metrics there; port 0 takes a free one."),
]
EventsOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Write every event there, a JSON object a line, instead of to events.jsonl."
    ),
]
LogDirOption = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        envvar="ATOLL_LOG_DIR",
        help="Keep rounds.csv and events.jsonl in a new folder in there, or 'off': keep none. If not given: "
        "in the folder of --save, or in a new one in atoll-logs.",
    ),
]
JournalLogDirOption = Annotated[  # of a coordinator
    str | None,
    typer.Option(
        "--log-dir",
        metavar="DIR",
        envvar="ATOLL_LOG_DIR",
        help="Keep rounds.csv and events.jsonl in a new folder in there, or 'off': keep none; with the "
        "journal, if not given.",
    ),
]
LogOption = Annotated[
    list[str] | None,
    typer.Option(
        "--log",
        metavar="KIND:PLACE",
        help="Also write the figures of every round there: csv:FILE, tensorboard:DIR or wandb:PROJECT "
        "(extras 'tensorboard', 'wandb'). May be given several times; csv: takes the place of rounds.csv.",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Tell about joining and leaving, not about rounds.")]

NprocOption = Annotated[
    int,
    typer.Option(
        min=1, help="Processes on this machine that hold the model together and take part as one node."
    ),
]
AccumulateOption = Annotated[
    int, typer.Option(min=1, help="Passes in which each process reads its part of a batch, to save memory.")
]
BatchOption = Annotated[
    int,
    typer.Option(min=0, help="Sequences that this node reads in a step; 0: as in the run file."),
]
TransportOption = Annotated[
    str,
    typer.Option(
        help="How other nodes reach this one, where a run's slices travel between nodes: auto, direct, swarm "
        "or hub (through the coordinator only). As the run file says, if not given."
    ),
]
PeerListenOption = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT", help="Where this node listens for other nodes; any free port, if not given."
    ),
]
PeerAddressOption = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="What other nodes connect to instead, for instance a port that a router forwards.",
    ),
]
UplinkOption = Annotated[
    str | None,
    typer.Option(metavar="RATE", help="What this node can send, as in '20 Mbit/s'; measured, if not given."),
]
DownlinkOption = Annotated[
    str | None,
    typer.Option(metavar="RATE", help="What this node can receive; measured, if not given."),
]
SwarmListenOption = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Where this node listens for the swarm, with TCP and QUIC (UDP); any free port, if not given.",
    ),
]
SwarmBootstrapOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MULTIADDR",
        help="A peer of the swarm to begin with: a node of the run says its addresses when it joins. May be "
        "given several times; the relays are some anyway.",
    ),
]
SwarmRelayOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MULTIADDR",
        help="For a node that nobody can call, behind a router or a firewall: a node of the run through "
        "which others reach it, and which carries, and could read, what they send each other. May be given "
        "several times; the first that answers is taken.",
    ),
]
IdentityOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Key that says who this node is, made if it is not there; node.key in the folder of --save, if "
        "not given, and a new one each time without that.",
    ),
]
SwarmIdentityOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Key of this node in the swarm; a new one each time, if not given."),
]
PrecisionOption = Annotated[
    str, typer.Option(help="fp32, or bf16 for forward and backward; what is exchanged stays in fp32.")
]
