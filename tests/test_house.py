"""
How the code is built: how dense it stands, how long its functions are, which file may import which.
What a reader takes in is tokens, however they are broken into lines; tokenize counts them.
"""

import ast
import io
import re
import statistics
import subprocess
import sys
import tokenize
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
CODE = [
    path
    for folder in ("", "ops/", "engine/", "server/", "training/", "examples/", "data/*/")
    for path in sorted(ROOT.glob(f"{folder}*.py"))
    if path.name not in ("bench.py", "test_paged.py")
]

# The limits, @jit kernels apart. A change that comes nearer to a goal lowers the limit.
MEAN_TOKENS = 10.5  # of a statement, in all of the code
MODULE_TOKENS = 11.5  # of a statement, in one module
WIDE = 0.03  # share of statements with more than 30 tokens
PACKS = 0.015  # `a, b = x, y`, and tuples and conditionals as statements, a statement
FUNCTION_LINES = 60  # of the longest, docstring apart, outside main()
MEDIAN_LINES = 12  # of half of the functions
WALK = (60, 25)  # functions, changes of file on the way of a decoded token
ARGUMENTS = 8  # the most, without self

# Each may import only those before it, also inside its functions.
ORDER = [
    "common", "params", "paged", "tokenizer", "training.corpus", "model", "families",
    "checkpoint", "kernels",
    "ops.gather", "ops.inputs", "ops.sampling", "ops.sampling_kernels", "ops.cpu",
    "ops.flex", "ops.linear", "ops.fused", "ops.choice", "ops.compiled",
    "engine.settings", "engine.runner", "engine.sizing", "engine.links", "engine.events",
    "engine.engine", "engine.process", "engine.replay",
    "server.welcome", "server.workers", "server.text", "server.protocol",
    "server.connection", "server.metrics", "server.gate", "server.client",
    "server.answers", "server.live", "server.app", "server.terminal", "flags", "serve",
    "training.fast", "training.report", "training.machine", "training.muon", "train",
    "bench", "walkthrough", "examples.beam_search", "examples.from_nanogpt", "examples.post",
]  # fmt: skip
WITHOUT_TORCH = [
    "paged",
    "tokenizer",
    "serve",
    "params",
    "engine.settings",
    "flags",
    "engine.replay",
    "server.app",
    "server.text",
]


class Statement(NamedTuple):
    line: int
    tokens: int


def statements(source: str, skipped: set[int]) -> list[Statement]:
    """All statements, headers such as `if x:` too, but what begins in `skipped` lines."""
    found = []
    first = count = in_f_string = 0
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = tokenize.tok_name[token.type]
        in_f_string += kind == "FSTRING_START"  # from Python 3.12 on: before, it is one token
        if token.type == tokenize.NEWLINE:
            if count:
                found.append(Statement(first, count))
            count = 0
        elif token.type not in silent and token.start[0] not in skipped:
            if count == 0:
                first = token.start[0]
            ends = kind == "FSTRING_END" and in_f_string == 1
            count += in_f_string == 0 or ends
        in_f_string -= kind == "FSTRING_END"
    return found


class Function(NamedTuple):
    name: str
    lines: int  # docstring apart
    arguments: int  # self apart


class Module:
    """What is measured of a file."""

    def __init__(self, path: Path):
        self.name = str(path.relative_to(ROOT))
        source = path.read_text()
        nodes = list(ast.walk(ast.parse(source)))
        functions = [n for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        kernels = {f for f in functions if any("jit" in ast.unparse(d) for d in f.decorator_list)}
        in_kernels = {line for kernel in kernels for line in lines_of(kernel)}
        docstrings = {line for node in nodes for line in docstring_lines(node)}
        every = statements(source, docstrings)
        self.statements = [s for s in every if s.line not in in_kernels]
        self.packs = sum(is_pack(node) and node.lineno not in in_kernels for node in nodes)
        self.functions = [
            Function(f.name, len(lines_of(f)) - len(docstring_lines(f)), count_arguments(f))
            for f in functions
            if f not in kernels
        ]

    def tokens(self) -> int:
        return sum(statement.tokens for statement in self.statements)


def lines_of(node) -> range:
    return range(node.lineno, node.end_lineno + 1)


def docstring_lines(node) -> range:
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    if isinstance(node, documented) and ast.get_docstring(node) is not None:
        return lines_of(node.body[0])
    return range(0)


def is_pack(node) -> bool:
    """Several statements in one: `a, b = x, y`, `f(), g()`, `f() if x else g()`."""
    if isinstance(node, ast.Assign):
        return isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Tuple | ast.IfExp)


def count_arguments(function) -> int:
    arguments = function.args
    names = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return sum(name.arg not in ("self", "cls") for name in names)


MODULES = [Module(path) for path in CODE]
STATEMENTS = [statement for module in MODULES for statement in module.statements]
FUNCTIONS = [(module.name, function) for module in MODULES for function in module.functions]


def test_a_statement_has_few_tokens():
    """As in projects that are easily read: nanoGPT 8.9, mini-sglang 9.5, nano-vLLM 9.7."""
    mean = statistics.mean(statement.tokens for statement in STATEMENTS)
    assert mean <= MEAN_TOKENS


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)
def test_no_module_is_dense(module):
    assert module.tokens() <= MODULE_TOKENS * len(module.statements)


def test_few_statements_are_wide():
    assert sum(statement.tokens > 30 for statement in STATEMENTS) <= WIDE * len(STATEMENTS)


def test_statements_are_not_packed_into_one():
    assert sum(module.packs for module in MODULES) <= PACKS * len(STATEMENTS)


def test_functions_are_short():
    long = {f.name: f.lines for _, f in FUNCTIONS if f.name != "main" and f.lines > FUNCTION_LINES}
    assert not long
    assert statistics.median(function.lines for _, function in FUNCTIONS) <= MEDIAN_LINES


def test_functions_have_few_arguments():
    many = {f"{file}: {f.name}": f.arguments for file, f in FUNCTIONS if f.arguments > ARGUMENTS}
    assert not many


@pytest.mark.slow
def test_the_way_of_a_token_is_short():
    """As tests/walk.py measures it, over a real request on the CPU."""
    command = [sys.executable, "tests/walk.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    *_, functions, changes = re.findall(r"\d+", done.stdout)
    assert int(functions) <= WALK[0] and int(changes) <= WALK[1]


def test_the_measure_itself():
    """Worked by hand; an f-string is one token under every Python."""
    source = 'def f(a):\n    """Not counted."""\n    return f"{a + 1} {a}", 2  # nor is this\n'
    assert statements(source, {2}) == [Statement(1, 6), Statement(3, 4)]
    tree = ast.parse("a, b = 1, 2\nf(), g()\nf() if a else b\na, b = f()\nf()\na = 1, 2")
    assert [is_pack(node) for node in tree.body] == [True, True, True, False, False, False]


# --------------------------------------------------------------------------------------------------
# Imports


def imports(path: Path) -> set[str]:
    """The names, of modules and what is in them, that a file imports wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_the_order_names_every_module():
    folders = ["ops", "engine", "server", "training", "examples"]
    paths = [*ROOT.glob("*.py"), *(path for f in folders for path in ROOT.glob(f"{f}/*.py"))]
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths}
    names = {name for name in names if "__init__" not in name}
    assert names - {"test_paged"} == set(ORDER)


@pytest.mark.parametrize("name", ORDER)
def test_nothing_imports_upwards(name):
    """So a reader can begin at the bottom, and no two files need each other."""
    after = ORDER[ORDER.index(name) :]
    found = imports(ROOT / f"{name.replace('.', '/')}.py")
    assert not found.intersection(after)


def test_drawers_stand_on_each_other():
    """server/ on engine/ by its links alone, engine/ on ops/, and ops/ on the files of the root."""
    allowed = {"ops": ("ops",), "engine": ("ops", "engine"), "server": ("server", "engine.links")}
    for drawer, below in allowed.items():
        for path in (ROOT / drawer).glob("*.py"):
            modules = {name for name in imports(path) if name.partition(".")[0] in allowed}
            assert all(name.startswith(below) for name in modules), path


def test_an_installation_brings_packages_alone():
    """The repo is run where it is: installed, it left thirteen modules with names like `train`."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert settings == {"py-modules": []}


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_importing_it_imports_no_torch(name):
    """Policy, parameters and the HTTP side: they start at once, and stay small."""
    code = f"import sys, {name}; assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
