"""
Runs tests in a copy of this repo, into which a bug was planted. Each run is forked from a process
that has already imported the packages, but none of the project's modules. So a run starts in one
second instead of eight. See tests/test_planted_bugs.py.

Which quick tests notice each bug, and which could be deleted?

    python -m tests.planting --matrix           # look for bugs without a known test, fill the table
    python -m tests.planting --without TEST ..  # list bugs that no other test is known to notice
    python -m tests.planting --matrix TEST ..   # look for other tests that notice those

TEST is a file, `file::test`, or the beginning of either. The table is tests/kills.tsv. A line has a
test (all of its cases count as one) and the hashes of the bugs that it notices. The table has at
most four tests for each bug. They are found among the quick tests that execute its lines: first one
per file, then others; no run starts after 100 seconds. A slow test is only named if no quick one
notices. Delete the lines of tests that you delete or rename; --matrix then looks for other tests.

--matrix needs `pip install pytest-cov`. It takes hours on one core, and continues where it was
stopped. What each test executes is kept in out/matrix; delete it when the code has changed.
"""

import hashlib
import importlib
import json
import os
import re
import shelve
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[1]
SECONDS = 180  # a bug may be an endless loop; no run without one takes a tenth of this
PACKAGES = ["pytest", "numpy", "torch", "hypothesis", "starlette.applications", "uvicorn"]
PACKAGES += ["httptools", "pydantic", "orjson", "httpx", "openai", "jinja2", "prometheus_client"]
PACKAGES += ["tokenizers", "tiktoken", "transformers", "llguidance"]
NOT_COPIED = shutil.ignore_patterns(".*", "venv*", "out", "out-*", "*.bin", "*.pyc.*")


def read_bugs() -> dict[str, dict]:
    """Return the bugs of planted_bugs.toml, each with its file, by file and title."""
    files = tomllib.loads((ROOT / "tests/planted_bugs.toml").read_text())
    return {
        f"{file}: {bug['title']}": bug | {"file": file} for file in files for bug in files[file]
    }


def copy_repo(to: Path) -> Path:
    """
    Copy the repo's files, and the compiled modules, which stay valid as long as their source keeps
    its time.
    """
    return shutil.copytree(ROOT, to, ignore=NOT_COPIED, dirs_exist_ok=True)


def plant(file: Path, right: str, wrong: str):
    """Write `wrong` in place of `right`. Raises ValueError unless `right` occurs exactly once."""
    source = file.read_text()
    count = source.count(right)
    if count != 1:
        raise ValueError(
            f"{file.name} has {right!r} {count} times, wanted once: update the planted bug"
        )
    file.write_text(source.replace(right, wrong))
    for compiled in file.parent.glob(f"__pycache__/{file.stem}.*"):
        compiled.unlink()


class Forks:
    """The process that forks. It starts with the first run."""

    def __init__(self, models: Path):
        """Use the models that test_paged.py trains, from the folder `models`: see conftest.py."""
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
        }
        environment["TRAINED_MODELS"] = str(models)
        environment["WAIT_SECONDS"] = "10"  # to wait for what a bug prevents
        # a GPU does not survive a fork, and the interpreter finds the bugs in kernels
        environment |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([sys.executable, __file__], env=environment, **pipes)

    def run(self, repo: Path, tests: list[str]) -> tuple[int, str]:
        """
        Run `pytest TESTS` in that copy of the repo. Returns its exit status, 1 if tests failed, and
        its output.
        """
        log = repo.parent / "log"
        print(json.dumps([str(repo), str(log), tests]), file=self.process.stdin, flush=True)
        status = os.waitstatus_to_exitcode(int(self.process.stdout.readline()))
        return status, log.read_text(errors="replace")

    def close(self):
        with self.process:  # it ends when its input ends
            self.process.stdin.close()


def fork_for_each_line():
    """Run the command of each line on stdin, and print how it ended, as given by os.waitpid."""
    for name in PACKAGES:
        importlib.import_module(name)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            run_tests(*json.loads(line))
        _, status = os.waitpid(child, 0)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # processes that its tests left behind
        print(status, flush=True)


def run_tests(repo: str, log: str, tests: list[str]):
    """Run tests in the forked process. It leaves only the log and its exit status."""
    os.setsid()
    if "--cov" not in tests:  # tracing takes time
        signal.alarm(SECONDS)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream in 1, 2:
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), stream)
    os.chdir(repo)
    sys.path[0] = repo  # before, it was the folder of this file, in the repo without bugs
    options = ["-m", "slow or not slow", "-W", "ignore", "--durations", "0"]
    options += ["--exitfirst", "-p", "no:cacheprovider", "--basetemp", f"{repo}-tmp"]
    if not tests[0].startswith("tests/"):
        options += ["-p", "tests.conftest"]  # pytest finds it only beside tests
    status = importlib.import_module("pytest").main([*options, *tests])
    sys.stdout.flush()
    os._exit(status)


# --------------------------------------------------------------------------------------------------
# Which tests notice which bugs

TABLE = ROOT / "tests/kills.tsv"
OUT = ROOT / "out/matrix"  # what is kept between two runs of --matrix
ENOUGH = 4  # tests that notice a bug
SECONDS_A_BUG = 100  # no further run is started after this
QUICK = ["-mnot slow", "-vv"]
HANGS = ["-ofaulthandler_timeout=60", "-ofaulthandler_exit_on_timeout=true"]  # each test
TRACED = ["--maxfail=0", "--cov", "--cov-append", "--cov-context=test", "--cov-report="]
SETTINGS = f"""[run]
data_file = {OUT}/lines
patch = subprocess
concurrency = multiprocessing, thread
omit = tests/*, test_paged.py
context = """


def trace_tests(forks: Forks):
    """
    Run each file of quick tests without a bug. Returns the seconds that each takes, and the lines
    executed: by a test in the context `file|file::test|run`, by other processes in `file`.
    """
    from coverage import CoverageData

    repo = copy_repo(OUT / "repo")
    with shelve.open(str(OUT / "seconds")) as seconds:
        for path in sorted(repo.glob("**/test_*.py")):
            file = str(path.relative_to(repo))
            if file not in seconds:
                (repo / ".coveragerc").write_text(SETTINGS + file)
                start = time.monotonic()
                status, _ = forks.run(repo, [file, *QUICK, *TRACED])
                seconds[file] = time.monotonic() - start
                print(f"{file}: {seconds[file]:.0f} s, status {status}", flush=True)
        lines = CoverageData(OUT / "lines")
        lines.read()
        return dict(seconds), lines


def tests_to_run(bug: dict, contexts: dict[int, list[str]], seconds: dict) -> list[list[str]]:
    """
    Return lists of tests, one list per file: first the test that the bug names, then those that
    execute its lines. The named test's file comes first (all of it, for C and JavaScript), then the
    quickest files.
    """
    text = bug["right"].strip()
    first = (ROOT / bug["file"]).read_text().partition(text)[0].count("\n") + 1
    found = {bug["test"].partition("::")[0]: set()}
    for line in range(first, first + text.count("\n") + 1):
        for context in contexts.get(line, []):
            file, *test = re.split(r"[|\[]", context)
            found.setdefault(file, set()).add(test[0] if context.endswith("|run") else file)
    files = sorted(found, key=lambda file: (file not in bug["test"], seconds[file]))
    return [[bug["test"]], *(sorted(found[file]) or [file] for file in files)]


def find_killers(forks: Forks, bug: dict, runs: list[list[str]], without: list[str]) -> list[str]:
    """
    Plant a bug and run these lists of tests, each until one fails, up to ENOUGH failures. A list
    with a failure runs again after the others, without the test that failed.
    """
    killers = []
    end = time.monotonic() + SECONDS_A_BUG
    with tempfile.TemporaryDirectory() as folder:
        repo = copy_repo(Path(folder) / "repo")
        plant(repo / bug["file"], bug["right"], bug["wrong"])
        for tests in runs:  # the list grows
            if len(killers) == ENOUGH or time.monotonic() > end:
                break
            options = [f"--deselect={test}" for test in killers + without]
            status, output = forks.run(repo, [*tests, *QUICK, *HANGS, *options])
            begun = re.findall(r"^(\S+::\w+)", output, re.M)
            if begun and status not in (0, 5, -signal.SIGALRM):  # 5: there were no tests to run
                killers.append(begun[-1])
                runs.append(tests)
    return killers


def main():
    option, *without = sys.argv[1:]
    bugs = read_bugs()
    names = {title: hashlib.sha1(title.encode()).hexdigest()[:5] for title in bugs}
    rows = dict(line.split("\t") for line in TABLE.read_text().splitlines())
    noticed = [rows[test] for test in rows if not test.startswith(tuple(without))]
    lost = [title for title in bugs if names[title] not in str(noticed)]
    if option == "--without":
        print(*lost, sep="\n")
    elif option == "--matrix":
        forks = Forks(OUT)
        seconds, lines = trace_tests(forks)
        for title in lost:
            bug = bugs[title]
            contexts = lines.contexts_by_lineno(str(OUT / "repo" / bug["file"]))
            runs = tests_to_run(bug, contexts, seconds)
            killers = find_killers(forks, bug, runs, without)
            for test in killers or [f"{bug['test']} (slow)"]:
                rows[test] = f"{rows.get(test, '')} {names[title]}".lstrip()
            TABLE.write_text("\n".join(map("\t".join, sorted(rows.items()))) + "\n")
            print(title, *killers, sep="\t", flush=True)
        forks.close()
    else:
        print(__doc__)


if __name__ == "__main__":
    main() if sys.argv[1:] else fork_for_each_line()
