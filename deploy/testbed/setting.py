"""What a test bed is asked for, and the run file that follows from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from deploy.errors import UserError
from deploy.links.shape import Shape
from deploy.preset import Key, run_text
from deploy.testbed.layout import Layout, layout, parse_site, reshaped
from deploy.testbed.nat import KINDS
from protos.runfile import RunFile
from protos.units import parse_count

STEPS: Final = 128  # of every node, where the number of rounds is left open
CHECKS: Final = 8  # validation losses on the way

# Sized for a few nodes on two cores, as the demo's model is.
VALUES: Final[dict[Key, Any]] = {
    ("run", "name"): "testbed",
    ("run", "validation_windows"): 32,
    ("model", "d_model"): 96,
    ("model", "layers"): 2,
    ("model", "heads"): 4,
    ("model", "context"): 128,
    ("data", "batch"): 8,
}


@dataclass(frozen=True)
class Options:
    """A user's choices; texts as on the command line, ``None`` and empty ones left open.

    Attributes:
        out: where everything is written.
        rate, delay, jitter, loss: of every site's link, each way; delay and loss one way.
        own: ``site-b=100mbit,delay=50ms`` for single sites.
        hub: rate of the coordinator's link; unlimited if empty.
        nat: the kind of NAT before each site; none if empty.
        nodes_per_site, ranks: node processes of a site, and ranks of each node.
        model, size: a model by name, or a decoder of so many parameters.
        values: further ones of the run file.
        plain: bare processes, even where namespaces could be made.
        probe: whether links are measured before the run.
        script: changes of links at given times.
    """

    out: Path
    sites: int = 3
    rate: str = "10gbit"
    delay: str = "40ms"
    jitter: str = ""
    loss: str = ""
    own: tuple[str, ...] = ()
    hub: str = ""
    nat: str = ""
    nodes_per_site: int = 1
    ranks: int = 1
    method: str = "sign-muon"
    model: str = ""
    size: str = ""
    rounds: int | None = None
    values: dict[Key, Any] = field(default_factory=dict)
    plain: bool = False
    probe: bool = True
    script: Path | None = None

    @property
    def nodes(self) -> int:
        """Nodes of the run."""
        return self.sites * self.nodes_per_site


def layout_of(options: Options) -> Layout:
    """Sites, addresses and shapes.

    Raises:
        UserError: a shape, a site or a kind of NAT that cannot be.
    """
    if options.nat and options.nat not in KINDS:
        raise UserError(f"--nat-kind {options.nat}: there are {' and '.join(KINDS)}")
    texts = {key: getattr(options, key) for key in ("rate", "delay", "jitter", "loss")}
    shape = reshaped(Shape(), texts, "the sites' links")
    return layout(
        options.sites,
        shape,
        nodes_per_site=options.nodes_per_site,
        own=dict(parse_site(text, shape) for text in options.own),
        hub=reshaped(Shape(), {"rate": options.hub}, "--hub") if options.hub else None,
        nat=bool(options.nat),
    )


def run_file(options: Options) -> str:
    """The run file.

    Raises:
        UserError: both a model and a size, or a size that no decoder has.
        RunFileError: values that break a rule.
    """
    name = "the test bed's run file"
    values = {
        **VALUES,
        **_model(options),
        ("run", "nodes"): options.nodes,
        ("method", "name"): options.method,
        **options.values,
    }
    if options.rounds is not None:
        values["run", "rounds"] = options.rounds
    elif ("run", "rounds") not in values:
        method = RunFile.parse(run_text(values, name)).method
        values["run", "rounds"] = max(2, method.fragments, STEPS // method.micro_steps(1))
    values.setdefault(("run", "evaluate_every"), max(1, values["run", "rounds"] // CHECKS))
    return run_text(values, name)


def _model(options: Options) -> dict[Key, Any]:
    if options.model and options.size:
        raise UserError("--model and --size both say which model to train: give one of them")
    if options.model:
        return {("model", "name"): options.model}
    if not options.size:
        return {}
    from deploy.shape import shape_for  # brings torch along

    found = shape_for(parse_count(options.size), 256)
    keys = ("d_model", "layers", "heads")
    return {("model", key): getattr(found, key) for key in keys}
