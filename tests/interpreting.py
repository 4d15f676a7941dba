"""Triton's interpreter, as tests of bits want it."""

import pytest
import torch


def quick_on_a_cpu(*patterns: str):
    """pytest.mark.quick; but all cases are quick on a GPU: the interpreter takes a second each."""
    return (lambda test: test) if torch.cuda.is_available() else pytest.mark.quick(*patterns)


def multiply_in_order(monkeypatch):
    """
    tl.dot is numpy's product, the order of whose additions follows its shape. Let it add up each
    number of a row by itself, one input after the other, as a tensor core does whatever the tile.
    """
    from triton.runtime import interpreter

    def create_dot(self, a, b, d, *precision):
        total = d.data.copy()
        for k in range(a.data.shape[1]):
            total += a.data[:, k, None].astype(total.dtype) * b.data[k].astype(total.dtype)
        return interpreter.TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
