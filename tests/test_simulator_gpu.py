"""
The simulator's lives with the real runner: on a GPU with its graphs, padding and overlap, and a few
on a CPU. There is a model then, so the right answers are the dense model's, token by token; where
its best two scores are nearer than rounding (oracle.py says when) either is right.

    python -m pytest -s -m "slow or not slow" tests/test_simulator_gpu.py  # prints its counts
"""

import oracle
import pytest
import torch

from serving.runner import Runner
from test_paged import CONTEXT, VOCABULARY, trained_model
from tests.simulator import Faulty, Text, World
from tests.swarm import a_life

NOT_PLAYED = (
    "beam",
    "broken",
    "fork",
    "restart",
)  # what only the simulated runner can do, or takes a new capture
TEMPERATURES = (0.0, 0.7, 1.0, 1.4)


class FaultyRealRunner(Faulty, Runner):
    def __init__(self, *args, world: World, **options):
        super().__init__(*args, **options)
        self.world = world


class DenseWorld(World):
    """A life whose answers are judged by the dense model, on the CPU."""

    def __init__(self, seed: int, device: str, graphs: bool):
        settings, events = a_life(seed)
        settings |= {"V": VOCABULARY, "context": CONTEXT, "eos": None, "window": 0}
        settings["engine"] |= {"overlap": True, "graphs": graphs}
        S = settings["engine"]["block_size"]
        self.most = min(CONTEXT, settings["engine"]["num_blocks"] * S)
        events = [self.fitted(event) for event in events if event["do"] not in NOT_PLAYED]
        super().__init__(settings, events, build=FaultyRealRunner)
        self.dense = trained_model()
        self.served = (
            trained_model()
            if device == "cpu"
            else type(self.dense)(self.dense.config).eval().to(device)
        )
        self.served.load_state_dict(self.dense.state_dict())
        self.ties = 0

    def fitted(self, event: dict) -> dict:
        """For this model's context and vocabulary, at some temperature."""
        if "prompt" not in event:
            return event
        prompt = [token % VOCABULARY for token in event["prompt"]][: self.most - 1]
        wanted = {"temperature": TEMPERATURES[event["params"]["seed"] % 4]}
        wanted["max_tokens"] = min(event["params"]["max_tokens"], self.most - len(prompt))
        wanted["stop_token_ids"] = [
            t % VOCABULARY for t in event["params"].get("stop_token_ids", ())
        ]
        return event | {"prompt": prompt, "params": event["params"] | wanted}

    def model(self):
        return self.served

    def logits_of(self, text: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return self.dense(torch.tensor([text]))[0][0]

    def right(self, text: Text, tokens: list[int]) -> tuple[int, str | None]:
        so_far = text.tokens[: text.told]
        whole = text.prompt + so_far
        params = oracle.SamplingParams(**text.params)
        before = oracle.counts["ties"]
        possible = oracle.possible_tokens(
            self.logits_of(whole)[-1],
            params,
            len(whole),
            choice=text.choice,
            stops=text.stops,
            rounding=1e-4,
        )
        self.ties += oracle.counts["ties"] - before
        token = tokens[0] if tokens[0] in possible else min(possible)
        text.tokens = [*so_far, token]
        if token in text.stops:
            return token, "stop"
        return token, "length" if len(text.tokens) == text.max_tokens else None

    def check_scores(self, text: Text, token: int, logprobs, prompt_logprobs):
        whole = text.prompt + text.tokens[: text.told]
        scores = self.logits_of(whole).log_softmax(-1)
        if text.logprobs is not None:
            self.check_score(logprobs[0], text.logprobs, scores[-1], token)
        if text.prompt_logprobs is None or text.told or len(text.prompt) == 1:
            assert prompt_logprobs is None, f"{text.id}: scores that nobody asked for"
            return
        assert len(prompt_logprobs) == len(text.prompt) - 1, (
            f"{text.id}: {len(prompt_logprobs)} scores of the prompt"
        )
        for i, found in enumerate(prompt_logprobs):
            self.check_score(found, text.prompt_logprobs, scores[i], text.prompt[i + 1])

    def check_score(self, found: list, n: int, scores: torch.Tensor, token: int):
        logprob, ids, top = found
        assert len(ids) == len(top) == n
        assert logprob == pytest.approx(scores[token].item(), abs=1e-3)
        assert top == pytest.approx(scores.topk(n).values.tolist(), abs=1e-3)
        assert top == pytest.approx(scores[ids].tolist(), abs=1e-3)


def live(seeds: range, device: str, graphs: bool) -> int:
    """Plays these lives. Returns how many steps they took."""
    steps = 0
    tokens = 0
    ties = 0
    for seed in seeds:
        world = DenseWorld(seed, device, graphs)
        world.run()
        steps += world.steps
        tokens += sum(text.told for text in world.everybody)
        ties += world.ties
    print(
        f"\n{steps:,} steps, {tokens:,} tokens, all the dense model's; in {ties} of them two "
        f"were as good"
    )
    return steps


@pytest.mark.slow
def test_some_thousand_steps_with_the_real_runner():
    """
    Would catch: a stale row, table or last token on the device, which the simulated runner cannot
    have.
    """
    assert live(range(100, 116), "cpu", graphs=False) > 2000


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("graphs", [True, False])
def test_on_a_gpu_some_thousand_steps_are_the_dense_models(graphs):
    """
    Would catch: what a captured step, its padding, or overlap gets wrong when requests come, hang
    up and fail.
    """
    assert live(range(200, 212), "cuda", graphs) > 2000
