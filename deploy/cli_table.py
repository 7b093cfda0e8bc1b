"""docs/cli.md: every command with its arguments and options, taken from the commands themselves.

``python -m deploy.cli_table > docs/cli.md`` writes it anew.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import typer

from deploy.cli import app

_HEAD: Final = """# Commands

Every command says with `--help` what it does, and gives an example. A command that fails ends with one of the
[exit codes](errors.md), and the last line on stderr says what is wrong and what to do.

Rates are written `20mbit`, `1gbit` or `'100 MB/s'`, times `90s`, `2min` or `7d`, sizes `80GB`. Where an
option can also be given by a variable of the environment, the table names it.
"""


def commands() -> dict[str, Any]:
    """Every command by its full name, in the order of ``atoll --help``, without groups that do nothing."""
    return dict(_walk(typer.main.get_command(app), "atoll"))


def markdown() -> str:
    """The whole page."""
    root = typer.main.get_command(app)
    parts = [_HEAD, "## atoll\n", _described(root, "atoll [OPTIONS] COMMAND [ARGS]..."), _index()]
    for name, command in commands().items():
        parts += [f"## {name}\n", _described(command, _usage(name, command))]
    return "\n".join(parts)


def _walk(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    below = getattr(command, "commands", {})
    if not below or command.invoke_without_command:
        yield name, command
    for word, child in below.items():
        if not child.hidden:
            yield from _walk(child, f"{name} {word}")


def _index() -> str:
    rows = ["| command | does |", "|---|---|"]
    for name, command in commands().items():
        first = " ".join((command.help or "").split("\n\n")[0].split())
        rows.append(f"| [`{name}`](#{name.replace(' ', '-')}) | {_cell(first)} |")
    return "\n".join(rows) + "\n"


def _usage(name: str, command: Any) -> str:
    words = [name]
    if any(_is_option(one) for one in _shown(command)):
        words.append("[OPTIONS]")
    for one in _shown(command):
        if not _is_option(one):
            word = _value(one)
            words.append(word if one.required or word.startswith("[") else f"[{word}]")
    return " ".join(words)


def _described(command: Any, usage: str) -> str:
    said = [" ".join(paragraph.split()) for paragraph in (command.help or "").split("\n\n")]
    parts = [f"```text\n{usage}\n```\n", *(f"{_cell(text)}\n" for text in said)]
    rows = [_row(one) for one in _shown(command)]
    if rows:
        parts.append("\n".join(["| | default | meaning |", "|---|---|---|", *rows]) + "\n")
    if command.epilog:
        parts.append(_examples(command.epilog))
    return "\n".join(parts)


def _examples(epilog: str) -> str:
    """The epilog's examples as lines of a shell; what follows in words stays words."""
    lines, words = list[str](), list[str]()
    for paragraph in re.sub(r"^Examples?: ", "", epilog).split("\n\n"):
        (words if words or not re.match(r"(sudo )?atoll |torchrun ", paragraph) else lines).append(paragraph)
    block = "\n".join(["```sh", *lines, "```"]) + "\n"
    return "\n".join([block, *(f"{_cell(text)}\n" for text in words)])


def _shown(command: Any) -> list[Any]:
    return [one for one in command.params if not getattr(one, "hidden", False) and one.name != "help"]


def _is_option(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "option")


def _value(parameter: Any) -> str:
    """The word that stands for the value."""
    return str(parameter.metavar or parameter.name.strip("_").replace("_", "-").upper())


def _row(parameter: Any) -> str:
    if not _is_option(parameter):
        name = f"`{_value(parameter)}`"
    elif parameter.is_flag:
        name = "`" + "`, `".join((*parameter.opts, *parameter.secondary_opts)) + "`"
    else:
        name = ", ".join(f"`{option}`" for option in parameter.opts[:-1])
        name += f"{', ' if name else ''}`{parameter.opts[-1]} {_value(parameter)}`"
    said = parameter.help or ""
    if parameter.envvar:
        said += f" Or by `{parameter.envvar}`."
    return f"| {_cell(name)} | {_default(parameter)} | {_cell(said)} |"


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    value = parameter.default
    if value is None or value == "" or value is False:
        return ""
    if value is True:
        return f"`{parameter.opts[0]}`"
    return f"`{getattr(value, 'value', value)}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    print(markdown(), end="")
