"""
Runs llama.cpp in its own process, for `bench.py generate` and `bench.py quality`. Run this file
with a Python that has llama_cpp. It does not need torch.

    python assets/llama.py MODEL.gguf THREADS

It answers each line of stdin with a line. Both lines are JSON. [texts, n] requests n greedy tokens
after each of at most 8 texts of equal length, with at most 512 tokens in total. [[text], 0]
requests the log-probability of the text, in nats, given its first token.
"""

import json
import sys
from itertools import chain

import llama_cpp as cpp
import numpy as np


def compute(context, batch, texts: list[list[int]], of_all=False) -> np.ndarray:
    """Return logits [n, V] after each text's last token or, with `of_all`, after every token."""
    T = len(texts[0])
    for i, token in enumerate(chain(*texts)):
        batch.token[i] = token
        batch.n_seq_id[i] = 1
        batch.seq_id[i][0] = i // T
        batch.logits[i] = of_all or i % T == T - 1
    batch.n_tokens = T * len(texts)
    assert cpp.llama_decode(context, batch) == 0, "llama.cpp has no memory for this"
    vocabulary = cpp.llama_model_get_vocab(cpp.llama_get_model(context))
    shape = (sum(batch.logits[: batch.n_tokens]), cpp.llama_vocab_n_tokens(vocabulary))
    return np.ctypeslib.as_array(cpp.llama_get_logits(context), shape)


def main(path: str, threads: str):
    model = cpp.llama_model_load_from_file(path.encode(), cpp.llama_model_default_params())
    params = cpp.llama_context_default_params()
    params.n_seq_max = 8
    params.n_ctx = 8 * 1024
    params.n_threads = params.n_threads_batch = int(threads)
    context = cpp.llama_init_from_model(model, params)
    batch = cpp.llama_batch_init(512, 0, 1)
    batch.pos = None  # each text continues where it ended
    print("ready", flush=True)
    for line in sys.stdin:
        texts, n = json.loads(line)
        cpp.llama_memory_clear(cpp.llama_get_memory(context), True)
        steps = []
        for _ in range(n):
            texts = compute(context, batch, texts).argmax(1, keepdims=True).tolist()
            steps.append(texts)
        if n:
            result = np.concatenate(steps, 1).tolist()
        else:
            logits = compute(context, batch, [texts[0][:-1]], of_all=True).astype(float)
            chosen = logits[range(len(logits)), texts[0][1:]]
            result = (chosen - np.logaddexp.reduce(logits, 1)).sum()
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
