"""serve.py: the address it listens at, the ranges of its flags, and what it imports."""

import contextlib
import socket

import pytest
from server import python

import serve


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


def test_a_port_in_use_is_told():
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(SystemExit, match="choose another --port"),
    ):
        serve.listen(serve.parse_args(["--port", str(taken.getsockname()[1])]))


@pytest.mark.parametrize("port", ["-1", "70000"])
def test_a_port_that_does_not_exist_is_refused(port, capsys):
    """The resolver takes ports modulo 65536, so --port 70000 listened at 4464."""
    with pytest.raises(SystemExit):
        serve.parse_args(["--port", port])
    assert f"argument --port: {port} is too" in capsys.readouterr().err


@pytest.mark.parametrize(
    "host, refused", [("0.0.0.0", True), ("::", True), ("127.0.0.1", False), ("localhost", False)]
)
def test_other_machines_are_kept_out(host, refused):
    flags = ["--host", host, "--port", "0"]
    with pytest.raises(SystemExit, match="--allow-remote") if refused else contextlib.nullcontext():
        serve.listen(serve.parse_args(flags)).close()


def test_other_machines_are_let_in_when_forced():
    serve.listen(serve.parse_args(["--host", "0.0.0.0", "--port", "0", "--allow-remote"])).close()


@pytest.mark.parametrize(
    "flag", ["--block-size", "--kv-blocks", "--max-model-len", "--max-num-seqs", "--token-budget"]
)
def test_sizes_are_positive(flag, capsys):
    """A block size of 0 used to end in a ZeroDivisionError in the engine's process."""
    assert serve.parse_args([flag, "1"])
    with pytest.raises(SystemExit):
        serve.parse_args([flag, "0"])
    assert f"argument {flag}: 0 is too small, wanted at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--max-queue", "--max-body-mib", "--drain-seconds"])
def test_limits_are_not_negative(flag, capsys):
    """
    --max-body-mib nan and inf ended in a traceback, and a negative queue refused every request.
    """
    assert serve.parse_args([flag, "0"])
    for value in ["-1"] if flag == "--max-queue" else ["-0.1", "nan"]:
        with pytest.raises(SystemExit):
            serve.parse_args([flag, value])
        assert (
            f"argument {flag}: {value} is too small, wanted at least 0" in capsys.readouterr().err
        )


def test_http_process_imports_no_torch():
    """The HTTP process must start at once and stay small; only the engine's process needs torch."""
    done = python("import sys, serve, serving.api; assert 'torch' not in sys.modules")
    assert done.returncode == 0, done.stderr


def test_serve_itself_imports_no_http_packages():
    """
    `--prompt` and the engine's process do without starlette, uvicorn and pydantic; serving says
    what to install.
    """
    without = "; ".join(
        f"sys.modules[{name!r}] = None" for name in ("starlette", "uvicorn", "pydantic")
    )
    code = f"import sys; {without}; import serve"
    assert python(code).returncode == 0
    done = python(f"{code}; serve.main([])")
    assert (
        done.returncode == 1
        and done.stderr.count("\n") == 1
        and "pip install starlette pydantic uvicorn" in done.stderr
    )
