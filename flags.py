"""
The command line of serve.py: every flag, its default and its meaning.

    args = parse_args(["--port", "9000"])       # python serve.py --port 9000
    engine = Engine(model, engine_settings(args))

The engine's flags are the fields of `Settings` (params.py), where their defaults are;
those of the HTTP server and of the terminal are stated here. Imports no torch.
"""

import argparse
import json
import re
import sys
from dataclasses import fields
from functools import partial
from typing import get_args

from common import Parser, add_flag, at_least, positive
from engine.stages import require
from params import Settings, check_variables, model_defaults

KEY_VARIABLE = "PAGEDGPT_API_KEY"
TEMPERATURE = 0.8  # at the terminal, where neither a flag nor the model has another
ENGINE_FLAGS = [field for field in fields(Settings) if "help" in field.metadata]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """
    The flags, with their defaults; and `sampling`, the defaults that the model itself brings, with
    `sampling_note`, the line to print of them. Exits with a message about what is wrong.
    """
    about = "Serve a model over HTTP, or talk to it at the terminal."
    parser = Parser(description=about, allow_abbrev=False)
    parser.add_argument("directory", nargs="?", metavar="DIR", help="the same as --model DIR")
    add_model_flags(partial(add_flag, parser))
    add_engine_flags(parser.add_argument_group("engine"))
    add_http_flags(parser.add_argument_group("HTTP"))
    add_limits(partial(add_flag, parser.add_argument_group("limits of HTTP clients")))
    add_terminal_flags(parser.add_argument_group("at the terminal"))
    args = parser.parse_args(argv)
    try:
        engine_settings(args)  # what is out of range is refused before anything is loaded
        if args.record is not None:
            require("record")
    except ValueError as error:
        parser.error(str(error))
    directory = vars(args).pop("directory")
    if directory and args.model != parser.get_default("model"):
        parser.error(f"{directory} and --model {args.model}: name one of them")
    args.model = directory or args.model
    try:
        args.sampling, args.sampling_note = model_defaults(args.model, args.generation_config)
    except ValueError as error:
        sys.exit(str(error))
    if args.temperature is None:  # 0 is typed
        args.temperature = args.sampling.get("temperature", TEMPERATURE)
    return args


def engine_settings(args: argparse.Namespace) -> Settings:
    """Raises ValueError for what is out of range."""
    return Settings(**{field.name: getattr(args, field.name) for field in ENGINE_FLAGS})


# --------------------------------------------------------------------------------------------------
# The flags, group by group


def add_model_flags(add):
    add(
        "--model",
        "directory of a model: of train.py, or downloaded from the Hugging Face Hub",
        "out/stdlib",
    )
    add("--device", "cpu, cuda, cuda:1; not given: a GPU where there is one", None, device)
    dtypes = ["auto", "fp32", "bf16", "fp16"]
    add("--dtype", "of the weights; auto: bf16 on a GPU, else fp32", "auto", choices=dtypes)
    add(
        "--generation-config",
        "whose generation_config.json has defaults for requests: auto, the model's; vllm, none; or "
        "that of a directory",
        "auto",
        metavar="auto|vllm|DIR",
    )
    add(
        "--default-chat-template-kwargs",
        "variables for the chat template, as JSON, such as '{\"enable_thinking\": false}'",
        None,
        template_variables,
        metavar="JSON",
    )
    add(
        "--record",
        "write to a new FILE what each step does, about 0.3 KB a step: the page opens it; it has "
        "token ids only under --log-requests",
        metavar="FILE",
    )


def device(text: str) -> str:
    """The type, for argparse, of --device."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"invalid choice: {text!r}, wanted cpu, cuda or cuda:1")
    return text


def template_variables(text: str) -> dict:
    """The type, for argparse, of --default-chat-template-kwargs."""
    try:
        return check_variables(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r:.200}: {error}") from None


def add_engine_flags(group):
    """A flag for each field of `Settings` that has a help text."""
    for field in ENGINE_FLAGS:
        about = field.metadata
        flag = about.get("flag", "--" + field.name.replace("_", "-"))
        options = {"dest": field.name}
        if "choices" in about:
            options["choices"] = about["choices"]
        kind = (get_args(field.type) or [field.type])[0]  # of `int | None` it is int
        if "least" in about:
            kind = at_least(about["least"], kind)
        add_flag(group, flag, about["help"], field.default, kind, **options)


def add_http_flags(group):
    add = partial(add_flag, group)
    add(
        "--host",
        "address to listen at; one that other machines reach wants an API key",
        "127.0.0.1",
    )
    add("--port", "port to listen at; 0: any free one", 8000, at_least(0, below=65536))
    add_key = partial(add_flag, group.add_mutually_exclusive_group())
    add_key(
        "--api-key-file",
        f"API keys, one a line; not given: that in ${KEY_VARIABLE}, or none",
        metavar="FILE",
    )
    add_key(
        "--api-key",
        "one API key; all users of this machine see it in `ps`, a file is safer",
        metavar="KEY",
    )
    add("--allow-remote", "let other machines in without an API key", False)
    add(
        "--allowed-hosts", "more names that the Host header may have", [], nargs="*", metavar="NAME"
    )
    add(
        "--allowed-origins",
        "web pages that may call the server from a browser (CORS), by their origin, such as "
        "http://localhost:3000, tauri://localhost or null; *: any page, which without an API key "
        "opens the model to every page you visit",
        [],
        origin,
        nargs="*",
        metavar="ORIGIN",
    )
    add("--served-model-name", "the model's name in the API; not given: what --model says")
    reasoning = "off: what a model thinks is part of its answer's text, not a field of its own"
    add("--reasoning", reasoning, "on", choices=["on", "off"])
    add("--log-requests", "log the fields of each request, texts included", False)
    add("--no-access-log", "log no line for each request", True, dest="access_log")


def origin(text: str) -> str:
    """
    The type, for argparse, of --allowed-origins. Returns the origin as browsers send it: in lower
    case, without a path and without the scheme's usual port.
    """
    if text in ("*", "null"):
        return text
    parts = re.fullmatch(r"([^:/\s]+)://([^/?#@*\s]+)", text.lower())
    if parts is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no origin, wanted SCHEME://HOST or SCHEME://HOST:PORT without a path, "
            "null or *"
        )
    scheme, host = parts.groups()
    usual_port = {"http": ":80", "https": ":443"}.get(scheme, "")
    return f"{scheme}://{host.removesuffix(usual_port)}"


def add_limits(add):
    add(
        "--max-queue",
        "answers that may wait for their turn (n in a request: n answers); for more, a 429",
        256,
        at_least(0),
    )
    add("--max-body-mib", "largest body of a request, in MiB; for a larger one, a 413", 4.0)
    add("--max-connections", "connections at once; more are refused (503)", 512)
    add(
        "--client-seconds",
        "how long a client may take to send a request, or to read what was sent to it",
        30.0,
    )
    add(
        "--keep-alive-seconds",
        "how long an idle connection stays open: longer than a proxy in front keeps its own",
        75.0,
    )
    add("--request-seconds", "how long an answer may take, its waiting included", 600.0)
    add("--drain-seconds", "how long running requests may go on after SIGTERM", 30.0)


def add_terminal_flags(group):
    add_mode = partial(add_flag, group.add_mutually_exclusive_group())
    add_mode(
        "--prompt",
        "answer TEXT here and now instead of serving HTTP; -: all of standard input",
        metavar="TEXT",
    )
    add_mode("--chat", "a conversation, line by line; needs a chat template", False)
    add = partial(add_flag, group)
    add("--raw", "continue the text of --prompt as it stands, though there is a template", False)
    add(
        "--max-tokens",
        "length of an answer; not given: what the model's generation_config.json says, else with a "
        "chat template as far as the context goes, without up to 200",
        None,
        positive,
    )
    add(
        "--temperature",
        "0: always the most likely token; not given: what the model's generation_config.json "
        f"says, else {TEMPERATURE}",
        None,
        float,
    )
    add("--seed", "same seed, same text; not given: a random one, which is shown", None, int)
