"""
Every flag of serve.py reaches what it sets: read from the command line, handed to the engine, to
its loop, to the HTTP processes or to the terminal. Each row of the tables changes one flag and
finds one difference.
"""

import argparse
import json
import os
import signal
import socket
import sys
from types import SimpleNamespace

import pytest
import torch

import checkpoint
import serve
from serving import (
    api,  # before a test names a folder of metrics, which is read when it is imported
    engine,
    loop,
    terminal,
    workers,
)
from serving.workers import METRICS_FOLDER
from tokenizer import TextStream

# What `serve.py` alone means: a reader of README and --help relies on each.
DEFAULTS = {
    "model": "out/stdlib", "device": None, "dtype": "auto", "quantize": "none", "compile": False,
    "attention": "auto", "num_blocks": None, "block_size": 16, "max_model_len": None,
    "max_num_seqs": None,
    "token_budget": None, "prefill_share": 0.25, "policy": "priority",
    "max_num_partial_prefills": 4,
    "max_long_partial_prefills": 1, "long_prefill_threshold": 512, "graphs": True,
    "prefix_cache": True,
    "trace": False, "check": False,
    "host": "127.0.0.1", "port": 8000, "api_key_file": None, "api_key": None, "allow_remote": False,
    "allowed_hosts": [], "allowed_origins": [], "served_model_name": None, "http_workers": None,
    "max_queue": 256,
    "max_body_mib": 4.0, "max_connections": 512, "client_seconds": 30.0, "request_seconds": 600.0,
    "drain_seconds": 30.0, "log_requests": False, "access_log": True,
    "prompt": None, "chat": False, "raw": False, "max_tokens": None, "temperature": 0.8,
    "seed": None,
    "record": None, "replay": None, "generation_config": "auto",
    "default_chat_template_kwargs": None,
    "sampling": {}, "sampling_note": "",
}  # fmt: skip

# flag as it is typed, what it sets, to what
FLAGS = [
    ("--model DIR", "model", "DIR"),
    ("--device cuda:1", "device", "cuda:1"),
    ("--generation-config vllm", "generation_config", "vllm"),
    ('--default-chat-template-kwargs {"a":1}', "default_chat_template_kwargs", {"a": 1}),
    *((f"--dtype {name}", "dtype", name) for name in ("fp32", "bf16", "fp16")),
    ("--quantize int8", "quantize", "int8"),
    ("--compile", "compile", True),
    ("--attention flex", "attention", "flex"),
    ("--kv-blocks 7", "num_blocks", 7),
    ("--block-size 8", "block_size", 8),
    ("--max-model-len 99", "max_model_len", 99),
    ("--max-num-seqs 3", "max_num_seqs", 3),
    ("--token-budget 77", "token_budget", 77),
    ("--prefill-share 0.5", "prefill_share", 0.5),
    ("--policy fcfs", "policy", "fcfs"),
    ("--policy sjf", "policy", "sjf"),
    ("--max-num-partial-prefills 2", "max_num_partial_prefills", 2),
    ("--max-long-partial-prefills 3", "max_long_partial_prefills", 3),
    ("--long-prefill-threshold 600", "long_prefill_threshold", 600),
    ("--no-graphs", "graphs", False),
    ("--no-prefix-cache", "prefix_cache", False),
    ("--trace", "trace", True),
    ("--check", "check", True),
    ("--record F", "record", "F"),
    ("--replay F", "replay", "F"),
    ("--host ::1", "host", "::1"),
    ("--port 0", "port", 0),
    ("--api-key-file F", "api_key_file", "F"),
    ("--api-key K", "api_key", "K"),
    ("--allow-remote", "allow_remote", True),
    ("--allowed-hosts a b", "allowed_hosts", ["a", "b"]),
    ("--allowed-origins null http://A:80", "allowed_origins", ["null", "http://a"]),
    ("--served-model-name gpt", "served_model_name", "gpt"),
    ("--http-workers 2", "http_workers", 2),
    ("--max-queue 0", "max_queue", 0),
    ("--max-body-mib 0.5", "max_body_mib", 0.5),
    ("--max-connections 1", "max_connections", 1),
    ("--client-seconds 0.5", "client_seconds", 0.5),
    ("--request-seconds 1.5", "request_seconds", 1.5),
    ("--drain-seconds 0", "drain_seconds", 0.0),
    ("--log-requests", "log_requests", True),
    ("--no-access-log", "access_log", False),
    ("--prompt x", "prompt", "x"),
    ("--chat", "chat", True),
    ("--raw", "raw", True),
    ("--max-tokens 5", "max_tokens", 5),
    ("--temperature 0", "temperature", 0.0),
    ("--seed 0", "seed", 0),
]


def test_defaults():
    assert vars(serve.parse_args([])) == DEFAULTS


@pytest.mark.parametrize(("typed", "name", "value"), FLAGS, ids=[typed for typed, *_ in FLAGS])
def test_each_flag_sets_one_thing(typed, name, value):
    assert vars(serve.parse_args(typed.split())) == DEFAULTS | {name: value}


def test_every_flag_is_in_the_table():
    of_the_model = {"sampling", "sampling_note"}  # see test_model_defaults.py
    assert {name for _, name, _ in FLAGS} | of_the_model == DEFAULTS.keys()


@pytest.mark.parametrize(
    ("typed", "problem"),
    [
        ("enable_thinking=false", "Expecting value"),
        ("[1]", "must be a JSON object"),
        ('{"tools": 1}', "has 'tools', which is not a caller's to set"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_variables_of_the_template_that_are_none(typed, problem, capsys):
    with pytest.raises(SystemExit):
        serve.parse_args(["--default-chat-template-kwargs", typed])
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    "flag", ["--max-tokens", "--max-connections", "--http-workers", "--long-prefill-threshold"]
)
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("0", "0 is too small, wanted at least 1"),
        ("2147483648", "2147483648 is too large, wanted less than 2147483648"),
        ("x", "invalid int value: 'x'"),
    ],
)
def test_counts_are_at_least_one(flag, text, why, capsys):
    assert serve.parse_args([flag, "1"])
    with pytest.raises(SystemExit):
        serve.parse_args([flag, text])
    assert f"argument {flag}: {why}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flag", ["--client-seconds", "--request-seconds", "--drain-seconds", "--max-body-mib"]
)
def test_limits_of_time_and_size_may_be_fractions(flag):
    assert serve.parse_args([flag, "0"]) and serve.parse_args([flag, "0.25"])
    with pytest.raises(SystemExit):
        serve.parse_args([flag, "-0.25"])


# --------------------------------------------------------------------------------------------------
# The engine

NOT_THE_ENGINES = {"model", "device", "dtype"}
OF_THE_ENGINE = [*DEFAULTS][: [*DEFAULTS].index("host")]


@pytest.fixture
def built(monkeypatch):
    """built("--trace") is what build_engine loads, and with what it makes an Engine."""

    def load(directory, device, dtype, check=None):
        return SimpleNamespace(directory=directory, device=device, dtype=dtype)

    def build(*flags) -> dict:
        made, settings = serve.build_engine(serve.parse_args([*flags]))
        return vars(made) | vars(settings)

    monkeypatch.setattr(engine, "Engine", lambda made, settings: (made, settings))
    monkeypatch.setattr(checkpoint, "load_checkpoint", load)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return build


def test_what_the_engine_is_built_with(built):
    wanted = {name: DEFAULTS[name] for name in OF_THE_ENGINE if name not in NOT_THE_ENGINES}
    wanted |= {"watermark": 0.01, "overlap": None, "seed": None, "window": 0}  # without a flag
    assert built() == wanted | {
        "directory": "out/stdlib",
        "device": "cuda",
        "dtype": torch.bfloat16,
    }


@pytest.mark.parametrize(
    ("typed", "name", "value"),
    [row for row in FLAGS if row[1] in OF_THE_ENGINE and row[1] not in NOT_THE_ENGINES],
    ids=str,
)
def test_each_flag_of_the_engine_reaches_it(built, typed, name, value):
    assert built(*typed.split()) == built() | {name: value}


@pytest.mark.parametrize(
    ("typed", "device", "dtype"),
    [
        ("--device cpu", "cpu", torch.float32),
        ("--device cpu --dtype bf16", "cpu", torch.bfloat16),
        ("--device cuda:1", "cuda:1", torch.bfloat16),
        ("--dtype fp32", "cuda", torch.float32),
        ("--dtype fp16", "cuda", torch.float16),
        ("--dtype bf16", "cuda", torch.bfloat16),
    ],
)
def test_device_and_dtype_of_the_weights(built, typed, device, dtype):
    assert built(*typed.split()) == built() | {"device": device, "dtype": dtype}
    assert built("--model", "DIR")["directory"] == "DIR"


def test_without_a_gpu_the_cpu_serves(built, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert (built()["device"], built()["dtype"]) == ("cpu", torch.float32)
    for device in ("cuda", "cuda:1"):
        with pytest.raises(ValueError, match=f"--device {device}: torch sees no GPU here"):
            built("--device", device)
    with pytest.raises(ValueError, match="--dtype fp16 is for GPUs"):
        built("--dtype", "fp16")


@pytest.fixture
def engine_process(monkeypatch, tmp_path, capfd):
    """
    Runs what the engine's process runs, here, with an engine that `build` makes; returns what it
    did.
    """

    def run(build, *flags):
        folder = tmp_path / "sockets"
        folder.mkdir()
        threads, ran = [], []
        monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
        monkeypatch.setattr(torch, "set_num_threads", threads.append)
        monkeypatch.setattr(serve, "build_engine", build)
        monkeypatch.setattr(serve, "collect_garbage_rarely", lambda: None)
        monkeypatch.setattr(loop, "serve", lambda *args: ran.append(args))
        with (
            serve.listen_for_links(str(folder)) as listener,
            socket.socket(socket.AF_UNIX) as client,
        ):
            client.connect(listener.getsockname())
            serve.engine_process(serve.parse_args([*flags]), listener)
            client.settimeout(60)
            heard = b"" if ran else client.recv(4096)
        return SimpleNamespace(
            ran=ran, threads=threads, heard=heard, folder=folder, err=capfd.readouterr().err
        )

    return run


def test_the_engines_process_hands_the_queues_length_to_the_loop(engine_process):
    """
    One core is left to HTTP; what was built is said; and when all are gone, so is the folder of the
    sockets.
    """
    made = SimpleNamespace(statement=lambda: "what was built")
    done = engine_process(lambda args: made, "--max-queue", "5")
    ((ran, links, max_queue),) = done.ran
    assert ran is made and max_queue == 5 and len(links.links) == 1
    assert done.threads == [3] and done.err == "what was built\n" and not done.folder.exists()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("no model in DIR: run train.py"), "no model in DIR: run train.py"),
        (KeyError("a bug"), "KeyError: 'a bug'"),
        (RuntimeError("CUDA has none"), "RuntimeError: CUDA has none"),
    ],
)
def test_an_engine_that_cannot_be_built_says_why_to_all(engine_process, error, message):
    """In one line, and a bug by its name."""

    def build(args):
        raise error

    done = engine_process(build)
    assert json.loads(done.heard) == {"op": "fatal", "message": message} and not done.ran


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (3, 2), (16, 15)])
def test_one_core_is_left_to_http(monkeypatch, cores, threads):
    monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
    assert serve.engine_threads() == threads


# --------------------------------------------------------------------------------------------------
# The first HTTP process


@pytest.fixture
def served(monkeypatch):
    """Runs serve_http with flags as far as `first_process`, and returns what that was given."""
    seen = []

    def lead(args, listener, sockets):
        seen.append(SimpleNamespace(args=args, count=len(sockets), path=listener.getsockname()))
        seen[0].metrics = os.environ.get(METRICS_FOLDER)
        seen[0].handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
        for sock in sockets:
            sock.close()
        return "the end"

    def run(*flags):
        seen.clear()
        args = serve.parse_args(["--port", "0", *flags])
        result = serve.serve_http(args)
        assert seen and seen[0].args is args and result == "the end"
        return seen[0]

    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    monkeypatch.setattr(serve, "first_process", lead)
    monkeypatch.delenv(METRICS_FOLDER, raising=False)
    yield run
    os.environ.pop(METRICS_FOLDER, None)
    for number, handler in zip((signal.SIGTERM, signal.SIGHUP), before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("cores", "flags", "count"), [(8, [], 2), (8, ["--http-workers", "1"], 1), (2, [], 1)]
)
def test_as_many_sockets_as_http_processes(served, monkeypatch, cores, flags, count):
    """
    One for every four cores, or as many as the flag says; several count for /metrics in one folder.
    """
    monkeypatch.setattr(workers.os, "cpu_count", lambda: cores)
    monkeypatch.setattr(workers, "can_share_port", lambda: True)
    done = served(*flags)
    assert done.count == count and done.metrics == (
        os.path.dirname(done.path) if count > 1 else None
    )
    assert not os.path.exists(os.path.dirname(done.path)) and all(map(callable, done.handlers))


def test_two_processes_already_add_up_their_metrics(served, monkeypatch):
    monkeypatch.setattr(workers, "can_share_port", lambda: True)
    assert served("--http-workers", "2").metrics


def test_how_many_http_processes_there_may_be(monkeypatch):
    """Exactly the most are started; and without a port that can be shared, only one."""
    monkeypatch.setattr(serve, "end_at_once_on_sigterm", lambda folder: sys.exit("started"))
    monkeypatch.setattr(workers, "can_share_port", lambda: True)
    with pytest.raises(SystemExit, match="started"):
        serve.serve_http(serve.parse_args(["--http-workers", "64"]))
    with pytest.raises(ValueError, match="--http-workers 65: at most 64 are started"):
        serve.serve_http(serve.parse_args(["--http-workers", "65"]))
    monkeypatch.setattr(workers, "can_share_port", lambda: False)
    with pytest.raises(ValueError, match=r"--http-workers 2: .* leave the flag out"):
        serve.serve_http(serve.parse_args(["--http-workers", "2"]))
    with pytest.raises(SystemExit, match="started"):
        serve.serve_http(serve.parse_args(["--http-workers", "1"]))


def test_keys_that_others_can_read_are_told_at_start(served, tmp_path, capsys):
    path = tmp_path / "keys"
    path.write_text("sesame\n")
    path.chmod(0o644)
    served("--api-key-file", str(path))
    assert f"warning: other users can read --api-key-file {path}" in capsys.readouterr().err
    served("--api-key", "sesame")
    assert capsys.readouterr().err == ""


@pytest.fixture
def lead(monkeypatch):
    """Runs first_process with all that it starts replaced; returns what happened, in order."""
    happened = []

    def note(what, result=None):
        return lambda *args, **_: happened.append((what, *args)) or result

    def run(state="ready", problem=None, check=None, count=1):
        happened.clear()
        encoder = SimpleNamespace(check=check or note("check"), close=note("close encoder"))
        client = SimpleNamespace(
            process=SimpleNamespace(join=note("join"), kill=note("kill engine")), state=state
        )
        workers = SimpleNamespace(kill=note("kill workers"))
        monkeypatch.setattr(serve, "Encoder", note("encoder", encoder))
        monkeypatch.setattr(serve, "EngineClient", note("client", client))
        monkeypatch.setattr(serve, "Workers", note("workers", workers))
        monkeypatch.setattr(serve, "serve_port", note("serve", problem))
        args = serve.parse_args(["--model", "DIR", "--api-key", "sesame"])
        result = serve.first_process(
            args, SimpleNamespace(getsockname=lambda: "PATH"), ["sock"] * count
        )
        return result, happened, args

    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield run
    for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
        signal.signal(number, handler)


def test_the_first_process_ends_all_that_it_started(lead):
    """
    A model that loads does not hear us: it is not waited for. What went wrong becomes the exit
    message.
    """
    for state, patience in (("ready", 5), ("loading", 0), ("dead", 0)):
        result, happened, _ = lead(state, problem="what went wrong")
        assert result == "what went wrong"
        assert happened[-4:] == [
            ("kill workers",),
            ("close encoder",),
            ("join", patience),
            ("kill engine",),
        ]
        assert signal.getsignal(signal.SIGINT) == signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


def test_a_broken_template_is_found_before_anything_is_served(lead):
    def check():
        raise ValueError("the chat template is broken")

    with pytest.raises(ValueError, match="is broken"):
        lead(check=check)
    _, happened, _ = lead()
    names = [what for what, *_ in happened]
    assert names.index("check") < names.index("serve") and names[0] == "encoder"


def test_the_first_process_serves_with_its_keys_and_its_seat(lead):
    _, happened, args = lead(count=3)
    calls = {what: rest for what, *rest in happened}
    assert calls["encoder"] == ["DIR"] and calls["client"][0] == "PATH"
    sock, *_, own, keys, spelled, seat, _ = calls["serve"]
    assert (
        sock == "sock" and own is args and keys == ["sesame"] and seat.is_first and seat.number == 0
    )
    assert spelled == "${PAGEDGPT_API_KEY:?set it to the key of the server}"
    start_worker, sockets, counts = calls["workers"]
    assert sockets == ["sock"] * 2 and counts is seat.counts
    assert start_worker.args == (serve.worker_process, args, ["sesame"], "PATH")
    assert calls["client"][1].args[:2] == (serve.engine_process, args)


def test_a_process_that_is_started_gets_no_signals(monkeypatch):
    """
    A terminal signals all of its processes, but when to stop is for the first to say. Its own come
    afterwards; and what multiprocessing starts beside the first process would let them through
    again: it is there already.
    """
    held = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before, seen = signal.pthread_sigmask(signal.SIG_BLOCK, ()), []
    monkeypatch.setattr(serve.resource_tracker, "ensure_running", lambda: seen.append(blocked()))

    def blocked():
        return signal.pthread_sigmask(signal.SIG_BLOCK, ())

    class Process:
        def __init__(self, target, args, daemon):
            self.called = target, args, daemon

        def start(self):
            seen.append(blocked())

    monkeypatch.setattr(serve, "context", SimpleNamespace(Process=Process))
    process = serve.start_process(len, "a", "b")
    assert process.called == (len, ("a", "b"), True)
    assert seen == [before, before | held] and blocked() == before


def test_a_port_is_served_until_the_end(monkeypatch):
    """
    With a garbage collector that leaves a body of a million lists alone: it is read in 0.2 s, not
    in 0.6.
    """
    calls = []

    class Service:
        def __init__(self, *service):
            self.service = service

        def run(self, sock):
            return sock, *self.service

    monkeypatch.setattr(api, "Service", Service)
    monkeypatch.setattr(serve, "run_on_loop", lambda main: main)
    monkeypatch.setattr(serve, "collect_garbage_rarely", lambda: calls.append("gc"))
    assert serve.serve_port("sock", "client", "encoder") == ("sock", "client", "encoder")
    assert calls == ["gc"]


def test_the_other_processes_serve_the_same(monkeypatch):
    """With an engine that they do not start, their own tokenizer, and the same keys."""
    seen = []
    monkeypatch.setattr(serve, "serve_port", lambda *args: seen.append(args))
    monkeypatch.setattr(
        serve, "Encoder", lambda directory, variables: ("encoder", directory, variables)
    )
    monkeypatch.setattr(serve, "EngineClient", lambda *args: ("client", *args))
    flags = ["--model", "DIR", "--api-key", "sesame"]
    args = serve.parse_args([*flags, "--default-chat-template-kwargs", '{"a": 1}'])
    serve.worker_process(args, ["sesame"], "PATH", "sock", "seat")
    shown = "${PAGEDGPT_API_KEY:?set it to the key of the server}"
    assert seen == [
        ("sock", ("client", "PATH"), ("encoder", "DIR", {"a": 1}), args, ["sesame"], shown, "seat")
    ]


def test_how_a_shell_finds_the_key(tmp_path, monkeypatch):
    """
    From any folder, and from a file with a blank in its name; the key itself is shown nowhere.
    """
    monkeypatch.delenv(serve.KEY_VARIABLE, raising=False)
    (tmp_path / "my keys").write_text("sesame\n")
    monkeypatch.chdir(tmp_path)
    shown = serve.key_in_shell(serve.parse_args(["--api-key-file", "my keys"]))
    assert shown == f"$(grep -m 1 '[^[:space:]]' '{tmp_path}/my keys')"
    assert serve.key_in_shell(serve.parse_args([])) == ""
    monkeypatch.setenv(serve.KEY_VARIABLE, "sesame")
    assert (
        serve.key_in_shell(serve.parse_args([]))
        == "${PAGEDGPT_API_KEY:?set it to the key of the server}"
    )


def test_a_key_on_the_command_line_goes_before_the_environments(monkeypatch):
    monkeypatch.setenv(serve.KEY_VARIABLE, "of the environment")
    assert serve.api_keys(serve.parse_args(["--api-key", "of the command"])) == ["of the command"]
    assert serve.api_keys(serve.parse_args([])) == ["of the environment"]
    monkeypatch.setenv(serve.KEY_VARIABLE, " padded\n")
    assert serve.api_keys(serve.parse_args([])) == ["padded"]


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
def test_all_addresses_are_those_of_ipv4_too():
    with serve.listen(serve.parse_args(["--host", "::", "--port", "0", "--allow-remote"])) as sock:
        socket.create_connection(("127.0.0.1", sock.getsockname()[1])).close()


# --------------------------------------------------------------------------------------------------
# What main does


ENDS = [None, "a message", ValueError("v"), RuntimeError("r"), OSError("o"), KeyboardInterrupt()]


@pytest.mark.parametrize(
    ("typed", "place"),
    [
        ([], "http"),
        (["--prompt", "x"], "terminal"),
        (["--prompt", ""], "terminal"),
        (["--chat"], "terminal"),
    ],
)
@pytest.mark.parametrize("end", ENDS)
def test_where_it_runs_and_what_becomes_its_exit(monkeypatch, typed, place, end):
    """One message, never a traceback, for what a user can change."""
    ran = []

    def run(where):
        def run(*args):
            ran.append(where)
            if isinstance(end, BaseException):
                raise end
            return end

        return run

    monkeypatch.setattr(serve, "serve_http", run("http"))
    monkeypatch.setattr(terminal, "run", run("terminal"))
    with pytest.raises(SystemExit) as ended:
        serve.main(typed)
    message = str(end) if isinstance(end, Exception) else end
    if isinstance(end, KeyboardInterrupt):
        message = "interrupted"
    assert ran == [place] and ended.value.code == message


def test_what_torch_reads_when_it_is_loaded(monkeypatch):
    """Threads that wait spin less, and oneDNN keeps little code; what is set already stays."""
    names = {
        "GOMP_SPINCOUNT": "100000",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
        "LRU_CACHE_CAPACITY": "64",
    }
    monkeypatch.setattr(serve, "serve_http", lambda args: None)
    for given in ({}, dict.fromkeys(names, "7")):
        for name in names:
            monkeypatch.delenv(name, raising=False)
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit):
            serve.main([])
        assert {name: os.environ.get(name) for name in names} == names | given
    for name in names:
        monkeypatch.delenv(name)


# --------------------------------------------------------------------------------------------------
# The terminal

SPELL = SimpleNamespace(stream=lambda prompt: TextStream(lambda token: b"x"))


class OneAnswer:
    """An engine that says one token and remembers with which parameters."""

    num_steps, has_work, max_model_len = 0, False, 1000

    def add_request(self, id, prompt, params):
        self.params, self.prompt, self.has_work = params, prompt, True

    def step(self):
        self.has_work = False
        return [SimpleNamespace(error=None, tokens=[120], finish_reason="length")]

    def abort(self, id):
        pass


@pytest.mark.parametrize("seed", [0, 5, 2**63 - 1, -1])
@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.5])
def test_seed_and_temperature_reach_the_sampler(seed, temperature, capsys):
    """--seed was ignored, seen by nobody: "same seed, same text"."""
    args = argparse.Namespace(seed=seed, temperature=temperature, sampling={"temperature": 1.1})
    made = OneAnswer()
    terminal.answer_with_rate(args, made, [1, 2], 7, SPELL)
    assert (made.params.seed, made.params.temperature, made.params.max_tokens) == (
        seed,
        temperature,
        7,
    )
    assert "[1 tokens, " in capsys.readouterr().err and made.prompt == [1, 2]


def test_the_seed_that_is_told_is_the_one_that_was_used(capsys):
    """Of each answer its own, where none was given."""
    seeds = []
    for _ in range(5):
        made = OneAnswer()
        terminal.answer_with_rate(
            argparse.Namespace(seed=None, temperature=1.0, sampling={}), made, [1], 7, SPELL
        )
        assert f", seed {made.params.seed}, cut off]\n" in capsys.readouterr().err
        seeds.append(made.params.seed)
    assert len(set(seeds)) == 5
