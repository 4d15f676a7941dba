"""
Show what users of this copy of the repo would see: requests to a small engine or server, and their
answers. exercises.py shows those of a copy with a bug beside the correct ones.

    python assets/symptoms.py        # sends what out/exercise/show.json contains, for example:

    {"waves": [[{"prompt": [5, 6, 7]}, {"prompt": [8], "more": {"n": 2}}]], "num_blocks": 8}
    {"calls": [["/v1/completions", {"prompt": "def"}], ["/metrics"]]}

The model is random. Its weights are so large that each token depends on all tokens before it.
"""

import json
import os
import re
import subprocess
import sys
from http.client import HTTPConnection
from pathlib import Path

if __name__ == "__main__":  # as a command, from any folder
    sys.path[0] += "/.."
    os.chdir(sys.path[0])

    # on a CPU, Triton's interpreter runs the kernels; choose it before triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

import torch

from checkpoint import save_checkpoint
from engine.engine import Engine
from engine.events import record_to
from model import GPT, GPTConfig
from params import SamplingParams, Settings
from training.corpus import bpe_tokenizer

FOLDER = Path("out/exercise")
SHOWN = r'"(?:text|finish_reason|message)":"[^"]*"|\S*prompt_tokens_total\S* \d\S*'  # in an answer


def random_model(vocab_size: int) -> GPT:
    torch.manual_seed(8)
    config = GPTConfig(vocab_size, 256, n_layer=2, n_head=4, n_kv_head=2, n_embd=64)
    model = GPT(config).eval().requires_grad_(False)
    for weight in model.parameters():
        weight *= 8 if weight.dim() == 2 else 1
    return model


def serve(waves: list[list[dict]], **settings):
    """
    Serve requests, wave by wave: {"prompt": [ids], "max_tokens": .., .., "more": {"n": answers}}.
    Record the steps in run.jsonl.
    """
    sizes = {"block_size": 4, "num_blocks": 32, "max_num_seqs": 8, "token_budget": 16}
    settings = sizes | {"attention": "torch"} | settings
    print(settings)
    engine = Engine(random_model(64), Settings(**settings))
    record = FOLDER / "run.jsonl"
    record.unlink(missing_ok=True)
    record_to(str(record), engine, tokens=True)
    ids = iter("abcdefghijklmnopqrstuvwxyz")
    for wave in waves:
        for request in wave:
            id = next(ids)
            request.setdefault("temperature", 0)
            request.setdefault("max_tokens", 12)
            print(id, request)
            prompt = request.pop("prompt")
            more = request.pop("more", {})
            engine.add_request(id, prompt, SamplingParams(**request), **more)
        answers = {}
        for _ in range(500):
            for output in engine.step():
                answer = answers.setdefault(output.id, [])
                answer += [f"{logprob:.2f}" for logprob, *_ in output.prompt_logprobs or ()]
                answer += output.tokens
                if output.error:
                    answer.append(output.error)
        for id in sorted(answers):
            print(f"  {id}:", *answers[id])
        if engine.has_work:
            print("  after 500 steps there is still work to do")
    free = engine.scheduler.block_allocator.num_free
    hits = engine.scheduler.num_hit_tokens
    print(f"{free} of {engine.num_blocks} blocks can be allocated; {hits} tokens were hits")


def call(calls: list, **files: str):
    """
    Start serve.py and make these calls, each [path, body, headers]; one without a body is a GET.
    The model's folder gets these files.
    """
    tokenizer = bpe_tokenizer([])
    tokenizer.save(FOLDER)
    save_checkpoint(random_model(tokenizer.vocab_size), FOLDER)
    for name, text in files.items():
        (FOLDER / name).write_text(text)
    command = [sys.executable, "serve.py", "--model", str(FOLDER), "--port", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, **pipes) as server:
        try:
            greeting = next(line for line in server.stdout if "http://" in line)
            for path, *rest in calls:
                show_call(greeting.split("http://")[1].split("/")[0], path, *rest)
        finally:
            server.kill()


def show_call(address: str, path: str, body=None, headers=()):
    method, data = ("POST", json.dumps(body)) if body else ("GET", "")
    headers = {"Content-Type": "application/json", **dict(headers)}
    connection = HTTPConnection(address, timeout=20)
    connection.request(method, path, data, headers)
    answer = connection.getresponse()
    print(f"{path} {data}\n  {answer.status}", *re.findall(SHOWN, answer.read().decode()))


def show(wanted: dict):
    try:
        (serve if "waves" in wanted else call)(**wanted)
    except Exception as error:
        print(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    show(json.loads((FOLDER / "show.json").read_text()))
