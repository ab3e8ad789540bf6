"""The site and a browser for its tests, made once, when first asked for.

tests/conftest.py imports these, so that the files that use them share one site.
"""

import functools
import http.server
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ladder.rungs import ROOT

SPHINX = [sys.executable, "-m", "sphinx", "-W", "-q", "-c", "website"]
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The folder of the site, built from clean by the command that the README gives."""
    folder = tmp_path_factory.mktemp("site")
    options = ["-d", folder / "doctrees", "docs", folder / "html"]
    start = time.perf_counter()
    done = subprocess.run([*SPHINX, *options], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    print(f"built in {time.perf_counter() - start:.1f} s")
    return folder / "html"


@pytest.fixture(scope="session")
def pages(site):
    """{address: Page} of every page."""
    from tests.site_pages import Page

    return {str(x.relative_to(site)): Page(x) for x in site.rglob("*.html")}


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """As code hosts do, it answers a wrong address with 404.html."""

    def log_message(self, *args):
        pass

    def send_error(self, code, *args):
        body = Path(self.directory, "404.html").read_bytes()
        self.send_response(code)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture(scope="session")
def address(site):
    handler = functools.partial(QuietHandler, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="session")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium")
    if not chromium:
        pytest.skip("there is no chromium")
    only_here = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu", only_here]
        )
        yield browser
        browser.close()


@pytest.fixture
def visit(browser, address):
    """`visit(url)`: a tab that may print no error and ask for nothing elsewhere."""
    contexts, wrong = [], []

    def watch(request):
        if not request.url.startswith((address, "data:")):
            wrong.append(request.url)

    def tell(message):
        if message.type == "error":
            wrong.append(f"{message.location['url']}: {message.text}")

    def open_tab(url, **options):
        contexts.append(browser.new_context(**{"viewport": WIDE} | options))
        tab = contexts[-1].new_page()
        tab.on("console", tell)
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on("request", watch)
        tab.goto(address + url)
        return tab

    yield open_tab
    for context in contexts:
        context.close()
    assert not wrong
