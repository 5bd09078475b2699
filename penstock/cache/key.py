"""The cache key of a request: a digest of everything that changes the answer.

A request is encoded whole, without the fields that are known not to matter, so a field added later is part of the key
before anybody thinks of it. MessagePack is self-delimiting: no two requests have the same encoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from hashlib import blake2b

import msgspec

from penstock import __version__
from penstock.cache.settings import CacheScope
from penstock.core.engine import EngineInfo
from penstock.core.request import GenerateRequest, SamplingParams, SimilarPrompt

_encode = msgspec.msgpack.Encoder().encode

# All fields but those that say how soon and for whom to compute, not what, and those that `_digest` has in another
# form. `n` is fanned out and `params.seed` mixed into the request's own before they come here.
_APART = {"id", "prompt", "params", "seed", "priority", "objective", "deadline", "session", "tenant", "weight"}
_APART |= {"cache", "prefix_scope", "common_tokens", "prediction", "adapter", "waits"}
_REQUEST = tuple(f.name for f in fields(GenerateRequest) if f.name not in _APART)
_PARAMS = tuple(f.name for f in fields(SamplingParams) if f.name not in ("n", "seed", "logit_bias"))


def answer_key(request: GenerateRequest, info: EngineInfo, scope: CacheScope) -> bytes:
    """32 bytes. Isolated by tenant unless the scope is shared."""
    tenant = request.tenant if scope == "tenant" else None
    return _digest("answer", request, info, request.params, tenant, request.prompt)


def bucket_key(request: GenerateRequest, info: EngineInfo, similar: SimilarPrompt) -> bytes:
    """Prompts are compared by meaning only within one bucket, and never across tenants, whatever the scope.

    How many tokens a prompt leaves for its answer depends on its length, so `max_tokens` is not compared here;
    what the client asked for is part of `similar.rest`.
    """
    return _digest("similar", request, info, replace(request.params, max_tokens=None), request.tenant, similar.rest)


def is_deterministic(params: SamplingParams) -> bool:
    return params.greedy or params.seed is not None


def _digest(
    kind: str,
    request: GenerateRequest,
    info: EngineInfo,
    params: SamplingParams,
    tenant: str | None,
    prompt: Sequence[int] | bytes,
) -> bytes:
    seed = request.seed if params.seed is not None and not params.greedy else None
    bias = sorted(request.params.logit_bias.items())  # the order of a mapping means nothing
    asked = [getattr(params, name) for name in _PARAMS], [getattr(request, name) for name in _REQUEST]
    adapter = None if request.adapter is None else request.adapter.digest  # wherever its files lie
    key = (kind, __version__, info, tenant, prompt, seed, bias, adapter, asked)
    return blake2b(_encode(key), digest_size=32).digest()
