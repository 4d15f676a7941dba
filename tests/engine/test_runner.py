"""
The device's side of a step. Whether a step is padded, replayed or computed by other kernels, the
answers must equal those of each request alone in plain torch, which test_paged.py and
test_families.py prove right.

The requests and situations are those of test_bits.py. They run in plain torch with the padding of a
GPU, with replayed graphs, in Triton's interpreter and, if there is one, on a GPU. The simulator
covers failing steps, counts and the order of service.
"""

from copy import deepcopy
from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from test_bits import Service, alone, in_random_lives, name_of, needs_gpu, preempted

import kernels
from engine import device as device_module
from engine.device import Device, PackedPlan, padded_shapes
from engine.engine import Engine, Output
from model import GPT, GPTConfig
from ops import gather, prefix
from ops.inputs import StepShape, upload
from paged import Plan, Request
from params import GREEDY
from test_paged import CONTEXT, VOCABULARY, new_engine, prompt, trained_model

# --------------------------------------------------------------------------------------------------
# A GPU's padding and graphs, on a CPU


def plan_from_device(batch: kernels.Batch, H: int, kv: torch.Tensor, window: int = 0):
    """
    Do the same as `plan_attention_torch`, for a replayed step: the host's lists are those of the
    captured step, so read the lengths from the device.
    """
    batch.context_lens_host = batch.context_lens.tolist()
    batch.query_lens_host = batch.query_start.diff().tolist()
    return gather.plan_attention_torch(batch, H, kv, window)


class Replay:
    """
    Stands in for a CUDA graph: runs the same step again, from the same inputs into the same
    outputs.
    """

    def __init__(self, device: Device, shape: StepShape):
        self.device = device
        packed = upload(device.padding(shape), device.device, out=device.static_inputs)
        self.step = partial(device.compute, packed, shape)
        # only scored prompts need the hidden states, which kernels may return as a `LazyNorm`
        self.outputs = [x.clone() if torch.is_tensor(x) else x for x in self.step()]

    def replay(self):
        for output, new in zip(self.outputs, self.step(), strict=True):
            if torch.is_tensor(output):
                output.copy_(new)
        self.device.sent = iter([self.outputs[0].clone()])


def pad(engine: Engine):
    """Make the engine pad its steps as on a GPU."""
    device, scheduler = engine.device, engine.scheduler
    device.ops = device.ops._replace(fixed_shapes=True)
    device.shapes = padded_shapes(scheduler.max_num_seqs, scheduler.token_budget)
    if device.finder:
        device.shapes_with_groups = device.finder.shapes(scheduler.max_num_seqs)
    device.program = None
    device.run = device.run_batch


@torch.inference_mode()
def capture(engine: Engine):
    """Make the engine pad its steps, and replay them like graphs."""
    pad(engine)
    device = engine.device
    if device.ops.name != "triton":
        device.ops = device.ops._replace(plan_attention=plan_from_device)
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


def numbers(outputs: list[Output]) -> list:
    """Return what a client is sent: all tokens and their scores."""
    numbers = []
    for output in outputs:
        numbers += [*output.tokens, output.finish_reason]
        for score in (output.logprobs, *(output.prompt_logprobs or ())):
            logprob, _, best = score or (None, [], [])
            numbers += [logprob, *best]
    return numbers


def assert_near(service: Service, expected: dict[str, list[Output]]):
    """
    Check the answers with a tolerance: here the last digits differ, and equally likely candidates
    may swap.
    """
    for id, outputs in service.answers.items():
        if name_of(id) in expected:
            right = numbers(expected[name_of(id)])
            assert numbers(outputs) == pytest.approx(right, abs=1e-3), id


needs_interpreter = pytest.mark.skipif(
    not kernels.INTERPRETED,
    reason="needs Triton's interpreter: where there is a GPU, the same runs on it",
)


def start(how, threads=1, graphs=True, **settings) -> Service:
    """
    Start on a GPU in fp32, with graphs or launches, or on a CPU prepared to behave the same way.
    """
    settings = {"num_blocks": 160, "max_num_seqs": 16, "token_budget": 256} | settings
    if how in ("graphs", "launches"):
        model = deepcopy(trained_model()).cuda()
        engine = new_engine(model, graphs=how == "graphs", **settings)
        assert bool(engine.device.graphs) == (how == "graphs")
    else:
        engine = new_engine(trained_model(), attention="torch", **settings)
        how(engine)
    return Service(engine)


HOW = [pytest.param(ready, marks=needs_interpreter) for ready in (pad, capture)]
HOW += [pytest.param(name, marks=needs_gpu) for name in ("graphs", "launches")]


@pytest.mark.parametrize("situation", [preempted, in_random_lives])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.quick("capture-preempted", "graphs-*", "launches-*")
def test_answers_are_those_of_each_request_alone_in_plain_torch(how, situation):
    """
    Would catch: a padding row that a request owns; a replay of the previous step's inputs; a row
    that keeps the state of its last owner; scores of a neighbour; a copy that comes too late. The
    example of `pack` (ops/inputs.py), itself tested, shows that no chunk samples too early.
    """
    for service in situation(partial(start, how)):
        assert_near(service, alone("trained", "torch", service.scheduler.block_size))


@needs_interpreter
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_choices_that_share_their_prompt_are_those_of_plain_torch(monkeypatch):
    """
    Run the whole of a GPU's step in the interpreter: chunks, decodes, both, and their padding. Each
    choice differs from the others from its first token on. Prefixes of one tile, here 16 tokens,
    are read once for two or more choices, but not for the other request, nor while it is prefilled.

    Would catch: a kernel that is right on its own, but not with what its neighbours pass to it; a
    choice that continues from another's prefix, or from one that it no longer shares; in graphs,
    the groups of the previous step.
    """
    for name, value in {"TILE": 16, "MERGED_AT_ONCE": 1}.items():  # interpreted sooner
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
    params = {"max_tokens": 3, "seed": 5, "logprobs": 2, "temperature": 2.0}
    other = {"max_tokens": 7, "top_p": 0.9, "min_p": 0.02, "presence_penalty": 1.0}
    choices = {"id": "choices", "prompt": prompt(0, 35), "params": params, "options": {"n": 3}}
    other = {"id": "other", "prompt": prompt(1, 2), "params": params | other}

    def serve(engine: Engine) -> Service:
        service = Service(engine)
        service.send(other | {"options": {"prompt_logprobs": 1}})
        service.send(choices)
        service.run()
        return service

    plain = serve(new_engine(model, attention="torch", **sizes))
    engine = new_engine(model, attention="triton", **sizes)
    capture(engine)
    find_groups, steps = engine.device.finder.find, []

    def noted(requests):
        steps.append(find_groups(requests))
        return steps[-1]

    monkeypatch.setattr(engine.device.finder, "find", noted)
    assert_near(serve(engine), {name_of(id): answer for id, answer in plain.answers.items()})
    assert len({str(answer[0].tokens) for answer in plain.answers.values()}) == 4
    shared = [groups.shared for groups in steps if groups]
    assert [0, 32, 32, 32] in shared
    assert None in steps  # where the other one is alone


@needs_interpreter
def test_a_replay_of_the_same_inputs_uploads_nothing(monkeypatch):
    """
    While the same requests decode in their current blocks, the device already knows everything. An
    upload per step would take a third of a small model's step. A new block or a finished request is
    uploaded.
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
    # admission; both decode; the first has ended; the second begins a block
    assert sorted({step for step in uploads if step > 1}) == [2, 10, 14]


def test_after_ctrl_c_tokens_are_read_from_the_row_that_comes_next():
    """
    Otherwise, after Ctrl-C between a graph and the host's update of `turn`, every later request
    would get another request's token.
    """
    engine = new_engine(trained_model())
    device = engine.device
    device.ring = torch.arange(4).view(4, 1)
    device.num_sent = torch.tensor([6])
    engine.runner.launch = Mock(side_effect=KeyboardInterrupt)
    engine.add_request("a", prompt(0, 4), GREEDY)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert [next(device.sent).item() for _ in range(3)] == [2, 3, 0]


# --------------------------------------------------------------------------------------------------
# The sizes to which a step is padded


def test_the_sizes_that_steps_are_padded_to():
    """
    Would catch: a missing largest size, so that no graph is captured for a full batch; a size that
    no batch can reach; a budget without its own key.
    """
    sizes = [StepShape(n, 0, 0) for n in (1, 2, 4, 8, 16, 20)]
    for T in 128, 256, 300:
        sizes += [StepShape(8, 8, T), StepShape(20, 8, T)]
    assert padded_shapes(20, 300) == sizes
    assert padded_shapes(1, 128) == [StepShape(1, 0, 0), StepShape(1, 8, 128)]
    shapes = padded_shapes(256, 8192)
    assert len(shapes) == 35 + 7 * 5
    assert shapes[-1] == StepShape(256, 128, 8192)
    # the shapes with shared prefixes: nine more graphs
    shapes = prefix.GroupFinder(1, 16).shapes(256)
    sizes = (16, 32, 64, 96, 128, 160, 192, 224, 256)
    assert shapes == [StepShape(n, 0, 0, n // 8) for n in sizes]
    assert prefix.GroupFinder(16, 16).shapes(20) == [StepShape(16, 0, 0, 4), StepShape(20, 0, 0, 5)]
    assert prefix.GroupFinder(1, 16).shapes(15) == []


# decodes, then the tokens of each chunk -> decodes, chunks, and the chunks' tokens in total
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
    If there are too many chunks for any key, only decodes are padded. Would catch: a step cut to a
    size below its own; a step padded to thousands of tokens where a hundred would do; decodes
    padded to a key with chunks.
    """
    runner = new_engine(trained_model(), num_blocks=8).runner
    request = Request(0, [1], 5)
    assert runner.padded_shape(Plan(decodes=[request])) == StepShape(1, 0, 0)
    plan = Plan(decodes=[request] * 3, chunks=[(request, 5)])
    assert runner.padded_shape(plan) == StepShape(3, 1, 5)
    # decodes: 1, 2, 4, 8, 16, 24, 32, 40; with chunks: 8, 32, 40
    runner.device.shapes = padded_shapes(40, 1000)
    for line in PADDED.strip().splitlines():
        step, shape = line.split("->")
        n, *chunks = map(int, step.split())
        plan = Plan(decodes=[request] * n, chunks=[(request, T) for T in chunks])
        assert runner.padded_shape(plan) == StepShape(*map(int, shape.split())), line
