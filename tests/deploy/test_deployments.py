"""What people deploy with: compose files, the container's entrypoint, Kubernetes, systemd and Slurm files."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from protos.runfile import RunFile

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
SCRIPTS = [DEPLOY / "docker" / "entrypoint.sh", *sorted((DEPLOY / "slurm").glob("*.sbatch"))]
MANIFESTS = [
    path for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")) if path.name != "kustomization.yaml"
]
OVERLAYS = [[], ["compose.gpu.yml"], ["compose.swarm.yml"]]


def run(*words: str | Path, **options: Any) -> str:
    """What a command prints; fails with what it says."""
    done = subprocess.run(
        [*map(str, words)], capture_output=True, text=True, timeout=120, cwd=ROOT, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def needs(*words: str) -> pytest.MarkDecorator:
    """Skip a test where a command is missing."""
    there = shutil.which(words[0]) is not None
    if there and len(words) > 1:
        there = subprocess.run(words, capture_output=True, timeout=60).returncode == 0
    return pytest.mark.skipif(not there, reason=f"'{' '.join(words)}' is not there")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_shell(script: Path) -> None:
    run("sh" if script.suffix == ".sh" else "bash", "-n", script)
    assert os.access(script, os.X_OK) or script.suffix == ".sbatch"


@needs("shellcheck")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_have_no_known_faults(script: Path) -> None:
    run("shellcheck", script)


class Container:
    """The entrypoint with an `atoll` that tells how it was called."""

    def __init__(self, folder: Path) -> None:
        self.shared = folder / "shared"
        self.shared.mkdir()
        (folder / "bin").mkdir()
        atoll = folder / "bin" / "atoll"
        # `atoll run init` is the real one, `coordinator` and `join` are not.
        atoll.write_text(
            f'#!/bin/sh\n[ "$1" != run ] || exec {sys.executable} -m atoll "$@"\nprintf "%s\\n" "$@"\n'
        )
        python = folder / "bin" / "python"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        for script in (atoll, python):
            script.chmod(0o755)
        (folder / "entrypoint.sh").write_text(
            SCRIPTS[0].read_text().replace("/tmp/run.toml", f"{folder}/run.toml")
        )
        self._folder = folder

    def __call__(self, *words: str, **environment: str) -> list[str]:
        path = f"{self._folder / 'bin'}:{os.environ['PATH']}"
        return run(
            "sh", self._folder / "entrypoint.sh", *words,
            env={"PATH": path, "PYTHONPATH": str(ROOT), "NUMBA_CACHE_DIR": str(self._folder),
                 "ATOLL_SHARED": str(self.shared), **environment},
        ).splitlines()  # fmt: skip

    @property
    def runfile(self) -> RunFile:
        """The run file that the coordinator's container has written."""
        return RunFile.load(self._folder / "run.toml")


@pytest.fixture
def container(tmp_path: Path) -> Container:
    return Container(tmp_path)


def test_a_coordinators_container(container: Container) -> None:
    (container.shared / "invite").write_text("of a coordinator that was killed")
    called = container(
        "coordinator", "--stay", "--metrics", "0.0.0.0:9464",
        RUN="reef", METHOD="muloco-1bit", NODES="5", ROUNDS="", MODEL="llama", SEED="7", BATCH="2",
        TRANSPORT="direct", SETTINGS="model.d_model=32  method.local_steps=4",
    )  # fmt: skip
    made = container.runfile
    assert (made.run.name, made.run.nodes, made.run.seed, made.data.batch) == ("reef", 5, 7, 2)
    assert (made.method.name, made.method.local_steps, made.model.d_model) == ("muloco-1bit", 4, 32)
    assert (made.run.rounds, made.exchange.transport) == (128, "direct")
    run_id = (container.shared / "run").read_text().strip()
    assert made.digest.startswith(run_id) and len(run_id) == 16
    assert not (container.shared / "invite").exists()
    assert called[0] == "coordinator" and called[-3:] == ["--stay", "--metrics", "0.0.0.0:9464"]
    assert called[called.index("--journal") + 1] == f"/var/lib/atoll/{run_id}.journal"
    assert called[called.index("--invite-file") + 1] == str(container.shared / "invite")

    container("coordinator", RUN="reef", METHOD="signum")  # other values are another run
    assert (container.shared / "run").read_text().strip() != run_id


def test_a_nodes_container(container: Container) -> None:
    (container.shared / "run").write_text("0123456789abcdef\n")
    called = container(
        "node", "--metrics", "0.0.0.0:9465", NODE_NAME="site-a", RANKS="2", KEEP="yes", THREADS="1"
    )
    assert called[:2] == ["join", f"@{container.shared}/invite"]
    for option, value in (("--name", "site-a"), ("--nproc", "2"), ("--threads", "1"), ("--device", "auto")):
        assert called[called.index(option) + 1] == value
    folder = "/var/lib/atoll/0123456789abcdef"
    assert called[called.index("--save") + 1] == called[called.index("--resume") + 1] == folder
    volunteer = container("node")
    assert "--save" not in volunteer and "--name" not in volunteer


def test_any_other_command_runs_as_it_is(container: Container) -> None:
    assert container("echo", "a  b") == ["a  b"]


def environment() -> dict[str, str]:
    """A shell in which nothing that .env holds is set otherwise."""
    names = re.findall(r"^([A-Z_]+)=", (ROOT / ".env").read_text(), re.MULTILINE)
    return {key: value for key, value in os.environ.items() if key not in names}


@needs("docker", "compose", "version")
@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda files: "+".join(files) or "base")
def test_compose_files_are_valid(overlay: list[str]) -> None:
    files = [word for name in ["docker-compose.yml", *overlay] for word in ("-f", name)]
    printed = run("docker", "compose", *files, "--profile", "*", "config", env=environment())
    services = yaml.safe_load(printed)["services"]
    ours = {name: service for name, service in services.items() if service["image"].startswith("atoll:")}
    assert set(services) - set(ours) == {"prometheus", "grafana"}
    assert len({service["image"] for service in ours.values()}) == 1
    for name, service in services.items():
        assert service["read_only"] and service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        shapes = name.startswith("link-")
        assert service.get("cap_add", []) == (["NET_ADMIN", "SYS_NICE"] if shapes else []), name
        assert service.get("user") == ("root" if shapes else None), name
        for port in service.get("ports", ()):
            assert port["host_ip"] == "127.0.0.1", name
    for site in ("a", "b", "c"):
        assert services[f"site-{site}"]["network_mode"] == f"service:link-{site}"
        assert set(services[f"link-{site}"]["networks"]) == {"wan", f"site-{site}"}
        assert "wan" not in services["prometheus"]["networks"]


@needs("docker", "compose", "version")
def test_links_follow_the_environment() -> None:
    printed = run(
        "docker", "compose", "config", env={**environment(), "LINK_RATE": "100mbit", "SITE_B_RATE": "1gbit"}
    )
    services = yaml.safe_load(printed)["services"]
    rates = {name: services[name]["command"][4] for name in ("link-a", "link-b", "link-c")}
    assert rates == {"link-a": "--rate=100mbit", "link-b": "--rate=1gbit", "link-c": "--rate=100mbit"}


def test_the_image_leaves_nothing_out_that_the_package_needs() -> None:
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert {
        "protos",
        "optim",
        "coordinator",
        "node",
        "deploy",
        "atoll",
        "pyproject.toml",
        "constraints.txt",
    } <= {*kept}
    assert all((ROOT / name).exists() for name in kept)


def test_the_run_of_kubernetes_is_one() -> None:
    assert RunFile.load(DEPLOY / "kubernetes" / "run.toml").run.nodes == sum(
        manifest.read_text().count("kind: Job\n") for manifest in MANIFESTS
    )


def test_kubernetes_runs_unprivileged_pods_with_metrics_and_a_place_for_their_state() -> None:
    found = [thing for path in MANIFESTS for thing in yaml.safe_load_all(path.read_text())]
    pods = {f"{thing['kind']} {thing['metadata']['name']}": thing["spec"]["template"] for thing in found
            if "template" in thing.get("spec", {})}  # fmt: skip
    assert set(pods) == {"StatefulSet coordinator", "Job island-a", "Job island-b", "Deployment volunteer"}
    for name, pod in pods.items():
        assert pod["metadata"]["annotations"]["prometheus.io/scrape"] == "true", name
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True, name
        for each in pod["spec"]["containers"]:
            assert each["securityContext"]["readOnlyRootFilesystem"] is True, name
            assert each["securityContext"]["capabilities"] == {"drop": ["ALL"]}, name


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.name)
def test_kubernetes_manifests_follow_the_schemas(manifest: Path) -> None:
    pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate (110 MB of schemas) is not installed"
    )
    run(sys.executable, "-m", "kubernetes_validate", "--strict", manifest)


@needs("kubectl", "version", "--client")
def test_kustomize_builds() -> None:
    built = list(yaml.safe_load_all(run("kubectl", "kustomize", DEPLOY / "kubernetes")))
    config = next(thing for thing in built if thing["kind"] == "ConfigMap")
    mounted = next(thing for thing in built if thing["kind"] == "StatefulSet")["spec"]["template"]["spec"][
        "volumes"
    ]
    assert {"name": "run", "configMap": {"name": config["metadata"]["name"]}} in mounted


@needs("systemd-analyze")
def test_the_volunteers_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "systemd" / "atoll-volunteer.service").read_text()
    assert "DynamicUser=yes" in text and "ProtectSystem=strict" in text
    unit = tmp_path / "atoll-volunteer.service"
    unit.write_text(text.replace("/opt/atoll/bin/atoll", "/bin/true"))
    said = run("systemd-analyze", "verify", unit)
    assert said.strip() == ""
    exposure = run("systemd-analyze", "security", "--offline=true", unit)
    level = re.search(r"Overall exposure level for \S+ ([0-9.]+)", exposure)
    assert level is not None and float(level.group(1)) < 2.5
