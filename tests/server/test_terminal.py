"""
The terminal: prompts and conversations, with a real engine in this process. A real Ctrl-C is sent
in test_end_to_end.py.
"""

import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from browser import save_random_model
from processes import ON_CPU

import serve
from checkpoint import load_checkpoint, save_checkpoint
from common import plural
from model import GPT, GPTConfig
from params import SamplingParams
from server import terminal
from server.terminal import stream_answer
from server.text import load_chat
from tokenizer import TextStream, load_tokenizer
from training.corpus import train_bpe

ROOT = Path(__file__).parents[2]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<answer>{% endif %}{{ mood }}"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """
    Random weights that go on for ever (no token ends a text), a context of 4,000 tokens and a chat
    template. The weights are large, so that each token of the context changes the answer.
    """
    folder = tmp_path_factory.mktemp("terminal")
    tokenizer = train_bpe([(ROOT / "paged.py").read_text()], 300)
    tokenizer.save(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    torch.manual_seed(0)
    model = GPT(GPTConfig(tokenizer.vocab_size, 4000, n_layer=1, n_head=2, n_embd=32))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    save_checkpoint(model, folder)
    return folder


@pytest.fixture
def run(checkpoint, monkeypatch, capfd):
    """Runs `serve.py --model CHECKPOINT ..` in this process: its output and its exit message."""

    def run(*flags, stdin=b""):
        monkeypatch.setattr(signal, "signal", lambda *_: None)  # pytest keeps its own SIGPIPE
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        always = ["--model", str(checkpoint), "--temperature", "0", "--kv-blocks", "300"]
        always += ["--device", "cpu"]  # in fp32 its answers are the dense model's
        with pytest.raises(SystemExit) as ended:
            serve.main([*always, *flags])
        out, err = capfd.readouterr()
        return SimpleNamespace(out=out, err=err, problem=ended.value.code)

    return run


@pytest.fixture(scope="module")
def expected(checkpoint):
    """expected(text, count): the dense model's greedy continuation of a text."""
    model = load_checkpoint(checkpoint)
    tokenizer = load_tokenizer(checkpoint)

    def expected(text: str, count: int) -> str:
        ids = tokenizer.encode(text)
        return tokenizer.decode(model.generate(torch.tensor([ids]), count)[0, len(ids) :].tolist())

    return expected


# --------------------------------------------------------------------------------------------------
# Answers, from the command line to stdout

MOOD = ["--default-chat-template-kwargs", '{"mood": "<good>"}']
LINES = "a\r\n\r\n  b = '\u20ac'\n"


@pytest.mark.parametrize(
    ("flags", "stdin", "before", "context"),
    [
        (["--prompt", "def f"], "", "", "<user>def f<answer>"),
        (["--prompt", "def f", *MOOD], "", "", "<user>def f<answer><good>"),
        (["--prompt", "def f", "--raw"], "", "def f", "def f"),
        (["--prompt", "-", "--raw"], LINES, LINES, LINES),  # all of it, exactly
        (["--chat"], "\ndef f\n", "", "<user>def f<answer>"),  # an empty line asks for nothing
        (["--chat", *MOOD], "def f", "", "<user>def f<answer><good>"),
    ],
)
def test_answers(run, expected, flags, stdin, before, context):
    result = run(*flags, "--max-tokens", "8", stdin=stdin.encode())
    assert result.out == before + expected(context, 8) + "\n"
    assert result.problem is None
    assert "[8 tokens, " in result.err


def test_each_answer_follows_the_conversation(run, expected):
    """A message that fits no context is refused and forgotten; bytes that are no UTF-8 are read."""
    lines = b"one\n" + b"x " * 5000 + b"\ntwo\nth\xffree"
    result = run("--chat", "--max-tokens", "4", stdin=lines)
    text = ""
    answers = ""
    for question in ("one", "two", "th\ufffdree"):
        text += f"<user>{question}"
        answer = expected(f"{text}<answer>", 4)
        answers += f"{answer}\n"
        text += f"<assistant>{answer}"
    assert result.out == answers
    assert result.problem is None
    assert "4,000" in result.err


@pytest.mark.parametrize(
    ("flags", "stdin", "problem"),
    [
        (["--prompt", "-", "--raw"], b"", "the prompt is empty"),
        (["--prompt", "-"], b"\xff", "standard input is not UTF-8"),
        (["--prompt", "-"], b"x " * 5000, "4,000"),
        (["--chat", "--raw"], b"", "--chat needs a chat template, "),
    ],
)
def test_refusals_print_nothing_else(run, flags, stdin, problem):
    result = run(*flags, stdin=stdin)
    assert problem in result.problem
    assert result.out == ""
    assert result.err.count("\n") == 1
    assert result.err.startswith("loading ")


def test_the_seed_that_is_shown_gives_the_same_text(run):
    """Of a prompt, and of both answers of a conversation, which are drawn each on its own."""
    hot = ["--max-tokens", "20", "--temperature", "1"]
    first = run("--prompt", "def f", *hot)
    (seed,) = re.findall(r", seed (\d+)[],]", first.err)
    assert run("--prompt", "def f", *hot, "--seed", seed).out == first.out
    assert run("--prompt", "def f", *hot, "--seed", str(int(seed) + 1)).out != first.out
    unseeded = run("--chat", *hot, stdin=b"one\ntwo\n")
    assert len(set(re.findall(r", seed (\d+)[],]", unseeded.err))) == 2


def test_without_jinja2_raw_text_is_continued_all_the_same(run, monkeypatch):
    """The message comes before the model is loaded; `--raw` needs no template."""
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with monkeypatch.context() as patch:
        patch.setattr(serve, "build_engine", lambda args: pytest.fail("the model is loaded"))
        problem = run("--prompt", "x").problem
    assert "needs jinja2: `pip install jinja2`, or add --raw" in problem
    assert run("--prompt", "x", "--raw", "--max-tokens", "2").problem is None


def test_a_reader_that_has_enough_ends_it_quietly(tmp_path):
    """
    `python serve.py --prompt x | head -1` ended in "[Errno 32] Broken pipe". This model does not
    end its text by chance.
    """
    model = save_random_model(tmp_path, context_length=4096)
    command = [sys.executable, "serve.py", "--model", model, "--prompt", "x\n", "--raw"]
    command += ["--max-tokens", "3000"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | ON_CPU, **pipes) as process:
        assert process.stdout.readline() == b"x\n"
        process.stdout.close()
        assert process.stderr.read().count(b"\n") == 1
    assert process.returncode == -signal.SIGPIPE


# --------------------------------------------------------------------------------------------------
# The parts


class Fake:
    """An engine that brings `tokens` in one step, or what `step` does in its place."""

    num_steps = 0
    has_work = False

    def __init__(self, tokens=(120,), max_model_len=1000, finish_reason="length"):
        self.output = SimpleNamespace(error=None, tokens=list(tokens), finish_reason=finish_reason)
        self.max_model_len = max_model_len
        self.aborted = []
        self.abort = self.aborted.append

    def add_request(self, id, prompt, params):
        self.has_work = True
        self.added = id
        self.params = params

    def step(self):
        self.has_work = False
        return [self.output]


def spell(token: int) -> bytes:
    return bytes([token])


BYTES = SimpleNamespace(stream=lambda prompt: TextStream(spell, spell))


def args_of(**flags) -> SimpleNamespace:
    flags = {"max_tokens": None, "temperature": 0.5, "seed": 3, "sampling": {}} | flags
    return SimpleNamespace(**flags)


# what is typed, the model's own defaults, the room -> the length, the temperature
LENGTHS = """
{} {} 1000 -> 200 0.5
{} {} 100 -> 100 0.5
{"max_tokens":7} {} 1000 -> 7 0.5
{"max_tokens":7} {} 6 -> 6 0.5
{} {"max_tokens":300} 1000 -> 300 0.5
{} {"max_tokens":300} 299 -> 299 0.5
{"max_tokens":5} {"max_tokens":300} 1000 -> 5 0.5
{"temperature":0,"seed":0} {"temperature":1.5,"top_k":4} 999 -> 200 0
"""


@pytest.mark.parametrize("row", LENGTHS.strip().splitlines())
def test_flags_go_before_the_models_defaults(row):
    typed, sampling, room, _, length, temperature = map(json.loads, row.replace("->", "0").split())
    args = args_of(sampling=sampling, **typed)
    engine = Fake(max_model_len=room + 2)
    stream_answer(args, engine, [1, 2], BYTES, 200)
    own = {"max_tokens": length, "temperature": temperature, "seed": args.seed}
    assert engine.params == SamplingParams(**sampling | own)


def test_a_full_context_begins_a_conversation_anew(checkpoint, capsys):
    """A quarter of the context is left for an answer."""
    chat = load_chat(checkpoint, load_tokenizer(checkpoint))
    messages = [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]
    length = len(chat.encode(messages, add_generation_prompt=True))
    answer = {"role": "assistant", "content": "x"}
    for room, kept in ((length, messages), (length - 1, messages[1:])):
        engine = Fake(max_model_len=(4 * room + 3) // 3)
        assert terminal.add_answer(args_of(), engine, chat, messages) == [*kept, answer]
        assert ("the context is full" in capsys.readouterr().err) == (kept != messages)
    assert terminal.add_answer(args_of(), engine, chat, [messages[0]]) == [messages[0], answer]


def test_ctrl_c_stops_an_answer_and_frees_its_blocks(capsys):
    """The part is kept, and the next answer is a request of its own."""
    engine = Fake(b"ab", finish_reason=None)
    engine.step = Mock(side_effect=[[engine.output], KeyboardInterrupt])
    engine.has_work = True
    assert stream_answer(args_of(), engine, [1], BYTES, 9) == "ab"
    shown = capsys.readouterr()
    assert shown.out == "ab\n"
    assert shown.err.startswith("[2 tokens, ")
    assert shown.err.endswith("end: interrupted]\n")
    assert engine.aborted == [engine.added]


@pytest.mark.parametrize(
    ("tokens", "finish_reason", "text"),
    [
        ("aé".encode()[:-1], "length", "a\ufffd"),  # the half character that was shown is kept
        ("aé".encode(), "length", "aé"),
        (b"ab", "stop", "a"),  # the token that ends a text is no part of it
    ],
)
def test_the_answer_is_the_text_that_was_shown(tokens, finish_reason, text, capsys):
    engine = Fake(tokens, finish_reason=finish_reason)
    assert stream_answer(args_of(), engine, [1], BYTES, 9, "[1]") == text
    shown = capsys.readouterr()
    count = len(tokens) - (finish_reason == "stop")
    assert shown.out == f"[1]{text}\n"
    assert shown.err.startswith(f"[{plural(count, 'token')}, ")
    assert shown.err.endswith(f" a second, seed 3, end: {finish_reason}]\n")


def test_each_answer_is_a_request_of_its_own_and_may_fail(capsys):
    """A late token of an interrupted answer must not be one of the next."""
    engine = Fake()
    stream_answer(args_of(), engine, [1], BYTES, 9)
    engine.num_steps += 1
    engine.output.error = "out of memory"
    with pytest.raises(RuntimeError, match="out of memory"):
        stream_answer(args_of(), engine, [1], BYTES, 9)
    assert len(set(engine.aborted)) == 2


def test_a_model_cannot_steer_the_terminal(monkeypatch, capsys):
    """
    A terminal shows a picture of each control character, carriage returns too, which would write
    over the line; only line ends and tabs are obeyed. A file gets the text as it is.
    """
    every = "".join(map(chr, range(256)))
    terminal.show(every)
    assert capsys.readouterr().out == every
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    terminal.show(every)
    pictures = [chr(0x2400 + code) for code in range(32)]
    pictures[9], pictures[10] = "\t", "\n"
    expected = [*pictures, *map(chr, range(32, 127)), *["\ufffd"] * 33, *map(chr, range(160, 256))]
    assert capsys.readouterr().out == "".join(expected)


def test_a_slow_engine_says_why(run, monkeypatch):
    """`CC=nocc serve.py --prompt ..` was slow, and said nothing."""
    assert "compiler" not in run("--prompt", "x", "--raw", "--max-tokens", "1").err
    monkeypatch.setenv("CC", "nocc")
    err = run("--prompt", "x", "--raw", "--max-tokens", "1").err
    assert "[torch, as there is no C compiler 'nocc': with gcc it would be two to four times" in err


def test_a_terminal_that_cannot_show_a_character_shows_another(checkpoint, monkeypatch):
    """In the C locale an answer with a \u20ac ended in a UnicodeEncodeError."""
    data = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(data, encoding="ascii"))
    monkeypatch.setattr(terminal, "stream_answer", lambda *_: terminal.show("a\u20acb"))
    flags = ["--model", str(checkpoint), "--prompt", "x", "--raw"]
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    terminal.run(serve.parse_args(flags), lambda args: Mock(**{"device.reason": ""}))
    assert data.getvalue() == b"a?b"


def test_a_question_that_is_interrupted_before_its_answer_is_forgotten(monkeypatch, capsys):
    lines = Mock(side_effect=["one", KeyboardInterrupt, "two", "three", EOFError])
    add_answer = Mock(side_effect=[["one", "yes"], KeyboardInterrupt, []])
    monkeypatch.setattr("builtins.input", lines)
    monkeypatch.setattr(terminal, "add_answer", add_answer)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    terminal.converse(SimpleNamespace(model="m"), None, None)
    asked = [{"role": "user", "content": line} for line in ("one", "two", "three")]
    conversations = [call.args[3] for call in add_answer.call_args_list]
    assert conversations == [asked[:1], ["one", "yes", asked[1]], ["one", "yes", asked[2]]]
    # each Ctrl-C, and at the end Ctrl-D, has a line of its own: the shell's prompt comes next
    assert capsys.readouterr().out == "\n" * 3
