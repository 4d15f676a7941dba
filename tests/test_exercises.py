"""
exercises.py and its texts. The quick tests read them, and start and reset exercises in a copy of
the repo; the slow ones go through all exercises and hunts as a reader does.
"""

import ast
import json
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from planting import ROOT, copy_repo, read_bugs
from test_readme import names_defined

import exercises
import walkthrough
from assets import symptoms
from exercises import EXERCISES, HUNTS, RIGHT


@pytest.fixture
def repo(tmp_path):
    return copy_repo(tmp_path / "repo")


def run(repo, *arguments) -> subprocess.CompletedProcess:
    """Run exercises.py as a reader does."""
    command = [sys.executable, "exercises.py", *arguments]
    return subprocess.run(command, cwd=repo, capture_output=True, text=True)


@pytest.fixture
def out(tmp_path, monkeypatch):
    """Where the copies are, which are made of this repo itself."""
    folder = tmp_path / "my copies"  # a shell splits this name
    folder.mkdir()
    monkeypatch.setattr(exercises, "OUT", folder)
    monkeypatch.setattr(exercises, "SECONDS", 600)  # beside other tests
    return folder


def test_each_names_functions_tests_and_places_that_exist():
    """Would catch: an exercise whose function was renamed, or whose test was deleted."""
    places = [(text["file"], name) for text in EXERCISES.values() for name in text["functions"]]
    assert len(places) == len({*places}), "two exercises empty one function"
    for file, name in places:
        assert exercises.find((ROOT / file).read_text().splitlines(keepends=True), name)
    for exercise in EXERCISES.values():
        for test in exercise["tests"]:
            file, _, name = test.partition("::")
            assert name.partition("[")[0] in names_defined(ROOT / file)
        for place in exercise["read"]:
            file, _, topic = place.partition(": ")
            where = ROOT / file.partition(",")[0]
            assert where.is_file() or place.startswith(("the page", "Milakov")), place
            if file.endswith(".md"):
                assert topic.partition(": ")[0] in where.read_text()
    assert 12 <= len(EXERCISES) <= 16 and len(HUNTS) >= 20


def test_the_walkthrough_names_the_exercise_of_its_code():
    """A reader who wants to do an exercise should not be sent to its solution without a word."""
    functions = {name: x for x, text in EXERCISES.items() for name in text["functions"]}
    for stage in walkthrough.STAGES:
        last = stage.__doc__.splitlines()[-1]
        name, number = re.search(r": ([\w.]+)(?: \(exercise (\d+)\))?\. ", last).groups()
        wanted = [x for function, x in functions.items() if function.startswith(name)]
        assert number in (wanted or [None])
    assert [*EXERCISES] == [str(i) for i in range(1, 1 + len(EXERCISES))]
    assert [*HUNTS] == [f"hunt-{i}" for i in range(1, 1 + len(HUNTS))]


def test_each_hunt_has_a_bug_of_its_own():
    bugs = [f"{text['file']}: {text['bug']}" for text in HUNTS.values()]
    assert {*bugs} <= {*read_bugs()} and len({*bugs}) == len(bugs)


@pytest.mark.parametrize("number", EXERCISES)
def test_a_copy_shows_neither_its_answer_nor_a_later_one(number, tmp_path):
    """The later ones are at the end of the file, below what the reader has to see."""
    file = EXERCISES[number]["file"]
    for path in RIGHT, file:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / file, tmp_path / file)
    told = exercises.empty(tmp_path, number)
    assert all(function in told for function in EXERCISES[number]["functions"])
    lines = (tmp_path / file).read_text().splitlines(keepends=True)
    nodes = [exercises.find(lines, name) for name in EXERCISES[number]["functions"]]
    for node in nodes:
        body = node.body[1:] if ast.get_docstring(node) else node.body
        assert [type(statement) for statement in body] == [ast.Raise]
    for later in [*EXERCISES][int(number) :]:
        for name in EXERCISES[later]["functions"] if EXERCISES[later]["file"] == file else ():
            moved = exercises.find(lines, name.split(".")[-1])
            assert moved.lineno > max(node.end_lineno for node in nodes)
    ast.parse((tmp_path / RIGHT).read_text())


def test_nothing_of_a_reader_is_lost(repo):
    """Would catch: a version that is deleted or overwritten; a change in the repo itself."""
    before = (repo / "paged.py").read_text()
    copies = repo / "out/exercises"
    answers = ("return []", "return [1]")
    for answer in answers:
        assert (
            "write  paged.py: find_cached_prefix, commit_blocks" in run(repo, "start", "4").stdout
        )
        file = copies / "4/paged.py"
        wanted = 'raise NotImplementedError("exercise 4: write commit_blocks")'
        file.write_text(file.read_text().replace(wanted, answer))
        done = run(repo, "solution", "4")
        assert f"-    {answer}\n" in done.stdout and "+    return new\n" in done.stdout
        assert run(repo, "start", "4").returncode == 1
        assert run(repo, "reset", "4").returncode == 0
    kept = [(copies / name / "paged.py").read_text() for name in ("4-1", "4-2")]
    assert [kept[i].count(f"    {answers[i]}\n") for i in (0, 1)] == [1, 1]
    assert (repo / "paged.py").read_text() == before and not (copies / "4").exists()


MISTAKES = """
check 3       | 3 has not been started: start 3
start 99      | a number from 1 to
start 1 2     | a number from 1 to
reset hunt-99 | wanted start, check, hint
hunt nonsense | a level: http, kernels, paging, scheduling, sharing
check hunt-2  | hunt-2 has not been started: start hunt-2
"""


@pytest.mark.parametrize("line", MISTAKES.strip().splitlines())
def test_a_mistake_has_one_line(line, repo):
    command, message = (part.strip() for part in line.split(" | "))
    done = run(repo, *command.split())
    assert done.returncode == 1 and message in done.stderr and done.stderr.count("\n") == 1


def test_a_reader_whose_file_cannot_be_read_is_told(repo):
    run(repo, "start", "4")
    file = repo / "out/exercises/4/paged.py"
    file.write_text(file.read_text() + "\n)")
    last = len(file.read_text().splitlines())
    assert run(repo, "check", "4").stderr == f"unmatched ')' (paged.py, line {last})\n"
    assert "-)" in run(repo, "solution", "4").stdout
    file.unlink()
    assert run(repo, "check", "4").stderr.count("\n") == 1
    shutil.rmtree(repo / "out")
    (repo / "out").write_text("no folder")
    error = run(repo, "start", "4").stderr
    assert "out/exercises" in error and error.count("\n") == 1


def test_a_reader_that_stops_ends_it(repo):
    """`python exercises.py | head -1`: no traceback."""
    command = [sys.executable, "exercises.py", "--help"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=repo, **pipes) as process:
        process.stdout.close()
        assert process.stderr.read() == b""


def test_an_endless_loop_has_one_line(out, monkeypatch):
    monkeypatch.setattr(exercises, "SECONDS", 0.1)
    exercises.start("1")
    with pytest.raises(SystemExit, match=r"has not ended after 0\.1 s"):
        exercises.check("1")


OUTPUT = """
>       assert allocator.allocate_n(3) == [0, 1, 2]
E       {}

FAILED {} - ..
"""


def test_a_failure_is_told_in_four_lines(out, monkeypatch, capsys):
    """What it means, the line, the error, and a command that a shell can read."""
    exercises.start("16")
    test, meaning = next(iter(EXERCISES["16"]["tests"].items()))
    output = OUTPUT.format("assert 1 == 2", test) + "During handling ..\nE  AssertionError: later"
    monkeypatch.setattr(exercises, "run", lambda *_: output)
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        exercises.check("16")
    shown = "assert allocator.allocate_n(3) == [0, 1, 2]\nassert 1 == 2"
    out_lines = capsys.readouterr().out.splitlines()
    assert " ".join(out_lines) == f"not yet: {meaning} {shown}".replace("\n", " ")
    assert max(map(len, out_lines)) <= 100  # a meaning may have 150 characters
    folder = exercises.relpath(out / "16")
    words = shlex.split(ended.value.code, comments=True)
    assert words == ["cd", f"{folder};", "python", "-m", "pytest", "-xvv", test]
    # a failure without such a line, as of an ExceptionGroup, was once taken for a solution
    monkeypatch.setattr(exercises, "run", lambda *_: f"FAILED {test} - ..\n1 failed, 1 passed")
    with pytest.raises(SystemExit, match="1 failed, 1 passed"):
        exercises.check("16")
    monkeypatch.setattr(exercises, "run", lambda *_: "No module named pytest")
    with pytest.raises(SystemExit, match=r"(?s)No module named pytest.+make .venv/tests-ready"):
        exercises.check("16")


def test_a_hint_names_the_file_and_a_solution_answers_the_question(out, capsys):
    exercises.hint("hunt-17")
    assert capsys.readouterr().out.startswith("in ops/gather.py:\nTwo tensors")
    exercises.start("16")
    exercises.solution("16")
    assert capsys.readouterr().out.endswith(EXERCISES["16"]["answer"])


@pytest.mark.slow
@pytest.mark.parametrize("number", EXERCISES)
def test_emptied_it_fails_and_solved_it_passes(number, out, capsys):
    """It fails with the promised line. Would catch: tests that skip the function."""
    exercises.start(number)
    with pytest.raises(SystemExit):
        exercises.check(number)
    told = " ".join(capsys.readouterr().out.splitlines())  # a long meaning takes two lines
    assert f"NotImplementedError: exercise {number}: write " in told
    assert any(meaning in told for meaning in EXERCISES[number]["tests"].values())
    shutil.copy(out / number / RIGHT, out / number / EXERCISES[number]["file"])
    exercises.check(number)
    assert capsys.readouterr().out.startswith("right: ")
    assert exercises.state_of(number) == "solved"


@pytest.mark.slow
@pytest.mark.parametrize("name", HUNTS)
def test_a_hunt_shows_its_symptom(name, out, monkeypatch, capsys):
    """
    The correct answers are computed in this process, which has already imported torch.
    test_planted_bugs.py checks that the hunt's test fails until the bug is fixed.
    """
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(symptoms, "FOLDER", out)
    symptoms.show(json.loads(json.dumps(HUNTS[name]["show"])))
    right = capsys.readouterr().out
    run = exercises.run
    answers = iter([lambda *_: right, run])
    monkeypatch.setattr(exercises, "run", lambda *arguments: next(answers)(*arguments))
    exercises.start(name)
    told = capsys.readouterr().out
    shown = re.search(r"as it should be:\n(.+)\nas it is:\n(.+)\nagain", told, re.S)
    assert shown[1] == right != shown[2]
    assert "Error: " not in right and exercises.bug_of(name)["title"] not in told


@pytest.mark.slow
def test_a_hunt_ends_when_its_bug_has_gone(out, capsys):
    exercises.start("hunt-1")
    with pytest.raises(SystemExit):
        exercises.check("hunt-1")
    assert "The bug is still there" in capsys.readouterr().out
    exercises.solution("hunt-1")
    assert len(re.findall(r"^[+-] .+", capsys.readouterr().out, re.M)) == 1, "the line of the bug"
    shutil.copy(ROOT / "paged.py", out / "hunt-1/paged.py")
    exercises.check("hunt-1")
    assert capsys.readouterr().out.startswith("right: ")
