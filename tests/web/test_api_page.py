"""The page of the API at /docs in a real browser."""

from __future__ import annotations

import json

import pytest

from penstock.simulation.scripted_engine import MODEL
from penstock.text.tokenizer import Tokenizer
from tests.gateway.conftest import serving
from tests.gateway.scripted_server import load_built_in_tokenizer
from tests.web.browser import Tab, expect


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_built_in_tokenizer()


def test_endpoints_are_described_and_tried(tab: Tab, tokenizer: Tokenizer) -> None:
    with serving(tokenizer) as gateway:
        page = tab.page
        page.goto(f"{gateway.url}/docs")
        expect(page.get_by_role("heading", name="Generate")).to_be_visible()
        chat = page.locator("[id='post-/v1/chat/completions']")
        chat.locator("summary").first.click()
        expect(chat.get_by_role("row").filter(has_text="max_completion_tokens")).to_contain_text("integer")
        body = chat.get_by_label("Body")
        assert json.loads(body.input_value())["model"] == MODEL
        chat.get_by_role("button", name="Send").click()
        expect(chat.get_by_label("Answer")).to_contain_text("Hello there, friend!")
        body.fill(body.input_value().replace("{", '{"stream": true,', 1))
        chat.get_by_role("button", name="Send").click()
        expect(chat.get_by_label("Answer")).to_contain_text("[DONE]")
        body.fill("{")
        chat.get_by_role("button", name="Send").click()
        expect(chat.get_by_label("Answer")).to_contain_text("not JSON")
        for path in ("/v1/responses", "/v1/messages"):
            other = page.locator(f"[id='post-{path}']")
            other.locator("summary").first.click()
            other.get_by_role("button", name="Send").click()
            expect(other.get_by_label("Answer")).to_contain_text("Hello there, friend!")
