"""
Test the talking half of the live page, in a real browser (browser.py) with a real server. These
tests use the form by keyboard and mouse as people do, the transcript, probabilities, the chat, the
demos and the tour. Text is typed key by key: once, every key was dead in the form, and all tests
passed because they filled the form by a script.
"""

# ruff: noqa: F811  fixtures of browser.py

import json
import shlex

import pytest
from browser import (  # noqa: F401
    CONTEXT,
    IS_IDLE,
    IS_OVER,
    IS_PLAYED,
    ORIGIN,
    add_tokens,
    checkpoint,
    chromium,
    live,
    live_page,
    open_page,
    save_random_model,
    send,
    server,
    wait_for,
    write,
)
from processes import Process, wait_until


@pytest.fixture(scope="module")
def small_server(tmp_path_factory):
    """Serve a model without a chat template, whose context takes up most of the pool."""
    model = save_random_model(tmp_path_factory.mktemp("small"))
    with Process(model, "--kv-blocks", "24") as server:
        yield server


# Lets the test act as the server. `step(choice, ..)` sends the next event of the newest answer.
# `named` is the last call to tokenize.
STEPPED = """() => {
    const none = { count: 0, max_model_len: 4096, tokens: [], token_strs: [] };
    window.fetch = async (path, { signal, body: sent }) => {
        if (!signal) {
            window.named = JSON.parse(sent);
            return new Response(JSON.stringify(none));
        }
        window.sent = JSON.parse(sent);
        const body = new ReadableStream({
            start(stream) {
                const send = (text) => stream.enqueue(new TextEncoder().encode(text));
                window.step = (choice) =>
                    send(`data: ${JSON.stringify({ choices: [{ index: 0, ...choice }] })}\n\n`);
                window.end = () => stream.close();
                signal.onabort = () => stream.error(signal.reason);
            },
        });
        return new Response(body);
    };
}"""


@pytest.fixture
def stepped(open_page):
    """Open a page whose answers arrive when the test sends them."""
    page = live_page(open_page)
    page(STEPPED)
    return page


def step(page, *names: str, **fields):
    """Send new tokens with these names, as part of a completion."""
    scores = {"tokens": names, "token_logprobs": [-1] * len(names)}
    scores |= {"top_logprobs": [{name: -1, "other": -2} for name in names]}
    page("(choice) => step(choice)", {"logprobs": scores} | fields)


def prompt(page) -> str:
    return page.input_value("[name=prompt]")


def set_knob(page, name: str, value: str):
    """Change a setting by mouse and keyboard."""
    if not page.is_visible(f"[name={name}]"):
        page.click("#settings summary")
    page.click(f"[name={name}]", click_count=3)
    page.keyboard.type(value)


def focused(page) -> str:
    return page("document.activeElement.id || document.activeElement.name")


# --------------------------------------------------------------------------------------------------
# Keys


def test_keys_work_in_the_form(live):
    """Letters, spaces, Backspace and arrows work in the form; the player does not react to them."""
    write(live, "hello  world")
    for key in ("Backspace", "ArrowLeft", "ArrowLeft", "X", "Y", "Home", ">", "Enter", "End"):
        live.keyboard.press(key)
    live.keyboard.press("Delete")
    assert prompt(live) == ">\nhello  woXYrl"
    assert live("[player.isPaused, calls.size]") == [False, 0]
    set_knob(live, "max_tokens", "17")
    live.keyboard.press("ArrowUp")
    assert live.input_value("[name=max_tokens]") == "18"


def test_sending(live):
    """After sending, the box is empty. The settings are folded, and the chosen ones are used."""
    assert not live.is_visible("[name=max_tokens]")
    live.focus("#settings summary")
    live.keyboard.press("Enter")
    set_knob(live, "max_tokens", "5")
    write(live, "text")
    live.keyboard.press("Tab")
    live.keyboard.press("Space")
    wait_for(live, IS_OVER)
    assert prompt(live) == ""
    told = live.locator(".asked, .progress span").all_inner_texts()
    assert told == ["text", "stopped at 5 tokens"]
    assert live.locator(".token").count() == 5


def test_settings_are_sent_and_copied_as_curl(stepped):
    """Settings are numbers, stop sequences, a schema and tools. The server checks the schema."""
    stepped(
        "Object.defineProperty(navigator, 'clipboard', {value: {writeText: (text) => "
        "{ window.copied = text; }}})"
    )
    fields = {"temperature": "0", "stop": '["\\n", "it\'s"]', "json": "{", "tools": "[{}]"}
    for name, value in fields.items():
        set_knob(stepped, name, value)
    stepped.click(".kinds >> text=Chat")
    send(stepped, "it's")
    wait_for(stepped, "window.sent")
    sent = stepped("sent")
    assert [sent[name] for name in ("temperature", "stop", "tools")] == [0, ["\n", "it's"], [{}]]
    assert sent["structured_outputs"] == {"json": "{"}
    assert stepped("named.tools") == [{}]  # tools are part of the prompt's blocks
    assert "seed" not in sent
    stepped.click("text=copy as curl")
    curl, url, kind, body = shlex.split(stepped("copied"))
    assert [curl, url, kind] == ["curl", f"{ORIGIN}/v1/chat/completions", "--json"]
    assert json.loads(body) == sent


# --------------------------------------------------------------------------------------------------
# The transcript


def test_how_far_an_answer_is_and_stop(stepped):
    set_knob(stepped, "max_tokens", "60")

    def is_told(*texts: str):
        told = stepped.locator(".progress span")
        wait_until(lambda: told.all_text_contents() == [*texts])

    send(stepped, "far")
    wait_for(stepped, "window.step")
    is_told("waiting for the first token")
    for names, text in (("a", "1 of 60 tokens"), ("bc", "3 of 60 tokens")):
        step(stepped, *names)
        is_told(text)
    step(stepped, "d", finish_reason="length")
    stepped("(end(), window.step = null)")
    set_knob(stepped, "n", "5")
    send(stepped, "one")
    wait_for(stepped, "window.step")
    stepped.click("#stop")
    is_told("stopped at 4 tokens", *["stopped"] * 5)
    assert stepped.inner_text("summary:visible >> nth=0") == "5 answers, stopped"
    assert stepped.is_disabled("#stop")
    assert stepped.locator("#answers .error").count() == 0


def test_the_oldest_is_first_and_the_newest_in_view(open_page):
    """The newest answer is last. Many answers to one prompt are folded."""
    page = live_page(open_page)
    page("[...Array(40).keys()].forEach((i) => addArticle([{ text: `<b>${i}</b>` }], 1))")
    page("void addArticle([{ text: 'five' }], 5)")
    asked = page.locator(".asked:visible")
    assert asked.all_inner_texts() == [f"<b>{i}</b>" for i in range(40)]
    folded = page.locator("#articles summary:visible")
    assert folded.all_inner_texts() == ["5 answers"]
    answers, last = (one.bounding_box() for one in (page.locator("#answers"), folded))
    assert answers["y"] < last["y"] < answers["y"] + answers["height"]


def test_answers_of_a_call_have_their_requests_in_order(open_page):
    """A later snapshot may contain only the second request, and a line may list it first."""
    place = live_page(open_page)(
        """() => { calls.set("a call", addArticle([{ text: "one" }, { text: "two" }], 1));
            takeIn([{ time: 1e9, new: [8, 7].map((r) => ({ name: "a call", r })) }]);
            return calls.get("a call").indexOf(ownOf({ name: "a call", r: 8 })); }"""
    )
    assert place == 1


def test_an_answer_and_its_blocks_are_lit_together(live):
    set_knob(live, "n", "2")
    send(live, "one")
    wait_for(live, IS_PLAYED)
    live("seek(tape.lines.findLastIndex((line) => line.new))")
    wait_for(live, "document.querySelectorAll('.answer.runs').length === 2")
    number = live.locator(".progress b >> nth=1").inner_text()
    live.hover(".answer >> nth=1")
    assert f"request {live('lit')}" == number == live.inner_text(".answer.lit .progress b")
    live.hover("#send")
    assert live("lit") is None
    assert live.locator(".answer.lit").count() == 0
    live.click("#live")
    wait_for(live, "!document.querySelector('.answer.runs')")


def test_a_block_has_its_text(live, open_page, server):
    """
    The drawer, the tip and the cell show a block's text, as far as its slots are filled. A cached
    block keeps its text, and other users' pages do not show it. Pointing at a token marks its
    block, and pointing at a block marks its tokens.
    """
    set_knob(live, "max_tokens", "40")
    send(live, "a prompt of 22 letters")
    wait_for(live, f"{IS_PLAYED} && [...calls.values()].flat()[0].prompt.names")
    live("seek(tape.lines.findLastIndex((line) => line.ended) - 1)")
    q = "[...state.requests.values()][0]"
    filled, table, answer = live(f"[{q}.filled, {q}.table, ownOf({q}).names]")
    tokens = [*"a prompt of 22 letters", *answer][:filled]
    texts = ["".join(tokens[i : i + 16]) for i in range(0, filled, 16)]
    live(f"void choose({q}.r)")
    wanted = [f"{i} → {table[i]} {live('visible', text)}" for i, text in enumerate(texts)]
    assert live.locator("#entries li").all_text_contents() == wanted
    live.click("#close")
    live.dispatch_event(".token >> nth=3", "pointerenter")  # a byte may have no width
    assert live("pointed") == table[1]
    wait_for(live, "grid")  # laid out by the next frame
    x, y, *_ = live(f"cellOf({table[1]})")
    live.hover("#pool", position={"x": x + 9, "y": y + 9})
    assert live("[...document.querySelectorAll('.here')].map(({ i }) => i)") == [*range(10)]
    assert live("$('tip').textContent").endswith(live("visible", texts[1]))
    written = live(
        """block => { const all = [];
            ctx = grid.ctx;
            ctx.fillText = (text) => all.push(text);
            drawCell(block); delete ctx.fillText; return all.join(" "); }""",
        table[0],
    )
    assert written.endswith(" a prompt of 22 l")
    live.click("#live")
    wait_for(live, IS_IDLE)
    pages = live, open_page(server.url, wait="state.idle.size")
    shown = [page("blocks => blocks.map(textOfBlock)", table) for page in pages]
    assert shown == [[*texts[:3], ""], [""] * 4]


# --------------------------------------------------------------------------------------------------
# Probabilities


def test_probabilities_are_shown_when_they_are_wanted(live):
    add_tokens(live, "likely", "rare", x=-0.5)
    token = live.locator(".token >> nth=1")
    tip = live.locator("#tip")
    for wanted in False, True, False:
        token.hover()
        colour = token.evaluate("(token) => getComputedStyle(token).backgroundColor")
        shown = [tip.is_visible(), live.is_visible("#scale"), colour != "rgba(0, 0, 0, 0)"]
        assert shown == [wanted] * 3
        if wanted:
            assert tip.inner_text().split() == ["60.7%", "x", "▸", "36.8%", "rare"]
            live.focus(".token >> nth=0")
            live.keyboard.press("Tab")
            assert "rare" in tip.inner_text()
        live.hover("#send")
        assert not tip.is_visible()
        live.focus("#probabilities")
        live.keyboard.press("Space")
        live.keyboard.press("f")  # after a box was ticked, the player's keys were once dead
        assert not live("chart.follows")


@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_what_a_schema_refuses_is_marked(stepped, temperature):
    """At temperature 0, tokens likelier than the chosen one were refused. Otherwise, any may be."""
    set_knob(stepped, "temperature", temperature)
    set_knob(stepped, "json", "{}")
    send(stepped, "text")
    wait_for(stepped, "window.step")
    likely = {"{": -1, "Sure": -0.5, "[": -2}
    step(stepped, "{", logprobs={"tokens": ["{"], "token_logprobs": [-1], "top_logprobs": [likely]})
    stepped.check("#probabilities")
    stepped.hover(".token")
    marks = [line.split()[0] for line in stepped.inner_text("#tip").splitlines()]
    assert marks == ["✕" if temperature == "0" else "60.7%", "▸", "13.5%"]


def test_blanks_can_be_told_apart(live):
    """Four alternatives once all looked like a newline and a space."""
    shown = {"\n ": "↵␣", "\n        ": "↵␣×8", "\t if": "⇥␣if", " a  b": "␣a␣×2b", "x": "x"}
    assert {text: live("visible", text) for text in shown} == shown


def test_end_tokens_are_marked_and_parts_of_a_character_wait_for_the_last(live):
    ends = ["<|im_end|>", "</s>", "<end_of_turn>"]
    add_tokens(live, *ends, "<b>", "<", "|>", "bytes:\\xe2\\x98", "bytes:\\x83")
    assert live.locator(".token.end").all_inner_texts() == ends
    assert live.inner_text(".text").endswith("<b><|>☃")


# --------------------------------------------------------------------------------------------------
# Chat


def say(page, text: str):
    """Send this text, and wait for the whole answer."""
    calls = page("calls.size")
    send(page, text)
    wait_for(page, f"calls.size > {calls} && stops.size === 0")


def test_a_chat_goes_on_until_a_new_one_begins(live):
    live.focus("[value=text]")
    live.keyboard.press("ArrowRight")
    assert live.is_checked("[value=chat]")
    set_knob(live, "max_tokens", "6")
    for text in ("hello", "again"):
        say(live, text)
    roles = "conversation.map((message) => message.role)"
    assert live(roles) == ["user", "assistant"] * 2
    assert live.locator(".asked").all_inner_texts() == ["hello", "again"]
    assert live("conversation[1].content") == live("[...calls.values()].flat()[0].said") != ""
    live.click("text=Continue a text")  # switching away does not end the chat
    assert not live.is_visible("#new-chat")
    live.click(".kinds >> text=Chat")
    assert live("conversation.length") == 4
    live.click("#new-chat")
    assert live("[conversation.length, calls.size]") == [0, 2]
    assert focused(live) == "prompt"


def test_an_answer_fits_into_the_context(live):
    """The default model's context has 512 tokens, and every chat was once refused."""
    live.expected = "400"
    live.click(".kinds >> text=Chat")
    say(live, "hello")
    (text,) = live("[...calls.values()].flat().map((one) => [one.prompt.names, one.names].flat())")
    assert len(text) == CONTEXT
    assert live.locator("#answers .error").count() == 0
    say(live, "and no room is left")
    assert "maximum context length" in live.inner_text("#answers .error")


def test_enter_sends_in_a_chat(stepped):
    """A chat starts with an empty box and at most 512 tokens. Switching keeps the user's text."""
    boxes = "['prompt', 'max_tokens'].map((name) => $('ask').elements[name].value)"
    assert stepped(boxes) == ["def", "64"]
    stepped.click(".kinds >> text=Chat")
    assert stepped(boxes) == ["", "512"]
    write(stepped, "one")
    for key in "Shift+Enter", "2":
        stepped.keyboard.press(key)
    assert prompt(stepped) == "one\n2"
    stepped.click(".kinds >> text=Continue a text")
    assert stepped(boxes) == ["one\n2", "64"]
    stepped.focus("[name=prompt]")
    stepped.keyboard.press("End")
    stepped.keyboard.press("Enter")  # inserts a line break
    stepped.click(".kinds >> text=Chat")
    stepped.focus("[name=prompt]")
    stepped.keyboard.press("Enter")
    wait_for(stepped, "window.sent")
    message = {"role": "user", "content": "one\n2\n"}
    assert stepped("[sent.messages, sent.max_tokens]") == [[message], 512]
    assert prompt(stepped) == ""


def test_a_chat_has_one_answer_at_a_time(stepped):
    """An answer still being generated is not part of a new chat that has begun meanwhile."""
    stepped.click(".kinds >> text=Chat")
    send(stepped, "hello")
    wait_for(stepped, "window.step")
    stepped("step({ delta: { content: 'Hi' } })")
    wait_for(stepped, "[...calls.values()][0][0].said")
    assert stepped.is_disabled("#send")
    stepped.keyboard.type("more")
    stepped.keyboard.press("Control+Enter")
    assert prompt(stepped) == "more"
    assert stepped("calls.size") == 1
    stepped.click("#new-chat")
    wait_for(stepped, IS_OVER)
    assert stepped("conversation.length") == 0
    assert stepped.is_enabled("#send")


@pytest.mark.slow
def test_chat_is_disabled_with_the_reason_where_there_is_no_template(open_page, small_server):
    page = open_page(small_server.url)
    assert page.is_disabled("[value=chat]")
    assert page.is_checked("[value=text]")
    assert "no chat template" in page.inner_text("#no-chat")


# --------------------------------------------------------------------------------------------------
# What goes wrong


def test_a_refusal_is_told_and_the_prompt_comes_back(live):
    live.expected = "400"  # Chromium's own message in the console
    set_knob(live, "max_tokens", "100000")
    write(live, "too much")
    live.click("#send")
    wait_for(live, IS_OVER)
    assert "maximum context length" in live.inner_text("#answers .error")
    assert prompt(live) == "too much"


@pytest.mark.parametrize("name, value", [("top_k", "1.5"), ("max_tokens", ""), ("n", "129")])
def test_an_invalid_setting_is_said_where_one_looks(live, name, value):
    """With folded settings nothing seemed to happen, and an empty max tokens meant the API's 16."""
    set_knob(live, name, "1")
    live.fill(f"[name={name}]", value)
    live.click("#settings summary")
    live.click("#send")
    wait_for(live, f"$('settings').open && document.activeElement.name === '{name}'")
    assert live("calls.size") == 0


@pytest.mark.slow
def test_a_server_that_does_not_answer(open_page, tmp_path):
    """
    The page says so in plain words, not the browser's "Failed to fetch", both before an answer and
    in the middle of one. The model's context is so long that no machine can finish the answer
    before the server is killed.
    """
    model = save_random_model(tmp_path, context_length=32_768)
    with Process(model, "--kv-blocks", "2049") as server:
        page = open_page(server.url)
        page.expected = "ERR_|Failed to load"
        set_knob(page, "max_tokens", "32000")
        send(page, "much")
        wait_for(page, "document.querySelector('.token')")
    for count in 1, 2:
        wait_for(page, f"{IS_OVER} && calls.size === {count}")
        told = page.locator("#answers .error").all_inner_texts()
        assert told == ["The server is not responding."] * count
        assert prompt(page) == "much"
        page.click("#send" if count == 1 else "#settings summary")
    page.click("#fork")
    wait_for(page, "!player.until && $('notice').textContent === 'The server is not responding.'")
    assert page.inner_text("#moment") == ""


def test_without_events_it_still_talks(open_page, server):
    page = open_page(server.url, wait="true")
    page.expected = "net::ERR_FAILED|Failed to load"
    page.route("**/events", lambda route: route.abort())
    page.reload()
    send(page, "text")
    wait_for(page, IS_OVER)
    assert page.locator(".token").count() == 64
    page.click("#fork")  # does nothing, because there is nothing to watch
    assert page("calls.size") == 1


# --------------------------------------------------------------------------------------------------
# Demos


DEMO_IS_OVER = "!player.until && !$('moment').textContent.startsWith('Playing at')"


def moment(page, demo: str) -> tuple[dict, str]:
    """Run a demo. Return the line at which it stopped, and its text about it."""
    page.click(f"#{demo}")
    wait_for(page, DEMO_IS_OVER)
    assert page("player.isPaused"), page.inner_text("#moment")
    return page("tape.lines[tape.at]"), page.inner_text("#moment")


def test_eight_prompts_that_begin_alike(live):
    """
    With the default model's context, the demo stops when seven requests have found three blocks.
    All seven are highlighted until it continues: new requests once stayed dimmed. After the fork
    demo, the first request once found two of its blocks, and was counted.
    """
    moment(live, "fork")
    live("stopAll(); goLive()")
    wait_for(live, f"{IS_OVER} && {IS_IDLE}")
    _, said = moment(live, "alike")
    found = "Seven requests have each found 48 tokens in the cache, in 3 blocks."
    assert said == f"{found} Paused: press ▶ to go on."
    lines = live("tape.lines.slice(0, tape.at + 1)")
    hits = [r for line in lines for r, hit, _ in line.get("admitted", []) if hit >= 48]
    assert len(hits) >= 7
    assert live("staged") == hits[-7:]
    wait_for(live, "$('dim').getAttribute('d')")
    live.click("#live")
    wait_for(live, "!$('dim').getAttribute('d') && !$('moment').textContent")
    wait_for(live, IS_OVER)
    assert live.locator("#answers .error").count() == 0


def test_a_demo_that_is_left_says_nothing_more(live):
    """The text "Playing at ten steps a second .." once stayed forever."""
    first, later = live(
        """() => ["flood", "pause"].map((button) => {
            $(button).click(); return $("moment").textContent; })"""
    )
    assert first.startswith("Playing at ten steps a second")
    assert later == ""
    assert live("player.until") is None


def test_stop_ends_a_demo(stepped):
    """If stopped before its first line, a demo once played slowly forever and sent more prompts."""
    stepped("takeIn(readLines($('tour-lines').textContent).slice(1, 2))")
    stepped.click("#alike")
    wait_for(stepped, "window.step")
    stepped.click("#stop")
    wait_for(stepped, f"{IS_OVER} && {DEMO_IS_OVER}")
    assert stepped("[calls.size, player.until, $('moment').textContent]") == [1, None, ""]


def test_four_answers_to_one_prompt(live):
    """
    The demo stops where the half-full block that the answers share is copied. Its text is next to
    the cells. Its arrows do not overlap, and appear one after another. All this is so on a phone,
    too.
    """
    line, said = moment(live, "fork")
    r, block, source = line["copies"][0]
    assert said.startswith(f"Request {r} must write into block {source}, which it shares: ")
    assert f" a copy, {block}. Paused" in said
    assert live(f"[staged[0], state.requests.get({r}).prompt]") == [r, 40]
    for width in 390, 1440:
        live("grid = null")
        live.set_viewport_size({"width": width, "height": 844})
        wait_for(live, "grid && $('effects').children.length === staged.length")
        arrows = """[...document.querySelectorAll('#effects .copied')].map((path) =>
            [path.getAttribute('d').split('Q')[1], getComputedStyle(path).animationDelay])"""
        ends, delays = zip(*live(arrows), strict=True)
        assert len({*ends}) == len({*delays}) == len(line["copies"]) == 3
        assert live("$('moment').checkVisibility()")
    live.click("#forth")
    assert live("[$('moment').textContent, staged]") == ["", []]  # the moment is over
    live.click("#pause")
    wait_for(live, IS_OVER)
    assert live.locator(".answer:visible").count() == 4


@pytest.mark.slow
def test_more_than_the_pool_can_hold(live):
    """The demo stops at a preemption, in the default pool for such a model."""
    line, said = moment(live, "flood")
    (r,) = line["preempted"]
    assert f"so request {r} gave its {live('happened[0].blocks.length')} blocks back" in said
    assert live("staged") == [r]
    (shape,) = live("[...document.querySelectorAll('.preempted')].map((it) => it.outerHTML)")
    assert live("boxesOf(happened[0].blocks)") in shape  # freed blocks are hatched
    assert live("state.owners.filter((all) => all.length > 1).length") == 0
    assert live.inner_text("#articles summary:visible") == "60 answers"
    wait_for(live, IS_OVER)
    assert live.locator("#answers .error").count() == 0


@pytest.mark.slow
def test_demos_in_another_pool(open_page, small_server):
    """The demos also work in a smaller pool, with a longer context."""
    page = open_page(small_server.url)
    for demo, has in (("alike", "admitted"), ("fork", "copies"), ("flood", "preempted")):
        line, _ = moment(page, demo)
        assert line[has]
        page("stopAll(); goLive()")
        wait_for(page, f"{IS_OVER} && {IS_IDLE}")  # requests stopped early may not be on the tape


def test_a_demo_that_does_not_come_to_its_moment_ends(live):
    """Such a demo ends when its requests have ended, and later requests play as before."""
    live("demos.flood = null")
    live("demonstrate(1, '', 1, () => '', () => ask([{ text: 'x' }], { max_tokens: 3 }))")
    wait_for(live, DEMO_IS_OVER)
    assert "All requests ended before it happened" in live.inner_text("#moment")
    assert not live("player.isPaused")


# --------------------------------------------------------------------------------------------------
# The tour


def test_the_tour(live):
    """The tour works by keyboard and mouse. Afterwards the live tape is as it was."""
    captions = live("readLines($('tour-lines').textContent)[0].tour")
    send(live, "before the tour")
    wait_for(live, IS_PLAYED)
    live("seek(5)")
    place = "[tape.at, tape.lines.length, player.isPaused, state.step, state.engine]"
    before = live(place)
    live.click("#take-tour")
    at = 0
    for key in ["Space", "ArrowRight", "ArrowLeft", "ArrowRight", *["Space"] * 5, "Escape"]:
        step, r, text = captions[at]
        told = live.locator("#caption, #caption-number").all_inner_texts()
        assert told == [text, f"{at + 1} of 8"]
        assert live("[state.step, ...staged, player.isPaused]") == [step, r, True]
        wait_for(live, "!location.hash")  # a reload once led to that step of another tape
        live.keyboard.press(key)
        at += -1 if key == "ArrowLeft" else 1
    assert at == 8
    assert not live.is_visible("#tour")
    assert live(place) == before
    assert live("staged") == []
    say(live, "after it")  # the stream is connected again
    wait_for(live, f"tape.lines.length > {before[1]}")
    assert live("tape.at") == before[0]


@pytest.mark.parametrize("motion", ["no-preference", "reduce"])
def test_an_empty_page_plays_the_tour(open_page, motion):
    """
    The tour's record plays faintly behind the button, even if an API key is required. It stands
    still if the user prefers reduced motion.
    """
    page = live_page(lambda **more: open_page(reduced_motion=motion, **more))
    page("void askForKey()")
    wait_for(page, "$('offer-tour').checkVisibility() && grid?.shown === 36")
    places = page("[3000, 5000, 5050].map((now) => (dream(now), sleeper.tape.at))")
    assert places == ([40] * 3 if motion == "reduce" else [30, 50, 50])
    assert page("[state.num_blocks, tape.lines.length, player.isLive]") == [0, 0, True]


def test_a_new_visitor_is_offered_the_tour_which_has_an_end(open_page):
    page = live_page(open_page)
    snapshot, *more = page("readLines($('tour-lines').textContent).slice(1)")
    page.click("#take-tour")
    page.click("#next")
    wait_for(page, "$('held').textContent !== '0'")
    page.click("#leave")  # before any lines have arrived: nothing of the tour may stay
    wait_for(page, "$('offer-tour').checkVisibility()")
    left = page.locator("#held, #size, #said").all_text_contents()
    assert [*left, page.get_attribute("#dim", "d")] == ["0", "", "", ""]
    page("lines => takeIn(lines)", [snapshot])
    wait_for(page, "$('size').textContent === '36 blocks of 8 tokens'")
    assert page.is_visible("#offer-tour") and page.is_visible("#steps-empty")
    for button, way in (("#offer-tour", "#leave"), ("#take-tour", "#next")):
        page.click(button)
        assert focused(page) == "next"
        page("showCaption(7)")
        page.click(way)
        assert not page.is_visible("#tour")
        assert page("player.isLive && !player.isPaused")
    page("lines => (listening.abort(), takeIn(lines))", more[:9])
    wait_for(page, "!$('offer-tour').checkVisibility() && $('steps-empty').hidden && grid")
    assert page("grid.tape === tape")


# makes a change, and returns in the next frame whether the page is laid out for a record
LAID_OUT = """change => new Promise(done => {
    view.told = performance.now()
    change()
    requestAnimationFrame(() => done(document.body.matches(".replay")))
})"""


def test_the_tours_buttons_stay_where_they_appear(open_page):
    """The buttons once jumped aside a tenth of a second later, sometimes from under a click."""
    page = live_page(open_page)
    page("takeIn(readLines($('tour-lines').textContent).slice(1, 2))")
    wait_for(page, "state.num_blocks")
    assert page(f"({LAID_OUT})(startTour)")
    assert not page(f"({LAID_OUT})(leaveTour)")


def test_a_tour_leads_back_to_a_record(open_page):
    """A page that shows a record does not connect to a server; after the tour, it once did."""
    page = live_page(open_page)
    page("replay($('tour-lines').textContent, 'a record')")
    wait_for(page, "tape.name && player.isPaused")
    place = page("tape.at")
    page.click("#take-tour")
    page.click("#take-tour")  # starts the tour again, and it still leads back to the record
    page.keyboard.press("Escape")
    assert page("[tape.at, tape.name, player.isLive]") == [place, "a record", False]
    assert page("listening.signal.aborted")
    page.click("#take-tour")
    page("replay($('tour-lines').textContent, 'another')")
    wait_for(page, "tape.name === 'another' && $('tour').hidden")
