"""
walkthrough.py: each stage by itself, and all in order, give the same logits; its numbers, by hand.
"""

import re
import sys
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from test_readme import names_defined
from torch.utils._python_dispatch import TorchDispatchMode

import walkthrough
from kernels import INTERPRETED

ROOT = Path(__file__).parents[1]
POINTER = r"Now read ([\w/]+\.py): ([\w.]+)(?: \(exercise \d+\))?\. .+\?$"
HEADING = r"^(\d+)\. [^:\n]+: "  # of a stage; a line of the table has no colon
# for each stage: KiB kept, copied, gathered; launches
ACCOUNTS = [
    [int(number.replace(",", "")) for number in line.split()[-4:]]
    for line in walkthrough.TABLE.splitlines()[1:]
]
SAYS = {  # one of the numbers that a stage prints, computed by hand
    2: "1,018 of 1,088 are filled, 6.4% waste",
    3: "* 16 + 8: 296",  # request 2 has blocks 22, 62 and 18
    4: "rows [1160, 1176, 1192, 1208]",  # block 18, 4 heads of 16 rows: 18 * 64 + 8, and so on
    5: "9 * 64 = 576 rows, on one axis 72",
    6: "block 3 evicted, block 1 evicted",
    8: "32 programs; 4 for a single request",
    9: "[[0, 4], [1, 5], [2, 6], [3]]",
    10: ", None]",  # a token to come
}


@pytest.fixture(autouse=True)
def not_timed(monkeypatch):
    """Compute each step once, for its logits. (Timing would take minutes in the interpreter.)"""
    monkeypatch.setattr(walkthrough, "median_seconds", lambda call, repeats, before=None: 1e-3)


needs_triton = pytest.mark.skipif(not walkthrough.triton, reason="needs triton")


def walk(monkeypatch, capsys, *arguments) -> str:
    monkeypatch.setattr(sys, "argv", ["walkthrough.py", *arguments])
    walkthrough.main()
    return capsys.readouterr().out


def check(number: int, out: str):
    assert "kept    copied  gathered  launches" in out
    timed = "1.0 ms per step" in out
    assert (
        timed == (number not in (8, 9) or not INTERPRETED) != ("interpreted, so not timed" in out)
    )
    assert SAYS.get(number, "") in out


@pytest.mark.parametrize("number", [3, 7])
def test_alone(number, monkeypatch, capsys):
    """The previous stage is also computed, silently, and this one must give its logits."""
    out = walk(monkeypatch, capsys, str(number))
    assert re.findall(HEADING, out, re.MULTILINE) == [str(number)]
    assert out.count("logits as before") == 1
    check(number, out)


@needs_triton
def test_all_in_order(monkeypatch, capsys):
    out = walk(monkeypatch, capsys)
    assert re.findall(HEADING, out, re.MULTILINE) == [str(number) for number in range(11)]
    assert out.count("logits as before") == 10
    for number, part in enumerate(re.split(HEADING, out, flags=re.MULTILINE)[2::2]):
        check(number, part)
    assert out.endswith(f"{walkthrough.TABLE}\n")
    for stage, line in zip(walkthrough.STAGES, walkthrough.TABLE.splitlines()[1:], strict=True):
        assert line.startswith(stage.__doc__.partition(":")[0])


@pytest.mark.parametrize(("reads", "types"), [(True, True), (True, False), (False, True)])
def test_enter_goes_on_on_a_terminal(reads, types, monkeypatch, capsys):
    """
    It waits between two stages, but not before the first, and only if a person reads and types.
    """
    asked = []
    monkeypatch.setattr(walkthrough, "show", lambda number, before: asked.append(number))
    monkeypatch.setattr("builtins.input", lambda prompt: asked.append("Enter"))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: types, raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: reads)
    assert walk(monkeypatch, capsys, "2", "3") == ""  # the table comes after all eleven
    assert asked == ([1, 2, "Enter", 3] if reads and types else [1, 2, 3])


class Called(TorchDispatchMode):
    """Counts the torch operators that run, by name."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.names[operator.__name__.partition(".")[0]] += 1
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("number", [*range(8), pytest.param(8, marks=needs_triton)])
def test_launches_are_counted(number, monkeypatch):
    """
    Compare the stated launches with a count of stores (one operator each), gathers (an index,
    except that of the hidden states, or an embedding, except those of tokens and positions), and
    attention (two products).
    """
    kernels = Mock(wraps=walkthrough.launch)
    monkeypatch.setattr(walkthrough, "launch", kernels)
    compute = walkthrough.STAGES[number](walkthrough.prefilled("torch"))
    with Called() as called, torch.inference_mode():
        compute()
    names = called.names
    stores = names["index_copy_"] + {1: names["cat"], 2: names["index_put_"]}.get(number, 0)
    gathers = names["index"] - 1 if number == 3 else names["embedding"] - 2
    if number == 0:  # each of the eight texts embeds its tokens and positions
        gathers -= 14
    attends = names["matmul"] // 2 + kernels.call_count
    assert stores + gathers + attends == ACCOUNTS[number][3]


def test_other_logits_stop_it(monkeypatch):
    """It stops for a difference too large for rounding, and for a token that would change."""
    logits = walkthrough.show(0, None)
    best = logits.topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > 0.1, "rounding cannot change a token"
    with pytest.raises(AssertionError, match="not close"):
        walkthrough.show(2, logits + 1e-3)
    logits[0, 0] = torch.nan
    with pytest.raises(AssertionError, match="not close"):
        walkthrough.show(2, logits)


def test_the_numbers_that_it_states():
    """The blocks really have this many slots, and gather.py really gathers these rows of 4 KiB."""
    assert sum(walkthrough.LENGTHS) + 8 == walkthrough.REAL == 1018
    engine = walkthrough.prefilled("torch")
    batch, _ = walkthrough.next_step(engine)
    tables = [r.block_table for r in engine.scheduler.active]
    assert 16 * sum(map(len, tables)) == walkthrough.IN_BLOCKS
    rows = [kv_rows[0, :, 0].numel() for _, kv_rows, _ in batch.attention_plans[0].calls]
    # tables and padded texts of 26 blocks; the chunk of 64; texts grouped by length
    gathered = {3: 8 * 401, 4: 8 * 26 * 16, 5: sum(rows) + 64, 6: sum(rows)}
    assert [row[2] for row in ACCOUNTS] == [4 * gathered.get(stage, 0) for stage in range(11)]
    assert [row[1] for row in ACCOUNTS] == [0, 4 * 1010] + [0] * 9
    in_slabs, in_blocks = 4 * 8 * 512, 4 * walkthrough.IN_BLOCKS
    assert [row[0] for row in ACCOUNTS] == [0, 4 * 1018, in_slabs] + [in_blocks] * 8


def test_without_triton(monkeypatch, capsys):
    monkeypatch.setattr(walkthrough, "triton", None)
    out = walk(monkeypatch, capsys, "7", "8", "9", "10")
    assert out.count("(pip install triton)") == 2
    assert out.count("logits as before") == 2


def test_a_stage_that_is_not_there(monkeypatch, capsys):
    with pytest.raises(SystemExit, match=r"^11: wanted a stage from 0 to 10, or no"):
        walk(monkeypatch, capsys, "11")
    assert "python walkthrough.py 3 " in walk(monkeypatch, capsys, "--help")


def test_each_stage_points_to_code_that_exists():
    """Each stage ends with a name to look for, and a question."""
    for stage in walkthrough.STAGES:
        last = stage.__doc__.splitlines()[-1].strip()
        file, name = re.match(POINTER, last).groups()
        assert name in names_defined(ROOT / file)
