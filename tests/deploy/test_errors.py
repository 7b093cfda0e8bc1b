from __future__ import annotations

import errno
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

from deploy.errors import EXPECTED, UserError, exit_code, message
from deploy.exit_codes import CODES, OF_ERROR, OF_REFUSAL, markdown
from protos import refusal
from protos.invite import Invite, InviteError


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_every_expected_error_exists(name: str) -> None:
    module, _, kind = name.rpartition(".")
    assert issubclass(getattr(importlib.import_module(module), kind), Exception)


def test_expected_errors_and_their_subclasses_are_messages() -> None:
    class Special(UserError):
        pass

    assert message(Special("choose another")) == "choose another"
    with pytest.raises(InviteError) as caught:
        Invite.parse("")
    assert message(caught.value) == str(caught.value)


def test_the_system_says_what_and_where() -> None:
    assert message(FileNotFoundError(errno.ENOENT, "No such file or directory", "run.toml")) == (
        "run.toml: No such file or directory"
    )
    text = message(OSError(errno.EADDRINUSE, "Address already in use"))
    assert text is not None and "Address already in use" in text and "another port" in text


def test_a_missing_extra_names_the_package() -> None:
    error = ModuleNotFoundError("install atoll[hf]", name="transformers")
    assert message(error) == "the Python package 'transformers' is not installed: install atoll[hf]"


@pytest.mark.parametrize("error", [ValueError("x"), KeyError("x"), RuntimeError("x"), AssertionError()])
def test_a_defect_keeps_its_traceback(error: Exception) -> None:
    assert message(error) is None


PAGE = Path(__file__).parents[2] / "docs" / "errors.md"
# Not for users: caught within, or told as one of those with a code.
INTERNAL = {
    "coordinator.leases.LeaseError",
    "coordinator.segments.SegmentError",
    "node.exchange.tensor_bytes.LayoutError",
    "node.island.tensors.LayoutError",
    "node.island.storage.CheckpointError",
    "optim.packs.PayloadError",
    "optim.process_group.GroupReduceError",
    "protos.codecs.CodecError",
    "protos.wire.FrameError",
}


def test_the_page_is_that_of_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(), "python -m deploy.exit_codes > docs/errors.md"


def test_codes_are_told_apart_and_have_a_section_with_a_cure() -> None:
    assert len({one.code for one in CODES}) == len({one.name for one in CODES}) == len(CODES)
    assert all(1 <= one.code < 128 or one.code in (130, 143) for one in CODES)
    sections = dict(re.findall(r"^## (\S+)\n\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL))
    for one in CODES:
        assert one.cure in sections[one.name] and one.cure.endswith(".") and one.when.endswith(".")
    assert sum(len(one.errors) for one in CODES) == len(OF_ERROR), "an error has one code"
    assert sum(len(one.refusals) for one in CODES) == len(OF_REFUSAL), "a refusal has one code"


def test_every_refusal_has_a_code() -> None:
    kinds = {value for name, value in vars(refusal).items() if name.isupper() and isinstance(value, str)}
    assert kinds - {"atoll-refusal"} <= set(OF_REFUSAL), "give it a place in deploy/exit_codes.py"


def test_every_error_of_ours_is_told_or_internal() -> None:
    found = set()
    for name in ("protos", "coordinator", "node", "optim", "deploy"):
        package = importlib.import_module(name)
        for module in pkgutil.walk_packages(package.__path__, f"{name}."):
            source = Path(module.module_finder.path, f"{module.name.rpartition('.')[2]}.py")  # type: ignore[union-attr]
            if not source.is_file():
                continue
            for kind in re.findall(r"^class (\w+Error)\(", source.read_text(), re.MULTILINE):
                found.add((module.name, kind))
    assert found
    for module_name, kind in sorted(found):
        if f"{module_name}.{kind}" in INTERNAL:
            continue
        error = getattr(importlib.import_module(module_name), kind)
        names = {f"{base.__module__}.{base.__qualname__}" for base in inspect.getmro(error)}
        assert names & EXPECTED or issubclass(error, OSError), f"{module_name}.{kind} has no exit code"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError("x"), 12),
        (FileNotFoundError(errno.ENOENT, "none", "x"), 13),
        (ModuleNotFoundError("x", name="x"), 13),
        (ValueError("a defect"), 1),
    ],
)
def test_exit_codes(error: Exception, code: int) -> None:
    assert exit_code(error) == code


@pytest.mark.parametrize(("kind", "code"), [("bad-token", 20), ("wrong-pin", 24), ("key-in-use", 28)])
def test_what_was_refused_counts_before_who_tells_of_it(kind: str, code: int) -> None:
    from deploy.status import StatusError
    from node.exchange.trouble import Kind, Trouble

    assert exit_code(Trouble(Kind.REFUSED, "x", kind)) == exit_code(StatusError("x", kind)) == code
    assert exit_code(Trouble(Kind.REFUSED, "x", "from a newer coordinator")) == 31
