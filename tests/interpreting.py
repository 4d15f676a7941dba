"""Triton's interpreter, as tests want it: quick, strict about memory, and in order for bits."""

import dataclasses
from operator import index

import numpy as np
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


def quicken_the_interpreter():
    """
    Half of its time Triton's interpreter does what is done already: it replaces what is built into
    Triton's language whenever one device function calls another, and finds what follows from the
    shape and dtype of a tensor for each tensor, and from a number for each number. Do it once.
    """
    from triton.runtime import interpreter

    core = interpreter.tl.core

    def quicken(kind, key_of):
        """Objects of this class with the same key are given the attributes of the first one."""
        slow_init = kind.__init__
        cache = {}

        def init(self, *args):
            key = key_of(*args)
            if key not in cache:
                slow_init(self, *args)
                cache[key] = dict(vars(self))
            vars(self).update(cache[key])
            if kind is core.tensor:
                self.handle = args[0]

        kind.__init__ = init

    quicken(core.block_type, lambda dtype, shape: (dtype.name, *map(index, shape)))
    quicken(core.tensor, lambda handle, type: type.name)

    def remember(owner, name: str, key_of):
        """Calls of this function with the same key have the result of the first one."""
        slow = getattr(owner, name)
        cache = {}

        def quick(*args, **named):
            key = key_of(*args, **named)
            if key not in cache:
                cache[key] = slow(*args, **named)
            return cache[key]

        setattr(owner, name, quick)

    semantic = interpreter.TritonSemantic
    remember(interpreter, "_get_np_dtype", lambda dtype: dtype.name)
    remember(semantic, "scalar_constant", lambda _, value, dtype: (repr(value), dtype.name))
    remember(
        semantic,
        "computation_type_impl",
        lambda _, a, is_number, b, *others: (a.name, is_number, b.name, *others),
    )
    slow_spread = semantic.broadcast_impl_value

    def spread(self, *pair):
        a, b = (x.type.is_block() and x.type.shape.values for x in pair)
        return pair if a == b else slow_spread(self, *pair)

    semantic.broadcast_impl_value = spread
    # sums of integers are computed once more in 64 bits, for an assertion that it does not make
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    slow_patch, slow_launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched = set()

    def patch_lang(fn):
        """Once a launch for the functions of a module: they have one set of globals."""
        if fn.__module__ not in patched:
            patched.add(fn.__module__)
            return slow_patch(fn)

    def launch(self, *args, **named):
        patched.clear()
        slow_launch(self, *args, **named)

    interpreter._patch_lang = patch_lang
    interpreter.GridExecutor.__call__ = launch


def watch_the_memory():
    """
    Each access of a kernel must lie in a tensor that its launch was given. On a GPU a read behind
    the last one may be an illegal access; here it would succeed, and mostly nobody uses the value.
    """
    from triton.runtime import interpreter

    memory = Memory(interpreter._interpreter)
    slow_init = interpreter.GridExecutor._init_args_hst

    def init_args(self, args, named):
        args, named = slow_init(self, args, named)
        memory.set_tensors([x for x in (*args, *named.values()) if isinstance(x, torch.Tensor)])
        return args, named

    interpreter._interpreter = memory
    interpreter.GridExecutor._init_args_hst = init_args


class Memory:
    """
    The interpreter's library, with bounds.

    firsts    where the tensors of a launch begin, in order
    ends      the bytes behind each of them, and all before it
    """

    def __init__(self, library):
        self.library = library

    def __getattr__(self, name: str):
        return getattr(self.library, name)

    def set_tensors(self, tensors: list[torch.Tensor]):
        spans = sorted((x.data_ptr(), x.data_ptr() + length(x)) for x in tensors)
        self.firsts, ends = np.array(spans, np.uint64).reshape(-1, 2).T
        self.ends = np.maximum.accumulate(ends)

    def load(self, pointers, mask, other, dtype):
        self.check(pointers, mask, np.dtype(dtype).itemsize)
        return self.library.load(pointers, mask, other, dtype)

    def store(self, pointers, values, mask):
        self.check(pointers, mask, values.itemsize)
        return self.library.store(pointers, values, mask)

    def atomic_rmw(self, operation, pointers, values, mask, order):
        self.check(pointers, mask, values.itemsize)
        return self.library.atomic_rmw(operation, pointers, values, mask, order)

    def check(self, pointers, mask, size: int):
        used = pointers[mask.astype(bool)]
        tensor = np.searchsorted(self.firsts, used, "right") - 1
        is_inside = (tensor >= 0) & (used + size <= self.ends[tensor])
        assert is_inside.all(), "an access outside the tensors of this launch"


def length(x: torch.Tensor) -> int:
    """Return the bytes from its first number to the end of its last."""
    steps = ((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return (sum(steps) + 1) * x.itemsize if x.numel() else 0
