"""The command line of `atoll throttle`, on a machine that is made up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deploy import throttle_command
from deploy.cli import app
from deploy.links.kernel import Kernel
from tests.deploy.links.machine_rig import FakeDelays, Machine

ROOT = Path(__file__).parents[2]
cli = CliRunner()


@pytest.fixture
def delays() -> FakeDelays:
    return FakeDelays()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, delays: FakeDelays) -> Machine:
    """All commands go to a machine that is made up."""
    made_up = Machine()
    monkeypatch.setattr(throttle_command, "_means", lambda: {"run": made_up, "delays": delays})
    return made_up


def throttle(*words: str, code: int = 0) -> str:
    result = cli.invoke(app, ["throttle", *words])
    assert result.exit_code == code, result.output
    return result.output


def test_set_show_and_clear(machine: Machine) -> None:
    said = throttle(
        "set", "--interface", "eth1", "--rate", "100mbit", "--delay", "40ms", "--direction", "out"
    )
    assert "eth1: out: 100 Mbit/s, 40 ms delay; in: not shaped; 'atoll throttle clear' undoes it" in said
    said = throttle("set", "--subnet", "10.90.0.0/24", "--rate", "1gbit", "--direction", "in")
    assert "replaced what was set on eth1" in said  # and what goes out is still as it was
    assert throttle("show").strip() == "eth1: out: 100 Mbit/s, 40 ms delay; in: 1 Gbit/s"
    (link,) = json.loads(throttle("show", "--json"))["links"]
    assert link["interface"] == "eth1" and link["kept"] and link["holder"] is None and not link["left_over"]
    assert link["out"] == {"rate": 100_000_000, "delay": 0.04, "jitter": 0.0, "loss": 0.0}
    assert link["in"]["rate"] == 10**9
    assert "eth1: cleared; it was out: 100 Mbit/s" in throttle("clear", "--interface", "eth1")
    assert machine.bare
    assert "nothing of ours was set" in throttle("clear", "-i", "eth1")
    assert throttle("show").strip() == "no interface is shaped"
    assert throttle("show", "-i", "eth1").strip() == "eth1: not shaped"


def test_print_tells_the_commands_and_runs_none(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.links.dry.probe_apart", lambda: Kernel())
    said = throttle(
        "set", "-i", "eth1", "--rate", "8mbit", "--delay", "20ms", "--direction", "out", "--print"
    )
    assert said.splitlines() == [
        "tc qdisc add dev eth1 root handle a712: netem limit 1046 delay 20000us",
        "tc qdisc add dev eth1 parent a712:1 handle a713: tbf rate 8000000bit burst 4542 latency 50ms",
    ]
    assert machine.bare and not machine.ran


def test_run_holds_the_shape_until_its_command_ends(machine: Machine, tmp_path: Path) -> None:
    end = [sys.executable, "-c", "raise SystemExit(7)"]
    said = throttle("run", "-i", "eth1", "--rate", "1mbit", "--", *end, code=7)
    assert f"eth1: 1 Mbit/s both ways, until {sys.executable} ends" in said
    assert machine.ran and machine.bare


def test_run_ends_when_its_time_is_up(machine: Machine) -> None:
    assert "for 10ms" in throttle("run", "-i", "eth1", "--rate", "1mbit", "--for", "10ms")
    assert machine.bare
    wait = [sys.executable, "-c", "import time; time.sleep(60)"]
    throttle("run", "-i", "eth1", "--rate", "1mbit", "--for", "10ms", "--", *wait)
    assert machine.bare


def test_named_links(machine: Machine, tmp_path: Path) -> None:
    file = tmp_path / "links.toml"
    file.write_text('[a]\ninterface = "eth0"\nrate = "1gbit"\n[b]\nsubnet = "10.90.0.0/24"\nloss = "1%"\n')
    throttle("set", "--links", str(file), "--link", "a", "--link", "b")
    assert throttle("show").splitlines() == ["eth0: 1 Gbit/s both ways", "eth1: 1 % loss both ways"]
    assert "leave the other options out" in throttle(
        "set", "--links", str(file), "--link", "a", "--rate", "1mbit", code=12
    )
    throttle("clear", "--links", str(file), "--link", "a", "--link", "b")
    assert machine.bare


def test_show_says_when_the_process_that_delays_is_gone(machine: Machine, delays: FakeDelays) -> None:
    machine.lacks.add("netem")
    said = throttle("set", "-i", "eth1", "--rate", "1gbit", "--delay", "20ms")
    assert "no netem in this kernel: delay, jitter and loss of eth1 by NFQUEUE (real time)" in said
    assert throttle("show").strip() == "eth1: 1 Gbit/s, 20 ms delay both ways"
    delays.kill()
    assert throttle("show").startswith("eth1: 1 Gbit/s both ways; the process that delays packets is gone")
    throttle("clear", "-i", "eth1")
    assert machine.bare


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["set", "--rate", "1gbit"], "name the one interface to shape: --interface NAME"),
        (["set", "-i", "eth0", "--subnet", "10.90.0.0/24", "--rate", "1gbit"], "name the one interface"),
        (["set", "-i", "all", "--rate", "1gbit"], "no shaping of all interfaces"),
        (["set", "-i", "eth9", "--rate", "1gbit"], "there is no interface 'eth9'; there are lo, eth0, eth1"),
        (["set", "-i", "eth0"], "nothing to set; give a rate"),
        (["set", "-i", "eth0", "--rate", "quick"], "'quick' is not a rate"),
        (["set", "-i", "eth0", "--rate", "1gbit", "--direction", "up"], "it may be out, in, both"),
        (["run", "-i", "eth0", "--rate", "1gbit", "--for", "soon"], "'soon' is not a duration"),
        (["clear"], "name the one interface"),
        (["clear", "--link", "a", "--links", "nowhere.toml"], "nowhere.toml: no such file"),
    ],
)
def test_errors_are_words(machine: Machine, words: list[str], said: str) -> None:
    assert said in throttle(*words, code=12)
    assert not machine.ran


def test_a_command_that_is_not_there_leaves_nothing(machine: Machine) -> None:
    assert "atoll-no-such-command" in throttle(
        "run", "-i", "eth1", "--rate", "1mbit", "--", "atoll-no-such-command", code=13
    )
    assert machine.bare


def test_without_the_tools_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert "ip -j link show: not found" in throttle("set", "-i", "eth0", "--rate", "1gbit", code=12)


def test_throttle_does_without_torch() -> None:
    code = (
        "import sys\nfrom deploy.cli import main\n"
        "sys.argv = ['atoll', 'throttle', 'set', '-i', 'atoll-none', '--rate', '1gbit']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "assert 'deploy.links.shaping' in sys.modules\n"
        "assert not {'torch', 'grpc', 'numpy'} & set(sys.modules), 'heavy'"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "no interface" in done.stderr or "not found" in done.stderr
