"""What llguidance takes for a grammar that a request brings."""

from __future__ import annotations

import re

from penstock.grammar.schema import checked_lark, checked_schema

_FIRST_RULE_OF_GBNF = re.compile(r"(?:\s|#[^\n]*\n)*[\w-]+\s*::=")  # elsewhere it may be text inside a Lark grammar


def llguidance_source(kind: str, source: str) -> str:
    """Raises ValueError where it is no grammar, as far as that shows before it is compiled.

    Reading GBNF takes time with its square, 3 s for 85 kB.
    """
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        if kind == "json_schema":
            return str(LLMatcher.grammar_from_json_schema(checked_schema(source)))
        if kind == "regex":
            return str(LLMatcher.grammar_from_regex(source))
        lark = gbnf_to_lark(source) if _FIRST_RULE_OF_GBNF.match(source) else source
        return str(LLMatcher.grammar_from_lark(checked_lark(lark)))
    except ImportError:
        raise
    except Exception as error:  # what gbnf_to_lark raises is the base class itself
        raise ValueError(str(error)) from None
