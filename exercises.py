"""
Write the parts of this engine yourself: the tests that guard them say whether they are right. Then
hunt bugs, planted into a copy of this repo.

    python exercises.py              # lists the exercises and hunts, and how far you are
    python exercises.py start 4      # empties the functions of exercise 4, and says what to write
    python exercises.py check 4      # runs the tests that guard them
    python exercises.py hint 4
    python exercises.py solution 4   # shows what to change in yours to make it this repo's
    python exercises.py reset 4      # puts this repo's back; yours is kept in out/exercises/4

    python exercises.py hunt         # plants a bug into out/exercises/hunt-N, shows what it does
    python exercises.py hunt kernels # one of this level: paging, sharing, scheduling, kernels, http
    python exercises.py check hunt-3 # has it gone? start, hint and solution know hunts, too

The texts are in exercises.toml. `make .venv/tests-ready` installs what the tests need; a check
takes some seconds. The copies to hunt in have all functions, also those of exercises.
"""

import ast
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
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
# what a copy to hunt in has not got
ANSWERS = ("tests/planted_bugs.toml", "tests/kills.tsv", "exercises.toml", "exercises.py")
SECONDS = 100  # for a check, on a busy machine: a loop of the reader's may be endless


class Function(NamedTuple):
    """Lines first .. end - 1 of a file are a function; its body begins at line `body`."""

    first: int
    body: int
    end: int
    indent: str


def find(path: Path, name: str) -> Function:
    """
    Find `Class.method` or `function.inner` in a file. The docstring is not part of the body. Raises
    ValueError if the file is not Python, or has no function of this name.
    """
    try:
        node = ast.parse(path.read_text())
    except SyntaxError as error:
        place = f"{path.name}, line {error.lineno}"
        raise ValueError(f"{place}: {error.msg}: mend that first") from None
    for part in name.split("."):
        kinds = ast.FunctionDef | ast.ClassDef
        inside = [x for x in ast.walk(node) if isinstance(x, kinds) and x.name == part]
        if not inside:
            raise ValueError(f"{path.name} has no {name} any more: write it under this name")
        node = inside[0]
    first = min(part.lineno for part in [node, *node.decorator_list]) - 1
    body = node.body[0]
    start = body.end_lineno if ast.get_docstring(node) else body.lineno - 1
    return Function(first, start, node.end_lineno, " " * body.col_offset)


def lines_of(path: Path, name: str) -> list[str]:
    function = find(path, name)
    return path.read_text().splitlines(keepends=True)[function.first : function.end]


def replace_lines(path: Path, first: int, end: int, new: list[str]):
    lines = path.read_text().splitlines(keepends=True)
    lines[first:end] = new
    path.write_text("".join(lines))


def functions_of(number: str) -> list[tuple[str, str]]:
    """The functions that an exercise empties: file and name of each."""
    return [tuple(function.split(": ")) for function in EXERCISES[number]["functions"]]


def has_begun(number: str) -> bool:
    """An exercise has its files as they were in its folder; a hunt is its folder."""
    if number in HUNTS:
        return (OUT / number).exists()
    return all((OUT / number / file).exists() for file, _ in functions_of(number))


def put_back(number: str, repo: Path):
    """Put the functions of an exercise into this tree as they were before it was begun."""
    for file, name in functions_of(number):
        function = find(repo / file, name)
        right = lines_of(OUT / number / file, name)
        replace_lines(repo / file, function.first, function.end, right)


# --------------------------------------------------------------------------------------------------
# Exercises


def start(number: str):
    """Keep the files as they are in out/exercises, then empty the functions."""
    exercise = EXERCISES[number]
    functions = functions_of(number)
    for file, name in functions:  # all are found before the first is emptied
        find(ROOT / file, name)
    for file, _ in functions:
        kept = OUT / number / file
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, kept)
    for file, name in functions:
        function = find(ROOT / file, name)
        empty = f'{function.indent}raise NotImplementedError("exercise {number}: write {name}")\n'
        replace_lines(ROOT / file, function.body, function.end, [empty])
    print(f"{number}. {exercise['title']}\n\n{exercise['text'].strip()}\n")
    print(*(f"write  {function}" for function in exercise["functions"]), sep="\n")
    print(*(f"read   {place}" for place in exercise["read"]), sep="\n")
    print(f"then   python exercises.py check {number}")


def check(number: str):
    for file, name in functions_of(number):
        find(ROOT / file, name)
    judge(ROOT, EXERCISES[number]["tests"], number)


def judge(repo: Path, tests: dict[str, str], number: str):
    """Run the tests, in their order, up to the first that fails; say what that means."""
    missing = [name for name in ("pytest", "hypothesis") if not find_spec(name)]
    if missing:
        sys.exit(f"the tests need {' and '.join(missing)}: pip install -r requirements-test.txt")
    pytest = [sys.executable, "-m", "pytest", "-oaddopts=", "-xq", "-pno:cacheprovider"]
    run = {"cwd": repo, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        done = subprocess.run([*pytest, *tests], timeout=SECONDS, **run)
    except subprocess.TimeoutExpired:
        sys.exit(f"not yet: the tests have not ended after {SECONDS} s. Is a loop endless?")
    if done.returncode:
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", done.stdout, re.M)
        last = done.stdout.rpartition("During handling of the above exception")[2]
        # a test that expects a RuntimeError takes an empty function's NotImplementedError for it
        empty = re.search(r"^E +(NotImplementedError: exercise .+)", done.stdout, re.M)
        error = empty or re.search(r"^E +(.+)", last, re.M)
        line = re.findall(r"^> +(.+)", last, re.M)[-1:]
        if not failed or not error:
            sys.exit(f"the tests could not run:\n{done.stdout}")
        meaning = next((tests[test] for test in tests if failed[1].startswith(test)), "")
        print("not yet:", *line, error[1], meaning, sep="\n")
        print(f"all of it: python -m pytest -x '{failed[1]}'")
        sys.exit(1)
    if " passed" not in done.stdout:
        sys.exit(f"the tests are skipped here:\n{done.stdout}")
    (OUT / number / "solved").touch()
    print("right:", done.stdout.strip().splitlines()[-1])


def solution(number: str):
    """Print the changes from the reader's functions to this repo's."""
    for file, name in functions_of(number):
        mine, right = lines_of(ROOT / file, name), lines_of(OUT / number / file, name)
        print(*unified_diff(mine, right, "yours", file, n=99), sep="", end="")


def reset(number: str):
    """Put this repo's functions back, and keep the reader's."""
    functions = functions_of(number)
    mine = [line for file, name in functions for line in [*lines_of(ROOT / file, name), "\n"]]
    place = OUT / number / f"mine-{1 + len([*(OUT / number).glob('mine-*')])}.py"
    place.write_text("".join(mine))
    put_back(number, ROOT)
    (OUT / number / functions[0][0]).unlink()
    print(f"as before; yours is kept in {place.relative_to(ROOT)}")


# --------------------------------------------------------------------------------------------------
# Hunts


def hunt(level: str = ""):
    """Begin a hunt that was not begun yet, of that level or any."""
    left = [name for name, text in HUNTS.items() if level in (text["level"], "")]
    left = [name for name in left if not has_begun(name)]
    if not left:
        sys.exit("all of these are begun: delete a folder of out/exercises to hunt there again")
    start_hunt(random.choice(left))


def start_hunt(name: str):
    """Plant the bug into a copy of the repo, which has no history, and show what it does."""
    repo = OUT / name
    OUT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=OUT) as folder:  # it is moved once it is whole
        copy = copy_repo(Path(folder) / name)
        for number in filter(has_begun, EXERCISES):
            put_back(number, copy)
        right = symptom(copy, name)
        bug = read_bugs()[HUNTS[name]["bug"]]
        plant(copy / bug["file"], bug["right"], bug["wrong"])
        wrong = symptom(copy, name)
        for answers in ANSWERS:
            (copy / answers).unlink()
        copy.rename(repo)
    print(f"{name}, {HUNTS[name]['level']}: there is a bug in {repo.relative_to(ROOT)}.\n")
    print(HUNTS[name]["text"])
    print(f"\nas it should be:\n{right}\nas it is:\n{wrong}")
    folder = repo.relative_to(ROOT)
    print(f"again     python {folder}/assets/symptoms.py")
    if "waves" in HUNTS[name]["show"]:
        print(f"watch it  python assets/draw.py page {folder}/out/symptoms/run.jsonl")
    print(f"mended?   python exercises.py check {name}")


def symptom(repo: Path, name: str) -> str:
    """Return what a user of this tree sees."""
    show = repo / "out/symptoms/show.json"
    show.parent.mkdir(parents=True, exist_ok=True)
    show.write_text(json.dumps(HUNTS[name]["show"]))
    run = {"capture_output": True, "text": True, "timeout": 2 * SECONDS}
    return subprocess.run([sys.executable, repo / "assets/symptoms.py"], **run).stdout


def check_hunt(name: str):
    """Run the test that knows the bug in the reader's copy."""
    bug = read_bugs()[HUNTS[name]["bug"]]
    judge(OUT / name, {bug["test"]: "The bug is still there, or another one."}, name)


def solve_hunt(name: str):
    bug = read_bugs()[HUNTS[name]["bug"]]
    print(f"{bug['file']}: {bug['title']}\n\nplanted:\n{bug['wrong']}\n\nright:\n{bug['right']}")


# --------------------------------------------------------------------------------------------------


def show_list():
    for number, text in (EXERCISES | HUNTS).items():
        state = "begun" if has_begun(number) else ""
        state = "solved" if (OUT / number / "solved").exists() else state
        print(f"{number:>7}  {state:8}{text.get('title') or text['level']}")
    print("\npython exercises.py start 1 begins; --help has the rest")


def main():
    command, *rest = sys.argv[1:] or ["list"]
    number = rest[0] if rest else ""
    commands = {"start": start, "check": check, "solution": solution, "reset": reset}
    if number in HUNTS:
        commands = {"start": start_hunt, "check": check_hunt, "solution": solve_hunt}
    levels = {text["level"] for text in HUNTS.values()}
    known = EXERCISES | HUNTS
    if command == "list":
        show_list()
    elif command in ("-h", "--help"):
        print(__doc__.strip())
    elif command == "hunt" and number in {*levels, ""}:
        hunt(number)
    elif command == "hint" and number in known:
        print(known[number]["hint"].strip())
    elif command not in commands or number not in known:
        sys.exit(
            f"{' '.join(sys.argv[1:])}: wanted start, check, hint, solution or reset, and a number "
            f"from 1 to {len(EXERCISES)} or hunt-1 to hunt-{len(HUNTS)}; or hunt, and perhaps a "
            f"level: {', '.join(sorted(levels))}"
        )
    elif has_begun(number) == (command == "start"):
        wanted = "begun already: check it" if command == "start" else f"not begun: start {number}"
        sys.exit(f"{number} is {wanted}")
    else:
        try:
            commands[command](number)
        except ValueError as error:
            sys.exit(str(error))


if __name__ == "__main__":
    end_with_one_line()
    main()
