"""
The live page, in a real browser: Debian's chromium, headless, driven by playwright. Records come
from the real engine with a pretended model (pretend.py), live streams from a real server with a
random model. Without chromium these tests are skipped.

    PAGE_SCREENSHOTS=assets PAGE_MODEL=out/stdlib python -m pytest tests/test_page.py -m browser

also makes the README's pictures, of that model.
"""

import json
import os
import random
import re
import shutil
import statistics
from functools import cache
from pathlib import Path

import pytest
import torch
from pretend import PretendRunner, pretend_engine
from server import wait_until
from test_end_to_end import Process

from checkpoint import save_checkpoint
from model import GPT, GPTConfig
from serving import welcome
from serving.events import Recorder
from serving.params import SamplingParams
from training.corpus import bpe_tokenizer

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "serving/page.html"
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
SCREENSHOTS = os.environ.get("PAGE_SCREENSHOTS")
ORIGIN = "http://page.test"  # of pages without a server: the test answers
in_browser = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM, reason="no chromium here: apt-get install chromium"),
]


def browser_test(function):
    for mark in in_browser:
        function = mark(function)
    return function


# --------------------------------------------------------------------------------------------------
# The file


def test_it_is_small():
    """As promised: it can be read in one sitting."""
    text = PAGE.read_text()
    assert text.count("\n") <= 500 and len(PAGE.read_bytes()) <= 40_000
    assert max(map(len, text.splitlines())) <= 100


def test_it_is_one_file_that_asks_nobody_else():
    """
    One script and one style, which its policy allows by their hashes, and nothing that the policy
    would block; no text becomes HTML.
    """
    html = PAGE.read_text()
    assert html.count("<script") == html.count("<style") == 1
    assert not re.findall(
        r"https?:|//[a-z]+\.|<link (?!rel=\"icon\" href=\"data:,\")|@import", html
    )
    head, _, script = html.partition("<script>")
    assert not re.findall(r"\s(style|on\w+)=", head)
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", script)
    assert not re.findall(r"(call|json)\(\"/", script)  # behind a proxy its path may be another
    assert not re.findall(r"localStorage|sessionStorage|cookie", script)


# --------------------------------------------------------------------------------------------------
# Records of a real engine


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def record(engine, arrivals: dict[int, list], aborts: dict[int, list]) -> list[tuple]:
    """
    [(line, snapshot after it), ..] of a run: arrivals[step] are arguments of add_request (they come
    earlier where nothing runs), aborts[step] names requests. The first line is a snapshot.
    """
    engine.recorder = Recorder(engine)
    told = [(json.loads(engine.recorder.snapshot()),) * 2]
    lines = []
    engine.recorder.listeners.append(lambda text: lines.append(json.loads(text)))
    coming = sorted(arrivals.items())
    while engine.has_work or coming:
        while coming and (coming[0][0] <= engine.num_steps or not engine.has_work):
            for id, prompt, tokens, n in coming.pop(0)[1]:
                engine.add_request(id, prompt, greedy(tokens), n=n, name=f"call-{id}")
        for id in aborts.pop(engine.num_steps, []):
            engine.abort(id)
        engine.step()
        snapshot = json.loads(engine.recorder.snapshot())
        told += [(line, snapshot) for line in lines]
        lines.clear()
    return told


@cache
def small_record() -> list[tuple]:
    """
    A prefix hit of 16 tokens, a fork with a copy-on-write, a preemption, one that waits for blocks,
    an abort, with 12 blocks of 4.
    """
    engine = pretend_engine(
        num_blocks=12, block_size=4, token_budget=24, overlap=False, watermark=0, check=True
    )
    opening = list(range(1, 12)) + list(range(1, 8))
    arrivals = {
        0: [("a", opening, 3, 1)],
        4: [("b", [*opening[:16], 9, 9], 6, 1), ("c", [5, 5, 5, 5, 5, 5], 5, 3)],
        14: [("d", [7] * 14, 16, 1), ("e", [8] * 14, 16, 1), ("f", [3] * 20, 9, 1)],
    }
    return record(engine, arrivals, {30: ["f"]})


def random_record(seed: int, num_requests: int = 60, **settings) -> list[tuple]:
    rng = random.Random(seed)
    engine = pretend_engine(**{"num_blocks": 24, "max_num_seqs": 6} | settings)
    arrivals = {}
    for id in range(num_requests):
        prompt = [1] * rng.randrange(9) + [rng.randrange(12) for _ in range(rng.randint(1, 24))]
        wanted = (str(id), prompt, rng.randint(1, 20), rng.choice([1, 1, 1, 3]))
        arrivals.setdefault(rng.randrange(3 * num_requests), []).append(wanted)
    aborts = {rng.randrange(3 * num_requests): [str(rng.randrange(num_requests))] for _ in range(9)}
    return record(engine, arrivals, aborts)


RECORDS = {
    "small": small_record,
    "random": lambda: random_record(1),
    "overlap": lambda: random_record(2, overlap=True),
    "tight": lambda: random_record(3, 40, num_blocks=12, overlap=True, token_budget=8),
}


# --------------------------------------------------------------------------------------------------
# The browser


@pytest.fixture(scope="module")
def chromium():
    api = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def wait_for(page, condition: str):
    """Until this is true there. Playwright's own wait is what the page's policy forbids."""
    wait_until(lambda: page.evaluate(f"Boolean({condition})"))


@pytest.fixture
def open_page(chromium):
    """
    open_page(url, ..) is a new page there. Afterwards none of them may have complained, nor asked
    another origin: `page.expected` is a pattern of complaints that belong to the test.
    """
    contexts = []
    complaints = []

    def open_page(url=ORIGIN, told=None, inside="", wait="tape.at >= 0", **options):
        context = chromium.new_context(viewport={"width": 1280, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.expected = None
        page.on("pageerror", lambda error: complaints.append((page, f"error: {error}")))
        page.on(
            "console",
            lambda said: said.type in ("error", "warning") and complaints.append((page, said.text)),
        )
        origin = re.match(r"https?://[^/]+", url)[0]

        def note_request(request):
            if not request.url.startswith((origin, "data:", "blob:")):
                complaints.append((page, f"asks {request.url}"))

        page.on("request", note_request)
        if url.startswith(ORIGIN):
            page.route("**/*", lambda route: answer(route, told, inside))
        page.goto(url)
        wait_for(page, wait)
        return page

    yield open_page
    for context in contexts:
        context.close()
    bad = [text for page, text in complaints if not re.search(page.expected or "^$", text)]
    assert not bad, bad


def answer(route, told, inside):
    """What a server without a model answers: the page, and a record."""
    path = route.request.url.removeprefix(ORIGIN)
    html = PAGE.read_text()
    if path.partition("?")[0] in ("", "/"):
        body = html.replace("</body>", f"{inside}</body>")
        route.fulfill(body=body, content_type="text/html", headers=welcome.page_headers(html))
    elif path == "/record.jsonl":
        text = "".join(json.dumps(line) + "\n" for line, _ in told)
        route.fulfill(body=text, content_type="application/jsonl")
    else:
        route.fulfill(status=404, body=json.dumps({"error": {"message": f"no {path}"}}))


@pytest.fixture
def open_record(open_page):
    """A page that replays a record, paused at its first line."""

    def open_record(told, **options):
        page = open_page(f"{ORIGIN}/?replay=/record.jsonl", told, **options)
        page.evaluate("seek(0)")
        return page

    return open_record


# The state, as JSON: what a snapshot says of it too.
STATE = """(() => {
    const requests = [...state.requests.values()].map(({ r, status, filled, committed, table }) =>
        ({ r, status, filled, committed, table: [...table] })).sort((a, b) => a.r - b.r);
    const holders = state.owners.map((owners) => owners.length);
    const committed = [...state.committed.keys()].filter((block) => state.committed[block]);
    return { requests, holders, committed, idle: [...state.idle],
        waiting: state.waiting, step: state.step };
})()"""


@browser_test
@pytest.mark.parametrize("name", RECORDS)
def test_the_state_is_what_the_lines_say(open_record, name):
    """After each line: counts of blocks as told with it, and all as a snapshot taken then says."""
    told = RECORDS[name]()
    page = open_record(told)
    states = page.evaluate(f"tape.lines.map((_, place) => {{ moveTo(place); return {STATE}; }})")
    assert len(states) == len(told) > 30
    for (line, snapshot), (following, _), state in zip(
        told, [*told[1:], (None, None)], states, strict=True
    ):
        if line["event"] == "step":
            counts = (state["holders"].count(0) - len(state["idle"]), len(state["idle"]))
            assert counts == (line["free"], line["cached"]), line
        for block, references, _ in line.get("blocks", []):
            assert state["holders"][block] == references, line
        if following and following["event"] == "idle":
            continue  # the snapshot is of after it
        assert state["committed"] == sorted(snapshot["committed"]), line
        assert state["idle"] == snapshot["idle"], line
        assert state["waiting"] == snapshot["waiting"], line
        names = ("r", "filled", "committed", "table")
        for request, other in zip(
            state["requests"], sorted(snapshot["requests"], key=lambda q: q["r"]), strict=True
        ):
            assert [request[n] for n in names] == [other[n] for n in names], line
            if other["status"] != "ending":  # which lines do not tell
                assert request["status"] == other["status"], line


@browser_test
def test_back_is_where_it_was(open_record):
    """By keyframes, of which this record has more than one."""
    told = random_record(5, num_requests=100)
    page = open_record(told)
    assert len(told) > page.evaluate("EVERY")
    forth = page.evaluate(f"tape.lines.map((_, place) => {{ moveTo(place); return {STATE}; }})")
    rng = random.Random(0)
    for place in [len(told) - 2, 0, *(rng.randrange(len(told)) for _ in range(30))]:
        assert page.evaluate(f"moveTo({place}), {STATE}") == forth[place], place


@browser_test
def test_the_log_says_what_happened(open_record):
    told = small_record()
    page = open_record(told)
    said = page.evaluate("(moveTo(1e9), chart.log.map((entry) => entry.said).join('\\n'))")
    for wanted in (
        r"request \d+: 16 tokens not computed",
        r"request \d+: writes to \d+, a copy of shared block \d+: references 3 → 2",
        r"shared block \d+: references 2 → 1",
        r"request \d+: gave back \d+ blocks",
        r"request \d+: gave back \d+ blocks, found \d+ again, computed \d+ again",
        r"request \d+: waits: needs \d+, spare \d+",
        r"request \d+: ended \(length\): \d+ tokens",
        r"request \d+: ended \(abort\)",
        r"evicted from the cache: \d+",
    ):
        assert re.search(wanted, said), f"{wanted} is not in\n{said}"


def numbers(page) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", page.inner_text("#counts"))]


@browser_test
def test_buttons_and_keys_move_through_a_record(open_record):
    told = small_record()
    page = open_record(told)
    place = "tape.at"
    page.click("#forth")
    page.click("#forth")
    assert page.evaluate(place) == 2
    page.click("#back")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    assert page.evaluate(place) == 2
    page.select_option("#speed", "120")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press(" ")
    wait_for(page, f"{place} === {len(told) - 1}")
    page.fill("#place", "5")
    assert page.evaluate(place) == 5
    wait_for(page, "document.querySelector('#counts').textContent.startsWith('12 blocks')")
    line = told[5][0]
    wait_for(
        page,
        f"document.querySelector('#counts').textContent.includes('{line['free']} free, "
        f"{line['cached']} cached')",
    )


@browser_test
def test_a_block_and_a_request_are_explained(open_record):
    """By pointer and by its number; a click shows the block table and the cursors."""
    told = small_record()
    page = open_record(told)
    place = next(i for i, (line, _) in enumerate(told) if line.get("decodes"))
    page.evaluate(f"seek({place})")
    wait_for(page, "cells")
    block = told[place][1]["requests"][0]["table"][0]
    size = page.evaluate("cells.size")
    page.hover("#pool", position={"x": (block + 0.5) * size, "y": size / 2})
    assert page.inner_text("#about").startswith(f"Block {block}: 1 reference")
    assert "logical block 0, positions 0 to 3, 4 of 4 slots" in page.inner_text("#about")
    page.click("#pool", position={"x": (block + 0.5) * size, "y": size / 2})
    request = told[place][1]["requests"][0]
    cursors = (
        f"committed {4 * request['committed']} | computed {request['filled']} | "
        f"filled {request['filled']} | allocated {4 * len(request['table'])} tokens"
    )
    assert cursors in page.inner_text("#about")
    table = [f"{i} → {block}" for i, block in enumerate(request["table"])]
    assert page.locator(".table li").all_inner_texts() == table
    page.fill("#block", "1")
    assert page.inner_text("#about").startswith("Block 1: ")
    page.click("#requests button")
    assert page.inner_text("#about").startswith(f"Request {request['r']}")


@browser_test
def test_a_record_can_be_inside_be_dropped_and_be_wrong(open_page, tmp_path):
    told = small_record()
    lines = json.dumps([line for line, _ in told])
    page = open_page(inside=f'<script type="application/json" id="record">{lines}</script>')
    assert page.evaluate("tape.lines.length") == len(told)
    assert not page.is_visible("#talk") and page.is_visible("#pool")
    other = random_record(1)
    text = "".join(json.dumps(line) + "\n" for line, _ in other)
    (tmp_path / "other.jsonl").write_text(text + '{"event": "st')  # the server was killed
    page.set_input_files("#file", tmp_path / "other.jsonl")
    wait_for(page, f"tape.lines.length === {len(other)}")
    page.evaluate(
        """(text) => {
            const dataTransfer = new DataTransfer();
            dataTransfer.items.add(new File([text], "bad.jsonl"));
            dispatchEvent(new DragEvent("drop", { dataTransfer, cancelable: true }));
        }""",
        '{"event": "step"}\n',
    )
    page.wait_for_selector("#status.error")
    assert "bad.jsonl is no record of serve.py" in page.inner_text("#status")
    assert page.evaluate("tape.lines.length") == len(other)  # what was there stays


@browser_test
def test_what_comes_is_text(open_record):
    """A hostile record: none of it becomes an element."""
    hostile = "<img src=x onerror=alert(1)>"
    told = json.loads(json.dumps(small_record()).replace('"length"', json.dumps(hostile)))
    page = open_record(told)
    page.evaluate("seek(1e9)")
    wait_for(page, "document.querySelector('#log').textContent.includes('onerror')")
    assert page.locator("img").count() == 0


@browser_test
@pytest.mark.parametrize("wrong", [None, {"event": "step", "tables": 5, "free": 1, "cached": 0}])
def test_a_record_that_contradicts_itself_is_stopped(open_record, wrong):
    """It killed the frames, so that not even a good record could be played after it."""
    told = small_record()
    page = open_record([*told[:3], (wrong, None), *told[3:]])
    page.evaluate("seek(1e9)")
    wait_for(page, "document.querySelector('#status').textContent.includes('stopped at line 4')")
    text = "\n".join(json.dumps(line) for line, _ in told)
    page.evaluate("text => replay(text, 'another')", text)
    page.evaluate("seek(1e9)")
    wait_for(page, f"tape.at === {len(told) - 1}")


class QuickRunner(PretendRunner):
    """Samples the same token always, at once: for records of large pools."""

    def compute(self, plan):
        self.fill_rows(*plan.admitted)
        return [[0] for _ in plan.sampled]


@cache
def large_record() -> list[tuple]:
    """256 requests at a time in 32,768 blocks of 16, most of which they fill."""
    from unittest import mock

    import pretend

    with mock.patch.object(pretend, "PretendRunner", QuickRunner):
        engine = pretend_engine(
            context_length=4096,
            num_blocks=32768,
            block_size=16,
            max_num_seqs=256,
            token_budget=8192,
            overlap=True,
            check=False,
        )
    rng = random.Random(0)
    engine.recorder = Recorder(engine)
    lines = [json.loads(engine.recorder.snapshot())]
    engine.recorder.listeners.append(lambda text: lines.append(json.loads(text)))
    for id in range(400):
        prompt = [1] * 512 * (id % 4) + [rng.randrange(12) for _ in range(rng.randint(64, 1500))]
        engine.add_request(id, prompt, greedy(rng.randint(300, 900)))
    while engine.has_work and len(lines) < 1500:
        engine.step()
    return [(line, None) for line in lines]


@pytest.mark.slow
@browser_test
def test_a_large_pool_does_not_stutter(open_page, capsys):
    """
    Script time of a frame while a record of 32,768 blocks is replayed, by Chromium's trace. The
    goal is a median of 4 ms on a quiet machine; twice that is allowed here.
    """
    told = large_record()
    page = open_page(f"{ORIGIN}/?replay=/record.jsonl", told)
    page.evaluate("seek(300)")
    page.select_option("#speed", "120")
    browser = page.context.browser
    browser.start_tracing(page=page, categories=["devtools.timeline"])
    page.click("#pause")
    page.wait_for_timeout(4000)
    events = json.loads(browser.stop_tracing())["traceEvents"]
    fired = [e for e in events if e["name"] == "FireAnimationFrame" and "dur" in e]
    frames = sorted(e["dur"] / 1000 for e in fired)
    median, p99 = statistics.median(frames), frames[int(0.99 * len(frames))]
    with capsys.disabled():
        print(f"\n{len(frames)} frames: {median:.2f} ms of script in the median, p99 {p99:.1f} ms")
    assert len(frames) > 50 and median < 8


# --------------------------------------------------------------------------------------------------
# A real server


CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
NUM_BLOCKS = 24
KEY = "a key of 16 letters"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """PAGE_MODEL, or a random model whose tokens are bytes, with a chat template."""
    if os.environ.get("PAGE_MODEL"):
        return ROOT / os.environ["PAGE_MODEL"]
    folder = tmp_path_factory.mktemp("random")
    tokenizer = bpe_tokenizer([])
    sizes = {"context_length": 256, "n_layer": 2, "n_head": 2, "n_embd": 32}
    model = GPT(GPTConfig(tokenizer.vocab_size, **sizes))
    with torch.no_grad():  # by its logit of about -32 an answer does not end before its length
        model.ln_f.bias += 1
        model.wte.weight[tokenizer.eos_token_id] = -1
    save_checkpoint(model, folder)
    tokenizer.save(folder)
    (folder / "chat_template.jinja").write_text(CHAT)
    return folder


@pytest.fixture(scope="module")
def server(checkpoint):
    with Process(checkpoint, "--kv-blocks", str(NUM_BLOCKS)) as server:
        yield server


@pytest.fixture
def live(open_page, server):
    page = open_page(server.url, wait="state.num_blocks")
    yield page
    page.evaluate("clicks.hangUp(); player.isPaused = false")
    wait_for(page, "state.requests.size === 0")


IS_OVER = "calls.size === 0 && numCalls"


def said(page) -> str:
    page.evaluate("tellAll()")
    return page.evaluate("chart.log.map((entry) => entry.said).join('\\n')")


@browser_test
def test_a_prompt_its_tokens_and_its_blocks(live):
    """From typing to the last token: the blocks appear, are the request's own, and vanish."""
    live.fill("[name=max_tokens]", "60")
    live.fill("[name=prompt]", "twenty tokens, a byte each, and <b>this</b>")
    live.press("[name=prompt]", "Control+Enter")
    wait_for(live, "state.requests.size === 1")
    live.click("#requests button")
    assert "(yours)" in live.inner_text("#about")
    wait_for(live, "state.owners.filter((owners) => owners.length).length >= 3")
    wait_for(live, IS_OVER)
    wait_for(live, "state.requests.size === 0")
    assert live.evaluate("state.owners.every((owners) => owners.length === 0)")
    assert live.inner_text(".asked") == "twenty tokens, a byte each, and <b>this</b>"
    tokens = live.locator(".answer .token")
    assert 1 <= tokens.count() <= 60
    assert live.inner_text("article > p") in ("ended: length", "ended: stop")
    token = live.locator(".token", has_text=re.compile(r"[ -~]")).first  # no part of a character
    token.click()
    assert live.locator("article ol li").count() in (5, 6)
    assert "chosen" in live.inner_text("article ol")
    token.click()
    tokens.first.focus()
    live.keyboard.press("ArrowRight")
    assert live.evaluate("document.activeElement.previousSibling.tabIndex") == 0
    for wanted in (1, 0):
        live.keyboard.press("Enter")
        assert (
            live.evaluate("document.activeElement.parentNode.nextSibling.tagName === 'OL'")
            == wanted
        )
    colours = tokens.evaluate_all("(all) => all.map((token) => token.style.background)")
    assert all(re.match(r"rgba?\(235,? 110,? 0", colour) for colour in colours)


@browser_test
def test_the_tokens_in_a_block_are_shown(live):
    """Of this page's own requests: of the prompt from /tokenize, of the answer as they came."""
    live.fill("[name=max_tokens]", "100")
    live.fill("[name=prompt]", "0123456789abcdefghij")
    live.click("#ask .main")
    wait_for(live, "[...own.values()].some((texts) => texts.prompt.length)")
    wait_for(live, "state.requests.size === 1 && state.decodes.length")
    live.click("#pause")
    live.evaluate("choose({ block: [...state.requests.values()][0].table[0] })")
    assert live.locator(".slots span").all_inner_texts() == list("0123456789abcdef")
    live.evaluate("choose({ block: [...state.requests.values()][0].table[1] })")
    shown = live.locator(".slots span").all_text_contents()
    assert shown[:4] == list("ghij") and "(yours)" in live.inner_text(".slots")


@browser_test
def test_eight_that_begin_alike(live):
    live.click("#alike")
    wait_for(live, f"own.size === 8 && {IS_OVER}")
    wait_for(live, "state.requests.size === 0")
    hits = re.findall(r"request \d+: (\d+) tokens not computed", said(live))
    assert len(hits) >= 7 and len(set(hits[-7:])) == 1, said(live)
    peak = live.evaluate(
        "(() => { let most = 0; for (let i = 0; i < tape.lines.length; i++) { moveTo(i); "
        "most = Math.max(most, ...state.owners.map((owners) => owners.length)); } return most; })()"
    )
    assert peak >= 4, "no block was ever shared by four"


@browser_test
def test_a_fork(live):
    live.click("#fork")
    wait_for(live, "numCalls === 1")
    wait_for(live, IS_OVER)
    wait_for(live, "state.requests.size === 0")
    text = said(live)
    for wanted in ("references 4 → 3", "references 3 → 2", "references 2 → 1"):
        assert wanted in text
    assert live.locator(".answer").count() == 4


@browser_test
def test_a_full_pool_and_hanging_up(live):
    live.click("#flood")
    wait_for(live, "chart.log.some((entry) => entry.said.includes('gave back'))")
    assert live.evaluate("own.size") >= 4
    wait_for(live, "chart.log.some((entry) => entry.said.includes('needs'))")
    live.click("#hangUp")
    wait_for(live, "state.requests.size === 0")
    assert live.evaluate("state.owners.every((owners) => owners.length === 0)")
    assert ": ended (abort)" in said(live)
    assert "hung up: its blocks are given back" in live.inner_text("#answers")


@browser_test
def test_several_prompts_and_chats(live):
    live.fill("[name=max_tokens]", "8")
    live.fill("[name=prompt]", "one\n---\ntwo\nlines\n---\nthree")
    live.click("#ask .main")
    wait_for(live, f"own.size === 3 && {IS_OVER}")
    assert live.locator(".asked").all_inner_texts() == ["one", "two\nlines", "three"]
    live.check("[value=chat]")
    for text in ("hello", "again"):
        live.fill("[name=prompt]", text)
        live.click("#ask .main")
        wait_for(live, "calls.size === 1")
        wait_for(live, IS_OVER)
    assert live.evaluate("conversation.map((message) => message.role)") == ["user", "assistant"] * 2
    live.check("[value=text]")
    assert live.evaluate("conversation.length") == 0


@browser_test
def test_a_refusal_is_told(live):
    live.expected = "400"  # Chromium's own words in the console
    live.fill("[name=max_tokens]", "100000")
    live.click("#ask .main")
    wait_for(live, "calls.size === 0 && numCalls")
    assert "maximum context length" in live.inner_text("article > p.error")


@browser_test
def test_a_key_is_asked_for_and_kept_nowhere(open_page, checkpoint):
    with Process(checkpoint, "--kv-blocks", "16", "--api-key", KEY) as server:
        page = open_page(server.url, wait="asking")
        page.expected = "401|ERR_INCOMPLETE_CHUNKED"
        for key in ("wrong", KEY):
            wait_for(page, "asking && !document.querySelector('#key').hidden")
            assert ("not accepted" in page.inner_text("#status")) == (key == KEY)
            page.fill("#key input", key)
            page.click("#key button")
        wait_for(page, "state.num_blocks === 16")
        page.fill("[name=max_tokens]", "3")
        page.click("#ask .main")
        wait_for(page, IS_OVER)
        assert "ended" in page.inner_text("article > p")
        assert KEY not in page.content() and page.input_value("#key input") == ""
        kept = "JSON.stringify([localStorage, sessionStorage, document.cookie])"
        assert page.evaluate(kept) == '[{},{},""]'


@browser_test
def test_it_works_without_events(open_page, server):
    page = open_page(server.url, wait="true")
    page.expected = "net::ERR_FAILED|Failed to load"
    page.route("**/events", lambda route: route.abort())
    page.reload()
    page.wait_for_selector("#status.error")
    page.fill("[name=max_tokens]", "5")
    page.click("#ask .main")
    wait_for(page, IS_OVER)
    assert page.locator(".token").count() >= 1
    assert "no event stream" in page.inner_text("#status")
    page.click("#fork")
    wait_for(page, f"numCalls === 2 && {IS_OVER}")
    assert page.locator(".answer").count() == 5


@browser_test
@pytest.mark.skipif(not SCREENSHOTS, reason="PAGE_SCREENSHOTS=assets makes the README's pictures")
@pytest.mark.parametrize("name", ["page", "page-preemption"])
def test_screenshots(open_page, checkpoint, name):
    from PIL import Image

    flags = ("--kv-blocks", "44", "--served-model-name", "out/stdlib")
    with Process(checkpoint, *flags) as server:
        page = open_page(server.url, wait="state.num_blocks")
        page.expected = "ERR_INCOMPLETE_CHUNKED"
        page.fill("[name=prompt]", "def blocks_for(num_tokens, block_size):\n")
        has_said = "chart.log.filter((entry) => entry.said.includes('{}')).length > {}"
        if name == "page":
            page.click("#alike")
            wait_for(page, has_said.format("not computed", 6))
            page.click("#fork")
            wait_for(page, has_said.format("2 → 1", 0))
            page.wait_for_timeout(50)
        else:
            page.click("#flood")
            wait_for(page, has_said.format("found", 1))
            last = "chart.log.findLast((entry) => entry.said.includes('found')).place"
            page.evaluate(f"seek({last})")
        page.evaluate("seek(tape.at)")
        page.evaluate("$('answers').style.maxHeight = '20rem'")
        page.evaluate("choose({ r: [...state.requests.keys()].at(-1) })")
        page.wait_for_timeout(400)
        path = ROOT / SCREENSHOTS / f"{name}.png"
        page.screenshot(path=path, full_page=True)
    image = Image.open(path).convert("RGB")
    image.quantize(256, method=Image.Quantize.MAXCOVERAGE).save(path, optimize=True)
    assert path.stat().st_size < 125_000


@browser_test
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits(open_record, scheme, width):
    """No sideways scrolling on a phone; canvases have words instead, and every control a name."""
    page = open_record(small_record(), color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 800})
    page.evaluate("seek(20)")
    page.wait_for_timeout(300)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.querySelector('#pool').clientWidth") <= width
    for canvas in ("#pool", "#timeline"):
        assert page.get_attribute(canvas, "aria-label")
        words = page.get_attribute(canvas, "aria-describedby")
        assert page.inner_text(f"#{words}").strip()
    unnamed = page.evaluate(
        """[...document.querySelectorAll("button, input, select, textarea")].filter((element) =>
            !element.textContent && !element.labels?.length && !element.ariaLabel).length"""
    )
    assert unnamed == 0
