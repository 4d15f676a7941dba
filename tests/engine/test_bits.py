"""
Equal to the bit: with the operators of cpu.c, and with --deterministic on a GPU, a request gets the
same tokens and the same log-probabilities to the last bit, whatever happens to it and whatever
stands beside it. `pytest tests/engine/test_bits.py -k gpu` is the GPU's part.

The reference is each of ASKS alone: cold, its prompt in one piece, by one thread, without CUDA
graphs. Then all of them are served in the situations below, each of which shows that it has
happened: hits, preemptions and copies of shared blocks were counted. Whether answers are right,
test_paged.py asks; here they need only be the same. Compared answers have one block size, for
attention adds up block by block.
"""

import ctypes
import math
import os
import random
import shlex
import subprocess
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


@pytest.fixture(autouse=True)
def threads_share_all(monkeypatch):
    """However small the models are."""
    options = [] if has_gpu else ["-DWORTH_SHARING=0"]  # with options Triton could not compile
    monkeypatch.setenv("CC", shlex.join([*cpu.c_compiler(), *options]))


@cache
def hostile_options() -> list[str]:
    """
    Those by which gcc leaves some products and sums apart that it could fuse, as gcc 13 does by
    itself on CPUs with AMX; for other compilers, code for a CPU that fuses nothing.
    """
    options = ["--param=avoid-fma-max-bits=512"]
    command = [*cpu.c_compiler(), *options, "-E", "-x", "c", os.devnull]
    is_gcc = subprocess.run(command, capture_output=True).returncode == 0
    return options if is_gcc else ["-mno-fma", "-mno-avx512f"]


@pytest.fixture(autouse=True)
def threads_are_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# --------------------------------------------------------------------------------------------------
# Models


def with_twins() -> GPT:
    """Each token has a twin, whose logit is the same: ties everywhere."""
    model = GPT(GPTConfig(33, 64, n_layer=1, n_head=2, n_embd=36, tied=False))
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3, generator=generator)
    head = model.lm_head.weight.data
    head[1::2] = head[:-1:2].clone()
    return model.eval()


SMALL = "gemma2-small"  # a layer of each kind, two heads that share K and V: for the interpreter


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


# "gpu" and the dtype of the weights: the operators of --deterministic
GPU_DTYPES = {"gpu-bf16": torch.bfloat16, "gpu-fp32": torch.float32}


@cache
def model_on_gpu(name: str, dtype: torch.dtype) -> GPT:
    return deepcopy(model_of(name)).to("cuda", dtype)


# a way to compile cpu.c, whose answers are those of "none"
HOSTILE = "hostile"
OWN = ("trained", "twins")
FAMILIES = ("gpt2-untied", "llama-one-kv-head", "mistral", "qwen2-windows", "qwen3-windows")
FAMILIES += ("gemma2", "gemma3")
FORMATS = ("none", "int8")
QUICK = [*product(OWN, FORMATS), ("gemma2", "none"), ("qwen3-windows", "int8")]
QUICK += product((*OWN, "gemma2"), [HOSTILE])
QUICK += product(("trained", "gemma2"), GPU_DTYPES)
QUICK += product(("twins", "qwen3-windows", "llama-one-kv-head"), ["gpu-bf16"])


def each(cases, quick=()) -> pytest.MarkDecorator:
    """
    For each model, kind of operators and perhaps situation, where they can run; those whose model
    and kind are not quick, slow.
    """
    params = []
    for case in cases:
        name, kind, *_ = case
        marks = [needs_gpu if kind in GPU_DTYPES else needs_compiler]
        marks += [] if (name, kind) in quick else [pytest.mark.slow]
        params.append(pytest.param(*case, marks=marks))
    return pytest.mark.parametrize(("name", "kind", "situation")[: len(case)], params)


CASES = [*product(OWN + FAMILIES, (*FORMATS, HOSTILE, *GPU_DTYPES))]
each_model = each(CASES, QUICK)

# --------------------------------------------------------------------------------------------------
# Requests


# name: how long its prompt is, and what is asked for beside SHARED. With neighbours nobody compares
# answers: they filter, adjust and score where the others do not.
REQUESTS = tomllib.loads("""
[asks]
greedy = {length = 5, max_tokens = 12, logprobs = 0}
sampled = {length = 1, temperature = 1, logprobs = 5}
filtered = {length = 30, temperature = 1.4, top_k = 12, top_p = 0.97, min_p = 0.01, logprobs = 1}
nucleus = {length = 22, temperature = 0.8, top_p = 0.6}
min-p = {length = 17, temperature = 0.7, min_p = 0.05, logprobs = 20}
penalised = {length = 13, logprobs = 2, repetition_penalty = 1.3, presence_penalty = 0.2, \
frequency_penalty = 0.1}
biased = {length = 26, temperature = 1.2, logprobs = 3, repetition_penalty = 1.3, \
logit_bias = {1 = 2.0, 7 = -3.0}, stop_token_ids = [2, 3], min_tokens = 4}
scored = {length = 35, prompt_logprobs = 3, logprobs = 1}
three = {length = 18, n = 3, temperature = 1, logprobs = 2}
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
    """What the HTTP process would send. All prompts begin with the same 9 tokens."""
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
    An engine, and the answers of its requests: of each step all that a client is sent. Their ids
    are "7:three", a number and the name of what was asked; a further choice has the id "7:three.1",
    and so the name "three.1".
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self.scheduler = engine.scheduler
        self.answers: dict[str, list[Output]] = defaultdict(list)
        self.most_decodes = 0  # in one step
        self.chunks = Counter()  # of each request
        self.launch = engine.runner.launch
        engine.runner.launch = self.noted

    def noted(self, plan):
        self.most_decodes = max(self.most_decodes, len(plan.decodes))
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
            for token in output.tokens[:-1]:  # of a draft
                answer.append(output._replace(tokens=[token], finish_reason=None))
            answer.append(output._replace(tokens=output.tokens[-1:]))

    def run(self, *names: str):
        self.add(*names)
        while self.engine.has_work:
            self.step()
        assert_idle(self.engine)


def start(name: str, kind: str, threads=1, **settings) -> Service:
    """
    An engine with cpu.c and so many threads; torch has as many. Or one on a GPU; without overlap,
    if it is not asked for, since that hits and preempts as a CPU's does.
    """
    torch.set_num_threads(threads)
    if kind == HOSTILE:
        command = [os.environ["CC"], *hostile_options()]
        with mock.patch.dict(os.environ, CC=" ".join(command)):
            return start(name, "none", threads, **settings)
    sizes = {"num_blocks": 160, "max_num_seqs": 16, "token_budget": 256}
    how = {"deterministic": True, "overlap": False}
    model = model_of(name)
    if kind in GPU_DTYPES:
        model = model_on_gpu(name, GPU_DTYPES[kind])
        how |= {"attention": "triton"}
    elif kind == "interpreted":
        how |= {"attention": "triton"}
    else:
        how |= {"attention": "cpu", "quantize": kind}
    return Service(new_engine(model, **how | sizes | settings))


def name_of(id: str) -> str:
    return id.partition(":")[2]


@cache
def alone(name: str, kind: str, block_size=4) -> dict[str, list[Output]]:
    """The reference. Choices of a request are not forked: there is no row for a second one."""
    if kind == HOSTILE:
        return alone(name, "none", block_size)
    settings = {"max_num_seqs": 1, "prefix_cache": False, "graphs": False}
    service = start(name, kind, block_size=block_size, **settings)
    for asked in ASKS:
        service.run(asked)
    assert len(service.answers) == 13
    assert service.most_decodes == 1
    assert set(service.chunks.values()) == {1}
    assert service.scheduler.num_hit_tokens == service.scheduler.num_forks == 0
    return {name_of(id): answer for id, answer in service.answers.items()}


def differences(service: Service, expected: dict[str, list[Output]]) -> list[str]:
    """The answers that differ, as they are written: no two floats are written alike."""
    compared = {id: a for id, a in service.answers.items() if name_of(id) in expected}
    assert set(map(name_of, compared)) == set(expected)
    return [id for id, answer in compared.items() if repr(answer) != repr(expected[name_of(id)])]


# --------------------------------------------------------------------------------------------------
# Situations: each serves all of ASKS with services that it starts, and shows that it has happened


def together(start) -> list[Service]:
    service = start()
    service.run(*ASKS)
    assert service.most_decodes == 13
    return [service]


def beside_others(start) -> list[Service]:
    """Beside requests that come before and after, of which two hang up."""
    service = start(max_num_seqs=20, num_blocks=240)
    for name, neighbour in zip(ASKS, 3 * list(NEIGHBOURS), strict=False):
        service.add(neighbour, name)
        service.step()
    running = [id for id in service.engine.requests if name_of(id) in NEIGHBOURS]
    for id in running[:2]:
        service.engine.abort(id)
    service.run()
    assert len(running) > 3
    assert service.most_decodes > 13
    return [service]


def one_after_the_other(start) -> list[Service]:
    """No batches, but hits and forks."""
    service = start(max_num_seqs=3)
    for name in ASKS:
        service.run(name)
    assert service.scheduler.num_hit_tokens > 0
    return [service]


def warm(start) -> list[Service]:
    service = start()
    service.run(*ASKS)
    hits = service.scheduler.num_hit_tokens
    service.run(*ASKS)
    # of all blocks before the last token's; scored prompts take no hits, forks need none
    assert service.scheduler.num_hit_tokens - hits == 4 + 28 + 20 + 16 + 12 + 24 + 16
    return [service]


def chunked(start) -> list[Service]:
    services = []
    for budget, rows in ((1, 1), (3, 2), (7, 4)):
        service = start(token_budget=budget, max_num_seqs=rows)
        service.run(*ASKS)
        assert max(service.chunks.values()) >= 30 / budget
        services.append(service)
    return services


def preempted(start) -> list[Service]:
    services = []
    for prefix_cache in (True, False):
        settings = {"num_blocks": 13, "watermark": 0, "token_budget": 20}
        service = start(prefix_cache=prefix_cache, **settings)
        service.run(*ASKS)
        assert service.scheduler.num_preemptions >= 3
        services.append(service)
    return services


def forked(start) -> list[Service]:
    service = start(max_num_seqs=20)
    service.run(*ASKS)
    assert service.scheduler.num_forks == 3
    assert service.scheduler.num_copies >= 2, "shared blocks were copied before they were written"
    return [service]


def with_threads(start) -> list[Service]:
    services = []
    for threads in (2, 3, 8):
        service = start(threads=threads, token_budget=40)
        machine = service.engine.device.ops.linear.__self__
        of_pool = ctypes.c_int.from_address(machine.pool)  # its first field
        assert of_pool.value == torch.get_num_threads() == threads
        service.run(*ASKS)
        services.append(service)
    return services


def beside_another_engine(start) -> list[Service]:
    """Both at work at the same time, each with threads of its own."""
    services = [start(threads=2), start(threads=2, max_num_seqs=3)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda service: service.run(*ASKS), services))
    return services


def overlapping(start) -> list[Service]:
    service = start(overlap=True, token_budget=16)
    service.run(*ASKS)
    assert service.engine.overlap
    return [service]


def with_drafts(start) -> list[Service]:
    """Half of them wrong; and with overlap, for which the engine sometimes waits."""
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
            service.run(*ASKS, *4 * ["nucleus"])  # which alone is not scored
        drafts = service.engine.stages["drafts"]
        assert 1 < drafts.num_right < drafts.num_guessed - 1
        services.append(service)
    return services


def without_graphs(start) -> list[Service]:
    """And with them, the same batches."""
    services = [start(graphs=False), start(graphs=True)]
    for service in services:
        service.run(*ASKS)
    assert [len(service.engine.device.graphs) > 0 for service in services] == [False, True]
    return services


SITUATIONS = (together, beside_others, one_after_the_other, warm, chunked, preempted, forked)
SITUATIONS += (overlapping, with_drafts)
ON_A_CPU = (with_threads, beside_another_engine)
ON_A_GPU = (without_graphs,)


SITUATED = [
    (name, kind, situation)
    for name, kind in CASES
    for situation in SITUATIONS + (ON_A_GPU if kind in GPU_DTYPES else ON_A_CPU)
]


@each(SITUATED, QUICK)
@pytest.mark.quick(
    "twins-none-*", "*-with_threads", "*-overlapping", "*-warm", "*-preempted", "*-gpu-*"
)
def test_a_request_gets_the_same_bits(name, kind, situation):
    """
    Would catch: a sum whose order depends on the size of a batch, a thread's share, or where a
    chunk or a task begins; K and V in the cache that are not those computed again; candidates that
    depend on how many a neighbour asks for. On a GPU also: tiles, splits and kernels that
    follow the number of rows, a padded shape, or what a graph has captured.
    """
    expected = alone(name, kind)
    for service in situation(partial(start, name, kind)):
        assert differences(service, expected) == []


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.parametrize(
    ("name", "situation"),
    [
        *product(["twins"], [together, warm, chunked, preempted, overlapping, with_drafts]),
        (SMALL, preempted),
    ],
)
def test_a_request_gets_the_same_bits_in_the_interpreter(name, situation, monkeypatch):
    """Would catch, without a GPU: what follows the order of tiles, masks and splits."""
    multiply_in_order(monkeypatch)
    test_a_request_gets_the_same_bits(name, "interpreted", situation)


@each_model
def test_a_second_turn_gets_the_same_bits_cold_and_warm(name, kind):
    """
    Of a chat: its prompt is the first one and the answer. Would catch: K and V of a decode that are
    not those of the same token in a prompt, whose kernels have other tiles on a GPU.
    """
    firsts = alone(name, kind)
    requests = []
    for asked in ("greedy", "sampled", "nucleus", "min-p", "penalised", "filtered"):
        request = message(asked, model_of(name).config.vocab_size)
        answer = [token for output in firsts[asked] for token in output.tokens]
        requests.append(request | {"prompt": request["prompt"] + answer + [5]})
    cold = start(name, kind, max_num_seqs=1, prefix_cache=False, graphs=False)
    warm = start(name, kind)
    warm.run(*(request["id"] for request in requests))
    warm.answers.clear()
    hits = warm.scheduler.num_hit_tokens
    for request in requests:
        cold.send(request)
        warm.send(request)
    cold.run()
    warm.run()
    # all whole blocks before the last token of each answer, which no step has computed
    whole = sum((len(request["prompt"]) - 2) // 4 * 4 for request in requests)
    assert warm.scheduler.num_hit_tokens - hits == whole
    assert cold.answers.keys() == warm.answers.keys()
    assert repr(dict(cold.answers)) == repr(dict(warm.answers))


ON_GPU = [*product(OWN, GPU_DTYPES), ("gemma2", "gpu-bf16")]


@each([*product(OWN + FAMILIES, (*FORMATS, HOSTILE)), *ON_GPU], quick=ON_GPU)
def test_a_request_gets_the_same_bits_in_random_lives(name, kind):
    """All situations at once, as they come. Without graphs: they are captured for each size."""
    counts = Counter()
    for seed in range(8):
        rng = random.Random(seed)
        block_size = rng.choice([4, 16])
        expected = alone(name, kind, block_size)
        rows = rng.choice([1, 3, 8, 20])
        sizes = {"max_num_seqs": rows, "token_budget": rng.choice([rows, rows + 5, 64])}
        sizes |= {"block_size": block_size, "num_blocks": rng.choice([56, 100, 960]) // block_size}
        sizes["watermark"] = rng.choice([0, 0.01])
        sizes |= {"overlap": rng.random() < 0.5, "prefix_cache": rng.random() < 0.8}
        service = start(name, kind, threads=rng.choice([1, 1, 2, 3]), graphs=False, **sizes)
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
        assert differences(service, expected) == [], f"seed {seed}: {sizes}"
        counts["aborts"] += len(of_neighbours[::2])
        counts["several chunks"] += max(service.chunks.values()) > 3
        for counter in ("num_hit_tokens", "num_preemptions", "num_forks", "num_copies"):
            counts[counter] += getattr(service.scheduler, counter)
    assert len(counts) == 6 and min(counts.values()) >= 5, counts


WORTH = [case for case in QUICK if case[1] not in GPU_DTYPES] + [*product(OWN, GPU_DTYPES)]


@each(WORTH, quick=WORTH)
def test_the_answers_are_worth_comparing(name, kind):
    """
    Would catch: comparisons that cannot fail, for there is nothing in the answers. Without
    --deterministic those of a GPU do differ.
    """
    service = start(name, kind)
    service.run(*ASKS)
    answers = alone(name, kind)
    texts = {str([output.tokens for output in answer]) for answer in answers.values()}
    assert len(texts) >= 11
    assert len(answers["min-p"][8].logprobs[1]) == 20
    assert len(answers["scored"][0].prompt_logprobs) == 34
    score = service.answers["8:three.1"][3].logprobs
    score[0] = torch.tensor(score[0]).nextafter(torch.tensor(-1e9)).item()
    assert differences(service, answers) == ["8:three.1"]
    if kind in GPU_DTYPES:
        service = start(name, kind, deterministic=False)
        service.run(*ASKS)
        assert differences(service, answers)


# --------------------------------------------------------------------------------------------------
# What torch computes of the logits


@pytest.mark.parametrize("V", [31, 997, 32_769, 50_257])
def test_a_row_of_logits_is_judged_by_itself(V):
    """
    Would catch: a sum that torch's threads share where there is one row (logsumexp does, above
    32,768); a function that has other last bits at the end of a vector; other candidates of a tie
    for who asks for more of them.
    """
    generator = torch.Generator().manual_seed(V)
    logits = torch.randn(5, V, generator=generator).round(decimals=2) - math.log(V)
    logits[:, 0] = 0.0  # no digit of its log-probability, about -1, is lost in a subtraction
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
