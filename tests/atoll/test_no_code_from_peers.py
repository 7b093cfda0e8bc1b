"""Nothing that a peer, a file or a run file brings is executed: a walk over the syntax of all packages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

import coordinator
from optim.local.torch_class import TorchInner
from protos.runfile import RunFile, RunFileError

ROOT: Final = Path(coordinator.__file__).parent.parent
PACKAGES: Final = ("atoll", "protos", "optim", "coordinator", "node", "deploy", "bench", "examples")

MODULES: Final = {  # that turn bytes into objects of any class, or run text as code
    *("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "jsonpickle"),
    *("yaml", "ruamel", "runpy", "code", "codeop", "imp", "zipimport", "pty", "multiprocessing"),
}
BUILTINS: Final = {"eval", "exec", "compile", "__import__"}
CALLS: Final = {  # by the last name of what is called
    *("load_module", "exec_module", "import_module", "read_pickle", "load_dataset", "set_trust_remote_code"),
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list", "popen", "system"),
}
LOADS: Final = {("torch", "load"), ("jit", "load"), ("hub", "load"), ("package", "PackageImporter")}

ALLOWED: Final = {  # what is found all the same, and why no peer can make use of it
    ("atoll/__init__.py", "import_module"): "names of a constant table of this package",
    ("optim/bits/backends.py", "import_module"): "names of a constant table of this package",
    ("node/tokenizer.py", "import_module"): "'tokenizers', an optional library, by a constant name",
    ("node/corpus.py", "import_module"): "'datasets', likewise",
    (
        "node/corpus.py",
        "load_dataset",
    ): "from version 4 on, which is required, it runs no scripts of datasets",
    ("node/hf.py", "import_module"): "'transformers', likewise",
    ("deploy/own_model.py", "exec_module"): "the user's own script, named on the command line",
    ("deploy/writers.py", "import_module"): "'wandb' and torch's TensorBoard writer, by constant names",
    ("deploy/compare_pool.py", "multiprocessing"): "this program's own worker processes, through a pipe",
    ("bench/__main__.py", "import_module"): "names of a constant table of this package",
    ("bench/faults.py", "import_module"): "places to stop a process under test, from its own parent",
}


def findings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of everything in a module that might execute what it is given."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
            if node.module == "importlib":
                continue  # import_module is found where it is called
        else:
            names = []
        for name in names:
            parts = name.split(".")
            # torch.distributed.elastic.multiprocessing starts processes, and only its errors are named
            if parts[0] in MODULES or parts[:2] == ["torch", "multiprocessing"]:
                yield node.lineno, parts[0] if parts[0] in MODULES else parts[1]
        if isinstance(node, ast.Call):
            yield from ((node.lineno, name) for name in _called(node))


def _called(call: ast.Call) -> Iterator[str]:
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    owner, name = "", ""
    if isinstance(call.func, ast.Name):
        name = call.func.id
        if name in BUILTINS:
            yield name
    elif isinstance(call.func, ast.Attribute):
        name, base = call.func.attr, call.func.value
        owner = (
            base.id if isinstance(base, ast.Name) else base.attr if isinstance(base, ast.Attribute) else ""
        )
        if owner == "builtins" and name in BUILTINS:
            yield name
    if name in CALLS:
        yield name
    if (owner, name) in LOADS:
        yield f"{owner}.{name}"
    if (owner, name) in (("np", "load"), ("numpy", "load")) and not _is(keywords.get("allow_pickle"), False):
        yield "numpy.load"
    if name in ("from_pretrained", "from_config") and not _is(keywords.get("trust_remote_code"), False):
        yield f"{name} without trust_remote_code=False"
    if "trust_remote_code" in keywords and not _is(keywords["trust_remote_code"], False):
        yield "trust_remote_code"
    if "shell" in keywords and not _is(keywords["shell"], False):
        yield "shell"


def _is(value: ast.expr | None, constant: object) -> bool:
    return isinstance(value, ast.Constant) and value.value is constant


def test_no_package_can_execute_what_a_peer_sends() -> None:
    found: set[tuple[str, str]] = set()
    lines: list[str] = []
    walked = 0
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            walked += 1
            place = path.relative_to(ROOT).as_posix()
            for line, name in findings(ast.parse(path.read_text(encoding="utf-8"), str(path))):
                if package == "bench" and name == "multiprocessing":
                    continue  # benches start processes of their own, by the dozen
                found.add((place, name))
                if (place, name) not in ALLOWED:
                    lines.append(f"{place}:{line}: {name}")
    assert walked > 300
    assert not lines, "\n".join(lines)
    assert found == set(ALLOWED)  # an entry that is not needed any more would hide what comes later


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "import os, marshal",
        "import torch.multiprocessing as mp",
        "torch.load(path)",
        "torch.load(path, weights_only=True)",
        "torch.jit.load(path)",
        "torch.hub.load(name)",
        "eval(text)",
        "builtins.exec(text)",
        "yaml = 1\nimport yaml",
        "np.load(path)",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=flag)",
        "AutoModel.from_pretrained(name)",
        "AutoModel.from_pretrained(name, trust_remote_code=given)",
        "build(trust_remote_code=True)",
        "subprocess.run(text, shell=True)",
        "os.system(text)",
        "dist.broadcast_object_list(x)",
        "importlib.import_module(name)",
    ],
)
def test_the_walk_finds(text: str) -> None:
    assert list(findings(ast.parse(text)))


@pytest.mark.parametrize(
    "text",
    [
        "np.load(path, allow_pickle=False)",
        "model.eval()",
        "re.compile(text)",
        "json.loads(text)",
        "AutoConfig.from_pretrained(where, trust_remote_code=False)",
        "safetensors.torch.load_file(path)",
    ],
)
def test_the_walk_lets_pass(text: str) -> None:
    assert not list(findings(ast.parse(text)))


@pytest.mark.parametrize("name", ["llama2", "torchvision:resnet", "file.py", "hf:", "module.Class", "llama "])
def test_a_run_file_names_no_code_as_its_model(name: str) -> None:
    with pytest.raises(RunFileError):
        RunFile.parse(f'[model]\nname = "{name}"')


@pytest.mark.parametrize("optimizer", ["torch:os.system", "builtins:eval", "torch:../x", "my.module:Class"])
def test_a_run_file_names_no_code_as_its_optimizer(optimizer: str) -> None:
    with pytest.raises(ValueError):  # the schema refuses it, or whoever looks the class up
        method = RunFile.parse(f'[method]\nname = "diloco"\nlr = 0.1\noptimizer = "{optimizer}"').method
        TorchInner([], method.optimizer.removeprefix("torch:"))


def test_datasets_are_required_in_a_version_that_runs_no_scripts() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'"datasets>=(\d+)', text)
    assert found is not None and int(found[1]) >= 4
