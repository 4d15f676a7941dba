"""The terminal: prompts and conversations, with a real engine in this process or, through a pty, in one of its own."""

import io
import os
import pty
import re
import select
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import serve
import terminal
from encoder import Encoder
from model import GPT, GPTConfig, load_checkpoint, save_checkpoint
from sampling import SamplingParams
from terminal import Answer, Chat, Text, stream_answer
from test_paged import assert_idle, new_engine, prompt, trained_model
from tokenizer import TextStream, load_tokenizer, train_bpe

ROOT = Path(__file__).parents[1]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<answer>"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Random weights that go on for ever (no token ends a text), a context of 4,000 tokens and a chat template."""
    folder = tmp_path_factory.mktemp("terminal")
    tokenizer = train_bpe([(ROOT / "terminal.py").read_text()], 300)
    tokenizer.save(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    torch.manual_seed(0)
    save_checkpoint(GPT(GPTConfig(tokenizer.vocab_size, 4000, n_layer=1, n_head=2, n_embd=32)), folder)
    return folder


@pytest.fixture
def run(checkpoint, monkeypatch, capfd):
    """Runs `serve.py --model CHECKPOINT ...` here, with what it reads; returns what it wrote and its exit message."""

    def run(*flags, stdin=b""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as ended:
            serve.main(["--model", str(checkpoint), "--temperature", "0", "--kv-blocks", "300", *flags])
        out, err = capfd.readouterr()
        return SimpleNamespace(out=out, err=err, problem=ended.value.code)

    return run


@pytest.fixture(scope="module")
def expected(checkpoint):
    """What greedy decoding says after a text, from the dense model."""
    model, tokenizer = load_checkpoint(checkpoint), load_tokenizer(checkpoint)

    def generate(text: str, count: int) -> str:
        ids = tokenizer.encode(text)
        return tokenizer.decode(model.generate(torch.tensor([ids]), count)[0, len(ids) :].tolist())

    return generate


# ----------------------------------------------------------------------------------------------------------------------
# One prompt


def test_a_prompt_goes_through_the_chat_template(run, expected):
    """A chat model was given the bare text, for which it was never trained."""
    found = run("--prompt", "def f", "--max-tokens", "8")
    assert found.problem is None
    assert found.out == expected("<user>def f<answer>", 8) + "\n"


def test_a_raw_prompt_is_continued(run, expected):
    found = run("--prompt", "def f", "--raw", "--max-tokens", "8")
    assert found.out == "def f" + expected("def f", 8) + "\n"


def test_standard_input_is_the_prompt_whole_and_exactly(run, expected):
    """`--prompt -` continued the text "-"."""
    text = "a\r\n\r\n  b = '\u20ac'\n"
    found = run("--prompt", "-", "--raw", "--max-tokens", "8", stdin=text.encode())
    assert found.out == text + expected(text, 8) + "\n"


@pytest.mark.parametrize(
    ("stdin", "problem"),
    [(b"", "the prompt is empty"), (b"\xff", "standard input is not UTF-8"), (b"x " * 5000, "4000")],
)
def test_prompts_that_cannot_be_answered_print_nothing(stdin, problem, run):
    found = run("--prompt", "-", "--raw", stdin=stdin)
    assert problem in found.problem and found.out == found.err == ""


def test_the_seed_is_told_and_gives_the_same_text(run):
    """Unseeded prompts had the same text at every start; and one that differs each time must be found again."""
    flags = ("--prompt", "def f", "--max-tokens", "20", "--temperature", "1")
    first, second = run(*flags), run(*flags)
    assert first.out != second.out
    (seed,) = re.findall(r"^\[20 tokens, [0-9.]+ a second, seed (\d+), cut off\]\n$", first.err)
    assert run(*flags, "--seed", seed).out == first.out


def test_without_jinja2_raw_text_is_continued_all_the_same(run, monkeypatch):
    """Before the model is loaded, in one message; `--raw` needs no template."""
    monkeypatch.setattr(terminal.importlib.util, "find_spec", lambda name: None)
    assert re.search("needs jinja2: `pip install jinja2`, or add --raw", run("--prompt", "x").problem)
    assert run("--prompt", "x", "--raw", "--max-tokens", "2").problem is None


def test_only_one_of_prompt_and_chat(run, capfd):
    assert run("--prompt", "x", "--chat").problem == 2


def test_a_reader_that_has_enough_ends_it_quietly(checkpoint):
    """`python serve.py --prompt x | head -1` ended in "[Errno 32] Broken pipe"."""
    command = [sys.executable, "serve.py", "--model", checkpoint, "--prompt", "x\n", "--raw", "--max-tokens", "3000"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, **pipes)
    assert process.stdout.readline() == b"x\n"
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(60) == 0
    process.stderr.close()


# ----------------------------------------------------------------------------------------------------------------------
# A conversation


def test_each_answer_follows_all_that_was_said(run, expected):
    lines = ["/system be brief", "one", "two", "/system", "/reset", "three", "//four", "five\\", "six"]
    found = run("--chat", "--max-tokens", "4", stdin="\n".join(lines).encode())
    conversations = [("<system>be brief", ["one", "two"]), ("", ["three", "/four", "five\nsix"])]
    answers = ""
    for text, questions in conversations:
        for question in questions:
            text += f"<user>{question}"
            answer = expected(text + "<answer>", 4)
            answers += answer + "\n"
            text += f"<assistant>{answer}"
    assert found.out == answers and found.problem is None


def test_without_a_template_lines_continue_a_text(run, expected):
    found = run("--chat", "--raw", "--max-tokens", "4", stdin=b"\ndef f\n\nreturn\n/exit\nnot read")
    text, answers = "", ""
    for line in ("def f", "", "\nreturn"):
        text += line
        answer = expected(text, 4)
        answers += answer + "\n"
        text += answer
    assert found.out == answers
    assert "your lines are added to a text that the model continues" in found.err
    assert found.err.count("4 tokens") == 3 and found.problem is None


def test_commands(run):
    found = run("--chat", stdin=b"/help\n/hello world\n/reset\n/exit\n")
    assert found.out == "" and found.problem is None
    assert "there is no /hello; /help lists the commands" in found.err and terminal.HELP in found.err


def test_a_message_that_fits_no_context_is_said_and_forgotten(run, expected):
    """And what was said before is still there."""
    long = "x " * 5000
    found = run("--chat", "--max-tokens", "4", stdin=f"one\n{long}\ntwo\n".encode())
    first = expected("<user>one<answer>", 4)
    second = expected(f"<user>one<assistant>{first}<user>two<answer>", 4)
    assert found.out == f"{first}\n{second}\n"
    assert "at most 3996 fit: shorten it" in found.err and "forgotten" not in found.err


@pytest.fixture
def chat(checkpoint):
    encoder = Encoder(checkpoint)
    yield Chat(encoder)
    encoder.close()


def test_the_oldest_messages_make_room_for_new_ones(chat, capsys):
    """A question and its answer together, the system's message never; only what must."""
    chat.system = "s"
    for i in range(6):
        chat.ask(f"question {i}")
        chat.prompt(10_000)
        chat.answered(Answer(f"answer {i}", [], "stop"))
    chat.ask("last")
    whole = chat.prompt(10_000)
    assert capsys.readouterr().err == ""
    ids = chat.prompt(len(whole) - 1)
    assert "2 oldest messages are forgotten" in capsys.readouterr().err
    assert chat.turns[0]["content"] == "question 1" and len(chat.turns) == 11
    assert load_tokenizer(chat.encoder.directory).decode(ids).startswith("<system>s<user>question 1<assistant>")
    with pytest.raises(ValueError, match=r"at most 5 fit"):
        chat.prompt(5)
    assert len(chat.turns) == 11


def test_the_oldest_half_of_a_text_makes_room(capsys):
    text = Text(SimpleNamespace(encode=lambda text: list(text.encode())))
    text.ask("a" * 60)
    text.answered(Answer("", [7] * 30, "length"))
    text.ask("b" * 9)
    assert text.prompt(100) == [*b"a" * 60, *[7] * 30, *b"\n" + b"b" * 9]
    assert text.prompt(99)[-10:] == [*b"\n" + b"b" * 9] and len(text.ids) == 49
    assert "51 oldest tokens" in capsys.readouterr().err
    text.take_back()
    assert text.ids == [*b"a" * 9, *[7] * 30]
    text.ask("c" * 200)
    with pytest.raises(ValueError, match="201 tokens, at most 99 fit"):
        text.prompt(99)


# ----------------------------------------------------------------------------------------------------------------------
# Ctrl-C, and what a terminal shows

SPELL = SimpleNamespace(token_bytes=lambda token: b"x")
GREEDY = SamplingParams(temperature=0, max_tokens=20)


def test_ctrl_c_stops_an_answer_and_frees_its_blocks(capsys):
    """The program goes on: what there is of the answer is kept, and the next one is computed as if nothing was."""
    engine = new_engine(trained_model())
    whole = stream_answer(engine, prompt(0, 10), GREEDY, SPELL)
    step = engine.step

    def interrupted():
        if engine.num_steps == before + 5:
            raise KeyboardInterrupt
        return step()

    before = engine.num_steps
    engine.step = interrupted
    part = stream_answer(engine, prompt(0, 10), GREEDY, SPELL)
    assert part.finish_reason == "interrupted" and part.tokens == whole.tokens[:5] and part.text == "xxxxx"
    assert_idle(engine)
    engine.step = step
    assert stream_answer(engine, prompt(0, 10), GREEDY, SPELL).tokens == whole.tokens


def test_the_token_that_ends_a_text_is_not_part_of_it(capsys):
    answer = Answer("", [], "interrupted")
    output = SimpleNamespace(error=None, tokens=[5, 9], finish_reason="stop")
    terminal.add_output(answer, output, TextStream(lambda token: b"" if token == 9 else b"x"))
    assert (answer.text, answer.tokens, answer.finish_reason) == ("x", [5], "stop")


def test_a_model_cannot_steer_the_terminal(monkeypatch, capsys):
    """Random models say escape codes, hostile ones on purpose; into a file goes what the model said."""
    terminal.show("a\x1b[2J\n\t\x9b1m")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    terminal.show("a\x1b[2J\n\t\x9b1m\x7f")
    assert capsys.readouterr().out == "a\x1b[2J\n\t\x9b1m" + "a\u241b[2J\n\t\ufffd1m\ufffd"


# Typed Ctrl-C goes to the process whose terminal it is: serve.py must first make this one its own.
OWN_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Session:
    """serve.py on a terminal of its own, which turns typed Ctrl-C and Ctrl-D into what they are."""

    def __init__(self, *flags):
        self.terminal, theirs = pty.openpty()
        command = [sys.executable, "-c", OWN_TERMINAL, sys.executable, "serve.py", *flags]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TERM": "dumb"}
        streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **streams)
        os.close(theirs)
        self.unread = ""

    def type(self, keys: str):
        os.write(self.terminal, keys.encode())

    def read_until(self, end: str, again: str = "") -> str:
        """What it wrote since the last call, to `end`; what follows is left for the next. `again` is typed each second:
        readline sees no Ctrl-C that comes just before it begins to wait."""
        for _ in range(60):
            while end not in self.unread and select.select([self.terminal], [], [], 1)[0]:
                self.unread += os.read(self.terminal, 65536).decode("utf-8", "replace")
            if end in self.unread:
                text, _, self.unread = self.unread.partition(end)
                return text
            self.type(again)
        raise AssertionError(f"{end!r} does not come after {self.unread!r}")

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.process.kill()
        self.process.wait(10)
        os.close(self.terminal)


def test_a_conversation_at_a_real_terminal(checkpoint):
    """Streaming, Ctrl-C in an answer and at the prompt, the arrow that brings the last line back, Ctrl-D."""
    with Session("--model", str(checkpoint), "--chat") as session:
        session.read_until(">>> ")
        for keys in ("hello\r", "\x1b[A\r"):
            session.type(keys)
            session.read_until("hello\r\n")
            assert "tokens" not in session.read_until("a")  # an answer has begun, of 3,900 tokens
            session.type("\x03")
            note = session.read_until(">>> ")
            assert 0 < int(re.search(r"\[(\d+) tokens, [0-9.]+ a second, seed \d+\]", note)[1]) < 3900
        session.type("half a line\x03")
        session.read_until("[Ctrl-D or /exit ends]", again="\x03")
        session.read_until(">>> ")
        session.type("\x04")
        assert session.process.wait(30) == 0
