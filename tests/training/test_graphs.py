"""A training step as a CUDA graph, with graphs that stand in for CUDA's."""

from unittest.mock import MagicMock

import torch

from training.fast import WARM_UP, CudaGraph


def loss_of(x, y, rate):
    return torch.stack([(x * y).sum() * rate, rate])


def test_replays_read_the_batch_and_the_rate_of_their_call(monkeypatch):
    """
    A rate that is a Python number would stay at its captured value for ever. A result that is not
    copied would change with the next step. Batches of another shape need their own graph.
    """
    graphs = []

    def new_graph() -> MagicMock:
        graphs.append(MagicMock())
        return graphs[-1]

    monkeypatch.setattr(torch, "cuda", MagicMock(CUDAGraph=new_graph))
    calls = []

    def step(x, y, rate):
        calls.append(x.shape)
        result = loss_of(x, y, rate)
        # compute again, from the captured tensors, into the same result
        graphs[-1].replay = lambda: result.copy_(loss_of(x, y, rate))
        return result

    train_step = CudaGraph(step)
    long, short = torch.Size([2, 8]), torch.Size([8, 2])
    for shape in (short, long):
        results = []
        for i in range(1, 7):
            x = torch.full(shape, i)
            results.append(train_step(x, x + 1, i / 8))
        expected = [[16 * i * (i + 1) * i / 8, i / 8] for i in range(1, 7)]
        assert torch.stack(results).tolist() == expected
    # warm-up, and the capture
    assert calls == [short] * (WARM_UP + 1) + [long] * (WARM_UP + 1)
    assert len(graphs) == 2
