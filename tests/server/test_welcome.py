"""First contact: the page's policy, and wrong flags of each command."""

import argparse
import base64
import hashlib

import pytest

import bench
import serve
import train
from common import Help, announce, plural
from server import welcome


def test_only_the_pages_own_script_runs_and_nothing_frames_it():
    """The hashes are those of its one script and its one style; what is added to it is not run."""
    html = "<p><style>a{}</style><script>go()</script><script type='x'>data</script>"
    headers = welcome.page_headers(html)
    parts = headers["Content-Security-Policy"].split(";")
    policy = dict(part.strip().split(" ", 1) for part in parts)
    closed = ("default-src", "base-uri", "form-action", "frame-ancestors")
    assert {name: policy.get(name) for name in closed} == dict.fromkeys(closed, "'none'")
    assert policy["img-src"] == "data:" and policy["connect-src"] == "'self'"
    for name, content in (("script-src", b"go()"), ("style-src", b"a{}")):
        digest = base64.b64encode(hashlib.sha256(content).digest()).decode()
        assert policy[name] == f"'sha256-{digest}'"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cache-Control"] == "no-store"


TRAIN, BENCH = train.build_parser().parse_args, bench.build_parser("", bench.COMMANDS).parse_args
FLAG = "unrecognized arguments: "
BATCH = "--batch-sise 4"


@pytest.mark.parametrize(
    ("parse", "typed", "problem"),
    [
        (serve.parse_args, "--porte 3", f"{FLAG}--porte 3; did you mean --port?"),
        (serve.parse_args, "--kv_blocks=3", f"{FLAG}--kv_blocks=3; did you mean --kv-blocks?"),
        (serve.parse_args, "--nothing-like-it", f"{FLAG}--nothing-like-it"),
        (TRAIN, f"--steps 1 {BATCH}", f"{FLAG}{BATCH}; did you mean --batch_size?"),
        (BENCH, "server --stream_s 4", f"{FLAG}--stream_s 4; did you mean --streams?"),
        (BENCH, "server --streams 0", "--streams: 0 is too small, wanted at least 1"),
    ],
)
def test_a_wrong_flag_has_two_lines(parse, typed, problem, capsys):
    """There were 27 lines of usage before the one that says what is wrong."""
    with pytest.raises(SystemExit) as end:
        parse(typed.split())
    line, usage = capsys.readouterr().err.splitlines()
    assert line.endswith(problem) and end.value.code == 2
    assert usage.endswith(" --help lists the flags")


def test_counts_have_their_noun():
    counts = [plural(n, "old block") for n in (0, 1, 2, 6400)]
    assert counts == ["0 old blocks", "1 old block", "2 old blocks", "6,400 old blocks"]


def test_one_process_says_that_it_begins(monkeypatch, capsys):
    for rank in ("0", "1", "7"):
        monkeypatch.setenv("RANK", rank)
        announce(f"loading {rank}")
    assert capsys.readouterr().err == "loading 0 ..\n"


def test_help_names_defaults_that_are_some():
    parser = argparse.ArgumentParser(formatter_class=Help)
    parser.add_argument("--number", default=3, help="a number")
    parser.add_argument("--none", help="nothing")
    parser.add_argument("--list", nargs="*", default=[], help="a list")
    parser.add_argument("--switch", action="store_true", help="a switch")
    parser.add_argument("--zero", default=0, help="a zero")
    text = parser.format_help()
    assert "a number (default: 3)" in text and "a zero (default: 0)" in text
    assert text.count("(default") == 2
