"""A real browser (Chromium, driven by Playwright) for the tests of the web page. Without one they are skipped."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import pytest

pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright")
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Locator, Page, expect, sync_playwright

__all__ = ["Tab", "expect", "open_browser", "open_tab", "top"]

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SECONDS = 60  # that a busy machine may take for anything

# Before the page's own scripts: what its Content-Security-Policy blocks is reported on the console.
REPORT = """document.addEventListener('securitypolicyviolation',
    (event) => console.error(`CSP violation: ${event.violatedDirective} ${event.blockedURI}`))"""


@contextmanager
def open_browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium on the PATH: apt-get install chromium")
    expect.set_options(timeout=SECONDS * 1000)
    with sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield running
        running.close()


@dataclass
class Tab:
    """A fresh profile, and whatever a reader should not see: errors on the console, requests to other hosts."""

    context: BrowserContext
    page: Page
    problems: list[str] = field(default_factory=list)
    allowed: tuple[str, ...] = ()  # parts of messages on the console that are expected

    def watch(self) -> None:
        page = self.page
        page.set_default_timeout(SECONDS * 1000)
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self._note(str(error)))
        page.on("request", lambda request: self._check_host(request.url))

    def _hear(self, said: ConsoleMessage) -> None:
        if said.type in ("error", "warning"):
            self._note(said.text)

    def _note(self, text: str) -> None:
        if not any(part in text for part in self.allowed):
            self.problems.append(text)

    def _check_host(self, url: str) -> None:
        if urlsplit(url).hostname not in ("127.0.0.1", None):
            self.problems.append(f"a request to {url}")


@contextmanager
def open_tab(browser: Browser) -> Iterator[Tab]:
    """What is wrong with it shows at the end."""
    context = browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme="light")
    context.add_init_script(REPORT)
    tab = Tab(context, context.new_page())
    tab.watch()
    yield tab
    context.close()
    assert not tab.problems, tab.problems


def top(element: Locator) -> float:
    """Its distance from the top of the window, in pixels."""
    box = element.bounding_box()
    assert box is not None
    return float(box["y"])
