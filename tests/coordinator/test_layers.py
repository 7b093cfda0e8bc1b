"""Packages import one way, decisions stay free of networks and clocks, and nothing is unpickled."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import coordinator

ROOT = Path(coordinator.__file__).parent.parent
MODULES = sorted(Path(coordinator.__file__).parent.glob("*.py"))
BELOW = {  # what a package may import beside itself
    "protos": set[str](),
    "optim": {"protos"},
    "coordinator": {"protos", "optim"},
    "node": {"protos", "optim"},
    "deploy": {"protos", "optim", "coordinator", "node"},
    "atoll": {"protos", "optim", "coordinator", "node", "deploy"},
    "bench": {"protos", "optim", "coordinator", "node", "deploy"},
}
PURE = (
    "arrivals",
    "audit",
    "ballots",
    "events",
    "journal",
    "ramp",
    "retally",
    "ranges",
    "rounds",
    "roster",
    "leases",
    "digests",
    "admission",
    "catchup",
    "contribution",
    "manifest",
    "member",
    "nonces",
    "overdue",
    "shares",
    "start",
    "suspicion",
    "tokens",
    "topology",
)


def imports(path: Path) -> set[str]:
    """Top-level names of everything a module imports, with the modules of this package in full."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


@pytest.mark.parametrize("name", PURE)
def test_pure_modules(name: str) -> None:
    path = Path(coordinator.__file__).parent / f"{name}.py"
    banned = {"grpc", "asyncio", "time", "socket", "threading", "random"}
    assert not {module.split(".")[0] for module in imports(path)} & banned
    inner = {module.split(".")[1] for module in imports(path) if module.startswith("coordinator.")}
    assert inner <= set(PURE)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_layers(path: Path) -> None:
    found = {module.split(".")[0] for module in imports(path)}
    assert not found & {"pickle", "marshal", "shelve", "torch", "node", "deploy"}
    if path.stem not in ("server", "calls", "dialing"):
        assert "grpc" not in found


@pytest.mark.parametrize("package", BELOW)
def test_packages(package: str) -> None:
    paths = sorted((ROOT / package).rglob("*.py"))
    assert paths
    banned = {"pickle", "marshal", "shelve", *BELOW} - BELOW[package] - {package}
    if package == "optim":
        banned |= {"grpc", "asyncio", "socket"}
    for path in paths:
        found = {module.split(".")[0] for module in imports(path)}
        assert not found & banned, path
        assert "torch.load(" not in path.read_text(encoding="utf-8"), path
