"""serve.py: the address it listens at, the ranges of its flags, and what it imports."""

import os
import socket
import subprocess
import sys
from unittest.mock import Mock

import pytest
from browser import save_random_model
from processes import ROOT, python

import serve
from server import terminal
from server.gate import base_url
from training.corpus import bpe_tokenizer


def test_answers_do_not_wait_for_acknowledgements():
    """
    Previously the listening socket did not name its protocol, so asyncio left Nagle's algorithm on.
    Header and body went out in two writes, and the second waited up to 40 ms for the client to
    acknowledge the first. "All addresses" also includes those of IPv4.
    """
    host = "::" if socket.has_dualstack_ipv6() else "127.0.0.1"
    args = serve.parse_args(["--host", host, "--port", "0", "--allow-remote"])
    with (
        serve.listen(args, []) as sock,
        socket.create_connection(("127.0.0.1", sock.getsockname()[1])),
    ):
        accepted, _ = sock.accept()
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        accepted.close()


LOADED = "cannot listen on 127.0.0.1:PORT: Address already in use; stop the program that uses "
MODELS = {  # files of a directory -> the message about it, before that about a port in use
    "": "no model in DIR: tokenizer.json is missing",
    "tokenizer.json": "no model in DIR: config.json is missing",
    "x.gguf": "GGUF files are for llama.cpp",
    "tokenizer.json config.json": f"{LOADED}this port, or choose another --port$",
}


@pytest.mark.parametrize("files", MODELS)
def test_a_wrong_model_is_reported_before_a_port_in_use(tmp_path, monkeypatch, files):
    """
    Previously the wrong name was only reported after another port had been found. The message about
    the port has the address once, and not the system's error number.
    """
    for name in files.split():
        (tmp_path / name).write_text("{}")
    monkeypatch.setattr(serve.signal, "signal", Mock())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        args = serve.parse_args(["--model", str(tmp_path), "--port", port])
        words = "^" + MODELS[files].replace("DIR", str(tmp_path)).replace("PORT", port)
        with pytest.raises((ValueError, SystemExit), match=words):
            serve.serve_http(args)


def test_sigterm_while_it_starts_is_no_failure():
    """Previously the signal killed the process until the event loop ran."""
    code = "import serve; serve.check_model = lambda name: serve.signal.raise_signal(15)"
    assert python(f"{code}; serve.main(['--port', '0'])").returncode == 0


HOSTS = {  # what is typed -> the refusal, or none
    "no.invalid": r"cannot listen on no\.invalid:0: \w.*; --host must be a name or address of this",
    "localhost:8012": r"cannot listen on localhost:8012:0: \w.*; --host must be .*, without a port",
    80 * "a": r"cannot listen on a+:0: .*label .*too long.*; --host must be a name or address",
    "192.0.2.1": r"cannot listen on 192\.0\.2\.1:0: \w.*; --host must be a name or address of this",
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
        return serve.listen(args, []).close()
    with pytest.raises(SystemExit, match=HOSTS[typed]):
        serve.listen(args, [])


def test_the_greeting_has_an_address_to_open():
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "127.0.0.2": "127.0.0.2", "::1": "[::1]"}
    for host, name in shown.items():
        assert base_url(Mock(**{"getsockname.return_value": (host, 80)})) == f"http://{name}:80"


MODES = [(serve, "serve_http", "--port=0"), (terminal, "run", "--chat")]
ENDS = [(None, None), ("a message", "a message"), (KeyboardInterrupt(), "interrupted")]
ENDS += [(ValueError("v"), "v"), (RuntimeError("r"), "r"), (OSError("o"), "o")]


@pytest.mark.parametrize("module, name, typed", MODES)
@pytest.mark.parametrize("end, message", ENDS)
def test_a_modes_message_becomes_the_exit_status(monkeypatch, module, name, typed, end, message):
    """What a user can change gets one message, never a traceback."""
    monkeypatch.setattr(module, name, Mock(side_effect=[end]))
    with pytest.raises(SystemExit) as ended:
        serve.main([typed])
    assert ended.value.code == message


@pytest.mark.parametrize("own", [{}, {"GOMP_SPINCOUNT": "7", "LRU_CACHE_CAPACITY": "7"}])
def test_variables_that_torch_reads_are_set_before_it_is_loaded(monkeypatch, own):
    """
    Waiting threads spin less, and oneDNN keeps little code. Variables that are already set stay.
    """
    values = {"GOMP_SPINCOUNT": "100000", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}
    values |= {"LRU_CACHE_CAPACITY": "64"} | own
    monkeypatch.setattr(serve, "serve_http", lambda args: None)
    monkeypatch.setattr(os, "environ", dict(own))
    with pytest.raises(SystemExit):
        serve.main([])
    assert os.environ == values


@pytest.fixture
def start(tmp_path):
    """
    Return a function that runs a command. MODEL is tmp_path, where Python looks for modules first.
    """
    bpe_tokenizer([]).save(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}

    def run(command: str, *options: str) -> subprocess.CompletedProcess:
        words = [sys.executable, *options, *command.replace("MODEL", str(tmp_path)).split()]
        how = {"capture_output": True, "text": True, "timeout": 60}
        return subprocess.run(words, cwd=ROOT, env=environment, **how)

    return run


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
def test_a_first_line_comes_before_torch(command, start, tmp_path):
    """
    Importing torch takes ten seconds on a busy machine. Previously nothing was printed until then.
    """
    (tmp_path / "torch.py").write_text("import sys; sys.exit('torch is imported')")
    done = start(command)
    first, second = done.stderr.splitlines()[:2]
    assert first in (f"loading {tmp_path} ..", "loading torch ..")
    assert second == "torch is imported"
    assert done.stdout == ""


HTTP = ["orjson", "starlette", "uvicorn", "httptools", "pydantic", "prometheus_client"]
HTTP += ["llguidance"]
MODEL = ["tokenizers", "torch", "numpy", "safetensors", "jinja2", "tqdm", "tiktoken", "triton"]
NOT_NEEDED = {  # code -> packages that it runs without
    "import serve, flags": HTTP + MODEL,
    "import train, test_paged, serve; serve.main(['--prompt', 'x', '--model', 'DIR'])": HTTP,
}


@pytest.mark.parametrize("code", NOT_NEEDED)
def test_packages_that_are_not_needed(code, tmp_path):
    save_random_model(tmp_path)
    absent = f"import sys; sys.modules |= dict.fromkeys({NOT_NEEDED[code]})"
    done = python(f"{absent}; {code.replace('DIR', str(tmp_path))}")
    assert done.returncode == 0, done.stderr


COMMANDS = {  # what is typed -> the first packages that may be missing
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
    Check that the line names the package, the interpreter, and each way out. One line about what is
    being loaded may come before it.
    """
    *before, line = done.stderr.splitlines()
    assert done.returncode == 1 and len(before) <= 1, done.stderr
    assert all(first.endswith(" ..") for first in before), done.stderr
    assert line.startswith(f"{package} is not installed for this Python, {sys.executable}: ")
    for way in "`source .venv/bin/activate`", ".venv/bin/python ", "`make run`", "pip install -r":
        assert way in done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_without_the_virtual_environment_one_line_says_what_to_do(command, start):
    """Previously each command ended in a traceback if the environment was not active."""
    done = start(command, "-S", "-E")
    assert_one_line(done, COMMANDS[command])
    assert not done.stdout


def test_a_missing_package_of_the_engine_is_one_line(start, tmp_path):
    """
    The engine's process imports it; the HTTP process, which does not need it, prints the line.
    """
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(name='torch')")
    assert_one_line(start("serve.py --port 0 --model MODEL"), "torch")


def test_a_server_starts_without_standard_streams(start, tmp_path):
    """
    Previously `serve.py >&-` ended with "Unable to configure formatter 'default'". The engine's
    process must have the streams too, or its first files would get their numbers.
    """
    seen = f"open({str(tmp_path / 'seen')!r}, 'w')"
    engine = f"import sys; print(sys.stdout.fileno(), sys.stderr.fileno(), file={seen})"
    (tmp_path / "torch.py").write_text(f"{engine}; raise ModuleNotFoundError(name='torch')")
    run = "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    close = f"import os, sys; os.closerange(0, 3); {run}"
    done = start("serve.py --port 0 --model MODEL", "-c", close)
    assert done.returncode == 1
    assert (tmp_path / "seen").read_text() == "1 2\n"


def test_a_missing_file_is_no_missing_package(monkeypatch):
    """Previously it was a traceback, or the virtual environment was said to be inactive."""
    monkeypatch.setitem(sys.modules, "server.terminal", None)
    with pytest.raises(SystemExit, match=r"^server/terminal\.py is missing: restore it"):
        serve.main(["--prompt", "x"])


def test_a_folder_whose_name_safetensors_cannot_read():
    with pytest.raises(SystemExit) as ended:
        serve.main(["a\udcff", "--prompt", "x"])
    assert "udcff' is not UTF-8: rename the folder" in ascii(ended.value.code)


NO_COMMANDS = {
    "examples/beam_search.py": "this is a library: ",
    "data/stdlib/prepare.py": "train.py creates this corpus: python train.py",
    "data/shakespeare_char/prepare.py": "python train.py --preset shakespeare_char",
}


@pytest.mark.parametrize("file", NO_COMMANDS)
def test_what_is_no_command_says_so(file, start):
    """Previously they ended in a traceback, because `common` is not beside them."""
    (line,) = start(file).stderr.splitlines()
    assert NO_COMMANDS[file] in line


def test_control_c_while_modules_are_imported_is_one_line(start, tmp_path):
    """Previously there was a traceback in the first 0.3 s."""
    (tmp_path / "asyncio.py").write_text("raise KeyboardInterrupt")
    assert start("serve.py").stderr == "interrupted\n"


def test_an_error_of_another_kind_keeps_its_traceback():
    """It is a bug, and the traceback shows where."""
    done = python("from common import end_with_one_line as f; f(); import json; json.loads('')")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "JSONDecodeError" in done.stderr
