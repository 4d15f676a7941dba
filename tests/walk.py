"""
The way of a token, measured: which functions of this repo run, in their order, while a server
decodes one token of a streamed answer.

    python tests/walk.py

A server and a real engine with a tiny model run in threads of one process, on the CPU. The way
begins where the engine plans the token's step, and each process is done with it where it turns to
the next round. Each function counts once, at its first call, properties too; lambdas and
comprehensions belong to the function that they are in. Of coroutines that wait for one another the
innermost counts: to resume it, Python calls all of them. Functions that also run without a request
do not count. On a GPU the operators of ops/choice.py launch kernels, which a profile of Python does
not show.
"""

import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import end_with_one_line

if __name__ == "__main__":
    end_with_one_line()

import httpx
import torch
from fake_server import FakeEngine, Server

from engine import process
from engine.engine import Engine
from model import GPT, GPTConfig
from params import Settings
from training.corpus import bpe_tokenizer

ROOT = Path(__file__).parents[1]
PACE = 0.02  # seconds from step to step
# where a round begins, where the next one does, and where its token goes
ENGINE_ROUND = ("Engine.step", "Links.is_wanted", "engine/links.py")
CLIENT_ROUND = ("EngineClient.data_received", "EngineClient._pause", "server/connection.py")
NOT_OURS = (str(ROOT / "tests"), str(ROOT / ".venv"))


class Call(NamedTuple):
    thread: str
    file: str
    name: str


class Walk:
    """Notes all calls of functions of this repo, of all threads."""

    def __init__(self):
        self.calls: list[Call | None] = []
        self.is_on = False
        self.starts: dict = {}  # code -> the place in it where a call begins
        self.resumed: dict = {}  # thread -> frame and number of its last call, if that is resumed

    def note(self, frame, event, _):
        code = frame.f_code
        file, name = code.co_filename, code.co_qualname
        if event != "call" or not is_ours(file):
            return
        is_resumed = frame.f_lasti > self.starts.setdefault(code, frame.f_lasti)
        if not self.is_on or name.endswith(">"):  # of a module, a lambda or a comprehension
            return
        caller = frame.f_back
        while caller and not is_ours(caller.f_code.co_filename):
            caller = caller.f_back
        thread = threading.current_thread().name
        outer, number = self.resumed.get(thread, (None, 0))
        if is_resumed and outer and caller is outer:
            self.calls[number] = None  # it only passed the resumption on
        self.resumed[thread] = (frame if is_resumed else None, len(self.calls))
        self.calls.append(Call(thread, str(Path(file).relative_to(ROOT)), name))


def is_ours(file: str) -> bool:
    return file.startswith(str(ROOT)) and not file.startswith(NOT_OURS)


class RealEngine(FakeEngine):
    """The engine itself, in the thread where tests have a fake one."""

    def __init__(self):
        super().__init__()
        config = GPTConfig(vocab_size=257, context_length=64, n_layer=2, n_head=2, n_embd=32)
        settings = Settings(num_blocks=16, max_num_seqs=4, token_budget=64)
        self.engine = Engine(GPT(config).eval(), settings)

    def run(self):
        step = self.engine.step

        def slow_step():
            time.sleep(PACE)  # a client receives each token before the next
            return step()

        self.engine.step = slow_step
        process.serve(self.engine, self.links)


def record() -> tuple[list[Call], list[Call]]:
    """The calls of a second of waiting, and those of a request after that."""
    walk = Walk()
    tokenizer = bpe_tokenizer([])
    body = {"prompt": "hello", "max_tokens": 8, "stream": True, "ignore_eos": True, "seed": 1}
    torch.manual_seed(0)
    threading.setprofile(walk.note)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(folder)
        with Server(engine=RealEngine(), directory=folder, tokenizer=tokenizer) as server:
            url = f"http://127.0.0.1:{server.address[1]}/v1/completions"
            assert httpx.post(url, json=body).status_code == 200  # what is done once is done
            time.sleep(0.2)
            walk.is_on = True
            time.sleep(1)
            idle = len(walk.calls)
            answer = httpx.post(url, json=body)
            time.sleep(0.2)
            walk.is_on = False
    threading.setprofile(None)
    assert answer.text.endswith("data: [DONE]\n\n"), answer.text
    return list(filter(None, walk.calls[:idle])), list(filter(None, walk.calls[idle:]))


def one_round(calls: list[Call], first: str, end: str, to: str) -> list[Call]:
    """
    From a call of the function `first` to the next one of `end`. Of all such rounds that reach the
    file `to`, but that of the prompt, the plainest: now and then something else happens, too.
    """
    starts = [i for i, call in enumerate(calls) if call.name == first]
    ends = [i for i, call in enumerate(calls) if call.name == end]
    rounds = []
    for start in starts[1:]:
        stop = next((i for i in ends if i > start), start)
        if any(call.file == to for call in calls[start:stop]):
            rounds.append(calls[start:stop])
    return min(rounds, key=lambda calls: len(set(calls)))


def main():
    idle, calls = record()
    always = {(call.file, call.name) for call in idle}
    own = [call for call in calls if (call.file, call.name) not in always]
    engine = next(call.thread for call in own if call.file == "paged.py")
    way = one_round([call for call in own if call.thread == engine], *ENGINE_ROUND)
    way += one_round([call for call in own if call.thread != engine], *CLIENT_ROUND)
    functions = list(dict.fromkeys((call.file, call.name) for call in way))
    for file, name in functions:
        print(f"{file:24} {name}")
    files = [file for file, _ in functions]
    changes = sum(a != b for a, b in pairwise(files))
    print(f"{len(functions)} functions, {changes} changes of file")


if __name__ == "__main__":
    main()
