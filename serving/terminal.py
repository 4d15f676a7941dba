"""
The model at the terminal, with the engine in this process: a text continued, or a conversation.

    python serve.py --prompt "def "       # the answer on stdout, how long it took on stderr
    python serve.py --prompt - < FILE     # all of standard input, exactly
    python serve.py --chat                # line by line; /help says what else there is

A prompt is a user's message where the checkpoint has a chat template, and a text to continue where
it has none or `--raw` says so. Not run by itself: serve.py has the flags.
"""

import argparse
import contextlib
import importlib.util
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from serving.encoder import Encoder
from tokenizer import TextStream, Tokenizer

PLAIN_TOKENS = 200  # length of a continuation: only chats are sure to come to an end of their own
HELP = """\
/system TEXT   say TEXT to the model before all else; /system alone: nothing
/reset         forget what was said
/exit          end, as Ctrl-D does
Ctrl-C stops an answer. A line that ends with \\ goes on in the next one. //x sends /x."""
# Control characters in a model's text would move the cursor, or worse: a terminal shows their
# pictures.
PICTURES = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}
PICTURES |= dict.fromkeys(range(127, 160), "\ufffd")


def note(text: str):
    """What is not the model's, on stderr: stdout is for texts."""
    print(f"[{text}]", file=sys.stderr, flush=True)


# --------------------------------------------------------------------------------------------------
# One answer


@dataclass
class Answer:
    text: str
    tokens: list[int]  # without one that ended the text
    finish_reason: str  # stop, length or interrupted


def show(text: str):
    if sys.stdout.isatty():
        text = text.translate(PICTURES)
    print(text, end="", flush=True)


def stream_answer(
    engine, prompt: list[int], params, tokenizer: Tokenizer, opening: str = ""
) -> Answer:
    """
    Show the opening, then an answer as its tokens come. Ctrl-C ends it, not the program; however it
    ends, its blocks are free. Raises ValueError for what can never be answered and RuntimeError for
    a step that failed.
    """
    id = f"answer {engine.num_steps}"  # a late token of an interrupted one must not find the next
    engine.add_request(id, prompt, params)
    stream = TextStream(tokenizer.token_bytes)
    answer = Answer("", [], "interrupted")
    show(opening)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            while engine.has_work:
                for output in engine.step():
                    add_output(answer, output, stream)
    finally:
        engine.abort(id)
    rest = stream.flush()
    show(rest + "\n")
    answer.text += rest
    return answer


def add_output(answer: Answer, output, stream: TextStream):
    if output.error:
        raise RuntimeError(output.error)
    text = "".join(map(stream.push, output.tokens))
    answer.text += text
    answer.tokens += output.tokens
    if output.finish_reason:
        answer.finish_reason = output.finish_reason
    if output.finish_reason == "stop":
        answer.tokens.pop()
    show(text)


def answer_with_rate(
    args: argparse.Namespace, engine, prompt: list[int], max_tokens: int, *rest
) -> Answer:
    """`stream_answer`, and a note of how fast it was and of the seed that gives it again."""
    from serving.params import SamplingParams

    seed = random.SystemRandom().getrandbits(32) if args.seed is None else args.seed
    params = SamplingParams(temperature=args.temperature, max_tokens=max_tokens, seed=seed)
    started = time.perf_counter()
    answer = stream_answer(engine, prompt, params, *rest)
    rate = len(answer.tokens) / (time.perf_counter() - started)
    cut_off = ", cut off" if answer.finish_reason == "length" else ""
    note(f"{len(answer.tokens)} tokens, {rate:.1f} a second, seed {seed}{cut_off}")
    return answer


# --------------------------------------------------------------------------------------------------
# One prompt


def open_encoder(args: argparse.Namespace) -> tuple[Encoder, bool]:
    """The checkpoint's encoder, and whether its chat template is to be used. Raises ValueError."""
    encoder = Encoder(args.model)
    with_template = encoder.has_chat and not args.raw
    if with_template and importlib.util.find_spec("jinja2") is None:
        raise ValueError(
            "this checkpoint has a chat template, which needs jinja2: `pip install jinja2`, or add --raw to have text "
            "continued as it stands"
        )
    return encoder, with_template


def read_prompt(args: argparse.Namespace) -> str:
    """The text of --prompt, or with "-" all of standard input. Raises ValueError."""
    if args.prompt != "-":
        return args.prompt
    try:
        return sys.stdin.buffer.read().decode()  # bytes: in text mode line ends would change
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--prompt -: standard input is not UTF-8 ({error}): convert it first"
        ) from None


def continue_prompt(args: argparse.Namespace, build_engine: Callable):
    """
    Answer --prompt. Raises ValueError, with what to change, and RuntimeError for a step that
    failed.
    """
    encoder, with_template = open_encoder(args)
    with contextlib.closing(encoder):
        text = read_prompt(args)
        if with_template:
            prompt = encoder.chat([{"role": "user", "content": text}], add_generation_prompt=True)
        else:
            prompt = encoder.encode(text)
    engine = build_engine(args)
    room = max(
        1, engine.max_model_len - len(prompt)
    )  # the engine refuses what is too long, with the numbers
    usual = room if with_template else min(PLAIN_TOKENS, room)
    opening = "" if with_template else text
    answer_with_rate(args, engine, prompt, args.max_tokens or usual, encoder.tokenizer, opening)


# --------------------------------------------------------------------------------------------------
# A conversation. Both kinds have the same methods; `prompt` leaves out what is oldest if there is
# no room for all.


class Chat:
    """Messages, for a chat template."""

    def __init__(self, encoder: Encoder):
        self.encoder = encoder
        self.system = ""
        self.turns: list[dict[str, str]] = []  # the user's and the model's, by turns

    def reset(self):
        self.turns = []

    def ask(self, text: str):
        self.turns.append({"role": "user", "content": text})

    def take_back(self):
        self.turns.pop()

    def answered(self, answer: Answer):
        self.turns.append({"role": "assistant", "content": answer.text})

    def prompt(self, room: int) -> list[int]:
        """
        The tokens to answer, at most `room`. Raises ValueError if the last message alone has more.
        """
        system = [{"role": "system", "content": self.system}] if self.system else []
        for first in range(0, len(self.turns), 2):
            ids = self.encoder.chat(system + self.turns[first:], add_generation_prompt=True)
            if len(ids) <= room:
                if first:
                    note(f"the context is full: the {first} oldest messages are forgotten")
                self.turns = self.turns[first:]
                return ids
        raise ValueError(
            f"this message makes a prompt of {len(ids)} tokens, at most {room} fit: shorten it"
        )


class Text:
    """A text that user and model write together, where there is no template."""

    def __init__(self, encoder: Encoder):
        self.encoder = encoder
        self.reset()

    def reset(self):
        self.ids: list[int] = []
        self.asked = 0  # tokens that the user's last line added

    def ask(self, text: str):
        self.asked = 0
        if text:
            new = self.encoder.encode("\n" + text if self.ids else text)
            self.ids += new
            self.asked = len(new)

    def take_back(self):
        del self.ids[len(self.ids) - self.asked :]

    def answered(self, answer: Answer):
        self.ids += answer.tokens

    def prompt(self, room: int) -> list[int]:
        """
        The tokens to continue, at most `room`. Raises ValueError if the last line alone has more.
        """
        if self.asked > room:
            raise ValueError(f"this line has {self.asked} tokens, at most {room} fit: shorten it")
        if len(self.ids) > room:
            kept = max(
                self.asked, room // 2
            )  # half, or it would be cut, and its prefix computed, each time
            note(
                f"the context is full: the {len(self.ids) - kept} oldest tokens of the text are forgotten"
            )
            self.ids = self.ids[-kept:]
        return self.ids


def converse(args: argparse.Namespace, build_engine: Callable):
    """
    Read lines and answer them, until /exit or the end of input. Raises ValueError if it cannot
    start.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  `input` then edits lines, and remembers them

    encoder, with_template = open_encoder(args)
    with contextlib.closing(encoder):
        engine = build_engine(args)
        conversation = Chat(encoder) if with_template else Text(encoder)
        note(f"{args.model}: /help lists the commands, Ctrl-C stops an answer, Ctrl-D ends")
        if not with_template:
            why = "--raw" if encoder.has_chat else "no chat template"
            note(
                f"{why}: your lines are added to a text that the model continues; an empty line lets it go on"
            )
        while (line := read_line()) is not None:
            if line.startswith("/") and not line.startswith("//"):
                if not run_command(line, conversation):
                    break
            else:
                take_turn(args, engine, conversation, line.removeprefix("/"), encoder.tokenizer)


def read_line() -> str | None:
    """What the user types, None at the end. Ctrl-C forgets a line that was begun."""
    lines = []
    while True:
        prompt = "... " if lines else ">>> "
        try:
            line = input(prompt if sys.stdin.isatty() else "")
        except EOFError:
            return None
        except KeyboardInterrupt:
            print()
            note("Ctrl-D or /exit ends")
            lines = []
            continue
        if not line.endswith("\\"):
            return "\n".join([*lines, line])
        lines.append(line[:-1])


def run_command(line: str, conversation: Chat | Text) -> bool:
    """Do what a line with a slash says. False if that is to end."""
    command, _, text = line.partition(" ")
    if command == "/exit":
        return False
    if command == "/help":
        print(HELP, file=sys.stderr)
    elif command == "/reset":
        conversation.reset()
        note("all forgotten")
    elif command == "/system" and isinstance(conversation, Text):
        note("there is no chat template in use, so nothing to tell the system")
    elif command == "/system":
        conversation.system = text.strip()
        note("heard from the next answer on" if conversation.system else "no system message")
    else:
        note(f"there is no {command}; /help lists the commands")
    return True


def take_turn(
    args: argparse.Namespace, engine, conversation: Chat | Text, line: str, tokenizer: Tokenizer
):
    """Answer a line. One that cannot be answered is said why and is not in the conversation."""
    if not line and not (isinstance(conversation, Text) and conversation.ids):
        return
    limit = engine.max_model_len
    reserve = min(
        args.max_tokens or PLAIN_TOKENS, limit // 4
    )  # at least so much room is an answer's
    try:
        conversation.ask(line)
        prompt = conversation.prompt(limit - reserve)
        room = limit - len(prompt)
        usual = PLAIN_TOKENS if isinstance(conversation, Text) else room
        answer = answer_with_rate(
            args, engine, prompt, min(args.max_tokens or usual, room), tokenizer
        )
    except (ValueError, RuntimeError) as error:
        note(str(error))
        conversation.take_back()
    except KeyboardInterrupt:  # before there was an answer
        conversation.take_back()
    else:
        conversation.answered(answer)


# --------------------------------------------------------------------------------------------------


def run(args: argparse.Namespace, build_engine: Callable):
    """What serve.py does with --prompt or --chat. `build_engine(args)` loads the model."""
    sys.stdout.reconfigure(
        errors="replace"
    )  # a terminal that cannot show a character shows another
    try:
        if args.chat:
            converse(args, build_engine)
        else:
            continue_prompt(args, build_engine)
    except BrokenPipeError:  # whoever read has enough, as in `| head`
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # or Python complains when it flushes
