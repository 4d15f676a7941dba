"""
The device's side of a step: padded, replayed or computed by other kernels, the answers are the
dense model's.

A `Scenario` lets requests of every kind come and hang up while others run, and judges each token,
score and log-probability that the engine gives out by the dense model's logits of the same text
(oracle.py). The same events run in plain torch, with the padding of a GPU, with graphs that are
replayed, in Triton's interpreter and, where there is one, on a GPU. Failing steps, counts and the
order of service are the simulator's.
"""

import random
from collections import Counter, defaultdict
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import product
from unittest.mock import Mock

import oracle
import pytest
import torch

import kernels
from engine import device as device_module
from engine.device import Device, PackedPlan, padded_shapes
from engine.engine import Engine, Output
from engine.step import Answer
from model import GPT, GPTConfig
from ops import gather, prefix
from ops.inputs import StepShape, upload
from paged import Plan, Request
from params import GREEDY, SamplingParams
from test_paged import CONTEXT, VOCABULARY, assert_idle, new_engine, prompt, trained_model

# --------------------------------------------------------------------------------------------------
# A GPU's padding and graphs, on a CPU


def prepare_from_device(batch: kernels.Batch, H: int, kv: torch.Tensor, window: int = 0):
    """
    As `prepare_torch`, for a replayed step: what the host's lists say was true when the step was
    captured.
    """
    batch.context_lens_host = batch.context_lens.tolist()
    batch.query_lens_host = batch.query_start.diff().tolist()
    return gather.prepare_torch(batch, H, kv, window)


class Replay:
    """
    In the place of a CUDA graph: the same step again, from the same inputs into the same outputs.
    """

    def __init__(self, device: Device, shape: StepShape):
        self.device = device
        packed = upload(device.padding(shape), device.device, to=device.static_inputs)
        self.step = partial(device.compute, packed, shape)
        # the hidden states, which the kernels may give out as a `LazyNorm`, are for scored prompts
        self.outputs = [x.clone() if torch.is_tensor(x) else x for x in self.step()]

    def replay(self):
        for output, new in zip(self.outputs, self.step(), strict=True):
            if torch.is_tensor(output):
                output.copy_(new)
        self.device.sent = iter([self.outputs[0].clone()])


def pad(engine: Engine):
    """Let the engine pad its steps as on a GPU."""
    device, scheduler = engine.device, engine.scheduler
    device.ops = device.ops._replace(fixed_shapes=True)
    device.shapes = padded_shapes(scheduler.max_num_seqs, scheduler.token_budget)
    if device.finder:
        device.shapes_with_groups = device.finder.shapes(scheduler.max_num_seqs)
    device.program = None
    device.run = device.run_batch


@torch.inference_mode()
def capture(engine: Engine):
    """And replay them."""
    pad(engine)
    device = engine.device
    if device.ops.name != "triton":
        device.ops = device.ops._replace(prepare=prepare_from_device)
    device.static_inputs = torch.full((10_000,), device.padding_row, device=device.device)
    for shape in device.shapes + device.shapes_with_groups:
        graph = Replay(device, shape)
        device.graphs[shape] = graph, *graph.outputs

    def replay_and_copy(packed: PackedPlan):
        flight = device.replay(packed)
        flight.tokens = flight.tokens.clone()  # a GPU copies them before the next replay
        return flight

    device.run = replay_and_copy


# --------------------------------------------------------------------------------------------------
# Requests that come and go


def random_params(rng: random.Random) -> SamplingParams:
    params = oracle.random_params(rng, VOCABULARY, [3])
    stops = rng.sample(range(VOCABULARY), rng.choice([0, 0, 2]))
    max_tokens = max(rng.randint(1, 16), params.min_tokens)
    own = {"max_tokens": max_tokens, "stop_token_ids": stops, "seed": rng.getrandbits(64) - 2**63}
    own["repetition_penalty"] = rng.choice([1.0, 0.7, 1.4])
    own["logprobs"] = rng.choice([None, None, 0, 1, 5])
    return replace(params, **own)


class Scenario:
    """
    Random requests and aborts, as `seed` says: `run` takes `steps` steps and then waits for the
    last answer.
    """

    def __init__(self, engine: Engine, seed: int, dense=None):
        self.engine = engine
        self.rng = random.Random(seed)
        self.dense = dense or engine.reference
        self.waiting: dict[str, Answer] = {}  # choices whose answers have not ended
        self.outputs = defaultdict(list)  # of each
        self.counts = Counter()

    def run(self, steps: int):
        engine = self.engine
        ties = oracle.counts["ties"]
        for _ in range(steps):
            while self.rng.random() < 0.3 and len(engine.requests) < 14:
                self.arrive()
            if engine.requests and self.rng.random() < 0.06:
                self.hang_up(self.rng.choice(sorted(engine.requests)))
            self.step()
        limit = engine.num_steps + 2000
        while engine.has_work:
            self.step()
            assert engine.num_steps < limit, f"{list(self.waiting)} never end"
        assert not self.waiting, f"{list(self.waiting)} never ended"
        assert_idle(engine)
        ties = oracle.counts["ties"] - ties
        assert ties <= 0.05 * self.counts["tokens"], f"{ties}: what is compared must be decided"

    def arrive(self):
        rng = self.rng
        text = prompt(rng.randrange(4), rng.choice([1, 4, 7, 8, 16, 21, 37]))
        if rng.random() < 0.5:
            text[-1] = rng.randrange(VOCABULARY)
        options = {"n": rng.choice([1, 1, 1, 2, 3]), "cache_salt": rng.choice(["", "", "salt"])}
        options["prompt_logprobs"] = rng.choice([None, None, 0, 2])
        self.counts["requests"] += 1
        self.add(f"r{self.counts['requests']}", text, random_params(rng), **options)

    def add(self, id: str, text: list[int], params: SamplingParams, **options):
        request = self.engine.add_request(id, text, params, **options)
        for choice in (request, *self.engine.promised.get(id, ())):
            self.waiting[choice.id] = choice

    def hang_up(self, id: str):
        """Of a request that is still to be forked, all choices go."""
        for choice in self.engine.promised.get(id, ()):
            del self.waiting[choice.id]
        del self.waiting[id]
        self.engine.abort(id)
        self.counts["aborts"] += 1

    def step(self):
        for output in self.engine.step():
            assert output.error is None, output.error
            self.outputs[output.id].append(output)
            if output.finish_reason:
                self.judge(self.waiting.pop(output.id), self.outputs[output.id])

    @torch.inference_mode()
    def judge(self, request: Answer, outputs: list[Output]):
        """All that a client was sent, against the dense model's logits of its text."""
        tokens = [token for output in outputs for token in output.tokens]
        text = request.prompt_tokens + tokens
        P = len(request.prompt_tokens)
        device = self.dense.wte.weight.device
        logits = self.dense(torch.tensor([text[:-1]], device=device))[0][0].cpu()
        of_request = {"prompt": request.prompt_tokens, "stops": request.stop_token_ids}
        of_request |= {"choice": request.index, "rounding": 1e-4}
        for at in range(P, len(text)):
            so_far = {"generated": text[P:at], **of_request}
            possible = oracle.possible_tokens(logits[at - 1], request.params, at, **so_far)
            assert text[at] in possible, (
                f"token {at} of {text} of {request.id}: the dense model has {possible}"
            )
        self.counts["tokens"] += len(tokens)
        prompt_scores = [output.prompt_logprobs for output in outputs if output.prompt_logprobs]
        asked = [request.prompt_logprobs] * (P - 1) + [request.params.logprobs] * len(tokens)
        # of a prompt of one token there are none
        own = (prompt_scores or [[None] * (P - 1)])[0] + [output.logprobs for output in outputs]
        for score, n, row, token in zip(own, asked, logits.log_softmax(-1), text[1:], strict=True):
            self.judge_score(score, n, row, token)
        self.counts["scored"] += bool(prompt_scores)

    def judge_score(self, score: list | None, n: int | None, row: torch.Tensor, token: int):
        if n is None:
            assert score is None, "a log-probability that was not asked for"
            return
        logprob, ids, best = score
        assert len(set(ids)) == len(ids) == len(best) == n
        assert logprob == pytest.approx(row[token].item(), abs=1e-3)
        assert best == pytest.approx(row.topk(n).values.tolist(), abs=1e-3)
        assert best == pytest.approx(row[ids].tolist(), abs=1e-3)


needs_interpreter = pytest.mark.skipif(
    not kernels.INTERPRETED,
    reason="needs Triton's interpreter: where there is a GPU, a test below runs the same on it",
)
# small: prompts come in chunks, and choices wait for rows
SIZES = {"max_num_seqs": 6, "token_budget": 16}
FAST = [(None, True, 15), (capture, True, 15), (capture, False, 60)]
ALL = product((None, pad, capture), (False, True), (15, 60))  # in `make test-all`
CASES = [pytest.param(*case, 60) for case in FAST]
CASES += [pytest.param(*case, 1200, marks=pytest.mark.slow) for case in ALL]


@pytest.mark.parametrize(("ready", "overlap", "num_blocks", "steps"), CASES)
def test_the_answers_of_random_requests_are_the_dense_models(ready, overlap, num_blocks, steps):
    """
    Would catch: a row of the padding that a request owns, inputs of the step before replayed, a row
    that keeps state of its last owner, scores of a neighbour, a copy that comes too
    late, a chunk that samples too early.
    """
    attention = "torch" if ready else "auto"  # a program has no room for padding
    model = trained_model()
    engine = new_engine(model, attention=attention, overlap=overlap, num_blocks=num_blocks, **SIZES)
    if ready and not kernels.INTERPRETED:
        pytest.skip("needs Triton's interpreter")
    if ready:
        ready(engine)
    scenario = Scenario(engine, seed=2 + steps + num_blocks + overlap)
    scenario.run(steps)
    scheduler = engine.scheduler
    assert scenario.counts["aborts"]
    assert scenario.counts["scored"]
    assert scheduler.num_hit_tokens
    assert scheduler.num_forks > 0
    assert scheduler.num_preemptions > 0 or num_blocks > 15


@needs_interpreter
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_choices_that_share_their_prompt_are_the_dense_models(monkeypatch):
    """
    The whole of a GPU's step in the interpreter: chunks, decodes, both, and their padding. Would
    catch: a kernel that is right alone, but not with what its neighbours hand it; a choice that
    goes on from another's prefix, or with one that it shares no more; in graphs, the groups of the
    step before. Each choice says something else from its first token on. Prefixes of one tile, here
    of 16 tokens, are shared by twos or more, but not by the other request, nor while it is
    prefilled.
    """
    for name, value in {"TILE": 16, "MERGED_AT_ONCE": 1}.items():  # so it is interpreted sooner
        monkeypatch.setattr(kernels, name, value)
    monkeypatch.setattr(prefix, "LEAST_REQUESTS", 2)
    monkeypatch.setattr(prefix, "LEAST_SPARED", 16)
    sizes = {"n_layer": 1, "n_head": 2, "n_kv_head": 1, "n_embd": 32}
    config = GPTConfig(VOCABULARY, CONTEXT, norm_epsilon=0.01, **sizes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GPT(config).requires_grad_(False).eval()
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=0.4)
    sizes = {"num_blocks": 90, "max_num_seqs": 4, "token_budget": 30}
    engine = new_engine(model, attention="triton", **sizes)
    capture(engine)
    find_groups, steps = engine.device.finder.find, []

    def noted(requests):
        steps.append(find_groups(requests))
        return steps[-1]

    monkeypatch.setattr(engine.device.finder, "find", noted)
    scenario = Scenario(engine, seed=3)
    params = SamplingParams(max_tokens=3, seed=5, logprobs=2, temperature=2.0)
    filters = {"temperature": 1.7, "top_p": 0.9, "min_p": 0.02, "presence_penalty": 1.0}
    other = replace(params, max_tokens=7, **filters)
    scenario.add("other", prompt(1, 2), other, prompt_logprobs=1)
    scenario.add("choices", prompt(0, 35), params, n=3)
    scenario.run(0)
    assert scenario.counts["tokens"] == 7 + 3 * 3
    shared = [groups.shared for groups in steps if groups]
    assert [0, 32, 32, 32] in shared
    assert None in steps  # where the other one is alone


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU: CUDA graphs, and kernels compiled for it"
)
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "launches"])
@pytest.mark.parametrize("num_blocks", [15, 60])
def test_a_gpus_answers_to_random_requests_are_the_dense_models(num_blocks, graphs):
    """In fp32, with what serves there by default: overlap, padding, CUDA graphs, Triton."""
    model = deepcopy(trained_model()).cuda()
    engine = new_engine(model, num_blocks=num_blocks, graphs=graphs, **SIZES)
    Scenario(engine, seed=num_blocks, dense=trained_model()).run(2000)
    assert engine.overlap
    assert bool(engine.device.graphs) == graphs


@needs_interpreter
def test_a_replay_of_the_same_inputs_uploads_nothing(monkeypatch):
    """
    While the same requests decode on in their blocks, the device knows it all: an upload in each
    step is a third of a small model's. A new block, or a request that ends, is uploaded.
    """
    engine = new_engine(
        trained_model(), block_size=16, num_blocks=8, max_num_seqs=2, attention="torch"
    )
    capture(engine)
    uploads = []

    def noted(*args, **kwargs):
        uploads.append(engine.num_steps)
        return upload(*args, **kwargs)

    monkeypatch.setattr(device_module, "upload", noted)
    for id, max_tokens in (("a", 9), ("b", 20)):
        engine.add_request(id, prompt(0, 4), replace(GREEDY, max_tokens=max_tokens))
    while engine.has_work:
        engine.step()
    # admission; both decode on; the first has ended; the second begins a block
    assert sorted({step for step in uploads if step > 1}) == [2, 10, 14]


def test_after_ctrl_c_tokens_are_read_from_the_row_that_comes_next():
    """Ctrl-C between a graph and the host's turn would give every later request another's token."""
    engine = new_engine(trained_model())
    device = engine.device
    device.ring = torch.arange(4).view(4, 1)
    device.turn = torch.tensor([6])
    engine.runner.launch = Mock(side_effect=KeyboardInterrupt)
    engine.add_request("a", prompt(0, 4), GREEDY)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert [next(device.sent).item() for _ in range(3)] == [2, 3, 0]


# --------------------------------------------------------------------------------------------------
# To what a step is padded


def test_the_sizes_that_steps_are_padded_to():
    """
    Would catch: a largest size that is missing, so that a full batch is captured for no graph; one
    that no batch can reach; a budget without a key of its own.
    """
    sizes = [StepShape(n, 0, 0) for n in (1, 2, 4, 8, 16, 20)]
    for T in 128, 256, 300:
        sizes += [StepShape(8, 8, T), StepShape(20, 8, T)]
    assert padded_shapes(20, 300) == sizes
    assert padded_shapes(1, 128) == [StepShape(1, 0, 0), StepShape(1, 8, 128)]
    shapes = padded_shapes(256, 8192)
    assert len(shapes) == 35 + 7 * 5
    assert shapes[-1] == StepShape(256, 128, 8192)
    # those that share prefixes: nine graphs more
    shapes = prefix.GroupFinder(1, 16).shapes(256)
    sizes = (16, 32, 64, 96, 128, 160, 192, 224, 256)
    assert shapes == [StepShape(n, 0, 0, n // 8) for n in sizes]
    assert prefix.GroupFinder(16, 16).shapes(20) == [StepShape(16, 0, 0, 4), StepShape(20, 0, 0, 5)]
    assert prefix.GroupFinder(1, 16).shapes(15) == []


# decodes, then the tokens of each chunk -> decodes, chunks, and their tokens together
PADDED = """
1                 -> 1 0 0
3                 -> 4 0 0
4                 -> 4 0 0
17                -> 24 0 0
40                -> 40 0 0
0 1               -> 8 8 128
8 100 28          -> 8 8 128
8 100 29          -> 8 8 256
9 100 28          -> 32 8 128
33 500 400        -> 40 15 1000
0 1 1 1 1 1 1 1 1 -> 8 8 128
5 1 1 1 1 1 1 1 1 1                      -> 8 15 1000
5 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1        -> 8 16 16
0 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1        -> 0 16 16
9 700 400         -> 16 2 1100
"""


def test_a_step_takes_the_smallest_size_that_holds_it():
    """
    Would catch: a step cut to a size below its own; one padded to thousands of tokens where a
    hundred would do; decodes padded to a key with chunks. Where there are too many chunks for any
    key, decodes are padded alone.
    """
    runner = new_engine(trained_model(), num_blocks=8).runner
    request = Request(0, [1], 5)
    assert runner.padded_shape(Plan(decodes=[request])) == StepShape(1, 0, 0)
    plan = Plan(decodes=[request] * 3, chunks=[(request, 5)])
    assert runner.padded_shape(plan) == StepShape(3, 1, 5)
    # decodes: 1, 2, 4, 8, 16, 24, 32, 40, with chunks 8, 32, 40
    runner.device.shapes = padded_shapes(40, 1000)
    for line in PADDED.strip().splitlines():
        step, shape = line.split("->")
        n, *chunks = map(int, step.split())
        plan = Plan(decodes=[request] * n, chunks=[(request, T) for T in chunks])
        assert runner.padded_shape(plan) == StepShape(*map(int, shape.split())), line
