"""The site that is made of the pages: it builds without a warning, and its links lead somewhere."""

import json
import shutil
import subprocess
import sys
import threading
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml

ROOT = Path(__file__).parents[2]
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --enable-logging=stderr "
    "--virtual-time-budget=2000 --dump-dom"
).split()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built as `make site` does."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copy(ROOT / "mkdocs.yml", folder)
    shutil.copytree(ROOT / "docs", folder / "docs")
    (folder / "megazoo").symlink_to(ROOT / "megazoo")
    done = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict", "-f", "mkdocs.yml"],
        cwd=folder, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed
    lines = [line for line in printed.splitlines() if line.strip()]
    assert [line for line in lines if not line.startswith("Build ")] == ["No issues found"], printed
    return folder / "site"


def pages_of_navigation(entries) -> list[str]:
    pages = []
    for entry in entries:
        (value,) = entry.values()
        pages += [value] if isinstance(value, str) else pages_of_navigation(value)
    return pages


def navigation() -> list[str]:
    return pages_of_navigation(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])


def address_of(page: str) -> str:
    return "" if page == "index.md" else f"{page.removesuffix('.md')}/"


class Links(HTMLParser):
    """The links of a page, and the names of its elements."""

    def __init__(self, text: str):
        super().__init__()
        self.links, self.names, self.title = [], set(), ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.names |= {values[key] for key in ("id", "name") if values.get(key)}
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])


def test_the_navigation_has_every_page_once():
    assert sorted(navigation()) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


@pytest.mark.slow
def test_every_link_of_the_site_leads_somewhere(site):
    pages = {path: Links(path.read_text()) for path in site.rglob("*.html")}
    missing = []
    for path, page in pages.items():
        for link in page.links if path.name != "404.html" else ():
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            known = pages[target].names if target in pages else set()
            if not target.exists() or (parts.fragment and unquote(parts.fragment) not in known):
                missing.append(f"{path.relative_to(site)}: {link}")
    assert missing == []
    assert all((site / address_of(page) / "index.html") in pages for page in navigation())


@pytest.mark.slow
def test_the_reference_has_arguments_and_the_search_finds_pages(site):
    reference = (site / "api" / "index.html").read_text()
    for name in ("tensor_parallel_size", "num_microbatches", "out_features"):
        assert name in reference
    index = json.loads((site / "search.json").read_text())
    locations = {item["location"].partition("#")[0] for item in index["items"]}
    assert {address_of(page) for page in navigation()} <= locations


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs the browser chromium; this machine has none")
@pytest.mark.timeout(600)
def test_a_browser_opens_every_page_of_the_navigation(site, tmp_path):
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    start = f"http://127.0.0.1:{server.server_port}/"
    try:
        for page in navigation():
            done = subprocess.run(
                [BROWSER, *FLAGS, f"--user-data-dir={tmp_path}", start + address_of(page)],
                capture_output=True, text=True, timeout=60,
            )  # fmt: skip
            title = (ROOT / "docs" / page).read_text().splitlines()[0].removeprefix("# ")
            assert f"{title}" in done.stdout.replace("&amp;", "&"), (page, done.stderr[-2000:])
            errors = [
                line for line in done.stderr.splitlines() if ":CONSOLE" in line and "Error" in line
            ]
            assert not errors, (page, errors)
    finally:
        server.shutdown()
        server.server_close()
