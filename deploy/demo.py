"""The demo: a coordinator and some nodes as processes of this machine, and one Muon process beside them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.panel import Panel
from rich.text import Text

from deploy import demo_results, demo_view
from deploy.demo_results import Course, Results
from deploy.errors import UserError
from deploy.event_log import EventReader, Line
from deploy.history import History
from deploy.logs import ROUNDS
from deploy.preset import Key, run_text
from deploy.processes import Child, Children, ProcessError, cpu_seconds
from deploy.progress import round_line
from deploy.run_folder import RunFolder
from deploy.screen import Screen
from deploy.shape import BYTES, parameters
from deploy.status import StatusClient, StatusError
from deploy.watch import Source
from node.events import RoundDone
from protos.invite import Invite
from protos.runfile import RunFile
from protos.sections import DataConfig

ROOT = Path(__file__).resolve().parents[1]  # where `python -m deploy.cli` finds this package
POLL_SECONDS = 0.25
START_SECONDS = 120.0  # for a process to come up: torch alone may take half a minute on a cold disk
STALL_SECONDS = 120.0  # without a new round, beside what a round computes; the first waits for processes too
SLOWEST = 5e9  # floating-point operations a second: less than two slow cores make together
LEAVE_SECONDS = 60.0  # for nodes to end by themselves after the last round
PROMPT = "ROMEO.\n"  # how the corpus names a speaker
SAMPLE_TOKENS = 320

# Sized for two cores: nearly all of the CPU time is forward and backward, and the text comes out readable.
VALUES: dict[Key, Any] = {
    ("run", "name"): "demo",
    ("run", "validation_windows"): 64,
    ("model", "d_model"): 96,
    ("model", "layers"): 2,
    ("model", "heads"): 4,
    ("model", "context"): 128,
    ("data", "batch"): 28,
}
SIZES: dict[str, dict[Key, Any]] = {  # 0.25, 2 and 11 million parameters
    "S": {},
    "M": {
        ("model", "d_model"): 208,
        ("model", "layers"): 4,
        ("model", "context"): 192,
        ("data", "batch"): 16,
    },
    "L": {
        ("model", "d_model"): 384,
        ("model", "layers"): 6,
        ("model", "heads"): 6,
        ("model", "context"): 256,
        ("data", "batch"): 8,
    },
}
BASELINE_METHOD = "ddp-muon"
# Of several rates and momenta the best for the smallest size's steps, few and of 10,752 tokens each
# (docs/measuring.md); the presets were measured at 1,024.
TUNED: dict[str, dict[Key, Any]] = {
    "sign-muon": {("method", "lr"): 0.075, ("method", "embedding_lr"): 0.005, ("method", "momentum"): 0.9},
    BASELINE_METHOD: {("method", "lr"): 0.03, ("method", "embedding_lr"): 0.012, ("method", "momentum"): 0.9},
}
STEPS = {"S": 160, "M": 256, "L": 128}  # of every node, where the number of rounds is left open
MEASURED = 3  # rounds after which it is said how long all of them take
CHECKS = 12  # validation losses on the way


@dataclass(frozen=True)
class Options:
    """What to train and where to put it.

    ``rounds`` are as many as make :data:`STEPS` steps where ``None``; ``size`` is one of :data:`SIZES`;
    ``values`` are further values of the run file.
    """

    out: Path
    nodes: int = 3
    rounds: int | None = None
    method: str = "sign-muon"
    port: int = 0
    baseline: bool = True
    size: str = "S"
    values: dict[Key, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Files(RunFolder):
    """Where everything of a demo lies."""

    who: str = "the demo"

    @property
    def baseline(self) -> Path:
        return self.out / "baseline.toml"

    @property
    def checkpoint(self) -> Path:
        return self.out / "checkpoint"

    @property
    def picture(self) -> Path:
        return self.out / "demo.png"


def run_files(options: Options) -> tuple[str, str]:
    """The run file of the nodes and of the single process that reads the same tokens.

    Raises:
        RunFileError: values that break a rule.
    """
    values = {
        **VALUES,
        ("run", "rounds"): options.rounds or STEPS[options.size],
        ("run", "nodes"): options.nodes,
        ("method", "name"): options.method,
        ("round", "adaptive"): False,  # all share one machine: who is late is its scheduler's choice
        **SIZES[options.size],
        **options.values,
    }
    values = {**TUNED.get(values["method", "name"], {}), **values}
    name = "the demo's run file"
    if options.rounds is None and ("run", "rounds") not in options.values:
        steps = RunFile.parse(run_text(values, name)).method.micro_steps(1)
        values["run", "rounds"] = max(2, STEPS[options.size] // steps)
    values.setdefault(("run", "evaluate_every"), max(1, values["run", "rounds"] // CHECKS))
    nodes = run_text(values, name)
    run = RunFile.parse(nodes)
    alone = {key: value for key, value in values.items() if key[0] != "method"}
    alone |= {
        ("run", "name"): "demo-baseline",
        ("run", "nodes"): 1,
        ("run", "rounds"): sum(run.method.micro_steps(index) for index in range(run.run.rounds)),
        ("run", "evaluate_every"): run.run.evaluate_every * run.method.micro_steps(1),
        ("data", "batch"): run.data.batch * run.run.nodes,
        ("method", "name"): BASELINE_METHOD,
        **TUNED[BASELINE_METHOD],
    }
    return nodes, run_text(alone, "the baseline's run file")


def patience(run: RunFile) -> float:
    """Seconds without a new round after which a demo is given up: more, the more all nodes compute in one.

    A token costs 6 operations a parameter, forward and backward.
    """
    model = run.model
    count = parameters(model.d_model, model.layers, model.vocab or BYTES)
    tokens = model.context * run.data.batch * run.method.micro_steps(1) * run.run.nodes
    return STALL_SECONDS + 6 * count * tokens / SLOWEST


class Demo:
    """One demo. :meth:`run` does it all; children have ended when it returns or raises."""

    def __init__(
        self,
        options: Options,
        console: Console,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.options = options
        self.files = Files(options.out.resolve())
        self.history = History()  # of the run, once its file is read
        self._console = console
        self._clock = clock
        self._sleep = sleep
        self._screen = Screen(console, clock)
        self._data = DataConfig()
        self._patience: dict[str, float] = {}
        self._names = [f"node-{index + 1}" for index in range(options.nodes)]

    def run(self) -> Results:
        """Train, compare, and write picture and numbers.

        Raises:
            UserError, ProcessError: something did not come up, stopped, or cannot be written.
            RunFileError: the options break a rule of the run file.
        """
        start = self._clock()
        run_file, baseline_file = run_files(self.options)
        run = RunFile.parse(run_file)
        self._data, self.history = run.data, History(run.method.micro_steps(1))
        self._patience = {"votes": patience(run), "baseline": patience(RunFile.parse(baseline_file))}
        files = self.files
        files.prepare(["coordinator", *self._names, "baseline"], files.checkpoint, files.picture)
        self.files.run.write_text(run_file, encoding="utf-8")
        self.files.baseline.write_text(baseline_file, encoding="utf-8")
        with Children() as children:
            votes, logs = self._train_votes(children)
            baseline = self._train_baseline(children) if self.options.baseline else None
        self.files.invite.unlink(missing_ok=True)
        results = Results(
            votes=votes,
            agreement=demo_results.agreement_of(logs),
            baseline=baseline,
            sample=self._sample(),
            seconds=self._clock() - start,
        )
        self.files.results.write_text(results.to_json(), encoding="utf-8")
        unit = "nats per byte" if self._data.tokenizer == "bytes" else "nats per token"
        demo_results.draw(results, self.files.picture, unit)
        return results

    def show(self, results: Results) -> None:
        """Print the summary, the sample and where everything lies."""
        self._console.print(demo_results.summary(results))
        self._screen.say(demo_results.verdict(results))
        if results.sample:
            sample = Text(results.sample.strip())
            self._console.print(Panel(sample, title="it writes", title_align="left", expand=False))
        self._screen.say(f"picture {self.options.out / self.files.picture.name}")
        self._screen.say(f"numbers {self.options.out / self.files.results.name}")
        curve = self.options.out / self.files.journal.name / ROUNDS
        self._screen.say(f"logs    {curve}; of each node a .csv of its rounds, a .jsonl of its events")

    # ---------------------------------------------------------------------------------------- processes

    def _start(self, children: Children, name: str, *arguments: str, threads: int = 1, **extra: str) -> Child:
        # OpenMP threads of several processes on the same cores would wait for each other.
        # Threads that spin while they wait make one process several times slower when another needs a core.
        environment = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", **extra}
        command = [sys.executable, "-m", "deploy.cli", *arguments]
        return children.start(
            name, command, log=self.files.log(name), environment=environment, directory=ROOT
        )

    def _train_votes(self, children: Children) -> tuple[Course, list[list[dict[str, Any]]]]:
        files = self.files
        listen = f"127.0.0.1:{self.options.port}"
        coordinator = self._start(
            children, "coordinator", "coordinator", str(files.run), "--listen", listen,
            "--invite-file", str(files.invite), "--journal", str(files.journal), "--stay", "--metrics", "off",
        )  # fmt: skip
        self._screen.say(f"coordinator and {self.options.nodes} nodes start; logs are in {self.options.out}")
        invite = self._invite(children)
        mark, nodes = cpu_seconds(coordinator.pid), list[Child]()
        try:
            for name in self._names:
                nodes.append(self._start_node(children, name, invite))
            with StatusClient(invite) as client, self._screen.shown():
                self.follow(children, client, self._patience["votes"])
                for node in nodes:
                    children.wait(node, LEAVE_SECONDS)
                children.check()
                self.history.add(client.fetch(LEAVE_SECONDS), self._clock())
                self._show("done")
        except BaseException:
            children.stop(nodes)  # before their coordinator, so that they take their leave of it
            raise
        seconds, spent = self.history.reply.seconds, cpu_seconds(coordinator.pid) - mark
        children.stop([coordinator])
        logs = [EventReader(files.events(name)).new() for name in self._names]
        course = demo_results.course_of(self.options.method, logs, seconds)
        course.coordinator_seconds = spent
        return course, logs

    def _start_node(self, children: Children, name: str, invite: Invite) -> Child:
        save = ("--save", str(self.files.checkpoint)) if name == self._names[0] else ()
        return self._start(
            children, name, "join", "--name", name, "--threads", "1", "--device", "cpu",
            *self.files.kept(name), *save, ATOLL_INVITE=str(invite),
        )  # fmt: skip

    def _invite(self, children: Children) -> Invite:
        until = self._clock() + START_SECONDS
        while not self.files.invite.exists():
            self._alive(children)
            if self._clock() > until:
                raise ProcessError(f"the coordinator is not up after {START_SECONDS:g} s")
            time.sleep(POLL_SECONDS / 5)
        return Invite.parse(self.files.invite.read_text(encoding="utf-8"))

    def _alive(self, children: Children) -> None:
        """Raise unless every child runs or has ended well."""
        children.check()
        for child in children.children:
            if child.name == "coordinator" and child.code == 0:
                raise ProcessError(child.fate())

    def follow(self, children: Children, source: Source, patience: float) -> None:
        """Show the run until its last round.

        A coordinator that does not answer while its process runs counts as one without a new round: where the
        cores are taken an answer may be late.

        Raises:
            StatusError: no answer, and no new round for ``patience`` seconds.
            ProcessError: a child has failed, or no new round for ``patience`` seconds.
            UserError: the run has failed.
        """
        progress, since, told = -1, self._clock(), False
        while True:
            try:
                reply = source.fetch()
            except StatusError:
                self._alive(children)  # says more than a refused connection
                if self._clock() - since > patience:
                    raise
                self._sleep(POLL_SECONDS)
                continue
            now = self._clock()
            self.history.add(reply, now)
            if reply.phase == "done":
                return
            if reply.phase == "failed":
                raise UserError(f"the run failed: {reply.reason}")
            self._alive(children)
            self._show(f"{reply.phase}: {reply.reason}")
            if not told and reply.round >= MEASURED:
                told = True
                if text := demo_view.outlook(self.history, self.options.baseline):
                    self._screen.say(text)
            if reply.round > progress:
                progress, since = reply.round, now
            elif now - since > patience:
                raise ProcessError(
                    f"no new round for {now - since:.0f} s ({reply.phase}: {reply.reason}); "
                    + "\n".join(child.fate() for child in children.children)
                )
            self._sleep(POLL_SECONDS)

    def _title(self) -> str:
        reply = self.history.reply
        text = f"{self.options.nodes} nodes, {self.options.method}, {self._data.source}"
        return f"{text}, {reply.parameters:,} parameters" if reply.parameters else text

    def _show(self, note: str) -> None:
        line = demo_view.line(self.history) if self.history.reply.round else note
        done = note == "done"
        self._screen.update(lambda: demo_view.view(self.history, self._title(), note), line, always=done)

    # ----------------------------------------------------------------------------------------- baseline

    def _train_baseline(self, children: Children) -> Course:
        files = self.files
        reader, log = EventReader(files.events("baseline")), []
        self._screen.say(f"the same tokens in one process: {BASELINE_METHOD}")
        child = self._start(
            children, "baseline", "train", str(files.baseline), "--device", "cpu",
            "--threads", str(baseline_threads()), *files.kept("baseline"),
            threads=baseline_threads(),
        )  # fmt: skip
        first: float | None = None
        since = self._clock()
        with self._screen.shown():
            while True:
                ended = child.code is not None
                fresh = reader.new()
                log += fresh
                rounds = demo_results.rounds_of(fresh)
                if rounds:
                    since = self._clock()
                    first = since if first is None else first
                    self._show_baseline(rounds[-1])
                if ended:
                    break
                if self._clock() - since > self._patience["baseline"]:
                    raise ProcessError(f"no new step for {self._clock() - since:.0f} s; {child.fate()}")
                time.sleep(POLL_SECONDS)
        children.check()
        seconds = sum(sum(event["seconds"].values()) for event in demo_results.rounds_of(log))
        course = demo_results.course_of(BASELINE_METHOD, [log], seconds)
        return demo_results.with_ring_bytes(course, self.options.nodes)

    def _show_baseline(self, event: dict[str, Any]) -> None:
        done = Line(event["round"] + 1, "RoundDone", event).event()
        assert isinstance(done, RoundDone)
        line = f"{BASELINE_METHOD}: {round_line(done)}"
        last = event["round"] + 1 == event["rounds"]
        self._screen.update(lambda: Group(Text(line, no_wrap=True, overflow="ellipsis")), line, always=last)

    def _sample(self) -> str:
        import torch

        from deploy.text_sample import generate

        torch.set_num_threads(1)
        return generate(self.files.checkpoint, PROMPT, SAMPLE_TOKENS)


def baseline_threads() -> int:
    """Threads of the single process: it may use the cores that the nodes shared."""
    import os

    return max(1, min(4, os.cpu_count() or 1))
