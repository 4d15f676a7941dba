"""Drawings: assets/draw.py, and docstrings whose numbers are read and compared with a run."""

import json
import re
import sys
from pathlib import Path

import pytest

from assets import draw, workloads
from assets.records import RecordError
from engine.events import VERSION
from model import GPTConfig
from paged import TO_COME, Request, Scheduler
from server import live

ROOT = Path(__file__).parents[1]
PREEMPTION = ROOT / "assets/preemption.jsonl"
ANY = {"time": 0, "date": "", "machine": "", "engine": 0}  # differ from run to run


def lines_of(path: Path) -> list[dict]:
    return [json.loads(text) for text in path.read_bytes().splitlines()]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Run in a temporary folder, so that files go to its out/."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", ["tour", "preemption"])
def test_a_record_in_assets_is_made_by_its_command(name):
    """This includes its captions."""
    made = lines_of(draw.draw_record(name)["file"])
    kept = lines_of(ROOT / f"assets/{name}.jsonl")
    assert [line | ANY for line in made] == [line | ANY for line in kept]


def test_the_diagram_of_block_tables_is_made_by_its_command():
    made = draw.draw_tables()["file"]
    assert made.read_text() == (ROOT / "assets/tables.svg").read_text()


def test_replay_counts_and_draws(tmp_path, monkeypatch, capsys):
    """It is called through the command line."""
    monkeypatch.setattr(sys, "argv", ["draw.py", "replay", str(PREEMPTION)])
    draw.main(draw.__doc__, draw.COMMANDS, draw.FLAGS)
    figures = json.loads(capsys.readouterr().out)
    counts = {"requests": 9, "preemptions": 3, "copies": 0, "evictions": 56, "steps": 76}
    counts |= {"tokens in": 145, "tokens out": 228, "hit tokens": 60}
    assert figures.items() >= counts.items()
    assert (tmp_path / "out/replay.png").read_bytes().startswith(b"\x89PNG")
    first = tmp_path / "first.jsonl"
    lines = PREEMPTION.read_bytes().splitlines(keepends=True)
    first.write_bytes(lines[0] + lines[1])
    with pytest.raises(RecordError, match="has no step to draw"):
        draw.draw_replay(first)


TWO_REQUESTS = f"""\
{{"event": "snapshot", "version": {VERSION}, "num_blocks": 8, "committed": [6], "idle": [6], \
"requests": [{{"r": 1, "table": [0, 1]}}, {{"r": 2, "table": [0, 2]}}]}}"""


def test_a_picture_has_bounded_size(monkeypatch, tmp_path):
    """
    A limited number of steps and blocks is drawn: a column has its last steps, a block its owners.
    """
    from matplotlib.axes import Axes
    from matplotlib.colors import to_rgb

    images = []
    monkeypatch.setattr(Axes, "imshow", lambda self, image, **options: images.append(image))
    for name, value in {"MAX_COLUMNS": 8, "MAX_ROWS": 4, "PARTS": 8}.items():
        monkeypatch.setattr(draw, name, value)
    record = tmp_path / "x.jsonl"
    steps = [f'{{"event": "step", "step": {i}}}' for i in range(50)]
    record.write_text("\n".join([TWO_REQUESTS, *steps, ""]))
    assert draw.draw_replay(record)["steps"] == 50
    (image,) = images
    assert len(image) == 8
    assert all(4 <= len(row) <= 8 for row in image)
    # blocks 0, 2, 4 and 6: two owners, one, free, idle
    colours = ["C1", "C2", "C2", "C2", "white", "white", "lightgrey", "lightgrey"]
    assert [row[-1] for row in image] == [to_rgb(colour) for colour in colours]


def test_the_page_with_a_record_inside(tmp_path):
    """
    It is one file. The record cannot break out of its element, and the policy allows the page's own
    code.
    """
    record = tmp_path / "a.jsonl"
    record.write_bytes(PREEMPTION.read_bytes().replace(b"random", b"</script><!-- \\u2028"))
    page = draw.draw_page(record)["file"].read_text(encoding="utf-8")
    assert page.count("</script") == live.page().count("</script") + 1
    pattern = r'<script type="application/json" id="record">(.*?)</script>'
    (inside,) = re.findall(pattern, page, re.DOTALL)
    assert [json.loads(line) for line in inside.splitlines()] == lines_of(record)
    assert page.index('id="record"') < page.index("<script>"), "it is there when the script runs"
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="(.*?)">', page)
    assert policy == live.content_policy(page) == live.content_policy(live.page())


def test_a_padded_batch_is_a_rectangle():
    """If a short request ended early, a static batch would look better than it is."""
    assert draw.padded([([1, 2, 3], 4), ([5], 9)]) == [([1, 2, 3], 9), ([0, 0, 5], 9)]


@pytest.mark.parametrize(("S", "at_once", "inside"), [(2048, 16, 56.3), (16, 36.2, 0.8)])
def test_waste_is_half_a_block_of_each_text(S, at_once, inside):
    """Slabs: 32,768 / 2,048 requests. Blocks: S / 2 tokens of each of 36 requests."""
    pool = draw.fill_pool(S, 32_768)
    assert (pool["at once"], pool["waste inside, %"]) == (at_once, inside)
    assert sum(pool[share] for share in draw.SHARES) == pytest.approx(100, abs=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["batching", "memory", "phases"])
def test_a_picture_is_drawn(name, monkeypatch):
    """A toy model is enough."""
    toy = GPTConfig(65, 1025, n_layer=1, n_head=2, n_embd=32)
    models = dict.fromkeys(("10M", "gpt2-124M"), toy)
    monkeypatch.setattr(workloads, "MODELS", models)
    picture = draw.COMMANDS[name]()["picture"]
    assert picture.stat().st_size > 1000


# --------------------------------------------------------------------------------------------------
# Docstrings


def test_the_ruler_of_cursors():
    """It must match `Request`'s drawing, with overlap: computed, running and still to come."""
    request = Request("r", [1, 2, 3, 4, 5, 6], 9)
    scheduler = Scheduler(max_kv_tokens=48, block_size=4)
    scheduler.block_allocator.free[:] = [9, 2, 7]  # handed out from the end
    scheduler.add_request(request)
    plans = []
    while request.num_filled_slots < 10:
        plans.append(scheduler.plan())
        scheduler.advance(plans[-1])
        if len(plans) > 1:
            scheduler.resolve(plans[-2], {request: [50]})
    drawn = re.findall(r"^ *(\w+) +(\d+) +─+>", Request.__doc__, re.MULTILINE)
    cursors = {"committed": 4 * request.num_committed, "computed": request.num_computed_slots}
    cursors |= {"filled": request.num_filled_slots, "allocated": 4 * len(request.block_table)}
    # before the step runs, 9 are filled
    assert cursors == {name: int(end) for name, end in drawn}
    assert ("filled", "9") in drawn
    assert request.tokens_so_far[10] is TO_COME
    assert request.num_tokens == 11
