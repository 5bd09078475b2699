"""How long a prompt may be, and what is said of one that is longer."""

from __future__ import annotations

from typing import NamedTuple

from penstock.core.engine import EngineInfo, Task
from penstock.core.errors import ContextTooLong

MAX_COUNTED = 65_536  # tokens of a text that need not fit, or
COUNTED_CONTEXTS = 4  # times what the model holds, if that is more: enough to see where to cut it


class Bounds(NamedTuple):
    """What a tenant's prompt for one model may be."""

    prompt_tokens: int  # of one prompt, at most
    max_model_len: int
    vocab_size: int
    task: Task = "generate"

    @classmethod
    def of(cls, info: EngineInfo, most: int | None) -> Bounds:
        """`most`: tokens of a prompt that the tenant may send."""
        room = info.max_model_len - (info.task == "generate")
        return cls(room if most is None else min(room, most), info.max_model_len, info.vocab_size, info.task)

    @property
    def countable(self) -> int:
        """Tokens of a text that is cut down, or only counted."""
        return max(MAX_COUNTED, COUNTED_CONTEXTS * self.max_model_len)

    def too_long(self, param: str, count: str = "") -> ContextTooLong:
        count = count or f"more than {self.prompt_tokens}"
        if self.prompt_tokens < self.max_model_len - (self.task == "generate"):
            rest = f", and this tenant is limited to {self.prompt_tokens}; shorten the prompt"
        elif self.task != "generate":
            rest = "; shorten the text, or send truncate_prompt_tokens: -1 to have it cut"
        else:
            rest = ", and at least one must be left for the output; shorten the prompt"
        return ContextTooLong.beyond(
            self.max_model_len,
            f"there are {count} tokens in {param}{rest}",
            param=param,
            excess=f"{count} tokens > {self.prompt_tokens} maximum",
        )

    @property
    def does(self) -> str:
        """What the model is for, in words."""
        return {"generate": "generates text", "embed": "makes embeddings", "score": "scores pairs of texts"}[self.task]
