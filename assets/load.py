"""
Puts load on a server with OpenAI's completions API, from independent client processes with raw
sockets. Used by `bench.py server` and the tests.

    rows = run_clients(host, port, [completion(prompt, 100) for prompt in prompts], processes=12)

Why not asyncio and an HTTP library? Clients that share one process are slower than the server that
they measure, and blame their own delays on it. Here, each process has only a few connections. It
reads everything that has arrived, looks for text in it, and records the time. The processes are
forked from one that has not loaded torch (`python -m assets.load`). `completion` returns a request,
and `Stream.row` returns the measurements. All processes share the machine's clock.
"""

import itertools
import json
import math
import multiprocessing
import selectors
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
READ_SIZE = 2**16  # bytes to read at a time
START_SECONDS = 0.3  # time for every client process to get its requests


def completion(prompt: list[int], tokens: int, delay: float = 0.0) -> dict:
    """
    Return a streaming request for this many tokens, to be sent `delay` seconds after the start.
    """
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0.6, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    return {"body": body, "delay": delay}


class Stream:
    """One request, with its own connection."""

    def __init__(self, address: tuple[str, int], request: dict, start: float):
        self.address = address
        self.request = request
        self.due = start + request["delay"]
        self.arrivals: list[float] = []  # times at which text arrived
        self.tail = b""  # end of the data received so far

    def connect(self):
        """Open the connection and send the request."""
        self.sock = socket.socket()
        self.sock.connect(self.address)
        body = json.dumps(self.request["body"]).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\n"
            f"Host: {self.address[0]}\r\n"
            "Content-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n"
            "Connection: close\r\n\r\n"
        )
        self.sock.sendall(head.encode() + body)

    def receive(self) -> bool:
        """Read what has arrived. Returns False at the end of the stream."""
        data = self.sock.recv(READ_SIZE)
        if b'"text"' in data:
            self.arrivals.append(time.monotonic())
        self.tail = self.tail[-1000:] + data
        return bool(data)

    def row(self) -> dict:
        """
        Return the measurements in seconds: the time from when the request was due to its first
        text, the times between arrivals of text, and the time from the start to the last text.
        Raises ValueError if the answer is incomplete.
        """
        tokens = self.request["body"]["max_tokens"]
        if f'"completion_tokens":{tokens},'.encode() not in self.tail:
            ending = self.tail.decode(errors="replace")
            raise ValueError(f"wanted {tokens} tokens, but the answer ends with {ending}")
        times = [moment - self.due for moment in self.arrivals]
        gaps = [after - before for before, after in itertools.pairwise(times)]
        end = self.request["delay"] + times[-1]
        return {"first": times[0], "gaps": gaps, "end": end, "tokens": tokens}


def send_and_read(address: tuple[str, int], requests: list[dict], start: float) -> list[dict]:
    """Send each request when it is due, and read all answers. Returns a row for each request."""
    streams = [Stream(address, request, start) for request in requests]
    waiting = sorted(streams, key=lambda stream: -stream.due)
    unfinished = len(streams)
    selector = selectors.DefaultSelector()
    while unfinished:
        now = time.monotonic()
        while waiting and waiting[-1].due <= now:
            stream = waiting.pop()
            stream.connect()
            selector.register(stream.sock, selectors.EVENT_READ, stream)
        pause = max(0.0, waiting[-1].due - now) if waiting else None
        for key, _ in selector.select(pause):
            stream = key.data
            if not stream.receive():
                selector.unregister(stream.sock)
                stream.sock.close()
                unfinished -= 1
    return [stream.row() for stream in streams]


def run_clients(host: str, port: int, requests: list[dict], processes: int) -> list[dict]:
    """
    Distribute requests over client processes. Returns a row for each request, in order. Raises
    ValueError if a connection fails or an answer is incomplete.
    """
    job = json.dumps([[host, int(port)], requests, min(processes, len(requests))])
    command = [sys.executable, "-m", "assets.load"]
    done = subprocess.run(command, cwd=ROOT, input=job, stdout=subprocess.PIPE, text=True)
    outcome = json.loads(done.stdout)
    if isinstance(outcome, str):
        raise ValueError(outcome)
    return outcome


def main():
    address, requests, processes = json.load(sys.stdin)
    rows: list = [None] * len(requests)
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        start = time.monotonic() + START_SECONDS
        shares = [(tuple(address), requests[i::processes], start) for i in range(processes)]
        try:
            for i, outcome in enumerate(pool.starmap(send_and_read, shares)):
                rows[i::processes] = outcome
        except (OSError, ValueError) as error:
            rows = str(error)  # a message instead of rows
    print(json.dumps(rows))


def percentiles(values: list[float]) -> dict[str, float]:
    """Return the 50th, 90th and 99th percentiles in milliseconds, for values in seconds."""
    ordered = sorted(values) or [math.nan]
    result = {}
    for p in (50, 90, 99):
        seconds = ordered[len(ordered) * p // 100]
        result[f"p{p}"] = round(1e3 * seconds, 2)
    return result


def summary(rows: list[dict]) -> dict:
    """
    Return the figures for a run: output tokens per second until the last token, and how many
    milliseconds clients waited.
    """
    seconds = max(row["end"] for row in rows)
    tokens = sum(row["tokens"] for row in rows)
    first = [row["first"] for row in rows]
    gaps = [gap for row in rows for gap in row["gaps"]]
    num_events = len(first) + len(gaps)
    return {
        "output tok/s": round(tokens / seconds),
        "s": round(seconds, 2),
        "first token, ms": percentiles(first),
        "gaps, ms": percentiles(gaps),
        "tokens an event": round(tokens / num_events, 2),
    }


if __name__ == "__main__":
    main()
