"""
How the code is built: how dense it is, how long its functions are, which file may import which.
Readers take in tokens, however they are broken into lines; tokenize counts them.
"""

import ast
import io
import statistics
import subprocess
import sys
import tokenize
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("", "ops/", "engine/", "server/", "training/", "examples/", "assets/")
MODULES = [path for folder in FOLDERS for path in sorted(ROOT.glob(f"{folder}[a-z]*.py"))]
MODULES.remove(ROOT / "test_paged.py")
CODE = [*MODULES, *sorted(ROOT.glob("data/*/*.py"))]

# The limits, without @jit kernels. A change that comes closer to a goal lowers the limit.
MEAN_TOKENS = 10.2  # of a statement: nanoGPT 8.9, mini-sglang 9.5, nano-vLLM 9.7
MODULE_TOKENS = 11.5  # of a statement, in one module
WIDE = 0.012  # share of statements with more than 30 tokens
FUNCTION_LINES = 60  # of the longest, without its docstring, outside main()
MEDIAN_LINES = 12  # of half of the functions
ARGUMENTS = 8  # the most, without self

# Each may only import those before it, even inside its functions.
ORDER = """
    common engine.stages paged params tokenizer training.corpus model
    families
    ops.packed checkpoint kernels
    ops.gather ops.inputs ops.sampling ops.sampling_kernels ops.cpu
    ops.linear ops.fused ops.deterministic ops.prefix ops.choice
    interleaved
    engine.step engine.drafts engine.device engine.runner engine.sizing engine.link
    engine.events engine.schemas engine.rules engine.matcher engine.grammar
    engine.scores engine.window engine.engine engine.process
    server.tools server.text server.protocol
    server.client server.live server.connection server.metrics server.gate
    server.answers server.app server.terminal flags serve
    training.fast training.report training.machine train
    assets.records assets.workloads assets.commands assets.load assets.llama assets.vllm_offline
    assets.draw bench walkthrough assets.symptoms exercises
    examples.beam_search examples.flex_attention examples.from_nanogpt examples.from_nanochat
    examples.post examples.ray_serve examples.replicas
"""
WITHOUT_TORCH = "paged, tokenizer, serve, params, flags, engine.events, server.app, server.text, "
WITHOUT_TORCH += "engine.matcher, training.corpus"
SILENT = {"COMMENT", "NL", "INDENT", "DEDENT", "ENDMARKER"}


def skipped_lines(tree: ast.Module) -> set[int]:
    """Return the lines of docstrings and of @jit kernels."""
    lines = set()
    for node in ast.walk(tree):
        decorators = [ast.unparse(x) for x in getattr(node, "decorator_list", [])]
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or any("jit" in name for name in decorators):
            lines |= set(range(node.lineno, node.end_lineno + 1))
    return lines


def count_tokens(source: str, skipped: set[int]) -> list[int]:
    """
    Return the tokens of each statement, including headers such as `if x:`; an f-string is one.
    """
    counts = [0]
    in_f_string = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = tokenize.tok_name[token.type]
        in_f_string += kind == "FSTRING_START"  # only from Python 3.12 on; before, it is one token
        in_f_string -= kind == "FSTRING_END"
        if token.start[0] in skipped or kind in SILENT:
            continue
        if kind == "NEWLINE":
            counts.append(0)
        elif not in_f_string:
            counts[-1] += 1
    return [count for count in counts if count]


def test_tokens_are_counted():
    """The expected counts are made by hand."""
    source = 'def f(a):\n    """Not counted."""\n    return f"{a + 1} {a}", 2  # nor is this\n'
    assert count_tokens(source, skipped_lines(ast.parse(source))) == [6, 4]


def test_statements_have_few_tokens_and_functions_are_short():
    every = []
    lengths = []
    for path in CODE:
        source = path.read_text()
        tree = ast.parse(source)
        skipped = skipped_lines(tree)
        counts = count_tokens(source, skipped)
        every += counts
        assert sum(counts) <= MODULE_TOKENS * len(counts), path
        for node in ast.walk(tree):
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if is_function and node.lineno not in skipped:
                lines = set(range(node.lineno, node.end_lineno + 1))
                length = len(lines - skipped)
                lengths.append(length)
                assert node.name == "main" or length <= FUNCTION_LINES, f"{path}: {node.name}"
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                count = sum(argument.arg not in ("self", "cls") for argument in arguments)
                assert count <= ARGUMENTS, f"{path}: {node.name} has {count} arguments"
    assert sum(every) <= MEAN_TOKENS * len(every)
    assert sum(count > 30 for count in every) <= WIDE * len(every)
    assert statistics.median(lengths) <= MEDIAN_LINES


# --------------------------------------------------------------------------------------------------
# Imports


def imports(path: Path) -> set[str]:
    """Return the names, of modules and what is in them, that a file imports anywhere."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_nothing_imports_upwards():
    """
    So a reader can begin at the bottom, and no two files need each other. server/ builds on engine/
    through its link, its list of stages and what both know of schemas; engine/ builds on ops/; ops/
    builds on the files of the root.
    """
    below = {"ops": ("ops",), "engine": ("ops", "engine")}
    below["server"] = ("server", "engine.link", "engine.schemas", "engine.stages")
    paths = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in MODULES}
    order = ORDER.split()
    assert paths.keys() == set(order)
    for place, name in enumerate(order):
        imported = imports(paths[name])
        assert not imported.intersection(order[place:]), name
        drawer = below.get(name.partition(".")[0], "")
        for other in imported:
            assert other.partition(".")[0] not in below or other.startswith(drawer), name


def test_an_installation_brings_packages_alone():
    """
    The repo is run in place. Previously an installation left thirteen modules with names like
    `train`.
    """
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert settings == {"py-modules": []}


def test_policy_parameters_and_the_http_side_import_no_torch():
    """They start immediately, and stay small."""
    code = f"import sys, {WITHOUT_TORCH}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_examples_do_not_change_with_the_source_of_their_test():
    """Previously a reworded docstring gave a test other examples, which missed a planted bug."""
    for path in ROOT.glob("tests/**/test_*.py"):
        lines = path.read_text().splitlines()
        seeded = lines.count("@seed(0)")
        random = sum(line.startswith("@settings") and "derandomize=False" in line for line in lines)
        assert sum(line.startswith("@given") for line in lines) == seeded + random, path
