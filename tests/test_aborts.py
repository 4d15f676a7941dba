"""
Clients that hang up while others are served: the real engine behind the real server, a step at a
time, so that the test knows in which state each request is when its connection closes. Whoever
stays gets the tokens it would have got alone.
"""

import asyncio
import json
import random
import socket
import threading
from collections import Counter

import pytest
from server import HEAD, FakeEngine, Server, read_until, wait_until

from serving import loop
from serving.params import SamplingParams
from test_paged import VOCABULARY, assert_idle, new_engine, prompt, trained_model


class SteppedEngine(FakeEngine):
    """
    The real engine with its loop in a thread; each step waits for its turn, unless `gate` is open.
    """

    def __init__(self):
        super().__init__()
        sizes = {"max_num_seqs": 4, "token_budget": 8, "num_blocks": 40, "policy": "priority"}
        self.engine, self.turns = new_engine(trained_model(), **sizes), threading.Semaphore(0)
        step = self.engine.step

        def stepped():
            while not self.gate.is_set() and not self.turns.acquire(timeout=0.002):
                pass
            return step()

        self.engine.step = stepped

    def run(self):
        loop.serve(self.engine, self.links)

    def advance(self):
        """One step more, if there is anything to do."""
        before = self.engine.num_steps
        self.turns.release()
        wait_until(lambda: self.engine.num_steps > before or not self.engine.has_work)
        if (
            self.engine.num_steps == before
        ):  # nothing to do yet: a turn left over would be an unasked step later
            self.turns.acquire(blocking=False)


class Client:
    """A request on a connection of its own."""

    def __init__(self, server, rng, number: int):
        self.stream, length = number % 2 == 0, rng.choice([3, 9, 20, 33])
        self.prompt, self.max_tokens = prompt(rng.randrange(30), length), rng.randrange(14, 22)
        self.fields = {"seed": number, "temperature": rng.choice([0.0, 1.0])}
        body = self.fields | {
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "stream": self.stream,
        }
        body = json.dumps(body | {"return_token_ids": True, "request_id": str(number)})
        self.sock = socket.create_connection(server.address, timeout=60)
        head = HEAD + f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        self.sock.sendall(head + body.encode())

    def tokens(self) -> list[int]:
        """Those of its answer, which is complete by now."""
        body = read_until(self.sock, b"no such end").partition(b"\r\n\r\n")[2].decode()
        self.sock.close()
        if not self.stream:
            return json.loads(body)["choices"][0]["token_ids"]
        events = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")]
        return [token for event in events for token in event["choices"][0]["token_ids"]]

    def tokens_alone(self, reference) -> list[int]:
        params = SamplingParams(max_tokens=self.max_tokens, **self.fields)
        return reference.generate([self.prompt], params, progress=False)[0]


def one_round(server, rng, counts: Counter, reference):
    """Twelve requests, for four rows; some of each state hang up, the others must not notice."""
    stepped, engine, choices = server.engine, server.engine.engine, server.service.client.choices
    stepped.gate.clear()
    clients = [Client(server, rng, sum(counts.values()) + i) for i in range(12)]
    wait_until(lambda: len(choices) == 12)
    by_id = {f"0:{id}": choice.job.id.removeprefix("cmpl-") for id, choice in choices.items()}
    of = {str(json_id): client for client in clients for json_id in [client.fields["seed"]]}
    while len(engine.requests) < 12:  # it takes in what has arrived between two steps
        stepped.advance()
    gone = set()
    for _ in range(rng.randrange(1, 5)):
        for _ in range(rng.randrange(3)):
            stepped.advance()
        room = [
            r
            for r in engine.requests.values()
            if r.max_new_tokens - r.num_generated > 8 and r.id not in gone
        ]
        for victim in rng.sample(room, min(2, len(room))):
            client = of[by_id[victim.id]]
            counts[victim.status, client.stream] += 1
            gone.add(victim.id)
            client.sock.close()
            wait_until(lambda id=victim.id: id.removeprefix("0:") not in choices)
            # the event loop sends what was written once it has gone round
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0.001), server.service.loop).result(60)
            stepped.advance()
            while victim.finish_reason is None:  # the message may have been a step late, not more
                stepped.advance()
            assert victim.finish_reason == "abort" and not victim.block_table
    stepped.gate.set()
    for id, number in by_id.items():
        if id not in gone:
            assert of[number].tokens() == of[number].tokens_alone(reference)
    wait_until(lambda: not choices and not engine.requests)
    assert_idle(engine)


@pytest.mark.parametrize("each", [4, pytest.param(100, marks=pytest.mark.slow)])
def test_aborts_change_nothing_for_others(each):
    """At least `each` aborts while queued, in prefill and in decode, half of them streams."""
    rng, counts, stepped = random.Random(each), Counter(), SteppedEngine()
    reference = new_engine(trained_model(), max_num_seqs=4)
    assert VOCABULARY < 256
    with Server("--max-num-seqs", "64", engine=stepped) as server:
        server.service.client.info["vocab_size"] = VOCABULARY
        while min(
            counts[s, True] + counts[s, False] for s in ("waiting", "prefilling", "active")
        ) < each or (sum(counts.values()) < 5 * each):
            one_round(server, rng, counts, reference)
    streams = sum(n for (_, stream), n in counts.items() if stream)
    assert 0.3 < streams / sum(counts.values()) < 0.7, counts
