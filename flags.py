"""
The command line of serve.py: every flag, with its default and meaning.

    args = parse_args(["--port", "9000"])       # python serve.py --port 9000
    engine = Engine(model, engine_settings(args))

The engine's flags and their defaults come from the fields of `Settings` (params.py). The flags for
the HTTP server and the terminal are defined here. This module does not import torch.
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
MODEL = "out/stdlib"  # if neither DIR nor --model is given
TEMPERATURE = 0.8  # at the terminal, unless a flag or the model sets another
VLLM_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32"}
# no machine has room for more, but trying to make it would take minutes
BELOW = {"max_num_seqs": 2**20, "token_budget": 2**24}
ENGINE_FLAGS = [field for field in fields(Settings) if "help" in field.metadata]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """
    Parse the command line. The result also has `sampling`, the model's own sampling defaults, and
    `sampling_note`, a line to print about these defaults. Exit with a message if something is
    wrong.
    """
    parser = Parser(
        description="Serve a model over HTTP, or use it at the terminal.", allow_abbrev=False
    )
    parser.add_argument("directory", nargs="?", metavar="DIR", help="the same as --model DIR")
    add_model_flags(partial(add_flag, parser))
    add_engine_flags(parser.add_argument_group("engine"))
    add_http_flags(parser.add_argument_group("HTTP"))
    add_limits(partial(add_flag, parser.add_argument_group("limits for HTTP clients")))
    add_terminal_flags(parser.add_argument_group("at the terminal"))
    args = parser.parse_args(argv)
    try:
        engine_settings(args)  # refuse values out of range before anything is loaded
        if args.record is not None:
            require("record")
    except ValueError as error:
        parser.error(str(error))
    directory = vars(args).pop("directory")
    if directory and args.model:
        parser.error(f"{directory} and --model {args.model}: give only one of them")
    args.model = directory or args.model or MODEL
    try:
        args.model.encode()
    except UnicodeEncodeError:  # safetensors cannot open it
        sys.exit(f"--model {args.model!r} is not UTF-8: rename the folder")
    try:
        args.sampling, args.sampling_note = model_defaults(args.model, args.generation_config)
    except ValueError as error:
        sys.exit(str(error))
    if args.temperature is None:  # "or" would also replace 0
        args.temperature = args.sampling.get("temperature", TEMPERATURE)
    return args


def engine_settings(args: argparse.Namespace) -> Settings:
    """Return the engine's settings. Raises ValueError for a value out of range."""
    return Settings(**{field.name: getattr(args, field.name) for field in ENGINE_FLAGS})


# --------------------------------------------------------------------------------------------------
# The flags, group by group


def add_model_flags(add):
    add(
        "--model",
        "directory of a model made by train.py or downloaded from the Hugging Face Hub; "
        f"default: {MODEL}",
    )
    add("--device", "cpu, cuda or cuda:1; default: a GPU if there is one", None, device)
    add(
        "--dtype",
        "dtype of the weights; auto: bf16 on a GPU, else fp32",
        "auto",
        lambda name: VLLM_DTYPES.get(name, name),
        choices=["auto", "fp32", "bf16", "fp16"],
    )
    add(
        "--generation-config",
        "where to read generation_config.json, which has defaults for requests; auto: in the "
        "model's directory; vllm: nowhere; otherwise: in this directory",
        "auto",
        metavar="auto|vllm|DIR",
    )
    add(
        "--default-chat-template-kwargs",
        "variables for the chat template, as JSON, for example '{\"enable_thinking\": false}'",
        None,
        template_variables,
        metavar="JSON",
    )
    add(
        "--record",
        "record what each step does in a new FILE, which the page can open; takes about 0.3 KB per "
        "step, and includes token ids only with --log-requests",
        metavar="FILE",
    )


def device(text: str) -> str:
    """Check --device (a type for argparse)."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"invalid choice: {text!r}, wanted cpu, cuda or cuda:1")
    return text


def template_variables(text: str) -> dict:
    """Parse --default-chat-template-kwargs (a type for argparse)."""
    try:
        return check_variables(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r:.200}: {error}") from None


def add_engine_flags(group):
    """Add a flag for each field of `Settings` that has a help text."""
    for field in ENGINE_FLAGS:
        about = field.metadata
        flag = about.get("flag", "--" + field.name.replace("_", "-"))
        options = {"dest": field.name}
        if "choices" in about:
            options["choices"] = about["choices"]
        kind = (get_args(field.type) or [field.type])[0]  # int for `int | None`
        if "least" in about:
            kind = at_least(about["least"], kind, BELOW.get(field.name))
        add_flag(group, flag, about["help"], field.default, kind, **options)


def add_http_flags(group):
    add = partial(add_flag, group)
    add(
        "--host",
        "address to listen on; if other machines can reach it, an API key is required",
        "127.0.0.1",
    )
    add("--port", "port to listen on; 0: any free port", 8000, at_least(0, below=65536))
    add_key = partial(add_flag, group.add_mutually_exclusive_group())
    add_key(
        "--api-key-file",
        f"file with API keys, one per line; default: the key in ${KEY_VARIABLE}, if set",
        metavar="FILE",
    )
    add_key(
        "--api-key",
        "one API key; a file is safer, because every user of this machine can see this key in `ps`",
        metavar="KEY",
    )
    add("--allow-remote", "allow access from other machines without an API key", False)
    add(
        "--allowed-hosts",
        "additional names to accept in the Host header",
        [],
        nargs="*",
        metavar="NAME",
    )
    add(
        "--allowed-origins",
        "origins of web pages that may call the server from a browser (CORS), for example "
        "http://localhost:3000, tauri://localhost or null; *: any page (without an API key, any "
        "page you visit can then use the model)",
        [],
        origin,
        nargs="*",
        metavar="ORIGIN",
    )
    add("--served-model-name", "the model's name in the API; default: the value of --model")
    add(
        "--reasoning",
        "off: leave a model's reasoning in the answer's text, not in a separate field",
        "on",
        choices=["on", "off"],
    )
    add("--log-requests", "log the fields of each request, including texts", False)
    add("--no-access-log", "do not log a line for each request", True, dest="access_log")


def origin(text: str) -> str:
    """
    Parse one of --allowed-origins (a type for argparse). Return the origin as browsers send it: in
    lower case, without a path or the scheme's default port.
    """
    if text in ("*", "null"):
        return text
    parts = re.fullmatch(r"([^:/\s]+)://([^/?#@*\s]+)", text.lower())
    if parts is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not an origin, wanted SCHEME://HOST or SCHEME://HOST:PORT without a "
            "path, null or *"
        )
    scheme, host = parts.groups()
    default_port = {"http": ":80", "https": ":443"}.get(scheme, "")
    return f"{scheme}://{host.removesuffix(default_port)}"


def add_limits(add):
    add(
        "--max-queue",
        "maximum number of waiting answers (a request with n counts n times); above this: 429",
        256,
        at_least(0),
    )
    add("--max-body-mib", "maximum size of a request body in MiB; above this: 413", 4.0)
    add("--max-connections", "maximum number of open connections; above this: 503", 512)
    add(
        "--client-seconds",
        "how long a client may take to send a request, or to read what it was sent",
        30.0,
    )
    add(
        "--keep-alive-seconds",
        "how long a connection may be idle; should be longer than the limit of a proxy in front",
        75.0,
    )
    add("--request-seconds", "how long an answer may take, including time in the queue", 600.0)
    add("--drain-seconds", "how long running requests may continue after SIGTERM", 30.0)


def add_terminal_flags(group):
    add_mode = partial(add_flag, group.add_mutually_exclusive_group())
    add_mode(
        "--prompt",
        "answer TEXT and exit, instead of serving HTTP; -: read TEXT from standard input",
        metavar="TEXT",
    )
    add_mode("--chat", "hold a conversation, line by line; needs a chat template", False)
    add = partial(add_flag, group)
    add("--raw", "continue the --prompt text as it is, even if there is a chat template", False)
    add(
        "--max-tokens",
        "maximum length of an answer, in tokens; default: the value in the model's "
        "generation_config.json, else the rest of the context with a chat template, or 200 "
        "without one",
        None,
        positive,
    )
    add(
        "--temperature",
        "0: always choose the most likely token; default: the value in the model's "
        f"generation_config.json, else {TEMPERATURE}",
        None,
        float,
    )
    add("--seed", "makes answers repeatable; default: a random seed, which is printed", None, int)
