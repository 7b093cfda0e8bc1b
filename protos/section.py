"""The base of every section of the run file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from protos.problems import Problem


class Section(BaseModel):
    """A section of the run file: immutable, strictly typed, without unknown keys, with its own rules."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=()
    )

    title: ClassVar[str]

    def unused(self) -> dict[str, str]:
        """The keys that have no effect beside the other values, each with the reason in words."""
        return {}

    def broken_rules(self) -> Iterator[Problem]:
        """What is wrong with the section's values taken together."""
        yield from ()

    def default(self, key: str) -> Any:
        """The value ``key`` has when the run file leaves it out, given the section's other values."""
        return type(self).model_fields[key].get_default(call_default_factory=True, validated_data=dict(self))

    @model_validator(mode="after")
    def _check_rules(self) -> Section:
        problems = [
            Problem(self.title, key, f"has no effect: {reason}", "remove it", getattr(self, key))
            for key, reason in self.unused().items()
            if key in self.model_fields_set and getattr(self, key) != self.default(key)
        ]
        problems += self.broken_rules()
        refuse(problems)
        return self


def refuse(problems: list[Problem]) -> None:
    """Raise the validation error that carries ``problems``, if there are any."""
    if problems:
        text = "\n".join(map(str, problems)).replace("{", "{{").replace("}", "}}")
        raise PydanticCustomError("broken_rules", text, {"problems": problems})
