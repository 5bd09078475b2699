"""`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`: Qwen3-Coder, Qwen3.5.

Values are bare text; the function's schema says which of them are JSON. A string that must match more than a list, such
as a pattern, is JSON where a grammar is to hold it to that.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from penstock.text.tool_calls.grammar import CallGrammar, Spell, any_of, arguments_schema, json_rule, literal, owner
from penstock.text.tool_calls.parser import Function, State, ToolParser, possible_beginning

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
LONGEST_NAME = 256
HELD_AS_JSON = {"pattern", "format", "minLength", "maxLength", "allOf", "anyOf", "oneOf", "not", "if", "$ref"}
WORDS = {"True": True, "False": False, "None": None}  # as the chat template writes them
TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}


class QwenCoderParser(ToolParser):
    markers = (OPEN, CLOSE)
    _closes = False
    _skipped = ""

    def _first_state(self) -> State:
        return self._in_text

    def _in_text(self) -> bool:
        """Some models leave out the outer tag."""
        found = self._say_until(*((OPEN, FUNCTION, CLOSE) if self._closes else (OPEN, FUNCTION)))
        self._closes = self._closes and found is None
        if found == OPEN:
            self._skipped = OPEN
            return self._go(self._before_function)
        if found == FUNCTION:
            self._skipped = FUNCTION
            return self._go(self._in_name)
        return found is not None

    def _before_function(self) -> bool:
        self._skipped += self._skip_space()
        follows = self._starts_with(FUNCTION)
        if follows is None:
            return False
        if not follows:
            self._say(self._skipped)
            return self._go(self._in_text)
        self._skipped += self._take(len(FUNCTION))
        return self._go(self._in_name)

    def _in_name(self) -> bool:
        end = self._text.find(">")
        if end < 0 and len(self._text) <= LONGEST_NAME and "<" not in self._text:
            return False
        name = self._text[:end].strip() if end >= 0 else ""
        if not name or "<" in name:
            self._say(self._skipped)
            return self._go(self._in_text)
        self._take(end + 1)
        self._begin(name)
        self._add("{")
        self._keys: list[str] = []
        schema = arguments_schema(self.functions[name]) if name in self.functions else {}
        self._types = schema.get("properties") or {}
        return self._go(self._in_parameters)

    def _in_parameters(self) -> bool:
        self._skip_space()
        if self._starts_with(PARAMETER):
            end = self._text.find(PARAMETER_END)
            if end < 0:
                return False
            whole = self._take(end + len(PARAMETER_END))
            self._add(self._argument(whole[len(PARAMETER) : -len(PARAMETER_END)]))
            return True
        if self._starts_with(PARAMETER) is None or self._starts_with(FUNCTION_END) is None:
            return False
        if self._starts_with(FUNCTION_END):
            self._take(len(FUNCTION_END))
        self._add("}")
        self._closes = True
        return self._go(self._in_text)

    def _argument(self, parameter: str) -> str:
        key, _, value = parameter.partition(">")
        value = value.removeprefix("\n").removesuffix("\n")
        before = ", " if self._keys else ""
        self._keys.append(key)
        return f"{before}{json.dumps(key)}: {_as_json(value, self._types.get(key))}"

    def _end(self) -> None:
        """The text of a call that was cut off stays a beginning of JSON."""
        if self._closes and CLOSE.startswith(self._text):
            self._text = ""
        if self._state in (self._before_function, self._in_name):
            self._say(self._skipped)
        elif self._state == self._in_parameters:
            rest = self._take(len(self._text) - possible_beginning(self._text, (f"\n{PARAMETER_END}",)))
            self._text = ""
            if rest.startswith(PARAMETER) and ">" in rest:
                self._add(self._argument(rest.removeprefix(PARAMETER)).removesuffix('"'))


def _as_json(text: str, schema: Any) -> str:
    """JSON of a type that the schema allows, if the text is one; text otherwise."""
    value: Any = text
    if isinstance(schema, dict) and not _is_bare(schema):
        with suppress(ValueError):
            value = WORDS[text] if text in WORDS else json.loads(text)
        if not _allows(schema, value) and _allows(schema, text):
            value = text
    return json.dumps(value, ensure_ascii=False)


def _is_bare(schema: dict[str, Any]) -> bool:
    return schema.get("type") == "string" and not HELD_AS_JSON & schema.keys()


def _allows(schema: Any, value: Any) -> bool:
    """By types and listed values alone."""
    if not isinstance(schema, dict):
        return True
    options = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(options, list):
        return any(_allows(option, value) for option in options)
    listed, types = schema.get("enum"), schema.get("type")
    if isinstance(listed, list):
        return any(type(each) is type(value) and each == value for each in listed)
    names = [types] if isinstance(types, str) else types
    return not isinstance(names, list) or any(type(value) in TYPES.get(str(name), ()) for name in names)


def grammar(functions: Sequence[Function], spell: Spell, one: bool) -> CallGrammar:
    rules: list[str] = []
    for number, function in enumerate(functions):
        schema = arguments_schema(function)
        properties, required = schema.get("properties") or {}, schema.get("required") or []
        shared: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        parameters = []
        for place, (key, kind) in enumerate(properties.items()):
            name = f"p{number}-{place}"
            parameters.append(name if key in required else f"{name}?")
            rules.append(
                f"{name}: {literal(f'{PARAMETER}{key}>{chr(10)}')} {_value(name, kind, shared, rules)}{owner(function)}"
            )
        head, end = literal(f"\n{FUNCTION}{function.name}>\n"), literal(f"{FUNCTION_END}\n")
        rules.append(f"call{number}: {head} {' '.join(parameters)} {end} {spell(CLOSE)}")
    return CallGrammar(OPEN, any_of("call", functions), literal("\n"), "\n".join(rules))


def _value(name: str, kind: Any, shared: dict[str, Any], rules: list[str]) -> str:
    """Text where the schema has a bare string, JSON otherwise, to the end of the parameter."""
    end = f"\n{PARAMETER_END}\n"
    if not isinstance(kind, dict) or not _is_bare(kind):
        return f"{json_rule({**shared, **kind} if isinstance(kind, dict) else {})} {literal(end)}"
    listed = [kind["const"]] if "const" in kind else kind.get("enum")
    if isinstance(listed, list):
        texts = [literal(choice) for choice in listed if isinstance(choice, str)]
        return f"({' | '.join(texts)}) {literal(end)}" if texts else f"{json_rule({**shared, **kind})} {literal(end)}"
    rules.append(f"{name}-text[suffix={literal(end)}]: /(.|\\n)*/")
    return f"{name}-text"
