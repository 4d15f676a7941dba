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
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import openai
import pytest
import torch
from browser import save_random_model
from processes import RUN, Process, read_until, wait_until
from wires import request

from assets import load
from assets.records import open_record, replay
from checkpoint import load_checkpoint
from tokenizer import load_tokenizer

ROOT = Path(__file__).parents[1]
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
    write_corpus(folder, [ids[4000:]], [ids[:4000]], tokenizer)
"""
# So high learning rates make a bad model whose answers are lively; after these few steps a good one
# says only blanks.
TRAIN = "--steps 60 --batch_size 1 --n_layer 2 --n_head 2 --n_embd 64 --context_length 512"
TRAIN += " --matrix_lr 0.05 --vector_lr 0.03 --dtype float32"


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


@pytest.fixture(scope="module")
def server(checkpoint):
    with Process(checkpoint) as server:
        yield server


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def expected(checkpoint):
    """
    The reference for greedy decoding, by the dense model without a cache: prompt -> text of `count`
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
    texts = {prompt: expected(prompt) for prompt in set(prompts)}
    for _ in range(2):  # the second time with every prompt in the prefix cache
        with ThreadPoolExecutor(13) as pool:
            noise = {"temperature": 1, "max_tokens": 40, "seed": 1}
            pool.submit(complete, prompt=["noise"] * 4, **noise)
            answers = pool.map(ask, prompts, [False, True] * len(PROMPTS))
            assert list(answers) == [texts[prompt] for prompt in prompts]


def test_logprobs_are_the_models(complete, checkpoint):
    """
    Of the prompt and of the answer, by echo; of the tokens, not of their pieces of text.
    """
    ids = load_tokenizer(checkpoint).encode("import torch\nimport ")
    fields = {"prompt": ids, "logprobs": 3, "echo": True}
    answer = complete(max_tokens=6, extra_body={"return_token_ids": True}, **fields).choices[0]
    tokens = ids + answer.token_ids
    dense = load_checkpoint(checkpoint)(torch.tensor([tokens]))[0][0].log_softmax(-1)
    logprobs = answer.logprobs
    assert "".join(logprobs.tokens) == answer.text
    assert logprobs.token_logprobs[0] is None
    of_tokens = dense[range(len(tokens) - 1), tokens[1:]].tolist()
    assert logprobs.token_logprobs[1:] == pytest.approx(of_tokens, abs=1e-3)


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
        assert choice.message.role == "assistant"
        assert text == choice.message.content
        assert "".join(entry.token for entry in choice.logprobs.content) == text
        assert all(
            entry.top_logprobs[0].logprob == entry.logprob for entry in choice.logprobs.content
        )  # greedy
        return text

    assert asyncio.run(talk()) == expected("import ")


def test_errors_as_the_client_sees_them(complete):
    """The client turns status and body into exceptions, and none of these makes it try again."""
    with pytest.raises(openai.NotFoundError) as missing:
        complete(model="gpt-5", prompt="x")
    assert missing.value.code == "model_not_found"
    assert len(missing.value.request_id) == 32
    too_long = r"context length is 512 tokens, .* make 513"
    with pytest.raises(openai.BadRequestError, match=too_long) as refused:
        complete(prompt=[1] * 500, max_tokens=13)
    assert refused.value.param == "max_tokens"


# --------------------------------------------------------------------------------------------------
# Attacks


def address_of(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").rpartition(":")
    return host, int(port)


def cpu_seconds(pid: int) -> float:
    """
    CPU time of a process so far: how long it takes for something, whatever else the machine does.
    """
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    user, system = int(fields[11]), int(fields[12])
    return (user + system) / os.sysconf("SC_CLK_TCK")


COMPLETIONS = "/v1/completions"
JSON = {"Content-Type": "application/json"}


class Watch:
    """Asks /livez every 50 ms, each time on a connection of its own."""

    def __init__(self, server: Process):
        self.url = server.url
        self.pid = server.process.pid
        # that the HTTP process has computed while each answer was waited for
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
            before = cpu_seconds(self.pid)
            is_alive = httpx.get(f"{self.url}/livez", timeout=30).status_code == 200
            spent = cpu_seconds(self.pid) - before
            self.seconds.append(spent if is_alive else float("inf"))


def trailers(url):
    """Of a chunked body, for ever."""
    head = request(COMPLETIONS, method="POST", **JSON, Transfer_Encoding="chunked")
    sock = socket.create_connection(address_of(url), timeout=30)
    with sock, contextlib.suppress(OSError):
        sock.sendall(head + b"1\r\nx\r\n0\r\n")
        for _ in range(2000):
            sock.sendall(b"a:b\r\n" * 5000)


# Bodies that stopped the event loop: the path, the body, how many at once, and the status.
SCORED = {"prompt": "x", "n": 60, "logprobs": 20, "ignore_eos": True, "max_tokens": 200}
FIELDS = {"prompt": "x", "max_tokens": 24} | {f"field {i}": 1 for i in range(200_000)}
LONG = {"prompt": "x " * 2_000_000, "max_tokens": 24}
ATTACKS = {
    "blanks": ("/tokenize", {"prompt": " " * 499_999}, 3, 200),
    "fields": (COMPLETIONS, FIELDS, 2, 400),
    "more blanks": ("/tokenize", {"prompt": ("x" + " " * 499_999) * 8}, 2, 200),
    "a rare character": ("/tokenize", {"prompt": "\u2603" * 690_000}, 4, 200),
    "a long prompt": (COMPLETIONS, LONG, 2, 400),
    "log-probabilities": (COMPLETIONS, SCORED, 2, 200),
    "prompts": (COMPLETIONS, {"prompt": [[]] * 10**6, "max_tokens": 24}, 2, 400),
}
SLOW_ATTACKS = [pytest.param(name, marks=pytest.mark.slow) for name in list(ATTACKS)[2:]]


@pytest.mark.parametrize("name", ["trailers", "blanks", "fields", *SLOW_ATTACKS])
def test_the_server_answers_during_an_attack(server, name):
    """
    Nothing that one client sends keeps others waiting for a second. Each of these did, some for
    minutes.
    """
    with Watch(server) as watch, ThreadPoolExecutor(4) as pool:
        wait_until(lambda: watch.seconds)
        if name == "trailers":
            list(pool.map(trailers, [server.url] * 3))
        else:
            path, fields, count, status = ATTACKS[name]
            body = json.dumps(fields, ensure_ascii=False).encode()
            post = partial(httpx.post, f"{server.url}{path}", timeout=60)
            post = partial(post, content=body, headers=JSON)
            answers = [pool.submit(post) for _ in range(count)]
            assert [answer.result().status_code for answer in answers] == [status] * count
        count = len(watch.seconds)
        wait_until(lambda: len(watch.seconds) > count)
    assert max(watch.seconds) < 1, sorted(watch.seconds)[-3:]


# --------------------------------------------------------------------------------------------------
# Load


@pytest.mark.parametrize(
    "head", [b"Content-Length: 5000000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n4c4b40\r\n"]
)
def test_a_client_that_sends_5_mb_reads_its_413(server, head):
    """Closing with bytes unread would reset the connection, and the answer would be lost."""
    with socket.create_connection(address_of(server.url), timeout=30) as sock:
        sock.sendall(request(COMPLETIONS, method="POST", **JSON)[:-2] + head)
        sock.sendall(b" " * 5_000_000)
        assert read_until(sock, b"}}").startswith(b"HTTP/1.1 413 ")


def test_the_load_generator_measures_what_it_says(server):
    """A row for each request, in their order. So long an answer cannot come in one piece."""
    host, port = map(str, address_of(server.url))
    requests = [load.completion(list(b"loop"), 400 + i, at=0.1 * (i == 4)) for i in range(5)]
    rows = load.run_clients(host, port, requests, processes=2)
    assert [row["tokens"] for row in rows] == [400, 401, 402, 403, 404]
    for row in rows:
        waited = row["first"] + sum(row["gaps"])
        assert 0 < row["first"] < waited
        assert 0 < len(row["gaps"]) < row["tokens"]
        assert row["end"] == pytest.approx(waited + 0.1 * (row["tokens"] == 404))
    with pytest.raises(ValueError, match="wanted 3 tokens, the answer ends with HTTP"):
        load.run_clients(host, port, [load.completion([9999], 3)], processes=1)


# --------------------------------------------------------------------------------------------------
# Ends


def test_a_hang_up_drains_and_exits_0(server, client, checkpoint):
    """
    SIGHUP cut all streams. It drains as SIGTERM does, which it raises. The last test of this
    server: running requests are finished, new ones refused, and the exit is clean.
    """
    assert server.greeting == f"serving {checkpoint} at {server.url}\n"  # scripts wait for it
    body = {"model": str(checkpoint), "prompt": "x", "stream": True, "max_tokens": 400}
    create = partial(client.completions.create, **body, extra_body={"ignore_eos": True})
    engine = server.engine_pid
    with ThreadPoolExecutor(6) as pool:
        streams = list(pool.map(lambda _: create(), range(6)))
    os.kill(engine, signal.SIGSTOP)  # no answer ends while this looks at the draining
    try:
        for stream in streams:
            next(stream)
        server.process.send_signal(signal.SIGHUP)
        while httpx.get(f"{server.url}/readyz", timeout=30).status_code != 503:
            time.sleep(0.01)
        with pytest.raises(openai.InternalServerError, match="draining"):
            create()
    finally:
        os.kill(engine, signal.SIGCONT)
    for stream in streams:
        *_, last = stream
        assert last.choices[0].finish_reason == "length"
    assert server.process.wait(60) == 0
    assert "finishing 6 requests;" in server.process.stdout.read()


def has_handler(pid: int, number: int) -> bool:
    """Whether that process has a function of its own for a signal."""
    caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())[1]
    return bool(int(caught, 16) >> (number - 1) & 1)


@pytest.mark.skipif(
    sys.platform != "linux", reason="needs /proc, to know when the handler is there"
)
def test_sigterm_while_it_starts_is_no_failure(checkpoint):
    """Until the event loop ran, the signal killed the process."""
    command = [sys.executable, "serve.py", "--model", str(checkpoint), "--port", "0"]
    with subprocess.Popen(command, **RUN) as process:
        wait_until(lambda: has_handler(process.pid, signal.SIGTERM))
        process.terminate()
        assert process.wait(30) == 0


@pytest.mark.skipif(os.name != "posix", reason="needs ps and kill")
def test_engine_killed(chat_server, expected):
    """
    kill -9 of the engine's process: another one is started, once; then the server ends with a
    failure. The last test of this server: its log has a line of JSON for each request, and the
    records of both engines, in one file, replay.
    """
    process, first = chat_server.process, chat_server.engine_pid
    os.kill(first, signal.SIGKILL)
    while (health := httpx.get(f"{chat_server.url}/livez", timeout=30)).status_code != 503:
        time.sleep(0.01)
    assert "a new one is starting" in health.json()["error"]["message"]
    while httpx.get(f"{chat_server.url}/readyz", timeout=30).status_code != 200:
        time.sleep(0.05)
    with openai.OpenAI(base_url=f"{chat_server.url}/v1", api_key="sesame", max_retries=0) as client:
        answer = client.completions.create(model="gpt", prompt="def ", **GREEDY)
    assert answer.choices[0].text == expected("def ")
    assert httpx.get(f"{chat_server.url}/livez", timeout=30).status_code == 200
    assert chat_server.engine_pid != first
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
def test_server_killed(checkpoint):
    """
    kill -9 of the server: the engine finds its link closed and leaves, instead of keeping the
    memory for ever.
    """
    with Process(checkpoint) as server:
        engine = server.engine_pid
        server.process.kill()
        wait_until(lambda: not is_alive(engine))


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
    assert out == "# \u20ac def " + expected("# \u20ac def ") + "\n"
    assert process.returncode == 0
    note = r"\[24 tokens, [0-9.]+ a second, seed \d+, end: length\]"
    assert re.fullmatch(rf"loading .* \.\.\n{note}\n", errors)


def test_ctrl_c_at_the_terminal(tmp_path):
    """
    Ctrl-C stops the text, not with a traceback. The text is so long that no machine is done before
    the signal, and this model does not end it by chance.
    """
    save_random_model(tmp_path, context_length=50_000)
    process = at_terminal(tmp_path, "--prompt", "x", "--max-tokens", "40000", "--kv-blocks", "2600")
    assert process.stdout.read(2)[0] == "x"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in errors
    assert 0 < int(re.search(r"\[(\d+) tokens?, .*, end: interrupted\]", errors)[1]) < 40_000


def test_a_broken_checkpoint(tmp_path, checkpoint):
    """Behind the first line one that says what to do, not a traceback: over HTTP, too."""
    for name in ("tokenizer.json", "config.json", "model.safetensors"):
        content = (checkpoint / name).read_bytes()
        (tmp_path / name).write_bytes(content[:1000] if name.startswith("model") else content)
    command = [sys.executable, "serve.py", "--port", "0", "--model", str(tmp_path)]
    done = subprocess.run(command, **RUN, capture_output=True, timeout=60)
    first, second = done.stderr.splitlines()
    assert first.startswith("loading ")
    assert "model.safetensors cannot be read" in second
    assert done.returncode == 1
