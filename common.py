"""
Small helpers of all commands: files that are never half written, flags and their help, messages,
and settings that must be made before torch is loaded (nothing here loads it).

    write_json(Path("out/stdlib/config.json"), {"n_layer": 4})
    read_json(Path("out/stdlib/config.json"))       # {} if there is no such file

    announce("loading torch")
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS_SERVING)
    parser = Parser()
    add_flag(parser, "--port", "port to listen at; 0: any free one", 8000, at_least(0))
"""

import argparse
import contextlib
import difflib
import gc
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

# --------------------------------------------------------------------------------------------------
# Files

# raised where a file is broken, or its content is not what is looked for
MALFORMED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


def write_atomically(path: Path, write: Callable[[Path], None]):
    """
    Let `write` fill a temporary file beside `path`, flush it to disk, then rename it: a reader sees
    the old file or the new one, never half of one, whenever the process dies.
    """
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)
    temporary.touch()
    mode = temporary.stat().st_mode  # by the umask; safetensors lets only a file's owner read it
    try:
        write(temporary)
        temporary.chmod(mode)
        with open(temporary, "rb") as f:
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)  # on a full disk it takes the rest of the room
        raise


def write_json(path: Path, content: dict):
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def read_json(path: Path) -> dict:
    """The content of a file, {} where there is none. Raises what is in MALFORMED."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def missing_file(path: Path) -> str:
    """The message for a model's directory that lacks a file: what is there, and the next step."""
    folder = path.parent
    fetch = "`hf download OWNER/NAME --local-dir DIR`"
    if folder.suffix == ".gguf" or any(folder.glob("*.gguf")):
        return f"GGUF is llama.cpp's: `llama-server -m {folder}` serves it; safetensors: {fetch}"
    if (folder / "adapter_config.json").exists():
        return (
            f"an adapter is in {folder}, without its model: merge both with peft "
            "(merge_and_unload, then save_pretrained(NEW)) and name NEW"
        )
    if folder.is_file():
        return (
            f"a file is at {folder}, and a model is a folder: name {folder.parent}, or make one of "
            f"nanoGPT's ckpt.pt: `python examples/from_nanogpt.py {folder} DIR`"
        )
    hub = re.fullmatch(r"(?:https?:/huggingface\.co/)?((?!out/)[\w.-]+/[\w.-]+)", str(folder))
    if hub and not folder.parent.exists():
        return (
            f"the Hugging Face Hub may have {hub[1]}, but nothing is fetched here: `hf download "
            f"{hub[1]} --local-dir DIR` (of the package huggingface_hub), then name DIR"
        )
    if not folder.exists():
        there = sorted(str(config.parent) for config in Path().glob("out/*/config.json"))
        return (
            f"there is no directory {folder}; models here are {', '.join(there) or 'none'}: `make "
            f"run` trains one, {fetch} fetches one"
        )
    return (
        f"no model in {folder}: {path.name} is missing. A model is a folder with config.json, "
        f"tokenizer.json and safetensors files. `make run` trains one, {fetch} fetches one; older "
        "files are written anew by transformers (save_pretrained(NEW))"
    )


def check_model(directory: str):
    """Raise ValueError if a model's directory lacks a file that each has."""
    for name in ("tokenizer.json", "config.json"):
        path = Path(directory, name)
        if not path.is_file():
            raise ValueError(missing_file(path))


# --------------------------------------------------------------------------------------------------
# The process: first lines, messages, threads, garbage

# Values of GOMP_SPINCOUNT: for how many rounds a thread of OpenMP that waits for the others spins
# before it sleeps. Without a limit, one other busy process on two cores can make a training step of
# 0.2 s take 2 s, and a decode step of 10 ms take 500.
SPINS_TRAINING = "10000"  # sleeping at once would make every training step a third slower
SPINS_SERVING = "100000"  # with a tenth of it a token that is generated alone takes 15% longer


def announce(what: str):
    """
    Print the first line of a command: to import torch takes seconds, on a busy machine ten. Under
    torchrun one process prints it.
    """
    if os.environ.get("RANK", "0") == "0":
        say(f"{what} ..")


def say(line: str, file=None):
    """
    Print a line of a server, on stderr if not told otherwise. Where a full disk, or a pipe whose
    reader is gone, does not take it, the server goes on.
    """
    with contextlib.suppress(OSError):
        print(line, file=file or sys.stderr, flush=True)


def plural(count: float, noun: str) -> str:
    """A count with its noun: "1 block", "6,400 blocks", "2.25 minutes"."""
    number = f"{count:,}".removesuffix(".0")
    return f"{number} {noun}" if count == 1 else f"{number} {noun}s"


def not_installed(error: ModuleNotFoundError) -> str:
    """One line about a missing package. Mostly, the virtual environment is not active."""
    package = error.name.partition(".")[0] if error.name else error
    return (
        f"{package} is not installed for this Python, {sys.executable}: `source "
        ".venv/bin/activate` first, or start .venv/bin/python in its place (`make run` makes "
        ".venv; or `pip install -r requirements.txt`)"
    )


def last_words(error: Exception) -> str:
    """One line about an error that ends a program."""
    words = str(error)
    if isinstance(error, ModuleNotFoundError):
        return not_installed(error)
    if isinstance(error, MemoryError) or "allocate memory" in words:
        import resource  # not on every system

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        available = "what this machine has"
        if limit != resource.RLIM_INFINITY:
            available = f"{limit / 2**20:,.0f} MiB (ulimit -v)"
        return (
            "there is not enough memory to start: wanted are about 1,200 MiB for torch, and the "
            f"model with its KV pool; available is {available}: raise the limit, end other "
            f"programs, or choose a smaller model or --kv-blocks ({words or 'MemoryError'})"
        )
    is_users = isinstance(error, ValueError | RuntimeError | OSError)
    return words if is_users else f"{type(error).__name__}: {words}"


def end_with_one_line():
    """End the program with one line, not a traceback, if a package is missing, or after Ctrl-C."""

    def explain(kind, error, traceback):
        if issubclass(kind, ModuleNotFoundError):
            print(not_installed(error), file=sys.stderr)
        elif issubclass(kind, KeyboardInterrupt):
            print("interrupted", file=sys.stderr)
        else:
            sys.__excepthook__(kind, error, traceback)

    sys.excepthook = explain


COLLECT_AFTER = 50_000  # objects; Python's own threshold is 700


def collect_garbage_rarely():
    """
    Have Python look for garbage seldom. With none of it an H200 made 1.4% more tokens a second, and
    2.4% more with --record; a body of a million lists was parsed in 0.2 s, not 0.6, in which no
    other client is served.
    """
    gc.set_threshold(COLLECT_AFTER)


# Flags of ours, and what nanoGPT, transformers, vLLM, SGLang or llama.cpp call them. A row that
# begins with a command has flags of ours that it replaced.
ROWS = """\
--accumulate: gradient-accumulation-steps
--attention: attention-backend fa flash-attn
`python examples/flex_attention.py`: attention=flex
--batch_size: device-batch-size per-device-train-batch-size
--chat: cnv conversation i interactive
--clip: grad-clip max-grad-norm
--context_length: block-size max-seq-len seq-len
--data: dataset
--deterministic: enable-deterministic-inference
--device: gpu-layers n-gpu-layers ngl
--drain-seconds: shutdown-timeout
--eval_every: eval-interval eval-steps
--eval_tokens: eval-iters
--init: init-from model model-name-or-path
--kv-blocks: gpu-memory-utilization mem-fraction-static num-gpu-blocks-override
--log-requests: enable-log-requests
--matrix_decay and --vector_decay: weight-decay
--matrix_lr and --vector_lr: learning-rate lr
--max-model-len: c context-length ctx-size n-ctx
--max-num-seqs: max-running-requests np parallel
--max-tokens: max-new-tokens n n-predict predict
--model: m model-path out-dir
--n_layer: depth num-layers
--no-access-log: disable-log-requests disable-uvicorn-access-log
--no-graphs: disable-cuda-graph enforce-eager
--no-prefix-cache: disable-radix-cache no-enable-prefix-caching
--out: out-dir output-dir
--policy: schedule-policy scheduling-policy
--prompt: p start
--quantize: quantization
--resume: resume-from-checkpoint
--served-model-name: a alias
--speculate: speculative-config
--steps: lr-decay-iters max-iters max-steps num-iterations
--temperature: temp
--token-budget: b batch-size chunked-prefill-size max-num-batched-tokens ub ubatch-size
--warmup: warmup-iters warmup-steps
`python assets/draw.py page FILE`: replay"""
FOREIGN = [row.split(": ") for row in ROWS.splitlines()]  # (ours, their names)


def refuse_withdrawn(name: str, value: str):
    """Raise ValueError for a value of a flag that FOREIGN has a replacement for."""
    for ours, names in FOREIGN:
        if f"{name}={value}" in names.split():
            raise ValueError(f"{name} {value} is withdrawn; {ours} has it now")


class Parser(argparse.ArgumentParser):
    """Refuses what is wrong in one line; argparse would print the usage of all flags before it."""

    def parse_known_args(self, args=None, namespace=None):
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            message = f"unrecognized arguments: {' '.join(unknown)}"
            for word in unknown:
                message += self.hint(word.partition("=")[0]) if word.startswith("-") else ""
            self.error(message)
        return parsed, unknown

    def hint(self, flag: str) -> str:
        """Return what an unknown flag is called here, or "" if no flag is like it."""
        flags = {name.replace("_", "-"): name for name in self._option_string_actions}
        name = flag.replace("_", "-")
        for ours, names in FOREIGN:
            is_here = ours[0] == "`" or ours.split()[0] in self._option_string_actions
            if is_here and name.lstrip("-") in names.split():
                return f"; {flag} is {ours} here"
        similar = difflib.get_close_matches(name, flags, 1, 0.8)
        return f"; did you mean {flags[similar[0]]}?" if similar else ""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message}\n{self.prog} --help lists the flags\n")


def at_least(
    least: float, number: type = int, below: float | None = None
) -> Callable[[str], float]:
    """
    The type of a flag, for argparse: numbers from `least` on and less than `below`. Without `below`
    whole numbers are less than 2**31, as no tensor is larger. NaN is an error.
    """
    if below is None and number is int:
        below = 2**31

    def parse(text: str):
        value = number(text)
        if not value >= least:  # "not", so that NaN is refused, too
            raise argparse.ArgumentTypeError(f"{text} is too small, wanted at least {least}")
        if below is not None and value >= below:
            raise argparse.ArgumentTypeError(f"{text} is too large, wanted less than {below}")
        return value

    parse.__name__ = number.__name__  # argparse: "invalid int value"
    return parse


positive = at_least(1)
not_negative = at_least(0, float)


def add_flag(group, flag: str, help: str, default=None, kind: Callable | None = None, **options):
    """
    One flag. `kind` makes a value of the text; not given, it is the default's type: for an int
    whole numbers from 1 on, for a float numbers from 0 on. A default of False or True makes a
    switch, unless `action` is given. The help of None or [] itself says what happens without the
    flag; to others the default is added.
    """
    if isinstance(default, bool):
        options.setdefault("action", "store_false" if default else "store_true")
    elif "action" not in options:
        kinds = {int: positive, float: not_negative}
        options["type"] = kind or kinds.get(type(default), str)
        if default not in (None, []):
            help += " (default: %(default)s)"
    group.add_argument(flag, default=default, help=help, **options)
