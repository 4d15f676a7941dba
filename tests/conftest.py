"""
Settings for all tests. Without a GPU, the Triton kernels run on CPU tensors in Triton's
interpreter, which must be chosen before Triton is imported. torch uses one thread: tests run in two
processes and their tensors are small, so on a busy machine a second thread would make them ten
times slower, not faster.
"""

import atexit
import fnmatch
import functools
import gc
import os
import signal
import ssl
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
from filelock import FileLock

# so that their failures show numbers
pytest.register_assert_rewrite("http_oracle", "judging", "wires")
# Each httpx client has a context for https, which no test uses. Reading the certificates takes 25
# ms.
ssl.create_default_context = functools.cache(ssl.create_default_context)
# A shell's background job ignores Ctrl-C, and what nohup starts ignores hang-ups. All child
# processes would inherit this.
HANDLERS = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
for number, handler in HANDLERS.items():
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)


def pytest_configure(config):
    """
    Prepare the processes that run tests. The process that only distributes tests skips these
    seconds.
    """
    if getattr(config.option, "numprocesses", 0) and not hasattr(config, "workerinput"):
        return
    import interpreting
    import torch
    from hypothesis import HealthCheck, settings

    torch.set_num_threads(1)
    # The same examples each time: whether `make test` passes should depend only on the commit. Each
    # test also has a `@seed`, because otherwise its examples would change with its source.
    health = [HealthCheck.too_slow]
    settings.register_profile("same", derandomize=True, suppress_health_check=health)
    settings.load_profile("same")
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
        # For each seed torch would record the whole stack, in case a GPU is initialised later.
        for kind in torch.cuda, torch.xpu, torch.mtia:
            kind.manual_seed_all = lambda seed: None
    if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
        interpreting.quicken_the_interpreter()
        interpreting.watch_the_memory()


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter):
    """Print one line: how many tests were left out, and what they need."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = [report.longrepr[2].removeprefix("Skipped: ") for report in skipped]
    counts = Counter(reason.partition(":")[0] for reason in reasons).most_common()
    words = [f"{n} {why.replace('needs', 'need', n > 1)}" for why, n in counts]
    if words:
        terminalreporter.write_line(f"left out: {', '.join(words)}")


@pytest.fixture(scope="session", autouse=True)
def models_are_trained_once(tmp_path_factory):
    """
    Share what test_paged.py trains among all test processes, because training takes two seconds per
    model.
    """
    if "test_paged" not in sys.modules:
        return
    import torch

    import test_paged

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # the folder of all processes of this run
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


@pytest.hookimpl(tryfirst=True)  # before pytest selects by -m
def pytest_collection_modifyitems(config, items):
    """
    Mark as slow the cases of a test that its `@pytest.mark.quick(*patterns)` does not name. Raises
    ValueError for a pattern without a case, because a typing error would make all cases slow.
    """
    named = set()
    found = set()
    for item in items:
        for mark in item.iter_markers("quick"):
            test = item.nodeid.partition("[")[0]
            patterns = [name for name in mark.args if fnmatch.fnmatchcase(item.callspec.id, name)]
            named |= {(test, name) for name in mark.args}
            found |= {(test, name) for name in patterns}
            if not patterns:
                item.add_marker("slow")
    is_whole = not any("::" in arg for arg in config.args)
    if is_whole and named != found:
        raise ValueError(f"pytest.mark.quick names cases that are not there: {named - found}")


def pytest_collection_finish():
    """Keep Python from searching the imported modules for garbage again and again."""
    gc.freeze()
    atexit.register(gc.unfreeze)
