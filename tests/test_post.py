"""
examples/post.py: the post's loop answers like the engine, and each of its functions does what the
post says.
"""

import subprocess
import sys
from functools import cache
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from checkpoint import save_checkpoint
from examples import post
from model import GPT, GPTConfig, Rope
from paged import BlockAllocator, KVBlockPool, Request
from params import GREEDY
from test_paged import assert_equals_dense, prompt, raises, trained_model
from training.corpus import bpe_tokenizer

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def poisoned_pools(monkeypatch):
    """Fill every slot with NaN, so that reading an unwritten one shows."""

    def make_pool(*sizes):
        pool = KVBlockPool(*sizes)
        pool.kv.fill_(torch.nan)
        return pool

    monkeypatch.setattr(post, "KVBlockPool", make_pool)


@cache
def rotary_model() -> GPT:
    torch.manual_seed(0)
    model = GPT(GPTConfig(64, 64, n_layer=2, n_head=2, n_embd=32, rope={0: Rope(1e4)})).eval()
    for weight in model.requires_grad_(False).parameters():
        weight *= 20 if weight.dim() == 2 else 1  # otherwise attention would hardly change a token
    return model


@pytest.mark.parametrize(
    ("model", "budget", "max_kv_tokens"),
    [(trained_model, 16, 256), (trained_model, 5, 256), (rotary_model, 16, 44)],
)
def test_its_greedy_answers_are_the_engines(model, budget, max_kv_tokens, monkeypatch):
    """
    Would catch: a wrong slot, mask, position, chunk, hit or resumption. In a rectangle each row has
    its own positions.
    """
    load = Mock(side_effect=post.load_cached_blocks)
    monkeypatch.setattr(post, "load_cached_blocks", load)
    first = prompt(1, 30)
    requests = []
    for i in range(9):  # of many lengths; every second one begins like the first
        length = 5 + 7 * i % 23
        tokens = first[:length] if i % 2 else prompt(90 + i, length)
        requests.append(Request(i, tokens, 12, arrival_time=i))
    scheduler = post.interleaved_generate(model(), requests, "fcfs", budget, max_kv_tokens, 0.0)
    for r in requests:
        assert r.num_generated == 12
        assert_equals_dense(model(), r.prompt_tokens, r.generated_tokens, GREEDY)
    assert any(call.args[1] for call in load.mock_calls), "blocks were loaded"
    assert (scheduler.num_preemptions > 0) == (max_kv_tokens == 44)
    scheduler.check()
    assert scheduler.block_allocator.num_free == scheduler.block_allocator.num_blocks


def test_it_samples_as_the_post_does(monkeypatch):
    """It uses softmax and multinomial, by default at temperature 1; 0.5 is sharper."""
    drawn = []

    def likeliest(probs, num_samples):
        drawn.append(probs[0])
        return probs.argmax(-1, keepdim=True)

    monkeypatch.setattr(torch, "multinomial", likeliest)
    model = trained_model()
    tokens = prompt(5, 9)
    logits, _ = model(torch.tensor([tokens]))
    last = logits[0, -1]
    post.interleaved_generate(model, [Request(0, tokens, 1)], temperature=0.5)
    post.interleaved_generate(model, [Request(0, tokens, 1)])
    torch.testing.assert_close(drawn, [(2 * last).softmax(-1), last.softmax(-1)])


@pytest.mark.parametrize(
    ("filled", "new", "blocks"), [(3, 1, 1), (4, 1, 2), (3, 6, 3), (4, 8, 3), (2, 0, 1)]
)
def test_ensure_blocks_for_new_tokens(filled, new, blocks):
    """Would catch: a block too many or too few at block boundaries."""
    allocator = BlockAllocator(3)
    table = allocator.allocate_n(-(-filled // 4))
    request = Request("r", [1], 9, block_table=table, num_filled_slots=filled)
    post.ensure_blocks_for_new_tokens(request, new, allocator, 4)
    assert len(request.block_table) == blocks
    with raises(RuntimeError, "wanted 1", "of 3"):
        post.ensure_blocks_for_new_tokens(request, 13, allocator, 4)


def test_a_model_with_windows_is_refused():
    model = GPT(GPTConfig(16, 32, n_layer=2, n_head=1, n_embd=8, windows=(8, 0)))
    with raises(ValueError, "no sliding windows", "serve.py"):
        post.interleaved_generate(model, [Request(0, [1], 2)])


def test_the_command(tmp_path, monkeypatch, capsys):
    """It is run from another folder without a model, and with a model."""
    command = [sys.executable, str(ROOT / "examples/post.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.startswith("there is no directory out/stdlib")
    save_checkpoint(GPT(GPTConfig(257, 64, n_layer=1, n_head=1, n_embd=8)), tmp_path)
    bpe_tokenizer([]).save(tmp_path)
    monkeypatch.setattr(sys, "argv", ["post.py", "--model", str(tmp_path), "--prompt", "a"])
    post.main()
    assert capsys.readouterr().out.count("\n") == 3
