"""The generated code is what the compiler makes of atoll.proto today."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the command of `make proto` writes."""
    folder = tmp_path_factory.mktemp("generated")
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        "-I.",
        f"--python_out={folder}",
        f"--mypy_out={folder}",
    ]
    # protoc looks for its plugin on the PATH; it lies beside the interpreter.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    done = subprocess.run(
        [*command, "protos/atoll.proto"],
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder / "protos"


@pytest.mark.parametrize("name", ["atoll_pb2.py", "atoll_pb2.pyi"])
def test_generating_again_changes_nothing(generated: Path, name: str) -> None:
    assert (generated / name).read_text() == (ROOT / "protos" / name).read_text(), (
        "run `make proto` and commit"
    )


def test_the_runtime_that_is_asked_for_is_not_older_than_the_compiler() -> None:
    compiler = (
        (ROOT / "protos" / "atoll_pb2.py").read_text().split("# Protobuf Python Version: ")[1].split("\n")[0]
    )
    assert f'"protobuf>={compiler},<8"' in (ROOT / "pyproject.toml").read_text()
