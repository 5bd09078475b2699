"""A model of a Triton server behind its generate endpoints, which take and give text.

Fields of the body that are names of input tensors become those tensors, and all others become parameters of the
request, which is where Triton's vLLM backend looks for them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from penstock.client.http import HttpClient
from penstock.core.errors import StartupError, Unavailable
from penstock.core.request import GenerateRequest, SamplingParams
from penstock.fleet.upstream.capabilities import OPTIONAL_PARAMS, Capabilities
from penstock.fleet.upstream.dialects import Dialect
from penstock.fleet.upstream.probing import TRIAL_PROMPT, TRIAL_TOKENS, Prompt, continues_text, heeds_seed
from penstock.fleet.upstream.protocol import Found, Piece, collect, described, finish_reason, status_error
from penstock.fleet.upstream.retokenizer import Vocabulary
from penstock.fleet.upstream.settings import UpstreamConfig

SEEDS = 2**31

# What input tensors for a parameter are called besides its own name; these are of TensorRT-LLM's models.
_OTHER_NAMES: Mapping[str, str] = {"seed": "random_seed", "min_tokens": "min_length"}
# Lists and objects cannot be parameters of a request.
_SCALARS = tuple(name for name in OPTIONAL_PARAMS if name not in ("logit_bias", "stop_token_ids"))


class TritonProtocol:
    def __init__(self, config: UpstreamConfig, vocabulary: Vocabulary) -> None:
        self._config, self._tensors, self._vocabulary = config, config.triton, vocabulary
        self._model = f"/v2/models/{config.model}"
        self._max_tokens = "max_tokens"
        self.says_finish = config.triton.finish_reason is not None

    async def probe(self, http: HttpClient) -> Found:
        if self._config.max_model_len is None:
            raise StartupError("max_model_len must be set: a Triton server does not say it", param="max_model_len")
        metadata = await self._described(http, self._model)
        inputs, outputs = ({tensor["name"] for tensor in metadata.get(side, [])} for side in ("inputs", "outputs"))
        self._check_tensor("text_input", self._tensors.text_input, inputs)
        self._check_tensor("text_output", self._tensors.text_output, outputs)
        backend = str((await self._described(http, f"{self._model}/config")).get("backend", ""))
        parameters = dict(self._tensors.parameters or _known_parameters(backend, inputs))
        self._max_tokens = parameters.pop("max_tokens", "max_tokens")
        dialect = Dialect(parameters, neutral_sent=False, seeds=SEEDS)

        async def ask(prompt: Prompt, params: SamplingParams) -> list[Piece]:
            request = GenerateRequest("probe", (), params, seed=params.seed or 0)
            body = self._body(prompt, dialect.body(request, 0, TRIAL_TOKENS), TRIAL_TOKENS)
            return await collect(http, self, f"{self._model}/generate_stream", body)

        capabilities = Capabilities(
            token_ids_in=False,
            token_ids_out=False,
            logprobs=False,
            seed="seed" in parameters and await heeds_seed(ask, TRIAL_PROMPT),
            continuation=await continues_text(ask),
            params=frozenset(parameters),
        )
        return Found(
            server=f"triton/{backend}" if backend else "triton",
            model=str(self._config.model),
            max_model_len=self._config.max_model_len,
            health_path=self._config.health_path or f"{self._model}/ready",
            dialect=dialect,
            capabilities=capabilities.overridden(self._config.capabilities),
        )

    async def _described(self, http: HttpClient, path: str) -> Mapping[str, Any]:
        response = await described(http, path, self._config.timeouts.check)
        value = response.json() if response.status == 200 else None
        if not isinstance(value, dict):
            raise Unavailable(f"{http.url}{path} answers {response.status}: {response.error_message}")
        return value

    def _check_tensor(self, setting: str, name: str, names: set[str]) -> None:
        if name not in names:
            known = ", ".join(sorted(names))
            message = f"the model {self._config.model} has no tensor {name}, only {known}"
            raise StartupError(message, param=f"triton.{setting}")

    def request(self, found: Found, request: GenerateRequest, max_tokens: int) -> tuple[str, dict[str, Any]]:
        prompt = self._vocabulary.prompt_text([*request.prompt, *request.output])
        min_tokens = max(0, request.params.min_tokens - len(request.output))
        sampling = found.dialect.body(request, min_tokens, found.max_model_len)
        return f"{self._model}/generate_stream", self._body(prompt, sampling, max_tokens)

    def _body(self, prompt: Prompt, sampling: Mapping[str, Any], max_tokens: int) -> dict[str, Any]:
        parameters = {**self._tensors.constants, **sampling, self._max_tokens: max_tokens}
        return {self._tensors.text_input: prompt, "parameters": parameters}

    def parse(self, event: str) -> Piece | None:
        try:
            data = json.loads(event)
            if (error := data.get("error")) is not None:
                raise status_error(500, str(error), {})
            text = _single(data.get(self._tensors.text_output, ""))
            reason = _single(data.get(self._tensors.finish_reason)) if self._tensors.finish_reason else None
        except (ValueError, LookupError, TypeError, AttributeError) as problem:
            raise Unavailable(f"the upstream sends what is not Triton's: {event[:80]!r}", code="protocol") from problem
        return Piece(str(text), cumulative=self._tensors.cumulative, finish_reason=finish_reason(reason))


def _single(value: Any) -> Any:
    """A tensor of one element comes as that element or as a list of it."""
    return value[0] if isinstance(value, list) else value


def _known_parameters(backend: str, inputs: set[str]) -> dict[str, str]:
    """The vLLM backend takes all as parameters of the request; other models have input tensors."""
    if backend == "vllm":
        return {name: name for name in ("max_tokens", *_SCALARS)}
    found = {name: name for name in ("max_tokens", *_SCALARS) if name in inputs}
    return {name: other for name, other in _OTHER_NAMES.items() if other in inputs} | found
