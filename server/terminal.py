"""
Runs the model at the terminal: answers one prompt, or holds a conversation. The engine runs in this
process.

    python serve.py --prompt "def"        # prints the answer to stdout, its speed to stderr
    python serve.py --prompt - < FILE     # the prompt is all of standard input, unchanged
    python serve.py --chat                # reads lines; Ctrl-C stops an answer, Ctrl-D ends

If the checkpoint has a chat template, a prompt is a user's message. Otherwise, or with --raw, the
prompt is a text to continue. Not run by itself: the flags are in serve.py.
"""

import contextlib
import secrets
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Callable

from common import plural
from params import SamplingParams
from server.text import Chat, load_chat
from tokenizer import Tokenizer, load_tokenizer

PLAIN_TOKENS = 200  # maximum length of a continuation, which may never end, unlike a chat's answer
# Protection against terminal escape injection: control characters in a model's text could move the
# cursor, or worse. They are replaced with Unicode's Control Pictures.
PICTURES = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}
PICTURES |= dict.fromkeys(range(127, 160), "\ufffd")


def note(text: str):
    """Write a note to stderr, because stdout is reserved for the model's text."""
    print(f"[{text}]", file=sys.stderr, flush=True)


def show(text: str):
    if sys.stdout.isatty():
        text = text.translate(PICTURES)
    try:
        print(text, end="", flush=True)
    except OSError as error:
        raise OSError(f"standard output cannot be written: {error.strerror}") from None


def stream_answer(
    args: Namespace, engine, prompt: list[int], tokenizer: Tokenizer, usual: int, opening: str = ""
) -> str:
    """
    Show the opening, then an answer as its tokens arrive, then a note with the answer's speed and
    the seed that reproduces it. Returns the answer's text. Ctrl-C ends the answer but not the
    program. However the answer ends, its blocks are freed. `usual` is the maximum length if neither
    a flag nor the model sets one. Raises ValueError if the request can never be served, and
    RuntimeError if a step fails.
    """
    if not prompt:
        raise ValueError("the prompt is empty: give it at least one token")
    # at least 1, so that the engine refuses a prompt that is too long, and says why
    longest = max(1, engine.max_model_len - len(prompt))
    length = args.max_tokens or args.sampling.get("max_tokens", usual)
    seed = secrets.randbits(32) if args.seed is None else args.seed
    flags = {"temperature": args.temperature, "max_tokens": min(length, longest), "seed": seed}
    engine.add_request("answer", prompt, SamplingParams(**args.sampling | flags))
    stream = tokenizer.stream(prompt)
    started = time.perf_counter()
    pieces = []  # pieces of text, one for each token except a stop token
    reason = "interrupted"
    try:
        show(opening)
        with contextlib.suppress(KeyboardInterrupt):
            while engine.has_work:
                for output in engine.step():
                    if output.error:
                        raise RuntimeError(output.error)
                    reason = output.finish_reason or reason
                    for token in output.tokens[: -1 if reason == "stop" else None]:
                        pieces.append(stream.push(token))
                        show(pieces[-1])
    finally:
        engine.abort("answer")
    rest = stream.flush()
    show(f"{rest}\n")
    rate = len(pieces) / (time.perf_counter() - started)
    tokens = plural(len(pieces), "token")
    note(f"{tokens}, {rate:.1f} a second, seed {seed}, end: {reason}")
    return "".join(pieces) + rest


def converse(args: Namespace, engine, chat: Chat):
    """Read lines from standard input and answer each of them, until the input ends."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  importing it gives `input` line editing and history

    note(f"{args.model}: Ctrl-C stops an answer, Ctrl-D ends")
    messages = []
    while True:
        try:
            line = input(">>> " if sys.stdin.isatty() else "")
            if line:
                question = {"role": "user", "content": line}
                messages = add_answer(args, engine, chat, [*messages, question])
        except EOFError:
            if sys.stdin.isatty():  # so that the shell's prompt starts on a new line
                print()
            return
        except KeyboardInterrupt:  # while no answer is being computed
            print()
            note("Ctrl-D ends")
        except (ValueError, RuntimeError) as error:  # the conversation does not keep the line
            note(str(error))


def add_answer(args: Namespace, engine, chat: Chat, messages: list[dict]) -> list[dict]:
    """
    Answer a conversation. Returns the conversation with the answer added. If earlier turns leave
    too little of the context for an answer, they are dropped. Raises ValueError if even the last
    message does not fit, and RuntimeError if a step fails.
    """
    limit = engine.max_model_len
    prompt = chat.encode(messages, add_generation_prompt=True)
    if len(prompt) > limit * 3 // 4 and len(messages) > 1:
        note("the context is full: the conversation starts over")
        messages = messages[-1:]
        prompt = chat.encode(messages, add_generation_prompt=True)
    text = stream_answer(args, engine, prompt, chat.tokenizer, limit)
    return [*messages, {"role": "assistant", "content": text}]


def run(args: Namespace, build_engine: Callable):
    """Answer --prompt, or the lines of --chat. `build_engine(args)` loads the model."""
    tokenizer = load_tokenizer(args.model)
    chat = None if args.raw else load_chat(args.model, tokenizer, args.default_chat_template_kwargs)
    if args.chat and not chat:
        raise ValueError(
            f"--chat needs a chat template, but {'--raw' if args.raw else args.model} has none: "
            "continue a text with --prompt"
        )
    if args.prompt == "-":  # read as bytes, because text mode would change line endings
        try:
            args.prompt = sys.stdin.buffer.read().decode()
        except UnicodeDecodeError as error:
            message = f"--prompt -: standard input is not UTF-8 ({error}): convert it first"
            raise ValueError(message) from None
    engine = build_engine(args)
    if "there is no" in engine.device.reason:  # something that would make it faster is missing
        note(f"{engine.device.ops.name}, {engine.device.reason}")
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # the reader may exit first, as in `| head`
    if args.chat:
        sys.stdin.reconfigure(errors="replace")
        converse(args, engine, chat)
    elif chat:
        add_answer(args, engine, chat, [{"role": "user", "content": args.prompt}])
    else:
        prompt = tokenizer.encode(args.prompt, True, add_special_tokens=True)
        stream_answer(args, engine, prompt, tokenizer, PLAIN_TOKENS, args.prompt)
