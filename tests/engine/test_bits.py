"""
Equal to the bit: with the operators of cpu.c, and with --deterministic on a GPU, a request gets the
same tokens and log-probabilities to the last bit, whatever happens to it and whatever is served
beside it. `pytest tests/engine/test_bits.py -k gpu` runs the GPU's part.

The reference serves each of ASKS separately: with a cold cache, its prompt in one piece, by one
thread, without CUDA graphs. Then all of them are served together in the situations below. Each
situation proves that it really occurred, by counting hits, preemptions and copies of shared blocks.
test_paged.py checks that answers are right; here they only have to be the same. Answers are
compared at the same block size, because attention sums block by block.
"""

import ctypes
import math
import random
import shlex
import tomllib
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import cache, partial
from itertools import product
from unittest import mock

import pytest
import torch
from interpreting import multiply_in_order
from torch import Tensor

from engine.drafts import GrowingText
from engine.engine import Engine, Output
from engine.process import add_request
from kernels import INTERPRETED, triton
from model import GPT, GPTConfig
from ops import cpu, sampling
from test_paged import assert_idle, new_engine, trained_model

needs_compiler = pytest.mark.skipif(not cpu.c_compiler(), reason="needs a C compiler")
has_gpu = torch.cuda.is_available() and triton is not None
needs_gpu = pytest.mark.skipif(not has_gpu, reason="needs a GPU: and triton")
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    """Make every operator share its work among threads, however small the models are."""
    options = [] if has_gpu else ["-DWORTH_SHARING=0"]  # with options Triton could not compile
    monkeypatch.setenv("CC", shlex.join([*cpu.c_compiler(), *options]))
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# --------------------------------------------------------------------------------------------------
# Models


def with_twins() -> GPT:
    """
    Return a model in which each token has a twin with the same logit, so there are ties everywhere.
    """
    model = GPT(GPTConfig(33, 64, n_layer=1, n_head=2, n_embd=36, tied=False))
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3, generator=generator)
    head = model.lm_head.weight.data
    head[1::2] = head[:-1:2].clone()
    return model.eval()


SMALL = "gemma2-small"  # a layer of each kind, two heads sharing K and V: small enough to interpret


@cache
def model_of(name: str) -> GPT:
    if name == "trained":
        return trained_model()
    if name == "twins":
        return with_twins()
    families = pytest.importorskip("test_families")
    changes = {}
    if name == SMALL:
        name = "gemma2"
        changes = families.tiny_models.two_layers(name, window=19)
        changes |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    _, ours = families.pair(name, **changes)
    return ours


# "gpu" and the dtype of the weights: uses the operators of --deterministic
GPU_DTYPES = {"gpu-bf16": torch.bfloat16, "gpu-fp32": torch.float32}
MODELS = "trained twins gpt2-untied llama-one-kv-head mistral qwen2-windows qwen3-windows gemma2"
MODELS = [*MODELS.split(), "gemma3", "olmo3", "hunyuan", "nanochat"]

# --------------------------------------------------------------------------------------------------
# Requests


# name: the length of its prompt, and its parameters besides SHARED. The answers of NEIGHBOURS are
# not compared: these filter, adjust and score where the requests in ASKS do not.
REQUESTS = tomllib.loads("""
[asks]
greedy = {length = 5, max_tokens = 12, logprobs = 0}
sampled = {length = 1, temperature = 1, logprobs = 5}
filtered = {length = 30, temperature = 1.4, top_k = 12, top_p = 0.97, min_p = 0.01, logprobs = 1}
nucleus = {length = 22, temperature = 0.8, top_p = 0.6}
min-p = {length = 17, temperature = 0.7, min_p = 0.05, logprobs = 20}
penalised = {length = 13, logprobs = 2, repetition_penalty = 1.3, presence_penalty = 2.0, \
frequency_penalty = 1.0}
biased = {length = 26, temperature = 1.2, logprobs = 3, repetition_penalty = 1.3, \
logit_bias = {1 = 2.0, 7 = -3.0}, stop_token_ids = [2, 3], min_tokens = 4}
scored = {length = 35, prompt_logprobs = 3, logprobs = 1, frequency_penalty = 2.0}
three = {length = 18, n = 3, temperature = 1, logprobs = 2, presence_penalty = 2.0}
two = {length = 21, n = 2, prompt_logprobs = 0, temperature = 1, top_k = 5, logprobs = 1}
[neighbours]
a = {length = 11, temperature = 1, max_tokens = 20}
b = {length = 33, temperature = 0.9, top_k = 3, min_p = 0.2, logprobs = 20, max_tokens = 6}
c = {length = 2, n = 2, max_tokens = 25, logprobs = 0, repetition_penalty = 0.7}
d = {length = 28, prompt_logprobs = 20, temperature = 1, logit_bias = {1 = 2.0}, min_tokens = 4, \
stop_token_ids = [2, 3], frequency_penalty = 0.4}
""")
SHARED = {"temperature": 0.0, "max_tokens": 9, "seed": 3, "ignore_eos": True}
ASKS = REQUESTS["asks"]
NEIGHBOURS = REQUESTS["neighbours"]


def message(name: str, vocabulary: int) -> dict:
    """Return what the HTTP process would send. All prompts begin with the same 9 tokens."""
    params = SHARED | (ASKS | NEIGHBOURS)[name]
    length = params.pop("length")
    rng = random.Random(length)
    prompt = [3 * i % 29 for i in range(9)] + [rng.randrange(vocabulary) for _ in range(length)]
    options = {
        option: params.pop(option) for option in ("n", "prompt_logprobs") if option in params
    }
    return {"id": name, "prompt": prompt[:length], "params": params, "options": options}


class Service:
    """
    An engine and the answers of its requests: for each step, everything that a client is sent. An
    id such as "7:three" is a number and the name of the request. A further choice has the id
    "7:three.1", so its name is "three.1".
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self.scheduler = engine.scheduler
        self.answers: dict[str, list[Output]] = defaultdict(list)
        self.chunks = Counter()  # of each request
        self.launch = engine.runner.launch
        engine.runner.launch = self.noted

    def noted(self, plan):
        self.chunks.update(request.id for request, _ in plan.chunks)
        return self.launch(plan)

    def add(self, *names: str):
        for name in names:
            self.send(message(name, self.engine.config.vocab_size))

    def send(self, request: dict):
        id = f"{len(self.answers)}:{request['id']}"
        self.answers[id] = []
        add_request(self.engine, request | {"id": id})

    def step(self):
        for output in self.engine.step():
            assert output.error is None, output.error
            answer = self.answers[output.id]
            output = output._replace(id="", cached_tokens=0)
            for token in output.tokens[:-1]:  # a draft's tokens
                answer.append(output._replace(tokens=[token], finish_reason=None))
            answer.append(output._replace(tokens=output.tokens[-1:]))

    def run(self, *names: str):
        self.add(*names)
        while self.engine.has_work:
            self.step()
        assert_idle(self.engine)


def start(name: str, kind: str, threads=1, **settings) -> Service:
    """
    Start an engine with cpu.c and this number of threads; torch uses as many. Or start one on a
    GPU. By default it runs there without overlap, so that it hits and preempts as on a CPU.
    """
    torch.set_num_threads(threads)
    sizes = {"num_blocks": 160, "max_num_seqs": 16, "token_budget": 256}
    how = {"deterministic": True, "overlap": False, "attention": "triton"}
    model = model_of(name)
    if kind in GPU_DTYPES:
        model = deepcopy(model).to("cuda", GPU_DTYPES[kind])
    elif kind == "torch":
        how |= {"attention": "torch", "deterministic": False}
    elif kind != "interpreted":
        how |= {"attention": "cpu", "quantize": kind}
    return Service(new_engine(model, **how | sizes | settings))


def name_of(id: str) -> str:
    return id.partition(":")[2]


@cache
def alone(name: str, kind: str, block_size=4) -> dict[str, list[Output]]:
    """
    Return the reference answers, after checking that they are varied enough to compare with.
    Choices of one request are not forked, because there is no row for a second one.
    """
    settings = {"max_num_seqs": 1, "prefix_cache": False, "graphs": False}
    service = start(name, kind, block_size=block_size, **settings)
    for asked in ASKS:
        service.run(asked)
    assert len(service.answers) == 13
    assert set(service.chunks.values()) == {1}
    assert service.scheduler.num_hit_tokens == service.scheduler.num_forks == 0
    answers = {name_of(id): answer for id, answer in service.answers.items()}
    texts = {str([output.tokens for output in answer]) for answer in answers.values()}
    assert len(texts) >= 11
    assert len(answers["min-p"][8].logprobs[1]) == 20
    assert len(answers["scored"][0].prompt_logprobs) == 34
    return answers


def differences(service: Service, expected: dict[str, list[Output]]) -> list[str]:
    """Return the answers that differ when printed. No two floats are printed alike."""
    compared = {id: a for id, a in service.answers.items() if name_of(id) in expected}
    assert set(map(name_of, compared)) == set(expected)
    return [id for id, answer in compared.items() if repr(answer) != repr(expected[name_of(id)])]


# --------------------------------------------------------------------------------------------------
# Situations: each serves all of ASKS with services that it starts, and proves that it occurred


def preempted(start) -> list[Service]:
    """
    Serve all together, in chunks, with and without prefix hits. Their own tokens are recomputed as
    part of their prompts.
    """
    services = []
    for prefix_cache in (True, False):
        settings = {"num_blocks": 13, "watermark": 0, "token_budget": 20, "overlap": prefix_cache}
        service = start(prefix_cache=prefix_cache, **settings)
        service.run(*ASKS)
        assert service.scheduler.num_preemptions >= 3
        services.append(service)
    return services


def in_random_lives(start) -> list[Service]:
    """
    Serve them twice, beside others that come before and after, some of which hang up. There are no
    graphs, because one would be captured for each size.
    """
    services = []
    counts = Counter()
    for seed in range(8):
        rng = random.Random(seed)
        block_size = rng.choice([4, 16])
        rows = rng.choice([1, 3, 8, 20])
        sizes = {"max_num_seqs": rows, "token_budget": rng.choice([rows, rows + 5, 64])}
        sizes |= {"block_size": block_size, "num_blocks": rng.choice([56, 100, 960]) // block_size}
        sizes["watermark"] = rng.choice([0, 0.01])
        sizes |= {"overlap": rng.random() < 0.5, "prefix_cache": rng.random() < 0.8}
        service = start(threads=rng.choice([1, 1, 2, 3]), graphs=False, **sizes)
        names = 2 * list(ASKS) + list(NEIGHBOURS)
        rng.shuffle(names)
        for asked in names:
            service.add(asked)
            for _ in range(rng.choice([0, 1, 3, 10])):
                service.step()
        of_neighbours = [id for id in service.engine.requests if name_of(id) in NEIGHBOURS]
        for id in of_neighbours[::2]:
            service.engine.abort(id)
        service.run()
        services.append(service)
        counts["aborts"] += len(of_neighbours[::2])
        counts["several chunks"] += max(service.chunks.values()) > 3
        for counter in ("num_hit_tokens", "num_preemptions", "num_forks", "num_copies"):
            counts[counter] += getattr(service.scheduler, counter)
    assert len(counts) == 6 and min(counts.values()) >= 5, counts
    return services


def with_threads(start) -> list[Service]:
    """Run two engines at the same time, each with its own threads."""
    services = []
    for threads in (2, 3):
        service = start(threads=threads, token_budget=40)
        machine = service.engine.device.ops.linear.__self__
        of_pool = ctypes.c_int.from_address(machine.pool)  # its first field
        assert of_pool.value == torch.get_num_threads() == threads
        services.append(service)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda service: service.run(*ASKS), services))
    return services


def with_drafts(start) -> list[Service]:
    """Guess drafts of which half are wrong. With overlap, the engine sometimes waits for them."""
    expected = alone(*start.args)
    rng = random.Random(0)

    def guess(text: GrowingText, most: int) -> list[int]:
        request = text.request
        answer = [token for output in expected[name_of(request.id)] for token in output.tokens]
        draft = answer[request.num_generated :][: max(0, most)]
        if draft and rng.random() < 0.5:
            draft[-1] = (draft[-1] + 1) % 29
        is_silent = request.num_to_come and rng.random() < 0.5
        return draft if text.can_guess and not is_silent else []

    services = []
    for overlap in (False, True):
        with mock.patch.object(GrowingText, "guess", guess):
            service = start(speculate=True, max_num_seqs=4, overlap=overlap)
            service.run(*ASKS, *4 * ["nucleus"])  # the only request without scores
        drafts = service.engine.stages["drafts"]
        assert 1 < drafts.num_right < drafts.num_guessed - 1
        services.append(service)
    return services


def without_graphs(start) -> list[Service]:
    """Serve the same batches without and with graphs."""
    services = [start(graphs=graphs, overlap=True) for graphs in (False, True)]
    for service in services:
        service.run(*ASKS)
    assert [len(service.engine.device.graphs) > 0 for service in services] == [False, True]
    return services


SITUATIONS = (preempted, in_random_lives, with_drafts)
ON_A_CPU = (with_threads,)
ON_A_GPU = (without_graphs,)
MACHINES = [
    (needs_compiler, MODELS, ("none", "int8"), SITUATIONS + ON_A_CPU),
    (needs_gpu, MODELS, GPU_DTYPES, SITUATIONS + ON_A_GPU),
    (needs_interpreter, ("twins", SMALL), ("interpreted",), (preempted, with_drafts)),
]
CASES = [
    pytest.param(*case, marks=needs) for needs, *machine in MACHINES for case in product(*machine)
]


@pytest.mark.parametrize(("name", "kind", "situation"), CASES)
@pytest.mark.quick(
    "twins-none-*", "t*-int8-preempted", "trained-none-preempted", "gemma2-none-preempted",
    "trained-*-with_threads", "qwen3-windows-int8-with_threads", "t*-gpu-*", "gemma2-gpu-*",
    "qwen3-windows-gpu-bf16-*", "llama-one-kv-head-gpu-bf16-*",
)  # fmt: skip
def test_a_request_gets_the_same_bits(name, kind, situation, monkeypatch):
    """
    Would catch: a sum whose order depends on the size of a batch, on a thread's share, or on where
    a chunk or a task begins; K and V that differ between a decode and the same token in a prompt;
    candidates that depend on how many a neighbour wants. On a GPU it would also catch tiles, splits
    and kernels that depend on the number of rows, on a padded shape, or on what a graph has
    captured.
    """
    if kind == "interpreted":
        multiply_in_order(monkeypatch)
    for service in situation(partial(start, name, kind)):
        expected = alone(name, kind, service.scheduler.block_size)
        assert differences(service, expected) == []


# --------------------------------------------------------------------------------------------------
# What torch computes from the logits


@pytest.mark.parametrize("V", [31, 32_769])
def test_a_row_of_logits_is_judged_by_itself(V):
    """
    Would catch: a sum that torch's threads share if there is only one row (logsumexp does, above
    32,768); a function that rounds differently at the end of a vector; ties broken differently for
    a request that wants more candidates.
    """
    generator = torch.Generator().manual_seed(V)
    logits = torch.randn(5, V, generator=generator).round(decimals=2) - math.log(V)
    logits[:, 0] = 0.0  # so no digit of its log-probability, about -1, is lost in a subtraction
    numbers = torch.arange(5)  # top_k, seed, position
    shares = torch.linspace(0.3, 0.99, 5)  # top_p, min_p

    def judge(rows: slice, n: int) -> Tensor:
        own = numbers[rows]
        x = logits[rows].clone()
        lowest = sampling.threshold(x / 1.3, own, shares[rows], shares[rows] / 50)
        noise = sampling.gumbel_noise(own, own, own, V)
        logprob, ids, best = sampling.logprobs(x, torch.zeros_like(own), n)
        return torch.cat([torch.stack([lowest, logprob], 1), ids[:, :3], best[:, :3], noise], 1)

    torch.set_num_threads(1)
    expected = torch.cat([judge(slice(i, i + 1), 3) for i in range(5)])
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for first, end, n in (0, 5, 20), (1, 3, 4), (2, 3, 7), (4, 5, 3):
            rows = slice(first, end)
            assert torch.equal(judge(rows, n), expected[rows])
