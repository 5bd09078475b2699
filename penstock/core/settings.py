"""What all sections of the settings share: their checks, and their conversion from the values of YAML and JSON.

A section is a frozen dataclass of the component that it configures. It checks the ranges of its values in
`__post_init__`. `convert_section` checks names and types, by the annotations of the fields, and every error names the
setting by its full path. Where an annotation would not help a user, the field's metadata says what is `expected`. The
keyword arguments of `LLM` are a section too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from penstock.core.errors import StartupError
from penstock.core.secrets import HIDDEN, without_credentials
from penstock.core.suggest import did_you_mean

T = TypeVar("T")


def check(condition: bool, name: str, message: str) -> None:
    """Raise StartupError about the setting `name` unless the condition holds."""
    if not condition:
        raise _error(name, message)


def check_choice(value: str, choices: Any, name: str) -> None:
    """Check that a value is one of a `Literal`."""
    check(value in get_args(choices), name, f"must be one of {', '.join(get_args(choices))}, not {value!r}")


def convert_section(cls: type[T], where: str, values: Any) -> T:
    """Convert a mapping to a dataclass. `where` is the path of the section, which is empty for all settings."""
    check(isinstance(values, dict), where, "must be a mapping")
    known = section_fields(cls)  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            below = _in_sections(str(key).replace("-", "_"), known)
            hint = f" (did you mean {' or '.join(below)}?)" if below else did_you_mean(str(key), known)
            raise _error(_path(where, key), f"is not a setting{hint}; known: {', '.join(known)}")
    typed = {name: _convert(*known[name], _path(where, name), value) for name, value in values.items()}
    for name, (field, _) in known.items():
        has_default = field.default is not MISSING or field.default_factory is not MISSING
        check(name in typed or has_default, _path(where, name), "must be given")
    try:
        return cls(**typed)
    except StartupError as error:  # raised in __post_init__, where the path is not known
        raise StartupError(_path(where, error.message), param=_path(where, error.param)) from None


def _in_sections(name: str, known: Mapping[str, tuple[Field[Any], Any]]) -> list[str]:
    """Where a setting is whose section was left out, as in the flat files of other servers."""
    sections = {section: section_type(kind) for section, (_, kind) in known.items()}
    return [f"{section}.{name}" for section, cls in sections.items() if cls is not None and name in section_fields(cls)]


@cache
def section_fields(cls: type) -> dict[str, tuple[Field[Any], Any]]:
    """The fields of a section by name, each with its type."""
    types = get_type_hints(cls)
    return {field.name: (field, types[field.name]) for field in fields(cls)}


def section_type(kind: Any) -> type | None:
    """The dataclass of a field that holds a section, which may be optional."""
    return next((option for option in _options(kind) if is_dataclass(option)), None)  # type: ignore[return-value]


def is_text(kind: Any) -> bool:
    """Whether a field holds text and nothing else."""
    return all(option in (str, NoneType) or get_origin(option) is Literal for option in _options(kind))


def _options(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if isinstance(kind, UnionType) else (kind,)


def _convert(field: Field[Any], kind: Any, where: str, value: Any) -> Any:
    """A section that is left empty, which is None in YAML, has its defaults."""
    if (cls := section_type(kind)) is not None:
        if isinstance(value, cls):
            return value
        return None if value is None and NoneType in _options(kind) else _section_or_defaults(cls, where, value)
    if get_origin(kind) is Mapping and is_dataclass(cls := get_args(kind)[1]):
        return _named_sections(field, cls, where, value)
    if get_origin(kind) is tuple and is_dataclass(cls := get_args(kind)[0]):
        check(isinstance(value, list), where, "must be a list of mappings")
        return tuple(convert_section(cls, f"{where}.{number}", below) for number, below in enumerate(value))
    try:
        import msgspec
    except ImportError:  # the engine is installed as a library; sections check what matters themselves
        return value
    try:
        converted = msgspec.convert(value, kind)
    except msgspec.ValidationError:
        raise _unexpected(field, kind, where, value) from None
    if converted == () != field.default:  # it would allow nothing at all, and not what a setting left out allows
        raise _unexpected(field, kind, where, value)
    return converted


def _section_or_defaults(cls: type[T], where: str, value: Any) -> T:
    return convert_section(cls, where, {} if value is None else value)


def _named_sections(field: Field[Any], cls: type[T], where: str, value: Any) -> dict[str, T]:
    """Sections whose names the user chooses, as those of the classes."""
    named = {} if value is None else value
    if not isinstance(named, dict):
        raise _unexpected(field, Mapping, where, value)
    for name in named:
        check(isinstance(name, str) and bool(name), where, f"must be named by words, not {name!r}")
    return {name: _section_or_defaults(cls, _path(where, name), below) for name, below in named.items()}


def _unexpected(field: Field[Any], kind: Any, where: str, value: Any) -> StartupError:
    options = _options(kind)
    literals = [word for option in options if get_origin(option) is Literal for word in get_args(option)]
    given = without_credentials(repr(value)) if field.repr else HIDDEN
    if (expected := field.metadata.get("expected")) is not None:
        message = f"must be {expected}, not {given}"
    elif value is None:
        message = "must not be empty"
    elif literals:
        message = f"must be one of {', '.join(literals)}, not {given}"
    elif any(get_origin(option) is tuple for option in options):
        message = f"must be a list of names, not {given}"
    else:
        message = f"must be {_spelled(options)}, not {given}"
    return _error(where, message)


_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", NoneType: "null"}


def _spelled(options: tuple[Any, ...]) -> str:
    """Types as somebody who writes YAML calls them."""
    return " or ".join(_WORDS.get(option, "a mapping") for option in options)


def _error(name: str, message: str) -> StartupError:
    return StartupError(f"{name} {message}", param=name)


def _path(where: str, name: Any) -> str:
    return f"{where}.{name}" if where else str(name)
