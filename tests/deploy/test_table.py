from __future__ import annotations

import json
import math

from rich.console import Console, RenderableType

from deploy.status import plain
from deploy.table import MISSING, number, percent, progress_line, roster_table, status_view
from protos import atoll_pb2 as pb
from protos.address import peer


def _reply() -> pb.StatusReply:
    return pb.StatusReply(
        run="shakespeare",
        run_digest="ab" * 32,
        method="sign-muon",
        phase="training",
        reason="3 of 3 nodes",
        round=40,
        rounds=200,
        epoch=1,
        parameters=117_056,
        payload_bytes=14_656,
        result_bytes=14_656,
        bytes_in=1_800_000,
        bytes_out=1_790_000,
        agreement=0.8125,
        seconds=20.0,
        state_digest="0123456789abcdef0123456789abcdef",
        nodes=[
            pb.NodeStatus(
                node="node-0",
                name="reef [bold]",
                state="active",
                round=39,
                loss=2.345,
                bytes_up=600_000,
                bytes_down=590_000,
                agreement=0.8,
                missed=1,
                compute_share=0.875,
                address="192.0.2.7:51000",
            ),
            pb.NodeStatus(
                node="node-1",
                name="cay",
                state="joining",
                loss=math.nan,
                agreement=math.nan,
                compute_share=math.nan,
                address="[2001:db8::7]:51000",
            ),
        ],
        curve=[
            pb.Curve(
                round=38, loss=2.4, validation_loss=2.5, bits_per_byte=3.607, agreement=0.8, tokens=39_936
            ),
            pb.Curve(round=39, loss=2.35, validation_loss=math.nan, bits_per_byte=math.nan, agreement=0.8),
        ],
        counters={"late": 2, "truncated": 1},
    )


def _text(view: RenderableType, width: int = 160) -> str:
    console = Console(width=width, no_color=True, color_system=None)
    with console.capture() as capture:
        console.print(view)
    return capture.get()


def test_the_view_names_what_matters() -> None:
    text = _text(status_view(_reply()))
    for expected in (
        "shakespeare  sign-muon  abababababab",
        "training  3 of 3 nodes",
        "40 of 200 committed, epoch 1",
        "2.350 nats per token",
        "2.500 nats, 3.607 bits per byte (round 39)",
        "14.7 kB each way (1.002 bits a parameter), 117,056 parameters",
        "1.8 MB in, 1.79 MB out",
        "20 s, 2.00 rounds/s",
        "81.2 %",
        "0123456789abcdef0123456789abcdef",
        "192.0.2.7:51000",
        "[2001:db8::7]:51000",
        "87.5 %",
    ):
        assert expected in text, expected
    assert [line.split() for line in text.splitlines() if "late" in line] == [["late", "2"]]


def test_a_method_without_votes_shows_no_agreement_and_its_ways() -> None:
    reply = _reply()
    reply.agreement, reply.result_bytes = math.nan, 29_264
    for node in reply.nodes:
        node.agreement = math.nan
    text = _text(status_view(reply))
    assert "14.7 kB up, 29.3 kB down (1.002 and 2.000 bits a parameter), 117,056 parameters" in text
    assert "agreement" not in text and "agreement" not in progress_line(reply)
    assert "in 1.8 MB out 1.79 MB" in progress_line(reply)


def test_the_ranks_of_nodes_are_shown_where_one_has_several() -> None:
    reply = _reply()
    assert "ranks" not in _text(roster_table(reply.nodes))
    reply.nodes[1].ranks = 8
    for width in (160, 80):
        lines = [line.split() for line in _text(roster_table(reply.nodes), width).splitlines()]
        header = next(line for line in lines if "ranks" in line)
        rows = {line[0]: line for line in reversed(lines) if line and line[0].startswith("node-")}
        assert rows["node-1"][header.index("ranks")] == "8"
        assert rows["node-0"][header.index("ranks") + 1] == "1"  # its name has two words


def test_names_from_nodes_are_not_markup() -> None:
    assert "reef [bold]" in _text(roster_table(_reply().nodes))


def test_in_80_columns_the_roster_is_two_tables_with_every_value() -> None:
    wide, narrow = (_text(status_view(_reply()), width).splitlines() for width in (160, 80))
    assert sum("node-0" in line for line in wide) == 1
    rows = [line for line in narrow if "node-0" in line]
    assert [row.split() for row in rows] == [
        ["node-0", "reef", "[bold]", "active", "40", "2.345", "80.0", "%", "87.5", "%"],
        ["node-0", "192.0.2.7:51000", "600", "kB", "590", "kB", "1", "0"],
    ]
    assert max(map(len, narrow)) <= 80


def test_a_node_without_a_report_shows_dashes() -> None:
    row = next(line for line in _text(roster_table(_reply().nodes)).splitlines() if "node-1" in line)
    assert row.count(MISSING) == 4


def test_an_empty_status_renders() -> None:
    text = _text(status_view(pb.StatusReply(phase="gathering", reason="0 of 3 nodes")))
    assert "gathering  0 of 3 nodes" in text
    assert "nan" not in text and "refused" not in text
    assert progress_line(pb.StatusReply(phase="gathering")).startswith("gathering round 0/0 nodes 0")


def test_the_line_for_pipes() -> None:
    line = progress_line(_reply())
    assert line.startswith("training round 40/200 nodes 2 loss 2.350 validation 2.500 (3.607 bits/byte)")
    assert "\n" not in line


def test_nodes_that_have_left_are_not_counted() -> None:
    reply = _reply()
    reply.nodes[1].state = "left"
    assert " nodes 1 " in progress_line(reply)


def test_peers_as_grpc_names_them() -> None:
    assert peer("ipv4:192.0.2.7:5000") == "192.0.2.7:5000"
    assert peer("ipv6:%5B2001:db8::7%5D:5000") == "[2001:db8::7]:5000"
    assert peer("unix:/run/atoll") == "unix:/run/atoll"
    assert peer("[2001:db8::7]:5000") == "[2001:db8::7]:5000"


def test_numbers() -> None:
    assert number(math.nan) == number(math.inf) == MISSING
    assert number(1.23456) == "1.235" and number(1.5, 1) == "1.5"
    assert percent(0.5) == "50.0 %" and percent(math.nan) == MISSING


def test_json_holds_every_field_as_plain_values() -> None:
    values = json.loads(json.dumps(plain(_reply()), allow_nan=False))
    assert set(values) == {field.name for field in pb.StatusReply.DESCRIPTOR.fields}
    assert values["round"] == 40 and values["bytes_in"] == 1_800_000
    assert values["counters"] == {"late": 2, "truncated": 1}
    assert values["nodes"][0]["name"] == "reef [bold]" and values["nodes"][1]["loss"] is None
    assert values["curve"][0]["validation_loss"] == 2.5
    assert values["curve"][1]["validation_loss"] is None
