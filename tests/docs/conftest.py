"""The site and a browser, made once, when a test asks for them.

It is skipped where tools/site/requirements.txt or tests/requirements.txt is missing.
"""

import functools
import http.server
import shutil
import threading

import pytest

from tests.helpers.site import WIDE
from tools.run.processes import Program
from tools.scripts import ROOT


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The folder of the site, built from clean, as CONTRIBUTING.md says."""
    pytest.importorskip("notfound", reason="tools/site/requirements.txt has it")
    folder = tmp_path_factory.mktemp("site")
    command = f"python -m sphinx -W -q -c tools/site docs {folder}"
    Program(command.split(), ROOT, real=True).succeed()
    return folder


@pytest.fixture
def pages(site):
    """`pages(address)`: a page as BeautifulSoup."""
    bs4 = pytest.importorskip("bs4")
    return lambda name: bs4.BeautifulSoup((site / name).read_text(), "html.parser")


@pytest.fixture(scope="session")
def address(site):
    """The URL at which the site is served."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="session")
def browser():
    """A Chromium that reaches this machine alone."""
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium")
    if not chromium:
        pytest.skip("there is no chromium")
    only_here = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
    args = ["--no-sandbox", "--disable-gpu", only_here]
    with playwright.sync_playwright() as started:
        yield started.chromium.launch(executable_path=chromium, args=args)


@pytest.fixture
def visit(browser, address):
    """`visit(url)`: a tab that may print no error, as of what it asks for elsewhere."""
    wrong = []

    def note(message):
        if message.type == "error":
            wrong.append(f"{message.location['url']}: {message.text}")

    def open_tab(url, **options):
        tab = browser.new_context(viewport=WIDE, **options).new_page()
        tab.on("console", note)
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.goto(address + url)
        return tab

    yield open_tab
    for context in browser.contexts:
        context.close()
    assert not wrong
