"""The chat page in a real browser, before an engine that follows a script."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from functools import partial
from typing import Literal

import pytest

from penstock.gateway.api.models import ServedModel
from penstock.simulation.scripted_engine import MODEL, ScriptedEngine, hang, says
from penstock.text.tokenizer import Tokenizer
from tests.gateway.conftest import Gateway, serving
from tests.gateway.scripted_server import load_built_in_tokenizer
from tests.web.browser import Tab, expect, top

INJECTED = '<img src="x" onerror="window.ran=1"><script>window.ran=2</script> [click](javascript:window.ran=3)'


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_built_in_tokenizer()


@pytest.fixture(scope="module")
def gateway(tokenizer: Tokenizer) -> Iterator[Gateway]:
    """Two models."""
    (other,) = says(tokenizer, "The other model says hello.")
    second = ScriptedEngine(tokenizer, lambda request: [[token] for token in other])
    with serving(tokenizer, beside=[ServedModel(["second"], tokenizer, second)]) as gateway:
        yield gateway


def ask(tab: Tab, gateway: Gateway, text: str = "Hello") -> None:
    tab.page.goto(gateway.url)
    expect(tab.page.get_by_label("Model 1")).to_have_value(MODEL)
    tab.page.get_by_role("textbox", name="Message").fill(text)
    tab.page.keyboard.press("Enter")


def test_an_answer_streams_and_shows_its_ledger(tab: Tab, gateway: Gateway) -> None:
    gateway.answers("# Rain\n\nIt **falls**:\n\n- from clouds\n- to `earth`\n\n```python\nprint(1)  # one\n```")
    ask(tab, gateway)
    answer = tab.page.get_by_label(f"Answer of {MODEL}")
    expect(answer.locator("strong")).to_have_text("falls")
    expect(answer.locator("li")).to_have_count(2)
    expect(answer.locator(".hl-comment")).to_have_text("# one")
    expect(answer.get_by_role("img")).to_have_attribute("aria-label", re.compile("queued.*prefill.*decode"))
    answer.get_by_text("Where the time went").click()
    expect(answer.get_by_role("row").filter(has_text="stalled")).to_contain_text("someone-")
    expect(answer.get_by_role("row").filter(has_text="prefix cache")).to_contain_text("2 of")
    expect(answer.locator(".ledger-facts")).to_contain_text("tokens/s")


def test_html_in_an_answer_is_shown_and_never_run(tab: Tab, gateway: Gateway) -> None:
    gateway.answers(INJECTED + "\n\n```html\n" + INJECTED + "\n```")
    ask(tab, gateway, INJECTED)
    answer = tab.page.locator(".answer .markdown")
    expect(answer.locator("p").first).to_contain_text('<img src="x" onerror="window.ran=1"><script>')
    expect(tab.page.locator(".bubble")).to_contain_text("<script>")
    for _ in range(2):  # as it was streamed, and from the history
        expect(tab.page.locator(".ledger")).to_be_visible()
        expect(answer.locator("pre")).to_contain_text("<script>window.ran=2</script>")
        assert tab.page.locator("main img, main script, main a[href^=javascript]").count() == 0
        assert tab.page.evaluate("window.ran") is None
        tab.page.reload()


def test_an_answer_is_stopped_regenerated_and_its_question_edited(tab: Tab, gateway: Gateway) -> None:
    tab.allowed = ("404",)  # the page asks for the ledger until the engine has let go of the stopped request
    tokens = gateway.tokenizer.encode("One two three", add_special_tokens=False)
    gateway.runs(lambda request: [*([token] for token in tokens), hang])
    ask(tab, gateway)
    expect(tab.page.locator(".markdown")).to_have_text("One two three")
    tab.page.get_by_role("button", name="Stop").click()
    expect(tab.page.locator(".answer header")).to_contain_text("stopped")
    expect(tab.page.locator(".ledger")).to_be_visible()  # of a request that its client gave up on
    gateway.answers("Again.")
    tab.page.get_by_role("button", name="Regenerate").click()
    expect(tab.page.locator(".markdown")).to_have_text("Again.")
    expect(tab.page.locator(".ledger")).to_be_visible()
    tab.page.get_by_role("button", name="Edit this message").click()
    tab.page.get_by_label("Edit the message").fill("Another question")
    tab.page.keyboard.press("Enter")
    expect(tab.page.locator(".bubble")).to_have_text("Another question")
    expect(tab.page.locator(".ledger")).to_be_visible()
    prompt = gateway.tokenizer.decode(list(gateway.engine.requests[-1].prompt))
    assert "Another question" in prompt
    assert "Again." not in prompt


def test_an_answer_goes_on_while_another_page_is_shown(tab: Tab, gateway: Gateway) -> None:
    shown = threading.Event()
    first, *others, end = says(gateway.tokenizer, "One two three")[0]
    gateway.runs(lambda request: [[first], partial(asyncio.to_thread, shown.wait, 20), *([t] for t in others), [end]])
    ask(tab, gateway)
    expect(tab.page.locator(".markdown")).to_have_text("One")
    tab.page.get_by_role("link", name="Live").click()
    expect(tab.page.get_by_role("button", name="Pause")).to_be_visible()
    expect(tab.page.locator(".markdown")).to_have_count(0)
    shown.set()
    assert gateway.engine.ended[gateway.engine.requests[-1].id].wait(20)
    tab.page.get_by_role("link", name="Chat").click()
    expect(tab.page.locator(".markdown")).to_have_text("One two three")
    expect(tab.page.locator(".ledger")).to_be_visible()
    tab.page.reload()
    expect(tab.page.locator(".markdown")).to_have_text("One two three")


def test_a_reload_keeps_the_question_and_what_there_is_of_its_answer(tab: Tab, gateway: Gateway) -> None:
    tokens = gateway.tokenizer.encode("One two three", add_special_tokens=False)
    gateway.runs(lambda request: [*([token] for token in tokens), hang])
    ask(tab, gateway)
    expect(tab.page.locator(".markdown")).to_have_text("One two three")
    tab.page.reload()
    expect(tab.page.locator(".bubble")).to_have_text("Hello")
    expect(tab.page.locator(".markdown")).to_have_text("One two three")
    expect(tab.page.locator(".answer header")).to_contain_text("stopped")


def test_two_models_answer_side_by_side_and_the_history_keeps_it(tab: Tab, gateway: Gateway) -> None:
    gateway.answers("The first model says hello.")
    tab.page.goto(gateway.url)
    tab.page.get_by_role("button", name="+ Compare").click()
    tab.page.get_by_label("Model 2").select_option("second")
    tab.page.get_by_role("textbox", name="Message").fill("Hello both")
    tab.page.get_by_role("button", name="Send").click()
    first, second = (tab.page.get_by_label(f"Answer of {name}") for name in (MODEL, "second"))
    expect(first.locator(".markdown")).to_have_text("The first model says hello.")
    expect(second.locator(".markdown")).to_have_text("The other model says hello.")
    expect(tab.page.locator(".ledger")).to_have_count(2)
    assert top(first) == top(second)
    tab.page.reload()
    expect(second.locator(".markdown")).to_have_text("The other model says hello.")
    tab.page.get_by_role("button", name="New chat").click()
    expect(tab.page.get_by_role("heading", name="Ask something")).to_be_visible()
    tab.page.get_by_role("button", name="Hello both", exact=True).click()
    expect(first.locator(".markdown")).to_have_text("The first model says hello.")


def test_system_prompt_parameters_and_alternatives_of_tokens(tab: Tab, gateway: Gateway) -> None:
    gateway.answers("Sure thing")
    tab.page.goto(gateway.url)
    expect(tab.page.get_by_label("Model 1")).to_have_value(MODEL)
    tab.page.get_by_role("button", name="Parameters").click()
    tab.page.get_by_label("System prompt").fill("You are a pirate")
    tab.page.get_by_label("Temperature").fill("0.3")
    tab.page.get_by_label("Most tokens").fill("9")
    tab.page.get_by_label("Log-probabilities: alternatives of each token").check()
    tab.page.get_by_role("textbox", name="Message").fill("Hello")
    tab.page.keyboard.press("Enter")
    expect(tab.page.locator(".ledger")).to_be_visible()
    asked = gateway.engine.requests[-1]
    assert (asked.params.temperature, asked.params.max_tokens, asked.params.logprobs) == (0.3, 9, 5)
    assert "You are a pirate" in gateway.tokenizer.decode(list(asked.prompt))
    tab.page.get_by_role("button", name="Tokens", exact=True).click()
    token = tab.page.locator(".token").first
    token.focus()
    expect(token.get_by_role("tooltip")).to_be_visible()
    expect(token.locator("tbody tr")).to_have_count(5)


def test_errors_are_said(tab: Tab, gateway: Gateway) -> None:
    tab.allowed = ("400",)
    gateway.answers("Yes")
    tab.page.goto(gateway.url)
    expect(tab.page.get_by_label("Model 1")).to_have_value(MODEL)
    tab.page.get_by_role("button", name="Parameters").click()
    tab.page.get_by_label("Most tokens").fill("100000")
    tab.page.get_by_role("textbox", name="Message").fill("Hello")
    tab.page.keyboard.press("Enter")
    expect(tab.page.get_by_role("alert")).to_contain_text("tokens")


def test_the_keyboard_alone_is_enough(tab: Tab, gateway: Gateway) -> None:
    gateway.answers("Hello there")
    page = tab.page
    page.goto(gateway.url)
    expect(page.get_by_label("Model 1")).to_have_value(MODEL)
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keyboard shortcuts")).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    expect(page.get_by_role("textbox", name="Message")).to_be_focused()
    page.keyboard.type("Hi")
    page.keyboard.press("Enter")
    expect(page.locator(".ledger")).to_be_visible()
    page.keyboard.press("Escape")
    page.get_by_role("textbox", name="Message").blur()
    page.keyboard.press("e")
    expect(page.get_by_label("Edit the message")).to_be_focused()
    page.keyboard.press("Escape")
    page.keyboard.press("2")
    expect(page.get_by_role("link", name="Live")).to_have_attribute("aria-current", "page")
    page.keyboard.press("Space")
    expect(page.get_by_role("button", name="Go on")).to_be_visible()
    page.keyboard.press("1")
    expect(page.locator(".answer .markdown")).to_have_text("Hello there")


def test_a_window_that_becomes_narrow_shows_the_conversation(tab: Tab, gateway: Gateway) -> None:
    page = tab.page
    page.goto(gateway.url)
    history = page.get_by_role("complementary", name="History")
    expect(history).to_be_visible()
    page.set_viewport_size({"width": 600, "height": 800})
    expect(history).to_be_hidden()
    expect(page.get_by_role("button", name="History")).to_have_attribute("aria-expanded", "false")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_themes_and_a_phone(tab: Tab, gateway: Gateway, scheme: Literal["light", "dark"]) -> None:
    gateway.answers("A " + "longword" * 30 + "\n\n```text\n" + "x" * 300 + "\n```")
    page = tab.page
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": 320, "height": 844})
    page.goto(gateway.url)
    page.get_by_role("button", name="+ Compare").click()
    page.get_by_role("textbox", name="Message").fill("Hello")
    page.keyboard.press("Enter")
    expect(page.locator(".ledger")).to_have_count(2)
    for place in ("docs", "#chat", "#live", "#admin"):
        page.goto(gateway.url + "/" + place)
        expect(page.locator("main > *").first).to_be_visible()
        assert page.evaluate(WIDEST) <= 320, place
        for background, text in page.evaluate(CONTRASTS):
            assert contrast(background, text) >= 4.5, (place, background, text)
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(json.loads(background.replace("rgb(", "[").replace(")", "]"))) > 384) == (scheme == "light")
    page.get_by_role("button", name="Theme: as the system").click()
    assert page.evaluate("document.documentElement.dataset.theme") == "light"


# What is wider than the window is hidden or scrolls by itself, further down than this.
WIDEST = """() => Math.max(...[...document.querySelectorAll('html, body, main, main > *, main > * > *')]
  .map((one) => one.scrollWidth))"""

# Background and colour of everything that has text of its own, as [r, g, b].
CONTRASTS = """() => {
  const rgb = (text) => (text.match(/[0-9.]+/g) || []).map(Number);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const found = rgb(getComputedStyle(node).backgroundColor);
      if (found.length === 3 || found[3] === 1) return found.slice(0, 3);
    }
    return [255, 255, 255];
  };
  return [...document.querySelectorAll('body *')].filter((node) => node.checkVisibility({opacityProperty: true})
    && [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim()))
    .map((node) => [behind(node), rgb(getComputedStyle(node).color).slice(0, 3)]);
}"""


def contrast(one: list[float], other: list[float]) -> float:
    """As WCAG 2 defines it."""

    def luminance(colour: list[float]) -> float:
        parts = [c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
