"""
The model at the terminal, with the engine in this process: a text continued, or a conversation.

    python serve.py --prompt "def "       # the answer on stdout, how long it took on stderr
    python serve.py --prompt - < FILE     # all of standard input, exactly
    python serve.py --chat                # line by line; /help lists the commands

Where the checkpoint has a chat template a prompt is a user's message; where it has none, or with
--raw, a prompt is a text to continue. Not run by itself: the flags are in flags.py.
"""

import contextlib
import os
import random
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass

from serving.encoder import Encoder
from serving.params import SamplingParams
from tokenizer import Tokenizer

PLAIN_TOKENS = 200  # length of a continuation: unlike answers of a chat, texts need not end
HELP = """\
/system TEXT   say TEXT to the model before all else; /system alone: nothing
/reset         forget what was said
/exit          end, as Ctrl-D does
Ctrl-C stops an answer. A line that ends with \\ goes on in the next one. //x sends /x."""
# Terminal escape injection: control characters in a model's text would move the cursor, or worse.
# Their pictures (Unicode's Control Pictures) are shown instead.
PICTURES = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}
PICTURES |= dict.fromkeys(range(127, 160), "\ufffd")


def note(text: str):
    """Write to stderr what is not the model's: stdout is for texts."""
    print(f"[{text}]", file=sys.stderr, flush=True)


# --------------------------------------------------------------------------------------------------
# One answer


@dataclass
class Answer:
    """What the model has said to one prompt, so far."""

    text: str
    tokens: list[int]  # without the token that ended the text
    finish_reason: str  # stop, length or interrupted

    def add(self, text: str):
        """Show more of the text."""
        self.text += text
        show(text)


def show(text: str):
    if sys.stdout.isatty():
        text = text.translate(PICTURES)
    print(text, end="", flush=True)


def stream_answer(
    engine, prompt: list[int], params: SamplingParams, tokenizer: Tokenizer, opening: str = ""
) -> Answer:
    """
    Show the opening, then an answer as its tokens come. Ctrl-C ends the answer, not the program;
    its blocks are freed however it ends. Raises ValueError for a request that can never be served
    and RuntimeError for a step that failed.
    """
    # a new id each time: a late token of an interrupted answer is none of the next answer's
    id = f"answer {engine.num_steps}"
    engine.add_request(id, prompt, params)
    stream = tokenizer.stream(prompt)
    answer = Answer("", [], "interrupted")
    show(opening)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            while engine.has_work:
                for output in engine.step():
                    if output.error:
                        raise RuntimeError(output.error)
                    answer.finish_reason = output.finish_reason or answer.finish_reason
                    # whichever token ends a text, it is no part of it
                    tokens = output.tokens[: -1 if output.finish_reason == "stop" else None]
                    answer.tokens += tokens
                    answer.add("".join(map(stream.push, tokens)))
    finally:
        engine.abort(id)
    answer.add(stream.flush())
    show("\n")
    return answer


def usual_tokens(args: Namespace, room: int, with_template: bool) -> int:
    """The length of an answer where no flag says one; `room` is what the context has left."""
    usual = args.sampling.get("max_tokens", room if with_template else PLAIN_TOKENS)
    return min(usual, room)


def answer_with_rate(args: Namespace, engine, prompt: list[int], max_tokens: int, *rest) -> Answer:
    """`stream_answer`, and a note with its speed and the seed that reproduces it."""
    seed = random.SystemRandom().getrandbits(32) if args.seed is None else args.seed
    given = {"temperature": args.temperature, "max_tokens": max_tokens, "seed": seed}
    params = SamplingParams(**args.sampling | given)
    started = time.perf_counter()
    answer = stream_answer(engine, prompt, params, *rest)
    count = len(answer.tokens)
    rate = count / (time.perf_counter() - started)
    cut_off = ", cut off" if answer.finish_reason == "length" else ""
    note(f"{count} tokens, {rate:.1f} a second, seed {seed}{cut_off}")
    return answer


# --------------------------------------------------------------------------------------------------
# One prompt


def open_encoder(args: Namespace) -> tuple[Encoder, bool]:
    """The checkpoint's encoder, and whether its chat template is used. Raises ValueError."""
    encoder = Encoder(args.model, variables=args.default_chat_template_kwargs)
    with_template = encoder.has_chat and not args.raw
    if with_template:
        encoder.check()
    return encoder, with_template


def read_prompt(args: Namespace) -> str:
    """The text of --prompt, or with "-" all of standard input. Raises ValueError."""
    if args.prompt != "-":
        return args.prompt
    try:
        return sys.stdin.buffer.read().decode()  # in text mode line ends would change
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--prompt -: standard input is not UTF-8 ({error}): convert it first"
        ) from None


def continue_prompt(args: Namespace, build_engine: Callable):
    """
    Answer --prompt. Raises ValueError, with what to change, and RuntimeError for a step that
    failed.
    """
    encoder, with_template = open_encoder(args)
    opening = text = read_prompt(args)
    with contextlib.closing(encoder):
        if with_template:
            opening = ""
            prompt = encoder.encode_chat(
                [{"role": "user", "content": text}], add_generation_prompt=True
            )
        else:
            prompt = encoder.encode(text)
    engine = build_engine(args)
    # at least 1: the engine refuses a prompt that is too long, with the numbers
    room = max(1, engine.max_model_len - len(prompt))
    wanted = args.max_tokens or usual_tokens(args, room, with_template)
    answer_with_rate(args, engine, prompt, wanted, encoder.tokenizer, opening)


# --------------------------------------------------------------------------------------------------
# A conversation. Both kinds have the same methods; `prompt` drops what is oldest where the context
# has no room for all.


class Dialogue:
    """Messages, for a chat template."""

    def __init__(self, encoder: Encoder):
        self.encoder = encoder
        self.system = ""
        self.turns: list[dict[str, str]] = []  # the user's and the model's, by turns

    def reset(self):
        self.turns = []

    def add_line(self, text: str):
        self.turns.append({"role": "user", "content": text})

    def remove_line(self):
        self.turns.pop()

    def add_answer(self, answer: Answer):
        self.turns.append({"role": "assistant", "content": answer.text})

    def prompt(self, room: int) -> list[int]:
        """
        The token ids to answer, at most `room`. Oldest messages that do not fit are forgotten, with
        a note. Raises ValueError if the last message alone does not fit.
        """
        system = [{"role": "system", "content": self.system}] if self.system else []
        for first in range(0, len(self.turns), 2):
            ids = self.encoder.encode_chat(system + self.turns[first:], add_generation_prompt=True)
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

    def add_line(self, text: str):
        self.asked = 0
        if text:
            begins = not self.ids
            new = self.encoder.encode(text if begins else "\n" + text, add_special_tokens=begins)
            self.ids += new
            self.asked = len(new)

    def remove_line(self):
        del self.ids[len(self.ids) - self.asked :]

    def add_answer(self, answer: Answer):
        self.ids += answer.tokens

    def prompt(self, room: int) -> list[int]:
        """
        The token ids to continue, at most `room`. If they do not fit, the older part is forgotten,
        with a note. Raises ValueError if the last line alone does not fit.
        """
        if self.asked > room:
            raise ValueError(f"this line has {self.asked} tokens, at most {room} fit: shorten it")
        if len(self.ids) > room:
            # Half is dropped: were it as little as possible, the text would begin elsewhere in each
            # turn, and the prefix cache would never hit.
            kept = max(self.asked, room // 2)
            dropped = len(self.ids) - kept
            note(f"the context is full: the {dropped} oldest tokens of the text are forgotten")
            self.ids = self.ids[-kept:]
        return self.ids


def converse(args: Namespace, build_engine: Callable):
    """
    Read lines and answer them, until /exit or the end of input. Raises ValueError if it cannot
    start.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  `input` then edits lines, and remembers them

    encoder, with_template = open_encoder(args)
    with contextlib.closing(encoder):
        engine = build_engine(args)
        conversation = Dialogue(encoder) if with_template else Text(encoder)
        note(f"{args.model}: /help lists the commands, Ctrl-C stops an answer, Ctrl-D ends")
        if not with_template:
            why = "--raw" if encoder.has_chat else "no chat template"
            note(
                f"{why}: your lines are added to a text that the model continues; an empty line "
                "lets it go on"
            )
        while (line := read_line()) is not None:
            if not line.startswith("/") or line.startswith("//"):
                answer_line(args, engine, conversation, line.removeprefix("/"), encoder.tokenizer)
            elif not run_command(line, conversation):
                break


def read_line() -> str | None:
    """What the user types, None at the end. Ctrl-C forgets a line that was begun."""
    text = ""
    while True:
        prompt = "... " if text else ">>> "
        try:
            text += input(prompt if sys.stdin.isatty() else "")
        except EOFError:
            return None
        except KeyboardInterrupt:
            print()
            note("Ctrl-D or /exit ends")
            text = ""
            continue
        if not text.endswith("\\"):
            return text
        text = text[:-1] + "\n"


def run_command(line: str, conversation: Dialogue | Text) -> bool:
    """Do what a line with a slash says. Returns whether the conversation goes on."""
    command, _, text = line.partition(" ")
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
    elif command != "/exit":
        note(f"there is no {command}; /help lists the commands")
    return command != "/exit"


def answer_line(
    args: Namespace, engine, conversation: Dialogue | Text, line: str, tokenizer: Tokenizer
):
    """Answer a line. One that cannot be answered is forgotten, and a note says why."""
    is_text = isinstance(conversation, Text)
    if not line and not (is_text and conversation.ids):
        return
    limit = engine.max_model_len
    # tokens that the prompt leaves for the answer
    reserve = min(args.max_tokens or PLAIN_TOKENS, limit // 4)
    try:
        conversation.add_line(line)
        prompt = conversation.prompt(limit - reserve)
        room = limit - len(prompt)
        wanted = min(args.max_tokens or usual_tokens(args, room, not is_text), room)
        answer = answer_with_rate(args, engine, prompt, wanted, tokenizer)
    except (ValueError, RuntimeError) as error:
        note(str(error))
        conversation.remove_line()
    except KeyboardInterrupt:  # before there was an answer
        conversation.remove_line()
    else:
        conversation.add_answer(answer)


# --------------------------------------------------------------------------------------------------


def run(args: Namespace, build_engine: Callable):
    """What serve.py does with --prompt or --chat. `build_engine(args)` loads the model."""
    # a terminal that cannot show a character shows another
    sys.stdout.reconfigure(errors="replace")
    try:
        if args.chat:
            converse(args, build_engine)
        else:
            continue_prompt(args, build_engine)
    except BrokenPipeError:  # the reader has ended, as in `| head`
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())  # or Python complains when it flushes
