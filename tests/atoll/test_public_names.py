"""The package's front: names that a training script needs, each loaded when it is first used."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import atoll

SOURCE = ast.parse(Path(atoll.__file__).read_text(encoding="utf-8"))


def test_type_checkers_see_the_same_names_at_the_same_homes() -> None:
    (block,) = (node for node in SOURCE.body if isinstance(node, ast.If))
    typed = {a.name: n.module for n in block.body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert typed == atoll._HOMES
    assert sorted(typed) == sorted(atoll.__all__) == sorted(dir(atoll))


@pytest.mark.parametrize("name", atoll.__all__)
def test_every_name_is_there(name: str) -> None:
    assert getattr(atoll, name) is getattr(import_module(atoll._HOMES[name]), name)


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="module 'atoll' has no attribute 'fully_sharded'"):
        _ = atoll.fully_sharded


def test_importing_it_loads_no_torch() -> None:
    code = "import sys, atoll; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
