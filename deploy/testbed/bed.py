"""A test bed at work: namespaces and links, a coordinator, and the nodes of its sites, as processes."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from deploy import demo_view
from deploy.errors import UserError
from deploy.event_log import EventReader
from deploy.history import History
from deploy.processes import Child, Children, ProcessError
from deploy.run_folder import RunFolder
from deploy.screen import Screen
from deploy.status import StatusClient, StatusError
from deploy.testbed import results as outcome
from deploy.testbed.change import Change
from deploy.testbed.control import Desk
from deploy.testbed.flows import Flows
from deploy.testbed.home import MARK, Home
from deploy.testbed.layout import COORDINATOR, OPERATOR, Link, as_json
from deploy.testbed.namespace import move, own, why_not
from deploy.testbed.network import Network
from deploy.testbed.probing import Probes, probe_links, refused
from deploy.testbed.results import Deed, Results
from deploy.testbed.script import Action, Script
from deploy.testbed.setting import Options, layout_of, run_file
from deploy.testbed.view import view
from deploy.watch import MISSES
from protos.invite import Invite
from protos.runfile import RunFile

ROOT: Final = Path(__file__).resolve().parents[2]  # where `python -m deploy.cli` finds this package
PORT: Final = 4600  # of the coordinator in its own namespace, where all are free
POLL_SECONDS: Final = 0.25
START_SECONDS: Final = 120.0  # for a process to come up: torch alone may take half a minute on a cold disk
STALL_SECONDS: Final = 120.0  # without a new round, while all links are up
LEAVE_SECONDS: Final = 60.0  # for nodes to end by themselves after the last round
WAIT: Final = "1h"  # for how long a node that is cut off tries to come back
SHOWN: Final = 5  # of the latest deeds

Clock = Callable[[], float]


class Bed:
    """One test bed. :meth:`run` does it all; nothing is left of it when that returns or raises."""

    def __init__(
        self, options: Options, console: Console, clock: Clock = time.monotonic, date: Clock = time.time
    ) -> None:
        self.options = options
        self.files = RunFolder(options.out.resolve(), "the test bed")
        self.layout = layout_of(options)
        self.text = run_file(options)
        self.runfile = RunFile.parse(self.text)
        self.history = History(self.runfile.method.micro_steps(1))
        self.script = Script()
        self.network: Network | None = None
        self.flows = Flows(clock)
        self.deeds: list[Deed] = []
        self.why_plain = ""
        self._console = console
        self._clock, self._date = clock, date
        self._begun: float | None = None  # when the first round was opened, by its coordinator's clock
        self._screen = Screen(console, clock)
        self._environment: dict[str, str] = {}

    def run(self) -> Results:
        """Build, probe, train, and write what came out.

        Raises:
            UserError, ProcessError: something cannot be built, did not come up, or stopped.
            RunFileError: the options break a rule of the run file.
        """
        start = self._clock()
        self.why_plain = "asked for with --plain" if self.options.plain else why_not() or ""
        if self.options.script is not None:
            self._need_links("a script changes links")
            names = [link.name for link in self.layout.shaped]
            self.script = Script.load(self.options.script, names)
        with ExitStack() as stack:
            home = stack.enter_context(Home(self.files.out))
            for sentence in home.left:
                self._screen.say(sentence)
            self._environment = {MARK: home.mark}
            self.files.prepare([COORDINATOR, *(name for name, _ in self.layout.nodes)])
            self.files.run.write_text(self.text, encoding="utf-8")
            probes = self._build(stack)
            desk = stack.enter_context(Desk(home.socket))
            stack.callback(self.files.invite.unlink, missing_ok=True)
            children = stack.enter_context(Children())
            before = self.network.counters() if self.network else {}
            complete = False
            try:
                self._train(children, desk)
                complete = True
            finally:
                after = self.network.counters() if self.network else {}
                found = self._results(probes)
                found.complete = complete
                found.traffic = {name: after[name].since(before[name]) for name in after}
                found.seconds = self._clock() - start
                self._keep(found)
        return found

    def _keep(self, found: Results) -> None:
        """Write the numbers; of a run that was stopped, too, if it has committed rounds."""
        if not (found.complete or found.rounds):
            return
        self.files.results.write_text(outcome.write(found), encoding="utf-8")
        if not found.complete:
            rounds = f"{len(found.rounds)} of {self.runfile.run.rounds} rounds"
            self._screen.say(f"stopped after {rounds}; their numbers: {self._numbers}")

    @property
    def _numbers(self) -> Path:
        return self.options.out / self.files.results.name

    # ------------------------------------------------------------------------------------------- building

    def _build(self, stack: ExitStack) -> Probes | None:
        """Make namespaces and links, and measure these."""
        say = self._screen.say
        if self.why_plain:
            say(f"plain processes without links: {self.why_plain}")
            return None
        self.network = network = stack.enter_context(Network(self.layout, nat=self.options.nat))
        for site in self.layout.sites:
            say(f"{site.name}: {site.shape}, {' and '.join(site.nodes)}")
        if self.options.probe:
            probes = probe_links(network, say)
            for note in (*network.notes, *probes.notes):
                say(note)
            if probes.problems:
                raise refused(probes)
        else:
            probes = None
            network.shape()
        # The status is asked for from within: this machine itself has no way into the bed.
        stack.enter_context(_moved(network.place(OPERATOR).enter))
        return probes

    # ------------------------------------------------------------------------------------------ processes

    def _start(self, children: Children, name: str, at: str, *arguments: str, **extra: str) -> Child:
        # Threads that spin while they wait make one process several times slower when another needs a core.
        environment = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **self._environment, **extra}
        command = [sys.executable, "-m", "deploy.cli", *arguments]
        if self.network is not None:
            command = self.network.place(at).command(*command)
        return children.start(
            name, command, log=self.files.log(name), environment=environment, directory=ROOT
        )

    def _train(self, children: Children, desk: Desk) -> None:
        files = self.files
        where = ["--listen", "127.0.0.1:0"]
        if self.network is not None:
            where = ["--listen", f"0.0.0.0:{PORT}", "--advertise", self.layout.coordinator.addresses.host]
        coordinator = self._start(
            children, COORDINATOR, COORDINATOR, "coordinator", str(files.run), *where,
            "--invite-file", str(files.invite), "--journal", str(files.journal), "--stay",
            "--metrics", "off", "--dashboard", "off", "--events", str(files.events(COORDINATOR)),
        )  # fmt: skip
        self._screen.say(f"coordinator and {self.options.nodes} nodes start; logs are in {self.options.out}")
        invite = self._invite(children, desk)
        nodes: list[tuple[Child, Link]] = []
        try:
            for name, site in self.layout.nodes:
                nodes.append((self._start_node(children, name, site, invite), site))
            with StatusClient(invite) as client, self._screen.shown():
                self._follow(children, client, desk)
                for child, site in nodes:
                    self._leave(children, child, site)
                children.check()
                self.history.add(client.fetch(), self._clock())
                self._show("done")
        except BaseException:
            children.stop([child for child, _ in nodes])  # they take their leave of their coordinator
            raise
        children.stop([coordinator])

    def _start_node(self, children: Children, name: str, site: Link, invite: Invite) -> Child:
        ranks = ("--nproc", str(self.options.ranks)) if self.options.ranks > 1 else ()
        return self._start(
            children, name, site.name, "join", "--name", name, "--threads", "1", "--device", "cpu",
            "--wait", WAIT, *ranks, *self.files.kept(name), ATOLL_INVITE=str(invite),
        )  # fmt: skip

    def _leave(self, children: Children, child: Child, site: Link) -> None:
        """Wait for a node's end after the last round; one that is cut off never hears of it."""
        if self.network is not None and not self.network.state(site.name).up:
            self._note(f"{child.name} is cut off at the end: stopped", site.name)
            children.stop([child])
            children.children.remove(child)  # how it ended says nothing
            return
        children.wait(child, LEAVE_SECONDS)

    def _invite(self, children: Children, desk: Desk) -> Invite:
        until = self._clock() + START_SECONDS
        while not self.files.invite.exists():
            self._alive(children)
            if self._clock() > until:
                raise ProcessError(f"the coordinator is not up after {START_SECONDS:g} s")
            desk.serve(POLL_SECONDS, self._answer)
        return Invite.parse(self.files.invite.read_text(encoding="utf-8"))

    def _alive(self, children: Children) -> None:
        """Raise unless every child runs or has ended well."""
        children.check()
        for child in children.children:
            if child.name == COORDINATOR and child.code == 0:
                raise ProcessError(child.fate())

    def _follow(self, children: Children, client: StatusClient, desk: Desk) -> None:
        """Show the run, and do what a script and other terminals want, until its last round."""
        opened = EventReader(self.files.events(COORDINATOR))
        progress, since, misses = -1, self._clock(), 0
        while True:
            now = self._clock()
            try:
                reply = client.fetch()
            except StatusError:
                self._alive(children)  # says more than a refused connection
                misses += 1
                if misses >= MISSES and not self._cut():
                    raise
            else:
                misses = 0
                self.history.add(reply, now)
                if reply.phase == "done":
                    return
                if reply.phase == "failed":
                    raise UserError(f"the run failed: {reply.reason}")
            reply = self.history.reply
            self._alive(children)
            if self._begun is None:
                _, self._begun = outcome.rounds_from(opened.new(), {})
            for action in self.script.due(reply.round, self._elapsed()):
                self._act(action)
            if self.network is not None:
                self.flows.add(self.network)
            self._show(f"{reply.phase}: {reply.reason}")
            if reply.round > progress or self._cut():
                progress, since = reply.round, now
            elif now - since > (START_SECONDS if reply.round == 0 else STALL_SECONDS):
                raise ProcessError(
                    f"no new round for {now - since:.0f} s ({reply.phase}: {reply.reason}); "
                    + "\n".join(child.fate() for child in children.children)
                )
            desk.serve(POLL_SECONDS, self._answer)

    def _cut(self) -> bool:
        """Whether a link is down: then the coordinator's own deadlines say how long all may stand still."""
        network = self.network
        return network is not None and any(not network.state(link.name).up for link in self.layout.shaped)

    # -------------------------------------------------------------------------------------------- changes

    def _elapsed(self) -> float:
        """Seconds since the first round was opened; -inf before."""
        return -math.inf if self._begun is None else self._date() - self._begun

    def _need_links(self, why: str) -> None:
        if self.why_plain:
            raise UserError(f"{why}, and there are none: {self.why_plain}")

    def _act(self, action: Action) -> None:
        self._change(action.change)

    def _change(self, change: Change) -> str:
        self._need_links("there is no link to change")
        assert self.network is not None
        state = self.network.change(change)
        text = f"{change.link}: {state.text}"
        self._note(text, change.link)
        return text

    def _note(self, what: str, link: str = "") -> None:
        seconds = self._elapsed()
        self.deeds.append(
            Deed(seconds if math.isfinite(seconds) else math.nan, self.history.reply.round, what, link)
        )
        if not self._console.is_terminal:
            self._screen.say(f"round {self.history.reply.round}: {what}")

    def _answer(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """What another terminal gets for its request."""
        kind = request.get("do")
        if kind == "change":
            return {"text": self._change(Change.from_json(_mapping(request.get("change"))))}
        if kind == "show":
            return self._standing()
        raise UserError(f"unknown request {kind!r}")

    def _standing(self) -> dict[str, Any]:
        reply, network = self.history.reply, self.network
        links = {}
        for link in self.layout.shaped if network is not None else ():
            assert network is not None
            state, flow = network.state(link.name), self.flows.flow(network, link.name)
            links[link.name] = {
                "up": state.up,
                "shape": as_json(state.shape),
                "text": state.text,
                "nodes": link.nodes,
                "bits_per_second": [flow.up, flow.down],
                "bytes": [flow.sent, flow.received],
            }
        return {
            "out": str(self.files.out),
            "phase": reply.phase,
            "round": reply.round,
            "rounds": self.runfile.run.rounds,
            "plain": self.why_plain,
            "links": links,
        }

    # --------------------------------------------------------------------------------------------- outcome

    def _show(self, note: str) -> None:
        def whole() -> Any:
            network = self.network
            shown = self.layout.shaped if network is not None else ()
            flows = {link.name: self.flows.flow(network, link.name) for link in shown if network is not None}
            deeds = [f"round {deed.round}: {deed.what}" for deed in self.deeds[-SHOWN:]]
            return view(self.history, self._title(), note, flows, deeds)

        line = demo_view.line(self.history) if self.history.reply.round else note
        self._screen.update(whole, line, always=note == "done")

    def _title(self) -> str:
        options, reply = self.options, self.history.reply
        text = f"{options.sites} sites, {options.nodes} nodes, {self.runfile.method.name}"
        return f"{text}, {reply.parameters:,} parameters" if reply.parameters else text

    def _results(self, probes: Probes | None) -> Results:
        run, files, network = self.runfile, self.files, self.network
        logs = {name: EventReader(files.events(name)).new() for name, _ in self.layout.nodes}
        rounds, _ = outcome.rounds_from(EventReader(files.events(COORDINATOR)).new(), logs)
        return Results(
            run={
                "method": run.method.name,
                "nodes": self.options.nodes,
                "sites": self.options.sites,
                "ranks": self.options.ranks,
                "nat": self.options.nat,
                "rounds": run.run.rounds,
                "steps": run.method.micro_steps(1),
                "cores": os.cpu_count(),
                "file": self.text,
            },
            layout=self.layout,
            why_plain=self.why_plain,
            notes=[*(network.notes if network else ()), *(probes.notes if probes else ())],
            probes=probes,
            deeds=self.deeds,
            rounds=rounds,
            agreement=outcome.agreement(logs),
            metered=outcome.metered(self.layout, logs),
            parameters=self.history.reply.parameters,
        )

    def show(self, results: Results) -> None:
        """Print the tables and where everything lies."""
        self._console.print(outcome.summary(results))
        for note in results.notes:
            self._screen.say(f"note: {note}")
        self._screen.say(f"numbers {self._numbers}")


@contextmanager
def _moved(enter: Callable[[], None]) -> Iterator[None]:
    """This thread is elsewhere within, and back afterwards."""
    home = own()
    try:
        enter()
        yield
    finally:
        move(home)
        os.close(home)


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UserError("a change is a JSON object")
    return value
