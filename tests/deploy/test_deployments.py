"""What people deploy with: compose files, the container's entrypoint, Kubernetes, systemd and Slurm files."""

from __future__ import annotations

import os
import re
import shutil
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from protos.runfile import RunFile
from tests.waiting import DEADLINE

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
SCRIPTS = [
    DEPLOY / "docker" / "entrypoint.sh",
    DEPLOY / "docker" / "authority.sh",
    *sorted((DEPLOY / "slurm").glob("*.sbatch")),
]
MANIFESTS = [
    path for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")) if path.name != "kustomization.yaml"
]
CAPABILITIES = {
    "link": ["NET_ADMIN", "SYS_NICE"],
    "volunteer": ["NET_ADMIN", "SYS_NICE", "SETUID", "SETGID", "KILL"],  # which it gives up, once shaped
}
OVERLAYS = [[], ["compose.gpu.yml"], ["compose.swarm.yml"], ["compose.tls.yml"]]


def run(*words: str | Path, **options: Any) -> str:
    """What a command prints; fails with what it says."""
    done = subprocess.run(
        [*map(str, words)], capture_output=True, text=True, timeout=DEADLINE, cwd=ROOT, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def needs(*words: str) -> None:
    """Skip the test where a command is missing, or does not do what ``words`` ask it for."""
    there = shutil.which(words[0]) is not None
    if there and len(words) > 1:
        there = subprocess.run(words, capture_output=True, timeout=DEADLINE).returncode == 0
    if not there:
        pytest.skip(f"'{' '.join(words)}' is not there")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_shell(script: Path) -> None:
    run("sh" if script.suffix == ".sh" else "bash", "-n", script)
    assert os.access(script, os.X_OK) or script.suffix == ".sbatch"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_have_no_known_faults(script: Path) -> None:
    needs("shellcheck")
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
        for name in ("sleep", "setpriv"):
            (folder / "bin" / name).write_text(f'#!/bin/sh\nprintf "%s\\n" {name} "$@"\n')
        (folder / "bin" / "ip").write_text("#!/bin/sh\necho '7: eth1    inet 10.90.0.4/24 brd 10.90.0.255'\n")
        for script in (folder / "bin").iterdir():
            script.chmod(0o755)
        (folder / "entrypoint.sh").write_text(SCRIPTS[0].read_text().replace("/tmp/", f"{folder}/"))
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
        "coordinator", "--stay", "--metrics", "0.0.0.0:9464", OPTIONS="--tls-cert=c.pem --tls-key=k.pem",
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
    assert called[0] == "coordinator" and called[-5:] == [
        "--stay", "--metrics", "0.0.0.0:9464", "--tls-cert=c.pem", "--tls-key=k.pem"
    ]  # fmt: skip
    assert called[called.index("--journal") + 1] == f"/var/lib/atoll/{run_id}.journal"
    assert called[called.index("--invite-file") + 1] == str(container.shared / "invite")

    container("coordinator", RUN="reef", METHOD="signum")  # other values are another run
    assert (container.shared / "run").read_text().strip() != run_id


def test_a_nodes_container(container: Container) -> None:
    (container.shared / "run").write_text("0123456789abcdef\n")
    called = container(
        "node", "--metrics", "0.0.0.0:9465",
        NODE_NAME="site-a", RANKS="2", KEEP="yes", THREADS="1", WAN_SUBNET="10.90.0.0/24",
    )  # fmt: skip
    assert called[:2] == ["join", f"@{container.shared}/invite"]
    for option, value in (
        ("--name", "site-a"), ("--nproc", "2"), ("--threads", "1"), ("--device", "auto"),
        ("--swarm-listen", "10.90.0.4:0"),
    ):  # fmt: skip
        assert called[called.index(option) + 1] == value
    folder = "/var/lib/atoll/0123456789abcdef"
    assert called[called.index("--save") + 1] == called[called.index("--resume") + 1] == folder
    volunteer = container("node", OPTIONS="--tls-ca=ca.pem")
    assert not {"--save", "--name", "--swarm-listen"} & {*volunteer} and volunteer[-1] == "--tls-ca=ca.pem"


def test_a_links_container(container: Container) -> None:
    shaped = container("link", WAN_SUBNET="10.90.0.0/24", RATE="100mbit", DELAY="", LOSS="1%")
    assert shaped == [
        "throttle", "set", "--subnet", "10.90.0.0/24", "--rate", "100mbit", "--delay", "", "--loss", "1%",
        "sleep", "infinity",
    ]  # fmt: skip
    unlimited = container("link", WAN_SUBNET="10.90.0.0/24")  # which `atoll throttle set` would refuse
    assert unlimited == ["sleep", "infinity"]


def test_a_volunteers_container_shapes_its_link_and_gives_up_root(container: Container) -> None:
    called = container("volunteer", "--metrics", "0.0.0.0:9465", WAN_SUBNET="10.90.0.0/24", RATE="100mbit")
    assert called[:2] == ["throttle", "set"]
    assert called[called.index("setpriv") :] == [
        "setpriv", "--reuid", "atoll", "--regid", "atoll", "--clear-groups",
        "atoll-container", "node", "--metrics", "0.0.0.0:9465",
    ]  # fmt: skip


def test_an_authority_is_made_once(tmp_path: Path) -> None:
    needs("openssl")
    authority, coordinator, nodes = (tmp_path / name for name in ("authority", "coordinator", "nodes"))
    for folder in (authority, coordinator, nodes):
        folder.mkdir()
    make = ("sh", DEPLOY / "docker" / "authority.sh", authority, coordinator, nodes)
    run(*make)
    made = {path: path.read_bytes() for path in sorted(tmp_path.rglob("*.pem"))}
    assert all(path.stat().st_mode & 0o077 == 0 for path in made)
    authorities = ["-CAfile", authority / "ca.pem"]
    run("openssl", "verify", *authorities, "-purpose", "sslserver", "-verify_hostname", "coordinator",
        coordinator / "cert.pem")  # fmt: skip
    for folder in (coordinator, nodes):
        run("openssl", "verify", *authorities, "-purpose", "sslclient", folder / "cert.pem")
        assert made[folder / "ca.pem"] == made[authority / "ca.pem"]
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(folder / "cert.pem", folder / "key.pem")
    run(*make)
    assert {path: path.read_bytes() for path in sorted(tmp_path.rglob("*.pem"))} == made


def test_any_other_command_runs_as_it_is(container: Container) -> None:
    assert container("echo", "a  b") == ["a  b"]


def environment() -> dict[str, str]:
    """A shell in which nothing that .env holds is set otherwise."""
    names = re.findall(r"^([A-Z_]+)=", (ROOT / ".env").read_text(), re.MULTILINE)
    return {key: value for key, value in os.environ.items() if key not in names}


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda files: "+".join(files) or "base")
def test_compose_files_are_valid(overlay: list[str]) -> None:
    needs("docker", "compose", "version")
    files = [word for name in ["docker-compose.yml", *overlay] for word in ("-f", name)]
    printed = run("docker", "compose", *files, "--profile", "*", "config", env=environment())
    services = yaml.safe_load(printed)["services"]
    ours = {name: service for name, service in services.items() if service["image"].startswith("atoll:")}
    assert set(services) - set(ours) == {"prometheus", "grafana"}
    assert len({service["image"] for service in ours.values()}) == 1
    assert {service["pull_policy"] for service in ours.values()} == {"never"}, "no registry has it"
    for name, service in services.items():
        assert service["read_only"] and service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service.get("cap_add", []) == CAPABILITIES.get(name.split("-")[0], []), name
        assert service.get("user") == ("root" if "cap_add" in service else None), name
        for port in service.get("ports", ()):
            assert port["host_ip"] == "127.0.0.1", name
    for site in ("a", "b", "c"):
        assert services[f"site-{site}"]["network_mode"] == f"service:link-{site}"
        assert set(services[f"link-{site}"]["networks"]) == {"wan", f"site-{site}"}
        assert services["coordinator"]["network_mode"] == "service:link-hub"
    assert "wan" not in services["prometheus"]["networks"]


def test_links_follow_the_environment() -> None:
    needs("docker", "compose", "version")
    printed = run(
        "docker", "compose", "config", env={**environment(), "LINK_RATE": "100mbit", "SITE_B_RATE": "1gbit"}
    )
    services = yaml.safe_load(printed)["services"]
    rates = {
        name: entry["environment"]["RATE"]
        for name, entry in services.items()
        if "RATE" in entry.get("environment", {})
    }
    others = dict.fromkeys(("link-a", "link-c", "volunteer"), "100mbit")
    assert rates == {**others, "link-b": "1gbit", "link-hub": "10gbit"}


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


def test_kustomize_builds() -> None:
    needs("kubectl", "version", "--client")
    built = list(yaml.safe_load_all(run("kubectl", "kustomize", DEPLOY / "kubernetes")))
    config = next(thing for thing in built if thing["kind"] == "ConfigMap")
    mounted = next(thing for thing in built if thing["kind"] == "StatefulSet")["spec"]["template"]["spec"][
        "volumes"
    ]
    assert {"name": "run", "configMap": {"name": config["metadata"]["name"]}} in mounted


def test_the_volunteers_unit(tmp_path: Path) -> None:
    needs("systemd-analyze")
    text = (DEPLOY / "systemd" / "atoll-volunteer.service").read_text()
    assert "DynamicUser=yes" in text and "ProtectSystem=strict" in text
    unit = tmp_path / "atoll-volunteer.service"
    unit.write_text(text.replace("/opt/atoll/bin/atoll", "/bin/true"))
    said = run("systemd-analyze", "verify", unit)
    assert said.strip() == ""
    exposure = run("systemd-analyze", "security", "--offline=true", unit)
    level = re.search(r"Overall exposure level for \S+ ([0-9.]+)", exposure)
    assert level is not None and float(level.group(1)) < 2.5
