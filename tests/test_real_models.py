"""
Two real models compared with transformers, in fp32: SmolLM2-135M-Instruct and Gemma 3 270M, which
real_models.py makes from packages, once per user of a machine.

    pytest -m real_models       # `make test` leaves them out, `make test-all` does not

They cover real text, which tiny random models never produce: long runs of certain tokens, chat
templates, windows of 512 tokens, heads of 256 numbers, a vocabulary of 262,144.
"""

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

import real_models
import transformers
from judging import Judge, dense, distance, log_probabilities, report

from checkpoint import load_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.real_models]

PROMPTS = [
    "What is the capital of France?",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at 100 degrees Celsius because",
    "SELECT name, COUNT(*) FROM orders WHERE",
    "Die Hauptstadt von Italien heißt",
    "1, 1, 2, 3, 5, 8, 13, 21, 34,",
    "Dear Sir or Madam,\n\nI am writing to complain about",
    "日本の首都は",
    "Q: What is 17 + 25?\nA:",
    "<html>\n<head>\n<title>",
    "   \n\n🙂 she said, and",
]
# For unlikely tokens, after the Japanese prompt, transformers' own two attentions, eager and sdpa,
# differ by 1.6e-4, and eager and fp64 by 2.1e-4 (SmolLM2). Chosen tokens differ by 3e-5.
UNLIKELY = 1e-3
README = Path(__file__).parents[1] / "README.md"


class Real:
    """A model, in transformers and here, and its tokenizer."""

    def __init__(self, name: str):
        self.directory = real_models.make(name)
        how = {"attn_implementation": "eager", "dtype": torch.float32}
        self.hf_model = transformers.AutoModelForCausalLM.from_pretrained(self.directory, **how)
        self.ours = load_checkpoint(self.directory)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(self.directory)

    def encode(self, text: str) -> list[int]:
        if self.tokenizer.chat_template:
            message = {"role": "user", "content": text}
            how = {"add_generation_prompt": True, "return_dict": False}
            return self.tokenizer.apply_chat_template([message], **how)
        return self.tokenizer(text)["input_ids"]


@pytest.fixture(scope="module", params=real_models.SOURCES)
def real(request):
    yield Real(request.param)
    report()


def test_twelve_prompts(real):
    """
    Each gets 48 greedy tokens, all together in the engine; then the same texts without a cache.
    """
    judge = Judge(real.hf_model, real.ours, UNLIKELY, num_blocks=200, max_num_seqs=12)
    prompts = [real.encode(prompt) for prompt in PROMPTS]
    for prompt in prompts:
        judge.ask(prompt, 48)
    answers = judge.finish()
    assert "Paris" in real.tokenizer.decode(answers[0])
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = prompt + answer
        scored = log_probabilities(real.hf_model, tokens, 49)
        assert distance(dense(real.ours, tokens)[-49:], scored) <= UNLIKELY


def test_a_long_prompt(real):
    """It has more than 2,000 tokens, in chunks: four of Gemma's windows."""
    judge = Judge(real.hf_model, real.ours, UNLIKELY, num_blocks=140)
    tokens = real.encode(README.read_text())[:2100]
    judge.ask(tokens, 16)
    judge.finish()
