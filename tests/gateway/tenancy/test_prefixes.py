"""Which prompts of which tenants share blocks: from their keys at the gateway to what a real scheduler finds cached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import StartupError
from penstock.settings import settings_from_mapping
from penstock.simulation.scripted_engine import MODEL
from penstock.text.tokenizer import Tokenizer
from tests.engine.test_scheduler import Harness, limits
from tests.gateway.conftest import Gateway, serving

SYSTEM = "You are a careful assistant of the shop. Answer briefly, and name the page where it is written. " * 2
BLOCK = 4


def ask(gateway: Gateway, tenant: str, system: str, text: str, **fields: Any) -> None:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    headers = {"authorization": f"Bearer {gateway.key(tenant)}"}
    with gateway.http() as http:
        body = {"model": MODEL, "messages": messages, "max_tokens": 2, **fields}
        assert http.post("/v1/chat/completions", json=body, headers=headers).status_code == 200


def cached(gateway: Gateway) -> list[tuple[int, int]]:
    """What the engine had of each prompt, and how long that was."""
    longest = max(len(request.prompt) for request in gateway.engine.requests) + 2
    vocab_size = gateway.engine.info.vocab_size
    harness = Harness(limits(num_blocks=1000, max_model_len=longest, max_step_tokens=256, vocab_size=vocab_size))
    assert harness.limits.block_size == BLOCK
    found = []
    for request in gateway.engine.requests:
        own = {name: getattr(request, name) for name in ("cache_salt", "prefix_scope", "common_tokens", "tenant")}
        id = harness.submit(list(request.prompt), 2, **own)
        harness.run()
        found.append((harness.outcomes[id].cached, len(request.prompt)))
    return found


def of(length: int) -> int:
    """Full blocks of a prompt, less what has to be computed."""
    return (length - 1) // BLOCK * BLOCK


def settings(**cache: Any) -> Any:
    return settings_from_mapping({"tenants": {"a": {}, "b": {}}, "cache": cache})


def test_tenants_do_not_share_unless_they_are_told_to(tokenizer: Tokenizer) -> None:
    with serving(tokenizer, settings()) as gateway:
        for tenant in ("a", "b", "a", "b"):
            ask(gateway, tenant, SYSTEM, "Where is the key?")
        (one, length), (other, _), (again, _), (other_again, _) = cached(gateway)
        assert (one, other, again, other_again) == (0, 0, of(length), of(length))
    with serving(tokenizer, settings(share_prefixes=True)) as gateway:
        for tenant, salt in (("a", None), ("b", None), ("b", "secret")):
            ask(gateway, tenant, SYSTEM, "Where is the key?", cache_salt=salt)
        (_, length), (shared, _), (salted, _) = cached(gateway)
        assert (shared, salted) == (of(length), 0)


def test_a_declared_system_prompt_is_everybodys(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "system.txt").write_text(SYSTEM)
    with serving(tokenizer, settings(shared_prefixes=["Another.", f"@{tmp_path}/system.txt"])) as gateway:
        for tenant, system in (
            ("a", SYSTEM),
            ("b", SYSTEM),
            ("b", SYSTEM),
            ("a", f"{SYSTEM}Secret."),
            ("b", f"{SYSTEM}Secret."),
        ):
            ask(gateway, tenant, system, "Where is the key?")
        head = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
        common = len(tokenizer.encode(head, add_special_tokens=False)) // BLOCK * BLOCK
        (one, length), (other, _), (other_again, _), *secret = cached(gateway)
        assert (one, other, other_again) == (0, common, of(length))
        assert common < of(length)
        assert [found for found, _ in secret][1] == 0, "what only begins with the declared text is not shared"


def test_without_tenants_all_share(tokenizer: Tokenizer) -> None:
    with serving(tokenizer) as gateway, gateway.http() as http:
        for _ in range(2):
            http.post("/v1/completions", json={"model": MODEL, "prompt": SYSTEM, "max_tokens": 2})
        (_, length), (found, _) = cached(gateway)
        assert found == of(length)


def test_a_file_that_is_not_there_is_named(tokenizer: Tokenizer) -> None:
    from penstock.gateway.tenancy.prefixes import Prefixes

    with pytest.raises(StartupError, match=r"cache\.shared_prefixes: cannot read /nowhere/at-all"):
        Prefixes(settings(shared_prefixes=["@/nowhere/at-all"]).cache, tokenizer)
