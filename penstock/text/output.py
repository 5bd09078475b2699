"""How to read what a model writes in answer to one prompt, and what it must write: reasoning, calls, content."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from penstock.core.errors import InvalidRequest
from penstock.core.request import Grammar, ReasoningStart, SamplingParams
from penstock.text.reasoning import CLOSE, ReasoningParser
from penstock.text.tokenizer import Tokenizer
from penstock.text.tool_calls.formats import FORMATS, ToolFormatName
from penstock.text.tool_calls.grammar import literal
from penstock.text.tool_calls.parser import Function, ToolParser

ToolChoice = Literal["auto", "forced"]


@dataclass(frozen=True, slots=True)
class OutputForm:
    """Made beside the prompt, of the model's formats and of the request; goes from process to process."""

    tools: ToolFormatName | None = None  # None: calls are not looked for
    functions: tuple[Function, ...] = ()
    choice: ToolChoice = "auto"
    one_call: bool = False
    reasoning: ReasoningStart | None = None  # None: the model has none

    def tool_parser(self) -> ToolParser | None:
        if self.tools is None:
            return None
        return FORMATS[self.tools].parser(self.functions, 1 if self.one_call else None)

    def markers(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Special tokens that are part of the text which the parsers read."""
        texts = FORMATS[self.tools].parser.markers if self.tools is not None else ()
        if self.reasoning is not None:
            texts = (*texts, *ReasoningParser.markers)
        return frozenset(token for text in texts if (token := tokenizer.token_id(text)) is not None)

    @property
    def constrains(self) -> bool:
        """Whether calls must match a grammar."""
        return self.tools is not None and (self.choice == "forced" or any(f.strict for f in self.functions))

    def constrain(self, params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
        """With the grammar of calls, beside that of the content which the request may have, both after the reasoning.

        A model that is free to begin with reasoning is held to the grammar from its first token, and so does not. Where
        the answer consists of calls, no stop string may cut them off."""
        if self.tools is not None and self.choice == "forced":
            params = replace(params, stop=())
        grammar = params.grammar
        if self.tools is not None and (self.constrains or grammar is not None):
            grammar = self._tool_grammar(self.tools, grammar, tokenizer)
        if grammar is not None and self.reasoning == "open":
            end = tokenizer.token_id(CLOSE)
            if end is None:
                raise InvalidRequest(
                    f"this model's vocabulary has no token {CLOSE}, so its answer cannot be constrained "
                    'after its reasoning: turn that off (chat_template_kwargs {"enable_thinking": false})',
                    param=grammar.param,
                )
            grammar = replace(grammar, after=(end,))
        if grammar is params.grammar and self.reasoning is None:
            return params
        return replace(params, grammar=grammar, reasoning=self.reasoning)

    def _tool_grammar(self, name: ToolFormatName, content: Grammar | None, tokenizer: Tokenizer) -> Grammar:
        spell = _spelling(tokenizer)
        functions = self.functions
        if self.choice == "auto":
            functions = tuple(f if f.strict else replace(f, parameters={"type": "object"}) for f in functions)
        calls = FORMATS[name].grammar(functions, spell, self.one_call)
        if self.choice == "forced":
            source = calls.only_calls(spell, self.one_call, self._lead)
        elif content is None:
            source = calls.calls_in_text(spell)
        elif content.kind == "json_schema" and calls.marker:
            source = calls.calls_or(content.source, spell, self.one_call, self._lead)
        else:
            raise InvalidRequest(
                "beside tools the answer can be constrained by a JSON schema only, and not by that either where this "
                "model's calls are JSON without a mark: set tool_choice to none or required, or leave the format out",
                param="tools",
            )
        return Grammar("lark", source, param="tools")

    @property
    def _lead(self) -> str:
        """What models write between their reasoning and an answer, as a part of a rule."""
        return f"{literal(chr(10) * 2)} " if self.reasoning == "open" else ""


def _spelling(tokenizer: Tokenizer) -> Callable[[str], str]:
    def spell(marker: str) -> str:
        token = tokenizer.token_id(marker)
        return literal(marker) if token is None else f"<[{token}]>"

    return spell
