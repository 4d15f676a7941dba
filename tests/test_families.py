"""
Compare every model family with transformers: the same directory and the same text must give the
same log-probabilities.

Equal tokens would prove little: they stay the same even with a wrong epsilon, without Gemma's final
soft cap, or with the other GELU. So these tests compare log-probabilities in fp32, to within 1e-4.
The models are tiny and random (see tiny_models.py). The first test checks that each of their
features affects the log-probabilities.
"""

import json
from copy import deepcopy
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

pytest.importorskip("transformers")

import tiny_models
import transformers
from judging import TOLERANCE, Judge, dense, distance, log_probabilities, report
from tiny_models import FAMILIES, VOCABULARY, WITHOUT, make, text

import kernels
from checkpoint import CheckpointError, load_checkpoint
from examples import flex_attention
from model import TORCH_OPS

TEXT = text(1, 75)
ENGINE = {"block_size": 4, "num_blocks": 48, "max_num_seqs": 6, "token_budget": 24}


@pytest.fixture(scope="module", autouse=True)
def ties_are_few():
    yield
    report()


def save(hf_model, directory: Path) -> Path:
    hf_model.save_pretrained(directory)
    return directory


@cache
def pair(family: str, **changes):
    """Return transformers' model, and ours loaded from the directory that it saved."""
    hf_model = make(family, **changes)
    with TemporaryDirectory() as directory:
        return hf_model, load_checkpoint(save(hf_model, Path(directory)))


def assert_same(ours, hf_model, tokens=TEXT):
    """Assert that our model, without a cache, gives the same log-probabilities as transformers'."""
    assert distance(dense(ours, tokens), log_probabilities(hf_model, tokens)) <= TOLERANCE


def opened(directory: Path, dtype=torch.float32, **how):
    """Return the model that transformers loads from a directory."""
    how |= {"attn_implementation": "eager", "dtype": dtype}
    return transformers.AutoModelForCausalLM.from_pretrained(directory, **how)


# --------------------------------------------------------------------------------------------------
# Whole texts


@pytest.mark.parametrize("row", WITHOUT.strip().splitlines())
def test_every_feature_is_felt(row):
    """Would catch: a feature that has no effect, so that the tests below could not fail."""
    family, _, changes = row.partition(" ")
    hf_model, _ = pair(family)
    other = tiny_models.changed(hf_model, family, **json.loads(changes))
    assert distance(log_probabilities(other, TEXT), scores(family)) > 10 * TOLERANCE


@cache
def scores(family: str) -> torch.Tensor:
    return log_probabilities(pair(family)[0], TEXT)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_directory_opens(family, tmp_path):
    """A directory opens as transformers saves it, in one file or in shards with an index."""
    hf_model = make(family)
    assert_same(load_checkpoint(save(hf_model, tmp_path)), hf_model)
    hf_model.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert_same(load_checkpoint(tmp_path / "shards"), hf_model)


# --------------------------------------------------------------------------------------------------
# Directories


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["gpt2", "qwen3", "gemma3"])
def test_directories_in_16_bits(family, dtype, tmp_path):
    """In fp32, their log-probabilities match. Gemma's 1 + w must not be rounded to 16 bits."""
    save(make(family).to(dtype), tmp_path)
    assert_same(load_checkpoint(tmp_path), opened(tmp_path))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3", "olmo3", "hunyuan"])
def test_computed_in_bf16(family, tmp_path):
    """
    The error is at most twice transformers' own. Norm weights keep their precision. Gemma's
    embeddings are scaled by a factor that has been rounded first, as in training.
    """
    save(make(family).to(torch.bfloat16), tmp_path)
    hf_model = opened(tmp_path, torch.bfloat16)
    ours = load_checkpoint(tmp_path, dtype=torch.bfloat16)
    tokens = torch.tensor([TEXT])
    embedded = []

    def embed(*args):
        embedded.append(TORCH_OPS.embed(*args))
        return embedded[0]

    ours(tokens, ops=TORCH_OPS._replace(embed=embed))
    assert distance(embedded[0], hf_model.model.embed_tokens(tokens)) == 0
    if family.startswith("gemma"):
        assert distance(ours.ln_f.weight, hf_model.model.norm.weight.float() + 1) == 0
    exact = log_probabilities(opened(tmp_path), TEXT)
    error = (dense(ours, TEXT) - exact).norm()
    assert error <= 2 * (log_probabilities(hf_model, TEXT) - exact).norm()


def test_a_text_part(tmp_path):
    """Gemma 3's larger models nest the language model's configuration."""
    hf_model, _ = pair("gemma3")
    path = save(hf_model, tmp_path) / "config.json"
    path.write_text(f'{{"model_type": "gemma3", "text_config": {path.read_text()}}}')
    assert_same(load_checkpoint(tmp_path), hf_model)


@pytest.mark.parametrize(
    "activation", [name for name in transformers.activations.ACT2FN if "elu" in name]
)
def test_activations_of_gpt2(activation, tmp_path):
    """An activation is either computed or refused by name, and never replaced by another one."""
    same = {"gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu"}
    hf_model = make("gpt2", activation_function=activation)
    save(hf_model, tmp_path)
    try:
        ours = load_checkpoint(tmp_path)
    except CheckpointError as error:
        assert activation not in same
        assert repr(activation) in str(error)
    else:
        assert_same(ours, hf_model)


# --------------------------------------------------------------------------------------------------
# The engine


def soon(*families: str) -> list:
    """Return all families as parameters: these run in `make test`, all run in `make test-all`."""
    return [f if f in families else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES]


def serve_all_ways(judge: Judge):
    """
    Serve chunks together with decodes, prefix hits, forks, and more requests than the pool has room
    for. Most texts are longer than a window.
    """
    whole = text(2, 60)
    for i in range(3):
        judge.ask(whole[: 26 + i] + text(i, 5 + 9 * i), 14)
    judge.ask(text(9, 50), 6, prompt_logprobs=VOCABULARY)  # compares the whole prompt
    judge.ask(text(10, 33), 9, n=2, temperature=1.0)
    judge.finish()
    judge.ask(whole[:41], 3)  # hits blocks that earlier requests left in the cache
    judge.ask([7], 26)
    judge.finish()
    judge.ask([*whole[:40], 7, 7], 3)  # a hit with no other request in between
    judge.finish()


@pytest.mark.parametrize("attention", ["auto", pytest.param("torch", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
def test_served(family, attention):
    hf_model, ours = pair(family)
    if torch.cuda.is_available():
        ours = deepcopy(ours).cuda()
    judge = Judge(hf_model, ours, **ENGINE, attention=attention)
    serve_all_ways(judge)
    counts = judge.engine.counts()
    assert counts["hit tokens"] >= 40
    assert counts["preemptions"] > 0 or all(ours.config.windows)


@pytest.mark.parametrize("family", soon("gemma2"))
def test_served_by_flex_attention(family):
    """The example's operators handle each layer's window and soft cap, and shared KV heads."""
    judge = Judge(*pair(family), **ENGINE, attention="torch")
    device = judge.engine.device
    device.ops = device.ops._replace(
        plan_attention=flex_attention.plan_attention, attend=flex_attention.attend
    )
    device.pool.kv.fill_(1e4)  # not NaN, as masked values are computed, too
    serve_all_ways(judge)


@pytest.mark.skipif(not kernels.triton, reason="needs triton")
@pytest.mark.parametrize("family", soon("gemma3", "olmo2"))
def test_served_by_triton(family):
    """
    On a CPU, Triton's interpreter runs two layers, one of each type, on a text just longer than a
    window.
    """
    hf_model, ours = pair(family, **tiny_models.two_layers(family, window=6))
    if torch.cuda.is_available():
        ours = deepcopy(ours).cuda()
    judge = Judge(hf_model, ours, **ENGINE, attention="triton")
    judge.ask(text(2, 10), 2, prompt_logprobs=5)
    judge.finish()
    judge.ask(text(2, 11), 1)
    judge.finish()
    assert judge.engine.counts()["hit tokens"] == 8


# --------------------------------------------------------------------------------------------------
# Long texts

LONG = {"block_size": 16, "num_blocks": 2 * 127, "token_budget": 512}


@pytest.mark.parametrize("family", soon("llama-llama3"))
def test_prompts_of_2000_tokens(family):
    """
    These prompts are far longer than a window, and long enough for scaled positions. They are
    computed in chunks, and then from the prefix cache.
    """
    judge = Judge(*pair(family), **LONG)
    prompt = text(11, 2000)
    judge.ask(prompt, 16)
    judge.finish()
    judge.ask(prompt[:1990] + text(12, 21), 5)
    judge.finish()
    assert judge.engine.counts()["hit tokens"] >= 1900
