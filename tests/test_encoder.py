"""
encoder.py: nothing that is encoded or rendered holds up the one who asks, and everything has an
end.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from serving import encoder as module
from serving.encoder import Encoder, EncoderBusy, read_ids, tokenize_answer
from tokenizer import TokenizerError, load_tokenizer
from training.corpus import bpe_tokenizer, char_tokenizer

ROOT = Path(__file__).parents[1]
END = "<|endoftext|>"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint whose tokens are bytes, and whose template does what the message says."""
    folder = tmp_path_factory.mktemp("model")
    bpe_tokenizer([(b" ", b" "), (b"a", b"a")]).save(folder)
    template = """{% for m in messages %}
        {%- if m.content == 'for ever' %}
            {%- for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}
        {%- elif m.content == 'large' %}{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}
        {%- elif m.content == 'larger' %}{{ ('x' * 10**10) | length }}
        {%- else %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endif %}
    {%- endfor %}{% if add_generation_prompt %}bot: {% endif %}"""
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="module")
def encoder(folder):
    encoder = Encoder(folder)
    yield encoder
    encoder.close()


def test_short_texts_need_no_process(folder):
    encoder = Encoder(folder)
    assert encoder.encode(f"a{END}b") == [97, 258, 98]
    assert encoder.process is None
    encoder.close()


@pytest.mark.parametrize(
    "text", ["  aaa" * 2000, f"é{END}" * 3000, "\ud800" * 5000, " " * 5000 + END]
)
def test_the_process_says_what_the_tokenizer_says(encoder, text):
    assert encoder.encode(text) == encoder.tokenizer.encode(text, allow_special=True)
    assert encoder.process is not None


@pytest.mark.parametrize(
    ("job", "is_short"),
    [
        ({"texts": ["a" * 1008]}, True),
        ({"texts": ["a" * 1009]}, False),
        ({"texts": ["a" * 496] * 2}, True),
        ({"texts": ["a" * 496, "a" * 497]}, False),
        ({"texts": [""] * 65}, False),  # each has a cost of its own
        ({"tokens": [1] * 1024}, True),
        ({"tokens": [1] * 1025}, False),
        ({"messages": HELLO}, False),
    ],
)
def test_where_a_job_is_done(folder, monkeypatch, job, is_short):
    """
    Here what takes 2 ms at most, in the process all else, whether somebody waits for it or not.
    """
    encoder = Encoder(folder)
    monkeypatch.setattr(module, "do_job", lambda *_: "here")
    monkeypatch.setattr(encoder, "_exchange", lambda _: "there")
    where = "here" if is_short else "there"
    assert asyncio.run(encoder.ask(job)) == where
    encoder.tokenizer.has_known_pattern = False
    assert asyncio.run(encoder.ask(job)) == "there"
    encoder.close()


def test_a_text_counts_by_its_length(folder, monkeypatch):
    encoder, sizes = Encoder(folder), []

    async def ask(job):
        sizes.append(module.size_of(job))
        return {"counts": [0]}, b""

    monkeypatch.setattr(encoder, "ask", ask)
    for text in ("", "abc", "é" * 5000):
        encoder.encode(text)
    assert sizes == [0, 3, 5000]
    messages = [{"role": "user", "content": "abc"}, {"role": "tool", "content": "d", "name": "e"}]
    assert module.size_of({"messages": messages, "options": {}}) == len("userabctoolde")
    encoder.close()


def test_jobs_that_are_asked_at_once_get_their_own_answers(encoder, monkeypatch):
    """
    One after the other: two threads at one link would read each other's answers, or wait for ever.
    """
    exchange, link = encoder._exchange, threading.Lock()

    def exchange_alone(job):
        assert link.acquire(blocking=False), "two jobs at once at the link"
        try:
            return exchange(job)
        finally:
            link.release()

    monkeypatch.setattr(encoder, "_exchange", exchange_alone)

    async def ask_all():
        return await asyncio.gather(
            *[encoder.ask({"texts": ["b" * length]}) for length in range(5000, 5020)]
        )

    for length, (head, data) in enumerate(asyncio.run(ask_all()), 5000):
        assert head == {"counts": [length]} and read_ids(head, data) == [[98] * length]


def test_what_work_makes_of_each_job():
    """
    Control tokens are spelled by their names, half characters replaced; ids beyond the vocabulary
    have no text.
    """
    tokenizer = bpe_tokenizer([])
    assert module.do_job({"tokens": [*b"a", 256, 0xC3, 98, 300]}, tokenizer, None) == (
        {}, f'{{"prompt": "a{END}\ufffdb"}}'.encode()
    )  # fmt: skip
    head, data = module.do_job({"texts": [f"a{END}", "", "bcd"]}, tokenizer, None)
    assert head == {"counts": [2, 0, 3]} and read_ids(head, data) == [[97, 256], [], [98, 99, 100]]
    for limit, fits in ((3, True), (2, False)):  # of the longest, whichever it is
        for texts in (["a", "bcd"], ["bcd", "a"], ["abc"] * 5):
            _, data = module.do_job({"texts": texts, "limit": limit}, tokenizer, None)
            assert bool(data) == fits
    _, data = module.do_job(
        {"texts": ["ab"], "answer": {"names": True, "max_model_len": 7}}, tokenizer, None
    )
    assert json.loads(data) == {
        "count": 2,
        "max_model_len": 7,
        "tokens": [97, 98],
        "token_strs": ["a", "b"],
    }


def test_texts_come_back_in_order_and_too_long_ones_without_ids(encoder):
    texts = ["a" * 4999, "", "b" * 7]
    head, data = asyncio.run(encoder.ask({"texts": texts}))
    assert head == {"counts": [2500, 0, 7]}
    assert read_ids(head, data) == [encoder.tokenizer.encode(text) for text in texts]
    assert asyncio.run(encoder.ask({"texts": texts, "limit": 2500})) == (head, data)
    assert asyncio.run(encoder.ask({"texts": texts, "limit": 2499})) == (head, b"")


def test_templates_are_always_rendered_there(encoder):
    assert encoder.encode_chat(HELLO) == [*b"user: hello", 258]
    message = {"role": "user", "content": END}
    assert encoder.encode_chat([message]) == [*b"user: ", *END.encode(), 258]
    ids = encoder.encode_chat(HELLO, add_generation_prompt=True)
    assert ids == [*b"user: hello", 258, *b"bot: "]


def test_default_variables_of_the_template(tmp_path):
    """A conversation's own go before them."""
    bpe_tokenizer([]).save(tmp_path)
    with pytest.raises(TokenizerError, match=r"^--default-chat-.* has no chat template, leave"):
        Encoder(tmp_path, variables={"a": 1})
    (tmp_path / "chat_template.jinja").write_text("{{ a }}{{ b }}")
    encoder = Encoder(tmp_path, variables={"a": 1})
    try:
        assert encoder.encode_chat(HELLO, b=2) == [*b"12"]
        assert encoder.encode_chat(HELLO, a=3, self=4) == [*b"3"]
        assert encoder.encode_chat(HELLO) == [*b"1"]
    finally:
        encoder.close()


def test_the_answer_of_tokenize_is_json(encoder):
    ids = encoder.tokenizer.encode(f'a"\\\n\0é語{END}', allow_special=True)
    answer = json.loads(tokenize_answer(ids, encoder.tokenizer, names=True, max_model_len=9))
    strings = [
        "a",
        '"',
        "\\",
        "\n",
        "\0",
        *(f"bytes:\\x{byte:02x}" for byte in "é語".encode()),
        END,
    ]
    assert answer == {"count": len(ids), "max_model_len": 9, "tokens": ids, "token_strs": strings}
    many = [5] * (2**16 * 2 + 1)
    assert json.loads(tokenize_answer(many, encoder.tokenizer, names=False))["tokens"] == many
    assert json.loads(tokenize_answer([], encoder.tokenizer, names=True)) == {
        "count": 0,
        "tokens": [],
        "token_strs": [],
    }


def test_names_are_made_for_so_many_tokens_only(encoder, monkeypatch):
    """Names of 4 million tokens took 60 s and 869 MiB, even when nobody asked for them."""
    monkeypatch.setattr(module, "MAX_NAMES", 3)
    assert json.loads(tokenize_answer([1, 2, 3], encoder.tokenizer, names=True))["token_strs"]
    with pytest.raises(
        TokenizerError, match="return_token_strs for 4 tokens, at most 3 are named: leave it out"
    ):
        tokenize_answer([1, 2, 3, 4], encoder.tokenizer, names=True)
    assert (
        json.loads(tokenize_answer([1, 2, 3, 4], encoder.tokenizer, names=False))["token_strs"]
        is None
    )


def test_templates_without_end_have_one(folder, monkeypatch, tmp_path):
    """
    A loop in a template held the server for ever. The kernel ends it, and the next job starts
    another process.
    """
    quick = tmp_path / "serving"  # the same with a second
    quick.mkdir()
    (quick / "__init__.py").touch()
    (quick / "chat.py").write_text((ROOT / "serving" / "chat.py").read_text())
    source = (ROOT / "serving" / "encoder.py").read_text()
    assert "JOB_SECONDS = 20 " in source
    (quick / "encoder.py").write_text(source.replace("JOB_SECONDS = 20 ", "JOB_SECONDS = 1 "))
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    encoder = Encoder(folder)
    with pytest.raises(
        TokenizerError,
        match=r"this takes more than 20 s of CPU time to encode or render: shorten it",
    ):
        encoder.encode_chat([{"role": "user", "content": "for ever"}])
    assert encoder.encode_chat(HELLO) == [*b"user: hello", 258]
    encoder.close()


def test_templates_that_fill_the_memory_are_stopped(encoder):
    with pytest.raises(
        TokenizerError, match="the chat template makes more than 16777216 characters"
    ):
        encoder.encode_chat([{"role": "user", "content": "large"}])
    if sys.platform == "linux":
        with pytest.raises(TokenizerError, match="takes more than 2048 MiB to encode or render"):
            encoder.encode_chat([{"role": "user", "content": "larger"}])
    process = encoder.process
    assert encoder.encode_chat(HELLO) == [*b"user: hello", 258] and encoder.process is process


def test_broken_templates_are_told_at_start(folder, tmp_path):
    """The process compiles them: even that may compute."""
    load_tokenizer(folder).save(tmp_path)
    for source, message in (
        ("{% if %}", "the chat template is broken"),
        ("{{ 1 | nothing }}", "No filter named"),
    ):
        (tmp_path / "chat_template.jinja").write_text(source)
        encoder = Encoder(tmp_path)
        with pytest.raises(TokenizerError, match=message):
            encoder.check()
        assert encoder.process is None
        encoder.close()


def test_without_a_template_no_process_is_started(tmp_path):
    bpe_tokenizer([]).save(tmp_path)
    encoder = Encoder(tmp_path)
    encoder.check()
    assert encoder.process is None and not encoder.has_chat
    encoder.close()
    own = bpe_tokenizer([])
    assert Encoder(tmp_path, own).tokenizer is own


def test_a_terminals_signals_do_not_reach_the_process_and_close_ends_it(folder):
    """
    Ctrl-C at a terminal goes to all of a session. What was still to be done is not: it would start
    another.
    """
    encoder = Encoder(folder)
    encoder.check()
    process = encoder.process
    assert os.getsid(process.pid) == process.pid
    held = threading.Event()
    encoder.thread.submit(held.wait)
    waiting = encoder.thread.submit(encoder._exchange, {"texts": ["a"]})
    encoder.close()
    held.set()
    assert waiting.cancelled() and process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("has_ended", [True, False])
def test_a_process_that_dies_is_replaced(encoder, has_ended):
    """Whether it is found dead, or dies at work."""
    encoder.encode_chat(HELLO)
    encoder.process.kill()
    if has_ended:
        os.waitid(os.P_PID, encoder.process.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(RuntimeError, match=r"the encoding process ended \(exit code -9\)"):
        encoder.encode_chat(HELLO)
    assert encoder.encode_chat(HELLO) == [*b"user: hello", 258]


def test_what_the_tokenizer_refuses_is_said(tmp_path):
    """From the process, too."""
    char_tokenizer("abc").save(tmp_path)
    encoder = Encoder(tmp_path)
    for text in ("abx", "abc" * 3000 + "x"):
        with pytest.raises(TokenizerError) as caught:
            encoder.encode(text)
        assert str(caught.value).startswith(
            f"character 'x' (U+0078, at position {len(text) - 1}) is not among the 3"
        )
    encoder.close()


def test_only_so_much_waits(encoder, monkeypatch):
    """What waits is in memory; it is refused at once, not when its turn comes."""
    monkeypatch.setattr(module, "MAX_WAITING", 9999)

    async def ask_all():
        jobs = [encoder.ask({"texts": ["a" * 5000]}) for _ in range(3)]
        return await asyncio.gather(*jobs, return_exceptions=True)

    results = asyncio.run(ask_all())
    assert [type(result) for result in results] == [tuple, EncoderBusy, EncoderBusy]
    assert encoder.waiting == 0
    monkeypatch.setattr(module, "MAX_WAITING", 10_000)  # exactly two
    assert [type(result) for result in asyncio.run(ask_all())] == [tuple, tuple, EncoderBusy]
    with pytest.raises(TokenizerError):  # what fails waits no longer, either
        asyncio.run(
            encoder.ask({"messages": [{"role": "user", "content": "large"}], "options": {}})
        )
    assert encoder.waiting == 0


def test_a_directorys_own_pattern_runs_in_the_process(folder, tmp_path):
    """It may be one that looks at a text again and again: known ones do not."""
    spec = json.loads((folder / "tokenizer.json").read_text())
    split = {
        "type": "Split",
        "pattern": {"Regex": r"a|\s+|\S"},
        "behavior": "Isolated",
        "invert": False,
    }
    spec["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [split, spec["pre_tokenizer"] | {"use_regex": False}],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    encoder = Encoder(tmp_path)
    assert encoder.encode("aa") == [97, 97] and encoder.process is not None
    encoder.close()


def test_a_pattern_that_gives_up_is_said(tmp_path):
    """
    The library's regular expressions panic after ten million steps, which is no Exception: the
    process died of it, and its client was told to try again.
    """
    spec = json.loads(bpe_tokenizer([]).backend.to_str())
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    spec["pre_tokenizer"] = split | {"pattern": {"Regex": "(x+x+)+y"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    encoder = Encoder(tmp_path)
    with pytest.raises(TokenizerError, match=r"cannot encode this text: .*retry-limit-in-match"):
        encoder.encode("x" * 40)
    assert encoder.encode("xy") == [*b"xy"] and encoder.process is not None
    encoder.close()


def test_a_library_that_gets_no_memory_is_said(encoder):
    """It aborts, which is no bug of ours."""
    encoder.encode_chat(HELLO)
    encoder.process.send_signal(signal.SIGABRT)
    with pytest.raises(TokenizerError, match="this takes more than 2048 MiB to encode or render"):
        encoder.encode_chat(HELLO)
    assert encoder.encode_chat(HELLO) == [*b"user: hello", 258]


def test_the_process_ends_with_its_parent(folder):
    """However the parent dies; and it has loaded no torch."""
    program = """
import sys
from serving.encoder import Encoder
encoder = Encoder(sys.argv[1])
encoder.check()
assert "torch" not in sys.modules
print(encoder.process.pid, flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", program, str(folder)]
    parent = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True
    )
    child = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 60
    while is_running(child):
        assert time.monotonic() < deadline, "an orphan is left"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return (
            Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
        )  # in a container nobody may collect it
    except (ProcessLookupError, FileNotFoundError):
        return False
