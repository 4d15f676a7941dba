"""
Serve a trained model the way vLLM does, with an OpenAI-compatible HTTP server, and the paged engine
in a separate process.

    python serve.py                                     # out/stdlib at http://127.0.0.1:8000
    python serve.py --model out/shakespeare_char --port 9000
    python serve.py --prompt "def" --max-tokens 100     # no HTTP: continue a text at the terminal
    python serve.py --chat --model DIR                  # no HTTP: talk to a chat model there

    curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
        -d '{"prompt": "def"}'

The two processes never wait for each other's work: the engine does not wait for HTTP, and HTTP does
not wait for a step. An `EngineClient` connects them. The HTTP process does not import torch, so it
stays small. Endpoints are in server/app.py, and flags are in flags.py. With --prompt or --chat
(server/terminal.py), the engine runs in this process, and no HTTP packages are needed.
"""

if __name__ == "__main__":  # first, because the other imports take a while
    from common import end_with_one_line

    end_with_one_line()

import asyncio
import errno
import ipaddress
import multiprocessing
import os
import signal
import socket
import sys
from argparse import Namespace
from functools import partial
from multiprocessing import resource_tracker

from common import (
    SPINS_SERVING,
    announce,
    check_model,
    collect_garbage_rarely,
    last_words,
    plural,
    say,
)
from flags import KEY_VARIABLE, engine_settings, parse_args

# A forked process would inherit the event loop and the sockets, and keep the port open. Also, CUDA
# does not work after a fork.
context = multiprocessing.get_context("spawn")

# --------------------------------------------------------------------------------------------------
# The engine, in this process or in its own


def build_engine(args: Namespace):
    """
    Load the model and build its Engine. Raises ValueError (or its subclass CheckpointError) with a
    message that says what to change.
    """
    import torch

    from checkpoint import load_checkpoint, serving_dtype
    from engine.engine import Engine
    from engine.sizing import machine_name, packed_if_it_fits

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda"):
        index = torch.device(device).index or 0
        count = torch.cuda.device_count()
        if index >= count:
            raise ValueError(
                f"--device {device}: torch sees {plural(count, 'GPU')} here, numbered from 0; "
                "choose another device, or leave the flag out"
            )
        torch.cuda.set_device(index)  # streams, events and kernels belong to the current device
    settings = engine_settings(args)
    dtype = serving_dtype(args.dtype, device)
    convert = partial(packed_if_it_fits, settings, device)
    engine = Engine(load_checkpoint(args.model, device, dtype, convert), settings)
    if args.record is not None:
        from engine.events import record_to

        machine = machine_name(device)
        record_to(args.record, engine, args.log_requests, model=args.model, machine=machine)
    return engine


def engine_process(args: Namespace, sock: socket.socket):
    """Run the engine in its own process until the HTTP process ends."""
    from engine.link import Link

    link = Link(sock)
    try:
        import torch

        from engine.process import serve

        # Leave one core for HTTP: on two cores, this lowers the p99 time between tokens from 30 ms
        # to 5 ms.
        torch.set_num_threads(max(1, torch.get_num_threads() - 1))
        engine = build_engine(args)
        say(engine.statement())
    except Exception as error:  # show any error to the user as one line
        link.send({"op": "fatal", "message": last_words(error)})
        return
    collect_garbage_rarely()
    serve(engine, link, args.model)


def set_environment():
    """Set environment variables that torch's libraries read when the engine loads them."""
    # OpenMP: let waiting threads spin less, because HTTP also needs the cores
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS_SERVING)
    # oneDNN caches code for each number of rows; without a limit, the cache grows to 500 MB in a
    # minute of mixed load
    for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(cache, "64")


def start_engine(args: Namespace) -> tuple[context.Process, socket.socket]:
    """
    Start the engine's process. Return the process and our end of the link to it. If either process
    ends, the link closes, and the other process also ends.

    SIGINT, SIGTERM and SIGHUP are blocked in the engine's process, because Ctrl-C at a terminal
    reaches both processes, but the HTTP process decides when to stop. A new process inherits
    blocked signals, so they are also blocked here, but only until the engine's process has started.
    """
    ours, theirs = socket.socketpair()
    process = context.Process(target=engine_process, args=(args, theirs), daemon=True)
    # otherwise process.start would start the resource tracker, which unblocks the signals
    resource_tracker.ensure_running()
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()  # the engine's process has a copy; the link closes when that copy does
    return process, ours


# --------------------------------------------------------------------------------------------------
# Over HTTP


def api_keys(args: Namespace) -> list[str]:
    """
    Return the keys in --api-key-file (one per line; blank and repeated lines are dropped), or the
    key from --api-key or the environment. Raises ValueError if the file cannot be read, or if the
    file or key is blank.
    """
    if args.api_key_file is not None:
        try:
            with open(args.api_key_file, encoding="utf-8-sig") as f:
                keys = [line.strip() for line in f if line.strip()]
        except (OSError, ValueError) as error:
            raise ValueError(
                f"--api-key-file {args.api_key_file} cannot be read ({error}): name a file with "
                "one key per line"
            ) from None
        if not keys:
            raise ValueError(
                f"--api-key-file {args.api_key_file} contains no keys: write one key per line"
            )
        return list(dict.fromkeys(keys))
    where = "--api-key"
    key = args.api_key
    if key is None:
        where = f"${KEY_VARIABLE}"
        key = os.environ.get(KEY_VARIABLE)
    if key is None:
        return []
    if not key.strip():  # a secret that a deployment forgot to set must not open the server
        raise ValueError(f"{where} is blank: set a key, or unset it to serve without one")
    return [key.strip()]


def warn_of_readable_keys(path: str):
    """Print a warning on stderr if users other than the file's owner can read the keys."""
    if os.stat(path).st_mode & 0o077:  # any permission for the group or for others
        print(
            f"warning: other users can read --api-key-file {path}: run chmod 600 {path}",
            file=sys.stderr,
        )


def open_port(host: str, port: int) -> socket.socket:
    """Return a listening socket. With host "::", it also accepts IPv4."""
    family = socket.getaddrinfo(host, None)[0][0]
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    sock = socket.create_server((host, port), family=family, dualstack_ipv6=both)
    # Disable Nagle's algorithm, which would delay answers by 40 ms. Connections inherit the option.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def listen(args: Namespace, keys: list[str]) -> socket.socket:
    """
    Open the listening socket before anything is loaded. Exit with a message if this fails, or if
    other machines could use the server although there are no API keys.
    """
    try:
        sock = open_port(args.host, args.port)
    except (OSError, UnicodeError) as error:
        # socket.create_server appends the address to the system's message
        reason = getattr(error, "strerror", str(error)).partition(" (while")[0]
        remedy = "stop the program that uses this port, or choose another --port"
        if isinstance(error, socket.gaierror | UnicodeError) or error.errno == errno.EADDRNOTAVAIL:
            remedy = "--host must be a name or address of this machine, without a port"
        sys.exit(f"cannot listen on {args.host}:{args.port}: {reason}; {remedy}")
    is_local = ipaddress.ip_address(sock.getsockname()[0]).is_loopback
    if not (keys or is_local or args.allow_remote):
        sys.exit(
            f"--host {args.host} opens the model to other machines without an API key: set "
            f"${KEY_VARIABLE} or --api-key-file, or add --allow-remote if that is intended"
        )
    if args.api_key_file is not None:
        warn_of_readable_keys(args.api_key_file)
    return sock


def client_and_encoder(args: Namespace):
    """Return an EngineClient (which starts the engine) and its model's Encoder."""
    from server.client import EngineClient
    from server.text import Encoder

    encoder = Encoder(args.model, args.default_chat_template_kwargs)
    return EngineClient(partial(start_engine, args)), encoder


def terminate_on_hang_up():
    """
    Make SIGHUP, which is sent when the terminal closes, drain and end the server as SIGTERM does.
    Under nohup, SIGHUP remains ignored.
    """
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))


def serve_http(args: Namespace) -> str | None:
    """Serve until a signal arrives. Return None for exit code 0, or an error message."""
    # Until the event loop runs, there is nothing to drain: exit immediately. (The engine ends with
    # its link.)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    terminate_on_hang_up()
    from server.app import Service  # here, so that a missing package is found before loading

    check_model(args.model)  # report a wrong model name before a port that is in use
    keys = api_keys(args)  # read once: the file may be a pipe
    sock = listen(args, keys)
    import uvicorn

    # use uvloop if it is installed: 25% more tokens per second with 32 streams on 2 cores
    make_loop = uvicorn.Config(None).get_loop_factory()
    client, encoder = client_and_encoder(args)
    collect_garbage_rarely()
    try:
        with asyncio.Runner(loop_factory=make_loop) as runner:
            return runner.run(Service(client, encoder, args, keys).run(sock))
    finally:
        # ignore further signals, which could leave the engine running
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        encoder.close()
        # the engine does not notice a closed link while it is loading a model
        client.process.join(5 if client.state == "ready" else 0)
        client.process.kill()


def create_record(path: str):
    """Create the --record file before loading a model. Raises OSError."""
    try:
        with open(path, "a") as file:
            is_empty = file.tell() == 0  # new, or left by a failed start
    except OSError as error:
        raise OSError(f"--record {path}: {error.strerror}; name another file") from None
    if not is_empty:
        raise OSError(f"--record {path} already exists: name a new file")


def main(argv: list[str] | None = None):
    set_environment()
    args = parse_args(argv)
    announce(f"loading {args.model}")
    if args.sampling_note:  # about sampling defaults that come with the model
        print(args.sampling_note, file=sys.stderr)
    try:
        if args.record is not None:
            create_record(args.record)
        if args.chat or args.prompt is not None:
            from server.terminal import run

            problem = run(args, build_engine)
        else:
            problem = serve_http(args)
    except (ValueError, RuntimeError, OSError, ModuleNotFoundError, MemoryError) as error:
        # for example, a missing or broken model, or flags that contradict each other
        problem = last_words(error)
    except KeyboardInterrupt:
        problem = "interrupted"
    sys.exit(problem)


if __name__ == "__main__":
    main()
