"""LoRA adapters at the gateway: what a name means, who may use it, and where its digest goes."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.core.errors import StartupError
from penstock.core.request import GenerateRequest
from penstock.fleet.settings import AdapterConfig, ModelConfig
from penstock.gateway.api.adapters import AdapterBase, Adapters, NamedAdapter, adapters_at_start
from penstock.lora.checkpoint import adapter_digest, summarize_adapter
from penstock.lora.fit import check_fit
from penstock.settings import Settings, settings_from_mapping
from penstock.simulation.scripted_engine import MODEL, Action, hang, says
from penstock.text.tokenizer import Tokenizer
from tests.gateway.api.test_bad_input import check_error
from tests.gateway.api.test_batches import ended, jsonl, line, lines_of, settings_in, submitted
from tests.gateway.conftest import Gateway, serving
from tests.lora.peft_folder import BASE, write_adapter

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LONG = "information " * 300  # read in another process
HELLO: Any = [{"role": "user", "content": "Hello"}]


def base_of(folder: Path | None, any_path: bool = False) -> AdapterBase:
    return AdapterBase(lambda found: check_fit(summarize_adapter(found).modules, BASE, max_rank=8), folder, any_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With two adapters in it."""
    for seed, name in enumerate(("first", "second")):
        write_adapter(tmp_path / "adapters" / name, BASE, seed)
    return tmp_path / "adapters"


@contextmanager
def gateway_of(tokenizer: Tokenizer, folder: Path, settings: Settings | None = None, **more: Any) -> Iterator[Gateway]:
    """Whose engine says which adapter it computes with."""
    base = base_of(folder)
    known = list(adapters_at_start(MODEL, ModelConfig(adapter_folder=str(folder)), base, {}))
    with serving(tokenizer, settings, adapter_base=base, **({"adapters": known} | more)) as gateway:
        gateway.runs(lambda request: says_adapter(tokenizer, request))
        yield gateway


def says_adapter(tokenizer: Tokenizer, request: GenerateRequest) -> list[Action]:
    (tokens,) = says(tokenizer, "none" if request.adapter is None else request.adapter.digest)
    return [[token] for token in tokens]


@pytest.fixture
def gateway(tokenizer: Tokenizer, folder: Path) -> Iterator[Gateway]:
    with gateway_of(tokenizer, folder) as gateway:
        yield gateway


def post(gateway: Gateway, path: str, key: str | None = None, **body: Any) -> httpx.Response:
    with gateway.http() as http:
        return http.post(path, json=body, headers={"authorization": f"Bearer {key}"} if key else {})


def get(gateway: Gateway, path: str, key: str | None = None) -> httpx.Response:
    with gateway.http() as http:
        return http.get(path, headers={"authorization": f"Bearer {key}"} if key else {})


def load(gateway: Gateway, name: str, path: str, key: str | None = None, **more: Any) -> httpx.Response:
    return post(gateway, "/v1/load_lora_adapter", key, lora_name=name, lora_path=path, **more)


def answer(gateway: Gateway, model: str, key: str | None = None, **more: Any) -> str:
    response = post(gateway, CHAT, key, model=model, messages=HELLO, **more)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


def test_adapters_are_listed_as_models_and_chosen_by_name(gateway: Gateway, folder: Path) -> None:
    cards = {card["id"]: card for card in get(gateway, "/v1/models").json()["data"]}
    assert list(cards) == [MODEL, "org/alias", "first", "second"]
    assert (cards[MODEL]["parent"], cards["org/alias"]["root"]) == (None, MODEL)
    assert "digest" not in cards[MODEL]
    for name in ("first", "second"):
        digest = adapter_digest(folder / name)
        assert (cards[name]["parent"], cards[name]["root"], cards[name]["digest"]) == (MODEL, MODEL, digest)
        assert get(gateway, f"/v1/models/{name}").json() == cards[name]
        assert answer(gateway, name) == digest
        completion = gateway.client().completions.create(model=name, prompt="Hello", max_tokens=99)
        assert (completion.model, completion.choices[0].text) == (name, digest)
        stream = gateway.client().chat.completions.create(model=name, messages=HELLO, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == digest
    assert answer(gateway, MODEL) == answer(gateway, "org/alias") == "none"
    long = [{"role": "user", "content": LONG}]
    assert post(gateway, CHAT, model="first", messages=long).json()["choices"][0]["message"][
        "content"
    ] == adapter_digest(folder / "first")
    message = post(gateway, "/v1/messages", model="first", messages=HELLO, max_tokens=99).json()
    assert (message["model"], message["content"][0]["text"]) == ("first", adapter_digest(folder / "first"))
    counted = [post(gateway, "/v1/messages/count_tokens", model=m, messages=HELLO).json() for m in (MODEL, "first")]
    assert counted[0] == counted[1]
    chat = post(gateway, "/api/chat", model="first", messages=HELLO, stream=False).json()
    assert chat["message"]["content"] == adapter_digest(folder / "first")
    assert [tag["name"] for tag in get(gateway, "/api/tags").json()["models"]] == list(cards)
    response = gateway.client().responses.create(model="second", input="Hello")
    assert (response.model, response.output_text) == ("second", adapter_digest(folder / "second"))
    tokens = [post(gateway, "/tokenize", model=name, prompt="Hello").json()["tokens"] for name in (MODEL, "first")]
    assert tokens[0] == tokens[1]
    check_error(post(gateway, CHAT, model="third", messages=HELLO), 404, "model")


def test_a_load_under_a_taken_name_is_for_new_requests(gateway: Gateway, folder: Path) -> None:
    """Requests that were read before go on with what they have."""
    gateway.answers("unused")
    digests = {name: adapter_digest(folder / name) for name in ("first", "second")}
    held = threading.Event()

    def script(request: GenerateRequest) -> list[Action]:
        actions = says_adapter(gateway.tokenizer, request)
        return [*actions[:3], *([wait] if request.params.seed == 7 else []), *actions[3:]]

    async def wait() -> None:
        await asyncio.to_thread(held.wait, 20)

    gateway.runs(script)
    assert load(gateway, "mine", "first").json()["digest"] == digests["first"]
    with gateway.client().chat.completions.create(model="mine", messages=HELLO, stream=True, seed=7) as stream:
        chunks = iter(stream)
        parts = [next(chunks), next(chunks)]
        replaced = load(gateway, "mine", str(folder / "second"), load_inplace=True)
        assert replaced.json() == {
            "id": "mine",
            "model": MODEL,
            "digest": digests["second"],
            "folder": str(folder / "second"),
            "loaded": replaced.json()["loaded"],
            "source": "request",
            "message": "Success: LoRA adapter 'mine' added successfully.",
        }
        assert answer(gateway, "mine") == digests["second"]
        held.set()
        text = "".join(chunk.choices[0].delta.content or "" for chunk in [*parts, *chunks])
    assert text == digests["first"]
    # The folder's content may change as well; its name means what was there when it was loaded.
    write_adapter(folder / "first", BASE, seed=9)
    assert answer(gateway, "first") == digests["first"]
    load(gateway, "first", "first")
    assert answer(gateway, "first") == adapter_digest(folder / "first") != digests["first"]


async def test_many_requests_for_a_name_that_another_gateway_has_loaded(gateway: Gateway, folder: Path) -> None:
    """All at once: those that find that the first of them has just looked it up are not told that it is unknown."""
    store, version = gateway.directory.store, gateway.directory.store.version

    async def slow() -> int:
        await asyncio.sleep(0.01)
        return await version()

    store.version = slow  # type: ignore[method-assign]
    elsewhere = Adapters(store, {MODEL: base_of(folder)})
    loading = asyncio.run_coroutine_threadsafe(elsewhere.load("mine", "first", None), gateway.loop)
    await asyncio.wrap_future(loading)
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
        bodies = [{"model": "mine", "messages": HELLO} for _ in range(10)]
        responses = await asyncio.gather(*(http.post(CHAT, json=body) for body in bodies))
    assert [response.status_code for response in responses] == [200] * 10


def test_a_name_that_a_wildcard_matches_is_the_adapters_own(tokenizer: Tokenizer, folder: Path) -> None:
    with gateway_of(tokenizer, folder, names=[MODEL, "claude-*"]) as gateway:
        assert answer(gateway, "claude-mine") == "none"
        load(gateway, "claude-mine", "first")
        assert answer(gateway, "claude-mine") == adapter_digest(folder / "first")
        assert answer(gateway, "claude-other") == "none"


def test_unloading(gateway: Gateway, folder: Path) -> None:
    load(gateway, "mine", "first")
    for name in ("mine", "first"):  # at run time, and from the folder
        response = post(gateway, "/v1/unload_lora_adapter", lora_name=name)
        assert response.json() == {"id": name, "message": f"Success: LoRA adapter '{name}' removed successfully."}
        check_error(post(gateway, CHAT, model=name, messages=HELLO), 404, "model")
        check_error(post(gateway, "/v1/unload_lora_adapter", lora_name=name), 404, "lora_name")
    assert [one["id"] for one in get(gateway, "/v1/lora_adapters").json()["data"]] == ["second"]
    load(gateway, "first", "first")
    assert answer(gateway, "first") == adapter_digest(folder / "first")


def test_paths_of_requests_stay_below_the_folder(gateway: Gateway, folder: Path, tmp_path: Path) -> None:
    outside = write_adapter(tmp_path / "outside", BASE)
    os.symlink(outside, folder / "link")
    for path in ("../outside", str(outside), "link", "first/../../outside", ".", "", "/", "/etc", "first\0"):
        response = load(gateway, "mine", path)
        assert check_error(response, 400, "lora_path")["message"] == f"lora_path must be below {folder}"
    assert load(gateway, "mine", "second/../first").status_code == 200
    absent = check_error(load(gateway, "mine", "absent"), 400, "lora_path")
    assert "absent/adapter_config.json: No such file" in absent["message"]


def test_paths_where_settings_allow_any_or_none(tokenizer: Tokenizer, folder: Path) -> None:
    with serving(tokenizer, adapter_base=base_of(None)) as gateway:
        refused = check_error(load(gateway, "mine", str(folder / "first")), 400, "lora_path")
        assert refused["message"] == "lora_path needs adapter_folder in the settings"
    with serving(tokenizer, adapter_base=base_of(None, any_path=True)) as gateway:
        assert load(gateway, "mine", str(folder / "first")).status_code == 200
    with serving(tokenizer) as gateway:  # of a model that takes none
        check_error(load(gateway, "mine", str(folder / "first")), 400, "lora_path")


@pytest.mark.parametrize(
    ("name", "path", "more", "param", "words"),
    [
        (MODEL, "first", {}, "lora_name", "is the name of a model"),
        ("org/alias", "first", {}, "lora_name", "is the name of a model"),
        ("", "first", {}, "lora_name", "must be up to 128 letters"),
        ("two words", "first", {}, "lora_name", "must be up to 128 letters"),
        ("fixed", "first", {}, "lora_name", "is in the settings: change it there"),
        ("mine", "large", {}, "lora_path", "rank is 16 at model.layers.0.mlp.down_proj; supported: up to 8"),
        ("mine", "dora", {}, "lora_path", "use_dora True is not supported"),
        ("mine", "first", {"base_model": "other"}, "base_model", f"must be one of {MODEL}, not 'other'"),
        ("mine", "first", {"rank": 1}, "rank", "rank"),
    ],
)
def test_loads_that_are_refused(
    tokenizer: Tokenizer, folder: Path, name: str, path: str, more: dict[str, Any], param: str, words: str
) -> None:
    write_adapter(folder / "large", BASE, rank=16)
    write_adapter(folder / "dora", BASE, use_dora=True)
    fixed = adapters_at_start(
        MODEL, ModelConfig(adapters=(AdapterConfig("fixed", str(folder / "first")),)), base_of(None), {}
    )
    with gateway_of(tokenizer, folder, adapters=list(fixed)) as gateway:
        assert words in check_error(load(gateway, name, path, **more), 400, param)["message"]
        assert [one["id"] for one in get(gateway, "/v1/lora_adapters").json()["data"]] == ["fixed"]


def test_a_model_of_several_is_found_by_its_layers(tokenizer: Tokenizer, folder: Path) -> None:
    from penstock.gateway.api.models import ServedModel
    from penstock.simulation.scripted_engine import ScriptedEngine

    def beside(name: str, base: AdapterBase) -> ServedModel:
        return ServedModel([name], tokenizer, ScriptedEngine(tokenizer, lambda request: []), base)

    wide = {layer: (2 * inputs, outputs) for layer, (inputs, outputs) in BASE.items()}
    other = AdapterBase(lambda found: check_fit(summarize_adapter(found).modules, wide, 8), folder, False)
    with gateway_of(tokenizer, folder, beside=[beside("wide", other), beside("twin", base_of(folder))]) as gateway:
        write_adapter(folder / "for-wide", wide)
        assert load(gateway, "a", "for-wide").json()["model"] == "wide"
        both = check_error(load(gateway, "b", "first"), 400, "base_model")
        assert both["message"] == f"the adapter fits {MODEL}, twin: say which as base_model"
        assert load(gateway, "b", "first", base_model="twin").json()["model"] == "twin"
        misfit = check_error(load(gateway, "c", "first", base_model="wide"), 400, "lora_path")
        assert "the adapter is for another model" in misfit["message"]
        assert get(gateway, "/v1/models/b").json()["parent"] == "twin"


TENANTS = {
    "tenants": {
        "all": {},
        "one": {"models": ["first"]},
        "base": {"models": [MODEL]},
        "both": {"models": ["org/alias", "second", "later"]},
    }
}


def test_tenants_see_and_use_only_their_adapters(tokenizer: Tokenizer, folder: Path) -> None:
    with gateway_of(tokenizer, folder, settings_from_mapping(TENANTS)) as gateway:
        seen = {
            "all": [MODEL, "org/alias", "first", "second"],
            "one": ["first"],
            "base": [MODEL, "org/alias"],
            "both": [MODEL, "org/alias", "second"],
        }
        for tenant, names in seen.items():
            key = gateway.key(tenant)
            assert [card["id"] for card in get(gateway, "/v1/models", key).json()["data"]] == names
            for name in seen["all"]:
                responses = [
                    post(gateway, CHAT, key, model=name, messages=HELLO),
                    post(gateway, TEXT, key, model=name, prompt=LONG),
                    get(gateway, f"/v1/models/{name}", key),
                ]
                for response in responses:
                    if name in names:
                        assert response.status_code == 200
                    else:
                        error = check_error(response, 404, "model")
                        assert (error["code"], "second" in error["message"]) == (
                            "model_not_found",
                            "second" in (name, *names),
                        )
        for status, by in ((401, None), (403, gateway.key("all")), (200, gateway.key(""))):
            assert load(gateway, "later", "first", by).status_code == status
            assert get(gateway, "/v1/lora_adapters", by).status_code == status
        assert answer(gateway, "later", gateway.key("both")) == adapter_digest(folder / "first")
        check_error(post(gateway, CHAT, gateway.key("one"), model="later", messages=HELLO), 404, "model")


def test_stored_answers_belong_to_the_content(tokenizer: Tokenizer, folder: Path) -> None:
    with gateway_of(tokenizer, folder, cached=True) as gateway:

        def ask(model: str) -> tuple[str, str]:
            response = post(gateway, CHAT, model=model, messages=HELLO, temperature=0)
            return response.json()["choices"][0]["message"]["content"], response.headers["x-penstock-cache"].split(";")[
                0
            ]

        digests = [adapter_digest(folder / name) for name in ("first", "second")]
        assert ask(MODEL) == ("none", "miss")
        assert [ask("first"), ask("second")] == [(digests[0], "miss"), (digests[1], "miss")]
        assert [ask("first"), ask("second"), ask(MODEL)] == [(digests[0], "hit"), (digests[1], "hit"), ("none", "hit")]
        load(gateway, "first", "second")  # another content under the name: what was stored for the name is not found
        assert ask("first") == (digests[1], "hit")
        write_adapter(folder / "copy", BASE, seed=0)  # the same content at another place under another name
        load(gateway, "copy", "copy")
        assert ask("copy") == (digests[0], "hit")


@pytest.mark.parametrize("replaced", [False, True])
def test_batches_go_on_with_the_adapter_that_they_began_with(
    tokenizer: Tokenizer, folder: Path, tmp_path: Path, replaced: bool
) -> None:
    """After a restart a line continues from its tokens only if the name still means the adapter that gave them."""
    settings = settings_in(tmp_path / "batches")
    taken = threading.Event()

    async def hang_noticed() -> None:
        taken.set()
        await hang()

    with gateway_of(tokenizer, folder, settings) as first:
        first.runs(lambda request: [*says_adapter(tokenizer, request)[:3], hang_noticed])
        batch = submitted(first.client(), jsonl(line("a", model="first")))
        assert taken.wait(60)
    if replaced:
        write_adapter(folder / "first", BASE, seed=9)
    with gateway_of(tokenizer, folder, settings) as second:
        second.runs(lambda request: says_adapter(tokenizer, request)[len(request.output) :])
        client = second.client()
        answers = lines_of(client, ended(client, batch.id).output_file_id)
        (request,) = second.engine.requests
    assert len(request.output) == (0 if replaced else 3)
    content = answers["a"]["response"]["body"]["choices"][0]["message"]["content"]
    assert content == adapter_digest(folder / "first")


def test_lines_for_an_adapter_that_was_unloaded_are_refused(tokenizer: Tokenizer, folder: Path, tmp_path: Path) -> None:
    with gateway_of(tokenizer, folder, settings_in(tmp_path / "batches", concurrent=1)) as gateway:
        taken, go = threading.Event(), asyncio.Event()

        async def wait() -> None:
            taken.set()
            await go.wait()

        gateway.runs(lambda request: [*([] if taken.is_set() else [wait]), *says_adapter(tokenizer, request)])
        assert load(gateway, "extra", "second").status_code == 200
        client = gateway.client()
        names = ("second", "first", "extra", "second")
        batch = submitted(client, jsonl(*(line(f"{at}", model=name) for at, name in enumerate(names))))
        assert taken.wait(60)
        for name in ("first", "extra"):  # of the folder, and of a request
            assert post(gateway, "/v1/unload_lora_adapter", lora_name=name).status_code == 200
        gateway.loop.call_soon_threadsafe(go.set)
        done = ended(client, batch.id)
        assert lines_of(client, done.output_file_id).keys() == {"0", "3"}
        errors = lines_of(client, done.error_file_id)
        said = {at: (one["response"]["status_code"], one["response"]["body"]["error"]) for at, one in errors.items()}
        assert {at: (status, error["code"]) for at, (status, error) in said.items()} == {
            "1": (404, "model_not_found"),
            "2": (404, "model_not_found"),
        }
        assert all("was unloaded" in error["message"] for _, error in said.values())
        assert load(gateway, "extra", "first").status_code == 200
        again = submitted(client, jsonl(line("again", model="extra")))
        assert lines_of(client, ended(client, again.id).output_file_id).keys() == {"again"}


def test_accounts_show_the_adapter(gateway: Gateway, folder: Path) -> None:
    found = post(gateway, CHAT, model="first", messages=HELLO).json()
    account = get(gateway, f"/v1/requests/{found['id']}").json()
    assert (account["asked"], account["model"]) == ("first", MODEL)
    assert account["adapter"] == {"name": "first", "digest": adapter_digest(folder / "first")}
    plain = post(gateway, CHAT, model=MODEL, messages=HELLO).json()
    assert get(gateway, f"/v1/requests/{plain['id']}").json()["adapter"] is None
    metrics = get(gateway, "/metrics").text
    assert f'penstock_answers_total{{model="{MODEL}",status="200"}} 2.0' in metrics
    assert '"first"' not in metrics  # no label grows with the number of adapters


def test_virtual_models_may_name_adapters(tokenizer: Tokenizer, folder: Path) -> None:
    entries = [{"name": name, "path": str(folder / name)} for name in ("first", "second")]
    models: dict[str, Any] = {
        MODEL: {"adapters": entries},
        "split": {"versions": {"first": 1, "second": 1}},
        "careful": {"cascade": {"small": "first", "large": MODEL, "min_logprob": None}},
        "unsure": {"cascade": {"small": "first", "large": MODEL, "min_logprob": 0}},
    }
    settings = settings_from_mapping({"models": models})
    known = list(adapters_at_start(MODEL, settings.models[MODEL], base_of(None), {}))
    with gateway_of(tokenizer, folder, settings, adapters=known) as gateway:
        digests = [adapter_digest(folder / name) for name in ("first", "second")]
        found = {user: answer(gateway, "split", user=user) for user in map(str, range(20))}
        assert set(found.values()) == set(digests)
        response = post(gateway, CHAT, model="split", messages=HELLO, user="0")
        assert response.headers["x-penstock-model"] == ("first" if found["0"] == digests[0] else "second")
        assert answer(gateway, "careful") == digests[0]

        response = post(gateway, TEXT, model="unsure", prompt="a", n=2, max_tokens=99)
        assert [choice["text"] for choice in response.json()["choices"]] == ["none", "none"]
        attempts = gateway.engine.requests[-4:]
        assert [request.adapter is None for request in attempts] == [False, False, True, True]
        assert len({request.id for request in attempts}) == 4, "the same worker has them at the same time"
        account = get(gateway, f"/v1/requests/{response.headers['x-request-id']}").json()
        assert [attempt["model"] for attempt in account["attempts"]] == ["first"]
        for request in attempts:  # as the accounts of others name those who made them wait
            assert get(gateway, f"/v1/requests/{request.id}").json() == account


def test_what_is_there_from_the_start(folder: Path) -> None:
    write_adapter(folder / "large", BASE, rank=16)
    write_adapter(folder / "bad name", BASE)
    (folder / "empty").mkdir()
    config = ModelConfig(
        adapters=(AdapterConfig("mine", str(folder / "first"), ("alias",)),), adapter_folder=str(folder)
    )
    refused: dict[str, str] = {}
    found = {each.name: each for each in adapters_at_start(MODEL, config, base_of(folder), refused)}
    assert {name: each.source for name, each in found.items()} == {
        "mine": "settings",
        "alias": "settings",
        "first": "folder",
        "second": "folder",
    }
    assert found["alias"].adapter == found["mine"].adapter
    assert list(refused) == ["bad name", "large"]
    assert refused["large"].startswith("the adapter's rank is 16")
    bad = ModelConfig(adapters=(AdapterConfig("mine", str(folder / "large")),))
    with pytest.raises(StartupError, match=r"adapter mine of .*: the adapter's rank is 16"):
        list(adapters_at_start(MODEL, bad, base_of(None), {}))
    with pytest.raises(StartupError, match="is not a folder"):
        list(adapters_at_start(MODEL, ModelConfig(), base_of(folder / "absent"), {}))


def test_a_model_and_an_adapter_of_one_name_cannot_be_served(tokenizer: Tokenizer, folder: Path) -> None:
    from penstock.state.memory import MemoryStore

    known: list[NamedAdapter] = list(adapters_at_start(MODEL, ModelConfig(), base_of(folder), {}))
    with pytest.raises(StartupError, match="both served as 'second'"):
        Adapters(MemoryStore(), {MODEL: base_of(folder)}, known, taken=["second"])
