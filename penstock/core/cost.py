"""One unit of cost for limits, budgets and fairness: the work of one prompt token.

A decoded token reads what a whole batch of prompt tokens shares; measured on CPU and GPU alike at usual batch sizes it
takes about four times the machine time of a prompt token. A cached token takes none.
"""

from __future__ import annotations

OUTPUT_TOKEN_COST = 4


def cost(prompt_tokens: int, output_tokens: int, cached_tokens: int = 0) -> int:
    return prompt_tokens - cached_tokens + OUTPUT_TOKEN_COST * output_tokens
