"""An engine whose outputs follow grammars of llguidance, in tokens that are refused after they were sampled."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from penstock.core.request import Chunk, GenerateRequest, Grammar, SamplingParams
from penstock.engine.limits import SchedulerLimits
from penstock.engine.loop import EngineLoop
from penstock.engine.scheduler import Scheduler
from penstock.grammar.compiler import LLGuidance
from penstock.grammar.matcher import LLGuidanceMatcher
from penstock.simulation.paged_executor import EOS, VOCAB, PagedExecutor, expected_output
from penstock.text.tokenizer import Tokenizer

BRANCHES = 900  # each in several items: more than a row of the parser may have
TRAP = Grammar(
    "lark",
    f'start: /[a-z]/ "x" branch\nbranch: {" | ".join(f"n{i}" for i in range(BRANCHES))}\n'
    + "\n".join(f'n{i}: "z" n{(i + 1) % BRANCHES} | "q"' for i in range(BRANCHES)),
)


def small_grammars() -> LLGuidance:
    """Of the vocabulary of `PagedExecutor`: the lowercase letters, and other characters."""
    letters = [chr(ord("a") + i) for i in range(26)]
    others = [c for c in sorted(pre_tokenizers.ByteLevel.alphabet()) if c not in letters][: VOCAB - 1 - len(letters)]
    tokens = [*others, *letters]
    tokens.insert(EOS, "<end>")
    backend = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    tokenizer = Tokenizer(backend, eos_ids=(EOS,))
    return LLGuidance(lambda: tokenizer, VOCAB, tokenizer.eos_ids)


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_forced_tokens_that_cannot_be_fail_their_request_alone(
    runs_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LLGuidanceMatcher, "mask_seconds", 1.0)
    limits = SchedulerLimits(
        num_blocks=64, block_size=4, max_seqs=4, max_step_tokens=16, max_model_len=64, vocab_size=VOCAB,
        eos_ids=frozenset({EOS}),
    )  # fmt: skip
    chunks: list[Chunk] = []
    executor = PagedExecutor(limits.num_blocks, limits.block_size, runs_ahead=runs_ahead)
    loop = EngineLoop(Scheduler(limits), executor, chunks.extend, small_grammars())
    loop.submit(GenerateRequest("beside", [1, 2, 3], SamplingParams(max_tokens=20, ignore_eos=True)))
    for seed in range(8):  # some of them sample a token that is allowed before they have a mask
        loop.submit(GenerateRequest(f"trap{seed}", [4, 5], SamplingParams(max_tokens=20, grammar=TRAP), seed=seed))
    while loop.step():
        pass
    beside = [token for chunk in chunks if chunk.request_id == "beside" for token in chunk.token_ids]
    assert beside == expected_output([1, 2, 3], 0, 20, frozenset())
    errors = [chunk.error for chunk in chunks if chunk.request_id != "beside" and chunk.finish_reason == "error"]
    assert len(errors) == 8
    for error in errors:
        assert error is not None
        assert error.error == "InvalidRequest"
        assert error.message.startswith("the output cannot go on: Parser Error: Current row has")
