"""
Every flag of serve.py sets what it says: each row of the tables changes one flag and finds one
difference. The engine's settings also take their defaults from here.
"""

import json
import signal
import socket
from itertools import chain
from unittest.mock import Mock

import pytest
import torch

import serve
from engine import process as loop
from flags import engine_settings

# What `serve.py` means without flags: readers of README and --help rely on each.
DEFAULTS = """{
    "model": "out/stdlib", "device": null, "dtype": "auto", "quantize": "none",
    "attention": "auto", "num_blocks": null, "block_size": 16, "max_model_len": null,
    "max_num_seqs": null, "token_budget": null, "prefill_share": 0.25, "policy": "priority",
    "deterministic": false, "graphs": true, "speculate": false, "prefix_cache": true,
    "check": false, "host": "127.0.0.1", "port": 8000,
    "api_key_file": null, "api_key": null, "allow_remote": false, "allowed_hosts": [],
    "allowed_origins": [], "served_model_name": null, "max_queue": 256,
    "max_body_mib": 4.0, "max_connections": 512, "client_seconds": 30.0, "request_seconds": 600.0,
    "keep_alive_seconds": 75.0,
    "drain_seconds": 30.0, "reasoning": "on", "log_requests": false, "access_log": true,
    "prompt": null, "chat": false, "raw": false, "max_tokens": null, "temperature": 0.8,
    "seed": null, "record": null, "generation_config": "auto",
    "default_chat_template_kwargs": null, "sampling": {}, "sampling_note": ""}"""

# flags as they are typed -> the one thing that each sets
FLAGS = r"""
--model DIR -> {"model": "DIR"}
DIR -> {"model": "DIR"}
--port 0 DIR -> {"model": "DIR", "port": 0}
DIR --chat -> {"model": "DIR", "chat": true}
--device cpu -> {"device": "cpu"}
--device cuda:1 -> {"device": "cuda:1"}
--generation-config vllm -> {"generation_config": "vllm"}
--default-chat-template-kwargs {"a":1} -> {"default_chat_template_kwargs": {"a": 1}}
--dtype fp32 -> {"dtype": "fp32"}
--quantize int8 -> {"quantize": "int8"}
--attention torch -> {"attention": "torch"}
--kv-blocks 7 -> {"num_blocks": 7}
--block-size 8 -> {"block_size": 8}
--max-model-len 99 -> {"max_model_len": 99}
--max-num-seqs 3 -> {"max_num_seqs": 3}
--token-budget 77 -> {"token_budget": 77}
--prefill-share 0.5 -> {"prefill_share": 0.5}
--policy fcfs -> {"policy": "fcfs"}
--policy sjf -> {"policy": "sjf"}
--deterministic -> {"deterministic": true}
--no-graphs -> {"graphs": false}
--speculate -> {"speculate": true}
--no-prefix-cache -> {"prefix_cache": false}
--check -> {"check": true}
--record F -> {"record": "F"}
--host ::1 -> {"host": "::1"}
--port 0 -> {"port": 0}
--port 65535 -> {"port": 65535}
--api-key-file F -> {"api_key_file": "F"}
--api-key K -> {"api_key": "K"}
--allow-remote -> {"allow_remote": true}
--allowed-hosts a b -> {"allowed_hosts": ["a", "b"]}
--allowed-origins null http://A:80 -> {"allowed_origins": ["null", "http://a"]}
--allowed-origins https://a:443 * -> {"allowed_origins": ["https://a", "*"]}
--allowed-origins https://a:80 http://[::1]:80 -> {"allowed_origins": ["https://a:80", "http://[::1]"]}
--allowed-origins http://a:443 -> {"allowed_origins": ["http://a:443"]}
--served-model-name gpt -> {"served_model_name": "gpt"}
--max-queue 0 -> {"max_queue": 0}
--max-body-mib 0.5 -> {"max_body_mib": 0.5}
--max-connections 1 -> {"max_connections": 1}
--client-seconds 0.5 -> {"client_seconds": 0.5}
--keep-alive-seconds 5 -> {"keep_alive_seconds": 5.0}
--request-seconds 1.5 -> {"request_seconds": 1.5}
--drain-seconds 0 -> {"drain_seconds": 0.0}
--reasoning off -> {"reasoning": "off"}
--log-requests -> {"log_requests": true}
--no-access-log -> {"access_log": false}
--prompt x -> {"prompt": "x"}
--chat -> {"chat": true}
--raw -> {"raw": true}
--max-tokens 5 -> {"max_tokens": 5}
--temperature 0 -> {"temperature": 0.0}
--seed 0 -> {"seed": 0}
"""


@pytest.mark.parametrize("row", [" -> {}", *FLAGS.strip().splitlines()])
def test_each_flag_sets_one_thing(row):
    """A setting of the engine also reaches it."""
    typed, effect = row.split(" -> ")
    args = serve.parse_args(typed.split())
    assert vars(args) == json.loads(DEFAULTS) | json.loads(effect)
    settings = vars(engine_settings(args))
    shared = settings.keys() & vars(args).keys() - {"seed"}  # of the terminal
    assert len(shared) == 14
    assert all(settings[name] == getattr(args, name) for name in shared)


def test_every_flag_is_in_the_table():
    of_the_model = {"sampling", "sampling_note"}  # see test_model_defaults.py
    effects = [json.loads(row.split(" -> ")[1]) for row in FLAGS.strip().splitlines()]
    assert {*chain(*effects)} | of_the_model == json.loads(DEFAULTS).keys()


# --------------------------------------------------------------------------------------------------
# The engine's process


@pytest.mark.parametrize("device, count", [("cuda", 0), ("cuda:1", 0), ("cuda:2", 2)])
def test_a_gpu_that_is_not_there(device, count, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(ValueError, match=f"--device {device}: torch sees {count} GPUs here"):
        serve.build_engine(serve.parse_args(["--device", device]))


def test_the_gpu_that_is_named_becomes_the_current_one(monkeypatch):
    """
    With --device cuda:1, the model was on GPU 1, but CUDA graphs and events were made on GPU 0, and
    a record named GPU 0 as the machine.
    """
    set_device = Mock(side_effect=RuntimeError("set"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    for device in ("cuda:1", "cuda"):
        with pytest.raises(RuntimeError, match="set"):
            serve.build_engine(serve.parse_args(["--device", device]))
    assert [call.args for call in set_device.call_args_list] == [(1,), (0,)]


def test_the_engines_process_leaves_a_core_to_http(monkeypatch, capfd):
    engine, set_threads = Mock(), Mock()
    engine.statement.return_value = "what was built"
    monkeypatch.setattr(serve, "collect_garbage_rarely", lambda: None)
    monkeypatch.setattr(serve, "build_engine", lambda args: engine)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(torch, "set_num_threads", set_threads)
    monkeypatch.setattr(loop, "serve", Mock())
    ours, theirs = socket.socketpair()
    with ours, theirs:
        serve.engine_process(serve.parse_args([]), theirs)
    set_threads.assert_called_once_with(3)
    assert capfd.readouterr().err == "what was built\n"


def test_an_engine_that_starts_gets_no_signals(monkeypatch):
    """
    A terminal signals all of its processes, but the HTTP process decides when to stop. The engine
    installs its own handlers afterwards. multiprocessing's helper process would unblock the
    signals, so it must have started before.
    """
    held = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    seen = []

    def note_blocked():
        seen.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))

    context = Mock()
    context.Process.return_value.start = note_blocked
    monkeypatch.setattr(serve.resource_tracker, "ensure_running", note_blocked)
    monkeypatch.setattr(serve, "context", context)
    _, link = serve.start_engine(None)
    link.close()
    note_blocked()
    assert seen == [seen[0], seen[0] | held, seen[0]]
