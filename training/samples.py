"""
What a model writes: samples during and after a training run, and how much of them is Python.

    generate_texts(run, prompts=[[0]], length=64)
    share_that_parses(["x = 1\\nif x:\\n    y = (2\\n", "x ="])    # 2/3: `y = (2` is incomplete

The latter is the share of complete statements that `ast.parse` would accept. A statement may come
from the middle of a function, so each is read alone: without its indentation, and a header such as
`if x:` or `else:` with a `pass` for the block that it announces.
"""

import ast
import textwrap
import warnings
from argparse import Namespace
from codeop import PyCF_ALLOW_INCOMPLETE_INPUT  # tells "goes on in the next line" from "is wrong"

import numpy as np
import torch

LAST_SAMPLES = 16  # with so many, the share of statements is good to 5%
SHOWN_SAMPLES = 3
TEMPERATURE = 0.6  # at 0.8 a small model stumbles over its rarer choices, at 0.4 it repeats itself
# what must stand before a clause that cannot stand alone, by the clause's first word
BEFORE = {"elif": "if x: pass\n", "else": "if x: pass\n", "case": "match x:\n "}
BEFORE |= {"except": "try: pass\n", "finally": "try: pass\n"}


def generate_texts(run, prompts: list[list[int]], length: int) -> list[str]:
    """
    What the model writes after equally long prompts: at most `length` tokens, or until it ends the
    text.
    """
    tokenizer = run.corpus.tokenizer
    device = run.process.device
    generator = torch.Generator(device).manual_seed(run.args.seed)

    def choose(logits, position):
        probabilities = (logits.float() / TEMPERATURE).softmax(-1)
        return torch.multinomial(probabilities, 1, generator=generator)[:, 0]

    run.model.eval()
    with run.process.autocast():
        rows = run.model.generate(torch.tensor(prompts, device=device), length, choose)
    run.model.train()
    texts = []
    for row in rows[:, len(prompts[0]) :].tolist():
        if tokenizer.eos_token_id in row:
            row = row[: row.index(tokenizer.eos_token_id)]
        texts.append(tokenizer.decode(row))
    return texts


def whole_lines(text: str) -> str:
    """A text without its first and its last line, which may have been cut."""
    return text[text.find("\n") + 1 : text.rfind("\n") + 1]


def last_samples(run) -> str:
    """
    A few continuations of held-out text, to be printed. For a corpus of Python, also the share of
    statements that parse, of all LAST_SAMPLES continuations and of what really follows, cut alike.
    """
    val = run.corpus.val
    prompt, length = sample_lengths(run.args)
    places = np.linspace(0, len(val) - prompt - length, LAST_SAMPLES).clip(0).astype(int)
    prompts = [val[i : i + prompt].tolist() for i in places]
    continuations = [val[i + prompt : i + prompt + length].tolist() for i in places]
    truth = [whole_lines(run.corpus.tokenizer.decode(tokens)) for tokens in continuations]
    texts = [whole_lines(text) for text in generate_texts(run, prompts, length)]
    lines = []
    shown = [text for text in texts if text.strip()][:SHOWN_SAMPLES]
    for i, text in enumerate(shown, 1):
        lines += [f"sample {i}:", textwrap.indent(text.strip("\n"), "    ")]
    real = share_that_parses(truth)
    sampled = share_that_parses(texts)
    if sampled is not None and real is not None and real > 0.5:  # else this is no Python
        lines.append(
            f"statements that parse: {sampled:.0%} of the sampled, {real:.0%} of the held-out "
            "text's"
        )
    return "\n".join(lines)


def sample_lengths(args: Namespace) -> tuple[int, int]:
    """Tokens of the prompt and of the continuation of a last sample; both fit the context."""
    prompt = args.context_length // 4
    return prompt, min(2 * args.sample_tokens, args.context_length - prompt)


def sample_tokens_in_all(args: Namespace) -> float:
    """Tokens that the model reads for the last samples: for each new one, the text so far."""
    prompt, length = sample_lengths(args)
    return LAST_SAMPLES * length * (prompt + length / 2)


# --------------------------------------------------------------------------------------------------
# Python


def share_that_parses(texts: list[str]) -> float | None:
    """The share of all complete statements that parse; None where there is no statement."""
    verdicts = [verdict for text in texts for verdict in judge(text)]
    return sum(verdicts) / len(verdicts) if verdicts else None


def judge(text: str) -> list[bool]:
    """Whether each complete statement parses; one that is open when the text ends is left out."""
    lines = text.split("\n")
    verdicts = []
    start = 0
    while start < len(lines):
        code = lines[start].strip()
        if not code or code.startswith("#"):
            start += 1
            continue
        end = start + 1
        verdict = parses(lines[start:end])
        while verdict is None and end < len(lines):
            end += 1
            verdict = parses(lines[start:end])
        if verdict is None:
            break
        verdicts.append(verdict)
        # a statement that goes wrong in a later line ends before it: that line begins another
        start = end if verdict else max(start + 1, end - 1)
    return verdicts


def parses(lines: list[str]) -> bool | None:
    """Whether these lines are one statement or header; None if they may yet become one."""
    source = "\n".join(lines).lstrip()
    word = source.split(maxsplit=1)[0].rstrip(":")
    # what a statement, a header, a `try:` and a decorator want behind them
    bodies = ["", "\n  pass", "\n  pass\nfinally: pass", "\ndef f(): pass"]
    verdicts = [compiles(BEFORE.get(word, "") + source + body) for body in bodies]
    if True in verdicts:
        return True
    return verdicts[0]


def compiles(source: str) -> bool | None:
    """ast.parse's verdict; None where the source only lacks its end."""
    try:
        with warnings.catch_warnings(action="ignore"):  # "\\d" and the like are no errors
            compile(source, "<text>", "exec", ast.PyCF_ONLY_AST | PyCF_ALLOW_INCOMPLETE_INPUT)
    except SyntaxError as error:
        return None if "incomplete input" in str(error) else False
    except (ValueError, MemoryError, RecursionError):  # a zero byte; brackets nested too deep
        return False
    return True
