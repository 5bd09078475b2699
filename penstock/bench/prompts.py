"""Makes prompts of a wanted token count for a server whose tokenizer is unknown.

A job's token ids become words, about one word per id, so that jobs that share a prefix still share it as text. Most
words here are one token in most vocabularies; what remains (a BOS token, a chat template, an odd vocabulary) is a
straight line from words to tokens, which two probe requests determine.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

_TEXT = (
    "the of and to in is you that it he was for on are as with his they at be this from have or by one had not but "
    "what all were when we there can an your which their said if do will each about how up out them then she many "
    "some so these would other into has more her two like him see time could no make than first been its who now "
    "people my made over did down only way find use may water long little very after words called just where most "
    "know get through back much before go good new write our used me man too any day same right look think also "
    "around another came come work three word must because does part even place well such here take why things help "
    "put years different away again off went old number great tell men say small every found still between name "
    "should home big give air line set own under read last never us left end along while might next sound below saw "
    "something thought both few those always looked show large often together asked house world going want school "
    "important until form food keep children feet land side without boy once animals life enough took sometimes four "
    "head above kind began almost live page got earth need far hand high year mother light parts country father let "
    "night following picture being study second eyes soon times story boys since white days ever paper hard near "
    "sentence better best across during today others however sure means knew try told young miles sun ways thing"
)
WORDS = _TEXT.split()

PROBE_WORDS = (32, 256)


@dataclass(frozen=True, slots=True)
class Calibration:
    """tokens = per_word * words + fixed, as the server counts them."""

    per_word: float = 1.0
    fixed: float = 0.0

    @classmethod
    def from_counts(cls, counts: Sequence[int]) -> Calibration:
        """From the token counts of prompts with `PROBE_WORDS` words."""
        (small, large), (few, many) = PROBE_WORDS, counts
        per_word = (many - few) / (large - small)
        return cls(per_word, few - per_word * small)

    def words_for(self, tokens: int) -> int:
        return max(1, round((tokens - self.fixed) / self.per_word))


def probe_prompt(words: int, seed: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def words_prompt(ids: Sequence[int], calibration: Calibration) -> str:
    """Text that the server counts as about `len(ids)` tokens, with the words spread evenly over the ids."""
    count = calibration.words_for(len(ids))
    return " ".join(WORDS[ids[i * len(ids) // count] % len(WORDS)] for i in range(count))
