"""The engine as a library, on the built-in model."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock import LLM, SamplingParams
from penstock.checkpoint.source import resolve
from penstock.core.errors import (
    ContextTooLong,
    EngineFailure,
    InvalidLogits,
    InvalidRequest,
    StartupError,
    Unavailable,
)
from penstock.core.request import Grammar
from penstock.kernels.native.model import NativeModel
from penstock.llm import Completion
from penstock.lora.fit import projections
from penstock.models.config import read_config
from tests.lora.peft_folder import MODEL as OTHER_MODEL
from tests.lora.peft_folder import write_adapter


@pytest.fixture(scope="module")
def adapter_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the adapters one and two."""
    folder, base = tmp_path_factory.mktemp("adapters"), projections(read_config(resolve("smollm2-135m")))
    for seed, name in enumerate(("one", "two")):
        write_adapter(folder / name, base, seed, rank=8, size=0.06)
    return folder


@pytest.fixture(scope="module")
def llm(adapter_folder: Path) -> Iterator[LLM]:
    with LLM("smollm2-135m", adapters={"one": adapter_folder / "one"}, kv_memory_gib=0.5, max_model_len=512) as running:
        yield running


def greedy(**options: object) -> SamplingParams:
    return SamplingParams(temperature=0, **{"max_tokens": 12, **options})  # type: ignore[arg-type]


def test_text_and_token_ids_are_the_same_prompt(llm: LLM) -> None:
    text = "The three primary colours are"
    by_text = llm.generate(text, greedy(), progress=False)
    by_ids = llm.generate([llm.tokenizer.encode(text)], greedy(), progress=False)
    assert by_text[0].choices == by_ids[0].choices
    assert by_text[0].choices[0].finish_reason == "length"
    assert len(by_text[0].choices[0].token_ids) == 12
    assert by_text[0].text == llm.tokenizer.decode(by_text[0].choices[0].token_ids)


def test_an_adapter_that_overflows_fails_its_own_request(llm: LLM, tmp_path: Path) -> None:
    base, prompt = projections(read_config(resolve("smollm2-135m"))), "The three primary colours are"
    llm.load_adapter("huge", write_adapter(tmp_path / "huge", base, size=1e19))
    alone = llm.generate(prompt, greedy(), progress=False)[0].text

    async def both() -> list[str | InvalidLogits]:
        async def text_of(adapter: str | None) -> str:
            return "".join([delta.text async for delta in llm.stream(prompt, greedy(), adapter=adapter)])

        return await asyncio.gather(text_of("huge"), text_of(None), return_exceptions=True)  # type: ignore[return-value]

    failed, text = asyncio.run(both())
    assert isinstance(failed, InvalidLogits)
    assert "adapter" in failed.message
    assert text == alone
    for params in (greedy(logprobs=2), SamplingParams(temperature=1, top_p=0.9, max_tokens=5)):
        with pytest.raises(InvalidLogits):
            llm.generate(prompt, params, adapter="huge", progress=False)


def test_one_params_each(llm: LLM) -> None:
    short, long = llm.generate(["Water boils at"] * 2, [greedy(max_tokens=2), greedy(max_tokens=5)], progress=False)
    assert [len(c.choices[0].token_ids) for c in (short, long)] == [2, 5]
    with pytest.raises(InvalidRequest, match="2 prompts but 1 params"):
        llm.generate(["a", "b"], [greedy()], progress=False)


def test_an_adapter_for_each_prompt(llm: LLM, adapter_folder: Path) -> None:
    llm.load_adapter("two", adapter_folder / "two")
    prompt, names = "The ship that came in", [None, "one", "two"]
    alone = [llm.generate(prompt, greedy(), adapter=name, progress=False)[0].text for name in names]
    assert len(set(alone)) == 3
    mixed = llm.generate([prompt] * 4, greedy(), adapter=[*names, "one"], progress=False)
    assert [completion.text for completion in mixed] == [*alone, alone[1]]
    with pytest.raises(InvalidRequest, match="2 prompts but 1 adapters"):
        llm.generate(["a", "b"], greedy(), adapter=["one"], progress=False)
    with pytest.raises(InvalidRequest, match=r"no adapter 'three'; loaded: .*two"):
        llm.generate(prompt, greedy(), adapter="three", progress=False)


def test_chats_and_streams_with_an_adapter(llm: LLM) -> None:
    prompt, message = "The ship that came in", [{"role": "user", "content": "Who are you?"}]

    async def streamed(adapter: str | None) -> str:
        return "".join([delta.text async for delta in llm.stream(prompt, greedy(), adapter=adapter)])

    for adapter in (None, "one"):
        assert asyncio.run(streamed(adapter)) == llm.generate(prompt, greedy(), adapter=adapter, progress=False)[0].text
    assert llm.chat(message, greedy(), adapter="one").text != llm.chat(message, greedy()).text


def test_an_adapter_of_another_model_is_refused(llm: LLM, tmp_path: Path) -> None:
    write_adapter(tmp_path, projections(OTHER_MODEL))
    with pytest.raises(InvalidRequest, match="for another model"):
        llm.load_adapter("one", tmp_path)


def test_choices_differ_and_a_seed_repeats_them(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=11, max_tokens=8, temperature=1.0)

    def texts(completion: Completion) -> list[str]:
        return [choice.text for choice in completion.choices]

    alone = llm.generate("My favourite animal is", params, progress=False)[0]
    crowd = llm.generate(["My favourite animal is", "It is raining", "Zebras"], params, progress=False)[0]
    assert len(set(texts(alone))) == 3
    assert texts(alone) == texts(crowd)


def test_stop_string_and_stop_id(llm: LLM) -> None:
    prompt = "1, 2, 3, 4,"
    whole = llm.generate(prompt, greedy(), progress=False)[0].choices[0]
    cut = llm.generate(prompt, greedy(stop=(" 6",)), progress=False)[0].choices[0]
    assert cut.finish_reason == "stop"
    assert cut.text == whole.text[: whole.text.index(" 6")]
    by_id = llm.generate(prompt, greedy(stop_token_ids=(whole.token_ids[3],)), progress=False)[0].choices[0]
    assert by_id.finish_reason == "stop"
    assert by_id.token_ids == whole.token_ids[: whole.token_ids.index(whole.token_ids[3]) + 1]


def test_logprobs_of_output_and_prompt_agree(llm: LLM) -> None:
    """What was sampled with a log-probability is given the same one when it comes back as a prompt, in chunks too."""
    prompt = llm.tokenizer.encode("The sun rises in the east and")
    first = llm.generate([prompt], greedy(logprobs=3), progress=False)[0].choices[0]
    again = llm.generate([prompt + first.token_ids], greedy(max_tokens=1, prompt_logprobs=2), progress=False)[0]
    assert first.logprobs is not None
    assert again.prompt_logprobs is not None
    assert again.prompt_logprobs[0] is None
    assert len(again.prompt_logprobs) == len(prompt) + len(first.token_ids)
    for sampled, scored in zip(first.logprobs, again.prompt_logprobs[len(prompt) :], strict=True):
        assert scored is not None
        assert scored.token_id == sampled.token_id
        assert scored.logprob == pytest.approx(sampled.logprob, abs=1e-4)
        assert sampled.top[0] == (sampled.token_id, sampled.logprob)  # greedy takes the likeliest
        assert (len(sampled.top), len(scored.top)) == (3, 2)


async def test_stream_adds_up_and_closing_it_frees_the_engine(llm: LLM) -> None:
    whole = llm.generate("Once upon a time", greedy(max_tokens=20), progress=False)[0]
    deltas = [delta async for delta in llm.stream("Once upon a time", greedy(max_tokens=20))]
    assert "".join(delta.text for delta in deltas) == whole.text
    assert deltas[-1].finish_reason == "length"

    stream = llm.stream("Once upon a time", greedy(max_tokens=400, ignore_eos=True))
    await anext(stream)
    await stream.aclose()
    llm.generate("x", greedy(max_tokens=1), progress=False)  # a step later the abort has been seen
    assert llm.engine.stats.running == 0


def test_chat_uses_the_template(llm: LLM) -> None:
    answer = llm.chat([{"role": "user", "content": "Say hello."}], greedy())
    assert llm.tokenizer.decode(answer.prompt_token_ids, skip_special_tokens=False).endswith("<|im_start|>assistant\n")


def test_what_cannot_fit_is_refused_and_others_go_on(llm: LLM) -> None:
    with pytest.raises(ContextTooLong, match="600 tokens"):
        llm.generate([[5] * 600], greedy(), progress=False)
    with pytest.raises(InvalidRequest, match="empty"):
        llm.generate([[1, 2], []], greedy(), progress=False)
    assert llm.generate("Hello", greedy(), progress=False)[0].text
    assert llm.engine.stats.running == 0


def test_an_answer_ends_as_it_does_alone_whoever_had_its_row_before() -> None:
    """The rows of a batch had longer prompts, and a neighbour is sampled."""
    with LLM("smollm2-135m", kv_memory_gib=0.3, max_seqs=2, max_model_len=512) as model:
        asked = model.tokenizer.encode("<|im_start|>user\nSay hi.<|im_end|>\n<|im_start|>assistant\n")
        (alone,) = model.generate([asked], greedy(max_tokens=60), progress=False)
        assert alone.choices[0].finish_reason == "stop"
        for temperature in (1.0, 0.0):
            params = SamplingParams(temperature=temperature, max_tokens=4)
            model.generate(["word " * 300, "other " * 300], params, progress=False)
        beside = SamplingParams(temperature=1.0, max_tokens=100, ignore_eos=True)
        prompts: list[str | Sequence[int]] = [asked, "Once"]
        answers = model.generate(prompts, [greedy(max_tokens=60), beside], progress=False)
        assert answers[0].choices == alone.choices


def test_a_stop_string_by_itself_is_one(llm: LLM) -> None:
    whole = llm.generate("Rain falls because", greedy(), progress=False)[0].text
    word = whole.split()[3]
    cut = llm.generate("Rain falls because", greedy(stop=word), progress=False)[0]
    assert cut.text == whole[: whole.index(word)]


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"temperature": None}, "temperature"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_tokens": 1.5}, "min_tokens"),
        ({"logprobs": 2.5}, "logprobs"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"stop": (3,)}, "stop"),
        ({"stop": None}, "stop"),
        ({"stop_token_ids": (1.5,)}, "stop_token_ids"),
        ({"logit_bias": {1.5: 1.0}}, "logit_bias"),
        ({"logit_bias": {5: "x"}}, "logit_bias"),
        ({"logit_bias": None}, "logit_bias"),
    ],
)
def test_parameters_of_a_wrong_type_are_named(wrong: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest, match="must") as caught:
        SamplingParams(**wrong)
    assert caught.value.param == param


def test_calls_that_make_no_sense_are_refused_and_others_go_on(llm: LLM) -> None:
    async def several() -> None:
        async for _ in llm.stream("Count", SamplingParams(n=3)):
            pass

    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: llm.generate([[1.5]], greedy()), "prompt"),  # type: ignore[arg-type]
        (lambda: llm.generate("a", {"temperature": 0}), "params"),  # type: ignore[arg-type]
        (lambda: llm.chat("hi"), "messages"),  # type: ignore[arg-type]
        (lambda: asyncio.run(several()), "n"),
        (lambda: Grammar("ebnf", "x"), "grammar"),  # type: ignore[arg-type]
    ]
    for call, param in calls:
        with pytest.raises(InvalidRequest, match="must") as caught:
            call()
        assert caught.value.param == param
    ids = llm.tokenizer.encode("Rain falls because")
    (expected,) = llm.generate([ids], greedy(), progress=False)
    numbers = llm.generate(np.array(ids), greedy(top_k=np.int64(4)), progress=False)  # type: ignore[arg-type]
    assert numbers[0].text == expected.text


def test_a_forked_process_is_told_to_load_a_model_of_its_own(llm: LLM) -> None:
    child = os.fork()
    if child == 0:
        try:
            llm.generate("Hi", greedy(), progress=False)
        except Unavailable as error:
            os._exit(0 if error.code == "forked" else 2)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert llm.generate("Hi", greedy(), progress=False)[0].text


def test_without_params_the_model_is_sampled_as_recommended(llm: LLM) -> None:
    assert llm.sampling_defaults == SamplingParams(temperature=0.2, top_p=0.9)
    asked = {"temperature": 0, "top_k": 40}
    with LLM("smollm2-135m", kv_memory_gib=0.2, max_model_len=32, sampling_defaults=asked) as own:
        assert own.sampling_defaults == SamplingParams(temperature=0, top_p=0.9, top_k=40)
        silent = own.generate("The sun rises in", progress=False)[0]
        assert silent.choices == own.generate("The sun rises in", greedy(max_tokens=None), progress=False)[0].choices


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 10**6}, "lower max_model_len"),
        ({"kv_memory_gib": 10_000.0}, "set kv_memory_gib to at most"),
        ({"kv_memory_gib": 1e-6}, "raise kv_memory_gib"),
        ({"dtype": "int3"}, "dtype must be one of"),
        ({"max_seq": 4}, "max_seq is not a setting .did you mean max_seqs"),
        ({"max_seqs": "many"}, "max_seqs must be"),
        ({"speculation": {"method": "of"}}, "speculation.method must be"),
        ({"speculation": {"metod": "off"}}, "speculation.metod is not a setting .did you mean method"),
    ],
)
def test_settings_that_cannot_work_say_what_to_change(options: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        LLM("smollm2-135m", **options)


def test_closing_ends_what_runs_and_refuses_what_comes() -> None:
    llm = LLM("smollm2-135m", kv_memory_gib=0.5, max_model_len=512)
    endless = greedy(max_tokens=500, ignore_eos=True)
    running = threading.Event()
    failures: list[Exception] = []

    async def stream() -> None:
        async for _ in llm.stream("Once upon a time", endless):
            running.set()

    def catch(call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:
            failures.append(error)

    calls: list[Callable[[], object]] = [
        lambda: llm.generate(["One", "Two"], endless, progress=False),
        lambda: asyncio.run(stream()),
    ]
    threads = [threading.Thread(target=catch, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    assert running.wait(60)
    llm.close()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "it waits for an engine that is gone"
    assert len(failures) == 2
    assert all(isinstance(error, EngineFailure | Unavailable) and "closed" in str(error) for error in failures)
    calls.append(lambda: llm.chat([{"role": "user", "content": "Hi"}], greedy()))
    for call in calls:
        with pytest.raises(Unavailable, match="has been closed"):
            call()
    with pytest.raises(Unavailable, match="has been closed"):
        llm.load_adapter("one", "nowhere")
    llm.close()  # again is harmless


def test_closing_frees_the_model() -> None:
    def models() -> int:
        return sum(type(thing) is NativeModel for thing in gc.get_objects())

    gc.collect()  # else models of other tests are counted that the next collection frees
    before = models()
    with LLM("smollm2-135m", kv_memory_gib=0.1, max_model_len=64) as llm:
        llm.generate("One", greedy(max_tokens=2), progress=False)
        assert models() == before + 1
    assert models() == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_gpu() -> None:
    with pytest.raises(StartupError, match="use --device cpu"):
        LLM("smollm2-135m", device="cuda")
