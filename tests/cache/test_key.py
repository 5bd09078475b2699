"""What makes two requests the same."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from penstock.cache.key import answer_key, bucket_key
from penstock.core.engine import EngineInfo
from penstock.core.request import Adapter, CacheControl, GenerateRequest, Objective, SamplingParams, SimilarPrompt

INFO = EngineInfo("model", 100, 1000, "revision")
REST = SimilarPrompt("text", b"rest")

signed = st.floats(-2, 2).map(lambda value: value + 0.0)  # -0.0 equals 0.0, but need not have its key
params = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(0, 100),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.01, 100),
    presence_penalty=signed,
    frequency_penalty=signed,
    logit_bias=st.dictionaries(st.integers(0, 999), signed, max_size=3),
    seed=st.integers(-(2**63), 2**63 - 1),
    max_tokens=st.integers(8, 100),
    min_tokens=st.integers(0, 8),
    stop=st.lists(st.text(min_size=1, max_size=4), max_size=3).map(tuple),
    stop_token_ids=st.lists(st.integers(0, 999), max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
)
requests = st.builds(
    GenerateRequest,
    id=st.text(max_size=8),
    prompt=st.lists(st.integers(0, 999), min_size=1, max_size=8),
    params=params,
    seed=st.integers(0, 2**63 - 1),
    cache_salt=st.text(max_size=4),
    tenant=st.text(max_size=4),
    prefix_scope=st.text(max_size=4),
    common_tokens=st.integers(0, 9),
    adapter=st.none() | st.builds(Adapter, digest=st.text(max_size=4), folder=st.text(max_size=4)),
)
# Fields that say when and for whom to compute, not what. `n` and the client's seed have become choices and their seeds.
SILENT = {"id", "priority", "objective", "deadline", "weight", "cache", "prefix_scope", "common_tokens"}
SILENT_PARAMS = {"n", "seed"}


def meaning(request: GenerateRequest) -> tuple[Any, ...]:
    """Everything that changes the answer, compared by value and independently of how keys are made."""
    own = {f.name: getattr(request, f.name) for f in fields(request) if f.name not in SILENT | {"params", "seed"}}
    sampling = {f.name: getattr(request.params, f.name) for f in fields(SamplingParams) if f.name not in SILENT_PARAMS}
    own["adapter"] = None if request.adapter is None else request.adapter.digest
    seed = None if request.params.greedy else request.seed
    return list(own.pop("prompt")), own, sampling, seed


@given(requests, requests, st.data())
def test_keys_differ_exactly_when_the_answer_may(one: GenerateRequest, other: GenerateRequest, data: Any) -> None:
    # Most fields are taken from the first request, so that single differences occur.
    names = [f.name for f in fields(GenerateRequest) if f.name != "params"]
    for name in data.draw(st.sets(st.sampled_from(names))):
        other = replace(other, **{name: getattr(one, name)})
    changed = data.draw(st.sets(st.sampled_from([f.name for f in fields(SamplingParams)]), max_size=2))
    other = replace(other, params=replace(one.params, **{name: getattr(other.params, name) for name in changed}))
    same = answer_key(one, INFO, "tenant") == answer_key(other, INFO, "tenant")
    assert same == (meaning(one) == meaning(other))


@given(requests, st.text(max_size=8), st.integers(), st.floats(0.1, 9))
def test_who_asks_and_how_urgently_does_not_matter(
    one: GenerateRequest, name: str, priority: int, seconds: float
) -> None:
    other = replace(
        one,
        id=name,
        prompt=tuple(one.prompt),
        priority=priority % 100,
        objective=Objective(ttft=seconds),
        deadline=seconds,
        weight=seconds,
        cache=CacheControl(max_age=seconds),
    )
    assert answer_key(one, INFO, "tenant") == answer_key(other, INFO, "tenant")


def test_the_model_and_its_revision_matter() -> None:
    one = GenerateRequest("a", [1], SamplingParams(temperature=0))
    infos = [INFO, replace(INFO, model="x"), replace(INFO, revision="x")]
    assert len({answer_key(one, info, "tenant") for info in infos}) == 3
    assert len({bucket_key(one, info, REST) for info in infos}) == 3


def test_tenants_share_only_where_the_scope_says_so_and_never_by_meaning() -> None:
    one = GenerateRequest("a", [1], SamplingParams(temperature=0), tenant="one")
    other = replace(one, tenant="other")
    assert answer_key(one, INFO, "tenant") != answer_key(other, INFO, "tenant")
    assert answer_key(one, INFO, "shared") == answer_key(other, INFO, "shared")
    assert answer_key(one, INFO, "shared") != answer_key(replace(one, tenant=""), INFO, "tenant")
    assert bucket_key(one, INFO, REST) != bucket_key(other, INFO, REST)


@given(requests, requests, st.binary(max_size=4), st.binary(max_size=4))
def test_buckets_hold_only_what_may_be_compared(
    one: GenerateRequest, other: GenerateRequest, rest: bytes, rest_of_other: bytes
) -> None:
    """Whatever the prompts are; how much room they leave for an answer is compared when one is found."""
    other = replace(other, prompt=one.prompt, params=replace(other.params, max_tokens=one.params.max_tokens))
    same = bucket_key(one, INFO, SimilarPrompt("x", rest)) == bucket_key(other, INFO, SimilarPrompt("y", rest_of_other))
    assert same == ((meaning(one), rest) == (meaning(other), rest_of_other))
