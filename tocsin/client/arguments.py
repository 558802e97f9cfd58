"""A run's arguments, read into a function's parameters: bound as Python would, converted to what each is annotated
with, and refused with a clear word before the function is entered."""

from __future__ import annotations

import contextlib
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from tocsin.client.failures import BadArguments

_WORDS = {
    "Object missing required field": "there is no argument",
    "Object contains unknown field": "it takes no argument",
    " - at `$.": " - in `",
}
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Arguments:
    """How one function's parameters are filled. A parameter whose annotation cannot be checked takes anything."""

    def __init__(self, call: Callable[..., Any], wants_context: bool) -> None:
        parameters = list(inspect.signature(call).parameters.values())[wants_context:]
        named = [p for p in parameters if p.kind not in _VARIADIC]
        kinds = [p.kind for p in parameters]
        self._more_positions = inspect.Parameter.VAR_POSITIONAL in kinds
        self._more_names = inspect.Parameter.VAR_KEYWORD in kinds
        self._by_position = [p.name for p in named if p.kind is not inspect.Parameter.KEYWORD_ONLY]
        self._only_by_position = [p.name for p in named if p.kind is inspect.Parameter.POSITIONAL_ONLY]
        self._names = [p.name for p in named]
        self._needs_some = any(p.default is p.empty for p in named)
        hints = _hints(call)
        self._shape = msgspec.defstruct(
            "Arguments",
            [_field(p, hints.get(p.name, Any)) for p in named],
            kw_only=True,
            forbid_unknown_fields=not self._more_names,
        )

    def fill(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """What to call the function with; raises `BadArguments`."""
        if not args and not kwargs and not self._needs_some:
            return args, kwargs
        given = self._by_name(args, kwargs)
        try:
            read = msgspec.convert(given, self._shape, dec_hook=_of_other_kinds)
        except msgspec.ValidationError as error:
            raise BadArguments(_in_our_words(str(error))) from None
        filled = {name: value for name in self._names if (value := getattr(read, name)) is not UNSET}
        if self._more_names:
            filled |= {name: value for name, value in given.items() if name not in filled}
        rest = args[len(self._by_position) :]
        if not rest and not self._only_by_position:
            return (), filled
        first = self._by_position if rest else self._only_by_position
        return [*(filled.pop(name) for name in first if name in filled), *rest], filled

    def _by_name(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        if len(args) > len(self._by_position) and not self._more_positions:
            raise BadArguments(f"it takes {len(self._by_position)} arguments by position, and {len(args)} were given")
        given = dict(zip(self._by_position, args, strict=False))
        if twice := given.keys() & kwargs.keys():
            raise BadArguments(f"given twice, by position and by name: {', '.join(sorted(twice))}")
        return {**given, **kwargs}


def _of_other_kinds(kind: type, value: Any) -> Any:
    """What msgspec does not know by itself: paths are strings in JSON; of anything else there is no JSON."""
    if issubclass(kind, PurePath) and isinstance(value, str):
        return kind(value)
    raise ValueError(f"Expected `{kind.__name__}`, got `{type(value).__name__}`")


def _in_our_words(text: str) -> str:
    for theirs, ours in _WORDS.items():
        text = text.replace(theirs, ours)
    return text


def _hints(call: Callable[..., Any]) -> dict[str, Any]:
    """What the parameters are annotated with. Each is read by itself, for one may have a name that only a type checker
    knows."""
    try:
        return typing.get_type_hints(call, include_extras=True)
    except Exception:
        known = getattr(inspect.unwrap(call), "__globals__", {})
    hints: dict[str, Any] = {}
    for name, annotation in getattr(call, "__annotations__", {}).items():
        with contextlib.suppress(Exception):
            alone = types.SimpleNamespace(__annotations__={name: annotation})
            hints |= typing.get_type_hints(alone, known, include_extras=True)
    return hints


def _field(parameter: inspect.Parameter, hint: Any) -> tuple[Any, ...]:
    try:
        msgspec.convert(None, hint)
    except msgspec.ValidationError:
        pass
    except Exception:  # nothing that msgspec can check
        hint = Any
    if parameter.default is parameter.empty:
        return parameter.name, hint
    return parameter.name, Any if hint is Any else typing.Union[hint, UnsetType], UNSET  # noqa: UP007 (no type to |)
