"""
The terminal: prompts and conversations, with a real engine in this process or, through a pty, in
one of its own.
"""

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
from checkpoint import load_checkpoint, save_checkpoint
from model import GPT, GPTConfig
from serving import terminal
from serving.encoder import Encoder
from serving.params import SamplingParams
from serving.terminal import Answer, Dialogue, Text, stream_answer
from test_paged import assert_idle, new_engine, prompt, trained_model
from tokenizer import TextStream, load_tokenizer
from training.corpus import train_bpe

ROOT = Path(__file__).parents[1]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<answer>{% endif %}{{ mood }}"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """
    Random weights that go on for ever (no token ends a text), a context of 4,000 tokens and a chat
    template. The weights are large, so that each token of the context changes the answer.
    """
    folder = tmp_path_factory.mktemp("terminal")
    tokenizer = train_bpe([(ROOT / "serving" / "terminal.py").read_text()], 300)
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
    """
    Runs `serve.py --model CHECKPOINT ...` here, with what it reads; returns what it wrote and its
    exit message.
    """

    def run(*flags, stdin=b""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as ended:
            serve.main(
                ["--model", str(checkpoint), "--temperature", "0", "--kv-blocks", "300", *flags]
            )
        out, err = capfd.readouterr()
        return SimpleNamespace(out=out, err=err, problem=ended.value.code)

    return run


@pytest.fixture(scope="module")
def continued(checkpoint):
    """What greedy decoding says after some tokens, from the dense model."""
    model = load_checkpoint(checkpoint)
    return lambda ids, count: model.generate(torch.tensor([ids]), count)[0, len(ids) :].tolist()


@pytest.fixture(scope="module")
def expected(checkpoint, continued):
    """What greedy decoding says after a text."""
    tokenizer = load_tokenizer(checkpoint)
    return lambda text, count: tokenizer.decode(continued(tokenizer.encode(text), count))


# --------------------------------------------------------------------------------------------------
# One prompt


def test_a_prompt_goes_through_the_chat_template(run, expected):
    """A chat model was given the bare text, for which it was never trained."""
    found = run("--prompt", "def f", "--max-tokens", "8")
    assert found.problem is None
    assert found.out == expected("<user>def f<answer>", 8) + "\n"


def test_variables_for_the_template(run, expected, checkpoint):
    """Qwen3 thinks aloud unless it is told not to."""
    flags = ("--default-chat-template-kwargs", '{"mood": "<good>"}', "--max-tokens", "8")
    wanted = expected("<user>def f<answer><good>", 8) + "\n"
    assert run("--prompt", "def f", *flags).out == wanted
    assert run("--chat", *flags, stdin=b"def f\n").out.endswith(wanted)


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
    [
        (b"", "the prompt is empty"),
        (b"\xff", "standard input is not UTF-8"),
        (b"x " * 5000, "4000"),
    ],
)
def test_prompts_that_cannot_be_answered_print_nothing(stdin, problem, run):
    found = run("--prompt", "-", "--raw", stdin=stdin)
    assert problem in found.problem and found.out == found.err == ""


def test_the_seed_is_told_and_gives_the_same_text(run):
    """
    Unseeded prompts had the same text at every start; and one that differs each time must be found
    again.
    """
    flags = ("--prompt", "def f", "--max-tokens", "20", "--temperature", "1")
    first, second = run(*flags), run(*flags)
    assert first.out != second.out
    while "cut off" not in first.err:  # a text that ended by itself, one in twenty
        first = run(*flags)
    (seed,) = re.findall(r"^\[20 tokens, [0-9.]+ a second, seed (\d+), cut off\]\n$", first.err)
    assert run(*flags, "--seed", seed).out == first.out
    assert run(*flags, "--seed", str(int(seed) + 1)).out != first.out


def test_a_conversation_with_a_seed_can_be_had_again(run):
    """--seed was ignored, seen by nobody. Another seed, another text."""

    def say(*seed):
        return run(
            "--chat",
            "--raw",
            "--max-tokens",
            "20",
            "--temperature",
            "1",
            *seed,
            stdin=b"one\ntwo\n",
        )

    first, other = say("--seed", "0"), say("--seed", "1")
    assert say("--seed", "0").out == first.out != other.out
    assert first.err.count(", seed 0, cut off]") == 2
    unseeded = say()
    seeds = re.findall(r", seed (\d+)[],]", unseeded.err)  # one in twenty texts ends by itself
    assert len(set(seeds)) == 2 and unseeded.out not in (first.out, other.out)


def test_without_jinja2_raw_text_is_continued_all_the_same(run, monkeypatch, tmp_path):
    """Before the model is loaded, in one message; `--raw` needs no template."""
    (tmp_path / "jinja2.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(serve, "build_engine", lambda args: pytest.fail("the model is loaded"))
        said = run("--prompt", "x").problem
    assert re.search("needs jinja2: `pip install jinja2`, or add --raw", said)
    assert run("--prompt", "x", "--raw", "--max-tokens", "2").problem is None


def test_only_one_of_prompt_and_chat(run, capfd):
    assert run("--prompt", "x", "--chat").problem == 2


def test_a_reader_that_has_enough_ends_it_quietly(checkpoint):
    """`python serve.py --prompt x | head -1` ended in "[Errno 32] Broken pipe"."""
    command = [
        sys.executable,
        "serve.py",
        "--model",
        checkpoint,
        "--prompt",
        "x\n",
        "--raw",
        "--max-tokens",
        "3000",
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, **pipes
    )
    assert process.stdout.readline() == b"x\n"
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(60) == 0
    process.stderr.close()


# --------------------------------------------------------------------------------------------------
# A conversation


def test_each_answer_follows_all_that_was_said(run, expected):
    lines = [
        "/system be brief",
        "one",
        "two",
        "/system",
        "/reset",
        "three",
        "//four",
        "five\\",
        "six",
    ]
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


def test_without_a_template_lines_continue_a_text(run, checkpoint, continued):
    """
    Of tokens: those of an answer, which half a character may end, are what it is continued by.
    """
    found = run("--chat", "--raw", "--max-tokens", "4", stdin=b"\ndef f\n\nreturn\n/exit\nnot read")
    tokenizer, ids, answers = load_tokenizer(checkpoint), [], ""
    for line in ("def f", "", "\nreturn"):
        ids += tokenizer.encode(line)
        answer = continued(ids, 4)
        answers += tokenizer.decode(answer) + "\n"
        ids += answer
    assert found.out == answers
    assert "[--raw: your lines are added to a text that the model continues" in found.err
    assert "empty" not in found.err.partition("go on]")[2]  # the first line asks for nothing
    assert found.err.count("4 tokens") == 3 and found.problem is None


def test_commands(run):
    found = run("--chat", stdin=b"/help\n/hello world\n/reset\n/exit\n")
    assert found.out == "" and found.problem is None
    assert (
        "there is no /hello; /help lists the commands" in found.err and terminal.HELP in found.err
    )


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
    yield Dialogue(encoder)
    encoder.close()


def test_the_oldest_messages_make_room_for_new_ones(chat, capsys):
    """A question and its answer together, the system's message never; only what must."""
    chat.system = "s"
    for i in range(6):
        chat.add_line(f"question {i}")
        chat.prompt(10_000)
        chat.add_answer(Answer(f"answer {i}", [], "stop"))
    chat.add_line("last")
    whole = chat.prompt(10_000)
    assert chat.prompt(len(whole)) == whole and len(chat.turns) == 13  # exactly
    assert capsys.readouterr().err == ""
    ids = chat.prompt(len(whole) - 1)
    assert "2 oldest messages are forgotten" in capsys.readouterr().err
    assert chat.turns[0]["content"] == "question 1" and len(chat.turns) == 11
    assert (
        load_tokenizer(chat.encoder.directory)
        .decode(ids)
        .startswith("<system>s<user>question 1<assistant>")
    )
    with pytest.raises(ValueError, match=r"at most 5 fit"):
        chat.prompt(5)
    assert len(chat.turns) == 11


def test_the_oldest_half_of_a_text_makes_room(capsys):
    text = Text(SimpleNamespace(encode=lambda text, add_special_tokens: list(text.encode())))
    text.add_line("a" * 60)
    text.add_answer(Answer("", [7] * 30, "length"))
    text.add_line("b" * 9)
    assert text.prompt(100) == [*b"a" * 60, *[7] * 30, *b"\n" + b"b" * 9]
    assert text.prompt(99)[-10:] == [*b"\n" + b"b" * 9] and len(text.ids) == 49
    assert "51 oldest tokens" in capsys.readouterr().err
    text.remove_line()
    assert text.ids == [*b"a" * 9, *[7] * 30]
    text.add_line("")
    text.remove_line()  # an empty line added nothing
    assert text.ids == [*b"a" * 9, *[7] * 30]
    text.add_line("c" * 200)
    with pytest.raises(ValueError, match="201 tokens, at most 99 fit"):
        text.prompt(99)


@pytest.mark.parametrize(
    ("answered", "room", "kept"), [(10, 60, 60), (10, 59, 50), (10, 50, 50), (54, 103, 51)]
)
def test_the_last_line_of_a_text_is_kept_whole(answered, room, kept, capsys):
    """Though it is more than half of what fits; and a text that fits exactly is not cut."""
    text = Text(SimpleNamespace(encode=lambda text, add_special_tokens: list(text.encode())))
    text.add_answer(Answer("", [7] * answered, "length"))
    text.add_line("b" * 49)
    prompt = text.prompt(room)
    assert len(prompt) == kept and prompt[-50:] == [*b"\n" + b"b" * 49]
    assert ("forgotten" in capsys.readouterr().err) == (answered + 50 > room)


def test_the_history_has_an_answer_as_it_was_given(chat):
    """Blanks and all, and no message of the system but what was said last."""
    chat.add_line("q")
    chat.add_answer(Answer(" a \n", [], "stop"))
    chat.add_line("r")
    assert chat.turns == [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": " a \n"},
        {"role": "user", "content": "r"},
    ]
    for said, system in (("/system  be brief ", "be brief"), ("/system", ""), ("/system x", "x")):
        assert terminal.run_command(said, chat) and chat.system == system
    terminal.run_command("/reset", chat)
    assert chat.turns == [] and chat.system == "x"  # only what was said is forgotten


def typed(monkeypatch, *lines):
    """Have `input` return these lines, or raise what of them is an exception."""
    rest = iter(lines)

    def read(prompt):
        line = next(rest, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", read)


@pytest.mark.parametrize(
    ("lines", "read"),
    [
        (["a"], ["a"]),
        (["a\\", "b"], ["a\nb"]),
        (["a\\", "b\\", "c", "d"], ["a\nb\nc", "d"]),
        (["a\\", KeyboardInterrupt(), "c"], ["c"]),  # what was begun is forgotten
        ([KeyboardInterrupt(), KeyboardInterrupt(), ""], [""]),
        (["\\", ""], ["\n"]),
    ],
)
def test_lines_that_go_on(lines, read, monkeypatch, capsys):
    typed(monkeypatch, *lines)
    assert [terminal.read_line() for _ in read] == read and terminal.read_line() is None


class Fake:
    """An engine that says `tokens` in one step, and remembers what it was asked."""

    num_steps = 0

    def __init__(
        self, tokens=(120,), max_model_len=1000, interrupted=False, finish_reason="length"
    ):
        self.tokens, self.max_model_len, self.interrupted = list(tokens), max_model_len, interrupted
        self.finish_reason = finish_reason
        self.has_work, self.asked = False, []

    def add_request(self, id, prompt, params):
        if self.interrupted:
            raise KeyboardInterrupt
        self.asked.append((len(prompt), params.max_tokens))
        self.has_work = True

    def step(self):
        self.has_work = False
        return [SimpleNamespace(error=None, tokens=self.tokens, finish_reason=self.finish_reason)]

    def abort(self, id):
        pass


BYTES = SimpleNamespace(stream=lambda prompt: TextStream(lambda token: bytes([token])))


def bytes_text() -> Text:
    return Text(SimpleNamespace(encode=lambda text, add_special_tokens: list(text.encode())))


@pytest.mark.parametrize(
    ("limit", "max_tokens", "reserve", "length_of_text", "length_of_chat"),
    [
        (1000, None, 200, 200, 990),
        (1000, 5, 5, 5, 5),
        (1000, 100, 100, 100, 100),
        (1000, 5000, 250, 990, 990),  # at most a quarter is reserved
        (100, None, 25, 90, 90),
    ],
)
def test_how_long_an_answer_may_be(
    limit, max_tokens, reserve, length_of_text, length_of_chat, capsys
):
    """
    A text's as long as the flag says or 200, a chat's as far as the context goes; both end where
    that does.
    """
    args = SimpleNamespace(max_tokens=max_tokens, temperature=0, seed=None, sampling={})
    for conversation, length in ((bytes_text(), length_of_text), (Dialogue(None), length_of_chat)):
        engine, rooms = Fake(max_model_len=limit), []
        conversation.prompt = lambda room, rooms=rooms: rooms.append(room) or [1] * 10
        terminal.answer_line(args, engine, conversation, "line", BYTES)
        assert rooms == [limit - reserve] and engine.asked == [(10, length)]


@pytest.mark.parametrize(
    ("template", "length", "max_tokens", "asked"),
    [
        (True, 10, None, 990),
        (False, 10, None, 200),
        (False, 900, None, 100),
        (True, 10, 7, 7),
        (False, 999, None, 1),
    ],
)
def test_how_long_the_answer_to_a_prompt_may_be(
    template, length, max_tokens, asked, monkeypatch, capsys
):
    ids = [1] * length
    made = SimpleNamespace(
        encode_chat=lambda *_, **__: ids,
        encode=lambda text: ids,
        close=lambda: None,
        tokenizer=BYTES,
    )
    monkeypatch.setattr(terminal, "open_encoder", lambda args: (made, template))
    engine = Fake()
    args = SimpleNamespace(prompt="p", max_tokens=max_tokens, temperature=0, seed=None, sampling={})
    terminal.continue_prompt(args, lambda args: engine)
    assert (
        engine.asked == [(length, asked)]
        and capsys.readouterr().out == ("" if template else "p") + "x\n"
    )


def test_a_turn_that_is_interrupted_before_an_answer_was_never_said(capsys):
    """Ctrl-C while the prompt is taken in: the line is not in the text, and the program goes on."""
    args, text = SimpleNamespace(max_tokens=5, temperature=0, seed=None, sampling={}), bytes_text()
    terminal.answer_line(args, Fake(interrupted=True), text, "one", BYTES)
    assert text.ids == []
    terminal.answer_line(args, Fake(), text, "two", BYTES)
    assert bytes(text.ids) == b"twox"


def test_half_a_character_at_the_end_is_in_the_answer_as_it_was_shown(capsys):
    """The history of a chat lacked what a terminal had shown."""
    for tokens, text in (("aé".encode()[:-1], "a\ufffd"), ("aé".encode(), "aé")):
        answer = stream_answer(Fake(tokens), [1], GREEDY, BYTES)
        assert answer.text == text and capsys.readouterr().out == text + "\n"


def test_a_terminal_that_cannot_show_a_character_shows_another(monkeypatch):
    """In the C locale an answer with a \u20ac ended in a UnicodeEncodeError."""
    data = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(data, encoding="ascii"))
    monkeypatch.setattr(terminal, "continue_prompt", lambda *_: terminal.show("a\u20acb"))
    terminal.run(SimpleNamespace(chat=False), None)
    assert data.getvalue() == b"a?b"


# --------------------------------------------------------------------------------------------------
# Ctrl-C, and what a terminal shows

SPELL = SimpleNamespace(stream=lambda prompt: TextStream(lambda token: b"x"))
GREEDY = SamplingParams(temperature=0, max_tokens=20)


def test_ctrl_c_stops_an_answer_and_frees_its_blocks(capsys):
    """
    The program goes on: what there is of the answer is kept, and the next one is computed as if
    nothing was.
    """
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
    assert (
        part.finish_reason == "interrupted"
        and part.tokens == whole.tokens[:5]
        and part.text == "xxxxx"
    )
    assert_idle(engine)
    engine.step = step
    assert stream_answer(engine, prompt(0, 10), GREEDY, SPELL).tokens == whole.tokens


def test_the_token_that_ends_a_text_is_not_part_of_it(capsys):
    """Nor is its text: a model may end its texts with a token that has one."""
    for end in b"", b"end":
        engine = Fake([5, 9], finish_reason="stop")
        stream = TextStream(lambda token, end=end: end if token == 9 else b"x")
        spell = SimpleNamespace(stream=lambda prompt, stream=stream: stream)
        answer = stream_answer(engine, [1], GREEDY, spell)
        assert (answer.text, answer.tokens, answer.finish_reason) == ("x", [5], "stop")


def test_a_model_cannot_steer_the_terminal(monkeypatch, capsys):
    """
    Random models say escape codes, hostile ones on purpose; into a file goes what the model said.
    """
    terminal.show("a\x1b[2J\n\t\x9b1m")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    terminal.show("a\x1b[2J\n\t\x9b1m\x7f")
    assert capsys.readouterr().out == "a\x1b[2J\n\t\x9b1m" + "a\u241b[2J\n\t\ufffd1m\ufffd"


def test_every_control_character_has_a_picture(monkeypatch, capsys):
    """
    A carriage return, too: it would write over the line. Only line ends and tabs are what they are.
    """
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    terminal.show("".join(map(chr, range(256))))
    pictures = [chr(0x2400 + code) for code in range(32)]
    pictures[9], pictures[10] = "\t", "\n"
    wanted = [*pictures, *map(chr, range(32, 127)), *["\ufffd"] * 33, *map(chr, range(160, 256))]
    assert capsys.readouterr().out == "".join(wanted)


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
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, start_new_session=True, **streams
        )
        os.close(theirs)
        self.unread = ""

    def type(self, keys: str):
        os.write(self.terminal, keys.encode())

    def read_until(self, end: str, again: str = "") -> str:
        """
        What it wrote since the last call, to `end`; what follows is left for the next. `again` is
        typed each second: readline sees no Ctrl-C that comes just before it begins to wait.
        """
        for _ in range(60):
            while end not in self.unread and select.select([self.terminal], [], [], 1)[0]:
                self.unread += os.read(self.terminal, 65536).decode("utf-8", "replace")
            if end in self.unread:
                text, _, self.unread = self.unread.partition(end)
                return text
            self.type(again)
        raise AssertionError(f"{end!r} does not come after {self.unread!r}")

    def wait_for_text(self):
        """Until it wrote anything that is not read yet."""
        while not self.unread:
            assert select.select([self.terminal], [], [], 60)[0], "it writes nothing"
            self.unread += os.read(self.terminal, 65536).decode("utf-8", "replace")

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.process.kill()
        self.process.wait(10)
        os.close(self.terminal)


def test_a_conversation_at_a_real_terminal(checkpoint):
    """
    Streaming, Ctrl-C in an answer and at the prompt, the arrow that brings the last line back,
    Ctrl-D.
    """
    with Session("--model", str(checkpoint), "--chat") as session:
        session.read_until(">>> ")
        for keys in ("hello\r", "\x1b[A\r"):
            session.type(keys)
            session.read_until("hello\r\n")
            session.wait_for_text()  # an answer has begun, of 3,900 tokens
            session.type("\x03")
            note = session.read_until(">>> ")
            assert (
                0 < int(re.search(r"\[(\d+) tokens, [0-9.]+ a second, seed \d+\]", note)[1]) < 3900
            )
        session.type("half a line\x03")
        session.read_until("[Ctrl-D or /exit ends]", again="\x03")
        session.read_until(">>> ")
        session.type("\x04")
        assert session.process.wait(30) == 0
