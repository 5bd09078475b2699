"""The formats of tool calls by name, and which of them a model has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.text.tool_calls import deepseek, hermes, llama, mistral, qwen_coder
from penstock.text.tool_calls.grammar import CallGrammar, Spell
from penstock.text.tool_calls.parser import Function, ToolParser

ToolFormatName = Literal["hermes", "llama3", "mistral", "mistral_v11", "qwen3_coder", "deepseek", "deepseek_v31"]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    parser: type[ToolParser]
    grammar: Callable[[Sequence[Function], Spell, bool], CallGrammar]


FORMATS: dict[ToolFormatName, ToolFormat] = {
    "hermes": ToolFormat(hermes.HermesParser, hermes.grammar),
    "llama3": ToolFormat(llama.LlamaParser, llama.grammar),
    "mistral": ToolFormat(mistral.MistralParser, mistral.grammar),
    "mistral_v11": ToolFormat(mistral.MistralParser, mistral.named_grammar),
    "qwen3_coder": ToolFormat(qwen_coder.QwenCoderParser, qwen_coder.grammar),
    "deepseek": ToolFormat(deepseek.DeepSeekParser, deepseek.grammar),
    "deepseek_v31": ToolFormat(deepseek.DeepSeekParser, deepseek.plain_grammar),
}


def find_format(template: str, knows_tools: bool) -> ToolFormatName | None:
    """By the texts that a chat template writes around calls. Where it knows nothing of tools, they are described to the
    model in the Hermes format. None: it has a format that is not here."""
    if not knows_tools:
        return "hermes"
    if deepseek.BEGIN in template:
        return "deepseek" if "```json" in template else "deepseek_v31"
    if mistral.OPEN in template:
        return "mistral_v11" if mistral.ARGUMENTS in template else "mistral"
    if qwen_coder.FUNCTION in template:
        return "qwen3_coder"
    if hermes.OPEN in template:
        return "hermes"
    if llama.TAG in template or ("<|start_header_id|>" in template and '"parameters"' in template):
        return "llama3"
    return None
