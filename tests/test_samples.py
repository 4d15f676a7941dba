"""samples.py: the share of complete statements, on texts whose answer is known."""

import inspect
import textwrap

import pytest

from training import samples


@pytest.mark.parametrize(
    ("text", "verdicts"),
    [
        ("x = 1\ny = 2\n", [True, True]),
        ("x = = 3\ny = 2\n", [False, True]),  # broken
        ("        return x\n", [True]),  # from the middle of a function
        ("    x = 1\n        y = 2\n", [True, True]),  # each without its own indentation
        ("if x:\n    y()\n", [True, True]),  # a header and a statement
        ("if x:  # why\n", [True]),
        ("if x\n    y()\n", [False, True]),
        ("elif x:\n", [True]),
        ("else:\n", [True]),
        ("else x:\n", [False]),
        ("try:\n", [True]),
        ("except (A, B) as error:\n", [True]),
        ("finally:\n", [True]),
        ("case [x, *_]:\n", [True]),
        ("@cached\n", [True]),
        ("async with a as b:\n", [True]),
        ("f(1,\n  2)\n", [True]),  # two lines, one statement
        (
            "f(1,\ndef g():\n    pass\n",
            [False, True, True],
        ),  # never closed: the next statement is its own
        ("f(1))\n", [False]),
        ('"""One\n\ntwo."""\nx = 1\n', [True, True]),
        ("# x = = 3\n\n   \n", []),  # nothing to judge
        ("x = 1\ny = (2,\n", [True]),  # what is open at the end is not complete
        ('x = 1\n"""Text\n', [True]),
        ("x = '\\d'\n", [True]),  # a warning is no error
        ("x = '\0'\n", [False]),
        ("First Citizen:\n", [False]),
    ],
)
def test_statements_with_a_known_answer(text, verdicts):
    assert samples.judge(text) == verdicts


def test_the_share_counts_over_all_texts():
    assert samples.share_that_parses(["x = 1\n", "y = = 2\nz = 3\nw = 4\n"]) == 0.75
    assert samples.share_that_parses(["", "# nothing\n"]) is None


def test_every_statement_of_real_code_parses():
    """
    The indented body of a module of the library: decorators, docstrings, try, else, continued
    lines.
    """
    source = textwrap.indent(inspect.getsource(textwrap) + inspect.getsource(samples), "    ")
    verdicts = samples.judge(source)
    assert all(verdicts) and len(verdicts) > 200
