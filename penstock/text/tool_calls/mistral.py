"""`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, and since tokenizer v11 `[TOOL_CALLS]name[ARGS]{...}`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from penstock.text.tool_calls.grammar import (
    CallGrammar,
    Spell,
    any_of,
    arguments_schema,
    json_call,
    json_rule,
    literal,
    owner,
)
from penstock.text.tool_calls.headed import HeadedParser
from penstock.text.tool_calls.json_call import JsonCall
from penstock.text.tool_calls.parser import Function, State

OPEN, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class MistralParser(HeadedParser):
    markers = (OPEN, ARGUMENTS, CALL_ID)
    head = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*")
    may_become_head = re.compile(r"\s*[\w.\[\]-]*\s*")

    def _first_state(self) -> State:
        return self._in_text

    def _in_text(self) -> bool:
        if self._say_until(OPEN) is None:
            return False
        self._skipped = OPEN
        return self._go(self._after_marker)

    def _after_marker(self) -> bool:
        self._skipped += self._skip_space()
        if not self._text:
            return False
        if self._text[0] == "[":
            self._skipped += self._take(1)
            return self._go(self._before_item)
        return self._go_to_item() if self._text[0] == "{" else self._go(self._in_head)

    # ------------------------------------------------------------ an array of objects

    def _before_item(self) -> bool:
        self._skipped += self._skip_space()
        if self._text.startswith("{"):
            return self._go_to_item()
        if self._text.startswith(","):
            self._skipped += self._take(1)
            return True
        if self._text.startswith("]") and not self._skipped.startswith(OPEN):  # something was called
            self._take(1)
            return self._go(self._in_text)
        return self._give_up() if self._text else False

    def _go_to_item(self) -> bool:
        self._call = JsonCall(self._begin, self._add)
        return self._go(self._in_item)

    def _in_item(self) -> bool:
        call = self._call
        self._text = call.feed(self._text)
        if call.begun:
            self._skipped = ""
        if call.done:
            return self._go(self._before_item)
        if call.bad:
            self._skipped += "" if call.begun else call.raw
            return self._give_up()
        return False

    # ------------------------------------------------------------

    def _after_arguments(self) -> bool:
        return self._go(self._in_text)

    def _end(self) -> None:
        if self._state == self._in_item and not self._call.begun:
            self._say(self._skipped + self._call.raw)
        elif self._state in (self._after_marker, self._before_item, self._in_head):
            self._say(self._skipped)


def grammar(functions: Sequence[Function], spell: Spell, one: bool) -> CallGrammar:
    """As tokenizers before v11 have it."""
    call, rules = json_call(functions, "arguments")
    more = "" if one else f" ({literal(', ')} {call})*"
    return CallGrammar(OPEN, f"{literal('[')} {call}{more} {literal(']')}", None, rules)


def named_grammar(functions: Sequence[Function], spell: Spell, one: bool) -> CallGrammar:
    """As tokenizers from v11 on have it."""
    rules = [
        f"call{number}: {literal(function.name)} {spell(ARGUMENTS)} {json_rule(arguments_schema(function))}"
        f"{owner(function)}"
        for number, function in enumerate(functions)
    ]
    return CallGrammar(OPEN, any_of("call", functions), "", "\n".join(rules))
