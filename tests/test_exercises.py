"""
exercises.py and its texts. The quick tests read them, and begin and undo in a copy of the repo; the
slow ones go through all exercises and hunts as a reader does.
"""

import ast
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
from planting import ROOT, copy_repo, read_bugs
from test_readme import names_defined

import exercises
from exercises import EXERCISES, HUNTS

SOLVED = {number: exercises.functions_of(number) for number in EXERCISES}
README = (ROOT / "README.md").read_text()


@pytest.fixture
def repo(tmp_path):
    return copy_repo(tmp_path / "repo")


def run(repo, *arguments) -> SimpleNamespace:
    """As a reader calls it."""
    command = [sys.executable, "exercises.py", *arguments]
    done = subprocess.run(command, cwd=repo, capture_output=True, text=True)
    return SimpleNamespace(code=done.returncode, out=done.stdout, err=done.stderr)


def test_each_names_functions_tests_and_places_that_exist():
    """Would catch: a function that was renamed, and its exercise was not; a test that is gone."""
    functions = [function for pairs in SOLVED.values() for function in pairs]
    assert len(functions) == len({*functions}), "two exercises empty one function"
    for file, name in functions:
        function = exercises.find(ROOT / file, name)
        assert function.first < function.body < function.end
    for exercise in EXERCISES.values():
        for test in exercise["tests"]:
            file, _, name = test.partition("::")
            assert name.partition("[")[0] in {"", *names_defined(ROOT / file)}
        for place in exercise["read"]:
            file, _, topic = place.partition(": ")
            where = ROOT / file.partition(",")[0]
            assert where.is_file() or place.startswith(("python ", "the page", "Milakov")), place
            if file == "README.md":
                assert topic in README
    assert 12 <= len(EXERCISES) <= 16 and len(HUNTS) >= 20


def test_each_hunt_has_a_bug_of_its_own():
    bugs = [text["bug"] for text in HUNTS.values()]
    assert {*bugs} <= {*read_bugs()} and len({*bugs}) == len(bugs)


def test_nothing_of_a_reader_is_lost(repo):
    """Would catch: a version that is thrown away, or written over; a file that is not as it was."""
    number, file = "4", repo / "paged.py"
    before = file.read_text()
    versions = []
    for answer in "return []", "return [1]":
        assert "write  paged.py: commit_blocks" in run(repo, "start", number).out
        assert ast.get_docstring(ast.parse(file.read_text())) and file.read_text() != before
        wanted = 'raise NotImplementedError("exercise 4: write commit_blocks")'
        file.write_text(file.read_text().replace(wanted, answer))
        assert "+    return new" in run(repo, "solution", number).out
        versions.append(f"    {answer}\n")
        assert run(repo, "reset", number).code == 0
        assert file.read_text() == before
    kept = sorted((repo / "out/exercises/4").glob("mine-*"))
    assert [path.read_text().count(text) for path in kept for text in versions] == [1, 0, 0, 1]


MISTAKES = """
check 3       | 3 is not begun: start 3
start 99      | a number from 1 to
reset hunt-1  | wanted start, check, hint
hunt nonsense | a level: http, kernels, paging, scheduling, sharing
check hunt-2  | hunt-2 is not begun: start hunt-2
"""


@pytest.mark.parametrize("line", MISTAKES.strip().splitlines())
def test_a_mistake_has_one_line(line):
    command, message = (part.strip() for part in line.split(" | "))
    done = run(ROOT, *command.split())
    assert done.code == 1 and message in done.err and "Traceback" not in done.err


def test_a_reader_whose_file_cannot_be_read_is_told(repo):
    run(repo, "start", "4")
    file = repo / "paged.py"
    file.write_text(file.read_text() + "\n)")
    last = len(file.read_text().splitlines())
    wanted = f"paged.py, line {last}: unmatched ')': mend that first\n"
    assert {run(repo, command, "4").err for command in ("check", "reset", "solution")} == {wanted}


@pytest.mark.slow
@pytest.mark.parametrize("number", EXERCISES)
def test_emptied_it_fails_and_solved_it_passes(number, repo):
    """With the promised line. Would catch: tests that do not judge the function, or skip it."""
    right = {file: (repo / file).read_text() for file, _ in SOLVED[number]}
    run(repo, "start", number)
    done = run(repo, "check", number)
    assert done.code == 1 and f"NotImplementedError: exercise {number}: write " in done.out
    assert any(meaning in done.out for meaning in EXERCISES[number]["tests"].values())
    for file, text in right.items():
        (repo / file).write_text(text)
    done = run(repo, "check", number)
    assert done.code == 0 and done.out.startswith("right: ")
    assert f"{number:>7}  solved" in run(repo).out


@pytest.mark.slow
@pytest.mark.parametrize("name", HUNTS)
def test_a_hunt_shows_its_symptom(name, repo):
    """That its test fails until it is mended: test_planted_bugs.py."""
    done = run(repo, "start", name)
    right, wrong = done.out.partition("as it should be:\n")[2].split("\nas it is:\n")
    assert right != wrong.partition("\nagain")[0]
    assert read_bugs()[HUNTS[name]["bug"]]["title"] not in done.out


@pytest.mark.slow
def test_a_hunt_ends_when_its_bug_has_gone(repo):
    """Beside an exercise that is begun, whose function the copy has."""
    assert run(repo, "start", "6").code == run(repo, "start", "hunt-1").code == 0
    done = run(repo, "check", "hunt-1")
    assert done.code == 1 and "The bug is still there" in done.out
    shutil.copy(ROOT / "paged.py", repo / "out/exercises/hunt-1/paged.py")
    assert run(repo, "check", "hunt-1").out.startswith("right: ")
