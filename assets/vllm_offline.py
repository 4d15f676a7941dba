"""
Runs vLLM in its own process, for `bench.py engine`. Run this file with a Python that has vllm.

    python assets/vllm_offline.py MODEL_DIRECTORY

It prints a line with its version once it is ready. Then it answers each line of stdin with a line.
Both lines are JSON. It reads requests as [prompt, number of tokens to answer], and writes how many
seconds they took, and the greedy answers. vLLM's own output goes to stderr.
"""

import json
import os
import sys
from time import perf_counter

MEMORY = 0.4  # fraction of GPU memory; the engine that vLLM is compared with also needs some


def main(directory: str):
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # for the logs of vLLM and its processes

    import torch
    import vllm

    model = vllm.LLM(
        directory,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_num_seqs=256,
        gpu_memory_utilization=MEMORY,
    )
    print(f"{vllm.__version__}, torch {torch.__version__}", file=lines)
    greedy = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
    for line in sys.stdin:
        prompts = []
        params = []
        for prompt, n in json.loads(line):
            prompts.append({"prompt_token_ids": prompt})
            params.append(vllm.SamplingParams(max_tokens=n, **greedy))
        started = perf_counter()
        outputs = model.generate(prompts, params, use_tqdm=False)
        seconds = perf_counter() - started
        answers = [list(output.outputs[0].token_ids) for output in outputs]
        print(json.dumps([seconds, answers]), file=lines)


if __name__ == "__main__":
    main(*sys.argv[1:])
