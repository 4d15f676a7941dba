"""
Small helpers that all commands use: atomic file writes, flags and their help, messages, and
settings that must be made before torch is loaded. This module does not load torch.

    write_json(Path("out/stdlib/config.json"), {"n_layer": 4})
    read_json(Path("out/stdlib/config.json"))       # {} if there is no such file

    announce("loading torch")
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS_SERVING)
    parser = Parser()
    add_flag(parser, "--port", "port to listen on; 0: any free port", 8000, at_least(0))
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

if sys.version_info < (3, 11):  # noqa: UP036  (before a package or a module is missing)
    sys.exit(
        f"pagedGPT needs Python 3.11 or later, but {sys.executable} is {sys.version.split()[0]}: "
        "use .venv/bin/python, which `make run` creates"
    )

# --------------------------------------------------------------------------------------------------
# Files

# exceptions raised if a file is broken, or does not have the expected content
MALFORMED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


def write_atomically(path: Path, write: Callable[[Path], None]):
    """
    Let `write` fill a temporary file beside `path`, then flush the file to disk and rename it to
    `path`. So a reader sees either the old file or the new one, even if the process dies at any
    point.
    """
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)
    temporary.touch()
    mode = temporary.stat().st_mode  # follows the umask; safetensors writes 0o600
    try:
        write(temporary)
        temporary.chmod(mode)
        with open(temporary, "rb") as f:
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)  # on a full disk, free the space again
        raise


def write_json(path: Path, content: dict):
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def read_json(path: Path) -> dict:
    """Return the content of a file, or {} if there is none. Raises exceptions in MALFORMED."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def missing_file(path: Path) -> str:
    """
    Return an error message for a model's directory that lacks the file `path`. It says what was
    found instead, and what to do.
    """
    folder = path.parent
    fetch = "`hf download OWNER/NAME --local-dir DIR`"
    if folder.suffix == ".gguf" or any(folder.glob("*.gguf")):
        return (
            f"GGUF files are for llama.cpp: `llama-server -m {folder}` serves them; {fetch} "
            "downloads safetensors instead"
        )
    if (folder / "adapter_config.json").exists():
        return (
            f"{folder} has an adapter without its model: merge the two with peft "
            "(merge_and_unload, then save_pretrained(NEW)) and name NEW"
        )
    if folder.is_file():
        return (
            f"{folder} is a file, but a model is a folder: name {folder.parent}, or convert "
            f"nanoGPT's ckpt.pt with `python examples/from_nanogpt.py {folder} DIR`"
        )
    hub = re.fullmatch(r"(?:https?:/huggingface\.co/)?((?!out/)[\w.-]+/[\w.-]+)", str(folder))
    if hub and not folder.parent.exists():
        return (
            f"the Hugging Face Hub may have {hub[1]}, but this program does not download it: run "
            f"`hf download {hub[1]} --local-dir DIR` (from the huggingface_hub package), then name "
            "DIR"
        )
    if not folder.exists():
        models = sorted(str(config.parent) for config in Path().glob("out/*/config.json"))
        return (
            f"there is no directory {folder}; models here: {', '.join(models) or 'none'}; `make "
            f"run` trains one, and {fetch} downloads one"
        )
    return (
        f"no model in {folder}: {path.name} is missing. A model is a folder with config.json, "
        f"tokenizer.json and safetensors files. `make run` trains one, and {fetch} downloads one. "
        "Older files can be converted with transformers (save_pretrained(NEW))"
    )


def check_model(directory: str):
    """Raise ValueError if a model's directory lacks a file that every model has."""
    for name in ("tokenizer.json", "config.json"):
        path = Path(directory, name)
        if not path.is_file():
            raise ValueError(missing_file(path))


# --------------------------------------------------------------------------------------------------
# The process: first lines, messages, threads, garbage collection

# Values for GOMP_SPINCOUNT: how many times a waiting OpenMP thread spins before it sleeps. Without
# a limit, one other busy process on two cores can make a training step take 2 s instead of 0.2 s,
# and a decode step 500 ms instead of 10 ms.
SPINS_TRAINING = "10000"  # sleeping immediately would make every training step a third slower
SPINS_SERVING = "100000"  # with a tenth of this, decoding a single request takes 15% longer


def is_main_process() -> bool:
    """Return whether this process may print and write: under torchrun, only one of them does."""
    return os.environ.get("RANK") in (None, "", "0")


def announce(what: str):
    """
    Print a command's first line immediately, because importing torch takes seconds (ten on a busy
    machine). Under torchrun, only one process prints this line.
    """
    if is_main_process():
        say(f"{what} ..")


def say(line: str, file=None):
    """
    Print a server's message, by default on stderr. If printing fails because a disk is full or a
    pipe's reader is gone, the server continues.
    """
    with contextlib.suppress(OSError):
        print(line, file=file or sys.stderr, flush=True)


def plural(count: float, noun: str) -> str:
    """Return a count with its noun: "1 block", "6,400 blocks", "2.25 minutes"."""
    number = f"{count:,}".removesuffix(".0")
    return f"{number} {noun}" if count == 1 else f"{number} {noun}s"


def not_installed(error: ModuleNotFoundError) -> str:
    """
    Return one line about a missing package. The usual cause: the virtual environment is not active.
    A module in a folder of this repo is a missing file instead.
    """
    name = error.name or str(error)
    package = name.partition(".")[0]
    if "." in name and Path(__file__).with_name(package).is_dir():
        file = name.replace(".", "/") + ".py"
        return f"{file} is missing: restore it, or remove its feature from engine/stages.py"
    return (
        f"{package} is not installed for this Python, {sys.executable}: run `source "
        ".venv/bin/activate` first, or use .venv/bin/python instead (`make run` creates .venv; or "
        "run `pip install -r requirements.txt`)"
    )


def last_words(error: Exception) -> str:
    """Return one line about an error that ends a program."""
    message = str(error)
    if isinstance(error, ModuleNotFoundError):
        return not_installed(error)
    if isinstance(error, MemoryError) or "allocate memory" in message:
        import resource  # not on every system

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        available = "what this machine has"
        if limit != resource.RLIM_INFINITY:
            available = f"{limit / 2**20:,.0f} MiB (ulimit -v)"
        return (
            "there is not enough memory to start: wanted about 1,200 MiB for torch, plus memory "
            f"for the model and its KV pool; available: {available}. Raise the limit, end other "
            f"programs, or choose a smaller model or fewer --kv-blocks ({message or 'MemoryError'})"
        )
    is_users = isinstance(error, ValueError | RuntimeError | OSError)
    return message if is_users else f"{type(error).__name__}: {message}"


def open_closed_streams():
    """
    Open the null device in place of each standard stream that is closed, as in `serve.py >&-`.
    Otherwise, the next file or socket would get its number, and with it what libraries print.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)  # the lowest that is free
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "r+"))


def end_with_one_line():
    """
    Print one line instead of a traceback if Ctrl-C or a missing package ends the program. Programs
    call this first, so it also opens closed streams, and lets standard output replace characters
    that it cannot show.
    """
    open_closed_streams()
    sys.stdout.reconfigure(errors="replace")

    def explain(kind, error, traceback):
        if issubclass(kind, ModuleNotFoundError):
            print(not_installed(error), file=sys.stderr)
        elif issubclass(kind, KeyboardInterrupt):
            print("interrupted", file=sys.stderr)
        else:
            sys.__excepthook__(kind, error, traceback)

    sys.excepthook = explain


COLLECT_AFTER = 50_000  # number of new objects that trigger a collection; Python's default is 700


def collect_garbage_rarely():
    """
    Make Python's garbage collector run rarely. Without garbage collection, an H200 generated 1.4%
    more tokens per second, and 2.4% more with --record. A request body with a million lists was
    parsed in 0.2 s instead of 0.6 s; during that time, no other client is served.
    """
    gc.set_threshold(COLLECT_AFTER)


# Our flags, and their names in nanoGPT, transformers, vLLM, SGLang or llama.cpp. If a row begins
# with something else, for example a command, it replaces the flags listed after it.
ROWS = """\
--accumulate: gradient-accumulation-steps
--attention: attention-backend fa flash-attn
`python examples/flex_attention.py`: attention=flex
--batch_size: device-batch-size per-device-train-batch-size
--chat: cnv conversation i interactive
--clip: grad-clip max-grad-norm
--context_length: block-size max-seq-len seq-len
--data: dataset
--default-chat-template-kwargs: chat-template-kwargs
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
--preset: config
--prompt: p start
--quantize: quantization
--reasoning: reasoning-format reasoning-parser
--request-seconds: timeout
--resume: resume-from-checkpoint
--served-model-name: a alias
--speculate: draft draft-max speculative-config
--steps: lr-decay-iters max-iters max-steps num-iterations
--temperature: temp
--token-budget: b batch-size chunked-prefill-size max-num-batched-tokens ub ubatch-size
--warmup: warmup-iters warmup-steps
`python assets/draw.py page FILE`: replay
`vllm serve DIR --tensor-parallel-size N`: tensor-parallel-size tp
`python examples/replicas.py --replicas N`: data-parallel-size dp
a field of requests: frequency-penalty min-p presence-penalty repeat-penalty top-k top-p
fixed: beta1
on by default: async-scheduling cb cont-batching decay-lr enable-auto-tool-choice
on by default: enable-chunked-prefill enable-prefix-caching"""
FOREIGN = [row.split(": ") for row in ROWS.splitlines()]  # (ours, their names)


def refuse_withdrawn(name: str, value: str):
    """Raise ValueError if FOREIGN has a replacement for this value of a flag."""
    for ours, names in FOREIGN:
        if f"{name}={value}" in names.split():
            raise ValueError(f"{name} {value} has been withdrawn; use {ours} instead")


class Parser(argparse.ArgumentParser):
    """A parser with one-line errors; argparse would print the usage of all flags first."""

    def parse_known_args(self, args=None, namespace=None):
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            message = f"unrecognized arguments: {' '.join(unknown)}"
            for word in unknown:
                if word.startswith(("-", "config/")):  # nanoGPT's files of flags
                    message += self.hint(re.split("[=/]", word)[0])
            self.error(message)
        return parsed, unknown

    def hint(self, flag: str) -> str:
        """Return a hint with our name for an unknown flag, or "" if no flag is similar."""
        flags = {name.replace("_", "-"): name for name in self._option_string_actions}
        name = flag.replace("_", "-")
        for ours, names in FOREIGN:
            is_here = not ours.startswith("--") or ours.split()[0] in self._option_string_actions
            if is_here and name.lstrip("-") in names.split():
                return f"; {flag} is {ours} here"
        similar = difflib.get_close_matches(name, flags, 1, 0.8)
        return f"; did you mean {flags[similar[0]]}?" if similar else ""

    def error(self, message: str):
        if "ignored explicit argument" in message:
            message += ": a switch has no value"
        self.exit(2, f"{self.prog}: {message}\n{self.prog} --help lists the flags\n")


def at_least(
    least: float, number: type = int, below: float | None = None
) -> Callable[[str], float]:
    """
    Return a flag's type for argparse, which accepts numbers from `least` up to, but not including,
    `below`. For integers, `below` defaults to 2**31, because no tensor is larger. NaN is an error.
    """
    if below is None and number is int:
        below = 2**31

    def parse(text: str):
        value = number(text)
        if not value >= least:  # "not" also rejects NaN
            raise argparse.ArgumentTypeError(f"{text} is too small, wanted at least {least}")
        if below is not None and value >= below:
            raise argparse.ArgumentTypeError(f"{text} is too large, wanted less than {below}")
        return value

    parse.__name__ = number.__name__  # argparse prints it: "invalid int value"
    return parse


positive = at_least(1)


def add_flag(group, flag: str, help: str, default=None, kind: Callable | None = None, **options):
    """
    Add a flag. `kind` converts the text to a value. Without it, the flag accepts integers of at
    least 1 if the default is an int, numbers of at least 0 if it is a float, and otherwise text. A
    default of False or True makes the flag a switch, unless `action` is given. The default is
    appended to the help unless it is None or []. In that case, the help itself must say what
    happens without the flag.
    """
    if isinstance(default, bool):
        options.setdefault("action", "store_false" if default else "store_true")
    elif "action" not in options:
        kinds = {int: positive, float: at_least(0, float)}
        options["type"] = kind or kinds.get(type(default), str)
        if default not in (None, []):
            help += " (default: %(default)s)"
    group.add_argument(flag, default=default, help=help, **options)
