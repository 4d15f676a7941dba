"""
Test the live page in a real browser (browser.py), except for its talking half (test_page_talk.py).
Records come from the real engine without a model (simulated_device.py). Live streams come from a
real server with a random model, or line by line from the test.
"""

# ruff: noqa: F811  fixtures of browser.py
import gzip
import json
import os
import random
import re
import signal
import statistics
from collections import Counter, defaultdict
from itertools import pairwise
from unittest import mock

import pytest
from browser import (  # noqa: F401
    IS_PLAYED,
    ORIGIN,
    ROOT,
    add_tokens,
    checkpoint,
    chromium,
    jsonl,
    live,
    live_page,
    open_page,
    send,
    server,
    violations,
    wait_for,
)
from processes import Process

from assets.draw import draw_page
from params import SamplingParams
from server.live import page as page_html
from server.live import page_headers
from test_paged import new_engine, trained_model
from tests.simulated_device import simulated_engine

FOLDER = ROOT / "server/page"
KEY = "a key of 16 letters"


# --------------------------------------------------------------------------------------------------
# The files


def test_it_is_small():
    """The whole page, including the tour's record, is smaller than a picture when compressed."""
    assert len(gzip.compress(page_html().encode())) <= 36 * 1024
    for path in FOLDER.iterdir():
        lines = path.read_text().splitlines()
        assert max(len(line) for line in lines if "<link" not in line) <= 100, path


def test_it_is_one_document_that_asks_nobody_else():
    """
    The page has one script and one style, which its policy allows by hash, and nothing that the
    policy would block. Text is never inserted as HTML, and nothing is stored in the browser.
    """
    html = page_html()
    assert html.count("<script>") == html.count("<style>") == 1
    head, _, script = html.partition("<script>")
    assert not re.findall(r"https?:(?!%2f%2fwww.w3.org/2000/svg)|//[a-z]+\.com|@import", html)
    assert not re.findall(r"<link (?!rel=\"icon\" href=\"data:)|\ssrc=", head)
    assert not re.findall(r"\s(style|on\w+)=\"", head)
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", script)
    assert not re.findall(r"(call|json)\(\"/", script)  # a proxy may add a prefix
    assert not re.findall(r"localStorage|sessionStorage|cookie", script)


def test_only_the_pages_own_script_runs_and_nothing_frames_it():
    """The policy has the hashes of the page's script and style; anything added to it is not run."""
    html = "<p><style>a{}</style><script>go()</script><script type='x'>data</script>"
    go = "'sha256-5KYv+PUboo5h+0+YAtGRPbwv5d/QxzHslP4YGnUaxRw='"
    style = "'sha256-X1RutGBrXCt9KkSaXMK7tHftWiRscFHOhxsS8tv8hBk='"
    assert page_headers(html) == {
        "Content-Security-Policy": f"default-src 'none'; script-src {go}; style-src {style}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }


def test_no_script_takes_a_name_of_another():
    """The scripts are joined into one, where the later of two functions would silently win."""
    script = "\n".join(path.read_text() for path in FOLDER.glob("*.js"))
    names = re.findall(r"^(?:async )?(?:function\*?|const|let) (\w+)", script, re.M)
    assert sorted(set(names)) == sorted(names) != []


# --------------------------------------------------------------------------------------------------
# Records of a real engine


def record(engine, arrivals: list[tuple], aborts: dict[int, int]) -> list[tuple]:
    """
    Return [(line, snapshot after it), ..] for a run, with lines 10 ms apart. Each of `arrivals` is
    (step, prompt, tokens, n), and arrives earlier if nothing is running. `aborts` is {step: index
    of the arrival}. The first line is a snapshot.
    """
    recorder = engine.stages["record"]

    def take_snapshot() -> dict:
        return json.loads(recorder.snapshot())

    told = []
    # a step with drafts may write two lines
    recorder.listen(lambda line: told.append((json.loads(line), take_snapshot())))
    told.append((take_snapshot(), take_snapshot()))
    coming = [*enumerate(sorted(arrivals))]
    while engine.has_work or coming:
        while coming and (coming[0][1][0] <= engine.num_steps or not engine.has_work):
            id, (_, prompt, max_tokens, n) = coming.pop(0)
            params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
            engine.add_request(id, prompt, params, n=n, name=f"call-{id}")
        engine.abort(aborts.pop(engine.num_steps, None))
        engine.step()
    for i, (line, _) in enumerate(told):
        line["time"] = i / 100
    return told


def small_record() -> list[tuple]:
    """
    Record a prefix hit of 16 tokens, a fork with a copy-on-write, a preemption, a request that
    waits for blocks, and an abort, with 12 blocks of 4 tokens.
    """
    engine = simulated_engine(
        num_blocks=12, block_size=4, token_budget=24, overlap=False, watermark=0, check=True
    )
    opening = [*range(1, 12), *range(1, 6)]
    arrivals = [(0, [*opening, 6, 7], 3, 1), (3, [*opening, 9, 9], 6, 1), (3, [5] * 6, 5, 3)]
    arrivals += [(10, [7] * 14, 16, 1), (10, [8] * 14, 16, 1), (10, [9] * 20, 9, 1)]
    return record(engine, arrivals, {30: 5})


def random_record(seed: int, num_requests: int = 60, **settings) -> list[tuple]:
    rng = random.Random(seed)
    engine = simulated_engine(**{"num_blocks": 24, "max_num_seqs": 6} | settings)

    def arrival() -> tuple:
        prompt = [1] * rng.randrange(9) + [rng.randrange(12) for _ in range(rng.randint(1, 24))]
        return rng.randrange(3 * num_requests), prompt, rng.randint(1, 20), rng.choice([1, 1, 1, 3])

    arrivals = [arrival() for _ in range(num_requests)]
    aborts = {rng.randrange(3 * num_requests): rng.randrange(num_requests) for _ in range(9)}
    return record(engine, arrivals, aborts)


def frequent_snapshots(*args, **settings) -> list[tuple]:
    with mock.patch("engine.events.LINES_A_SNAPSHOT", 7):
        return random_record(*args, **settings)


def record_of_drafts() -> list[tuple]:
    """Record requests for repetitive texts, some of which end early."""
    settings = {"num_blocks": 24, "max_num_seqs": 4, "token_budget": 24, "overlap": True}
    engine = new_engine(trained_model(), speculate=True, **settings)
    arrivals = [(4 * i, [i, 7, 8, 9] * 3, 5 + 3 * i, 1 + i % 2) for i in range(9)]
    told = record(engine, arrivals, {15: 2})
    assert sum("drafts" in line for line, _ in told) > 5
    return told


SMALL = small_record()
LINES = [line for line, _ in SMALL]
RECORDS = {
    "random": lambda: random_record(1),
    "tight": lambda: random_record(3, 25, num_blocks=12, overlap=True, token_budget=8),
    "snapshots": lambda: frequent_snapshots(4),
    "windows": lambda: random_record(5, window=6),
    "drafts": record_of_drafts,
}


@pytest.fixture
def open_record(open_page):
    """Return a function that opens a page with a record, SMALL by default, paused at line one."""

    def open_record(told=SMALL, **options):
        page = open_page(told=told, **options)
        page("seek(0)")
        return page

    return open_record


def say(page, lines: list[dict]):
    page("(lines) => takeIn(lines)", lines)


def press(page, read: str, *moves: tuple):
    """Make moves: each is a key to press, and what `read` must then return."""
    for key, wanted in moves:
        page.keyboard.press(key)
        assert page(read) == wanted, key


def show(page, place: int):
    """Go to this place, and wait until the page has drawn and described it."""
    page(f"seek({place}); view.told = 0")
    wait_for(page, f"grid && view.at === {place} && state.touched?.size === 0 && view.told")


# --------------------------------------------------------------------------------------------------
# The state

# The state as JSON, in a form that can be compared with a snapshot.
STATE = """(() => {
    const requests = [...state.requests.values()].map((q) => ({ ...q, table: [...q.table] }));
    const committed = [...state.committed].sort((one, other) => one - other);
    // what a block shows: the hues of its holders, or of its last holder
    const huesOf = (owners, block) =>
        owners.length ? owners.map(([q]) => q.hue).sort() : state.last[block]?.[0].hue;
    const holders = state.owners.slice(0, -1).map((owners) => owners.length);
    return { requests, holders, committed, idle: [...state.idle], totals: { ...state.totals },
        step: state.step, hues: state.owners.map(huesOf) };
})()"""


@pytest.mark.parametrize("name", RECORDS)
def test_the_state_is_what_the_lines_say(open_record, name):
    """
    After each line, the state matches a snapshot taken then. Going back restores earlier states. No
    two requests share a hue, all hues are used, and no hue changes at a snapshot.
    """
    told = RECORDS[name]()
    page = open_record(told)

    def read(places) -> list[dict]:
        read = f"(place) => {{ moveTo(place); return {STATE}; }}"
        return json.loads(page(f"(places) => JSON.stringify(places.map({read}))", [*places]))

    states = read(range(len(told)))
    kinds = [line["event"] for line, _ in told[1:]] + ["step"]
    used = set()
    for (line, snapshot), kind, state in zip(told, kinds, states, strict=True):
        if kind == "step":  # otherwise the snapshot was taken after the next line
            check(state, snapshot, line)
        hues = [q["hue"] for q in state["requests"] if q["table"]]
        assert len(set(hues)) == len(hues)
        used.update(hues)
    assert len(used) == 12
    for before, after, kind in zip(states, states[1:], kinds, strict=False):
        assert before["hues"] == after["hues"] or kind == "step"
    assert not page("chart.columns.some(({ isRestart }) => isRestart)")
    places = [len(told) - 2, len(told) - 3, 0, *random.Random(0).sample(range(len(told)), 20)]
    assert read(places) == [states[place] for place in places]


def check(state: dict, snapshot: dict, line: dict):
    # with windows, a table repeats its first block in place of the blocks that were given back
    entries = Counter(block for q in snapshot["requests"] for block in set(q["table"]))
    wanted = {
        "committed": sorted(snapshot["committed"]),
        "idle": snapshot["idle"],
        "holders": [entries[block] for block in range(snapshot["num_blocks"])],
        "step": max(0, snapshot["step"] - 1),
    }
    assert state | wanted == state, line
    for name in ("preemptions", "queried tokens", "hit tokens"):
        assert state["totals"][name] == snapshot["totals"][name], line
    shown = {q["r"]: q for q in state["requests"]}
    assert shown.keys() == {q["r"] for q in snapshot["requests"]}, line
    for q in snapshot["requests"]:
        names = ["filled", "table", "generated"]
        if not q["choice"]:  # a fork starts with its parent's counts, which no line reports
            names += ["hits", "preemptions"]
        if q["status"] != "finishing":  # lines do not report "finishing"
            names.append("status")
        for name in names:
            assert shown[q["r"]][name] == q[name], (name, line)


def test_a_block_that_was_hit_and_given_up_in_one_step_is_evicted_last(open_page):
    page = live_page(open_page)
    say(page, [LINES[0] | {"idle": [1, 2, 3]}, {"event": "step", "idle": [1]}])
    assert page("moveTo(1), [...state.idle]") == [2, 3, 1]


# --------------------------------------------------------------------------------------------------
# The player


def test_buttons_and_keys_move_through_a_record(open_record):
    """Keys used by a field are left to the field, and Space on a button presses it once."""
    page = open_record()
    last = len(SMALL) - 1
    page.click("#forth")
    press(page, "tape.at", ("ArrowRight", 2), ("ArrowLeft", 1))
    page.click("#back")
    assert page("tape.at") == 0
    page.select_option("#speed", "120")
    page.focus("#pause")
    page.keyboard.press(" ")
    wait_for(page, f"tape.at === {last} && player.isPaused")
    page("player.speed = 0")
    page("document.activeElement.blur()")
    press(page, "tape.at", (" ", 0))  # at the end, a record starts over
    page.fill("#place", "5")
    page.focus("#speed")
    press(page, "tape.at", ("ArrowRight", 5))
    page.focus("#place")
    press(page, "tape.at", ("Home", 0), ("ArrowRight", 1))
    press(page, "player.isPaused", (" ", False))  # all keys were once dead after a box was ticked


def test_pause_pauses_where_it_is_and_live_follows(open_page):
    """Pause once jumped to the first step whenever the page was up to date."""
    place = "[tape.at, player.isPaused]"
    page = live_page(open_page)
    say(page, LINES[:20])
    wait_for(page, "tape.at === 19")
    page.click("#pause")
    assert page(place) == [19, True]
    say(page, LINES[20:30])
    wait_for(page, "$('pill').textContent === 'Paused at step 16'")
    page.keyboard.press(" ")
    wait_for(page, "tape.at === 29")
    page.keyboard.press(" ")
    assert page(place) == [29, True]
    page("seek(3)")
    wait_for(page, "$('live').checkVisibility()")
    page.click("#live")
    assert page(place) == [29, False]
    say(page, LINES[30:32])
    wait_for(page, "tape.at === 31 && $('pill').textContent === 'Live'")


# Lets the test make the frames, 60 a second. `play` returns the text of the pill in each frame.
# `ask` adds a request of `steps` steps, all of which the engine has already finished.
DRIVEN = """(snapshot) => {
    let [now, r] = [1e9, 0];
    requestAnimationFrame = () => 0;
    window.play = (count) => Array.from({ length: count }, () => {
        frame((now += 1000 / 60));
        return $("pill").textContent;
    });
    window.ask = (name, steps) => {
        const step = { event: "step", decodes: [++r], time: now + r };
        const first = { ...step, new: [{ r, name, prompt: 1, max_tokens: steps }] };
        const lines = Array.from({ length: steps }, (_, i) => ({ ...(i ? step : first), step: i }));
        takeIn([...lines, { event: "step", ended: [[r, "length", steps]] }].map((line, i) =>
            ({ ...line, time: r + i / 1e4 })));
    };
    calls.set("own", addArticle(Array(9).fill({ text: "" }), 1));
    takeIn([snapshot]);
    play(50);
}"""


def test_ones_own_prompt_can_be_watched(open_page):
    """
    The user's own prompt plays slowly: its blocks were once visible for only a quarter of a second,
    and the pill said "Live" 36 steps behind. Other users' requests are shown as they happen. A
    click on "As it happens" shows the user's own that way, too.
    """
    page = live_page(open_page)
    page(DRIVEN, LINES[0])
    for steps in 64, 512:
        pills = page(f"ask('own', {steps}), play(200)")
        shown = [pill for pill in pills if re.fullmatch(rf"Playing step \d+ of {steps}", pill)]
        assert 1.5 < len(shown) / 60 < 3.2
        assert pills[-1] == page("ask('other', 64), play(30)")[-1] == "Live"
    page("ask('own', 64), play(20)")
    assert page.inner_text("#live") == "As it happens"
    page.click("#live")
    assert page("[play(10).at(-1), tape.lines.length - tape.at]") == ["Live", 1]
    page.select_option("#speed", "2")
    page.focus("#place")
    page.keyboard.press("Home")
    page.keyboard.press(" ")
    assert page("play(1)") == [f"Behind by {64 + 512 + 3 * 64} steps"]


def test_a_replay_begins_paused_at_its_most_telling_step(open_page):
    """It begins at a preemption, or else at a copy, or else at a hit, or else in the middle."""
    page = open_page(told=SMALL)
    assert page("[tape.lines[tape.at].preempted, player.isPaused, player.speed]") == [[5], True, 10]
    lines = [{}, {}, {}, {"admitted": [[1, 0, 9], [2, 4, 9]]}, {"copies": [[1, 2, 3]]}]
    lines += [{"preempted": [1]}, {}]
    places = [page("lines => telling(lines)", lines[:n]) for n in (7, 5, 4, 3)]
    assert places == [5, 4, 3, 1]


def test_a_link_leads_to_a_step_and_follows_the_place(open_page):
    page = open_page(f"{ORIGIN}/#step=12", SMALL)
    assert page("[state.step, player.isPaused]") == [12, True]
    page.click("#forth")
    wait_for(page, "location.hash === '#step=13'")
    page("location.hash = '#step=3'")
    wait_for(page, "state.step === 3")
    page = live_page(open_page)
    say(page, LINES)
    page("seek(5)")
    wait_for(page, "location.hash === `#step=${state.step}`")
    page("goLive()")
    wait_for(page, "location.hash === ''")


def test_a_record_can_be_inside_be_opened_and_be_wrong(open_page, tmp_path, monkeypatch):
    """A record can be in the page (a file of `draw.py page`, opened from disk), or be opened."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.jsonl").write_text(jsonl(LINES))
    page = open_page(draw_page("run.jsonl")["file"].absolute().as_uri())
    wait_for(page, "document.body.classList.contains('replay') && $('tab-pool').checked")
    assert [page.is_visible(part) for part in ("#talk", "#pool")] == [False, True]

    def open_file(name: str, text: str):
        (tmp_path / name).write_text(text)
        page.set_input_files("#file", tmp_path / name)

    title = {"event": "title", "name": "x", "model": "a model", "date": "today"}
    other = jsonl([title, *LINES[:30]]) + '{"event": "st'  # the server was killed
    open_file("other.jsonl", other)
    wait_for(page, "$('model').textContent === 'other.jsonl · a model · today'")
    show(page, 1)
    # there is no link, because a reload would show the record inside; the file can be opened again
    assert page("[location.hash, $('file').value]") == ["", ""]
    open_file("again", other)
    wait_for(page, "tape.name === 'again' && tape.at === telling(tape.lines)")
    for name, lines in ("a step", LINES[1:]), ("old", [LINES[0] | {"version": 1}]), ("none", []):
        open_file(name, jsonl(lines))
        says = f"{name} is not a valid serve.py record: "
        wait_for(page, f"$('notice').textContent.startsWith('{says}')")
    assert page("tape.lines.length") == 30  # the former record stays


def test_what_comes_is_text(open_record):
    """No part of a hostile record is turned into an element."""
    hostile = "<img src=x onerror=alert(1)>"
    page = open_record(json.loads(json.dumps(SMALL).replace('"length"', json.dumps(hostile))))
    page("seek(3)")
    wait_for(page, "$('said').textContent.includes('onerror')")
    assert page.locator("img").count() == 0


@pytest.mark.parametrize(
    "base, fields, shown",
    [
        (1, {"tables": 5}, [20, 9, True, True]),
        (0, {"num_blocks": 1e9}, [20, 9, True, True]),  # this one and the next once hung the tab
        (0, {"idle": [1e999]}, [4, 2, False, False]),
    ],
)
def test_a_record_that_contradicts_itself_is_stopped(open_page, base, fields, shown):
    """It once stopped the frames, so no other record could be played, and lost the live tape."""
    page = live_page(open_page)
    say(page, LINES[:20])
    page("seek(9)")
    wrong = jsonl([*LINES[:3], LINES[base] | fields]).replace("Infinity", "1e999")
    page("text => replay(text, 'wrong')", wrong)
    is_refused = "$('notice').textContent.includes('is not a valid')"
    assert page(f"[tape.lines.length, tape.at, player.isLive, {is_refused}]") == shown
    page("text => replay(text, 'another')", jsonl(LINES))
    page("(player.speed = 120, player.isPaused = false)")
    wait_for(page, f"tape.at === {len(LINES) - 1}")


# --------------------------------------------------------------------------------------------------
# The pool

# The colour of each cell of the pool, read where it has no number.
PIXELS = """state.owners.slice(0, -1).map((_, block) => {
    const [x, y, w, h] = cellOf(block);
    const at = [x + 4, y + 0.75 * h].map((n) => n * devicePixelRatio);
    return [...$("pool").getContext("2d").getImageData(...at, 1, 1).data];
})"""


def test_cells_have_the_colours_of_what_they_are(open_record):
    """
    Filled, empty, cached and free cells have different colours in every hue, and older cached
    blocks are paler. This holds at each place, also after going back.
    """
    told = random_record(1)
    page = open_record(told)
    page.expected = "Canvas2D: Multiple readback"  # Chromium warns that it is slow
    colours = defaultdict(set)
    for place in [*sorted(random.Random(0).sample(range(len(told)), 12)), 40, 20]:
        show(page, place)
        state = page(STATE)
        pixels = page(PIXELS)
        alphas = [pixels[block][3] for block in state["idle"]]
        assert alphas == sorted(alphas), "the older is not the paler"
        owners = {block: q for q in state["requests"] for block in q["table"]}
        for block, pixel in enumerate(pixels):
            if block in owners:
                q = owners[block]
                kind = q["hue"], q["filled"] > 4 * q["table"].index(block)
            else:
                kind = state["hues"][block] if block in state["idle"] else "free"
            if state["holders"][block] < 2:
                colours[kind].add(tuple(pixel))
    assert {len(colours[kind]) for kind in colours if not isinstance(kind, int)} == {1}
    assert sum(map(len, colours.values())) == len(set().union(*colours.values()))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_numbers_in_cells_can_be_read(open_record, scheme):
    """
    Axe finds enough contrast for numbers on each of the twelve hues and at the rows' heads. It
    ignores disabled buttons, so their colours are tested here, too: Send had a contrast of 1.0.
    """
    page = open_record(color_scheme=scheme)
    show(page, 0)
    page("void choose(0)")
    page(
        """(() => {
            const fills = palette.map(({ fill }) => [theme.ink, fill]);
            const pales = palette.flatMap(({ pale, cached }) => [pale, cached])
                .map((shade) => [theme.ink, shade]);
            $("send").disabled = true;
            const { color, backgroundColor } = getComputedStyle($("send"));
            const others = [[theme.quiet, theme.paper], [color, backgroundColor]];
            for (const [color, background] of [...others, ...fills, ...pales]) {
                const number = make("p", {}, "12");
                Object.assign(number.style, { color, background });
                $("about").append(number);
            }
        })()"""
    )
    assert violations(page, "#about") == []
    assert page("new Set(palette.map(({ fill }) => fill)).size") == 12


IS_LAID_OUT = """grid?.ctx.canvas.width === $("pool").clientWidth
    && grid.ctx.canvas.height === $("pool").clientHeight"""


def box_of(page, block) -> dict:
    """Return the centre of a block's cell, as a position to point at."""
    x, y, w, h = page(f"cellOf({block})")
    return {"x": x + w / 2, "y": y + h / 2}


def is_over(page, shape: str, block: int) -> bool:
    """Return True if a shape over the cells covers a cell's centre with its fill or its line."""
    return page(
        """([shape, block]) => {
            const point = new DOMPoint(...centre(cellOf(block)));
            const element = document.querySelector(shape);
            const { fill, stroke } = getComputedStyle(element);
            return fill !== "none" && element.isPointInFill(point)
                || stroke !== "none" && element.isPointInStroke(point);
        }""",
        [shape, block],
    )


def test_what_is_hovered_is_lit_in_all(open_record):
    page = open_record()
    show(page, 5)  # block 5 belongs to request 2, and block 6 to others
    page.hover("#pool", position=box_of(page, 5))
    wait_for(page, "lit === 2 && !view.isNews")
    assert [is_over(page, "#dim", block) for block in (5, 6)] == [False, True]
    assert page("chart.shown.filter(({ alpha }) => alpha === 1).map(({ r }) => r)") == [2]
    page.hover("#timeline", position={"x": 20, "y": page("RULER + 1.5 * chart.rowHeight")})
    assert page("lit === chart.shown[1].r")  # the request of the second row
    page.mouse.move(5, 5)
    wait_for(page, "lit === undefined && !view.isNews")
    assert not page.is_visible("#tip")
    assert not is_over(page, "#dim", 6)


# (step, block that is clicked) -> the title, the figures, the description of the step, the drawer
# with the block's request, the tip at the pointer, and the parts of the pool's and the request's
# bars
SAID = {
    (0, 11): """
        Paused at step 0 – pagedGPT
        5 of 12 blocks held 0 cached · 7 free
        0% hit rate 50 tokens/s 0 waiting 0 preempted
        step 0: 0 decodes, 1 chunk with 18 tokens
        Block 11: free
        5 0 7
    """,
    (3, 7): """
        Paused at step 3 – pagedGPT
        7 of 12 blocks held 1 cached · 4 free
        38% hit rate 125 tokens/s 0 waiting 0 preempted
        step 3: 0 decodes, 2 chunks with 8 tokens · request 2 hit: 4 blocks found in the cache
        Request 3
        answer: 1 of 5 tokens
        6 prompt tokens, 0 of them found in the cache
        committed 4 computed 6 filled 6 allocated 8
        Block table, logical → physical
        0 → 6 1 → 7
        Block 7: held, shared ×3
        request 3: tokens 4 to 7, 2 of 4 slots filled
        request 4: tokens 4 to 7, 1 of 4 slots filled
        request 5: tokens 4 to 7, 1 of 4 slots filled
        7 1 4 4 2 0 2
    """,
    (4, 8): """
        Paused at step 4 – pagedGPT
        9 of 12 blocks held 1 cached · 2 free
        38% hit rate 180 tokens/s 0 waiting 0 preempted
        step 4: 4 decodes, 10 ms · request 3 copied: shared block 7 to 8 ·
        request 4 copied: shared block 7 to 9
        Request 3
        answer: 2 of 5 tokens
        6 prompt tokens, 0 of them found in the cache
        committed 4 computed 7 filled 7 allocated 8
        Block table, logical → physical
        0 → 6 1 → 8
        Block 8: held
        request 3: tokens 4 to 7, 3 of 4 slots filled
        9 1 2 4 3 0 1
    """,
    (7, 8): """
        Paused at step 7 – pagedGPT
        9 of 12 blocks held 1 cached · 2 free
        38% hit rate 250 tokens/s 1 waiting 1 preempted
        step 7: 3 decodes, 1 waiting, 10 ms · request 5 preempted: gave back 2 blocks ·
        evicted: 1 block · request 3 ended: length after 5 tokens
        Block 8: cached, evicted after 0 others
        9 1 2 4 3 0 1
    """,
    (8, 0): """
        Paused at step 8 – pagedGPT
        3 of 12 blocks held 5 cached · 4 free
        47% hit rate 256 tokens/s 0 waiting 1 preempted
        step 8: 2 decodes, 1 chunk with 1 token, 10 ms · request 5 resumed:
        2 blocks found in the cache · request 2 ended: length after 6 tokens ·
        request 4 ended: length after 5 tokens
        Block 0: cached, evicted after 4 others
        3 5 4 4 3 0 1
    """,
    (10, 11): """
        Paused at step 10 – pagedGPT
        8 of 12 blocks held 4 cached · 0 free
        30% hit rate 200 tokens/s 1 waiting 1 preempted
        step 10: 0 decodes, 2 chunks with 24 tokens, 1 waiting · evicted: 3 blocks ·
        request 8 waits: needs 5 blocks, 4 available
        Request 6
        prefilling: 12 of 14
        14 prompt tokens, 0 of them found in the cache
        committed 12 computed 12 filled 12 allocated 16
        Block table, logical → physical
        0 → 11 1 → 9 2 → 4 3 → 10
        Block 11: held, committed
        request 6: tokens 0 to 3, 4 of 4 slots filled
        8 4 0 12 0 0 4
    """,
    (30, 9): """
        Paused at step 30 – pagedGPT
        7 of 12 blocks held 5 cached · 0 free
        32% hit rate 175 tokens/s 0 waiting 3 preempted
        step 30: 1 decode, 10 ms · request 8 ended: abort after 1 token
        Block 9: cached, evicted after 1 other
        7 5 0 12 0 0 4
    """,
}


def test_what_is_said(open_record):
    page = open_record()
    for (step, block), said in SAID.items():
        show(page, page(f"stepPlace({step})"))
        page.click("#pool", position=box_of(page, block))
        wait_for(page, IS_LAID_OUT)  # next to the drawer
        page.hover("#pool", position=box_of(page, block))
        shown = page.locator(":is(#figures, #said, #about, #tip):visible").all_inner_texts()
        bars = page.locator("#bar i, .states i")
        parts = bars.evaluate_all("(all) => all.map((part) => part.style.flexGrow)")
        assert " ".join([page.title(), *shown, *parts]).split() == said.split()
    page("choose(7)")
    page.click("#forth")
    wait_for(page, "$('status').textContent === 'It holds no blocks now.'")
    page.click("#close")
    assert not page.is_visible("#drawer")


@pytest.mark.parametrize("size", [(1280, 720), (390, 844)], ids=str)
def test_the_pool_is_shown_as_far_as_it_was_ever_used(open_page, size):
    """In the default server's pool, the cells of a first prompt are large, the others a strip."""
    page = live_page(lambda **more: open_page(size=size, **more))
    page("$('tab-pool').checked = true")
    told = []
    for i, block in enumerate([4, 40, 4, 1100]):
        say(page, [LINES[0] | {"num_blocks": 1536, "time": i + 1, "idle": [block]}])
        wait_for(page, f"view.at === {i} && {IS_LAID_OUT}")
        assert i or page("grid.h >= 28 && grid.w >= 50")
        told.append(page("[grid.shown, $('strip').textContent]"))
    some, more = [32, "32 to 1,535: free"], [64, "64 to 1,535: free"]
    assert told == [some, more, more, [1536, ""]]


def test_steps_that_came_while_a_phone_showed_something_else(open_page):
    """The timeline was laid out for a width of 0, and then was empty but for its left edge."""
    page = live_page(lambda **more: open_page(size=(390, 844), **more))
    say(page, LINES)
    wait_for(page, "view.at === newest()")
    page.click("label:has(#tab-steps)")
    wait_for(page, "paper.width > 0 && chart.left > 0")
    assert page("Math.round(paper.width - endOf(chart.columns[columnShown()]))") == 30


def test_a_cell_is_what_is_pointed_at(open_record):
    """This includes the last cell. After it, and left and right of all cells, there is no block."""
    page = open_record()
    show(page, 1)
    for point, block in (
        ("cellOf(11)", 11),
        ("cellOf(12)", None),
        ("[GUTTER - 1, 1]", None),
        ("[GUTTER + grid.w * grid.columns, 1]", None),
    ):
        (x, y, *_) = page(point)
        assert page(f"blockAt({{ offsetX: {x}, offsetY: {y} }})") == block, point


def test_the_pool_by_keyboard(open_record):
    """Arrows move by a cell, Enter opens the drawer, Escape closes it. The player does not step."""
    page = open_record()
    page("grid = null, $('pool').onkeydown({ key: 'Tab' })")  # before it is laid out
    show(page, 6)
    columns = page("grid.columns")
    page.focus("#pool")
    right = [("ArrowRight", 0), ("ArrowRight", 1), ("ArrowDown", 1 + columns)]
    press(page, "pointed", *right, ("ArrowLeft", columns), ("ArrowUp", 0), ("ArrowUp", 0))
    assert page.inner_text("#tip[role=status]").startswith("Block 0: ")
    page.keyboard.press("Enter")
    assert page.inner_text("#about h2") == "Request 2"
    wait_for(page, f"{IS_LAID_OUT} && !view.isNews")  # next to the drawer
    assert is_over(page, "#chain", 1)
    page.keyboard.press("Escape")
    assert not page.is_visible("#drawer")
    assert page("tape.at") == 6


# the kind of event, its place, its blocks, the hue of its request
HAPPENS = [
    ("hit", 5, [0, 1, 2, 3], "1"),
    ("copied", 6, [7, 8], "2"),
    ("evicted", 9, [4], ""),
    ("preempted", 9, [6, 7], "4"),
]


# The kind, shape, hue and animation of each effect that is visible in a given state of the page.
EFFECTS = """name => { document.body.dataset.state = name;
    return [...$("effects").children].map((path) => [path, getComputedStyle(path)])
        .filter(([, { visibility }]) => visibility === "visible")
        .map(([path, { animationName }]) => [path.className.baseVal, path.getAttribute("d"),
            path.style.getPropertyValue("--hue"), animationName]); }"""


@pytest.mark.parametrize("motion", ["no-preference", "reduce"])
def test_what_happens_is_seen(open_record, motion):
    """
    A hit, copies, an eviction and a preemption are shown over their blocks: while paused,
    permanently, and while playing, for a moment, unless motion is reduced. Rows show them as flags.
    """
    page = open_record(reduced_motion=motion)
    moves = motion == "no-preference"
    for kind, place, blocks, hue in HAPPENS:
        show(page, place - 1)
        page.click("#forth")
        shape = page("arrow" if kind == "copied" else "boxesOf", blocks)
        played = [kind, shape, hue, "fade"]
        stays = [kind, shape, hue, "appear" if moves else "none"]
        assert (played in page(EFFECTS, "Live")) == moves
        if kind != "evicted":
            assert stays in page(EFFECTS, "Paused")
    page("Object.assign(player, { isPaused: false, speed: 0 }); view.told = 0")
    wait_for(page, "document.body.dataset.state !== 'Paused'")
    page("document.getAnimations().forEach((one) => (one.playbackRate = 20))")
    wait_for(page, "!$('effects').children.length")
    page("seek(0); seek(1e9)")  # events that were jumped over are not shown
    assert page("$('effects').children.length") == 0
    page("$('effects').append($('effect').cloneNode())")
    # even a tenth arrow stays in the pool
    page("$('effects').lastChild.setAttribute('d', arrow([0, grid.shown - 1], 9))")
    bottom = "(({ y, height }) => y + height)($('effects').lastChild.getBBox())"
    assert page(bottom) <= page("$('pool').clientHeight")
    flags = page("[...chart.rows.values()].flatMap((row) => row.flags.map(({ kind }) => kind))")
    assert " ".join(flags[:5]) == "hit copied copied preempted resumed"


def test_flags_are_told_apart(open_record):
    """Flags differ in shape and colour, and match the legend."""
    page = open_record()
    page.expected = "Canvas2D: Multiple readback"
    show(page, len(SMALL) - 1)
    flags = page(
        """() => Object.keys(FLAGS).map((flag) => {
            const row = chart.shown.find((one) => one.flags.some(({ kind }) => kind === flag));
            const { column } = row.flags.find(({ kind }) => kind === flag);
            const at = [xOf(column) + 3, row.y + 3];
            const [r, g, b] = paper.ctx.getImageData(...at, 1, 1).data;
            const legend = $(`flag-${flag}`);
            return [getComputedStyle(legend).fill, `rgb(${r}, ${g}, ${b})`, legend.outerHTML];
        })"""
    )
    legend, drawn, shapes = zip(*flags, strict=True)
    assert drawn == legend
    assert len({*legend}) == len({*shapes}) == 4


# --------------------------------------------------------------------------------------------------
# The timeline


def test_the_ruler_seeks_and_the_rows_pan(open_record):
    page = open_record(random_record(1))
    show(page, 5)

    def point(x: float, y: float, *does: str) -> int:
        page.hover("#timeline", position={"x": x, "y": y})
        for press in does:
            getattr(page.mouse, press)()
        return page("tape.at")

    columns = page("chart.columns.map((column) => [xOf(column) + 2, column.place])")
    (x, place), (other_x, other) = columns[10], columns[14]
    assert point(x, 8, "down") == place
    assert point(other_x, 8, "up") == other
    point(600, 120, "down")
    point(500, 120, "up")
    assert page("[chart.left, tape.at]") == [100, other]
    x, place = columns[30]
    assert point(x - 100, 120, "down", "up") == place


def test_the_wheel_zooms_at_the_pointer_and_f_fits(open_record):
    page = open_record(random_record(1))
    show(page, 5)
    page.hover("#timeline", position={"x": 400, "y": 100})
    before = page("unitAt(400)")
    page.mouse.wheel(0, -300)
    wait_for(page, "chart.scale > 1.5")
    assert page("unitAt(400)") == pytest.approx(before, abs=0.01)
    page.mouse.wheel(120, 0)
    wait_for(page, f"unitAt(400) > {before} + 10")
    page.keyboard.press("f")
    left, last = page("[chart.left, endOf(chart.columns.at(-1)) - paper.width]")
    assert left == 0
    assert -60 < last <= 0
    assert page("pan(chart.end), followPlace(), chart.left === chart.end")  # the view stays there


def test_f_before_the_first_step_does_no_harm(open_page):
    """Previously the scale was then infinite, and the steps that came later were not drawn."""
    page = live_page(open_page)
    wait_for(page, "grid")
    page.keyboard.press("f")
    say(page, engines(1, 2))
    wait_for(page, "chart.columns.length > 9")
    assert 0 < page("widthOf(chart.columns[0])") < 10_000


def test_what_is_pointed_at_is_marked_and_a_dragged_range_is_summed(open_record):
    """Hovering marks a column and no row. A range dragged in the ruler stays, in any direction."""
    page = open_record()
    show(page, 9)
    is_marked = """([from, to]) => { const { left, right } = $("range").getBoundingClientRect();
        const x = $("timeline").getBoundingClientRect().left;
        return left - x === xOf(chart.columns[from]) && right - x === endOf(chart.columns[to]); }"""

    def point(i: int, y: float, *does: str) -> str:
        page.hover("#timeline", position={"x": page(f"xOf(chart.columns[{i}]) + 2"), "y": y})
        for press in does:
            getattr(page.mouse, press)()
        wait_for(page, "!view.isNews")
        return page.inner_text("#tip")

    assert point(5, 60).startswith("step 4: 4 decodes, 10 ms")
    assert page(is_marked, [5, 5])
    assert page("lit") is None
    point(7, 8, "down")
    # two chunks with 8 tokens in all, after a pause, and three steps of four decodes
    assert point(4, 8) == "steps 3 to 6: 20 tokens, 30 ms"
    assert point(6, 8, "up") == point(1, 8) == "steps 5 to 6: 8 tokens, 20 ms"
    assert page(is_marked, [6, 7])
    assert point(0, 60) == "step 0: 0 decodes, 1 chunk with 18 tokens"


def test_two_fingers_zoom(open_record):
    """What was under each finger stays under it. A single finger pans."""
    page = open_record(random_record(1))
    show(page, 5)
    box = page.locator("#timeline").bounding_box()
    devtools = page.context.new_cdp_session(page.page)

    def touch(kind: str, *at: int) -> list[float]:
        points = [{"x": box["x"] + x, "y": box["y"] + 60, "id": i} for i, x in enumerate(at)]
        devtools.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
        return [page(f"unitAt({x})") for x in at]

    touch("touchStart", 300)
    before = touch("touchStart", 300, 400)
    assert touch("touchMove", 200, 500) == pytest.approx(before, abs=0.1)
    assert page("chart.scale") == pytest.approx(3)
    touch("touchEnd")
    touch("touchStart", 300)
    left = page("chart.left")
    touch("touchMove", 270)
    assert page("chart.left") == pytest.approx(left + 10, abs=0.1)
    assert page("tape.at") == 5


def test_after_a_pause_nobody_knows_how_long_a_step_took(open_page):
    """It is as wide as the previous step, because the pause would be an empty minute."""
    lines = [LINES[0] | {"time": 0}]
    for event, time in ("step", 1), ("step", 1.002), ("idle", 1.1), ("step", 61), ("step", 61.003):
        lines.append({"event": event, "time": time, "step": len(lines), "decodes": []})
    del lines[3]["step"]  # "idle" lines have no step
    page = live_page(open_page)
    say(page, lines)
    page("goLive()")
    took = page("chart.columns.map(({ ms, w }) => [Math.round(ms) || null, Math.round(w.time)])")
    assert took == [[None, 1], [2, 2], [None, 2], [None, 2], [3, 3]]


def test_the_timeline_by_keyboard(open_record):
    page = open_record()
    show(page, 13)
    wait_for(page, "chart.shown.length > 2")
    page.focus("#timeline")
    press(page, "tape.at", ("ArrowRight", 14))
    first, second, *_ = page("chart.shown.map(({ r }) => r)")
    press(page, "lit", ("ArrowDown", first), ("ArrowDown", second), ("ArrowUp", first))
    press(page, "chosen", ("Enter", first))
    page("seek(chart.columns[7].place)")
    press(page, "chart.range", *[("Shift+ArrowLeft", [i, 7]) for i in (6, 5, 4)])
    assert page.inner_text("#tip") == "steps 3 to 6: 20 tokens, 30 ms"
    press(page, "chart.range", ("Shift+ArrowRight", [5, 7]), ("ArrowRight", []))
    assert not page.is_visible("#tip")
    page("seek(1)")
    press(page, "tape.at", ("Shift+ArrowLeft", 1))  # there is no earlier step


def test_a_step_is_as_wide_as_its_tokens_or_its_time(open_record):
    page = open_record()
    show(page, len(SMALL) - 1)
    assert page("chart.columns[4].w.tokens") == 35  # a chunk of 2 tokens and one of 6
    assert page("chart.columns[4].chunks.map(({ w }) => w)") == [6, 18]
    page.select_option("#widths", "time")
    wait_for(page, "xOf(chart.columns.at(-1)) < paper.width")  # the current place is in view
    assert page("chart.columns[0].start") == 0  # laid out again, not after the old ones
    assert page("widthOf(chart.columns[1]) / chart.scale") == pytest.approx(10)  # ms


def test_the_words_of_the_ruler_have_room(open_record):
    """After an hour the labels overlapped. In the pool, each cell has its request's number."""
    page = open_record()
    show(page, 5)
    ruler, pool = page(
        """() => {
            const written = [];
            const { fillText } = CanvasRenderingContext2D.prototype;
            CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
                written.push([`${text}`, x, x + this.measureText(text).width]);
                fillText.call(this, text, x, y);
            };
            chart.left = 0;
            for (const [i, one] of chart.columns.entries())
                Object.assign(one, { step: 1e12 + i, time: 36_000 * (i > 0) });
            paper.width = 600;
            drawRuler(chart.columns);
            const ruler = written.splice(0);
            layOut();
            drawPool();
            return [ruler, written.map(([text]) => text).join(" ")];
        }"""
    )
    assert ruler[0][0] == "1000000000000 · 0 ms"
    assert all(end < start for (*_, end), (_, start, _) in pairwise(ruler))
    assert len(ruler) > 1 and ruler[-1][-1] <= 600
    assert pool == "0 4 8 2 2 2 2 2 ×3 ×3"


def test_a_demo_plays_at_ten_steps_a_second(open_record):
    page = open_record()
    played = page("""(() => {
        requestAnimationFrame = () => 0
        Object.assign(player, { until: () => false, isPaused: false, before: 1e6, owed: 0 })
        for (let i = 1; i <= 61; i++) frame(1e6 + (i * 1000) / 60)
        return tape.at
    })()""")
    assert played == 10


def test_beyond_sixty_rows_is_density(open_record):
    told = random_record(1, 90)
    page = open_record(told)
    show(page, len(told) - 1)
    page.keyboard.press("f")
    wait_for(page, "chart.rows.size > 60 && !view.isNews")
    assert page("chart.shown.length") == 0
    page("light(5)")
    wait_for(page, "chart.shown.length === 1")
    assert page("chart.shown[0].r === lit && chart.rowHeight === 20")
    axis, legend, drawn = page(
        """() => {
            const written = [];
            const painted = new Set();
            paper.ctx.fillText = (text, ...at) => written.push([text, ...at]);
            paper.ctx.fillRect = function (...box) { painted.add(this.fillStyle); };
            light(); drawTimeline();
            const colour = (kind) => getComputedStyle(
                document.querySelector(`#steps .swatch.${kind}`)).backgroundColor;
            paper.ctx.fillStyle = "red";
            const hex = (text) => (paper.ctx.fillStyle = text, paper.ctx.fillStyle);
            return [written.filter(([, x]) => x === 30).map(([n]) => n),
                ["decode", "chunk", "waits"].map(colour).map(hex), [...painted]];
        }"""
    )
    assert axis == [0, page("chart.rows.size")]
    assert len({*legend}) == len({*legend} & {*drawn}) == 3


def test_the_map_has_all_steps_and_leads_to_each(open_record):
    """The map shows how many requests ran at each place, and which places the timeline shows."""
    told = random_record(1)
    page = open_record(told)
    show(page, len(told) - 1)
    page.keyboard.press("f")
    wrong = page(
        """(() => chart.columns.filter(({ place, decodes, chunks }) => {
            const n = decodes.length + chunks.length;
            const has = (y) => $("loads").isPointInFill(new DOMPoint(place - 0.5, -y));
            return has(n + 0.5) || n && !has(n - 0.5);
        }).length)()"""
    )
    assert wrong == 0
    wait_for(page, f"$('sight').getBBox().width > {len(told)} - 4")
    page.hover("#timeline", position={"x": 400, "y": 100})
    page.mouse.wheel(0, -700)
    wait_for(page, "$('sight').getBBox().width < 200")
    page.click("#place")
    assert page("tape.at") == pytest.approx(len(told) / 2, abs=3)


# --------------------------------------------------------------------------------------------------
# Figures, texts and layout


def test_tokens_a_second_are_by_the_clock(open_page):
    """The rate is 0 if nothing ran in the last second, and a dash without a stream."""
    page = live_page(open_page)
    say(page, [*LINES[:35], {"event": "idle", "time": 0.35}])
    wait_for(page, "tape.at === 35")
    now = page("performance.now()")
    assert page(f"view.since = {now}, [rate({now}) > 0, rate({now} + 1100)]") == [True, 0]
    page("view.since -= 1100")
    wait_for(page, "$('rate').textContent === '0'")
    page("server.is = 'Offline'")
    wait_for(page, "$('rate').textContent === '–'")
    page = live_page(open_page)  # for steps of four seconds, it once said 0 for three
    lines = [line | {"time": 4.0 * i, "sampled": 20 * (i > 1)} for i, line in enumerate(LINES[:9])]
    for count, shown in (2, "–"), (7, "5"):
        say(page, lines[:count])
        wait_for(page, f"tape.at === {count - 1} && $('rate').textContent === '{shown}'")
    assert page("rate(view.since + 4000)") == 3


# Visible controls that are cut off by the window, or not high enough for a finger or pointer.
# Controls in the transcript do not count, because it scrolls.
BAD_CONTROLS = """(low) => [...document.querySelectorAll("button, select, textarea, label")]
    .filter(one => one.checkVisibility() && !one.closest("#answers, .knobs")
        && one.matches("button, .kinds label, label:has(#probabilities), .button, #tabs label"
            + (low > 24 ? ", select" : ", textarea")))
    .map(one => [one.id || one.textContent, one.getBoundingClientRect()])
    .filter(([, { left, top, right, bottom, height }]) =>
        left < 0 || top < 0 || right > innerWidth || bottom > innerHeight || height < low)
    .map(([name, box]) => [name, JSON.stringify(box)])"""


# Tiles and parts of the drawer whose content is wider than they are.
CUT = """[...document.querySelectorAll(".tile, .tile p, #about, #entries li, #drawer")]
    .filter(one => one.checkVisibility() && one.scrollWidth > one.clientWidth)
    .map(one => one.outerHTML)"""


IS_ONE_SCREEN = """[...document.querySelectorAll(":root, #pool, #timeline, #pill")].every((one) =>
    one.scrollWidth <= innerWidth && one.scrollHeight <= innerHeight
        && one.getBoundingClientRect().right <= innerWidth)"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [(1440, 900), (1024, 768), (390, 844)], ids=str)
@pytest.mark.quick("(1440, 900)-light")
def test_one_screen_whatever_happens(open_page, scheme, size):
    """
    Nothing scrolls or is cut off, and each control has a name and is large enough to hit; on a
    phone, in each of three tabs. Axe finds no violations, even with probabilities or on the tour.
    """
    is_phone = size[0] < 700
    page = live_page(lambda **more: open_page(color_scheme=scheme, size=size, **more))
    name = "a model of a long name " * 4
    moments = {
        "locked": f"server.model = '{name}'; askForKey()",
        "idle": "$('key').hidden = true; Object.assign(server, { model: 'tiny', is: 'Live' })",
        "inspected": "seek(9); choose([...state.requests.keys()][0])",
        "likely": "choose(), $('probabilities').click()",
        "tour": "startTour()",
    }
    for moment, change in moments.items():
        if moment == "idle":
            say(page, LINES)
        if moment == "likely":
            add_tokens(page, "f", "(", "\n    ", " ", "<|im_end|>", tab=-9)
        page(change)
        for tab in ["pool"] if moment == "tour" or not is_phone else ["talk", "pool", "steps"]:
            if is_phone:
                page.click(f"label:has(#tab-{tab})", force=moment == "inspected")
            page("view.told = 0")
            wait_for(page, "view.told")
            assert page(IS_ONE_SCREEN), (moment, tab)
            assert page(BAD_CONTROLS, 44 if is_phone else 24) == [], (moment, tab)
            assert violations(page) == [], (moment, tab)


SIZES = [(1280, 720), (1024, 768), (720, 450), (844, 390), (390, 844)]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_all_is_in_sight_and_the_drawer_covers_nothing(open_page, size):
    """
    At a zoom of 200%, the timeline was once 0 pixels high, and Send was out of view. With long
    texts, the drawer was 613 pixels wide in a space of 378, and covered the playhead.
    """
    page = live_page(lambda **more: open_page(size=size, **more))
    say(page, LINES)
    page("seek(9)")
    wait_for(page, "view.at === 9 && view.told")
    assert page(BAD_CONTROLS, 24) == page(CUT) == []
    assert page("paper.height > 70 || innerWidth < 700")
    page("$('settings').open = true")  # at 1280x720 most settings were below the edge
    assert page("innerWidth < 1280 || talk.scrollHeight <= talk.clientHeight")
    page("$('settings').open = false")
    page(
        """() => {
            const [q] = state.requests.values();
            const prompt = { names: Array(99).fill("a long text") };
            const answer = { r: q.r, prompt, names: [], element: make("p"), number: make("b") };
            calls.set(q.name, [answer]);
            void choose(q.r);
        }"""
    )
    wait_for(page, "document.querySelector('#entries li')?.textContent.includes('long')")
    assert page(IS_ONE_SCREEN) and page(CUT) == []
    covered = page(
        """() => [...document.querySelectorAll("#pool, #timeline, #transport")].filter((one) => {
            const { left, right, top, bottom } = one.getBoundingClientRect();
            const drawer = $("drawer").getBoundingClientRect();
            return left < drawer.right && right > drawer.left && top < drawer.bottom
                && bottom > drawer.top; }).map(({ id }) => id)"""
    )
    assert covered == []


def test_tab_goes_through_all_and_out(open_page):
    """Tab also goes backwards; no control traps it."""
    page = live_page(open_page)
    say(page, LINES[:20])
    wait_for(page, "$('live').checkVisibility()")
    controls = "take-tour file alike fork flood probabilities answers kind prompt send pool widths"
    controls += " fit timeline back pause forth speed place live"
    for key in "Tab", "Shift+Tab":
        visited = set()
        for _ in range(30):
            page.keyboard.press(key)
            visited.add(page("document.activeElement.id || document.activeElement.name"))
        assert visited >= {*controls.split()}, key


# --------------------------------------------------------------------------------------------------
# The server starts, ends and starts again


CALLS = re.compile("/(v1/models|events)$")
MODELS = 200, '{"data": [{"id": "out/stdlib"}]}'


def events(count: int) -> tuple:
    return 200, f"data: {json.dumps(LINES[:count])}\n\n"


@pytest.mark.slow
def test_a_normal_start_has_no_red_line(open_page):
    """The page loads, then is live. When the server is gone, it says so in plain words."""
    loading = 503, '{"error": {"code": "loading", "message": "the server is loading"}}'
    answers = {"v1/models": loading, "events": loading}

    def answer(route):
        status, body = answers[route.request.url.removeprefix(f"{ORIGIN}/")]
        if status:
            route.fulfill(status=status, body=body)
        else:
            route.abort()

    page = open_page(wait="document.title")
    page.expected = "404|429|503|ERR_FAILED"
    page.route(CALLS, answer)
    page("listening.abort(); void listen()")
    wait_for(page, "$('notice').textContent === 'the server is loading'")
    wait_for(page, "$('pill').textContent === 'Loading'")
    colour = "getComputedStyle($('notice')).color"
    quiet = page(colour)
    answers |= {"v1/models": MODELS, "events": events(20)}
    wait_for(page, "tape.lines.length === 20")
    assert page("server.model") == "out/stdlib"
    # the 17th listener once read "Offline", although Send worked
    answers["events"] = 429, '{"error": {"code": "x", "message": "16 clients listen"}}'
    wait_for(page, "$('notice').textContent === '16 clients listen'")
    wait_for(page, "$('pill').textContent === 'Refused'")
    assert page(colour) != quiet
    answers["v1/models"] = 0, ""
    wait_for(page, "$('notice').textContent === 'The server is not responding.'")
    wait_for(page, "$('pill').textContent === 'Offline' && $('rate').textContent === '–'")
    assert page("getComputedStyle($('pool-panel')).filter") == "grayscale(1)"
    answers |= {"v1/models": MODELS, "events": events(35)}  # the tape is kept and continued
    wait_for(page, "tape.lines.length === 35")
    assert page("tape.lines.map((line) => line.time)") == [line["time"] for line in LINES[:35]]


def engines(*numbers: int) -> list[dict]:
    """Return a server's lines for engines: each runs the small record, and dies before the next."""
    lines = []
    for number in numbers:
        ended = {"event": "engine", "state": "ended"}
        lines += [LINES[0] | {"engine": number}, *LINES[1:25], ended]
    return lines[:-1]


def test_a_restarted_engine_has_rows_of_its_own(open_page):
    page = live_page(open_page)
    lines = engines(1, 2)
    say(page, [line | {"time": 1 + line["time"]} for line in lines[:25]])
    wait_for(page, "tape.at === 24")
    rows = page("chart.rows.size")
    say(page, [lines[25]])
    wait_for(page, "$('pill').textContent === 'Restarting' && $('rate').textContent === '–'")
    assert page("getComputedStyle($('pool-panel')).filter") == "grayscale(1)"
    say(page, lines[26:])
    wait_for(page, "tape.at === 50 && $('pill').textContent === 'Live'")
    split = page("chart.columns.findIndex(({ isRestart }) => isRestart)")
    assert split > 0
    # a pool that the previous engine had filled is shown with large cells again
    assert page("tape.shown = 1024, load({ ...state, engine: 3, requests: [] }), tape.shown") == 32
    page("seek(1e9)")
    # the engine's clock has restarted, so the duration of its first step is unknown
    assert page(f"chart.columns[{split}].ms === 0")
    spans = page("[...chart.rows.values()].map(({ first, last }) => [first, last])")
    assert len(spans) == 2 * rows
    assert all(last <= split for _, last in spans[:rows])
    assert all(first >= split for first, _ in spans[rows:])
    read = f"[{STATE}.holders, state.step, rate()]"
    one, other = (page(f"seek({place}), {read}") for place in (20, 46))
    assert one == other
    assert one[-1] > 0
    # the ruler once showed the new engine's times minus the old engine's start
    texts = page(
        """(() => { const texts = []; write = (colour, text) => texts.push(`${text}`);
            clicks.fit(); drawRuler(chart.columns); return texts; })()"""
    )
    assert texts and not [text for text in texts if "· -" in text]


def test_what_the_tape_has_is_not_taken_again(open_page):
    """A reconnect sends a history again: of the same engine, of two engines, and after a gap."""
    lines = engines(1, 2)
    page = live_page(open_page)

    def take(lines):
        for part in (lines[:10], lines[10:]):  # a long history comes in parts
            say(page, part)
        return page("tape.lines.map((line) => [line.event, line.time ?? null])")

    marks = [[line["event"], line.get("time")] for line in lines]
    for count in 20, 30, 51, 51:
        assert take(lines[:count]) == marks[:count]
    assert take(lines[26:]) == marks
    later = [{**lines[26], "time": 1e4}, {"event": "idle", "time": 1e4 + 1}]
    assert take(later) == [*marks, ["snapshot", 1e4], ["idle", 1e4 + 1]]


def test_what_was_dropped_is_not_taken_again(open_page):
    """
    A page that has dropped its oldest lines reconnects. A paused page does not drop any lines:
    instead it stops listening until it is played again.
    """
    page = live_page(open_page)
    page(
        """(lines) => {
            const idle = Array(50_000).fill().map((_, i) => ({ event: "idle", time: 100 + i }))
            const last = [{ ...lines[0], time: 1e6 }, { event: "idle", time: 1e6 + 1 }]
            window.told = [...lines, ...idle, ...last]
        }""",
        LINES[:25],
    )
    page("listening = new AbortController(); player.isPaused = true; takeIn(told.slice(0, 50_010))")
    read = "[tape.lines.length, listening.signal.aborted]"
    assert page(read) == [50_010, True]
    page("void goLive()")
    assert page(read) == [50_010, False]
    page("listening.abort(), begin([], true)")
    for part in ("told", "told.slice(0, 30)"):
        page(f"takeIn({part})")
        assert page("tape.lines.map(({ event }) => event)") == ["snapshot", "idle"]


def set_length(page, max_tokens: int):
    page(f"document.querySelector('[name=max_tokens]').value = {max_tokens}")


@pytest.mark.slow
def test_a_reload_and_a_second_tab_have_the_history(live, open_page, server):
    set_length(live, 5)
    send(live, "something to remember")
    wait_for(live, f"{IS_PLAYED} && chart.columns.length > 5")
    steps = "tape.lines.filter(({ event }) => event === 'step').map(({ time }) => time)"
    before = live(steps)
    live.reload()
    other = open_page(f"{server.url}/#step=3")
    for page in live, other:
        wait_for(page, f"({steps}).length >= {len(before)}")
        assert page(steps) == before
    wait_for(other, "state.step === 3 && player.isPaused")


@pytest.mark.slow
def test_six_hidden_tabs(open_page, server):
    """A browser has six connections to a host, so Send once hung. A tab shown again continues."""
    hide = """(isHidden) => {
        Object.defineProperty(document, "hidden", { value: isHidden, configurable: true });
        document.dispatchEvent(new Event("visibilitychange")); }"""
    for _ in range(6):
        hidden = open_page(server.url)
        hidden(hide, True)
    page = open_page(server.url)
    send(page, "x")
    wait_for(page, IS_PLAYED)
    hidden(hide, False)
    wait_for(hidden, f"tape.lines.length === {page('tape.lines.length')}")


@pytest.mark.slow
def test_the_engine_is_killed_and_the_page_says_so(open_page, checkpoint):
    """The page says so immediately, above the frozen pool. The next engine gets its own rows."""
    with Process(checkpoint, "--kv-blocks", "24") as server:
        page = open_page(server.url)
        page.expected = "ERR_INCOMPLETE_CHUNKED|ERR_CONNECTION_REFUSED|500|503"
        set_length(page, 200)
        send(page, "a text that goes on for long")
        wait_for(page, "state.decodes?.length")
        page(
            """() => { window.pills = [];
                new MutationObserver(() => pills.push($("state").textContent))
                    .observe($("state"), { childList: true }); }"""
        )
        os.kill(server.engine_pid, signal.SIGKILL)
        wait_for(page, "pills.includes('Restarting') && pills.at(-1) === 'Live'")
        # the killed engine's steps may still be playing when the next one is ready
        after = set(page("pills.slice(pills.indexOf('Restarting'))"))
        assert after - {"Playing"} == {"Restarting", "Live"}
        set_length(page, 5)
        send(page, "and again")
        wait_for(page, "chart.rows.size === 2 && state.requests.size === 0")
        assert page("[...chart.rows.values()].map(({ r }) => r)") == [1, 1]


def test_a_key_is_asked_for_and_kept_nowhere(open_page):
    """The test acts as the server, which refuses calls without the key (see test_gate.py)."""

    def answer(route):
        is_known = route.request.headers.get("authorization") == f"Bearer {KEY}"
        status, body = events(20) if route.request.url.endswith("events") else MODELS
        if not is_known:
            status, body = 401, '{"error": {"code": "invalid_api_key"}}'
        route.fulfill(status=status, body=body)

    page = live_page(open_page)
    page.expected = "401|404"
    page.route(CALLS, answer)
    page("void listen()")
    for key in ("ключ", "wrong", KEY):  # the first is invalid in a header, so it is not sent
        wait_for(page, "!$('key').hidden")
        assert ("not accepted" in page.inner_text("#notice")) == (key == KEY)
        page.click("#text")
        page.fill("#text", key)
        page.keyboard.press("Enter")
    wait_for(page, "state.num_blocks === 12")
    assert KEY not in page.content()
    assert page.input_value("#text") == ""


# --------------------------------------------------------------------------------------------------
# Large pools, and pictures


def large_record():
    """Yield a record of 256 requests that hold most of 32,768 blocks; more blocks are cached."""
    requests = [
        {"r": r, "filled": 1600, "table": [*range(100 * r, 100 * r + 100)]} for r in range(256)
    ]
    pool = {"num_blocks": 32768, "block_size": 16, "idle": [*range(25600, 32000)]}
    yield LINES[0] | pool | {"requests": requests, "decodes": [*range(256)]}, None
    for i in range(1200):
        tables = [[i % 256, 100 + i // 256, [32000 + i % 700]]]
        step = {"event": "step", "step": i, "time": i / 50, "tables": tables}
        yield step | {"idle": [25600 + i]}, None


# Makes `count` frames, 60 a second, and returns the number of shapes drawn in each.
FRAMES = """(count) => {
    let shapes = 0;
    const painter = CanvasRenderingContext2D.prototype;
    for (const name of ["fillRect", "clearRect", "strokeRect", "fillText"]) {
        const draw = painter[name];
        painter[name] = function (...box) { shapes += 1; draw.apply(this, box); };
    }
    window.requestAnimationFrame = () => 0;
    state.touched = null; // draw everything
    const start = performance.now();
    return Array.from({ length: count }, (_, i) => {
        shapes = 0;
        frame(start + i * 1000 / 60);
        return shapes;
    });
}"""


@pytest.mark.slow
def test_a_large_pool_does_not_stutter(open_page):
    """
    While a record of 32,768 blocks is replayed at 120 lines a second, each frame draws only what
    has changed, not the whole pool.
    """
    page = open_page(told=large_record())
    page("seek(300); (player.speed = 120, player.isPaused = false)")
    whole, *frames = page(FRAMES, 300)  # after a seek, everything is drawn
    assert page("tape.at") > 800
    assert whole > 32768
    assert max(frames) < whole / 2
    assert 0 < statistics.median(frames) < whole / 10
