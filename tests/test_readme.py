"""Check README.md and REFERENCE.md against the repo: walks, files, commands, examples, numbers."""

import ast
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import test_bits
import test_digest
from browser import save_random_model
from planting import copy_repo

import bench
import serve
from assets import draw
from assets.commands import build_parser
from params import RANGES, SamplingParams, Settings
from server import connection, live, protocol
from tests.simulated_device import simulated_engine

ROOT = Path(__file__).parents[1]


def read(name: str | Path) -> str:
    return (ROOT / name).read_text()


README = read("README.md")
REFERENCE = read("REFERENCE.md")
BOTH = f"{README}\n{REFERENCE}"
FOLDERS = ("", "ops", "engine", "server", "training", "examples", "assets")
PATHS = [path for name in FOLDERS for path in (ROOT / name).glob("[a-z]*.py")]
FILES = {path.stem: path for path in PATHS}


def test_every_file_has_a_line():
    lines = "".join(re.findall(r"^- (`[^:]*):", BOTH, re.MULTILINE))
    named = re.findall(r"`([\w/]+(?:\.py)?/?)`", lines)
    assert {str(path.relative_to(ROOT)) for path in PATHS} <= set(named)
    assert all((ROOT / name).exists() for name in named)
    assert len(named) == len(set(named))


def names_defined(file: Path) -> set[str]:
    """Return a file's functions, classes and methods: `function`, `Class` and `Class.method`."""
    documented = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    names = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, documented):
            names.add(node.name)
            names |= {f"{node.name}.{child.name}" for child in node.body if hasattr(child, "name")}
    return names


WALKS = {"The way of a token": 21, "The way of a KV block": 10, "The way of a hang-up": 4}


@pytest.mark.parametrize("title", [*WALKS, "The operators, by machine"])
def test_every_name_of_a_walk_exists(title):
    """A reader looks up each `file.function`, so it must be in that file under that name."""
    section = re.split(r"\n##", BOTH.partition(f"### {title}\n")[2])[0]
    names = re.findall(r"`([a-z_]+)\.(?!py`)(\w+(?:\.\w+)?)`", section)
    assert len(names) >= 6
    for file, name in names:
        assert name in names_defined(FILES[file]), f"{file}.py has no {name}"
    steps = re.findall(r"^(\d+)\. `", section, re.MULTILINE)
    assert steps == [str(number + 1) for number in range(WALKS.get(title, 0))]


def test_names_of_the_post_are_there():
    """The right column has a replacement for each of the post's names, or keeps the name."""
    table = README.partition("| in the post | here |\n")[2].partition("\n\n")[0]
    named = set()
    for row in table.splitlines()[1:]:
        post, here = row.strip("| ").split(" | ")
        text = post + here if here.startswith("the same") else here
        named |= set(re.findall(r"`(\w+(?:\.\w+)?)[`(]", text))
    names = set().union(*map(names_defined, FILES.values()))
    names |= {name.partition(".")[2] for name in names}
    assert len(named) > 15
    assert named <= names | {"slot_mapping", "params", "model.py", "interleaved.py"}


COMMANDS = sorted(set(re.findall(r"python ([\w/]+\.py)([^`\n#>]*)", BOTH)))


@pytest.mark.parametrize(("program", "arguments"), COMMANDS)
def test_flags_and_subcommands_exist(program, arguments, capsys):
    """Readers type the commands as they are written."""
    measured = {"bench.py": bench, "assets/draw.py": draw}
    if program in measured:
        module = measured[program]
        parser = build_parser("", module.COMMANDS, module.FLAGS)
        parser.parse_args(arguments.split())  # exits if an argument is unknown
    text = read(program)
    if program == "serve.py":
        with pytest.raises(SystemExit):
            serve.parse_args(["--help"])
        text = capsys.readouterr().out
    for flag in re.findall(r"--[a-z][\w-]*", arguments):
        assert flag in text or program in measured, f"{program} has no {flag}"


def test_the_offline_example_runs(tmp_path, monkeypatch, capsys):
    """The example runs as it is written, in a folder where out/stdlib is a tiny model."""
    (program,) = re.findall(r"```python\n(.*?)```", BOTH, re.DOTALL)
    save_random_model(tmp_path / "out/stdlib")
    monkeypatch.chdir(tmp_path)
    exec(program, {})
    assert capsys.readouterr().out


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub makes for a page's headings."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    words = [re.sub(r"[^\w -]", "", title.lower()) for title in titles]
    return {title.replace(" ", "-") for title in words}


def test_links_pictures_and_targets_lead_somewhere():
    for text in ROOT.glob("*.md"):
        for page, anchor in re.findall(r"\]\(([\w./-]*)#?([\w-]*)\)", text.read_text()):
            file = ROOT / (page or text.name)
            assert file.is_file(), page
            assert not anchor or anchor in anchors(file.read_text()), anchor
    makefile = read("Makefile")
    targets = set(re.findall(r"(?:`|    )make ([a-z-]+)", BOTH))
    assert targets
    assert all(f"\n{target}:" in makefile for target in targets)
    files = [*ROOT.glob("*.md"), *ROOT.glob("*.py"), *ROOT.glob("[a-z]*/*.py")]
    named = {x for file in files for x in re.findall(r"\bassets/[\w-]+\.\w+", file.read_text())}
    assert len(named) > 8
    assert all((ROOT / name).exists() for name in named)


def test_the_readme_is_for_reading():
    assert len(README.splitlines()) <= 380
    assert len(BOTH.split()) <= 9000


def shell(command: str) -> str:
    bash = ["bash", "-O", "extglob", "-c", command]
    return subprocess.check_output(bash, text=True, cwd=ROOT)


# line counts: the code without tests, benchmarks and pictures; the files named in Learn; paged.py
SIZED = """
cat !(bench|test_paged).py {data/*,engine,examples,ops,server,training}/*.py ops/cpu.c | wc -l
cat $(sed '1,/serving first:/d; /^.The way/,$d' README.md | grep -oP '[\\w/]+\\.(py|c)(?=`)' |
    grep -v test_paged | sort -u) | wc -l
cat paged.py | wc -l
"""


def test_sizes_are_said_within_five_percent():
    said = re.search(
        r"([\d,]+) lines of.*\s.* have ([\d,]+) of them, `paged.py` ([\d,]+)\.", README
    )
    sizes = [int(size) for size in shell(SIZED).split()]
    assert [int(size.replace(",", "")) for size in said.groups()] == pytest.approx(sizes, 0.05)


# Programs that run with the files of each row: the post, its loop, the engine with the operators
# that are there, and the HTTP server.
POST = """
import runpy
import sys

sys.path[0] = "examples"  # as in `python examples/post.py`
runpy.run_path("examples/post.py", run_name="__main__")
"""
LOOP = """
from interleaved import interleaved_generate
from model import GPT, GPTConfig
from paged import Request

model = GPT(GPTConfig(64, 64, n_layer=1, n_head=2, n_embd=32)).eval()
request = Request(0, [1, 2, 3], 4)
assert interleaved_generate(model, [request]).is_done() and request.num_generated == 4
"""
ENGINE = """
import os
import sys
from pathlib import Path

files = {"cpu": "ops/cpu.c", "triton": "ops/fused.py", "torch": "ops/choice.py"}
attention = next(name for name, file in files.items() if Path(file).exists())
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["TRITON_INTERPRET"] = str(int(attention == "triton"))
from engine.engine import Engine
from model import GPT, GPTConfig
from params import SamplingParams, Settings

model = GPT(GPTConfig(64, 64, n_layer=1, n_head=2, n_embd=32)).eval()
engine = Engine(model, Settings(attention=attention, num_blocks=8, max_num_seqs=2))
(answer,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
assert len(answer) == 4
loaded = {getattr(module, "__file__", None) for module in [*sys.modules.values()]}
unused = {str(path) for path in Path().resolve().rglob("*.py")} - loaded
assert not unused, unused
"""
HTTP = """
import json
import os
import re
import subprocess
import sys
from urllib.request import Request, urlopen

os.environ |= {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
command = [sys.executable, "serve.py", "--attention", "torch", "--port", "0"]
server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
try:
    url = next(found[0] for line in server.stdout if (found := re.search(r"http://\\S+", line)))
    body = json.dumps({"prompt": "a", "max_tokens": 4}).encode()
    call = Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    assert json.load(urlopen(call))["usage"]["completion_tokens"] == 4
finally:
    server.kill()
"""


@pytest.mark.slow
@pytest.mark.parametrize("number, program", enumerate([POST, LOOP, ENGINE, ENGINE, ENGINE, HTTP]))
def test_the_least_that_runs(number, program, tmp_path):
    """
    Each row's files are enough to run its program. The files of a row with a + are added to those
    of the engine in torch. The copy of engine/stages.py lists no stages. Engines use all files.
    """
    rows = re.findall(r"^\|.*\| `([^`-].*)` \| ([\d,]+) \|$", REFERENCE, re.MULTILINE)
    files, size = rows[number]
    others = rows[2][0] if number > 2 else ""
    command = f"""
    cp --parents {files} {others} {tmp_path}
    sed -i '/: .engine[.]/d' {tmp_path}/engine/stages.py
    cat {files} | wc -l
    """
    assert int(size.replace(",", "")) == pytest.approx(int(shell(command)), 0.05)
    save_random_model(tmp_path / "out/stdlib")
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)


def test_the_fields_of_a_record_are_in_the_reference():
    """The fields are those of the records in assets/ and of a snapshot while a request runs."""
    table = REFERENCE.partition("| line | field | |\n")[2].partition("\n\n")[0]
    fields = [row.split(" | ")[1] for row in table.splitlines()[1:]]
    documented = set(re.findall(r"`(\w+)`", " ".join(fields)))
    engine = simulated_engine()
    recorder = engine.stages["record"]
    recorder.listen(str, tokens=True)
    engine.add_request("a", [1, 2, 3], SamplingParams())
    engine.step()
    records = [record.read_text() for record in (ROOT / "assets").glob("*.jsonl")]
    seen = set(re.findall(r'"(\w+)":', "".join([recorder.snapshot(), *records])))
    # the server adds `state` when an engine has ended; `drafts` needs --speculate
    assert seen - {"steps"} == documented - {"state", "drafts"}  # "steps" is one of the totals


# a row of README's table -> the names of its tests in tests/engine/test_bits.py or test_digest.py
PROMISED = {
    "beside any other requests": "in_random_lives",
    "after a prefix hit; its prompt in chunks": "in_random_lives",
    "preempted and resumed": "preempted",
    "forked (`n` answers to one prompt)": "in_random_lives",
    "with overlap; with `--speculate`": "with_drafts",
    "with CUDA graphs": "without_graphs",
    "with any number of threads, C compiler and CPU": (
        "with_threads test_one_digest_by_any_compiler"
    ),
}


def test_each_promise_of_equal_bits_is_tested():
    """Would catch: a row without a test, or a test that was deleted although its row remained."""
    section = README.partition("### Equal to the bit\n")[2].partition("\n#")[0]
    rows = re.findall(r"^\| (.*) \| (equal|) *\| (equal|) *\|$", section, re.MULTILINE)
    assert [row for row, *_ in rows] == list(PROMISED)
    shared = (*test_bits.SITUATIONS, test_digest.test_one_digest_by_any_compiler)
    for row, *promises in rows:
        for promise, own in zip(promises, (test_bits.ON_A_CPU, test_bits.ON_A_GPU), strict=True):
            tested = {test.__name__ for test in shared + own}
            assert not promise or tested >= set(PROMISED[row].split())
        assert any(promises)


def test_each_attention_backend_is_explained():
    """The help for --attention only names the backends, so REFERENCE.md must explain each."""
    said = Settings.__dataclass_fields__["attention"].metadata["help"]
    listed = said.partition(": ")[2].partition(";")[0]
    names = set(re.findall(r"\w+", listed)) - {"or"}
    assert len(names) == 3
    section = REFERENCE.partition("### The operators, by machine\n")[2].partition("\n#")[0]
    assert names == set(re.findall(r"`(?:--attention )?(\w+)`(?: is|, the default)", section))


# start of a row in the table of limits -> start of its second column
LIMITS = {
    "a request's head": f"{connection.MAX_HEAD >> 10} KiB, {connection.MAX_HEADERS} headers",
    "log-probabilities of a token; in one": f"{RANGES['logprobs'].bounds['le']}; "
    f"{protocol.MAX_SCORES:,}: tokens",
    "`priority`": f"-{protocol.MAX_PRIORITY} to {protocol.MAX_PRIORITY};",
    "clients of `/events`": f"{live.MAX_LISTENERS}, {live.MAX_OF_ONE} of one key",
    "stop strings": f"{protocol.MAX_STOPS}, {protocol.MAX_STOP_BYTES >> 10} KiB together",
    "prompts, messages (": f"{protocol.MAX_PROMPTS:,}, {protocol.MAX_MESSAGES:,}, "
    f"{protocol.MAX_CHOICES}, {protocol.MAX_BIASES:,}, {protocol.MAX_STOP_IDS}",
}


def test_limits_are_those_of_the_code():
    rows = [line.split(" | ") for line in REFERENCE.splitlines() if line.startswith("| ")]
    for begins, value in LIMITS.items():
        (limit,) = [row[1] for row in rows if row[0].startswith(f"| {begins}")]
        assert limit.startswith(value)
    defaults = vars(serve.parse_args([]))
    flags = re.findall(r"\| `--([\w-]+) (\d+)` \|", REFERENCE)
    assert len(flags) == 6
    for name, value in flags:
        assert defaults[name.replace("-", "_")] == float(value)


@pytest.mark.slow
def test_the_commands_for_own_data_run_one_after_the_other(tmp_path):
    """After Quick start, the first was once refused, or its model replaced the default model."""
    repo = copy_repo(tmp_path / "repo")
    save_random_model(repo / "smollm2", "{% for m in messages %}{{ m.content }}{% endfor %}")
    save_random_model(repo / "out/stdlib")
    section = README.partition("### Your own model\n")[2].partition("\n#")[0]
    commands = re.findall(r"^    (python .*?)(?: +#.*)?$", section, re.MULTILINE)
    assert len(commands) == 6
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for command in commands:
        command = re.sub(r"train.py(.*?)(?: --minutes \d+)?$", r"train.py\1 --steps 2", command)
        how = {"shell": True, "cwd": repo, "env": os.environ | path, "input": ""}
        done = subprocess.run(command, **how, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}: {done.stderr}"
    names = {path.name for path in (repo / "out").iterdir()}
    assert names == {"stdlib", "text", "finetuned"}


# --------------------------------------------------------------------------------------------------
# The version, packages, the container


def test_the_version_stands_once_and_the_changelog_begins_with_it():
    newest = read("CHANGELOG.md").partition("\n## ")[2].partition(" ")[0]
    texts = "".join(map(read, ("pyproject.toml", *PATHS)))
    assert texts.count(f'"{newest}"') == texts.count(f'\nversion = "{newest}"') == 1


def test_the_constraints_pin_what_is_asked_for():
    texts = read("requirements.txt") + read("requirements-test.txt")
    pins = re.findall(r"^[\w-]+==[\w.]+", texts, re.MULTILINE)
    assert set(pins) <= set(read("constraints.txt").splitlines())


def test_the_container_starts_with_flags_that_exist():
    command = json.loads(read("Dockerfile").rpartition("ENTRYPOINT ")[2])
    serve.parse_args(command[2:])


def test_the_container_has_the_page(tmp_path):
    """Once the tour's record was left out, and `/` returned an error 500."""
    for name in re.findall("^!(.+)", read(".dockerignore"), re.MULTILINE):
        for source in ROOT.glob(name):
            to = tmp_path / source.relative_to(ROOT)
            to.parent.mkdir(exist_ok=True)
            (shutil.copytree if source.is_dir() else shutil.copy)(source, to)
    command = [sys.executable, "-c", "from server import live; live.page()"]
    subprocess.run(command, cwd=tmp_path, check=True)


# --------------------------------------------------------------------------------------------------
# make, with a stand-in for Python

TRAIN = "train.py --out out/stdlib"
RESUME = f"{TRAIN} --resume"
SERVE = "serve.py --model out/stdlib"
STOPPED = "config.json train_state.pt"
# files that the training run writes -> the programs that run
RUNS = [("config.json", [TRAIN]), (STOPPED, [TRAIN]), (STOPPED, [RESUME])]
RUNS += [("loss.png", [RESUME, SERVE]), ("", [SERVE])]
INSTALLER = """#!/bin/sh
# makes an environment that contains itself; the file `pip` has pip's exit status, and the file
# `training` has the names of the files that training writes
case "$*" in
    -V) echo "Python of $0" ;;
    *venv*) echo $* >> calls; mkdir -p $3/bin; cp "$0" $3/bin/python ;;
    *--dry-run*) echo $* >> calls; exit $(cat offline) ;;
    *install*) echo $* >> calls; exit $(cat pip) ;;
    *.py*) echo $* >> runs ;;
esac
case "$1" in
    train.py) mkdir -p out/stdlib; for file in $(cat training); do echo > out/stdlib/$file; done ;;
esac
"""


@pytest.fixture(autouse=True)
def no_other_make(monkeypatch):
    """Remove the flags and variables that a make running these tests passes on to its children."""
    for name in os.environ:
        if name.startswith("MAKE") or name in ("PYTHON", "VENV", "PIP_OPTIONS"):
            monkeypatch.delenv(name)


def make(folder: Path, *argv: str, **options) -> subprocess.CompletedProcess:
    """Run make in a folder, which may have its own Python."""
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
    pipes = {"env": environment, "capture_output": True, "text": True}
    return subprocess.run(["make", *argv], cwd=folder, **pipes, **options)


@pytest.fixture
def clone(tmp_path) -> Path:
    """Return a folder with the Makefile, a trained model and a stand-in for Python."""
    if not shutil.which("make"):
        pytest.skip("needs make")
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "out/stdlib").mkdir(parents=True)
    for name in ("requirements.txt", "constraints.txt", "out/stdlib/loss.png"):
        (tmp_path / name).touch()
    (tmp_path / "python3").write_text(INSTALLER)
    (tmp_path / "python3").chmod(0o755)
    for name in ("pip", "offline"):
        (tmp_path / name).write_text("0")
    return tmp_path


def test_make_run_trains_once_and_goes_on_with_a_training_that_was_stopped(clone):
    """The last run finds the model. All runs use the environment named by VENV, and no other."""
    (clone / "out/stdlib/loss.png").unlink()
    for files, runs in RUNS:
        (clone / "training").write_text(files)
        (clone / "runs").write_text("")
        done = make(clone, "run", "VENV=other")
        assert (clone / "runs").read_text().splitlines() == runs
        assert (done.returncode == 0) == (SERVE in runs)


VENV = "-m venv .venv"
INSTALL = "-m pip install --disable-pip-version-check --quiet -c constraints.txt "
INSTALL += "-r requirements.txt"
ANEW = INSTALL.replace("--quiet", "--quiet --force-reinstall")
TESTS = INSTALL.replace("requirements", "requirements-test")
TESTS_ANEW = ANEW.replace("requirements", "requirements-test")
DRY, DRY_ANEW = (line.replace("-r ", "--dry-run -r ") for line in (TESTS, TESTS_ANEW))
READY = ".venv/tests-ready"
# a make target, pip's exit status in a dry run, its exit status when it installs, the calls made
INSTALLS = [
    ("run", "0", "1", [VENV, INSTALL]),
    ("run", "0", "1", [ANEW]),
    ("run", "0", "0", [ANEW]),
    (READY, "1", "0", [DRY]),
    ("run", "0", "0", []),
    (READY, "0", "1", [DRY, TESTS]),
    ("run", "0", "0", [ANEW]),
    (READY, "0", "0", [DRY_ANEW, TESTS_ANEW]),
    (READY, "0", "0", []),
    ("run", "0", "0", []),
]


@pytest.mark.filterwarnings("ignore:.*forkpty:DeprecationWarning")
def test_an_interrupted_installation_is_never_taken_for_a_whole_one(clone):
    """
    An interrupted installation is started again from scratch, because pip treats a half-installed
    package as installed. `make run` once started the server after `make test`, which may replace
    numpy and torch, had been stopped in pip.
    """
    (clone / "requirements-test.txt").touch()
    calls = clone / "calls"
    for goal, offline, status, expected in INSTALLS:
        (clone / "offline").write_text(offline)
        (clone / "pip").write_text(status)
        calls.write_text("")
        assert (make(clone, goal).returncode == 0) == (offline == status == "0")
        assert calls.read_text().splitlines() == expected
    (clone / ".venv/ready").unlink()
    pty.spawn(["make", "-C", str(clone), "run"], lambda terminal: os.read(terminal, 1024))
    assert calls.read_text() == INSTALL.replace("--quiet ", "") + "\n"  # shows pip's progress


@pytest.mark.parametrize("options, gpu", [("", "false"), ("", "true"), ("--no-deps", "false")])
def test_an_installation_says_how_much_will_come(options, gpu, clone):
    """Once nothing was printed for minutes, and a machine without a GPU got 3 GB of CUDA."""
    (clone / "nvidia-smi").symlink_to(shutil.which(gpu))
    printed = make(clone, "run", f"PIP_OPTIONS={options}").stdout
    assert ("installing" in printed, "3 GB" in printed) == (True, not options)
    assert ("PIP_OPTIONS='--extra-index-url" in printed) == (not options and gpu == "false")
    assert (options or "-r") in (clone / "calls").read_text()


def test_goals_are_made_one_after_another(clone):
    """Previously, with MAKEFLAGS=-j, both halves of `make test-all` ran at once."""
    test_run = "*pytest*) echo begin >> runs; sleep 0.2; echo end >> runs ;;"
    (clone / "python3").write_text(INSTALLER.replace("*.py*)", f"{test_run}\n    *.py*)"))
    (clone / "requirements-test.txt").touch()
    (clone / ".venv/bin").mkdir(parents=True)
    (clone / ".venv/bin/ruff").symlink_to(shutil.which("true"))
    assert make(clone, "-j", "test-all").returncode == 0
    assert (clone / "runs").read_text().split() == ["begin", "end"] * 2


def test_another_python_than_the_environments_is_refused(clone):
    """`make run PYTHON=..` was once silently ignored if there was already an environment."""
    other = "PYTHON=./python3"
    assert make(clone, "run", other).returncode == make(clone, "run").returncode == 0
    done = make(clone, "run", other)
    words = ".venv has Python of .venv/bin/python, PYTHON is Python of ./python3: name another VENV"
    assert done.returncode and words in done.stdout


MINE = "out/mine/config.json data/text/mine.json data/text/meta.json run.jsonl data/chat/train.bin"
MINE += " data/shakespeare_char/input.txt .git/__pycache__/a"
AGAIN = ".venv/bin/python engine/__pycache__/a.pyc compare.png data/stdlib/train.bin"
AGAIN += " data/shakespeare_char/tokenizer.json .pytest_cache/a"


def test_clean_deletes_nothing_that_is_not_made_again(clone):
    """
    `make clean` once deleted every model, even one fine-tuned for ten minutes, and
    data/text/mine.json. The list of what will be lost lacked hidden folders, and showed errors for
    names with spaces.
    """
    files = [clone / name for name in f"{MINE} {AGAIN}".split()]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    for name in "my model", ".old":
        (clone / "out" / name).mkdir()
    make(clone, "clean")
    assert [file for file in files if file.exists()] == files[: len(MINE.split())]
    for answer in "", "n\n", "y\n":
        printed = make(clone, "clean-models", input=answer).stdout
        for name in "out/mine", "out/my model", "out/.old", "run.jsonl":
            assert f"\t{name}\n" in printed
        assert files[0].exists() == (answer != "y\n")
    assert [file.exists() for file in files[1:4]] == [True, True, False]
