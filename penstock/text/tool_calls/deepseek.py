"""The calls of DeepSeek's models between tokens of their own: V3 and R1 put JSON into a code block, V3.1 does not."""

from __future__ import annotations

import re
from collections.abc import Sequence

from penstock.text.tool_calls.grammar import CallGrammar, Spell, any_of, arguments_schema, json_rule, literal, owner
from penstock.text.tool_calls.headed import HeadedParser
from penstock.text.tool_calls.parser import Function, State

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


class DeepSeekParser(HeadedParser):
    markers = (BEGIN, END, CALL, CALL_END, SEPARATOR)
    head = re.compile(rf"\s*(?:function{SEPARATOR}([\w.-]+)\s*```(?:json)?|([\w.-]+){SEPARATOR})\s*")
    may_become_head = re.compile(rf"(?s:(?!.*{CALL_END}).{{0,256}})")

    def _first_state(self) -> State:
        return self._in_text

    def _in_text(self) -> bool:
        found = self._say_until(*((BEGIN, CALL) if not self.calls else self.markers))
        if found in (BEGIN, CALL):
            self._skipped = found
            return self._go(self._before_call if found == BEGIN else self._in_head)
        return found is not None

    def _before_call(self) -> bool:
        self._skipped += self._skip_space()
        follows = self._starts_with(CALL)
        if follows:
            self._skipped += self._take(len(CALL))
            return self._go(self._in_head)
        return False if follows is None else self._give_up()

    def _after_arguments(self) -> bool:
        """Here is the end of a code block, if there was one."""
        self._skip_space()
        fence = self._starts_with("```")
        if fence:
            self._take(3)
        return False if fence is None else self._go(self._in_text)

    def _end(self) -> None:
        self._say(self._skipped)


def grammar(functions: Sequence[Function], spell: Spell, one: bool) -> CallGrammar:
    """As V3 and R1 have it."""
    rules = [
        f"call{number}: {spell(CALL)} {literal('function')} {spell(SEPARATOR)} "
        f"{literal(f'{function.name}{chr(10)}```json{chr(10)}')} {json_rule(arguments_schema(function))} "
        f"{literal(f'{chr(10)}```')} {spell(CALL_END)}{owner(function)}"
        for number, function in enumerate(functions)
    ]
    call = any_of("call", functions)
    more = "" if one else f" ({literal(chr(10))} {call})*"
    return CallGrammar(BEGIN, f"{call}{more} {spell(END)}", None, "\n".join(rules))


def plain_grammar(functions: Sequence[Function], spell: Spell, one: bool) -> CallGrammar:
    """As V3.1 has it."""
    rules = [
        f"call{number}: {spell(CALL)} {literal(function.name)} {spell(SEPARATOR)} "
        f"{json_rule(arguments_schema(function))} {spell(CALL_END)}{owner(function)}"
        for number, function in enumerate(functions)
    ]
    call = any_of("call", functions)
    return CallGrammar(BEGIN, f"{call}{'' if one else f' {call}*'} {spell(END)}", None, "\n".join(rules))
