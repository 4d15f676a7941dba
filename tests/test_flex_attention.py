"""
examples/flex_attention.py: the command, which compares its own answers with the engine's.
test_families.py tests its operators.
"""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from browser import save_random_model

from examples import flex_attention
from test_paged import prompt, trained_model

COMMAND = Path(flex_attention.__file__).resolve()

# the second begins like the first
TEXTS = [prompt(1, 40), prompt(1, 30), prompt(2, 2), prompt(3, 47)]


@pytest.fixture
def main(monkeypatch):
    """Return the command, with texts that are lists of token ids."""
    tokenizer = SimpleNamespace(encode=json.loads, decode=str)
    monkeypatch.setattr(flex_attention, "load_checkpoint", lambda directory: trained_model())
    monkeypatch.setattr(flex_attention, "load_tokenizer", lambda directory: tokenizer)
    return lambda: flex_attention.main("", *map(str, TEXTS))


def test_its_answers_are_the_engines(main, capsys):
    """The requests have chunks beside decodes, and their own blocks and heads."""
    main()
    lines = capsys.readouterr().out.splitlines()
    assert [line[:5] for line in lines] == ["torch", "flex "] * len(TEXTS) + ["the a"]


def test_answers_that_differ_are_an_error(main, monkeypatch):
    """Would catch: an engine that uses its own operators both times."""
    monkeypatch.setattr(flex_attention, "may_see", lambda query, key, window: key == query)
    with pytest.raises(SystemExit, match="the answers differ"):
        main()


def test_a_text_that_is_too_long_is_refused_in_one_line(tmp_path):
    """Previously there was a traceback, as there was for a model without a tokenizer."""
    save_random_model(tmp_path, context_length=64)
    command = [sys.executable, COMMAND, tmp_path, 100 * "x"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("100 prompt tokens + ")
