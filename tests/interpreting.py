"""
Triton's interpreter, adapted for tests: quick, strict about memory, and with sums in a fixed order.
"""

import dataclasses
from operator import index

import numpy as np
import pytest
import torch


def quick_on_a_cpu(*patterns: str):
    """Return pytest.mark.quick, or on a GPU no mark: the interpreter needs a second per case."""
    return (lambda test: test) if torch.cuda.is_available() else pytest.mark.quick(*patterns)


def multiply_in_order(monkeypatch):
    """
    Make tl.dot add the inputs one after another for each number. By default it is numpy's product,
    whose order of additions depends on its shape. A tensor core's order does not depend on the
    tile.
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
    Cache what Triton's interpreter computes repeatedly, which takes half of its time. It replaces
    the builtins of Triton's language whenever one device function calls another. It derives
    properties of a tensor's shape and dtype for each tensor, and of a number for each number.
    """
    from triton.runtime import interpreter

    core = interpreter.tl.core

    def quicken(kind, key_of):
        """Give objects of this class with the same key the attributes of the first one."""
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
        """Let calls of this function with the same key return the result of the first one."""
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
    # sums of integers are computed a second time in 64 bits, for an assertion that is never made
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    slow_patch, slow_launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched = set()

    def patch_lang(fn):
        """
        Patch once per launch for the functions of a module, because they share one set of globals.
        """
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
    Check that each access of a kernel lies within a tensor of its launch. On a GPU a read past the
    end may be an illegal access. Here it would succeed, and its value is mostly not used.
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
    The interpreter's library, with bounds checks.

        firsts    where the tensors of a launch begin, in order
        ends      the end (exclusive) of each of them, and of any before it
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
