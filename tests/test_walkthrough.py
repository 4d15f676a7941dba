"""walkthrough.py: each stage alone and all in order give the same logits; its numbers, by hand."""

import ast
import re
import sys
from pathlib import Path

import pytest
import torch

import walkthrough

ROOT = Path(__file__).parents[1]
NUMBERS = range(11)
LENGTHS = [20, 30, 40, 60, 80, 130, 250, 400]
ACCOUNTS = [  # KiB kept, copied, gathered; 4 a token
    (0, 0, 0),
    (4 * 1018, 4 * 1010, 0),  # 1,010 tokens of prompts, and one more for each of eight
    (4 * 8 * 512, 0, 0),
    (4 * 16 * 68, 0, 4 * 8 * 401),  # 2 + 2 + 3 + 4 + 6 + 9 + 16 + 26 blocks; padded to 401
    (4 * 16 * 68, 0, 4 * 8 * 26 * 16),  # tables of 26 blocks
    # grouped by bits of the length: 21 31 | 41 61 | 81 | 131 251 | 401, and the chunk of 64
    (4 * 16 * 68, 0, 4 * (2 * 31 + 2 * 61 + 81 + 2 * 251 + 401 + 64)),
    (4 * 16 * 68, 0, 4 * (2 * 31 + 2 * 61 + 81 + 2 * 251 + 401)),
    (4 * 16 * 68, 0, 0),
    (4 * 16 * 68, 0, 0),
    (4 * 16 * 68, 0, 0),
    (4 * 16 * 68, 0, 0 if torch.cuda.is_available() else 4 * 1168),  # a kernel gathers nothing
]
SAYS = {
    2: ["1,018 of 4,096 tokens are filled, 75.1% waste", "1,018 of 1,088 are filled, 6.4% waste"],
    3: [
        "[22, 62, 18]",
        "352 to 367",
        "992 to 1007",
        "* 16 + 8: 296",
        "256 gathers",
        "to 68% with padding",
    ],
    # block 18, 4 heads of 16 rows: 18 * 64 + 8, and so on
    4: ["slot 296: offset 8 of block 18", "rows [1160, 1176, 1192, 1208]"],
    5: ["9 * 64 = 576 rows, on one axis 72", "21    31    41    61    81   131   251   401    64"],
    6: [
        "block 2 copied to 3",
        "b enters, 4 hit",
        "c waits",
        "3 evicted, 1 evicted",
        "d preempted",
        "d enters, 8 hit",
    ],
    8: ["32 programs; 4 for a request alone"],
    9: ["[[0, 4], [1, 5], [2, 6], [3]]", "128 programs; 16 for a request alone"],
    # a block is new where prompt + step is a multiple of 16: 80 and 400 after 16 steps
    10: [", None]", "new in each step: 0 1 0 1 0 1 0 1 0 0 0 1 0 1 0 2"],
}


@pytest.fixture(autouse=True)
def not_timed(monkeypatch):
    """Each step is computed once, for its logits. (They would take minutes in the interpreter.)"""
    monkeypatch.setattr(walkthrough, "median_seconds", lambda call, repeats: 1e-3)


def walk(monkeypatch, capsys, *arguments) -> str:
    monkeypatch.setattr(sys, "argv", ["walkthrough.py", *arguments])
    walkthrough.main()
    return capsys.readouterr().out


def check(number: int, out: str):
    kept, copied, gathered = ACCOUNTS[number]
    assert f"KiB kept {kept:,}, copied {copied:,}, gathered {gathered:,}" in out
    assert all(part in out for part in SAYS.get(number, [])), out


# in the interpreter the kernel takes seconds; test_all_in_order has these stages, too
SLOW = [pytest.param(number, marks=pytest.mark.slow) for number in (9, 10)]


@pytest.mark.parametrize("number", [*range(9), *SLOW])
def test_alone(number, monkeypatch, capsys):
    """The stage before is computed too, silently: its logits are what this one's must be."""
    out = walk(monkeypatch, capsys, str(number))
    assert re.findall(r"^(\d+)\. ", out, re.MULTILINE) == [str(number)]
    assert out.count("logits as before") == (number > 0)
    check(number, out)


def test_all_in_order(monkeypatch, capsys):
    out = walk(monkeypatch, capsys)
    assert re.findall(r"^(\d+)\. ", out, re.MULTILINE) == [str(number) for number in NUMBERS]
    assert out.count("logits as before") == 10
    for number, part in enumerate(re.split(r"^\d+\. ", out, flags=re.MULTILINE)[1:]):
        check(number, part)


def test_other_logits_stop_it(monkeypatch):
    """A difference that is too large for rounding, and a token that would not be the same."""
    logits = walkthrough.show(0, None)
    best = logits.topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > 0.1, "rounding cannot change a token"
    with pytest.raises(AssertionError, match="not close"):
        walkthrough.show(2, logits + 1e-3)
    logits[0, 0] = torch.nan
    with pytest.raises(AssertionError, match="not close"):
        walkthrough.show(2, logits)


def test_the_numbers_that_it_states():
    """What the blocks really have room for, and what gather.py really gathers."""
    assert tuple(LENGTHS) == walkthrough.LENGTHS and sum(LENGTHS) + 8 == walkthrough.REAL
    assert "1,018 for 8 new" in walkthrough.no_cache.__doc__
    engine = walkthrough.prefilled("torch")
    batch, _ = walkthrough.next_step(engine)
    tables = [r.block_table for r in engine.scheduler.active]
    assert 16 * sum(map(len, tables)) == walkthrough.IN_BLOCKS
    rows = [kv_rows[0, :, 0].numel() for _, kv_rows, _ in batch.prepared[0].gathers]
    assert sum(rows) == walkthrough.GROUPED


def test_without_triton(monkeypatch, capsys):
    monkeypatch.setattr(walkthrough, "triton", None)
    out = walk(monkeypatch, capsys, "7", "8", "9", "10")
    assert out.count("triton is not installed") == 2 and out.count("logits as before") == 2


def test_a_stage_that_is_not_there(monkeypatch, capsys):
    for wrong in "11", "x", "--help":
        with pytest.raises(SystemExit, match=f"^{wrong}: wanted a stage, 0 to 10, or nothing"):
            walk(monkeypatch, capsys, wrong)


def test_what_it_says_to_read_is_there():
    """Each stage ends with a name to look for, and a question."""
    for stage in walkthrough.STAGES:
        last = stage.__doc__.splitlines()[-1].strip()
        file, name = re.match(r"Now read ([\w/]+\.py): ([\w.]+)\. .+\?$", last).groups()
        node = ast.parse((ROOT / file).read_text())
        for part in name.split("."):
            (node,) = (x for x in node.body if getattr(x, "name", None) == part)


def test_it_stays_short():
    lines = Path(walkthrough.__file__).read_text().splitlines()
    assert len(lines) <= 400 and max(map(len, lines)) <= 100
