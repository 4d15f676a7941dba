"""
The model at the terminal, with the engine in this process: a prompt answered, or a conversation.

    python serve.py --prompt "def"        # the answer on stdout, how long it took on stderr
    python serve.py --prompt - < FILE     # all of standard input, exactly
    python serve.py --chat                # line by line; Ctrl-C stops an answer, Ctrl-D ends

If the checkpoint has a chat template, a prompt is a user's message; without one, or with --raw, it
is a text to continue. Not run by itself: the flags are in serve.py.
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

PLAIN_TOKENS = 200  # length of a continuation: unlike answers of a chat, texts need not end
# Terminal escape injection: control characters in a model's text would move the cursor, or worse.
# Their pictures (Unicode's Control Pictures) are shown instead.
PICTURES = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}
PICTURES |= dict.fromkeys(range(127, 160), "\ufffd")


def note(text: str):
    """Write to stderr what is not the model's: stdout is for texts."""
    print(f"[{text}]", file=sys.stderr, flush=True)


def show(text: str):
    if sys.stdout.isatty():
        text = text.translate(PICTURES)
    print(text, end="", flush=True)


def stream_answer(
    args: Namespace, engine, prompt: list[int], tokenizer: Tokenizer, usual: int, opening: str = ""
) -> str:
    """
    Show the opening, then an answer as its tokens come, and a note with its speed and the seed that
    reproduces it. Ctrl-C ends the answer, not the program; its blocks are freed however it ends.
    `usual` is its length where neither a flag nor the model says one. Returns the text. Raises
    ValueError for a request that can never be served and RuntimeError for a step that failed.
    """
    # at least 1: the engine refuses a prompt that is too long, with the numbers
    room = max(1, engine.max_model_len - len(prompt))
    length = args.max_tokens or args.sampling.get("max_tokens", usual)
    seed = secrets.randbits(32) if args.seed is None else args.seed
    own = {"temperature": args.temperature, "max_tokens": min(length, room), "seed": seed}
    params = SamplingParams(**args.sampling | own)
    # a new id each time: a late token of an interrupted answer is none of the next answer's
    id = f"answer {engine.num_steps}"
    engine.add_request(id, prompt, params)
    stream = tokenizer.stream(prompt)
    started = time.perf_counter()
    pieces = []  # of the text, one for each token, except the one that ended it
    reason = "interrupted"
    show(opening)
    try:
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
        engine.abort(id)
    rest = stream.flush()
    show(f"{rest}\n")
    rate = len(pieces) / (time.perf_counter() - started)
    tokens = plural(len(pieces), "token")
    note(f"{tokens}, {rate:.1f} a second, seed {seed}, end: {reason}")
    return "".join(pieces) + rest


def converse(args: Namespace, engine, chat: Chat):
    """Read lines and answer them until the end of input."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  `input` then edits lines, and remembers them

    note(f"{args.model}: Ctrl-C stops an answer, Ctrl-D ends")
    messages = []
    while True:
        try:
            line = input(">>> " if sys.stdin.isatty() else "")
            if line:
                question = {"role": "user", "content": line}
                messages = add_answer(args, engine, chat, [*messages, question])
        except EOFError:
            if sys.stdin.isatty():  # the shell's own prompt gets a line of its own
                print()
            return
        except KeyboardInterrupt:  # at the prompt, or before an answer begins
            print()
            note("Ctrl-D ends")
        except (ValueError, RuntimeError) as error:  # the line is forgotten
            note(str(error))


def add_answer(args: Namespace, engine, chat: Chat, messages: list[dict]) -> list[dict]:
    """
    Answer a conversation. Returns it with the answer, and without its earlier turns where they
    leave too little of the context for one. Raises ValueError if the last message alone does not
    fit, and RuntimeError.
    """
    limit = engine.max_model_len
    prompt = chat.encode(messages, add_generation_prompt=True)
    if len(prompt) > limit * 3 // 4 and len(messages) > 1:
        note("the context is full: the conversation begins anew")
        messages = messages[-1:]
        prompt = chat.encode(messages, add_generation_prompt=True)
    text = stream_answer(args, engine, prompt, chat.tokenizer, limit)
    return [*messages, {"role": "assistant", "content": text}]


def run(args: Namespace, build_engine: Callable):
    """Answer --prompt, or the lines of --chat. `build_engine(args)` loads the model."""
    # a terminal that cannot show a character shows another
    sys.stdout.reconfigure(errors="replace")
    tokenizer = load_tokenizer(args.model)
    chat = None if args.raw else load_chat(args.model, tokenizer, args.default_chat_template_kwargs)
    if args.chat and not chat:
        raise ValueError(
            f"--chat needs a chat template, {args.model} has none (or --raw is set): continue a "
            "text with --prompt"
        )
    if args.prompt == "-":  # bytes: in text mode line ends would change
        try:
            args.prompt = sys.stdin.buffer.read().decode()
        except UnicodeDecodeError as error:
            message = f"--prompt -: standard input is not UTF-8 ({error}): convert it first"
            raise ValueError(message) from None
    engine = build_engine(args)
    if "there is no" in engine.device.reason:  # what would make it faster
        note(f"{engine.device.ops.name}, {engine.device.reason}")
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # the reader may end first, as in `| head`
    if args.chat:
        sys.stdin.reconfigure(errors="replace")
        converse(args, engine, chat)
    elif chat:
        add_answer(args, engine, chat, [{"role": "user", "content": args.prompt}])
    else:
        prompt = tokenizer.encode(args.prompt, True, add_special_tokens=True)
        stream_answer(args, engine, prompt, tokenizer, PLAIN_TOKENS, args.prompt)
