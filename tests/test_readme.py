"""README.md and REFERENCE.md are held to the repo: walks, files, commands, examples, numbers."""

import ast
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import bench
import serve
from checkpoint import save_checkpoint
from model import GPT, GPTConfig
from paged import KVBlockPool
from serving import chat, connection, encoder, listeners, protocol
from serving.engine import Engine
from serving.events import Recorder
from serving.params import SamplingParams
from serving.settings import Settings
from serving.sizing import numbers_per_block
from training.corpus import bpe_tokenizer

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
REFERENCE = (ROOT / "REFERENCE.md").read_text()
BOTH = f"{README}\n{REFERENCE}"
TOURS = re.findall(r"^\| file \| its one job \|\n\|---\|---\|\n((?:\|.*\n)+)", BOTH, re.MULTILINE)
TOUR = re.findall(r"^\| `([\w./]+)` \|", "".join(TOURS), re.MULTILINE)
COMMANDS = sorted(set(re.findall(r"python (\w+\.py)([^`\n#>]*)", BOTH)))


def test_the_tour_names_every_file():
    """A file that is not in the tour is a room without a door."""
    told = set(TOUR)
    rooms = [*ROOT.glob("*.py"), *ROOT.glob("serving/[a-z]*.py"), *ROOT.glob("training/[a-z]*.py")]
    assert len(told) == len(TOUR)
    assert told >= {str(path.relative_to(ROOT)) for path in rooms}
    assert all((ROOT / name).exists() for name in told), (
        f"gone: {[n for n in told if not (ROOT / n).exists()]}"
    )


def test_the_tour_of_the_tests_names_every_file():
    table = REFERENCE.partition("| in `tests/` | |\n")[2].partition("\n\n")[0]
    shared = {path.name for path in ROOT.glob("tests/*.*") if not path.name.startswith("test_")}
    named = set(re.findall(r"`(\w+\.\w+)`", table))
    assert named == shared - {"conftest.py", "clients.txt"}


def names_defined(file: Path) -> set[str]:
    """Functions, classes and methods, as `function`, `Class` and `Class.method`."""
    found = set()
    documented = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, documented):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            inner = [child for child in node.body if isinstance(child, documented)]
            found |= {f"{node.name}.{child.name}" for child in inner}
    return found


WALKS = {"The way of a token": 25, "The way of a KV block": 10, "The way of a hang-up": 4}


@pytest.mark.parametrize("title", [*WALKS, "The operators, by machine"])
def test_every_name_of_a_walk_exists(title):
    """A reader looks for each `file.function`: it is where the walk says, under that name."""
    section = re.split(r"\n##", BOTH.partition(f"### {title}\n")[2])[0]
    names = re.findall(r"`([a-z_]+)\.(?!py`)(\w+(?:\.\w+)?)`", section)
    assert len(names) >= 8
    for file, name in names:
        (path,) = [p for p in (ROOT / f"{file}.py", ROOT / f"serving/{file}.py") if p.exists()]
        assert name in names_defined(path), f"{path.name} has no {name}"
    steps = re.findall(r"^(\d+)\. `", section, re.MULTILINE)
    assert steps == [str(number + 1) for number in range(WALKS.get(title, 0))]


def test_names_of_the_post_are_there():
    """The right column names where what the post has is now, or says that it is unnecessary."""
    table = README.partition("| in the post | here |\n")[2].partition("\n\n")[0]
    kept, ours = set(), set()
    for row in table.splitlines()[1:]:
        post, here = row.strip("| ").split(" | ")
        if here.startswith("the same"):
            kept |= set(re.findall(r"`(\w+)[`(]", post))
        ours |= set(re.findall(r"`(\w+(?:\.\w+)?)[`(]", here)) - {"kernels.py"}
    there = names_defined(ROOT / "paged.py") | names_defined(ROOT / "serving/engine.py")
    methods = {name.partition(".")[2] for name in there}
    assert kept and ours
    assert kept <= there | methods and ours <= there | methods


def test_the_offline_example_runs(tmp_path, monkeypatch, capsys):
    """As it stands, in a folder where out/stdlib is a tiny model."""
    programs = re.findall(r"```python\n(.*?)```", BOTH, re.DOTALL)
    (program,) = (text for text in programs if "Engine(" in text)
    tokenizer = bpe_tokenizer([])
    config = GPTConfig(vocab_size=257, context_length=128, n_layer=1, n_head=1, n_embd=8)
    torch.manual_seed(0)
    save_checkpoint(GPT(config), tmp_path / "out/stdlib")
    tokenizer.save(tmp_path / "out/stdlib")
    monkeypatch.chdir(tmp_path)
    exec(program, {})
    assert capsys.readouterr().out


@pytest.mark.parametrize(("program", "arguments"), COMMANDS)
def test_flags_and_subcommands_exist(program, arguments, capsys):
    """A reader types what stands there."""
    if program == "bench.py":
        args = bench.build_parser().parse_args(arguments.split())  # exits at what it does not know
        assert args.command == arguments.split()[0]
    known = re.findall(r'"(--[a-z][\w-]*)"', (ROOT / program).read_text())
    if program == "serve.py":
        with pytest.raises(SystemExit):
            serve.parse_args(["--help"])
        known = re.findall(r"--[a-z][\w-]*", capsys.readouterr().out)
    for flag in re.findall(r"--[a-z][\w-]*", arguments):
        assert flag in known, f"{program} has no {flag}"


def test_buttons_of_the_page_are_there():
    page = " ".join((ROOT / "serving/page.html").read_text().split())
    told = README.partition("The page has buttons")[2].partition("\n\n")[0]
    names = re.findall(r'"([^"]+)"', " ".join(told.split()))
    assert len(names) == 4 and all(f">{name}</button>" in page for name in names)


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?:`|    )make ([a-z-]+)", BOTH)):
        assert f"\n{target}:" in makefile, f"no make {target}"


def headings(text: str) -> set[str]:
    """The anchors of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", ["README.md", "REFERENCE.md"])
def test_links_lead_somewhere(name):
    for page, anchor in re.findall(
        r"[^!]\[[^]]*\]\(([\w.]*)#?([\w-]*)\)", (ROOT / name).read_text()
    ):
        assert (ROOT / (page or name)).is_file()
        assert not anchor or anchor in headings((ROOT / (page or name)).read_text()), anchor


def test_the_readme_is_for_reading():
    """What is looked up, not read, has a page of its own. Line by line it had become 735 lines."""
    assert len(README.splitlines()) <= 350
    order = README.partition("serving first:\n")[2].partition("\n\n[The way")[0]
    files = re.findall(r"`([\w/]+\.py)`", order)
    assert len(files) == 7 and all((ROOT / file).is_file() for file in files)
    assert "interleaved_generate" in names_defined(ROOT / "serving/engine.py")
    assert "`Block.forward`" in order and "Block.forward" in names_defined(ROOT / "model.py")


# --------------------------------------------------------------------------------------------------
# make run, with stand-ins for what takes minutes

PYTHON = """#!/bin/sh
# in place of .venv/bin/python: notes what it is asked, trains as far as the file `training` says
echo "$*" >> calls
case "$1" in
    train.py) mkdir -p out/stdlib; for file in $(cat training); do echo > out/stdlib/$file; done ;;
esac
"""
LEARNT = "config.json model.safetensors train_state.pt"
TRAIN, RESUME = "train.py --out out/stdlib", "train.py --out out/stdlib --resume"
SERVE = "serve.py --model out/stdlib"


@pytest.fixture
def make(tmp_path):
    """
    Runs `make run` where packages are installed; training writes these files. Returns what was
    called, and make.
    """
    if shutil.which("make") is None:
        pytest.skip("make is not installed: `make run` is untested")
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "requirements.txt").touch()
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    (tmp_path / ".venv" / "ready").touch()

    def make(training: str) -> tuple[list[str], subprocess.CompletedProcess]:
        (tmp_path / "training").write_text(training)
        (tmp_path / "calls").write_text("")
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("MAKE")
        }
        done = subprocess.run(
            ["make", "run"], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        return (tmp_path / "calls").read_text().splitlines(), done

    return make


def test_make_run_trains_once_and_then_serves(make):
    """The second time there is a model: nothing is trained, whatever is newer than it."""
    calls, done = make(f"{LEARNT} loss.png")
    assert (calls, done.returncode) == ([TRAIN, SERVE], 0), done.stderr
    calls, done = make("nothing.more")
    assert (calls, done.returncode) == ([SERVE], 0), done.stderr


def test_make_run_goes_on_with_a_training_that_was_stopped(make):
    """
    train.py ends well when it is asked to stop: `make run` then served what had been learnt by the
    way. Stopped once more it still goes on; a folder without a state to go on from is begun anew.
    """
    for training, call in ("config.json", TRAIN), (LEARNT, TRAIN), (LEARNT, RESUME):
        calls, done = make(training)
        assert calls == [call] and done.returncode != 0
        assert "the training was stopped: make run goes on from there" in done.stdout
    calls, done = make("loss.png")
    assert (calls, done.returncode) == ([RESUME, SERVE], 0), done.stderr


def test_pictures_are_there_and_nothing_is_left_to_fill_in():
    for picture in re.findall(r"!\[[^]]*\]\(([^)]+)\)", BOTH):
        assert (ROOT / picture).stat().st_size > 1000
    assert "{{" not in BOTH and "@@" not in BOTH


def test_numbers_in_prose():
    """The sizes that the text explains with are the ones that the code uses."""
    assert f"**blocks** of {Settings().block_size} tokens" in README
    picture = Path(bench.__file__).read_text()
    requests, blocks = re.search(r"(\w+) requests share (\d+) blocks", README).groups()
    assert f"num_blocks={blocks}" in picture and requests == "nine" and "range(9)" in picture


def test_the_memory_of_a_token():
    """2 (K and V) x layers x KV heads x head size x bytes, of Llama-2-7B in fp16."""
    *factors, product = (
        re.search(r"that is ([\d,× =]+) bytes", README).group(1).replace("=", "×").split("×")
    )
    _, L, H, D, itemsize = map(int, factors)
    size = int(product.replace(",", ""))
    told = re.search(r"so ([\d.]+) MiB a token\s+and (\d+) GiB for its context of ([\d,]+)", README)
    a_token, a_text, context = (float(number.replace(",", "")) for number in told.groups())
    assert (size, a_token * 2**20, a_text * 2**30) == (size, size, size * context)
    config = GPTConfig(n_layer=L, n_head=H, n_embd=H * D)
    assert itemsize * numbers_per_block(config, 1) == size
    pool = KVBlockPool(256, 16, L, H, D, device="meta", dtype=torch.float16)
    in_blocks = pool.kv[:, :, : pool.sink]
    assert in_blocks.nbytes == size * 256 * 16 == a_text * 2**30 and context == 256 * 16


def test_the_fields_of_a_record_are_told():
    """In a tight pool with forks nearly every field occurs; a reader of a record looks it up."""
    table = REFERENCE.partition("| line | field | |\n")[2].partition("\n\n")[0]
    fields = [row.split(" | ")[1] for row in table.splitlines()[1:]]
    told = set(re.findall(r"`(\w+)`", " ".join(fields)))
    model = GPT(GPTConfig(vocab_size=32, n_layer=1, n_head=1, n_embd=8, context_length=128))
    engine = Engine(model, Settings(block_size=4, num_blocks=16, watermark=0))
    lines = []
    engine.recorder = Recorder(engine, tokens=True)
    engine.recorder.listeners.append(lambda text: lines.append(json.loads(text)))
    for i in range(4):
        prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, i]
        engine.add_request(i, prompt, SamplingParams(max_tokens=20, ignore_eos=True), n=1 + i % 2)
    found = set()
    while engine.has_work:
        engine.step()
        lines.append(json.loads(engine.recorder.snapshot("asked")))
        for line in lines:
            found |= line.keys()
            for request in line.get("requests", []) + line.get("new", []):
                found |= request.keys()
        lines.clear()
    assert found - told == set(), "not in REFERENCE.md"
    assert told - found <= {"window", "to_come"}, "not in any line"


# the beginning of a row in the README's table of limits, and what its second column says, from
# where the limit is kept
LIMITS = [
    (
        "CPU time and memory to encode",
        f"{encoder.JOB_SECONDS} s (4 MiB take 1 to 10), {encoder.JOB_MEMORY >> 30} GiB",
    ),
    ("text that a chat template makes", f"{chat.MAX_RENDERED >> 20} Mi characters"),
    ("texts that wait to be encoded", f"{encoder.MAX_WAITING >> 20} Mi characters"),
    ("tokens that `/tokenize` spells out", f"{encoder.MAX_NAMES:,}"),
    (
        "a request's head with its trailers",
        f"{connection.MAX_HEAD >> 10} KiB, {connection.MAX_HEADERS} headers",
    ),
    ("requests that wait behind another", f"{connection.MAX_PIPELINED}"),
    ("log-probabilities in one answer", f"{protocol.MAX_SCORES:,}: tokens"),
    ("`allowed_token_ids`", f"{protocol.MAX_ALLOWED:,}: different ids"),
    ("`priority`", f"-{protocol.MAX_PRIORITY} to {protocol.MAX_PRIORITY};"),
    ("clients of `/events`, of an HTTP process", f"{listeners.MAX_LISTENERS}; one that"),
    ("stop strings", f"{protocol.MAX_STOPS}, {protocol.MAX_STOP_BYTES >> 10} KiB together"),
    (
        "prompts, messages, choices of a prompt (`n`), `logit_bias`, `stop_token_ids`",
        f"{protocol.MAX_PROMPTS:,}, {protocol.MAX_MESSAGES:,}, {protocol.MAX_CHOICES}, "
        f"{protocol.MAX_BIASES:,}, {protocol.MAX_STOP_IDS}",
    ),
]


@pytest.mark.parametrize(("begins", "says"), LIMITS, ids=[begins for begins, _ in LIMITS])
def test_limits_are_as_told(begins, says):
    (row,) = [line for line in REFERENCE.splitlines() if line.startswith(f"| {begins}")]
    assert row.split(" | ")[1].startswith(says)


def test_limits_that_are_flags_have_the_defaults_that_are_told():
    table = REFERENCE.partition("| limit | value")[2]
    table = table.partition("A request that its head alone refuses")[0]
    told = re.findall(r"`--([\w-]+) (\d+)`", table)
    args = vars(serve.parse_args([]))
    assert len(told) == 6
    assert {name: float(number) for name, number in told} == {
        name: args[name.replace("-", "_")] for name, _ in told
    }
    assert f"Texts of more than {encoder.SHORT:,} characters and all chat templates" in REFERENCE
