"""
Serve a trained model as vLLM would: OpenAI's HTTP interface in front, the paged engine in a process
of its own.

    python serve.py                                     # out/stdlib at http://127.0.0.1:8000
    python serve.py --model out/shakespeare_char --port 9000
    python serve.py --prompt "def " --max-tokens 100    # no HTTP: continues the text at the terminal
    python serve.py --chat                              # no HTTP: a conversation at the terminal

    curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "def "}'

The engine has a process of its own, which never waits for HTTP; the HTTP process imports no torch,
so it stays small and never waits for a step; `EngineClient` connects them. The HTTP surface itself
is in api.py, imported only to serve it: neither the terminal (terminal.py) nor the engine's process
needs the HTTP packages.
"""

import argparse
import asyncio
import contextlib
import gc
import ipaddress
import os
import re
import shlex
import shutil
import signal
import socket
import stat
import sys
import tempfile
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from multiprocessing import resource_tracker

from commands import SPINS_SERVING, Help
from serving import terminal
from serving.client import EngineClient
from serving.encoder import Encoder
from serving.workers import (
    MAX_WORKERS,
    METRICS_FOLDER,
    Seat,
    Workers,
    can_share_port,
    context,
    default_count,
    share_port,
    shared_counts,
)

KEY_VARIABLE = "PAGEDGPT_API_KEY"


def at_least(least: int, number: type = int) -> Callable:
    """The type of flags that count or measure something; argparse makes its errors messages."""

    def parse(text: str):
        if not number(text) >= least:  # not <, of which NaN is none either
            raise argparse.ArgumentTypeError(f"{text} is too small, wanted at least {least}")
        return number(text)

    parse.__name__ = number.__name__  # argparse: "invalid int value"
    return parse


positive, seconds = at_least(1), at_least(0, float)


def origin(text: str) -> str:
    """
    The type of --allowed-origins: as browsers send them, without a path and without the port that
    is usual.
    """
    if text in ("*", "null"):
        return text
    scheme, separator, host = text.lower().partition("://")
    if not (scheme and separator and host) or re.search(r"[/?#@*\s]", host):
        wanted = "SCHEME://HOST or SCHEME://HOST:PORT without a path, null or *"
        raise argparse.ArgumentTypeError(f"{text!r} is no origin, wanted {wanted}")
    usual_port = {"http": ":80", "https": ":443"}.get(scheme, "")
    return f"{scheme}://{host.removesuffix(usual_port)}"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    about = "Serve a trained model over HTTP, or talk to it at the terminal."
    parser = argparse.ArgumentParser(description=about, formatter_class=Help)
    add = parser.add_argument
    add(
        "--model",
        default="out/stdlib",
        help="checkpoint directory, of train.py or of a GPT-2 downloaded from the hub",
    )
    add("--device", help="cpu, cuda, cuda:1; not given: a GPU where there is one")
    add(
        "--dtype",
        default="auto",
        choices=["auto", "fp32", "bf16", "fp16"],
        help="auto: bf16 on a GPU, else fp32",
    )
    # the engine's own options: each `dest` is the name of an argument of Engine
    add(
        "--quantize",
        default="none",
        choices=["none", "int8"],
        help="int8: weights as integers, on a CPU",
    )
    add(
        "--compile",
        action="store_true",
        help="on a CPU: compile the step of a lone request, 10 to 60 s once",
    )
    add(
        "--attention",
        default="auto",
        help="attention backend: triton, flex or torch; auto takes the fastest here",
    )
    add(
        "--kv-blocks",
        dest="num_blocks",
        type=positive,
        help="KV blocks in the pool; not given: all that are useful",
    )
    add("--block-size", type=positive, default=16, help="tokens in a KV block")
    add(
        "--max-model-len",
        type=positive,
        help="longest prompt plus answer, in tokens; not given: what fits",
    )
    add(
        "--max-num-seqs",
        type=positive,
        help="requests that run at once; not given: 256 on a GPU, 64 on a CPU",
    )
    add(
        "--token-budget",
        type=positive,
        help="tokens computed in a step; not given: 8192 on a GPU, 512 on a CPU",
    )
    add(
        "--prefill-share",
        type=float,
        default=0.25,
        help="share of that budget that is kept for prompts",
    )
    about = "which request goes first: the oldest (fcfs), the lowest `priority` (priority), the shortest (sjf)"
    add("--policy", default="priority", choices=["fcfs", "priority", "sjf"], help=about)
    add("--max-num-partial-prefills", type=positive, default=4, help="prompts computed in one step")
    add("--max-long-partial-prefills", type=positive, default=1, help="long prompts among these")
    add(
        "--long-prefill-threshold",
        type=positive,
        default=512,
        help="tokens above which a prompt is long",
    )
    add(
        "--no-graphs",
        dest="graphs",
        action="store_false",
        help="on a GPU: no CUDA graphs, for debugging",
    )
    add(
        "--no-prefix-cache",
        dest="prefix_cache",
        action="store_false",
        help="compute each prompt from its first token",
    )
    add("--trace", action="store_true", help="print what each step does")
    add("--check", action="store_true", help="verify the scheduler's invariants after each step")

    group = parser.add_argument_group("HTTP")
    http = group.add_argument
    http(
        "--host",
        default="127.0.0.1",
        help="address to listen at; one that other machines reach wants an API key",
    )
    http("--port", type=int, default=8000, help="port to listen at; 0: any free one")
    key = group.add_mutually_exclusive_group().add_argument
    key(
        "--api-key-file",
        metavar="FILE",
        help=f"API keys, one a line; not given: that in ${KEY_VARIABLE}, or none",
    )
    key(
        "--api-key",
        metavar="KEY",
        help="one API key; all users of this machine see it in `ps`, a file is safer",
    )
    http("--allow-remote", action="store_true", help="let other machines in without an API key")
    http(
        "--allowed-hosts",
        nargs="*",
        default=[],
        metavar="NAME",
        help="more names that the Host header may have",
    )
    about = "web pages that may call the server from a browser (CORS), by their origin, such as http://localhost:3000, "
    about += "tauri://localhost or null; *: any page, which without an API key opens the model to every page you visit"
    http("--allowed-origins", nargs="*", type=origin, default=[], metavar="ORIGIN", help=about)
    http("--served-model-name", help="the model's name in the API; not given: what --model says")
    http(
        "--http-workers",
        type=positive,
        help="HTTP processes on the port; not given: one for every 4 cores, 1 to 8",
    )
    http(
        "--max-queue",
        type=at_least(0),
        default=256,
        help="choices that may wait for their turn; more are a 429",
    )
    http(
        "--max-body-mib",
        type=seconds,
        default=4.0,
        help="largest request body; a larger one is a 413",
    )
    http(
        "--max-connections",
        type=positive,
        default=512,
        help="connections at once; for more, idle ones are closed",
    )
    http(
        "--client-seconds",
        type=seconds,
        default=30.0,
        help="how long a client may take to send or to read",
    )
    http(
        "--request-seconds",
        type=seconds,
        default=600.0,
        help="how long an answer may take, its waiting included",
    )
    http(
        "--drain-seconds",
        type=seconds,
        default=30.0,
        help="how long SIGTERM lets running requests go on",
    )
    http(
        "--log-requests", action="store_true", help="log the fields of each request, texts included"
    )
    http(
        "--no-access-log",
        dest="access_log",
        action="store_false",
        help="log no line for each request",
    )

    group = parser.add_argument_group("at the terminal")
    what = group.add_mutually_exclusive_group().add_argument
    what(
        "--prompt",
        metavar="TEXT",
        help="answer TEXT here and now instead of serving HTTP; -: all of standard input",
    )
    what("--chat", action="store_true", help="a conversation, line by line")
    text = group.add_argument
    text(
        "--raw",
        action="store_true",
        help="continue text as it stands, though there is a chat template",
    )
    about = "length of an answer; not given: with a chat template as far as the context goes, else up to 200"
    text("--max-tokens", type=positive, help=about)
    text("--temperature", type=float, default=0.8, help="0: always the most likely token")
    text("--seed", type=int, help="same seed, same text; not given: a random one, which is told")
    return parser.parse_args(argv)


# --------------------------------------------------------------------------------------------------
# The engine, here or in a process of its own


def build_engine(args: argparse.Namespace):
    """
    Load the model and build its Engine. Raises ValueError that says what to change (CheckpointError
    is one).
    """
    import torch

    from model import load_checkpoint, serving_dtype
    from serving.engine import Engine
    from serving.settings import Settings

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(
            f"--device {device}: torch sees no GPU here; leave the flag out to serve on the CPU"
        )
    model = load_checkpoint(args.model, device, serving_dtype(args.dtype, device))
    settings = {f.name: getattr(args, f.name) for f in fields(Settings) if "help" in f.metadata}
    return Engine(model, Settings(**settings))


def engine_process(args: argparse.Namespace, listener: socket.socket):
    """What the engine's process runs: its loop, until all HTTP processes are gone."""
    from serving.links import Links

    links = Links(listener)
    links.accept()  # now, so that they notice it if this process dies while it loads
    try:
        import torch

        torch.set_num_threads(engine_threads())
        engine = build_engine(args)
        print(engine.statement(), file=sys.stderr, flush=True)
    except Exception as error:  # whatever it is, one line says it to whoever started the server
        message = (
            str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        )
        links.greet({"op": "fatal", "message": message})
        return
    from serving.engine import run

    run(engine, links, args.max_queue)
    # all HTTP processes are gone: should the first have been killed, nobody else removes the folder
    # of its sockets
    shutil.rmtree(os.path.dirname(listener.getsockname()), ignore_errors=True)


def engine_threads() -> int:
    """
    How many threads the engine computes with: one core is HTTP's. On two cores that is a p99 of 5
    ms, not 30.
    """
    import torch

    return max(1, torch.get_num_threads() - 1)


def start_process(target: Callable, *args) -> context.Process:
    """Have another process run `target`, without the signals."""
    # not a fork, which would inherit our sockets and keep the port open; and CUDA does not survive
    # one
    process = context.Process(target=target, args=args, daemon=True)
    with signals_held():
        process.start()
    return process


@contextlib.contextmanager
def signals_held():
    """
    For the start of a process, which inherits that it gets none: a terminal signals all of them,
    but when to stop is for the first HTTP process to say. Ours come when this ends.
    """
    resource_tracker.ensure_running()  # starting it with the first process would let SIGINT and SIGTERM through again
    before = signal.pthread_sigmask(
        signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    )
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# --------------------------------------------------------------------------------------------------
# Over HTTP


def api_keys(args: argparse.Namespace) -> list[str]:
    """
    The keys of --api-key-file, one a line, blank lines and repetitions aside, that of --api-key, or
    the one in the environment. Raises ValueError or OSError.
    """
    if args.api_key_file is None:
        where = "--api-key" if args.api_key is not None else f"${KEY_VARIABLE}"
        key = args.api_key if args.api_key is not None else os.environ.get(KEY_VARIABLE)
        if (
            key is not None and not key.strip()
        ):  # a secret that did not arrive must not open the server
            raise ValueError(f"{where} is blank: give it a key, or unset it to serve without one")
        return [] if key is None else [key.strip()]
    with open(args.api_key_file, encoding="utf-8-sig") as f:
        keys = [line.strip() for line in f if line.strip()]
    if not keys:
        raise ValueError(f"--api-key-file {args.api_key_file} has no key in it: write one a line")
    return list(dict.fromkeys(keys))


def warn_of_readable_keys(path: str):
    """Who can read the keys can use them: on stderr, if that is more than the file's owner."""
    others = stat.S_IRWXG | stat.S_IRWXO
    if os.stat(path).st_mode & others:
        print(
            f"warning: other users can read --api-key-file {path}: chmod 600 {path}",
            file=sys.stderr,
        )


def key_in_shell(args: argparse.Namespace) -> str:
    """
    How a shell's command spells an API key of this server, without showing it; "" where there is
    none.
    """
    if args.api_key_file is not None:
        return f"$(grep -m 1 '[^[:space:]]' {shlex.quote(os.path.abspath(args.api_key_file))})"
    # where the variable is not set, in another terminal, the shell says this and runs nothing
    return f"${{{KEY_VARIABLE}:?set it to the key of the server}}" if api_keys(args) else ""


def listen(args: argparse.Namespace) -> socket.socket:
    """
    Open the listening socket before anything is loaded. Exits with one message if it cannot be had.
    """
    try:
        family = socket.getaddrinfo(args.host, None)[0][0]
        both = (
            family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        )  # :: is every address, of IPv4 too
        sock = socket.create_server((args.host, args.port), family=family, dualstack_ipv6=both)
    except (OSError, OverflowError) as error:
        sys.exit(
            f"cannot listen at {args.host}:{args.port} ({error}): stop what is there, or choose another --port"
        )
    if not (
        ipaddress.ip_address(sock.getsockname()[0]).is_loopback
        or api_keys(args)
        or args.allow_remote
    ):
        how = f"set ${KEY_VARIABLE} or --api-key-file, or add --allow-remote if you mean it"
        sys.exit(f"--host {args.host} opens the model to other machines without a password: {how}")
    sock.setsockopt(
        socket.IPPROTO_TCP, socket.TCP_NODELAY, 1
    )  # connections inherit it, and spare the 40 ms of Nagle
    return sock


def run_on_loop(main):
    """
    asyncio.run, on uvloop where it is installed: a quarter more tokens a second at 32 streams on 2
    cores.
    """
    import uvicorn

    with asyncio.Runner(loop_factory=uvicorn.Config(None).get_loop_factory()) as runner:
        return runner.run(main)


def terminate_on_hang_up():
    """
    SIGHUP, of a terminal that is closed, ends the server as SIGTERM does, with a drain; nohup's
    ignores it.
    """
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))


def end_at_once_on_sigterm(folder: str):
    """
    What SIGTERM does until there is an event loop that drains. Processes that were started notice
    and end, too.
    """

    def end(*_):
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)


def serve_http(args: argparse.Namespace) -> str | None:
    """Serve until a signal. Returns None for exit code 0, or the message of what went wrong."""
    count = args.http_workers or default_count()
    if count > 1 and not can_share_port():
        return f"--http-workers {count}: this system does not spread connections over processes, leave the flag out"
    if count > MAX_WORKERS:
        return f"--http-workers {count}: at most {MAX_WORKERS} are started, each takes 60 MB and a core"
    with tempfile.TemporaryDirectory(prefix="pagedgpt-") as folder:
        end_at_once_on_sigterm(folder)
        terminate_on_hang_up()
        if (
            count > 1
        ):  # read when its package is imported: the counts of all processes are added up in files
            os.environ[METRICS_FOLDER] = folder
        try:  # found missing now, not after the model is loaded
            from serving import api  # noqa: F401
        except ImportError as error:
            packages = "starlette pydantic uvicorn httptools prometheus-client jinja2"
            return f"{error.name} is missing: `pip install {packages}` to serve HTTP, or use --prompt without it"
        sockets = share_port(listen(args), count) if count > 1 else [listen(args)]
        if args.api_key_file is not None:
            warn_of_readable_keys(args.api_key_file)
        with listen_to_http(folder) as listener:
            return lead(args, listener, sockets)


def lead(
    args: argparse.Namespace, listener: socket.socket, sockets: list[socket.socket]
) -> str | None:
    """
    Be the first HTTP process: start the engine and the other HTTP processes, serve, and end them.
    """
    path, keys = listener.getsockname(), api_keys(args)
    counts = shared_counts(len(sockets))
    encoder = Encoder(args.model)
    client = EngineClient(path, partial(start_process, engine_process, args, listener))
    start_worker = partial(start_process, worker_process, args, keys, path)
    workers = Workers(start_worker, sockets[1:], counts)
    try:
        encoder.check()  # while the model loads
        return serve_port(
            sockets[0], client, encoder, args, keys, key_in_shell(args), Seat(0, counts), workers
        )
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(
                number, signal.SIG_IGN
            )  # the end has come, and a further signal must leave nothing behind
        workers.kill()
        encoder.close()
        client.process.join(
            5 if client.state == "ready" else 0
        )  # one that is loading does not hear us
        client.process.kill()


def worker_process(
    args: argparse.Namespace, keys: list[str], path: str, sock: socket.socket, seat: Seat
):
    """What an HTTP process but the first runs, on its own socket on the port."""
    serve_port(sock, EngineClient(path), Encoder(args.model), args, keys, key_in_shell(args), seat)


def serve_port(sock: socket.socket, *service) -> str | None:
    """
    Answer whoever connects to one socket, by api.Service(*service), until the end. Returns what
    went wrong.
    """
    from serving.api import Service

    gc.set_threshold(
        50_000
    )  # a body of a million lists is read in 0.2 s, not in 0.6, with nobody served meanwhile
    return run_on_loop(Service(*service).run(sock))


def listen_to_http(folder: str) -> socket.socket:
    """
    The socket where HTTP processes find the engine, in a folder of this user alone. It outlives the
    engine's process: whoever connects before there is one, or between two, is taken in by the next.
    """
    try:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(os.path.join(folder, "engine"))
        listener.listen()
    except OSError as error:
        raise OSError(
            f"no socket can be had in {folder} ({error}): set TMPDIR to another folder"
        ) from error
    return listener


def main(argv: list[str] | None = None):
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS_SERVING)  # before torch is loaded
    # oneDNN keeps code for each number of rows it has met: without a limit that is 500 MB after a
    # minute of mixed load.
    for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(cache, "64")
    args = parse_args(argv)
    try:
        at_terminal = args.chat or args.prompt is not None
        problem = terminal.run(args, build_engine) if at_terminal else serve_http(args)
    except (
        ValueError,
        RuntimeError,
        OSError,
    ) as error:  # no model, a broken one, or flags that do not go together
        problem = str(error)
    except KeyboardInterrupt:
        problem = "interrupted"
    sys.exit(problem)


if __name__ == "__main__":
    main()
