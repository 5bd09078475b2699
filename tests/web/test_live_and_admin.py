"""The live and the admin page in a real browser, before a real server with two replicas under load."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import pytest

from penstock.gateway.settings import ServerConfig
from penstock.settings import Settings
from tests.conftest import Server, start_with_admin
from tests.gateway.conftest import serving
from tests.gateway.scripted_server import load_built_in_tokenizer
from tests.web.browser import Tab, expect

SETTINGS = """
models:
  small: {model: smollm2-135m, replicas: 2, engine: {kv_memory_gib: 0.1, max_model_len: 512}}
classes:
  patient: {ttft_ms: 100000, itl_ms: 100000}
  hasty: {ttft_ms: 0.001}
default_class: patient
tenants: {user: {}}
prices:
  small: {input: 1, output: 1000}
"""


@dataclass
class Running:
    server: Server
    admin: str
    key: str

    def tenant(self, name: str) -> str:
        """A key of a new tenant."""
        headers = {"authorization": f"Bearer {self.admin}"}
        with httpx.Client(base_url=self.server.url, headers=headers, timeout=60) as http:
            http.put(f"/admin/tenants/{name}", json={}).raise_for_status()
            return str(http.post("/admin/keys", json={"tenant": name}).raise_for_status().json()["key"])

    def load(self, streams: int, tokens: int) -> None:
        """So many streams at once, and as many requests that are refused."""
        with ThreadPoolExecutor(2 * streams) as pool:
            tiers = ["patient", "hasty"] * streams
            for done in [pool.submit(self._ask, tier, tokens) for tier in tiers]:
                done.result()

    def _ask(self, tier: str, tokens: int) -> None:
        body = {"model": "small", "prompt": "Rain " * 100, "service_tier": tier, "seed": None, "temperature": 1}
        more = {"max_tokens": tokens, "ignore_eos": True}
        headers = {"authorization": f"Bearer {self.key}"}
        answer = httpx.post(f"{self.server.base_url}/completions", json=body | more, headers=headers, timeout=120)
        assert answer.status_code == (429 if tier == "hasty" else 200), answer.text

    def open(self, tab: Tab, page: str) -> None:
        """With both keys entered by hand."""
        tab.page.goto(f"{self.server.url}#{page}")
        tab.page.keyboard.press("k")
        tab.page.get_by_label("Tenant's key").fill(self.key)
        tab.page.get_by_label("Admin key").fill(self.admin)
        tab.page.keyboard.press("Enter")
        expect(tab.page.get_by_role("dialog")).to_have_count(0)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    server, admin = start_with_admin(tmp_path_factory.mktemp("web"), SETTINGS)
    running = Running(server, admin, "")
    running.key = running.tenant("loader")
    yield running
    server.stop()


# The first pixel of a canvas that has a colour of the theme, right of the axis: [x, y], or null.
FIND = """(canvas, name) => {
  const probe = document.createElement('span');
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const wanted = getComputedStyle(probe).color.match(/[0-9]+/g).map(Number);
  probe.remove();
  const { data, width, height } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  for (let y = 3; y < height - 1; y += 1) for (let x = 60; x < width; x += 1) {
    const at = (y * width + x) * 4;
    if (wanted.every((value, part) => data[at + part] === value)) return [x, y];
  }
  return null;
}"""


def test_the_live_page_under_load(tab: Tab, running: Running) -> None:
    page = tab.page
    tab.allowed = ("401", "getImageData")  # the page asks before it has the key; this test looks at pixels
    running.open(tab, "live")
    expect(page.locator(".controls .badge")).to_have_text("live")
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(running.load, 4, 120)
        tile = page.locator(".tile").filter(has_text="Output").locator("b")
        expect(tile).not_to_have_text("0.0 tok/s")
        expect(tile).to_contain_text("tok/s")
        expect(page.get_by_label("Replicas").get_by_text("ready")).to_have_count(2)
        load.result()
    expect(page.locator(".tile").filter(has_text="Running")).to_contain_text("0 at the gateway")
    tenants = page.get_by_label("Tenants").get_by_role("row").filter(has_text="loader")
    expect(tenants).to_contain_text("4")
    patient = page.get_by_label("Latencies by class").get_by_role("row").filter(has_text="patient")
    expect(patient).to_contain_text("within")
    expect(page.get_by_role("region", name="Latencies by class")).to_contain_text("the objective counts the whole gap")
    late = page.get_by_label("Late, failed and refused")
    expect(late.get_by_role("button")).to_have_count(4)
    expect(late).to_contain_text("429: the first token is forecast")
    page.keyboard.press("Space")
    expect(page.locator(".controls .badge")).to_have_text("paused")
    page.evaluate("() => new Promise(requestAnimationFrame)")  # in which it is drawn as it was when it was paused
    lanes, points = page.locator("canvas").all()[:2]
    assert all(lanes.evaluate(FIND, colour) for colour in ("c-prefill", "c-decode"))
    red = points.evaluate(FIND, "bad")
    assert red is not None
    points.click(position={"x": red[0], "y": red[1]})
    request = page.get_by_role("dialog")
    expect(request).to_contain_text("status 429")
    expect(request.get_by_role("row").filter(has_text="error")).to_contain_text("forecast")
    page.keyboard.press("Escape")
    now = page.locator(".controls .num").inner_text()
    for _ in range(3):
        page.keyboard.press("ArrowLeft")
    expect(page.locator(".controls .num")).not_to_have_text(now)
    assert float(page.get_by_label("Time shown, in seconds before now").input_value()) <= -14
    page.keyboard.press("l")
    expect(page.locator(".controls .badge")).to_have_text("live")
    page.get_by_role("link", name="Chat").click()
    expect(page.get_by_label("Model 1")).to_have_value("small")


@pytest.mark.parametrize("processes", [1, 3])
def test_the_live_page_says_that_it_shows_one_process(tab: Tab, processes: int) -> None:
    with serving(load_built_in_tokenizer(), Settings(server=ServerConfig(processes=processes))) as gateway:
        tab.page.goto(f"{gateway.url}#live")
        expect(tab.page.locator(".controls .badge")).to_have_text("live")
        note = tab.page.get_by_text(f"requests of one of {processes} gateway processes")
        expect(note).to_be_visible(visible=processes > 1)
        tab.page.goto("about:blank")  # or it would ask for the server that ends


def test_tenants_keys_and_a_chat_with_the_new_key(tab: Tab, running: Running) -> None:
    page = tab.page
    tab.allowed = ("401", "404")  # without a key; its first tenant has no account of what it did not ask yet
    page.goto(f"{running.server.url}#chat")
    expect(page.get_by_role("heading", name="This server has tenants")).to_be_visible()
    running.open(tab, "admin")
    page.get_by_role("button", name="New tenant").click()
    page.get_by_label("Name").fill("acme")
    page.get_by_label("Requests per minute").fill("2")
    page.get_by_label("Budget per day").fill("5")
    page.keyboard.press("Enter")
    row = page.get_by_role("row").filter(has_text="acme")
    expect(row).to_contain_text("5.00")
    page.keyboard.press("k")
    expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
    page.keyboard.press("Escape")
    page.get_by_role("link", name="Keys").click()
    page.get_by_role("button", name="New key").click()
    page.get_by_label("For").select_option("acme")
    page.get_by_label("Note").fill("<b>laptop</b>")
    page.get_by_role("button", name="Make").click()
    key = page.locator(".secret").inner_text()
    page.get_by_role("button", name="Done").click()
    expect(page.get_by_role("row").filter(has_text="acme")).to_contain_text("<b>laptop</b>")
    running_key, running.key = running.key, key
    running.open(tab, "chat")
    running.key = running_key
    page.get_by_role("textbox", name="Message").fill("Say hello")
    page.keyboard.press("Enter")
    expect(page.locator(".ledger")).to_be_visible()
    expect(page.locator(".ledger-facts")).to_contain_text("tokens/s")
    page.goto(f"{running.server.url}#admin/usage")
    expect(page.get_by_role("row").filter(has_text="acme")).to_contain_text("small")
    with page.expect_download() as download:
        page.get_by_role("button", name="Save as CSV").click()
    with open(download.value.path(), newline="") as file:
        assert "acme" in {row["tenant"] for row in csv.DictReader(file)}
    page.goto(f"{running.server.url}#admin/tenants")
    page.get_by_role("button", name="Change acme").click()
    page.get_by_label("Requests at once").fill("3")
    page.get_by_role("button", name="Save").click()
    expect(row.locator("td").nth(3)).to_have_text("3")
    page.get_by_role("button", name="Delete acme").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(row).to_have_count(0)


def test_caches_are_flushed_and_replicas_drained_and_restarted(tab: Tab, running: Running) -> None:
    page = tab.page
    running.open(tab, "admin/caches")
    asked = {"model": "small", "prompt": "The same again", "max_tokens": 4, "temperature": 0}
    headers = {"authorization": f"Bearer {running.key}"}
    for status in ("miss", "hit"):
        answer = httpx.post(f"{running.server.base_url}/completions", json=asked, headers=headers, timeout=60)
        assert answer.headers["x-penstock-cache"].split(";")[0] == status
    page.get_by_role("link", name="Fleet").click()
    expect(page.get_by_role("row").filter(has_text="small-0")).to_contain_text("ready")
    page.get_by_role("link", name="Caches").click()
    ratio = page.locator(".tile").filter(has_text="Hit ratio")
    expect(ratio).to_contain_text("50%")
    page.get_by_role("button", name="Flush").click()
    page.get_by_role("dialog").get_by_role("button", name="Flush").click()
    expect(page.get_by_text("The answer cache is empty")).to_be_visible()
    answer = httpx.post(f"{running.server.base_url}/completions", json=asked, headers=headers, timeout=60)
    assert answer.headers["x-penstock-cache"] == "miss"
    page.get_by_role("link", name="Fleet").click()
    page.get_by_role("button", name="Restart small-0").click()
    page.get_by_role("dialog").get_by_role("button", name="Restart").click()
    expect(page.get_by_role("row").filter(has_text="small-2")).to_contain_text("ready")
    page.get_by_role("button", name="Drain small-1").click()
    page.get_by_role("dialog").get_by_role("button", name="Drain").click()
    expect(page.get_by_role("row").filter(has_text="small-1")).to_have_count(0)
    assert httpx.get(f"{running.server.url}/ready", timeout=60).status_code == 200
