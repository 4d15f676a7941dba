"""
The terminal: prompts and conversations. The engine answers with its prompt, which shows what it was
asked. test_end_to_end.py has a real engine and a real Ctrl-C.
"""

import io
import json
import re
import signal
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from browser import save_random_model
from processes import RUN

import serve
from common import end_with_one_line
from params import SamplingParams
from server import terminal
from training.corpus import bpe_tokenizer

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<answer>{% endif %}{{ mood }}"


class Echo:
    """
    An engine that answers with its prompt, one byte per step. "." ends a text, "!" stands for
    Ctrl-C, and "#" is a step that fails.
    """

    max_model_len = 100
    device = SimpleNamespace(reason="")

    def __init__(self):
        self.added = []
        self.aborted = []
        self.to_come = []

    @property
    def has_work(self) -> bool:
        return bool(self.to_come)

    def add_request(self, id, prompt, params):
        if len(prompt) > self.max_model_len:
            raise ValueError("the prompt is too long")
        assert self.aborted == [id] * len(self.added), "the id is still in use"
        self.added.append(params)
        self.to_come = prompt[: params.max_tokens]

    def step(self) -> list:
        token, *self.to_come = self.to_come
        if token == ord("!"):
            raise KeyboardInterrupt
        reason = None if self.to_come else "length"
        output = SimpleNamespace(tokens=[token], finish_reason=reason, error=None)
        if token == ord("."):
            output.finish_reason = "stop"
            self.to_come = []
        if token == ord("#"):
            output.error = "out of memory"
        return [output]

    def abort(self, id):
        self.to_come = []
        self.aborted.append(id)


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """
    Return a function that runs `serve.py --model DIR ..` in this process, where DIR has a chat
    template. It returns the output, the exit message, whether the model was loaded, and the
    parameters of the requests.
    """
    bpe_tokenizer([]).save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)

    def run(*flags, stdin=b""):
        engine = Echo()
        build = Mock(return_value=engine)
        monkeypatch.setattr(serve, "build_engine", build)
        monkeypatch.setattr(signal, "signal", lambda *_: None)  # pytest keeps its own SIGPIPE
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        monkeypatch.setattr(sys, "excepthook", None)  # end_with_one_line sets it
        end_with_one_line()  # as the command does
        with pytest.raises(SystemExit) as ended:
            serve.main(["--model", str(tmp_path), *flags])
        out, err = capfd.readouterr()
        # an answer's blocks are freed, however it ends
        assert engine.aborted == ["answer"] * len(engine.added)
        seen = {"built": build.called, "params": engine.added}
        return SimpleNamespace(out=out, err=err, problem=ended.value.code, **seen)

    return run


# --------------------------------------------------------------------------------------------------
# Answers, from the command line to stdout

MOOD = ["--default-chat-template-kwargs", '{"mood": "<good>"}']
LINES = "a\r\n\r\n  b = '\u20ac'\n"


@pytest.mark.parametrize(
    ("flags", "stdin", "out", "count", "end"),
    [
        (["--prompt", "def f"], "", "<user>def f<answer>\n", "19 tokens", "length"),
        (["--prompt", "def f", "--raw"], "", "def fdef f\n", "5 tokens", "length"),
        # all of it, exactly
        (["--prompt", "-", "--raw"], LINES, f"{LINES}{LINES}\n", "17 tokens", "length"),
        # an empty line asks nothing
        (["--chat", *MOOD], "\ndef f\n", "<user>def f<answer><good>\n", "25 tokens", "length"),
        # the half character that was shown is kept
        (["--prompt", "é", "--raw", "--max-tokens", "1"], "", "é\ufffd\n", "1 token", "length"),
        # the token that ends a text is not part of it
        (["--prompt", "ab.c", "--raw"], "", "ab.cab\n", "2 tokens", "stop"),
        (["--prompt", "ab!c", "--raw"], "", "ab!cab\n", "2 tokens", "interrupted"),
    ],
)
def test_answers(run, flags, stdin, out, count, end):
    """The note has the seed that reproduces them."""
    result = run(*flags, stdin=stdin.encode())
    assert result.out == out
    assert result.problem is None
    (params,) = result.params
    note = rf"\[{count}, [0-9.]+ a second, seed {params.seed}, end: {end}\]"
    assert re.fullmatch(rf"loading .*\n(\[.* Ctrl-D ends\]\n)?{note}\n", result.err)


@pytest.mark.parametrize(
    ("length", "answer"),
    [(20, "<user>one<assistant><user"), (21, f"<user>2\ufffd{'x' * 21}<answer>")],
)
def test_each_answer_follows_the_conversation(run, length, answer):
    """
    A message is forgotten if its answer fails, or if it does not fit into the context. Bytes that
    are not UTF-8 are read. Beyond three quarters of the context the conversation restarts.
    """
    result = run("--chat", stdin=b"#\none\n%b\n2\xff%b" % (100 * b"x", length * b"x"))
    assert result.out == f"<user><user>one<answer>\n{answer}\n"
    assert "[out of memory]" in result.err
    assert "[the prompt is too long]" in result.err
    assert len({params.seed for params in result.params}) == 3


@pytest.mark.parametrize(
    ("flags", "stdin", "problem"),
    [
        (["--prompt", "-"], b"\xff", "standard input is not UTF-8"),
        (["--prompt", "-"], b"x" * 100, "the prompt is too long"),
        (["--prompt", "", "--raw"], b"", "the prompt is empty: give it at least one token"),
        (["--chat", "--raw"], b"", "--chat needs a chat template, "),
    ],
)
def test_refusals_print_nothing_else(run, flags, stdin, problem):
    result = run(*flags, stdin=stdin)
    assert problem in result.problem
    assert result.out == ""
    assert result.err.count("\n") == 1
    assert result.err.startswith("loading ")


def test_without_jinja2_raw_text_is_continued_all_the_same(run, monkeypatch):
    """The message comes before the model is loaded; `--raw` needs no template."""
    monkeypatch.setitem(sys.modules, "jinja2", None)
    refused = run("--prompt", "x")
    assert "needs jinja2: run `pip install jinja2`, or add --raw" in refused.problem
    assert not refused.built
    assert run("--prompt", "x", "--raw").problem is None


def test_a_slow_engine_says_why(run, tmp_path, monkeypatch):
    """Previously `CC=nocc serve.py --prompt ..` was slow and did not say why."""
    monkeypatch.setenv("CC", "nocc")
    model = save_random_model(tmp_path / "slow")
    args = serve.parse_args(["--model", str(model), "--device", "cpu"])
    monkeypatch.setattr(Echo, "device", serve.build_engine(args).device)
    slow = "[torch, because there is no C compiler 'nocc': gcc would make it two to six times"
    assert slow in run("--prompt", "x").err


def test_a_terminal_that_cannot_show_a_character_shows_another(run, monkeypatch):
    """Previously, in the C locale, an answer with a \u20ac ended in a UnicodeEncodeError."""
    data = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(data, encoding="ascii"))
    run("--prompt", "a\u20ac", "--raw")
    assert data.getvalue() == b"a?a?\n"


def test_a_disk_that_is_full_is_named(run, monkeypatch):
    """Previously `serve.py --prompt x > FILE` ended in "[Errno 28] No space left on device"."""
    error = OSError(28, "No space left on device")
    monkeypatch.setattr(sys, "stdout", Mock(**{"write.side_effect": error}))
    problem = run("--prompt", "x", "--raw").problem
    assert problem == "standard output cannot be written: No space left on device"


def test_a_reader_that_has_enough_ends_it_quietly(tmp_path):
    """
    Previously `python serve.py --prompt x | head -1` ended in "[Errno 32] Broken pipe". This model
    does not happen to end its text early.
    """
    model = save_random_model(tmp_path, context_length=4096)
    command = [sys.executable, "serve.py", "--model", model, "--prompt", "x\n", "--raw"]
    command += ["--max-tokens", "3000"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **RUN, **pipes) as process:
        assert process.stdout.readline() == "x\n"
        process.stdout.close()
        assert process.stderr.read().count("\n") == 1
    assert process.returncode == -signal.SIGPIPE


# --------------------------------------------------------------------------------------------------
# The parts


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
    flags = {"max_tokens": None, "temperature": 0.5, "seed": 3, "sampling": sampling} | typed
    engine = Echo()
    engine.max_model_len = room + 2
    args = SimpleNamespace(**flags)
    text = terminal.stream_answer(args, engine, [97, 195], bpe_tokenizer([]), 200)
    assert text == "a\ufffd"  # what was shown, including half a character
    own = {"max_tokens": length, "temperature": temperature, "seed": flags["seed"]}
    (params,) = engine.added
    assert params == SamplingParams(**sampling | own)


def test_a_model_cannot_steer_the_terminal(monkeypatch, capsys):
    """
    A terminal shows a picture of each control character. This includes carriage returns, which
    would overwrite the line. Only line ends and tabs take effect. A file gets the text unchanged.
    """
    every = "".join(map(chr, range(256)))
    terminal.show(every)
    assert capsys.readouterr().out == every
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    terminal.show(every)
    pictures = "␀␁␂␃␄␅␆␇␈\t\n␋␌␍␎␏␐␑␒␓␔␕␖␗␘␙␚␛␜␝␞␟"
    expected = pictures + every[32:127] + 33 * "\ufffd" + every[160:]
    assert capsys.readouterr().out == expected


def test_a_question_that_is_interrupted_before_its_answer_is_forgotten(monkeypatch, capsys):
    lines = Mock(side_effect=["one", KeyboardInterrupt, "two", "three", EOFError])
    add_answer = Mock(side_effect=[["so far"], KeyboardInterrupt, []])
    monkeypatch.setattr("builtins.input", lines)
    monkeypatch.setattr(terminal, "add_answer", add_answer)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    terminal.converse(SimpleNamespace(model="m"), None, None)
    one, two, three = ({"role": "user", "content": line} for line in ("one", "two", "three"))
    conversations = [call.args[3] for call in add_answer.call_args_list]
    assert conversations == [[one], ["so far", two], ["so far", three]]
    # each Ctrl-C, and the final Ctrl-D, ends its line, because the shell's prompt comes next
    assert capsys.readouterr().out == "\n" * 3
