"""
The clients of simulator_http.py: each has one connection, on which it sends its calls at its own
pace, reads or does not, and perhaps hangs up.
"""

import json

from scripted_engine import Violation


def as_bytes(call: dict, is_last: bool) -> bytes:
    """The request as it goes over the wire."""
    method = "POST" if "body" in call or "raw" in call else "GET"
    body = json.dumps(call["body"]).encode() if "body" in call else call.get("raw", "").encode()
    head = [f"{method} {call['path']} HTTP/1.1", "Host: localhost", f"X-Request-Id: r{call['id']}"]
    if method == "POST":
        head += [f"Content-Type: {call.get('type', 'application/json')}"]
        head += (
            ["Transfer-Encoding: chunked"]
            if call.get("chunked")
            else [f"Content-Length: {len(body)}"]
        )
        body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if call.get("chunked") else body
    if call.get("key") is not None:
        head += [f"Authorization: Bearer {call['key']}"]
    if is_last:
        head += ["Connection: close"]
    return "\r\n".join([*head, "", ""]).encode() + body


class Caller:
    """One connection of one client, and what has come of it."""

    def __init__(self, world, event: dict):
        self.world = world
        self.loop = world.loop
        self.event = event
        self.calls = event["calls"]
        self.unsent = b"".join(as_bytes(call, call is self.calls[-1]) for call in self.calls)
        self.piece = -(-len(self.unsent) // event.get("pieces", 1))
        self.received = b""
        self.num_sent = 0
        self.began = world.now
        self.sent_at = self.ended_at = None
        self.has_left = False
        self.is_cut = False  # by a reset
        self.sock = None
        try:
            self.sock = world.listener.connect()
        except ConnectionRefusedError:
            self.ended_at = world.now
            return
        self.sock.on_change = lambda: self.loop.call_soon(self.look)
        if "leaves" in event and event["leaves"][0] == "seconds":
            self.loop.call_later(event["leaves"][1], self.leave)
        if event.get("sip"):
            self.loop.call_later(event["rest"], self.read_slowly)
        self.send()

    @property
    def is_quick(self) -> bool:
        """It sends and reads as soon as it can, and stays."""
        slow = self.event.get("sip") or self.event.get("gap", 0) * self.event.get("pieces", 1) > 0.5
        return not slow and "leaves" not in self.event

    def send(self):
        """The next piece."""
        if self.ended_at is not None:
            return
        try:
            sent = self.sock.send(self.unsent[: self.piece])
        except BlockingIOError:
            sent = 0
        except ConnectionError:
            return self.finish(is_cut=True)
        self.unsent = self.unsent[sent:]
        self.num_sent += sent
        self.leave_if("sent", self.num_sent)
        if self.unsent:
            self.loop.call_later(self.event.get("gap", 0.001), self.send)
        elif self.sent_at is None:
            self.sent_at = self.world.now

    def look(self):
        if not self.event.get("sip"):
            while self.read(2**18):
                pass

    def read_slowly(self):
        before = len(self.received)
        while len(self.received) < before + self.event["sip"] and self.read(self.event["sip"]):
            pass
        if self.ended_at is None:
            self.loop.call_later(self.event["rest"], self.read_slowly)

    def read(self, size: int) -> bool:
        if self.ended_at is not None:
            return False
        try:
            data = self.sock.recv(size)
        except BlockingIOError:
            return False
        except ConnectionError:
            self.finish(is_cut=True)
            return False
        if not data:
            self.finish()
            return False
        self.received += data
        self.leave_if("read", len(self.received))
        if (
            self.event.get("leaves", [""])[0] == "said"
            and self.event["leaves"][1].encode() in self.received
        ):
            self.leave()
        return True

    def leave_if(self, what: str, count: int):
        kind, most = self.event.get("leaves", ["", 0])
        if kind == what and count >= most:
            self.leave()

    def leave(self):
        if self.ended_at is None:
            self.has_left = True
            self.loop.call_later(2.5 + self.world.pause, self.check_forgotten)
            if self.event.get("how") == "reset":
                self.sock.peer.reset()
            self.finish()

    def check_forgotten(self):
        """A client that has left is noticed, and nothing is computed for it any more."""
        names = {f"r{call['id']}" for call in self.calls}
        process = self.world.process
        for choice in process.client.choices.values() if process.is_running else ():
            if choice.job.http_id in names:
                raise Violation(
                    f"call {choice.job.http_id} is still in work, its client has left long ago"
                )

    def finish(self, is_cut=False):
        self.is_cut = is_cut
        self.ended_at = self.world.now
        self.sock.close()
