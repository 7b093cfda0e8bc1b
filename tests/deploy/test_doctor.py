"""`atoll doctor`: every check on its own, and the command on an invite, a journal and logs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner

from coordinator import events as of_coordinator
from coordinator.journal import RosterRecord, RoundRecord, StartRecord
from coordinator.journal_folder import DATABASE
from coordinator.journal_tables import FORMAT, Tables
from coordinator.segments import Place
from deploy import doctor
from deploy.cli import app
from deploy.doctor import CHECKS, Check, examine
from deploy.errors import UserError
from deploy.event_log import Event, EventsLost
from deploy.evidence import Evidence, JournalFacts, gather, journal_facts
from deploy.finding import Finding
from deploy.moments import Moment
from node import events as of_node
from protos import atoll_pb2 as pb
from protos import refusal
from protos.wire import CONTROL_SERVICE
from tests.deploy.events_rig import BEGIN, NODES, done, of_a_node, of_the_coordinator, write

runner = CliRunner()
GOOD = pb.StatusReply(run="r", phase="training", reason="round 5: waiting", round=4, rounds=9)


def told(*events: tuple[str, Event]) -> Evidence:
    return Evidence(moments=[Moment(BEGIN + at, who, event) for at, (who, event) in enumerate(events)])


def by_coordinator(*events: of_coordinator.Event) -> Evidence:
    return told(*(("coordinator", event) for event in events))


def only(check: Check, evidence: Evidence) -> Finding:
    (finding,) = check(evidence)
    return finding


def deviation(node: str, times: int) -> of_coordinator.NodeDeviated:
    return of_coordinator.NodeDeviated(node, 6, "ab", "cd", times, "2 of 3 nodes hold cd, not node-1 (ab)")


def test_a_healthy_run() -> None:
    evidence = Evidence(status=GOOD, moments=by_coordinator(of_coordinator.DigestAgreed(0, "ab")).moments)
    findings = examine(evidence)
    assert {finding.level for finding in findings} == {"ok"} and not any(f.advice for f in findings)
    assert [f.text for f in findings] == [
        "training, 4 of 9 rounds: round 5: waiting",
        "no node has left the common state",
        "nothing was refused or ignored",
    ]
    assert examine(Evidence()) == []


def test_deviations_are_told_by_node() -> None:
    finding = only(doctor.deviations, by_coordinator(deviation("node-1", 1), deviation("node-1", 2)))
    assert finding.level == "bad" and finding.advice.startswith("it loads the common state by itself")
    assert finding.text == (
        "node-1 has left the common state 2 times: last in round 7, 2 of 3 nodes hold cd, not node-1 (ab)"
    )
    counted = Evidence(status=pb.StatusReply(counters={refusal.DIGEST_MISMATCH: 3}))
    assert "3 times" in only(doctor.deviations, counted).text


def test_the_first_difference_between_digests() -> None:
    evidence = told(
        *((node, done(0)) for node in NODES),
        ("node-1", of_node.Saved(1, Path("x"))),
        ("node-1", of_node.StateLoaded(1, 1000, "ab", 1.0)),
        ("node-0", done(1, "aa")),
        ("node-1", done(1, "bb")),
        ("coordinator", of_coordinator.NodeReported("node-2", 1, 2.0, "aa")),
        ("node-1", of_node.Notice("later")),
        ("node-0", done(2, "cc")),
        ("node-1", done(2, "dd")),
    )
    finding = only(doctor.first_difference, evidence)
    assert finding.level == "bad" and "a load or a resume" in finding.advice
    assert finding.text == (
        "the first difference: 2 of 3 nodes hold one state after round 2, node-1 not. Before that: node-1: "
        "state after round 1 loaded: 1 kB in 1 s"
    )
    equal = told(*((node, done(index)) for index in range(3) for node in NODES))
    assert only(doctor.first_difference, equal) == Finding(
        "ok", "all digests of 3 rounds are equal, of 2 nodes"
    )
    assert not list(doctor.first_difference(told(("node-0", done(0)))))


def test_who_lags_and_who_is_not_counted() -> None:
    nodes = [
        pb.NodeStatus(node="node-0", state="active", missed=1),
        pb.NodeStatus(node="node-1", state="lagging", missed=30),
        pb.NodeStatus(node="node-2", state="left", missed=90),
    ]
    status = pb.StatusReply(phase="training", round=100, nodes=nodes)
    assert [f.text for f in doctor.lagging(Evidence(status=status))] == [
        "behind the others and not waited for: node-1",
        "node-1 was not counted in 30 of 100 rounds",
    ]
    events = [event for _, event in of_the_coordinator()]
    assert not list(doctor.lagging(by_coordinator(*events[:-2]))), "once is nothing"  # type: ignore[arg-type]
    many = [
        event
        for index in range(4)
        for event in (
            of_coordinator.RoundOpened(index, 1, NODES, (), 1.0, ""),
            of_coordinator.RoundCommitted(index, 1, NODES[: 1 + index % 2], (), "", 1.0, 0.0, 9),
        )
    ]
    assert only(doctor.lagging, by_coordinator(*many)).text == "node-1 was not counted in 2 of 4 rounds"


def test_who_comes_and_goes() -> None:
    gone = of_coordinator.NodeLeft("node-1", "lagoon", "no heartbeat for 15 s", False)
    other = of_coordinator.NodeLeft("node-1", "lagoon", "connection reset", False)
    cleanly = of_coordinator.NodeLeft("node-0", "reef", "interrupted", True)
    finding = only(doctor.absences, by_coordinator(gone, cleanly, other, gone))
    assert finding.level == "bad"
    assert finding.text == "node-1 was cut off 3 times, 2 times because: no heartbeat for 15 s"
    assert only(doctor.absences, by_coordinator(gone)).level == "warn"
    load = of_coordinator.CatchUpPlanned("node-2", "load", 7, 1000, "")
    assert "loaded a snapshot 3 times" in only(doctor.absences, by_coordinator(load, load, load)).text


def test_who_abstains() -> None:
    evidence = told(*(("node-1", of_node.Abstained(index, "not finite")) for index in range(2)))
    assert only(doctor.abstentions, evidence).text == "node-1 contributed nothing to 2 rounds: not finite"
    status = pb.StatusReply(nodes=[pb.NodeStatus(node="node-1", abstained=4)])
    assert "4 rounds: its own log" in only(doctor.abstentions, Evidence(status=status)).text


def kinds() -> Sequence[str]:
    return [value for name, value in vars(refusal).items() if name.isupper() and isinstance(value, str)]


@pytest.mark.parametrize("kind", kinds())
def test_refusals_have_words_and_advice(kind: str) -> None:
    findings = list(doctor.refusals(Evidence(status=pb.StatusReply(counters={kind: 2}))))
    for finding in findings:
        assert finding.level != "ok" and finding.advice and f"{kind}, 2 times" in finding.text
    assert len(findings) == (kind not in doctor._HARMLESS)


def journal(**values: object) -> Evidence:
    facts = {"folder": Path("j"), "free": 10**9, "used": 10**8, **values}
    return Evidence(journals=[JournalFacts(**facts)])  # type: ignore[arg-type]


def test_disks() -> None:
    assert only(doctor.disk, journal()) == Finding("ok", "j takes 100 MB, 1 GB free")
    assert only(doctor.disk, journal(free=2 * 10**7)).level == "warn"
    full = only(doctor.disk, journal(free=10**6))
    assert full.level == "bad" and "1 MB free, the journal takes 100 MB" in full.text and full.advice
    texts = [f.text for f in doctor.disk(journal(lost=(4, 7), skips=((10, 12),)))]
    assert texts[1:] == [
        "2 results in j were damaged, last of round 8",
        "rounds 11 to 12 are not in j: the nodes were ahead of it",
    ]
    events = told(
        ("coordinator", of_coordinator.JournalTrouble("mended")),
        ("coordinator", of_coordinator.JournalTrouble("full", fatal=True)),
        ("node-0", EventsLost(4)),
    )
    assert [f.level for f in doctor.disk(events)] == ["warn", "bad", "warn"]


def test_logs_of_different_runs_and_models() -> None:
    def started(run: str, parameters: int) -> of_node.Started:
        return of_node.Started(run, "signum", parameters, 1, "cpu", 1, 0)

    two = told(("a", started("r", 5)), ("b", started("s", 5)))
    assert only(doctor.versions, two).text == "the logs are of different runs: r (signum); s (signum)"
    sizes = told(("a", started("r", 5)), ("b", started("r", 6000)))
    assert only(doctor.versions, sizes).text == "the nodes' models differ in size: 5, 6,000 parameters"
    assert not list(doctor.versions(told(("a", started("r", 5)), ("b", started("r", 5)))))


def test_where_the_run_stands() -> None:
    def level(phase: str) -> str:
        return only(doctor.progress, Evidence(status=pb.StatusReply(phase=phase))).level

    assert [level(phase) for phase in ("training", "done", "gathering", "failed")] == [
        "ok",
        "ok",
        "warn",
        "bad",
    ]
    stopped = of_coordinator.CoordinatorStopped("suspended", "SIGTERM", 8)
    finding = only(doctor.progress, by_coordinator(stopped))
    assert (finding.level, "suspended after 8 rounds: SIGTERM" in finding.text) == ("warn", True)


def test_the_worst_comes_first_and_checks_can_be_added() -> None:
    def network(evidence: Evidence) -> Iterator[Finding]:
        yield Finding("bad", "the port is closed", "open it")

    found = examine(Evidence(status=GOOD), [*CHECKS, network])
    assert found[0].text == "the port is closed" and found[-1].level == "ok"


def make_journal(folder: Path, rounds: int = 2, version: int = FORMAT) -> Path:
    folder.mkdir()
    tables = Tables(folder / DATABASE)
    tables.create({"format": str(version), "run": "ab", "tables": "cd"})
    with tables.transaction(durable=False):
        tables.begin(StartRecord(0, "ab", 0, "data", 1000))
        tables.put_roster(RosterRecord(1, (), 0))
        for index in range(rounds):
            record = RoundRecord(
                index,
                1,
                ("node-0",),
                (1,),
                0,
                64,
                "ef",
                "the only contribution is in",
                (math.nan,),
                (("node-0", 4 * index, 4),),
                4 * index + 4,
                (),
                BEGIN + index,
            )
            tables.put_round(record, Place(0, 100 * index, 64))
        tables.lose([0])
        tables.put_skip(5, 6, 100)
    tables.close()
    return folder


def test_a_journal_is_read_without_being_used(tmp_path: Path) -> None:
    folder = make_journal(tmp_path / "journal")
    before = (folder / DATABASE).read_bytes()
    facts = journal_facts(folder)
    assert [record.round for record in facts.rounds] == [0, 1]
    assert (facts.lost, facts.skips, facts.kept, facts.ended) == ((0,), ((5, 6),), ((1, 2),), False)
    assert facts.used >= len(before) and facts.free > 0
    assert (folder / DATABASE).read_bytes() == before
    text = only(doctor.progress, Evidence(journals=[facts])).text
    assert (
        text
        == "the journal holds 2 rounds, the run can go on from there; the last: the only contribution is in"
    )


def test_folders_that_are_no_journal(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no journal of a coordinator: there is no journal\.sqlite"):
        journal_facts(tmp_path)
    with pytest.raises(UserError, match=f"has format {FORMAT + 1}"):
        journal_facts(make_journal(tmp_path / "new", version=FORMAT + 1))
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / DATABASE).write_bytes(b"no database" * 100)
    result = runner.invoke(app, ["doctor", str(tmp_path / "bad")])
    assert result.exit_code == 17
    with pytest.raises(UserError, match="one run at a time"):
        gather(["atoll+insecure://x@a:1", "atoll+insecure://y@b:1"], lambda text: None)


def test_a_mistyped_invite_is_neither_an_invite_nor_a_file() -> None:
    result = runner.invoke(app, ["doctor", "atol://x@a:1"])
    assert result.exit_code == 12
    assert "'atol://x@a:1' is no invite (atoll://TOKEN@HOST:PORT/PIN" in result.output.replace("\n", " ")


def test_the_command_on_logs_and_a_journal(tmp_path: Path) -> None:
    logs = [
        write(tmp_path / "coordinator.jsonl", "coordinator", of_the_coordinator()),
        write(tmp_path / "lagoon.jsonl", "lagoon", of_a_node()),
    ]
    sources = [*map(str, logs), str(make_journal(tmp_path / "journal"))]
    result = runner.invoke(app, ["doctor", *sources])
    assert result.exit_code == 0, result.output
    assert "warn node-1 was cut off once, once because: no heartbeat for 15 s\n     missing" in result.output
    assert (
        "ok   all digests of 3 rounds" not in result.output
        and "ok   all digests of 2 rounds" in result.output
    )
    with logs[1].open("a") as file:
        file.write(logs[1].read_text().splitlines()[3].replace('"digest": "0', '"digest": "f') + "\n")
    found = json.loads(runner.invoke(app, ["doctor", *sources, "--json"]).output)
    assert found[0]["level"] == "bad" and found[0]["text"].startswith("the first difference")
    result = runner.invoke(app, ["doctor", *sources])
    assert result.exit_code == 1 and result.output.startswith("bad  the first difference")
    assert "atoll doctor journal coordinator.jsonl" in runner.invoke(app, ["doctor", "--help"]).output


def test_the_command_on_a_running_coordinator() -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    handler = grpc.unary_unary_rpc_method_handler(
        lambda request, context: pb.StatusReply(
            phase="gathering", reason="1 of 3 nodes", counters={"late": 3}
        ),
        request_deserializer=pb.StatusRequest.FromString,
        response_serializer=pb.StatusReply.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(CONTROL_SERVICE, {"GetStatus": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        result = runner.invoke(app, ["doctor", "--offline", f"atoll+insecure://token@127.0.0.1:{port}"])
    finally:
        server.stop(None).wait(5)
    assert result.exit_code == 0, result.output
    assert "warn gathering, 0 of 0 rounds: 1 of 3 nodes" in result.output
    assert "warn contributions came after their round was closed (late, 3 times)" in result.output
