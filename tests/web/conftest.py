from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # without Playwright a test module is skipped when it imports this
    from playwright.sync_api import Browser

    from tests.web.browser import Tab


@pytest.fixture(scope="package")  # Playwright's event loop must have ended when tests with one of their own run
def browser() -> Iterator[Browser]:
    from tests.web.browser import open_browser

    with open_browser() as browser:
        yield browser


@pytest.fixture
def tab(browser: Browser) -> Iterator[Tab]:
    from tests.web.browser import open_tab

    with open_tab(browser) as tab:
        yield tab
