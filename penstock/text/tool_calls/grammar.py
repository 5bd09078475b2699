"""Grammars that calls must match, in llguidance's dialect of Lark.

Arguments are `%json` with the function's own schema, each a grammar of its own, so that `$ref` in a schema means what
it meant to its author. The rest is literal text, as the models write it: it costs no choice of the model's. Lines with
a schema end with a comment that says whose it is, which errors name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.text.tool_calls.parser import Function

Spell = Callable[[str], str]  # a marker as a grammar has it: one token of the vocabulary, or a literal text

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
ANYTHING = "/(.|\\n)*/"


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """A call is a marker and `tail`, and between two of them stands `between`. `tail` may use `rules`."""

    marker: str  # empty: a call has none, it is the whole answer
    tail: str
    between: str | None  # None: all calls are in the one tail
    rules: str

    def only_calls(self, spell: Spell, one: bool, lead: str = "") -> str:
        """The answer consists of calls, after `lead`."""
        return f"start: {lead}{self._calls(spell, one)}\n{self.rules}"

    def calls_or(self, schema: str, spell: Spell, one: bool, lead: str = "") -> str:
        """The answer is either calls or JSON of this schema, after `lead`."""
        return f"start: {lead}({self._calls(spell, one)} | content)\ncontent: %json {schema}\n{self.rules}"

    def calls_in_text(self, spell: Spell) -> str:
        """Any text, but once a call begins it must be one."""
        if not self.marker:
            return f"start: PLAIN | {self.tail}\nPLAIN: /[ \\n]*([^{{ \\n](.|\\n)*)?/\n{self.rules}"
        head = spell(self.marker)
        if head.startswith("<["):  # a token, which no text contains
            return f"start: TEXT ({head} {self.tail} TEXT)*\nTEXT: {ANYTHING}\n{self.rules}"
        return f"start: (head {self.tail})* TEXT\nhead[lazy]: TEXT {head}\nTEXT: {ANYTHING}\n{self.rules}"

    def _calls(self, spell: Spell, one: bool) -> str:
        call = f"{spell(self.marker)} {self.tail}" if self.marker else self.tail
        return call if one or self.between is None else f"{call} ({self.between} {call})*"


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def json_rule(schema: dict[str, Any]) -> str:
    return f"%json {json.dumps(schema)}"


def owner(function: Function) -> str:
    return f" // arguments of {function.name}"


def arguments_schema(function: Function) -> dict[str, Any]:
    if not function.parameters:
        return NO_PARAMETERS
    return {"type": "object", **function.parameters}


def json_call(functions: Sequence[Function], key: str) -> tuple[str, str]:
    """`{"name": ..., key: {...}}` of any function: what stands for it in a rule, and the rules that this uses."""
    rules = []
    for number, function in enumerate(functions):
        head = json.dumps({"name": function.name})[:-1] + f', "{key}": '
        rules += [
            f"call{number}: {literal(head)} arguments{number} {literal('}')}",
            f"arguments{number}: {json_rule(arguments_schema(function))}{owner(function)}",
        ]
    return any_of("call", functions), "\n".join(rules)


def any_of(rule: str, functions: Sequence[Function]) -> str:
    return f"({' | '.join(f'{rule}{number}' for number in range(len(functions)))})"
