"""
Settings of all tests. Without a GPU, the Triton kernels run on CPU tensors in Triton's interpreter,
which must be set before it is imported. One torch thread: tests run in two processes, and their
tensors are small; on a busy machine a second thread makes them ten times slower, not faster.
"""

import functools
import inspect
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from filelock import FileLock

torch.set_num_threads(1)
# A shell's background job ignores Ctrl-C, what nohup starts ignores hang-ups, and so would all
# children.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def quicken_the_interpreter():
    """
    Triton's interpreter looks through all of Triton's language for built-in functions whenever one
    device function calls another, which is a third of its time. What it finds is always the same:
    find it once.
    """
    from triton.runtime import interpreter

    @functools.cache
    def builtins(owner) -> list[tuple]:
        return [
            (name, x) for name, x in inspect.getmembers(owner) if interpreter.tl.core.is_builtin(x)
        ]

    def patch_builtin(owner, builder, scope):
        for name, member in builtins(owner):
            if getattr(owner, name) is member:  # not replaced yet
                interpreter._patch_attr(owner, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtin


if os.environ.get("TRITON_INTERPRET") == "1":
    quicken_the_interpreter()


@pytest.fixture(scope="session", autouse=True)
def models_are_trained_once(tmp_path_factory):
    """
    Training takes two seconds a model, so the processes that share the tests share what
    test_paged.py trains.
    """
    if "test_paged" not in sys.modules:
        return
    import test_paged

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # that of all processes of this run
    folder = Path(os.environ.get("TRAINED_MODELS", folder))
    train = test_paged.train

    @functools.cache
    def load_or_train(num_kv_heads: int):
        weights = folder / f"{num_kv_heads}.pt"
        with FileLock(weights.with_suffix(".lock")):
            if not weights.exists():
                torch.save(train(num_kv_heads).state_dict(), weights.with_suffix(".tmp"))
                weights.with_suffix(".tmp").rename(weights)
        model = test_paged.untrained_model(num_kv_heads)
        model.load_state_dict(torch.load(weights))
        return model.eval()

    test_paged.train = load_or_train
