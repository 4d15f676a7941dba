"""
Runs tests in a copy of this repo, into which a bug was planted. Each run is forked from a process
that has imported the packages already, and none of the project's modules: a second instead of
eight. See tests/test_planted_bugs.py.
"""

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[1]
SECONDS = 180  # a bug may be an endless loop; no run takes a tenth of this
PACKAGES = ["pytest", "numpy", "torch", "hypothesis", "starlette.applications", "uvicorn"]
PACKAGES += ["httptools", "pydantic", "orjson", "httpx", "openai", "jinja2", "prometheus_client"]
PACKAGES += ["tokenizers", "tiktoken", "transformers", "llguidance"]
NOT_COPIED = shutil.ignore_patterns(".*", "out", "out-*", "*.bin", "*.pyc.*")


def copy_repo(to: Path) -> Path:
    """
    What git has of it, and the compiled modules, which are good for as long as their source has its
    time.
    """
    return shutil.copytree(ROOT, to, ignore=NOT_COPIED, dirs_exist_ok=True)


def plant(file: Path, right: str, wrong: str):
    """Write `wrong` where `right` stands. Raises ValueError unless that is at exactly one place."""
    source = file.read_text()
    count = source.count(right)
    if count != 1:
        raise ValueError(
            f"{file.name} has {right!r} {count} times, wanted once: plant the bug anew"
        )
    file.write_text(source.replace(right, wrong))
    for compiled in file.parent.glob(f"__pycache__/{file.stem}.*"):
        compiled.unlink()


class Forks:
    """The process that forks. It starts with the first run."""

    def __init__(self, models: Path):
        """The folder `models` holds what test_paged.py trains: see conftest.py."""
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
        }
        environment["TRAINED_MODELS"] = str(models)
        environment["WAIT_SECONDS"] = "10"  # for what a bug keeps from happening
        # a GPU does not outlive a fork, and the bugs in kernels are found by the interpreter
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
        with self.process:  # it ends when there is nothing to read any more
            self.process.stdin.close()


def fork_for_each_line():
    """Lines on stdin are what to run, lines on stdout how each ended, as os.waitpid tells."""
    for name in PACKAGES:
        importlib.import_module(name)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            run_tests(*json.loads(line))
        _, status = os.waitpid(child, 0)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # processes that its tests have left behind
        print(status, flush=True)


def run_tests(repo: str, log: str, tests: list[str]):
    """The forked process: nothing of it is seen but the log and its exit status."""
    os.setsid()
    signal.alarm(SECONDS)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream in 1, 2:
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.chdir(repo)
    sys.path[0] = repo  # so far the folder of this file, in the repo without bugs
    options = ["-m", "slow or not slow", "-W", "ignore", "--durations", "0"]
    options += ["--exitfirst", "-p", "no:cacheprovider", "--basetemp", f"{repo}-tmp"]
    if not tests[0].startswith("tests/"):
        options += ["-p", "tests.conftest"]  # pytest finds it beside the tests only
    status = importlib.import_module("pytest").main([*options, *tests])
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    fork_for_each_line()
