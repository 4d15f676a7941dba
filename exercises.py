"""
Write parts of this engine yourself; the tests that guard them check your work. Then find bugs that
were planted in it.

    python exercises.py              # lists the exercises and hunts, and what you have solved
    python exercises.py start 4      # copies this repo to out/exercises/4, empties the functions of
                                     # exercise 4 there, and says what to write
    python exercises.py check 4      # runs the exercise's tests there
    python exercises.py hint 4
    python exercises.py solution 4   # shows how to turn your file into this repo's
    python exercises.py reset 4      # lets you start over, and keeps your copy as out/exercises/4-1

    python exercises.py hunt         # copies this repo, plants a bug, and shows what the bug does
    python exercises.py hunt kernels # one of this level: paging, sharing, scheduling, kernels, http
    python exercises.py check hunt-3 # is the bug gone? The other commands take hunts, too

Nothing outside out/ changes. To see your functions at work, run walkthrough.py, serve.py or the
tests in the copy. (Do not compare a hunt's copy with this repo: that would give the bug away.) The
texts are in exercises.toml. `make .venv/tests-ready` installs what the tests need. A check takes
seconds, or a minute on a busy machine.
"""

from common import announce, end_with_one_line  # an old Python, without tomllib, is refused

# isort: split
import ast
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from difflib import unified_diff
from os.path import relpath
from pathlib import Path
from shlex import join, quote
from textwrap import dedent, fill

from tests.planting import copy_repo, plant, read_bugs

ROOT = Path(__file__).parent
OUT = ROOT / "out/exercises"
EXERCISES, HUNTS = tomllib.loads((ROOT / "exercises.toml").read_text()).values()
TEXTS = EXERCISES | HUNTS
RIGHT = "out/exercise/right"  # in a copy: what its file should be
ANSWERS = ("tests/planted_bugs.toml", "tests/kills.tsv", "exercises.toml", "exercises.py")
SECONDS = 100  # time limit for a check, because the reader's code may loop for ever


def run(repo: Path, *arguments: str) -> str:
    """Run Python in a copy of the repo. Return what it prints."""
    command = [sys.executable, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # on a busy machine, more are slower
    try:
        return subprocess.run(command, cwd=repo, env=one_thread, timeout=SECONDS, **pipes).stdout
    except subprocess.TimeoutExpired:
        sys.exit(
            f"not yet: it has not ended after {SECONDS} s: an endless loop, or a slow machine?\n"
            f"cd {quote(relpath(repo))}; python {join(arguments)}  # runs it without this limit"
        )


# --------------------------------------------------------------------------------------------------
# Exercises


def empty(copy: Path, name: str) -> str:
    """
    Empty an exercise's functions in this copy, and move those of later exercises to the end of the
    file. Return what to tell the reader.
    """
    text = EXERCISES[name]
    path = copy / text["file"]
    lines = path.read_text().splitlines(keepends=True)
    for later in [*EXERCISES][int(name) :]:
        if EXERCISES[later]["file"] == text["file"]:
            for function in EXERCISES[later]["functions"]:
                move_to_end(lines, function, later)
    (copy / RIGHT).write_text("".join(lines))
    for function in text["functions"]:
        node = find(lines, function)
        body = node.body[0]
        first = body.end_lineno if ast.get_docstring(node) else body.lineno - 1
        error = f'raise NotImplementedError("exercise {name}: write {function}")\n'
        lines[first : node.end_lineno] = [" " * body.col_offset + error]
    path.write_text("".join(lines))
    places = "\n       ".join(text["read"])
    return (
        f"{name}. {text['title']}\n\n{text['text'].strip()}\n\n"
        f"in     {relpath(OUT / name)}, a copy of this repo\n"
        f"write  {text['file']}: {', '.join(text['functions'])}\n"
        f"read   {places}"
    )


def find(lines: list[str], name: str) -> ast.FunctionDef:
    """Find `Class.method` or `function.inner` in a file. Raises ValueError if there is none."""
    node = ast.parse("".join(lines))
    for part in name.split("."):
        kinds = ast.FunctionDef | ast.ClassDef
        inside = [x for x in ast.walk(node) if isinstance(x, kinds) and x.name == part]
        if not inside:
            raise ValueError(f"no {name} where the exercise wants it: git diff shows what changed")
        node = inside[0]
    return node


def move_to_end(lines: list[str], name: str, exercise: str):
    """Move a function out of the reader's sight. A method is put back in its class from there."""
    node = find(lines, name)
    first = min(part.lineno for part in [node, *node.decorator_list]) - 1
    moved = dedent("".join(lines[first : node.end_lineno]))
    if name != node.name:
        moved += f"\n\n{name} = {node.name}\n"
    note = f"{' ' * node.col_offset}# {node.name}: exercise {exercise}, at the end of this file\n"
    lines[first : node.end_lineno] = [note]
    last = ast.parse("".join(lines)).body[-1]
    end = last.lineno - 1 if isinstance(last, ast.If) else last.end_lineno  # before main() is run
    lines[end:end] = f"\n\n{moved}\n\n".splitlines(keepends=True)


# --------------------------------------------------------------------------------------------------
# Hunts


def plant_bug(copy: Path, name: str) -> str:
    """Plant the bug in this copy. Return what users should see, and what they see now."""
    text = HUNTS[name]
    bug = bug_of(name)
    shutil.copy(copy / text["file"], copy / RIGHT)
    (copy / "out/exercise/show.json").write_text(json.dumps(text["show"]))
    announce("running it with and without a bug")
    right = run(copy, "assets/symptoms.py")
    plant(copy / text["file"], bug["right"], bug["wrong"])
    wrong = run(copy, "assets/symptoms.py")
    if wrong == right:  # nothing can run
        sys.exit(f"{right}\nthe bug cannot be shown: make .venv/tests-ready installs what it needs")
    folder = relpath(OUT / name)
    draw = relpath(ROOT / "assets/draw.py")
    watch = f"\nwatch  python {draw} page {folder}/out/exercise/run.jsonl"
    return (
        f"{name}, {text['level']}: there is a bug in {folder}.\n\n{fill(text['text'], 100)}\n\n"
        f"as it should be:\n{right}\nas it is:\n{wrong}\n"
        f"again  python {folder}/assets/symptoms.py{watch if 'waves' in text['show'] else ''}"
    )


def bug_of(name: str) -> dict[str, str]:
    return read_bugs()[f"{HUNTS[name]['file']}: {HUNTS[name]['bug']}"]


# --------------------------------------------------------------------------------------------------
# Commands that get the name of an exercise or a hunt


def state_of(name: str) -> str:
    if (OUT / name / "solved").exists():
        return "solved"
    return "started" if (OUT / name).exists() else ""


def start(name: str):
    """Make the copy, and say what to do. It is moved to its place once it is complete."""
    OUT.mkdir(parents=True, exist_ok=True)
    begin = plant_bug if name in HUNTS else empty
    with tempfile.TemporaryDirectory(dir=OUT) as folder:
        copy = copy_repo(Path(folder) / name)
        (copy / RIGHT).parent.mkdir(parents=True)
        told = begin(copy, name)
        for answers in ANSWERS:
            (copy / answers).unlink()
        copy.rename(OUT / name)
    then = f"python {relpath(__file__)} check {name}  # needs: make .venv/tests-ready"
    print(f"{told}\nthen   {then}")


def check(name: str):
    """Run the tests in order until one fails, and say what the failure means."""
    copy = OUT / name
    if name in HUNTS:
        tests = {bug_of(name)["test"]: "The bug is still there, or another one."}
    else:
        tests = EXERCISES[name]["tests"]
    ast.parse((copy / TEXTS[name]["file"]).read_text(), TEXTS[name]["file"])
    options = ["-oaddopts=", "-overbosity_assertions=2", "-pno:cacheprovider", "-xq"]
    output = run(copy, "-m", "pytest", *options, *tests)
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", output, re.M)
    error = re.search(r"^E +(.+)", output, re.M)
    if failed and error:
        line = re.findall(r"^> +(.+)", output[: error.start()], re.M)[-1:]
        meaning = [tests[test] for test in tests if failed[1].startswith(test)]
        print(fill(" ".join(["not yet:", *meaning]), 100), *line, error[1], sep="\n")
        sys.exit(f"cd {quote(relpath(copy))}; python -m pytest -xvv {quote(failed[1])}  # details")
    if failed or " passed" not in output:
        sys.exit(f"{output}\nthe tests cannot run: make .venv/tests-ready installs their packages")
    (copy / "solved").touch()
    print("right:", output.strip().splitlines()[-1])


def hint(name: str):
    print(f"in {TEXTS[name]['file']}:\n{TEXTS[name]['hint'].strip()}")


def solution(name: str):
    """Print the changes from the reader's file to this repo's, and the answer to a question."""
    file = TEXTS[name]["file"]
    texts = [(OUT / name / path).read_text().splitlines(keepends=True) for path in (file, RIGHT)]
    print(*unified_diff(*texts, "yours", file), TEXTS[name].get("answer", ""), sep="", end="")


def reset(name: str):
    """Rename the copy, so that the reader can start over."""
    number = 1
    while state_of(f"{name}-{number}"):
        number += 1
    kept = (OUT / name).rename(OUT / f"{name}-{number}")
    print(f"you can start {name} over; your copy is now {relpath(kept)}")


def main():
    command, name, *more = [*sys.argv[1:], "", ""]
    commands = {command.__name__: command for command in (start, check, hint, solution, reset)}
    levels = sorted({text["level"] for text in HUNTS.values()})
    if command in ("", "list"):
        for name, text in TEXTS.items():
            print(f"{name:>7}  {state_of(name):8}{text.get('title') or text['level']}")
        print("\npython exercises.py start 1 starts the first; --help lists the other commands")
    elif command in ("-h", "--help"):
        print(__doc__.strip())
    elif command == "hunt" and name in (*levels, ""):
        left = [x for x in HUNTS if name in (HUNTS[x]["level"], "") and not state_of(x)]
        if not left:
            sys.exit("you have started all of these: reset one to hunt it again")
        start(random.choice(left))
    elif command not in commands or name not in TEXTS or any(more):
        sys.exit(
            f"{' '.join(sys.argv[1:])}: wanted start, check, hint, solution or reset, and a number "
            f"from 1 to {len(EXERCISES)} or hunt-1 to hunt-{len(HUNTS)}; or hunt, with or "
            f"without a level: {', '.join(levels)}"
        )
    elif command == "start" and state_of(name):
        sys.exit(f"{name} has been started, in {relpath(OUT / name)}: check or reset it")
    elif command in ("check", "solution", "reset") and not state_of(name):
        sys.exit(f"{name} has not been started: start {name}")
    else:
        commands[command](name)


if __name__ == "__main__":
    end_with_one_line()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # its reader may end first, as in `| head`
    try:
        main()
    except (OSError, SyntaxError, ValueError) as error:
        sys.exit(str(error))
