"""From the bytes of a body to a struct of `openai_types.py`; what is wrong is said by name, with the way out."""

from __future__ import annotations

import re
from functools import cache
from typing import TypeVar, get_args

import msgspec

from penstock.core.errors import InvalidRequest
from penstock.core.suggest import nearest
from penstock.gateway.errors import UNKNOWN_FIELD

T = TypeVar("T")

_AT_PATH = re.compile(r"^(?P<what>.*?) - at (?:`key` in )?`\$\.?(?P<path>.*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>.*)`$")
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>.*)`$", re.DOTALL)
LONGEST_NAME = 64

# What to do instead of what other servers call by these names.
_INSTEAD = {
    "use response_format or structured_outputs": ("grammar", "json_schema", "regex", "guided_whitespace_pattern"),
    "send it to /v1/chat/completions": ("messages",),
    "send messages, or the prompt to /v1/completions": ("prompt",),
    "beam search is not supported": ("length_penalty", "num_beams"),
    "prefixes are always cached": ("cache_prompt",),
    "the model's own template is used": ("chat_template",),
    "use chat_template_kwargs": ("enable_thinking", "include_reasoning", "thinking"),
    "use deadline_ms": ("timeout",),
    "use logit_bias": ("allowed_token_ids", "bad_words", "bad_words_ids"),
    "use max_tokens": (
        *("max_completion_tokens", "max_length", "max_new_tokens", "max_output_tokens"),
        *("n_predict", "num_predict"),
    ),
    "use min_tokens": ("min_length", "min_new_tokens"),
    "use n": ("best_of", "num_return_sequences"),
    "use repetition_penalty": ("rep_pen", "repeat_penalty"),
    "use seed": ("random_seed",),
    "use stop": ("stop_sequences", "stop_strings"),
    "use temperature 0 for greedy decoding": ("do_sample",),
    "use the header x-request-id": ("request_id",),
}
HINTS = {name: hint for hint, names in _INSTEAD.items() for name in names}

_objects = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encode = msgspec.json.Encoder().encode


def decode_json(decoder: msgspec.json.Decoder[T], body: bytes, *, ignore_unknown: bool = False) -> T:
    try:
        try:
            return decoder.decode(body)
        except msgspec.ValidationError:
            if not ignore_unknown:
                raise
            return decoder.decode(_known_fields(decoder.type, body))
    except msgspec.ValidationError as error:
        raise _from_validation(error, decoder.type) from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"body is not valid JSON: {error}", code="invalid_json") from None
    except UnicodeDecodeError:
        raise InvalidRequest("body is not valid UTF-8", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequest("body is nested too deeply", code="invalid_json") from None


def _from_validation(error: msgspec.ValidationError, kind: type) -> InvalidRequest:
    """`Expected `str`, got `int` - at `$.messages[0].content`` becomes a message and a `param`."""
    located = _AT_PATH.match(str(error))
    what, path = (located["what"], located["path"]) if located else (str(error), "")
    if (unknown := _UNKNOWN.match(what)) is not None:
        return _unknown_field(unknown["name"], path, _strict_objects(kind).get(path, kind))
    missing = _MISSING.match(what)
    if missing:
        path = f"{path}.{missing['name']}" if path else missing["name"]
        what = "is required"
    elif what.startswith("Invalid enum value") and (choices := _choices(kind, path)):
        what += f"; must be one of {', '.join(choices)}"
    what = what.replace("`", "")
    return InvalidRequest(f"{path}: {what}" if path else f"body: {what}", param=path or None)


def _choices(kind: type, path: str) -> tuple[str, ...]:
    """The values that a field of a request, or of an object in it, may have."""
    parent, _, name = path.rpartition(".")
    fields = msgspec.structs.fields(_strict_objects(kind).get(parent, kind))
    options = next((get_args(field.type) for field in fields if field.name == name), ())
    return tuple(value for option in options for value in (get_args(option) or (option,)) if isinstance(value, str))


def _unknown_field(name: str, path: str, kind: type) -> InvalidRequest:
    """In OpenAI's words, and with what was probably meant."""
    shown = name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}…"
    param = f"{path}.{shown}" if path else shown
    hint = None if path else HINTS.get(name)
    if hint is None and len(name) <= LONGEST_NAME:
        near = nearest(name, getattr(kind, "__struct_fields__", ()))
        hint = f"did you mean {near}?" if near else None
    message = f"Unrecognized request argument supplied: {param}"
    return InvalidRequest(f"{message}; {hint}" if hint else message, param=param, code=UNKNOWN_FIELD)


@cache
def _strict_objects(kind: type) -> dict[str, type]:
    """Fields of a struct that hold objects whose unknown fields are refused too."""
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return {}
    options = [(field.name, option) for field in msgspec.structs.fields(kind) for option in get_args(field.type)]
    structs = [(name, o) for name, o in options if isinstance(o, type) and issubclass(o, msgspec.Struct)]
    return {name: struct for name, struct in structs if struct.__struct_config__.forbid_unknown_fields}


def _known_fields(kind: type, body: bytes | msgspec.Raw) -> bytes:
    """An object without the fields that would be refused; the others are as they were, byte for byte."""
    given, objects = _objects.decode(body), _strict_objects(kind)
    kept = {name: given[name] for name in getattr(kind, "__struct_fields__", given) if name in given}
    for name in objects.keys() & kept.keys():
        if bytes(kept[name]).startswith(b"{"):
            kept[name] = msgspec.Raw(_known_fields(objects[name], kept[name]))
    return _encode(kept)
