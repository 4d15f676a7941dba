"""
Load for a server that speaks OpenAI's completions, from independent client processes with raw
sockets; for `bench.py server` and the tests.

    rows = run_clients(host, port, [completion(prompt, 100) for prompt in prompts], processes=12)

    python -m assets.load 127.0.0.1 8000 < share.json   # what each client process runs

Why not asyncio and an HTTP library: all clients in one process are slower than the server that they
measure, and report their own lateness as the server's. Here each process has a few connections,
reads what comes, looks for texts in it, and notes the time. `completion` says what a request is,
`Stream.row` what is measured of it; a slow client's row is None. The clock is the machine's, so the
processes share it.
"""

import itertools
import json
import math
import selectors
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
READ_SIZE = 2**16  # bytes read at a time
START_SECONDS = 0.3  # until every client process has read its share
SLOW_READ_SECONDS = 0.1  # how often a slow client reads
SLOW_BUFFER = 4096  # bytes that the system may hold ready for a slow client


def completion(prompt: list[int], tokens: int, at: float = 0.0, speed: float | None = None) -> dict:
    """
    A streamed request for an answer of so many tokens, to be sent `at` seconds after the start, by
    a client that reads `speed` bytes a second, or, for None, all that comes.
    """
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0.6, "ignore_eos": True}
    body["stream"] = True
    body["stream_options"] = {"include_usage": True}
    return {"body": body, "at": at, "bytes a second": speed}


class Stream:
    """One request on a connection of its own."""

    def __init__(self, address: tuple[str, int], request: dict, start: float):
        self.address = address
        self.request = request
        self.due = start + request["at"]
        self.speed = request["bytes a second"]
        self.arrivals: list[float] = []  # of text, on the clock
        self.tail = b""  # the end of what has arrived

    def connect(self):
        """Open the connection and send the request."""
        self.sock = socket.socket()
        if self.speed:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BUFFER)
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
        """Read what has arrived. False at the end."""
        size = int(self.speed * SLOW_READ_SECONDS) if self.speed else READ_SIZE
        data = self.sock.recv(size)
        if b'"text"' in data:
            self.arrivals.append(time.monotonic())
        self.tail = self.tail[-1000:] + data
        return bool(data)

    def row(self) -> dict:
        """
        What was measured, in seconds: from when it was due to the first text; between arrivals of
        text; from the start to the last text. Raises ValueError when the answer was not whole.
        """
        tokens = self.request["body"]["max_tokens"]
        if f'"completion_tokens":{tokens},'.encode() not in self.tail:
            ending = self.tail.decode(errors="replace")
            raise ValueError(f"wanted {tokens} tokens, the answer ends with {ending}")
        times = [moment - self.due for moment in self.arrivals]
        gaps = [after - before for before, after in itertools.pairwise(times)]
        end = self.request["at"] + times[-1]
        return {"first": times[0], "gaps": gaps, "end": end, "tokens": tokens}


def send_and_read(
    address: tuple[str, int], requests: list[dict], start: float
) -> list[dict | None]:
    """
    Send each request at its time and read all answers. Ends when the streams that are not slow have
    ended.
    """
    streams = [Stream(address, request, start) for request in requests]
    for stream in streams:
        if stream.speed:
            threading.Thread(target=read_slowly, args=[stream], daemon=True).start()
    waiting = [stream for stream in streams if not stream.speed]
    waiting.sort(key=lambda stream: -stream.due)
    unfinished = len(waiting)
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
    return [None if stream.speed else stream.row() for stream in streams]


def read_slowly(stream: Stream):
    """A slow client, in a thread of its own: it reads a little at a time, until its answer ends."""
    time.sleep(max(0.0, stream.due - time.monotonic()))
    stream.connect()
    while stream.receive():
        time.sleep(SLOW_READ_SECONDS)


def run_clients(host: str, port: int, requests: list[dict], processes: int) -> list[dict | None]:
    """
    Spread requests over client processes; returns a row for each, in their order. Raises ValueError
    where a connection failed or an answer was not whole.
    """
    processes = min(processes, len(requests))
    shares = [requests[i::processes] for i in range(processes)]
    command = [sys.executable, "-m", "assets.load", host, str(port)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    clients = [subprocess.Popen(command, cwd=ROOT, **pipes) for _ in shares]
    for client in clients:
        client.stdout.readline()  # it is up
    start = time.monotonic() + START_SECONDS
    for client, share in zip(clients, shares, strict=True):
        client.stdin.write(json.dumps({"start": start, "requests": share}))
        client.stdin.close()
    rows: list = [None] * len(requests)
    outcomes = [json.load(client.stdout) for client in clients]
    for i, (client, outcome) in enumerate(zip(clients, outcomes, strict=True)):
        client.wait()
        if isinstance(outcome, str):
            raise ValueError(outcome)
        rows[i::processes] = outcome
    return rows


def percentiles(values: list[float]) -> dict[str, float]:
    """The 50th, 90th and 99th percentile of values in seconds, in milliseconds."""
    ordered = sorted(values) or [math.nan]
    return {f"p{p}": round(1e3 * ordered[len(ordered) * p // 100], 2) for p in (50, 90, 99)}


def summary(rows: list[dict]) -> dict:
    """
    Of a run: output tokens a second, until the last one came, and the milliseconds that clients
    waited.
    """
    seconds = max(row["end"] for row in rows)
    tokens = sum(row["tokens"] for row in rows)
    gaps = [gap for row in rows for gap in row["gaps"]]
    return {
        "output tok/s": round(tokens / seconds),
        "s": round(seconds, 2),
        "first token, ms": percentiles([row["first"] for row in rows]),
        "gaps, ms": percentiles(gaps),
        "tokens an event": round(tokens / (len(gaps) + len(rows)), 2),
    }


def main():
    host, port = sys.argv[1:]
    print("ready", flush=True)
    share = json.load(sys.stdin)
    try:
        outcome = send_and_read((host, int(port)), share["requests"], share["start"])
    except (OSError, ValueError) as error:
        outcome = str(error)  # in place of the rows
    print(json.dumps(outcome))


if __name__ == "__main__":
    main()
