from __future__ import annotations

import pytest

from penstock.core.errors import ContextTooLong
from penstock.text.infill import Infill
from penstock.text.tokenizer import Tokenizer

OTHERS = [("a.py", "one two three"), ("b.py", "four")]


def test_other_files_come_before_as_far_as_they_fit(tokenizer: Tokenizer) -> None:
    infill = Infill(1, 2, 3)
    alone = infill.prompt(tokenizer, "before", "after", 100)
    whole = infill.prompt(tokenizer, "before", "after", 100, OTHERS)
    snippets = "\n\n--- snippet ---\n\none two three\n\n--- snippet ---\n\nfour"
    assert tokenizer.decode(whole[: -len(alone)]) == snippets
    assert whole[-len(alone) :] == alone
    assert infill.prompt(tokenizer, "before", "after", len(alone) + 7, OTHERS, keep_free=5) == whole[-len(alone) - 2 :]
    assert infill.prompt(tokenizer, "before", "after", len(alone) + 5, OTHERS, keep_free=5) == alone
    with pytest.raises(ContextTooLong):
        infill.prompt(tokenizer, "before", "after", len(alone) - 1, OTHERS)
