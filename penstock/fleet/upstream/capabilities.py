"""What an upstream can do, as found by probing it, and what it is asked for that it cannot do."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from penstock.core.errors import InvalidRequest, PenstockError, Unavailable
from penstock.core.request import GenerateRequest, SamplingParams
from penstock.fleet.upstream.settings import CapabilitySettings

# Those that an upstream may not know; all others every one must know, or they are dealt with here.
OPTIONAL_PARAMS = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "seed", "min_tokens", "stop_token_ids", "ignore_eos"),
)
_NEUTRAL = SamplingParams()


@dataclass(frozen=True, slots=True)
class Capabilities:
    token_ids_in: bool  # prompts are sent as token ids, so that nothing is tokenized twice
    token_ids_out: bool  # it says which tokens it sampled; else its text is tokenized here, with the same bytes
    logprobs: bool
    seed: bool  # the same seed gives the same text twice
    continuation: bool  # it goes on exactly where another engine stopped, by token ids or by text
    params: frozenset[str]  # of SamplingParams, those that it knows
    grammars: frozenset[str] = frozenset()  # kinds that it enforces

    def overridden(self, settings: CapabilitySettings) -> Capabilities:
        stated = {field.name: getattr(settings, field.name) for field in fields(settings)}
        return replace(self, **{name: value for name, value in stated.items() if value is not None})

    def refusal(self, request: GenerateRequest) -> PenstockError | None:
        """Why an upstream must not be asked this. Another engine may be able to, so it is known before sending."""
        params = request.params
        if request.adapter is not None:
            return InvalidRequest("LoRA adapters are served by workers, not by this upstream", param="model")
        if request.output and not self.continuation:
            return Unavailable("this upstream cannot continue what another engine began", code="continuation")
        if params.logprobs is not None and not self.logprobs:
            return InvalidRequest("logprobs cannot be had from this upstream", param="logprobs")
        if params.prompt_logprobs is not None:
            return InvalidRequest("prompt_logprobs cannot be had from an upstream", param="prompt_logprobs")
        if (grammar := params.grammar) is not None:
            if grammar.kind not in self.grammars or grammar.after:
                return InvalidRequest(f"{grammar.param} is not enforced by this upstream", param=grammar.param)
            if request.output:
                return Unavailable("this upstream cannot go on in the middle of a grammar", code="continuation")
        for name in OPTIONAL_PARAMS:
            if name not in self.params and getattr(params, name) != getattr(_NEUTRAL, name):
                if name == "stop_token_ids" and self.token_ids_out:
                    continue  # the stream is ended here
                return InvalidRequest(f"{name} is not known to this upstream", param=name)
        return None
