"""
The whole path with nothing faked: prepare a corpus, train for a few steps, serve the checkpoint as
its own process, and talk to it as users do, with the official `openai` client. What it says must be
what the model's own slow `generate` says.
"""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx
import openai
import pytest
import torch
from fake_server import wait_until

from checkpoint import load_checkpoint, load_config, save_checkpoint
from engine.events import open_record, replay
from model import GPT
from server.workers import can_share_port
from tokenizer import load_tokenizer

ROOT = Path(__file__).parents[1]
# One thread: so small a model gains nothing from two, and on a busy machine two lose seconds
# waiting for each other.
# the CPU's answers, in fp32, are those of the dense model to the last token
ON_CPU = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
RUN = {"cwd": ROOT, "text": True, "env": os.environ | ON_CPU}
PROMPTS = [
    "def ",
    "import torch\n",
    "class Gr\u00f6\u00dfe:\n    ",
    "    return",
    "# \U0001f600 ",
    "x",
]

# A corpus of our own sources: there on every machine, and small enough for a tokenizer and a model
# in seconds.
PREPARE = """
from pathlib import Path
from training.corpus import train_bpe, write_corpus

def prepare(folder, tokenizer=None):
    names = ("model.py", "paged.py", "engine/engine.py", "train.py")
    text = "".join(Path(name).read_text() for name in names)
    tokenizer = train_bpe([text], 400)
    ids = tokenizer.encode(text)
    write_corpus(folder, tokenizer, ids[4000:], ids[:4000])
"""
# So high learning rates make a bad model whose answers are lively; after these few steps a good one
# says only blanks.
TRAIN = "--steps 60 --batch_size 1 --n_layer 2 --n_head 2 --n_embd 64 --context_length 512"
TRAIN += " --sample_tokens 8 --matrix_lr 0.05 --vector_lr 0.03 --dtype float32"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The directory of a model that was really trained, for a few steps."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "prepare.py").write_text(PREPARE)
    out = tmp_path_factory.mktemp("out") / "tiny"
    command = [sys.executable, "train.py", "--data", str(folder), "--out", str(out), *TRAIN.split()]
    done = subprocess.run(command, **RUN, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return out


TWO_HTTP_PROCESSES = ["--http-workers", "2"] if can_share_port() else []


class Process:
    """serve.py as a user starts it, on a free port; ready when it says so."""

    def __init__(self, checkpoint, *flags, folder=None):
        """`folder` is where it has the folder of its sockets."""
        command = [
            sys.executable,
            "serve.py",
            "--model",
            str(checkpoint),
            "--port",
            "0",
            "--check",
            *flags,
        ]
        command += [] if "--log-requests" in flags else ["--no-access-log"]
        # by default a machine of many cores has more
        command += [] if "--http-workers" in flags else ["--http-workers", "1"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        run = RUN | {"env": RUN["env"] | ({"TMPDIR": str(folder)} if folder else {})}
        self.process = subprocess.Popen(command, **run, **pipes)
        said, found = "", None
        while not found:  # before it come the engine's statement and, from a broken one, the reason
            self.greeting = self.process.stdout.readline()
            said += self.greeting
            assert self.greeting, f"the server ended: {said}"
            found = re.search(r"http://\S+", self.greeting)
        self.url = found[0]

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.process.kill()
        self.process.wait(10)
        self.process.stdout.close()

    @property
    def engine_pid(self) -> int:
        """The only child, where there is no other HTTP process."""
        return self.children[0]

    @property
    def children(self) -> list[int]:
        """Those that multiprocessing spawned to run code (another tracks resources)."""
        listing = subprocess.run(
            ["ps", "-wweo", "pid,ppid,args"], capture_output=True, text=True
        ).stdout.splitlines()
        rows = [line.split(None, 2) for line in listing]
        return [
            int(pid)
            for pid, parent, args in rows
            if parent == str(self.process.pid) and "spawn_main" in args
        ]


@pytest.fixture(scope="module")
def server(checkpoint):
    with Process(checkpoint, *TWO_HTTP_PROCESSES) as server:
        yield server


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def expected(checkpoint):
    """
    What greedy decoding must say, from the dense model without a cache: prompt -> text of `count`
    tokens.
    """
    model, tokenizer = load_checkpoint(checkpoint), load_tokenizer(checkpoint)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def generate(prompt, count=24):
        ids = tokenizer.encode(prompt)
        return tokenizer.decode(model.generate(torch.tensor([ids]), count)[0, len(ids) :].tolist())

    yield generate
    torch.set_num_threads(threads)


GREEDY = {"temperature": 0, "max_tokens": 24}


@pytest.fixture
def complete(client, checkpoint):
    """A completion of 24 greedy tokens, unless the call says otherwise."""
    return partial(client.completions.create, model=str(checkpoint), **GREEDY)


def test_greeting(server, checkpoint):
    """One line that says what is served and where: people and scripts wait for it."""
    assert server.greeting == f"serving {checkpoint} at {server.url}\n"


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_is_the_models(complete, checkpoint, expected, prompt):
    answer = complete(prompt=prompt)
    assert answer.choices[0].text == expected(prompt)
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 24
    assert answer.usage.prompt_tokens == len(load_tokenizer(checkpoint).encode(prompt))


def test_control_tokens_in_prompts_are_tokens(server, complete, checkpoint):
    """
    As in transformers and vLLM, whatever add_special_tokens says. <|endoftext|> in a prompt was
    seven tokens of text: lm-eval, which begins each prompt with it, measured 7.77 bits a byte in
    place of 2.10.
    """
    tokenizer = load_tokenizer(checkpoint)
    name, eos = "<|endoftext|>", tokenizer.eos_token_id
    ids = [eos, *tokenizer.encode("def ")]
    for add_special_tokens in (True, False):
        fields = {"prompt": name + "def ", "add_special_tokens": add_special_tokens}
        assert httpx.post(f"{server.url}/tokenize", json=fields).json()["tokens"] == ids
    (choice,) = complete(prompt=name + "def ", echo=True, logprobs=1).choices
    assert choice.text.startswith(name + "def ")
    assert choice.logprobs.tokens[:2] == [name, tokenizer.decode(ids[1:2])]
    assert choice.logprobs.text_offset[:2] == [0, len(name)]
    logprobs = load_checkpoint(checkpoint)(torch.tensor([ids]))[0][0].log_softmax(-1)
    of_prompt = logprobs[range(len(ids) - 1), ids[1:]].tolist()
    assert choice.logprobs.token_logprobs[1 : len(ids)] == pytest.approx(of_prompt, abs=1e-3)


def test_greedy_stream_is_the_models(complete, expected):
    options = {"include_usage": True}
    stream = complete(prompt="def ", stream=True, stream_options=options, max_tokens=200)
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected("def ", 200)
    assert chunks[-1].choices[0].finish_reason == "length" and last.usage.completion_tokens == 200
    assert len(chunks) > 5, "it came in one piece"  # on a busy machine steps are sent together


def test_many_at_once_are_each_the_models(complete, expected):
    """
    Batched with others, streaming or not, with prefix hits and seeded neighbours: the same greedy
    text.
    """

    def ask(prompt, stream):
        answer = complete(prompt=prompt, stream=stream)
        pieces = answer if stream else [answer]
        return "".join(piece.choices[0].text for piece in pieces)

    prompts = [prompt * 20 for prompt in PROMPTS for _ in range(2)]
    texts = [expected(prompt) for prompt in prompts]
    for _ in range(2):  # the second time with every prompt in the prefix cache
        with ThreadPoolExecutor(13) as pool:
            noise = {"temperature": 1, "max_tokens": 40, "seed": 1}
            pool.submit(complete, prompt=["noise"] * 4, **noise)
            assert list(pool.map(ask, prompts, [False, True] * len(PROMPTS))) == texts


def test_prefix_hits_are_reported(complete):
    """The second time a prompt is asked, its whole blocks are found, all but the last token's."""
    first, second = [complete(prompt="for i in range(10):\n" * 8) for _ in range(2)]
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    blocks = (first.usage.prompt_tokens - 1) // 16
    assert second.usage.prompt_tokens_details.cached_tokens == blocks * 16 > 0
    assert first.choices[0].text == second.choices[0].text


def test_stop_string(complete, expected):
    stop = expected("def ")[5:8]
    answer = complete(prompt="def ", stop=stop)
    assert answer.choices[0].text == expected("def ").partition(stop)[0]
    assert answer.choices[0].finish_reason == "stop" and answer.usage.completion_tokens < 24


def test_choices(complete):
    """
    Choices of a seed differ from each other, not from those of another call; greedy ones do not
    differ. Without a seed each call has its own.
    """
    prompts = ["class Request:\n    def ", "x"]

    def texts(n, temperature=1, **fields):
        body = {"ignore_eos": True}
        fields |= {"temperature": temperature, "extra_body": body}
        answer = complete(prompt=prompts, n=n, **fields)
        assert [choice.index for choice in answer.choices] == list(range(2 * n))
        assert answer.usage.completion_tokens == 48 * n
        return [choice.text for choice in answer.choices]

    five = texts(5, seed=3)
    assert len(set(five)) == 10 and texts(5, seed=3) == five
    assert texts(1, seed=3) == [five[0], five[5]] != texts(1, seed=4)
    assert len(set(texts(4, temperature=0))) == 2
    assert len({*texts(2), *texts(2)}) == 8


def test_logprobs_are_the_models(complete, checkpoint):
    """
    Of the prompt and of the answer, by echo, also without an answer; of the tokens, not of their
    pieces of text. Three candidates, and the token itself where it is none of them, though the
    prompt is scored with nine.
    """
    ids = load_tokenizer(checkpoint).encode("import torch\nimport ")
    fields = {"prompt": ids, "logprobs": 3, "echo": True}
    answer = complete(max_tokens=6, extra_body={"return_token_ids": True}, **fields).choices[0]
    tokens = ids + answer.token_ids
    dense = load_checkpoint(checkpoint)(torch.tensor([tokens]))[0][0].log_softmax(-1)
    logprobs = answer.logprobs
    assert "".join(logprobs.tokens) == answer.text and logprobs.token_logprobs[0] is None
    of_tokens = dense[range(len(tokens) - 1), tokens[1:]].tolist()
    assert logprobs.token_logprobs[1:] == pytest.approx(of_tokens, abs=1e-3)
    for top, row, token in zip(logprobs.top_logprobs[1:], dense[:-1], tokens[1:], strict=True):
        ids_of_top = {*row.topk(3).indices.tolist(), token}
        likeliest = sorted(row[[*ids_of_top]].tolist(), reverse=True)
        assert sorted(top.values(), reverse=True) == pytest.approx(likeliest, abs=1e-3)
    alone = complete(max_tokens=0, **fields).choices[0]
    assert alone.logprobs.tokens == logprobs.tokens[: len(ids)] and alone.finish_reason == "length"
    of_prompt = pytest.approx(of_tokens[: len(ids) - 1], abs=1e-3)
    assert alone.logprobs.token_logprobs[1:] == of_prompt


def test_other_parameters(complete, checkpoint, expected):
    """Each does something that can be seen in the answer."""

    def tokens(**fields):
        fields["return_token_ids"] = True
        return complete(prompt="def ", extra_body=fields).choices[0].token_ids

    plain = tokens()
    assert load_tokenizer(checkpoint).decode(plain) == expected("def ")
    assert tokens(logit_bias={"7": 100}) == [7] * 24
    stopped = tokens(stop_token_ids=[plain[2]])
    assert len(stopped) <= 3 and len(tokens(stop_token_ids=[plain[2]], min_tokens=10)) >= 10
    for penalty in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        assert len(set(tokens(**{penalty: 2.0}))) > len(set(plain))
    assert tokens(priority=-3, cache_salt="mine", request_id="r") == plain


def test_prefixes_are_shared_within_a_salt(complete):
    def cached(salt):
        prompt = "for salt in range(10):\n" * 5
        answer = complete(prompt=prompt, extra_body={"cache_salt": salt})
        return answer.usage.prompt_tokens_details.cached_tokens

    assert cached("a") == 0 and cached("a") > 0 and cached("b") == 0


def test_chat_needs_a_template(client, checkpoint):
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        client.chat.completions.create(
            model=str(checkpoint), messages=[{"role": "user", "content": "x"}]
        )


@pytest.fixture(scope="module")
def chat_server(checkpoint, tmp_path_factory):
    """The same checkpoint with a chat template, behind a key. It records what its engine does."""
    folder, keys = (
        tmp_path_factory.mktemp("chat") / "model",
        tmp_path_factory.mktemp("keys") / "keys",
    )
    shutil.copytree(checkpoint, folder)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}\n"
    )
    keys.write_text("sesame\n")
    flags = ["--api-key-file", str(keys), "--served-model-name", "gpt", "--log-requests"]
    with Process(folder, *flags, "--record", str(folder / "run.jsonl")) as server:
        server.record = folder / "run.jsonl"
        yield server


def test_chat_behind_a_key(chat_server, expected):
    """The async client chats, streaming and not."""
    url = f"{chat_server.url}/v1"

    async def talk():
        fields = {"model": "gpt", "messages": [{"role": "user", "content": "import "}], **GREEDY}
        async with openai.AsyncOpenAI(base_url=url, api_key="wrong", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.chat.completions.create(**fields)
        async with openai.AsyncOpenAI(base_url=url, api_key="sesame", max_retries=0) as client:
            answer = await client.chat.completions.create(**fields, logprobs=True, top_logprobs=2)
            stream = await client.chat.completions.create(**fields, stream=True)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        (choice,) = answer.choices
        assert choice.message.role == "assistant" and text == choice.message.content
        assert "".join(entry.token for entry in choice.logprobs.content) == text
        assert all(
            entry.top_logprobs[0].logprob == entry.logprob for entry in choice.logprobs.content
        )  # greedy
        return text

    assert asyncio.run(talk()) == expected("import ")


def test_control_tokens_in_chats_are_text(chat_server, checkpoint):
    """Whoever spelled <|endoftext|> in a message ended the conversation there."""
    tokenizer, content = load_tokenizer(checkpoint), "import <|endoftext|> import"
    key = {"Authorization": "Bearer sesame"}
    body = {"messages": [{"role": "user", "content": content}]}
    answer = httpx.post(f"{chat_server.url}/tokenize", json=body, headers=key).json()
    assert (
        answer["tokens"] == tokenizer.encode(content)
        and tokenizer.eos_token_id not in answer["tokens"]
    )


def test_errors_as_the_client_sees_them(complete):
    """The client turns status and body into exceptions, and none of these makes it try again."""
    with pytest.raises(openai.NotFoundError) as missing:
        complete(model="gpt-5", prompt="x")
    assert missing.value.code == "model_not_found" and len(missing.value.request_id) == 32
    too_long = r"context length is 512 tokens, .* make 513"
    with pytest.raises(openai.BadRequestError, match=too_long) as long:
        complete(prompt=[1] * 500, max_tokens=13)
    assert long.value.param == "max_tokens"
    with pytest.raises(openai.BadRequestError, match="best_of is not served here"):
        complete(prompt="x", best_of=2)


def test_models(client, checkpoint):
    (model,) = client.models.list().data
    assert model.id == str(checkpoint) and model.max_model_len == 512
    assert client.models.retrieve(str(checkpoint)) == model  # its name is a path
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-5' here"):
        client.models.retrieve("gpt-5")


def test_every_answer_has_an_id(client, checkpoint):
    raw = client.completions.with_raw_response.create(
        model=str(checkpoint), prompt="x", extra_headers={"X-Request-Id": "mine"}
    )
    assert raw.request_id == "mine" and raw.parse().id == "cmpl-mine"


def test_usage_in_every_chunk(complete):
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = complete(prompt="x", stream=True, stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in stream]
    assert counts == sorted(counts) and counts[-2:] == [24, 24]


def http_processes(port: int) -> list[int]:
    """Those that listen on it."""
    sockets = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = {
        f"socket:[{s[9]}]" for s in sockets if s[1].endswith(f":{port:04X}") and s[3] == "0A"
    }
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended, or not ours
            if any(os.readlink(file) in listening for file in (folder / "fd").iterdir()):
                found.append(int(folder.name))
    return found


def cpu_seconds(pid: int) -> float:
    """
    What a process has computed so far: how long it takes for something, whatever else the machine
    does.
    """
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    user, system = int(fields[11]), int(fields[12])
    return (user + system) / os.sysconf("SC_CLK_TCK")


class Watch:
    """
    Asks /livez every 50 ms, each time on a connection of its own: to whichever process the kernel
    chooses.
    """

    def __init__(self, url):
        self.url = url
        self.pids = http_processes(int(url.rpartition(":")[2]))
        # the most that an HTTP process has computed while each answer was waited for
        self.seconds = []
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.ask)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *exception):
        self.ended.set()
        self.thread.join(30)

    def ask(self):
        while not self.ended.wait(0.05):
            began = [cpu_seconds(pid) for pid in self.pids]
            is_alive = httpx.get(f"{self.url}/livez", timeout=30).status_code == 200
            spent = [
                cpu_seconds(pid) - before for pid, before in zip(self.pids, began, strict=True)
            ]
            self.seconds.append(max(spent) if is_alive else float("inf"))


def trailers(url):
    """Of a chunked body, for ever."""
    host, port = url.removeprefix("http://").split(":")
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with (
        socket.create_connection((host, int(port)), timeout=30) as sock,
        contextlib.suppress(OSError),
    ):
        sock.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n".encode())
        for _ in range(2000):
            sock.sendall(b"a:b\r\n" * 5000)


# What stopped the event loop: the path, the body, how many at once, and the status of the answers.
RARE = "\u2603"
SCORED = {"prompt": "x", "n": 60, "logprobs": 20, "ignore_eos": True, "max_tokens": 200}
ATTACKS = {
    "blanks": ("/tokenize", {"prompt": " " * 499_999}, 3, 200),
    "fields": (
        "/v1/completions",
        {"prompt": "x"} | {f"field {i}": 1 for i in range(200_000)},
        2,
        400,
    ),
}
LONG_ATTACKS = {
    "more blanks": ("/tokenize", {"prompt": ("x" + " " * 499_999) * 8}, 2, 200),
    "a rare character": ("/tokenize", {"prompt": RARE * 690_000}, 4, 200),
    "a long prompt": ("/v1/completions", {"prompt": "x " * 2_000_000}, 2, 400),
    "log-probabilities": ("/v1/completions", SCORED, 2, 200),
    "prompts": ("/v1/completions", {"prompt": [[]] * 10**6}, 2, 400),
}
slow = [pytest.param(name, marks=pytest.mark.slow) for name in LONG_ATTACKS]


@pytest.mark.parametrize("name", ["trailers", *ATTACKS, *slow])
def test_the_server_answers_during_an_attack(server, name):
    """
    Nothing that one client sends keeps others waiting for a second. Each of these did, some for
    minutes.
    """
    with Watch(server.url) as watch, ThreadPoolExecutor(4) as pool:
        assert len(watch.pids) == 2
        wait_until(lambda: watch.seconds)
        if name == "trailers":
            list(pool.map(trailers, [server.url] * 3))
        else:
            path, fields, count, status = (ATTACKS | LONG_ATTACKS)[name]
            fields = ({"max_tokens": 24} if path == "/v1/completions" else {}) | fields
            body = json.dumps(fields, ensure_ascii=False).encode()
            post = partial(
                httpx.post,
                f"{server.url}{path}",
                headers={"Content-Type": "application/json"},
                timeout=60,
            )
            answers = list(pool.map(lambda _: post(content=body), range(count)))
            assert [answer.status_code for answer in answers] == [status] * count
        told = len(watch.seconds)
        wait_until(lambda: len(watch.seconds) > told)
    assert max(watch.seconds) < 1, sorted(watch.seconds)[-3:]


def test_sigterm_drains_and_exits_0(server, client, checkpoint):
    """
    The last test of this server: what runs is finished, new work is refused, the exit is clean.
    """
    stream = client.completions.create(
        model=str(checkpoint),
        prompt="x",
        max_tokens=400,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(stream)
    server.process.send_signal(signal.SIGTERM)
    while httpx.get(f"{server.url}/readyz").status_code != 503:
        time.sleep(0.01)
    with pytest.raises(openai.InternalServerError, match="draining"):
        client.completions.create(model=str(checkpoint), prompt="x")
    *_, last = stream
    assert last.choices[0].finish_reason == "length"
    assert server.process.wait(60) == 0
    example, finishing = server.process.stdout.read().splitlines()
    assert "curl" in example and finishing == "finishing 1 request; a second signal ends them"


@pytest.mark.slow
def test_what_a_server_records(checkpoint, tmp_path):
    """
    Requests that begin alike, forks and hang-ups in a tight pool, and an engine that is killed in
    the middle: the next one goes on in the same file, and at the end of both nothing is held.
    """
    path = tmp_path / "run.jsonl"
    flags = ["--record", str(path), "--kv-blocks", "32", "--max-num-seqs", "6"]
    with Process(checkpoint, *flags) as server:

        def ask(i: int, max_tokens=160, n=2, timeout=60):
            body = {"prompt": "def " * 9 + "x" * i, "max_tokens": max_tokens, "n": n}
            body["ignore_eos"] = True
            with contextlib.suppress(httpx.TimeoutException):
                url = f"{server.url}/v1/completions"
                return httpx.post(url, json=body, timeout=timeout).status_code

        with ThreadPoolExecutor(8) as pool:
            assert pool.submit(ask, 8, 400, 2, 0.1).result() is None  # hangs up
            assert [*pool.map(ask, range(8))] == [200] * 8
            others = [pool.submit(ask, i, 300, 1) for i in range(6)]
            time.sleep(0.3)
            os.kill(server.engine_pid, signal.SIGKILL)
            assert {other.result() for other in others} <= {200, 500, 503}
        # asked seldom: otherwise the engine that starts has no core to itself
        wait_until(lambda: httpx.get(f"{server.url}/readyz").status_code == 200, pause=0.05)
        assert ask(1) == 200
    seen = Counter()
    with open_record(path) as record:
        for tallies, line in replay(record):
            seen[line["event"]] += 1
            seen["held at the end"] = len(+tallies.references) if tallies else 0
            seen.update(f"new: {q['status']}" for q in line.get("new", ()))
            seen.update(reason for _, reason, _ in line.get("ended", ()))
            seen["hits"] += any(hits for _, hits, _ in line.get("admitted", ()))
            seen["preempted"] += len(line.get("preempted", ()))
    assert seen["snapshot"] == seen["title"] == 2
    assert seen["held at the end"] == 0
    assert seen["length"] >= 16 and seen["abort"] >= 1, seen
    assert min(seen[name] for name in ("hits", "preempted", "new: active")) >= 1, seen


@pytest.mark.slow
def test_a_hang_up_drains(checkpoint, tmp_path):
    """
    SIGHUP cut the streams of all HTTP processes. Now they are told to their end, and nothing is
    left behind.
    """
    body = {"prompt": "x", "max_tokens": 300, "stream": True, "ignore_eos": True}
    with (
        Process(checkpoint, *TWO_HTTP_PROCESSES, folder=tmp_path) as server,
        contextlib.ExitStack() as stack,
    ):
        call = partial(httpx.stream, "POST", f"{server.url}/v1/completions", json=body, timeout=60)
        streams = [stack.enter_context(call()) for _ in range(6)]
        server.process.send_signal(signal.SIGHUP)
        for stream in streams:
            assert b"[DONE]" in stream.read(), stream.status_code
        assert server.process.wait(60) == 0
        # of those in another HTTP process the first hears a little later
        assert re.search("finishing [1-6] requests?;", server.process.stdout.read())
    assert not list(tmp_path.glob("pagedgpt-*"))


def has_handler(pid: int, number: int) -> bool:
    """Whether that process has a function of its own for a signal."""
    caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())[1]
    return bool(int(caught, 16) >> (number - 1) & 1)


@pytest.mark.skipif(
    sys.platform != "linux", reason="needs /proc, to know when the handler is there"
)
def test_sigterm_while_it_starts_leaves_nothing_behind(checkpoint, tmp_path):
    """Until the event loop ran, the signal killed the process: the folder of its sockets stayed."""
    command = [sys.executable, "serve.py", "--model", str(checkpoint), "--port", "0"]
    run = RUN | {"env": RUN["env"] | {"TMPDIR": str(tmp_path)}}
    with subprocess.Popen(command, **run) as process:
        wait_until(
            lambda: list(tmp_path.glob("pagedgpt-*")) and has_handler(process.pid, signal.SIGTERM)
        )
        process.terminate()
        assert process.wait(30) == 0
    assert not list(tmp_path.glob("pagedgpt-*"))


@pytest.mark.skipif(os.name != "posix", reason="needs ps and kill")
def test_engine_killed(chat_server, expected):
    """
    kill -9 of the engine's process: another one is started, once; then the server ends with a
    failure. The last test of this server: its log has a line of JSON for each request, and the
    records of both engines, in one file, replay.
    """
    process, first = chat_server.process, chat_server.engine_pid
    os.kill(first, signal.SIGKILL)
    while (health := httpx.get(f"{chat_server.url}/livez")).status_code != 503:
        time.sleep(0.01)
    assert "a new one is starting" in health.json()["error"]["message"]
    while httpx.get(f"{chat_server.url}/readyz").status_code != 200:
        time.sleep(0.05)
    with openai.OpenAI(base_url=f"{chat_server.url}/v1", api_key="sesame", max_retries=0) as client:
        answer = client.completions.create(model="gpt", prompt="def ", **GREEDY)
    assert answer.choices[0].text == expected("def ")
    assert (
        httpx.get(f"{chat_server.url}/livez").status_code == 200 and chat_server.engine_pid != first
    )
    os.kill(chat_server.engine_pid, signal.SIGKILL)
    assert process.wait(60) == 1
    said = process.stdout.read().splitlines()
    assert "the engine stopped unexpectedly" in said[-1]
    logged = [json.loads(line) for line in said if line.startswith("{")]
    # two chats, if test_chat_behind_a_key ran in this process, and this one
    count = [line["event"] for line in logged].count("request")
    assert count in (1, 3)
    with open_record(chat_server.record) as record:
        told = [line for _, line in replay(record)]
    reasons = [reason for line in told for _, reason, _ in line.get("ended", ())]
    assert [line["event"] for line in told].count("snapshot") == 2
    assert reasons == ["length"] * count


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs ps and kill")
def test_server_killed(checkpoint, tmp_path):
    """
    kill -9 of the server: the engine and the other HTTP process find their links and orders closed
    and leave, instead of keeping the memory and the port for ever, and the folder of sockets goes
    with the engine.
    """
    with Process(checkpoint, *TWO_HTTP_PROCESSES, folder=tmp_path) as server:
        left = set(server.children)
        assert len(left) == 1 + bool(TWO_HTTP_PROCESSES)
        server.process.kill()
        deadline = time.monotonic() + 60
        while left and time.monotonic() < deadline:
            time.sleep(0.01)
            left = {pid for pid in left if is_alive(pid)}
    assert not left, "a process outlived its server"
    assert not list(tmp_path.glob("pagedgpt-*"))


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# --------------------------------------------------------------------------------------------------
# At the terminal

# Python with the packages of the HTTP server missing: `--prompt` must do without.
ABSENT = ["uvicorn", "pydantic", "starlette", "prometheus_client"]
BARE = f"import sys; sys.modules |= dict.fromkeys({ABSENT}); import serve; "


def at_terminal(checkpoint, *flags):
    command = [
        sys.executable,
        "-c",
        f"{BARE} serve.main(sys.argv[1:])",
        "--model",
        str(checkpoint),
        *flags,
    ]
    return subprocess.Popen(command, **RUN, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_prompt_at_the_terminal(checkpoint, expected):
    process = at_terminal(
        checkpoint, "--prompt", "# \u20ac def ", "--temperature", "0", "--max-tokens", "24"
    )
    out, errors = process.communicate(timeout=60)
    assert out == "# \u20ac def " + expected("# \u20ac def ") + "\n" and process.returncode == 0
    note = r"\[24 tokens, [0-9.]+ a second, seed \d+, cut off\]"
    assert re.fullmatch(rf"loading .* \.\.\n{note}\n", errors)


def test_ctrl_c_at_the_terminal(checkpoint, tmp_path):
    """
    Ctrl-C stops the text, not with a traceback. The text is so long that no machine is done before
    the signal.
    """
    long = GPT(replace(load_config(checkpoint), context_length=50_000))
    save_checkpoint(long, tmp_path)
    load_tokenizer(checkpoint).save(tmp_path)
    process = at_terminal(tmp_path, "--prompt", "x", "--max-tokens", "40000", "--kv-blocks", "2600")
    assert process.stdout.read(2)[0] == "x"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and "Traceback" not in errors
    assert 0 < int(re.search(r"\[(\d+) tokens?, .*, stopped\]", errors)[1]) < 40_000


def test_missing_and_broken_checkpoints(tmp_path, checkpoint):
    """
    Behind the first line one that says what to run, not a traceback, for each thing that can be
    missing, over HTTP or not.
    """

    for name in ("tokenizer.json", "config.json"):
        for folder in ("missing", "broken"):
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / name).write_bytes((checkpoint / name).read_bytes())
    torn = (checkpoint / "model.safetensors").read_bytes()[:1000]
    (tmp_path / "broken" / "model.safetensors").write_bytes(torn)
    complaints = {
        ("nothing",): "`python train.py --out",
        ("missing", "--prompt", "x"): "model.safetensors is missing",
        ("broken",): "model.safetensors cannot be read",
    }
    serve = [sys.executable, "serve.py", "--port", "0", "--model"]
    started = [
        subprocess.Popen([*serve, str(tmp_path / folder), *flags], **RUN, stderr=subprocess.PIPE)
        for folder, *flags in complaints
    ]
    for process, complaint in zip(started, complaints.values(), strict=True):
        error = process.communicate(timeout=60)[1]
        first, *rest = error.splitlines()
        assert first.startswith("loading ") and len(rest) == 1 and complaint in rest[0], error
        assert process.returncode == 1
