"""
The whole path with nothing faked: prepare a corpus, train for a few steps, serve the checkpoint in
a separate process, and talk to it as users do, with the official `openai` client. What it says must
be what the model's own slow `generate` says.
"""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import openai
import pytest
import torch
from processes import RUN, Process, wait_until

from assets import load
from assets.records import open_record, replay
from checkpoint import load_checkpoint
from tokenizer import load_tokenizer

PROMPTS = [
    "def ",
    "import torch\n",
    "class Gr\u00f6\u00dfe:\n    ",
    "    return",
    "# \U0001f600 ",
    "x",
]

# The corpus is our own source code. It exists on every machine, and is small enough for a tokenizer
# and a model within seconds.
PREPARE = """
from pathlib import Path
from training.corpus import train_bpe, write_corpus

def prepare(folder, tokenizer=None):
    names = ("model.py", "paged.py", "engine/engine.py", "train.py")
    text = "".join(Path(name).read_text() for name in names)
    tokenizer = train_bpe([text], 400)
    ids = tokenizer.encode(text)
    write_corpus(folder, [ids[4000:]], [ids[:4000]], tokenizer)
"""
# Such high learning rates make a bad model with lively answers; after so few steps a good one would
# only say blanks.
TRAIN = "--steps 60 --batch_size 1 --n_layer 2 --n_head 2 --n_embd 64 --context_length 512"
TRAIN += " --matrix_lr 0.05 --vector_lr 0.03 --dtype float32"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Return the directory of a model that was really trained, for a few steps."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "prepare.py").write_text(PREPARE)
    out = tmp_path_factory.mktemp("out") / "tiny"
    command = [sys.executable, "train.py", "--data", str(folder), "--out", str(out), *TRAIN.split()]
    done = subprocess.run(command, **RUN, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def server(checkpoint):
    """Return a server that records what its engines do."""
    record = checkpoint.with_name("run.jsonl")
    with Process(checkpoint, "--record", str(record)) as server:
        server.record = record
        yield server


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def expected(checkpoint):
    """
    Return the reference for greedy decoding, by the dense model without a cache: prompt -> text of
    `count` tokens.
    """
    model, tokenizer = load_checkpoint(checkpoint), load_tokenizer(checkpoint)

    def generate(prompt, count=24):
        ids = tokenizer.encode(prompt)
        return tokenizer.decode(model.generate(torch.tensor([ids]), count)[0, len(ids) :].tolist())

    return generate


@pytest.fixture
def complete(client, checkpoint):
    """Return a completion of 24 greedy tokens, unless the call says otherwise."""
    greedy = {"temperature": 0, "max_tokens": 24}
    return partial(client.completions.create, model=str(checkpoint), **greedy)


def test_many_at_once_are_each_the_models(complete, expected):
    """
    The greedy text is the same when batched with others, streamed or not, with prefix hits and
    seeded neighbours.
    """

    def ask(prompt, stream):
        answer = complete(prompt=prompt, stream=stream)
        pieces = answer if stream else [answer]
        return "".join(piece.choices[0].text for piece in pieces)

    prompts = [prompt * 20 for prompt in PROMPTS for _ in range(2)]
    texts = {prompt: expected(prompt) for prompt in set(prompts)}
    for _ in range(2):  # the second time with every prompt in the prefix cache
        with ThreadPoolExecutor(13) as pool:
            noise = {"temperature": 1, "max_tokens": 40, "seed": 1}
            pool.submit(complete, prompt=["noise"] * 4, **noise)
            answers = pool.map(ask, prompts, [False, True] * len(PROMPTS))
            assert list(answers) == [texts[prompt] for prompt in prompts]


def test_logprobs_are_the_models(complete, checkpoint):
    """
    They cover the prompt, by echo, and the answer; and they belong to tokens, not to pieces of
    text.
    """
    ids = load_tokenizer(checkpoint).encode("import torch\nimport ")
    asked = {"max_tokens": 6, "logprobs": 3, "echo": True}
    answer = complete(prompt=ids, extra_body={"return_token_ids": True}, **asked).choices[0]
    tokens = ids + answer.token_ids
    dense = load_checkpoint(checkpoint)(torch.tensor([tokens]))[0][0].log_softmax(-1)
    of_tokens = dense[range(len(tokens) - 1), tokens[1:]].tolist()
    assert answer.logprobs.token_logprobs[1:] == pytest.approx(of_tokens, abs=1e-3)


# --------------------------------------------------------------------------------------------------
# Attacks


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process so far. It measures work whatever else the machine does."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    user, system = int(fields[11]), int(fields[12])
    return (user + system) / os.sysconf("SC_CLK_TCK")


# Bodies that used to stop the event loop: the path, the body, how many together, and the status.
COMPLETIONS = "/v1/completions"
SCORED = {"prompt": "x", "n": 60, "logprobs": 20, "ignore_eos": True, "max_tokens": 200}
ATTACKS = {
    "blanks": ("/tokenize", {"prompt": " " * 499_999}, 3, 200),
    "fields": (COMPLETIONS, {"prompt": "x"} | {f"field {i}": 1 for i in range(200_000)}, 2, 400),
    "more blanks": ("/tokenize", {"prompt": ("x" + " " * 499_999) * 8}, 2, 200),
    "a rare character": ("/tokenize", {"prompt": "\u2603" * 690_000}, 4, 200),
    "a long prompt": (COMPLETIONS, {"prompt": "x " * 2_000_000}, 2, 400),
    "log-probabilities": (COMPLETIONS, SCORED, 2, 200),
    "prompts": (COMPLETIONS, {"prompt": [[]] * 10**6}, 2, 400),
}


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.quick("blanks", "fields")
def test_the_server_answers_during_an_attack(server, name):
    """
    No client can make others wait for a second. Previously each of these could, some for minutes.
    """
    path, fields, count, status = ATTACKS[name]
    body = json.dumps(fields, ensure_ascii=False).encode()
    call = {"content": body, "headers": {"Content-Type": "application/json"}, "timeout": 300}
    seconds = []  # computed by the HTTP process while each answer was awaited
    with ThreadPoolExecutor(count) as pool:
        answers = [pool.submit(httpx.post, server.url + path, **call) for _ in range(count)]
        while len(seconds) < 2 or not all(answer.done() for answer in answers):
            before = cpu_seconds(server.process.pid)
            assert status_of(server, "/livez") == 200
            seconds.append(cpu_seconds(server.process.pid) - before)
            time.sleep(0.05)
    assert [answer.result().status_code for answer in answers] == [status] * count
    assert max(seconds) < 1, sorted(seconds)[-3:]


def status_of(server: Process, path: str) -> int:
    return httpx.get(server.url + path, timeout=30).status_code


def test_the_load_generator_measures_what_it_says(server):
    """There is one row per request, in order. test_load.py tests what is in a row."""
    host, port = server.url.removeprefix("http://").split(":")
    requests = [load.completion(list(b"loop"), 4 + i) for i in range(3)]
    rows = load.run_clients(host, port, requests, processes=2)
    assert [row["tokens"] for row in rows] == [4, 5, 6]
    with pytest.raises(ValueError, match="wanted 3 tokens, but the answer ends with HTTP"):
        load.run_clients(host, port, [load.completion([9999], 3)], processes=1)


# --------------------------------------------------------------------------------------------------
# Ends


@pytest.mark.skipif(os.name != "posix", reason="needs pgrep and kill")
def test_an_engine_is_killed_and_a_hang_up_drains(server, checkpoint, complete, expected):
    """
    After kill -9 of the engine's process, another one is started. SIGHUP drains like SIGTERM, which
    it raises: running requests finish, and the exit is clean. This is the last test of this server,
    so the records of both engines, in one file, are replayed.
    """
    assert server.greeting == f"serving {checkpoint} at {server.url}\n"  # scripts wait for it
    os.kill(server.engine_pid, signal.SIGKILL)
    wait_until(lambda: status_of(server, "/livez") == 503)
    wait_until(lambda: status_of(server, "/readyz") == 200)
    assert complete(prompt="def ").choices[0].text == expected("def ")
    stream = complete(prompt="x", max_tokens=400, stream=True, extra_body={"ignore_eos": True})
    server.process.send_signal(signal.SIGHUP)
    *_, last = stream
    assert last.choices[0].finish_reason == "length"
    assert server.process.wait(60) == 0
    with open_record(server.record) as record:
        events = [line["event"] for _, line in replay(record)]
    assert events.count("snapshot") == 2


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_server_killed(checkpoint):
    """
    After kill -9 of the server, the engine finds its link closed and exits, instead of keeping its
    memory for ever.
    """
    with Process(checkpoint) as server:
        engine = Path(f"/proc/{server.engine_pid}")
        server.process.kill()
        wait_until(lambda: not engine.exists())
