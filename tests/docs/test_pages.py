"""What the pages show is true of the code. The convention of their blocks:

* ``python`` runs as it stands, in an empty folder; ``py`` is a part of something: it compiles, and what it
  imports from Atoll exists;
* ``toml`` is a run file, or a part of one;
* every line of a block that begins with ``atoll`` is a command line: the real parser takes it. What stands
  in the text as `atoll …` is a command with its options;
* a path in the text that begins with one of the repository's folders is there.
"""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

from deploy import cli_table, runfile_table
from deploy.cli import app
from protos.runfile import RunFile

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
PAGES += sorted((ROOT / "docs").glob("*.md"))
OURS = ("atoll", "bench", "coordinator", "deploy", "node", "optim", "protos")
FOLDERS = (*OURS, "docs", "examples", "tests")
ATOLL: Any = typer.main.get_command(app)
FENCE = re.compile(r"^( *)```([a-z]*)[^\n]*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A block of code: the language of its fence, "" for an indented one; its text and its first line."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        yield Block(page, text.count("\n", 0, found.start()) + 2, found[2], found[3])
    bare = FENCE.sub(lambda found: "\n" * found[0].count("\n"), text)
    for found in re.finditer(r"(?<=\n\n)((?: {4}.*\n|\n(?= {4}))+)", bare):
        yield Block(page, bare.count("\n", 0, found.start()) + 1, "", found[1])


BLOCKS = [block for page in PAGES for block in blocks(page)]


def of(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


def command_lines(block: Block) -> Iterator[list[str]]:
    """The words behind ``atoll`` of every command line in a block."""
    for line in block.text.replace("\\\n", " ").splitlines():
        if "atoll " not in line:
            continue
        lexer = shlex.shlex(re.sub(r"\$\(([^)]*)\)", "X", line), posix=True, punctuation_chars="|&;")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set("|&;"):
                while words and (words[0] == "sudo" or re.fullmatch(r"[A-Z_]+=.*", words[0])):
                    words = words[1:]
                if words and words[0] in ("atoll", ".venv/bin/atoll"):
                    yield words[1:]
                words = []
            else:
                words.append(word)


def command(words: list[str]) -> tuple[Any, list[str]]:
    """The command that the first words name, and what is left for it."""
    found = ATOLL
    while words and words[0] in getattr(found, "commands", {}):
        found, words = found.commands[words[0]], words[1:]
    return found, words


LINES = [
    pytest.param(words, id=f"{block}: {' '.join(words)}")
    for block in of("sh", "console", "")
    for words in command_lines(block)
]
SPANS = sorted(
    {
        (page.name, " ".join(span.split()))
        for page in PAGES
        for span in re.findall(r"(?<!`)`(atoll\s[^`]+)`", FENCE.sub("", page.read_text(encoding="utf-8")))
    }
)


def test_the_pages_have_blocks_of_all_kinds() -> None:
    assert len(LINES) > 50 and len(SPANS) > 50
    assert all(len(of(kind)) > 2 for kind in ("python", "py", "toml", "sh"))
    assert not of("bash", "shell"), "write sh"


@pytest.mark.parametrize("words", LINES)
def test_a_command_line_is_one(words: list[str]) -> None:
    found, rest = command(words)
    assert "..." not in rest, "a command line that cannot be typed"
    if not (found.name == "atoll" and rest in (["--help"], ["--version"])):
        assert not hasattr(found, "commands") or found.invoke_without_command, f"no such command: {words}"
        found.make_context(found.name, rest)


@pytest.mark.parametrize("span", [pytest.param(span, id=f"{page}: {span}") for page, span in SPANS])
def test_a_command_in_the_text_exists(span: str) -> None:
    words = span.split()[1:]
    found, rest = command(words)
    assert not hasattr(found, "commands") or not rest or rest[0].startswith("-"), f"no such command: {span}"
    known = {option for one in found.params for option in (*one.opts, *one.secondary_opts)} | {"--help"}
    named = {word.split("=")[0] for word in rest if word.startswith("--") and word != "--"}
    assert named <= known, f"no such option: {named - known}"


@pytest.mark.parametrize("block", [pytest.param(block, id=str(block)) for block in of("python")])
def test_a_program_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(block.text, str(block), "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("block", [pytest.param(block, id=str(block)) for block in of("py", "python")])
def test_what_a_program_imports_is_there(block: Block) -> None:
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in OURS:
            module = importlib.import_module(node.module or "")
            assert all(hasattr(module, one.name) for one in node.names), ast.unparse(node)


@pytest.mark.parametrize("block", [pytest.param(block, id=str(block)) for block in of("toml")])
def test_a_run_file_is_valid(block: Block) -> None:
    RunFile.parse(block.text, str(block))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_that_is_named_exists(page: Path) -> None:
    text, folders = page.read_text(encoding="utf-8"), "|".join(FOLDERS)
    named = re.findall(rf"(?<!`)`((?:{folders})/[\w./-]*)`", FENCE.sub("", text))
    named += re.findall(rf"(?<![\w/.-])((?:{folders})/[\w./-]*\.py)\b", text)
    assert not [path for path in named if not (ROOT / path).exists()]


def test_the_references_are_those_of_the_code() -> None:
    for name, table in (("cli", cli_table), ("run-file", runfile_table)):
        page = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
        assert page == table.markdown(), f"python -m deploy.{table.__name__.split('.')[1]} > docs/{name}.md"


def test_the_reference_of_commands_has_all_of_them() -> None:
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    commands = cli_table.commands()
    assert {"atoll demo", "atoll run init", "atoll testbed", "atoll throttle run"} <= set(commands)
    for name, one in commands.items():
        section = page.split(f"\n## {name}\n")[1].split("\n## ")[0]
        options = [option for parameter in one.params for option in parameter.opts if option[0] == "-"]
        assert all(option in section for option in options)
