"""
What a user of this tree would see: requests to a small engine or server, and their answers. For
exercises.py, which shows those of a tree with a bug beside those of the tree without.

    python assets/symptoms.py        # what out/symptoms/show.json says, one of these:

    {"waves": [[{"prompt": [5, 6, 7]}, {"prompt": [8]}]], "num_blocks": 8}
    {"calls": [["/v1/completions", {"prompt": "def"}], ["/metrics"]]}

The model is random, with weights so large that each token depends on all before it.
"""

import json
import os
import subprocess
import sys
from http.client import HTTPConnection
from pathlib import Path

if __name__ == "__main__":  # as a command, from any folder
    sys.path[0] += "/.."

    # on a CPU Triton's interpreter runs the kernels, if that is known before triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

import torch

from engine.engine import Engine
from engine.events import record_to
from model import GPT, GPTConfig
from params import SamplingParams, Settings

ROOT = Path(__file__).parents[1]
FOLDER = Path("out/symptoms")  # in ROOT
TEXT = "def lend(blocks): return blocks.pop()  # the last one freed is the first one lent\n"


def random_model(vocab_size: int) -> GPT:
    torch.manual_seed(8)
    sizes = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 64}
    model = GPT(GPTConfig(vocab_size, 256, **sizes)).eval().requires_grad_(False)
    for weight in model.parameters():
        weight *= 8 if weight.dim() == 2 else 1
    return model


def serve(waves: list[list[dict]], **settings):
    """
    Serve requests wave by wave: {"prompt": [ids], "n": choices, "max_tokens": .., ..}. The steps
    are recorded in out/symptoms/run.jsonl.
    """
    sizes = {"block_size": 4, "num_blocks": 32, "max_num_seqs": 8, "token_budget": 16}
    engine = Engine(random_model(64), Settings(**sizes | {"attention": "torch"} | settings))
    (FOLDER / "run.jsonl").unlink(missing_ok=True)
    record_to(str(FOLDER / "run.jsonl"), engine, tokens=True)
    for number, wave in enumerate(waves):
        answers = {}
        for i, request in enumerate(wave):
            params = {"temperature": 0, "max_tokens": 12} | request
            more = {"n": params.pop("n", 1), "prompt_logprobs": params.pop("prompt_logprobs", None)}
            if bias := params.get("logit_bias"):  # JSON's names are strings
                params["logit_bias"] = {int(token): value for token, value in bias.items()}
            id = f"{number + 1}{'abcdefgh'[i]}"
            engine.add_request(id, params.pop("prompt"), SamplingParams(**params), **more)
        for _ in range(500):
            if not engine.has_work:
                break
            for output in engine.step():
                answers.setdefault(output.id, []).extend(output.tokens)
                if output.error:
                    answers[output.id].append(output.error)
        else:
            print("after 500 steps it has not ended")
        for id in sorted(answers):
            print(f"{id}: {' '.join(map(str, answers[id]))}")
    stats = engine.stats()
    free = engine.scheduler.block_allocator.num_free
    print(
        f"{free} of {engine.num_blocks} blocks can be allocated; {stats['hits']} tokens were hits"
    )


def call(calls: list, flags=(), files=None):
    """Start serve.py, and call it: [path, body, headers] each; without a body by GET."""
    from checkpoint import save_checkpoint
    from training.corpus import train_bpe

    tokenizer = train_bpe([TEXT], 300)  # no file of the repo: a hunt must not change with its words
    tokenizer.save(FOLDER)
    save_checkpoint(random_model(tokenizer.vocab_size), FOLDER)
    for name, text in (files or {}).items():
        (FOLDER / name).write_text(text)
    command = [sys.executable, "serve.py", "--model", str(FOLDER), "--port", "0", *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, **pipes) as server:
        greeting = ""
        while "http://" not in greeting:
            greeting = server.stdout.readline()
            if not greeting:
                return print("the server has ended")
        address = greeting.split("http://")[1].split()[0].strip("/")
        for path, *rest in calls:
            show_call(address, path, *rest)
        server.kill()


def show_call(address: str, path: str, body=None, headers=None):
    connection = HTTPConnection(address, timeout=60)
    headers = {"Content-Type": "application/json"} | (headers or {})
    connection.request("POST" if body else "GET", path, json.dumps(body) if body else None, headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    if path == "/metrics":
        text = "\n".join(line for line in text.splitlines() if "prompt_tokens_total" in line)
    elif body:
        text = json.loads(text)
        text = json.dumps({name: text[name] for name in ("choices", "error") if name in text})
    print(f"{path} {json.dumps(body)}\n  {answer.status} {text}")


if __name__ == "__main__":
    os.chdir(ROOT)
    wanted = json.loads((FOLDER / "show.json").read_text())
    try:
        (serve if "waves" in wanted else call)(**wanted)
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
