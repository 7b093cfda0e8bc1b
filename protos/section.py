"""The base of every section of the run file."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from protos.problems import Problem

T = TypeVar("T")
S = TypeVar("S", bound="Section")
_WITHOUT_RULES: Final = {"rules": False}  # a context of the validation: only each value by itself


class Unknown(LookupError):
    """Nobody can tell the value of this key, since what the file says of it is wrong."""


def judged(rules: Iterable[Iterator[T]]) -> Iterator[T]:
    """What the rules yield, as far as each of them gets without a value that is :class:`Unknown`."""
    for rule in rules:
        with suppress(Unknown):
            yield from rule


class _Values(dict[str, Any]):
    """The values a default follows from; those that are not there are unknown, not left out."""

    def get(self, key: str, default: Any = None) -> Any:
        if key not in self:
            raise Unknown(key)
        return self[key]


class Section(BaseModel):
    """A section of the run file: immutable, strictly typed, without unknown keys, with its own rules."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=()
    )

    title: ClassVar[str]

    def unused(self) -> dict[str, str]:
        """The keys that have no effect beside the other values, each with the reason in words."""
        return dict(judged(self.without_effect()))

    def without_effect(self) -> Iterable[Iterator[tuple[str, str]]]:
        """Rules that yield keys without an effect and the reason; a later one has the last word.

        Each stands for itself: one that cannot be judged does not keep the others from being.
        """
        return ()

    def broken_rules(self) -> Iterable[Iterator[Problem]]:
        """Rules that yield what is wrong with the section's values taken together; each stands for itself."""
        return ()

    def problems(self) -> Iterator[Problem]:
        """Everything that is wrong with the section's values taken together."""
        unused = self.unused().items()
        yield from judged(self._has_no_effect(key, reason) for key, reason in unused)
        yield from judged(self.broken_rules())

    def _has_no_effect(self, key: str, reason: str) -> Iterator[Problem]:
        if key in self.model_fields_set and getattr(self, key) != self.default(key):
            yield Problem(self.title, key, f"has no effect: {reason}", "remove it", getattr(self, key))

    def default(self, key: str) -> Any:
        """The value ``key`` has when the run file leaves it out, given the section's other values."""
        return _default(type(self), key, dict(self))

    @classmethod
    def without(cls: type[S], raw: Mapping[str, Any], wrong: Collection[str]) -> S:
        """The section as far as it can be told without the values of the ``wrong`` keys.

        Reading one of these, or one that is left out and follows from them, raises :class:`Unknown`.

        Raises:
            pydantic.ValidationError: another value is wrong.
        """
        given = {key: value for key, value in raw.items() if key not in wrong}
        whole = cls.model_validate(given, context=_WITHOUT_RULES)
        values: dict[str, Any] = {}
        for key in cls.model_fields:
            if key in given:
                values[key] = getattr(whole, key)
            elif key not in wrong:
                with suppress(Unknown):
                    values[key] = _default(cls, key, values)
        unknown = [key for key in cls.model_fields if key not in values]
        section = cls.model_construct({*given, *wrong}, **values, **dict.fromkeys(unknown))
        for key in unknown:
            del section.__dict__[key]
        return section

    if not TYPE_CHECKING:  # it would hide misspelt attributes

        def __getattr__(self, name: str) -> Any:
            if name in type(self).model_fields:
                raise Unknown(name)
            return super().__getattr__(name)

    @model_validator(mode="after")
    def _check_rules(self, info: ValidationInfo) -> Section:
        if info.context != _WITHOUT_RULES:
            refuse(list(self.problems()))
        return self


def _default(section: type[Section], key: str, values: Mapping[str, Any]) -> Any:
    info = section.model_fields[key]
    return info.get_default(call_default_factory=True, validated_data=_Values(values))


def refuse(problems: list[Problem]) -> None:
    """Raise the validation error that carries ``problems``, if there are any."""
    if problems:
        text = "\n".join(map(str, problems)).replace("{", "{{").replace("}", "}}")
        raise PydanticCustomError("broken_rules", text, {"problems": problems})
