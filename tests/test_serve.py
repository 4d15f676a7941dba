"""serve.py: the address it listens at, the ranges of its flags, and what it imports."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from processes import ROOT, python

import serve
from server import terminal
from server.gate import base_url
from training.corpus import bpe_tokenizer


def test_answers_do_not_wait_for_acknowledgements():
    """
    A listening socket that did not name its protocol made asyncio leave Nagle's algorithm on:
    header and body went out in two writes, and the second waited up to 40 ms for the client to
    acknowledge the first.
    """
    with (
        serve.listen(serve.parse_args(["--port", "0"])) as sock,
        socket.create_connection(sock.getsockname()),
    ):
        accepted, _ = sock.accept()
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        accepted.close()


def test_a_port_in_use_is_reported():
    """The address once, and not the system's number of the error."""
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SystemExit) as end:
        port = taken.getsockname()[1]
        serve.listen(serve.parse_args(["--port", str(port)]))
    assert end.value.code == (
        f"cannot listen at 127.0.0.1:{port}: Address already in use; stop what is there, or choose "
        "another --port"
    )


MODELS = {  # files of a directory -> what is said of it
    "none": ([], "no model in DIR: tokenizer.json is missing"),
    "no config": (["tokenizer.json"], "no model in DIR: config.json is missing"),
    "a GGUF": (["x.gguf"], "GGUF is llama.cpp's"),
    "whole": (["tokenizer.json", "config.json"], "cannot listen at"),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_wrong_model_is_reported_before_a_port_in_use(tmp_path, monkeypatch, case):
    """The wrong name was reported when another port had been found."""
    names, said = MODELS[case]
    for name in names:
        (tmp_path / name).write_text("{}")
    monkeypatch.setattr(serve.signal, "signal", Mock())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        args = serve.parse_args(["--model", str(tmp_path), "--port", port])
        with pytest.raises((ValueError, SystemExit), match=said.replace("DIR", str(tmp_path))):
            serve.serve_http(args)


HOSTS = {  # what is typed -> the refusal, or none
    "no.invalid": r"cannot listen at no\.invalid:0: \w.*; --host is a name or address of this",
    "localhost:8012": r"cannot listen at localhost:8012:0: \w.*; --host is .*, without a port",
    "192.0.2.1": r"cannot listen at 192\.0\.2\.1:0: \w.*; --host is a name or address of this",
    "0.0.0.0": "--allow-remote",
    "::": "--allow-remote",
    "127.0.0.1": "",
    "localhost": "",
    "0.0.0.0 --allow-remote": "",
}


@pytest.mark.parametrize("typed", HOSTS)
def test_other_machines_are_kept_out_unless_forced(typed):
    args = serve.parse_args(["--port", "0", "--host", *typed.split()])
    if not HOSTS[typed]:
        return serve.listen(args).close()
    with pytest.raises(SystemExit, match=HOSTS[typed]):
        serve.listen(args)


def test_the_greeting_has_an_address_to_open():
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "127.0.0.2": "127.0.0.2", "::1": "[::1]"}
    for host, name in shown.items():
        assert base_url(Mock(**{"getsockname.return_value": (host, 80)})) == f"http://{name}:80"


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
def test_all_addresses_are_those_of_ipv4_too():
    with serve.listen(serve.parse_args(["--host", "::", "--port", "0", "--allow-remote"])) as sock:
        socket.create_connection(("127.0.0.1", sock.getsockname()[1])).close()


def test_a_key_on_the_command_line_goes_before_the_environments(monkeypatch):
    monkeypatch.setenv(serve.KEY_VARIABLE, " of the environment\n")
    assert serve.api_keys(serve.parse_args(["--api-key", "of the command"])) == ["of the command"]
    assert serve.api_keys(serve.parse_args([])) == ["of the environment"]


ENDS = [None, "a message", ValueError("v"), RuntimeError("r"), OSError("o"), KeyboardInterrupt()]


@pytest.mark.parametrize("end", ENDS)
def test_each_mode_runs_and_its_message_becomes_the_exit_status(monkeypatch, end):
    """One message, never a traceback, for what a user can change."""
    run = Mock(side_effect=end) if isinstance(end, BaseException) else Mock(return_value=end)
    message = "interrupted" if isinstance(end, KeyboardInterrupt) else end and str(end)
    for module, name, typed in ((serve, "serve_http", "--port=0"), (terminal, "run", "--chat")):
        run.reset_mock()
        monkeypatch.setattr(module, name, run)
        with pytest.raises(SystemExit) as ended:
            serve.main([typed])
        monkeypatch.undo()
        assert ended.value.code == message
        assert run.call_count == 1


@pytest.mark.parametrize("own", [{}, {"GOMP_SPINCOUNT": "7", "LRU_CACHE_CAPACITY": "7"}])
def test_variables_that_torch_reads_are_set_before_it_is_loaded(monkeypatch, own):
    """Threads that wait spin less, and oneDNN keeps little code; what is set already stays."""
    values = {"GOMP_SPINCOUNT": "100000", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}
    values |= {"LRU_CACHE_CAPACITY": "64"} | own
    monkeypatch.setattr(serve, "serve_http", lambda args: None)
    monkeypatch.setattr(os, "environ", dict(own))
    with pytest.raises(SystemExit):
        serve.main([])
    assert os.environ == values


def with_first(folder: Path) -> dict:
    """An environment in which Python looks for modules there first."""
    paths = filter(None, [str(folder), os.environ.get("PYTHONPATH")])
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


@pytest.mark.parametrize(
    "command",
    [
        "serve.py --port 0 --model MODEL",
        "serve.py --prompt x --model MODEL",
        "train.py",
        "bench.py scheduler",
        "walkthrough.py",
    ],
)
def test_a_first_line_comes_before_torch(command, tmp_path):
    """To import torch takes ten seconds on a busy machine, in which nothing was to be seen."""
    bpe_tokenizer([]).save(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "torch.py").write_text("import sys; sys.exit('torch is imported')")
    done = subprocess.run(
        [sys.executable, *command.replace("MODEL", str(tmp_path)).split()],
        cwd=ROOT,
        env=with_first(tmp_path),
        capture_output=True,
        text=True,
        timeout=60,
    )
    first, second = done.stderr.splitlines()[:2]
    assert first in (f"loading {tmp_path} ..", "loading torch ..")
    assert second == "torch is imported"
    assert done.stdout == ""


HTTP = ["orjson", "starlette", "uvicorn", "httptools", "pydantic", "prometheus_client"]
HTTP += ["llguidance"]
MODEL = ["tokenizers", "torch", "numpy", "safetensors", "jinja2", "tqdm", "tiktoken", "triton"]
NOT_NEEDED = {  # modules -> packages that they run without
    "serve, flags": HTTP + MODEL,
    # of train.py, test_paged.py and `serve.py --prompt`
    "train, test_paged, engine.engine, server.text, server.terminal": HTTP,
}


@pytest.mark.parametrize("modules", NOT_NEEDED)
def test_packages_that_are_not_needed(modules):
    packages = NOT_NEEDED[modules]
    done = python(f"import sys; sys.modules |= dict.fromkeys({packages}); import {modules}")
    assert done.returncode == 0, done.stderr


COMMANDS = {  # what is typed -> the packages that it may lack first
    "serve.py --port 0": "orjson",
    "serve.py --prompt x": "tokenizers",
    "serve.py --chat": "tokenizers",
    "train.py": "numpy",
    "bench.py scheduler": "torch",
    "test_paged.py": "torch",
    "walkthrough.py 3": "torch",
    "examples/post.py": "torch",
    "data/text/prepare.py x": "numpy",
    "data/chat/prepare.py x": "tokenizers",
}


def assert_one_line(done: subprocess.CompletedProcess, package: str):
    """
    It names the package, the interpreter, and each of the ways out. Before it may stand what is
    being loaded.
    """
    *before, line = done.stderr.splitlines()
    assert done.returncode == 1 and len(before) <= 1, done.stderr
    assert all(first.endswith(" ..") for first in before), done.stderr
    assert line.startswith(f"{package} is not installed for this Python, {sys.executable}: ")
    for way in "`source .venv/bin/activate`", ".venv/bin/python ", "`make run`", "pip install -r":
        assert way in done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_without_the_virtual_environment_one_line_says_what_to_do(command):
    """Each command ended in a traceback when the environment was not active."""
    program, *flags = command.split()
    bare = [sys.executable, "-S", "-E", str(ROOT / program), *flags]
    done = subprocess.run(bare, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert_one_line(done, COMMANDS[command])
    assert not done.stdout


NO_COMMANDS = {
    "examples/beam_search.py": "a library, ",
    "data/stdlib/prepare.py": "train.py makes this corpus: python train.py",
    "data/shakespeare_char/prepare.py": "python train.py --preset shakespeare_char",
}


@pytest.mark.parametrize("file", NO_COMMANDS)
def test_what_is_no_command_says_so(file, tmp_path):
    """They ended in a traceback: `common` is not beside them."""
    command = [sys.executable, ROOT / file]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert NO_COMMANDS[file] in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_control_c_while_modules_are_imported_is_one_line(tmp_path):
    """In the first 0.3 s there was a traceback."""
    (tmp_path / "asyncio.py").write_text("raise KeyboardInterrupt")
    command = [sys.executable, "serve.py"]
    where = {"cwd": ROOT, "env": with_first(tmp_path)}
    done = subprocess.run(command, **where, capture_output=True, text=True, timeout=60)
    assert done.stderr == "interrupted\n"


def test_an_error_of_another_kind_keeps_its_traceback():
    """It is a bug, and the traceback says where. Ctrl-C while torch is imported is none."""
    code = "from common import end_with_one_line as f; f(); import json; json.loads('')"
    done = python(code)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "JSONDecodeError" in done.stderr
    done = python("from common import end_with_one_line as f; f(); raise KeyboardInterrupt")
    assert done.returncode
    assert done.stderr == "interrupted\n"


def test_a_missing_package_of_the_engine_is_one_line(tmp_path):
    """The engine's process imports them; the HTTP process, which needs none, prints it."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(name='torch')")
    bpe_tokenizer([]).save(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    command = [sys.executable, "serve.py", "--port", "0", "--model", str(tmp_path)]
    where = {"cwd": ROOT, "env": with_first(tmp_path)}
    done = subprocess.run(command, **where, capture_output=True, text=True, timeout=60)
    assert_one_line(done, "torch")
