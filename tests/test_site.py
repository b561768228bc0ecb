"""The pages as a site: it builds strictly, loads nothing from the network, and shows the whole public surface."""

import dataclasses
import logging
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

import rookery
from rookery.algorithms.base import Algorithm
from rookery.core.config import RunConfig
from rookery.recipes import RECIPES

ROOT = Path(__file__).parents[1]
LOADED = {"script": "src", "img": "src", "iframe": "src", "link": "href"}


def build(folder, **changes):
    """The messages of a strict build; raises if one of them is a warning."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), **changes))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    build(folder)
    return folder


class Loads(HTMLParser):
    """What a page loads by itself."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        if tag in LOADED and values.get("rel") not in ("canonical", "next", "prev"):
            self.found.append(values.get(LOADED[tag]) or "")


def text_of(page):
    return re.sub(r"<[^>]+>", "", page.read_text())


def test_nothing_is_loaded_from_the_network_and_every_picture_is_there(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 50
    for page in pages:
        loads = Loads()
        loads.feed(page.read_text())
        for target in loads.found:
            assert not re.match(r"(https?:)?//", target), (page.name, target)
            if target and not target.startswith("data:") and page.name != "404.html":
                assert (page.parent / target.partition("?")[0]).is_file(), (page.name, target)
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//|@import", sheet.read_text()), sheet


def test_the_reference_has_all_that_the_package_offers(site):
    offered, contract = text_of(site / "reference/python.html"), text_of(site / "reference/algorithm.html")
    assert [
        name for name in rookery.__all__ if f'id="{name.lower()}"' not in (site / "reference/python.html").read_text()
    ] == []
    assert "Continue a run from its newest complete checkpoint" in offered  # a docstring
    methods = [name for name in vars(Algorithm) if not name.startswith("_") and callable(getattr(Algorithm, name))]
    assert [name for name in methods if f"Algorithm.{name}" not in contract] == []
    fields, presets = text_of(site / "reference/fields.html"), text_of(site / "reference/presets.html")
    assert [field.name for field in dataclasses.fields(RunConfig) if field.name not in fields] == []
    assert "steps between two checkpoints" in fields  # a comment
    named = [preset.name for recipe in RECIPES.values() for preset in recipe.presets]
    assert len(named) > 20 and [name for name in named if name not in presets] == []


def test_the_first_page_is_the_readme_and_its_links_stay_in_the_site(site):
    page = (site / "index.html").read_text()
    assert "Rookery is a Python library" in page
    for there in ("recipes-ppo.html", "source/rookery/recipes/ppo.py.html", "benchmarks.html", "security.html"):
        assert f'href="{there}"' in page and (site / there).is_file(), there
    assert "class PPOConfig" in text_of(site / "source/rookery/algorithms/ppo.py.html")


@pytest.mark.parametrize("link", ["other.md", "#nowhere"])
def test_a_link_that_leads_nowhere_is_refused(tmp_path, link, caplog):
    from mkdocs.exceptions import Abort

    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text(f"# Page\n\n[there]({link})\n")
    only = {"docs_dir": str(tmp_path / "docs"), "nav": None, "hooks": [], "extra": {}, "extra_css": []}
    with caplog.at_level(logging.WARNING), pytest.raises(Abort):
        build(tmp_path / "site", **only)
    assert link in caplog.text


@pytest.mark.browser
def test_the_search_finds_when_the_page_is_opened_from_disk(site, tmp_path):
    browser = shutil.which("chromium")
    assert browser, "chromium is not installed: make test-report installs it"
    words = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"]
    words += [
        "--disable-background-networking",
        "--disable-component-update",
        f"--user-data-dir={tmp_path / 'browser'}",
    ]
    words += ["--virtual-time-budget=8000", "--dump-dom", (site / "index.html").as_uri() + "?q=auto-encoder"]
    shown = subprocess.run(words, capture_output=True, text=True, timeout=120).stdout
    assert re.search(r"[1-9]\d* matching documents", shown) and "your-network.html" in shown
