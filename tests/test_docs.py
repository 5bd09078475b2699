"""Documents against the tree: named paths exist, links lead somewhere, and the README's figures are measured ones."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from penstock.gateway.api.endpoints import ENDPOINTS
from penstock.observability.account import Parts

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md"), *ROOT.glob("deploy/*.md")]
GUIDES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(ROOT / "docs" / name for name in ("architecture.md", "glossary.md")),
]
IDS = [str(path.relative_to(ROOT)) for path in PAGES]

# In backquotes: a folder, which ends in a slash, or a source file.
NAMED = re.compile(r"`([\w.-]+/(?:[\w.*-]+/)*|(?:[\w.-]+/)*[\w.*-]+\.(?:py|cpp|h|cu|cuh|md))`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
FIGURE = re.compile(r"(?<![\w.,-])\d[\d,]*(?:\.\d+)?")


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


def sections(page: Path) -> dict[str, str]:
    """The text below each heading, by the anchor that GitHub gives the heading."""
    parts = re.split(r"^#+ (.+)$", without_code(page.read_text()), flags=re.M)
    anchors = (re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in parts[1::2])
    return dict(zip(anchors, parts[2::2], strict=True))


def exists(name: str) -> bool:
    """A path may be named from the root or from the package, and a file of the package by its name alone."""
    if any(any(base.glob(name)) for base in (ROOT, ROOT / "penstock")):
        return True
    return "/" not in name and any((ROOT / "penstock").rglob(name))


@pytest.mark.parametrize("page", GUIDES, ids=lambda path: path.name)
def test_paths_that_the_guides_name_exist(page: Path) -> None:
    names = set(NAMED.findall(page.read_text()))
    assert names
    assert {name for name in names if not exists(name)} == set()


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(without_code(page.read_text())):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in sections(target), link


def test_every_part_of_an_account_is_described() -> None:
    table = (ROOT / "docs" / "observability.md").read_text()
    assert [f.name for f in msgspec.structs.fields(Parts) if f"\n| `{f.name}` | " not in table] == []


def test_the_table_of_the_admin_api_is_complete() -> None:
    page = (ROOT / "docs" / "gateway.md").read_text()
    rows = re.findall(r"^\| `([A-Z]+) (/admin/[^?`]+)[^`]*` \|", page, re.M)
    listed = {(method, re.sub(r"/[A-Z]+\b", "/*", path)) for method, path in rows}
    served = {(e.method, re.sub(r"\{\w+\}", "*", e.path)) for e in ENDPOINTS if e.path.startswith("/admin/")}
    assert listed == served


def test_figures_of_the_readme_are_in_performance_md() -> None:
    """Every number of a table row or paragraph that links to a section of results stands in that section."""
    results = sections(ROOT / "docs" / "performance.md")
    checked = 0
    for block in re.split(r"\n\n|\n(?=\|)", without_code((ROOT / "README.md").read_text())):
        for anchor in set(re.findall(r"\(docs/performance\.md#([\w-]+)\)", block)):
            figures = set(FIGURE.findall(LINK.sub("]", block)))
            assert figures - set(FIGURE.findall(results[anchor])) == set(), block
            checked += 1
    assert checked


def test_the_figure_of_the_readme_shows_measured_values() -> None:
    svg = (ROOT / "docs" / "objectives.svg").read_text()
    shown = set(re.findall(r">(\d+\.\d+%)<", svg))
    assert shown
    assert all(value in sections(ROOT / "docs" / "performance.md")["gpu-objectives"] for value in shown)
