"""
Write the parts of this engine yourself: the tests that guard them say whether they are right. Then
hunt bugs, planted into a copy of this repo.

    python exercises.py              # lists the exercises and hunts, and how far you are
    python exercises.py start 4      # empties the functions of exercise 4, and says what to write
    python exercises.py check 4      # runs the tests that guard them
    python exercises.py hint 4
    python exercises.py solution 4   # shows what to change in yours to make it this repo's
    python exercises.py reset 4      # puts this repo's back; yours is kept in out/exercises/4

    python exercises.py hunt         # plants a bug into out/exercises/hunt-N, and shows what it does
    python exercises.py hunt kernels # one of this level: paging, scheduling, sharing, kernels, http
    python exercises.py check hunt-3 # has it gone? hint and solution know hunts, too

The texts are in exercises.toml. `make .venv/tests-ready` installs what the tests need; a check
takes up to ten seconds.
"""

import ast
import json
import random
import re
import shutil
import subprocess
import sys
import tomllib
from difflib import unified_diff
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from common import end_with_one_line
from tests.planting import copy_repo, plant, read_bugs

ROOT = Path(__file__).parent
OUT = ROOT / "out/exercises"
TEXTS = tomllib.loads((ROOT / "exercises.toml").read_text())
EXERCISES = {str(number): text for number, text in enumerate(TEXTS["exercise"], 1)}
HUNTS = {f"hunt-{number}": text for number, text in enumerate(TEXTS["hunt"], 1)}
SECONDS = 60  # for a check: a loop of the reader's may be endless


class Function(NamedTuple):
    """A function as it stands in a file: lines first .. end - 1, its body from `body` on."""

    first: int
    body: int
    end: int
    indent: str


def find(file: Path, name: str) -> Function:
    """
    Find `Class.method` or `function.inner` in a file. The docstring is not part of the body. Raises
    ValueError if the file cannot be read as Python, or has no such function.
    """
    try:
        node = ast.parse(file.read_text())
    except SyntaxError as error:
        raise ValueError(f"{file.name}, line {error.lineno}: {error.msg}: mend that first") from None
    for part in name.split("."):
        inner = {getattr(child, "name", None): child for child in ast.walk(node)}
        if part not in inner:
            raise ValueError(f"{file.name} has no {name} any more: write it under this name")
        node = inner[part]
    first = min(part.lineno for part in [node, *node.decorator_list])
    body = node.body[0]
    has_docstring = ast.get_docstring(node) is not None
    start = body.end_lineno if has_docstring else body.lineno - 1
    return Function(first - 1, start, node.end_lineno, " " * body.col_offset)


def lines_of(file: Path, name: str) -> list[str]:
    function = find(file, name)
    return file.read_text().splitlines(keepends=True)[function.first : function.end]


def replace_lines(file: Path, first: int, end: int, new: list[str]):
    lines = file.read_text().splitlines(keepends=True)
    lines[first:end] = new
    file.write_text("".join(lines))


def functions_of(exercise: dict) -> list[tuple[Path, str]]:
    """The functions that an exercise empties: file and name of each."""
    pairs = [function.split(": ") for function in exercise["functions"]]
    return [(ROOT / file, name) for file, name in pairs]


# --------------------------------------------------------------------------------------------------
# Exercises


def start(number: str):
    """Keep the files as they are in out/exercises, then empty the functions."""
    exercise = EXERCISES[number]
    kept = OUT / number
    if has_begun(number):
        sys.exit(f"exercise {number} is begun already: check it, or reset it")
    functions = functions_of(exercise)
    for file, name in functions:  # all are found before the first is emptied
        find(file, name)
    kept.mkdir(parents=True, exist_ok=True)
    for file in {file for file, _ in functions}:
        shutil.copy(file, kept / file.name)
    for file, name in functions:
        function = find(file, name)
        wanted = f'raise NotImplementedError("exercise {number}: write {name}")'
        replace_lines(file, function.body, function.end, [f"{function.indent}{wanted}\n"])
    print(f"{number}. {exercise['title']}\n\n{exercise['text'].strip()}\n")
    for function in exercise["functions"]:
        print(f"write  {function}")
    for place in exercise["read"]:
        print(f"read   {place}")
    print(f"then   python exercises.py check {number}")


def has_begun(number: str) -> bool:
    return any((OUT / number / file.name).is_file() for file, _ in functions_of(EXERCISES[number]))


def need_begun(number: str):
    if not has_begun(number):
        sys.exit(f"exercise {number} is not begun: python exercises.py start {number}")


def check(number: str):
    need_begun(number)
    for file, name in functions_of(EXERCISES[number]):
        find(file, name)
    judge(ROOT, EXERCISES[number]["tests"], number)


def judge(repo: Path, tests: dict[str, str], number: str):
    """Run the tests, in their order, up to the first that fails; say what that means."""
    missing = [name for name in ("pytest", "hypothesis") if not find_spec(name)]
    if missing:
        sys.exit(f"the tests need {' and '.join(missing)}: pip install -r requirements-test.txt")
    pytest = [sys.executable, "-m", "pytest", "-oaddopts=", "-xq", "-pno:cacheprovider", "--tb=short"]
    run = {"cwd": repo, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        done = subprocess.run([*pytest, *tests], timeout=SECONDS, **run)
    except subprocess.TimeoutExpired:
        sys.exit(f"not yet: the tests have not ended after {SECONDS} s. Is a loop endless?")
    if done.returncode:
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", done.stdout, re.M)
        error = re.search(r"^E +(.+)", done.stdout, re.M)
        if not failed or not error:
            sys.exit(f"the tests could not run:\n{done.stdout}")
        meaning = next((tests[test] for test in tests if failed[1].startswith(test)), "")
        print(f"not yet: {error[1]}\n{meaning}\nall of it: python -m pytest -x '{failed[1]}'")
        sys.exit(1)
    (OUT / number / "solved").touch()
    print("right:", done.stdout.strip().splitlines()[-1])


def solution(number: str):
    """Print the changes from the reader's functions to this repo's."""
    need_begun(number)
    for file, name in functions_of(EXERCISES[number]):
        right = lines_of(OUT / number / file.name, name)
        print(*unified_diff(lines_of(file, name), right, "yours", file.name, n=99), sep="", end="")


def reset(number: str):
    """Put this repo's functions back, and keep the reader's."""
    need_begun(number)
    kept = OUT / number
    functions = functions_of(EXERCISES[number])
    mine = [line for file, name in functions for line in [*lines_of(file, name), "\n"]]
    place = next(path for i in range(1, 10**6) if not (path := kept / f"mine-{i}.py").exists())
    place.write_text("".join(mine))
    for file, name in functions:
        function = find(file, name)
        right = lines_of(kept / file.name, name)
        replace_lines(file, function.first, function.end, right)
    for file in {file for file, _ in functions}:
        (kept / file.name).unlink()
    print(f"as before; yours is kept in {place.relative_to(ROOT)}")


def hint(number: str):
    print((EXERCISES | HUNTS)[number]["hint"].strip())


# --------------------------------------------------------------------------------------------------
# Hunts


def hunt(level: str = ""):
    """Plant a bug that was not hunted yet into a copy of the repo, which has no history."""
    left = [name for name, bug in HUNTS.items() if level in (bug["level"], "")]
    left = [name for name in left if not (OUT / name).exists()]
    if not left:
        sys.exit(f"no hunt is left{f' of level {level}' * bool(level)}: delete one's folder in {OUT}")
    start_hunt(random.choice(left))


def start_hunt(name: str):
    repo = OUT / name
    if not repo.exists():
        copy_repo(repo)
        bug = read_bugs()[HUNTS[name]["bug"]]
        plant(repo / bug["file"], bug["right"], bug["wrong"])
        for answers in ("tests/planted_bugs.toml", "tests/kills.tsv", "exercises.toml"):
            (repo / answers).unlink()
    print(f"{name}, {HUNTS[name]['level']}: a bug is in {repo.relative_to(ROOT)}.\n")
    print(HUNTS[name]["text"].strip())
    for title, tree in ("as it should be", ROOT), ("in the copy", repo):
        print(f"\n{title}:\n{symptom(tree, name)}")
    print(f"mend it there; then: python exercises.py check {name}")


def symptom(repo: Path, name: str) -> str:
    """What a user of this tree sees."""
    run = {"capture_output": True, "text": True, "timeout": 2 * SECONDS}
    show = [sys.executable, "assets/symptoms.py", json.dumps(HUNTS[name]["show"])]
    return subprocess.run(show, cwd=repo, **run).stdout


def check_hunt(name: str):
    """Run the test that knows the bug in the reader's copy."""
    if not (OUT / name).exists():
        sys.exit(f"{name} is not begun: python exercises.py start {name}")
    bug = read_bugs()[HUNTS[name]["bug"]]
    judge(OUT / name, {bug["test"]: "The bug is still there."}, name)


def solve_hunt(name: str):
    bug = read_bugs()[HUNTS[name]["bug"]]
    print(f"{bug['file']}: {bug['title']}\n\nplanted:\n{bug['wrong']}\n\nright:\n{bug['right']}")


# --------------------------------------------------------------------------------------------------


def show_list():
    for number, text in (EXERCISES | HUNTS).items():
        begun = (OUT / number).exists() if number in HUNTS else has_begun(number)
        solved = (OUT / number / "solved").exists()
        state = "solved" if solved else "begun" if begun else ""
        print(f"{number:>7}  {state:8}{text.get('title') or text['level']}")


def main():
    command, *rest = sys.argv[1:] or ["list"]
    of_exercises = {"start": start, "check": check, "hint": hint, "solution": solution}
    of_hunts = {"start": start_hunt, "check": check_hunt, "hint": hint, "solution": solve_hunt}
    known = EXERCISES | HUNTS
    if command == "list":
        return show_list()
    if command in ("-h", "--help"):
        return print(__doc__.strip())
    if command == "hunt" and (not rest or rest[0] in {bug["level"] for bug in HUNTS.values()}):
        return hunt(*rest)
    commands = of_hunts if rest and rest[0] in HUNTS else of_exercises | {"reset": reset}
    if command not in commands or len(rest) != 1 or rest[0] not in known:
        sys.exit(
            f"{' '.join(sys.argv[1:])}: wanted {', '.join(commands)} and a number from 1 to "
            f"{len(EXERCISES)} or hunt-1 to hunt-{len(HUNTS)}; or hunt, and a level if you like"
        )
    try:
        commands[command](rest[0])
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    end_with_one_line()
    main()
