"""
Serve a trained model as vLLM would: OpenAI's HTTP interface in front, the paged engine in a process
of its own.

    python serve.py                                     # out/stdlib at http://127.0.0.1:8000
    python serve.py --model out/shakespeare_char --port 9000
    python serve.py --prompt "def " --max-tokens 100    # no HTTP: continues a text at the terminal
    python serve.py --chat                              # no HTTP: a conversation at the terminal
    python serve.py --replay assets/tour.jsonl          # no model: the page, with a record

    curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
        -d '{"prompt": "def "}'

The engine's process never waits for HTTP. The HTTP processes import no torch, so they stay small,
and never wait for a step; each has an `EngineClient` that connects it to the engine. Their answers
are in server/app.py and the flags in flags.py. The terminal, which has its engine in its own
process and needs no HTTP packages, is in server/terminal.py.
"""

import asyncio
import ipaddress
import os
import shutil
import signal
import socket
import stat
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from multiprocessing import resource_tracker

from common import (
    SPINS_SERVING,
    announce,
    collect_garbage_rarely,
    end_with_one_line,
    not_installed,
)

if __name__ == "__main__":
    end_with_one_line()

from engine.events import open_record, record_to
from flags import KEY_VARIABLE, engine_settings, parse_args
from server.workers import (
    METRICS_FOLDER,
    Workers,
    WorkerSlot,
    context,
    num_processes,
    open_port,
    share_port,
)

# --------------------------------------------------------------------------------------------------
# The engine, here or in a process of its own


def build_engine(args: Namespace):
    """
    Load the model and build its Engine. Raises ValueError that says what to change (CheckpointError
    is one).
    """
    import torch

    from checkpoint import load_checkpoint, serving_dtype
    from engine.engine import Engine
    from engine.sizing import machine_name, packed_if_it_fits

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(
            f"--device {device}: torch sees no GPU here; leave the flag out to serve on the CPU"
        )
    settings = engine_settings(args)
    dtype = serving_dtype(args.dtype, device)
    convert = partial(packed_if_it_fits, settings, device)
    engine = Engine(load_checkpoint(args.model, device, dtype, convert), settings)
    if args.record is not None:
        title = {"model": args.model, "machine": machine_name(device)}
        record_to(args.record, engine, args.log_requests, **title)
    return engine


def open_grammars(directory: str, engine):
    """Of the engine's model."""
    from engine.grammar import Grammars
    from tokenizer import load_tokenizer

    return Grammars(load_tokenizer(directory), engine.config)


def engine_process(args: Namespace, listener: socket.socket):
    """The engine's process runs this: its loop, until all HTTP processes are gone."""
    from engine.links import Links

    links = Links(listener)
    links.accept()  # before loading: a client whose link closes knows that this process died
    try:
        import torch

        from engine.process import serve

        # One core is left to HTTP: on two the p99 of the time between tokens is then 5 ms, not 30.
        torch.set_num_threads(max(1, torch.get_num_threads() - 1))
        engine = build_engine(args)
        print(engine.statement(), file=sys.stderr, flush=True)
    except Exception as error:  # of any kind: the server's user gets one line
        message = str(error)
        if isinstance(error, ModuleNotFoundError):
            message = not_installed(error)
        elif not isinstance(error, ValueError):
            message = f"{type(error).__name__}: {message}"
        links.set_greeting({"op": "fatal", "message": message})
        return
    collect_garbage_rarely()
    serve(engine, links, args.max_queue, partial(open_grammars, args.model, engine))
    # the first HTTP process removes the folder of its sockets, unless it was killed
    shutil.rmtree(os.path.dirname(listener.getsockname()), ignore_errors=True)


def set_environment():
    """Variables that torch's libraries read when the engine loads them."""
    # OpenMP: a waiting thread then spins less, as HTTP needs the cores too
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS_SERVING)
    # oneDNN caches code for each number of rows: without a limit 500 MB in a minute of mixed load
    for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(cache, "64")


def start_process(target: Callable, *args) -> context.Process:
    """
    Run target(*args) in a new process, with SIGINT, SIGTERM and SIGHUP blocked there: Ctrl-C at a
    terminal reaches all processes, but the first HTTP process decides when to stop. A process
    inherits what is blocked, so they are blocked here, too, and held back, until it has started.
    """
    process = context.Process(target=target, args=args, daemon=True)
    # starting the resource tracker with the first process would let SIGINT and SIGTERM through
    resource_tracker.ensure_running()
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process


# --------------------------------------------------------------------------------------------------
# Over HTTP


def api_keys(args: Namespace) -> list[str]:
    """
    The keys of --api-key-file, one a line, without blank lines and repetitions; or the key of
    --api-key or of the environment. Raises ValueError or OSError.
    """
    if args.api_key_file is not None:
        with open(args.api_key_file, encoding="utf-8-sig") as f:
            keys = [line.strip() for line in f if line.strip()]
        if not keys:
            raise ValueError(
                f"--api-key-file {args.api_key_file} has no key in it: write one a line"
            )
        return list(dict.fromkeys(keys))
    where = "--api-key"
    key = args.api_key
    if key is None:
        where = f"${KEY_VARIABLE}"
        key = os.environ.get(KEY_VARIABLE)
    if key is None:
        return []
    if not key.strip():  # a secret that a deployment failed to fill in must not open the server
        raise ValueError(f"{where} is blank: give it a key, or unset it to serve without one")
    return [key.strip()]


def warn_of_readable_keys(path: str):
    """A warning on stderr where others than the file's owner can read the keys."""
    if os.stat(path).st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        print(
            f"warning: other users can read --api-key-file {path}: chmod 600 {path}",
            file=sys.stderr,
        )


def listen(args: Namespace) -> socket.socket:
    """
    Open the listening socket before anything is loaded. Exits with one message where that fails.
    """
    try:
        sock = open_port(args.host, args.port)
    except OSError as error:
        # socket.create_server adds the address to the system's words
        reason = error.strerror.partition(" (while")[0]
        sys.exit(
            f"cannot listen at {args.host}:{args.port}: {reason}; stop what is there, or choose "
            "another --port"
        )
    is_local = ipaddress.ip_address(sock.getsockname()[0]).is_loopback
    if not (is_local or api_keys(args) or args.allow_remote):
        sys.exit(
            f"--host {args.host} opens the model to other machines without a password: set "
            f"${KEY_VARIABLE} or --api-key-file, or add --allow-remote if you mean it"
        )
    if args.api_key_file is not None:
        warn_of_readable_keys(args.api_key_file)
    return sock


def listen_for_links(folder: str) -> socket.socket:
    """
    The Unix socket at which HTTP processes find the engine, in a folder that only this user can
    read. It outlives the engine's process: connections made meanwhile wait for the next one.
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


def run_on_loop(coroutine):
    """
    asyncio.run, on uvloop where it is installed: a quarter more tokens a second at 32 streams on 2
    cores.
    """
    import uvicorn

    with asyncio.Runner(loop_factory=uvicorn.Config(None).get_loop_factory()) as runner:
        return runner.run(coroutine)


def serve_port(sock: socket.socket, *service) -> str | None:
    """
    Serve one socket until the end; `service` are the arguments of `Service`. Returns a message if
    something went wrong.
    """
    from server.app import Service

    collect_garbage_rarely()
    return run_on_loop(Service(*service).run(sock))


def worker_process(
    args: Namespace, keys: list[str], path: str, sock: socket.socket, slot: WorkerSlot
):
    """An HTTP process other than the first runs this, on its own socket on the port."""
    serve_port(sock, *engine_at(path, args), args, keys, slot)


def start_engine(args: Namespace, listener: socket.socket):
    """Start the engine's process. Returns an EngineClient, and the Encoder of its model."""
    start = partial(start_process, engine_process, args, listener)
    return engine_at(listener.getsockname(), args, start)


def engine_at(path: str, args: Namespace, *start: Callable):
    """An EngineClient, which starts the engine if it gets `start`; and the Encoder of its model."""
    from server.client import EngineClient
    from server.text import Encoder

    encoder = Encoder(args.model, variables=args.default_chat_template_kwargs)
    return EngineClient(path, *start), encoder


def first_process(
    args: Namespace, listener: socket.socket, sockets: list[socket.socket]
) -> str | None:
    """
    The first HTTP process runs this: it starts the engine and the other HTTP processes, serves, and
    ends them.
    """
    keys = api_keys(args)
    path = listener.getsockname()
    client, encoder = start_engine(args, listener)
    workers = Workers(partial(start_process, worker_process, args, keys, path), sockets[1:])
    slot = WorkerSlot(0, len(sockets))
    try:
        return serve_port(sockets[0], client, encoder, args, keys, slot, workers)
    finally:
        # from here on a further signal must not leave a process behind
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        workers.kill()
        encoder.close()
        # while the engine loads a model, it does not notice that links close
        client.process.join(5 if client.state == "ready" else 0)
        client.process.kill()


def terminate_on_hang_up():
    """
    SIGHUP, sent when the terminal is closed, ends the server with a drain, as SIGTERM does. Under
    nohup it stays ignored.
    """
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))


def end_at_once(folder: str, *_):
    """
    The handler of SIGTERM until there is an event loop, which drains. The processes started by then
    end, too, when their links close.
    """
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def serve_http(args: Namespace) -> str | None:
    """Serve until a signal. Returns None for exit code 0, or the message of what went wrong."""
    count = num_processes(args.http_workers)
    with tempfile.TemporaryDirectory(prefix="pagedgpt-") as folder:
        signal.signal(signal.SIGTERM, partial(end_at_once, folder))
        terminate_on_hang_up()
        if count > 1:  # prometheus_client reads it when it is imported
            os.environ[METRICS_FOLDER] = folder
        import server.app  # noqa: F401  a missing package is found before a model is loaded

        sockets = share_port(listen(args), count)
        with listen_for_links(folder) as listener:
            return first_process(args, listener, sockets)


def serve_record(args: Namespace):
    """Serve the page with the record of --replay until a signal. Raises RecordError."""
    open_replay = partial(open_record, args.replay)
    open_replay().close()
    from server.gate import ReplaySite

    run_on_loop(ReplaySite(args, api_keys(args), open_replay).run(listen(args)))


def create_record(path: str):
    """Make the file of --record now, before a model is loaded. Raises OSError."""
    try:
        with open(path, "a") as file:
            is_empty = file.tell() == 0  # new, or of a start that failed
    except OSError as error:
        raise OSError(f"--record {path}: {error.strerror}; name another file") from None
    if not is_empty:
        raise OSError(f"--record {path} exists already: name a new file")


def main(argv: list[str] | None = None):
    set_environment()
    args = parse_args(argv)
    if args.replay is None:
        announce(f"loading {args.model}")
    if args.sampling_note:  # the sampling defaults that the model brings
        print(args.sampling_note, file=sys.stderr)
    try:
        if args.record is not None:
            create_record(args.record)
        if args.replay is not None:
            problem = serve_record(args)
        elif args.chat or args.prompt is not None:
            from server import terminal

            problem = terminal.run(args, build_engine)
        else:
            problem = serve_http(args)
    except (ValueError, RuntimeError, OSError) as error:
        problem = str(error)  # such as no model, a broken one, or flags that do not go together
    except ModuleNotFoundError as error:
        problem = not_installed(error)
    except KeyboardInterrupt:
        problem = "interrupted"
    sys.exit(problem)


if __name__ == "__main__":
    main()
