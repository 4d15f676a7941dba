"""
The live page in a real browser: Debian's chromium, headless, driven by playwright. This file has
what the tests of its parts share. Without chromium they are skipped.

    page = open_page(server.url)        # the fixture: a page that may not complain
    wait_for(page, "tape.at > 4")
    page("tape.at")                     # the value of an expression on the page
"""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from processes import Process, wait_until

from assets.draw import page_with_record
from checkpoint import save_checkpoint
from model import GPT, GPTConfig
from server.live import page as page_html
from server.live import page_headers
from training.corpus import bpe_tokenizer

ROOT = Path(__file__).parents[1]
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
MEDIA = {"color_scheme": "light", "reduced_motion": "no-preference"}
ORIGIN = "http://page.test"  # of pages without a server: the test answers
CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
CONTEXT = 512  # the default model's
# of 16 tokens: three quarters of what the default model's 64 texts may need
NUM_BLOCKS = 64 * CONTEXT // 16 * 3 // 4
# All calls are over, and what the engine did for them has arrived and been played. (Lines of the
# tape come separately from the answers.)
IS_OVER = "stops.size === 0 && calls.size"
IS_IDLE = 'tape.lines.at(-1).event === "idle" && tape.at === tape.lines.length - 1'
IS_PLAYED = f"""{IS_OVER} && {IS_IDLE}
    && tape.lines.flatMap((line) => line.new ?? []).filter((q) => calls.has(q.name)).length
        === [...calls.values()].flat().length"""


@pytest.fixture(scope="module")
def chromium():
    """
    Return the browser's context, and its free pages. Reusing a page takes half as long as opening a
    new one, and the live page stores nothing in it.
    """
    if not CHROMIUM:
        pytest.skip("needs chromium: apt-get install chromium")
    api = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser.new_context(), []
        browser.close()


class Page:
    """Playwright's page. Call it with an expression in JavaScript to get its value on the page."""

    def __init__(self, page):
        self.page = page
        page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        page.on(
            "console",
            lambda said: said.type in ("error", "warning") and self.complaints.append(said.text),
        )
        page.on("request", self.note_request)

    def __getattr__(self, name: str):
        return getattr(self.page, name)

    def __call__(self, expression: str, *argument):
        return self.page.evaluate(expression, *argument)

    def note_request(self, request):
        if not request.url.startswith((self.origin, "data:", "blob:")):
            self.complaints.append(f"asks {request.url}")


def wait_for(page, condition: str):
    """Wait until this is true on the page. The page's policy forbids playwright's own wait."""
    wait_until(lambda: page(f"Boolean({condition})"))


@pytest.fixture
def open_page(chromium):
    """
    Return open_page(url, ..), which opens a page. At the end, no page may have complained or called
    another origin.
    """
    context, free = chromium
    pages = []

    def open_page(url=ORIGIN, told=None, wait="state.num_blocks", size=(1440, 900), **media):
        page = free.pop() if free else Page(context.new_page())
        pages.append(page)
        page.expected = "^$"  # a pattern of complaints that the test expects
        page.complaints = []
        page.origin = re.match(r"https?://[^/]+|file://", url)[0]
        width, height = size
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(**MEDIA | media)
        if url.startswith(ORIGIN):
            page.route("**/*", lambda route: answer(route, told))
        page.bring_to_front()  # a page in the background draws once a second
        page.goto(url)
        wait_for(page, wait)
        return page

    yield open_page
    for page in pages:  # make all pages like new
        page.mouse.move(0, 0)
        page.goto("about:blank")
        page.unroute_all()
    free += pages
    bad = [text for page in pages for text in page.complaints if not re.search(page.expected, text)]
    assert not bad, bad


def jsonl(lines) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def answer(route, told):
    """
    Answer like a server without a model: with the page, including a record [(line, ..), ..] if
    there is one.
    """
    path = route.request.url.removeprefix(ORIGIN)
    if path in ("", "/"):
        html = page_html()
        headers = page_headers(html)
        if told:
            html = page_with_record(jsonl(line for line, *_ in told))
        route.fulfill(body=html, content_type="text/html", headers=headers)
    else:
        route.fulfill(status=404, body=json.dumps({"error": {"message": f"no {path}"}}))


def live_page(open_page):
    """Return a page without a server. The test sends it lines by takeIn(lines)."""
    page = open_page(wait="document.title")
    page.expected = "404"
    page("listening.abort(); server.is = 'Live'")
    return page


def write(page, text: str):
    """Type this text, key by key, in place of what the prompt's box has."""
    page.click("[name=prompt]")
    page.keyboard.press("Control+A")
    page.keyboard.press("Delete")
    page.keyboard.type(text)


def send(page, text: str):
    write(page, text)
    page.keyboard.press("Control+Enter")


def add_tokens(page, *names: str, **others: float):
    """Add tokens to an answer of the page. Each has these others as likely alternatives."""
    page(
        """([names, others]) => { const [answer] = addArticle([{ text: "def " }], 1);
            for (const [i, token] of names.entries())
                addToken(answer, { token, logprob: -i, top_logprobs: others }); }""",
        [names, [{"token": token, "logprob": score} for token, score in others.items()]],
    )


def violations(page, part: str | None = None) -> list:
    """Return Axe's violations of accessibility."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    return axe.run(page.page, part).response["violations"]


def save_random_model(folder, template: str = "", context_length: int = 256):
    """Save a model whose tokens are bytes, and whose answers never end before their length."""
    tokenizer = bpe_tokenizer([])
    sizes = {"context_length": context_length, "n_layer": 2, "n_head": 2, "n_embd": 32}
    model = GPT(GPTConfig(tokenizer.vocab_size, **sizes))
    with torch.no_grad():  # the logit of the end is about -32
        model.ln_f.bias += 1
        model.wte.weight[tokenizer.eos_token_id] = -1
    save_checkpoint(model, folder)
    tokenizer.save(folder)
    if template:
        (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Return a random model with a chat template and the default model's context."""
    return save_random_model(tmp_path_factory.mktemp("random"), CHAT, CONTEXT)


@pytest.fixture(scope="module")
def server(checkpoint):
    with Process(checkpoint, "--kv-blocks", str(NUM_BLOCKS)) as server:
        yield server


@pytest.fixture
def live(open_page, server):
    """Return a page with a server, which is made idle again afterwards."""
    page = open_page(server.url)
    yield page
    page("stopAll(); leaveTour(); goLive()")
    wait_for(page, "state.requests.size === 0")
