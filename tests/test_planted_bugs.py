"""
Checks that the tests notice bugs. Each bug of planted_bugs.toml is planted into a copy of the repo.
The test that it names must then fail, for the reason that it names. No test exists only for that
table.
"""

import tempfile
from pathlib import Path

import pytest
import torch
from planting import ROOT, Forks, copy_repo, plant, read_bugs

import kernels
import test_paged

pytestmark = pytest.mark.slow

BUGS = read_bugs()
# one per folder
TESTS = {str(Path(bug["test"].partition("::")[0]).parent): bug["test"] for bug in BUGS.values()}


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
    models = tmp_path_factory.mktemp("models")
    for num_kv_heads in 2, 4:
        torch.save(test_paged.train(num_kv_heads).state_dict(), models / f"{num_kv_heads}.pt")
    forks = Forks(models)
    yield forks
    forks.close()


@pytest.fixture
def repo():
    """Return a copy of the repo, which is deleted after the test."""
    with tempfile.TemporaryDirectory() as folder:
        yield copy_repo(Path(folder) / "repo")


@pytest.mark.parametrize("test", TESTS.values(), ids=TESTS)
def test_without_a_bug_one_of_a_folder_passes(test, forks, repo):
    """
    Would catch: tests that fail in every copy of the repo. In the repo itself all are run anyway.
    """
    status, output = forks.run(repo, [test])
    assert status == 0, output


@pytest.mark.parametrize("title", BUGS)
def test_a_planted_bug_fails_its_test(title, forks, repo):
    """
    Would catch: tests that pass whatever the code does, or fail for a reason other than the bug.
    """
    bug = BUGS[title]
    if not kernels.triton and bug["file"] == "kernels.py":
        pytest.skip("without triton this code does not run")
    plant(repo / bug["file"], bug["right"], bug["wrong"])
    status, output = forks.run(repo, [bug["test"]])
    if status == 0 and "skipped" in output and " passed" not in output:
        pytest.skip(f"{bug['test']} is skipped here")  # without a browser or triton
    assert status != 0, f"the bug is not noticed: {bug['test']} passes with {bug['wrong']!r}"
    assert status == 1 and bug["says"] in output, output


def test_every_bug_is_one_of_code_that_users_run():
    """A bug in a test would prove nothing, and neither would the same bug twice."""
    files = {bug["file"] for bug in BUGS.values()}
    assert all((ROOT / file).is_file() and "test" not in file for file in files)
    assert (
        len({(bug["file"], bug["right"], bug["wrong"]) for bug in BUGS.values()}) == len(BUGS) >= 60
    )
