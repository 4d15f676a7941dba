"""
The HTTP process's end of the link to the engine: requests go out, tokens come in, in rounds.

    client = EngineClient(start)           # before the event loop runs: the engine loads meanwhile
    await client.attach()                  # in the event loop
    client.submit(choices)                 # a job's `on_tokens` or `on_refusal` is called in return

Not run by itself: serve.py makes one. link.py is the other end, and defines the messages.
answers.py makes text of the tokens.
"""

import asyncio
import itertools
import time

from engine.link import join_rows, read_messages, to_line
from server.protocol import ApiError

STALL_SECONDS = 120  # an engine with work and no word for so long is not alive
CRASHED = "the engine stopped unexpectedly"
IDLE = {"running": 0, "waiting": 0, "kv_usage": 0.0}  # Engine.stats() of no engine, in part

# Backpressure: writes are batched by how busy this process is. A round: all that the engine has
# sent is read, and written to its streams. A write to a stream costs much more than a token: with
# one for each token of 256 streams the HTTP process would do nothing else, and requests that have
# arrived would wait to be read until the streams before them have ended. So after a round the
# engine's messages are left unread for as long as the round took, up to a limit. A round lasts
# until the event loop has run everything that was ready, other work included: the further behind
# this process is, the more tokens are joined (here, and by the engine once the link is full), and
# what arrives is read between two rounds. A single stream never waits: its rounds are shorter than
# timers can resolve.
MIN_PAUSE = 0.001  # seconds: timers resolve no less
MAX_PAUSE = 0.02  # seconds, by which a gap between tokens may grow


class EngineClient(asyncio.Protocol):
    """
    The link to the engine, and the table of the choices that wait for tokens. It belongs to the
    event loop and never blocks it.

        HTTP process  ------- add, abort, listen ------>  engine process
                      <-- ready, step, error, events, fatal --

    `start()` starts the engine's process and returns it (multiprocessing's Process), with a socket,
    which is the link to it; it is called once, and once more if the engine dies.

    state      loading -> ready -> restarting -> ready -> dead
    info       the engine's message "ready": max_model_len and other limits
    reason     why the engine is gone; "": it is not
    stats      Engine.stats() as the engine sent it last

    `on_state(state)` and `on_stats(stats)` are called with what changed, and, after `listen`,
    `on_events(lines)` with the engine's record (events.py); no lines: it publishes no more.
    """

    def __init__(self, start):
        self.start = start
        self.may_restart = True
        self.state = "loading"
        self.info = {}
        self.reason = ""
        self.stats = IDLE
        self.choices = {}  # the request's id -> the answers.Choice that waits for its tokens
        self.ids = map(str, itertools.count())  # ours: a client may send the same request_id twice
        self.heard = time.monotonic()  # the last word of the engine, or the first request since
        self.is_paused = False  # between two rounds
        self.on_state = self.on_stats = self.on_events = lambda *news: None
        self._connect()

    def _connect(self):
        self.unread = bytearray()  # the beginning of a message
        # messages that the link has no room for, by operation and request: "abort 5.1"
        self.unsent = {}
        self.is_full = False
        self.last_words = ""
        self.transport = None
        self.process, self.sock = self.start()

    async def attach(self):
        """Begin to read."""
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: self, sock=self.sock)

    def close(self):
        """End the link, and with it the engine."""
        transport = self.transport
        self.transport = None  # so `connection_lost` sees that this side closed it
        if transport:
            transport.close()

    def submit(self, choices):
        """Have the choices of one prompt computed."""
        # an idle engine sends nothing: its silence counts from its first request
        if not self.choices:
            self.heard = time.monotonic()
        id = next(self.ids)
        for number, choice in enumerate(choices):  # the engine names its forks so, too
            choice.engine_id = f"{id}.{number}" if number else id
            self.choices[choice.engine_id] = choice
        first = choices[0]
        body = first.body
        options = {"n": len(choices), "priority": body.priority, "name": first.job.call_id}
        options |= {"cache_salt": first.job.salt, "prompt_logprobs": body.num_prompt_logprobs}
        params = body.sampling_params(len(first.prompt), self.info["max_model_len"])
        message = {"prompt": first.prompt, "params": params, "options": options}
        if first.job.grammar:
            message |= {"grammar": first.job.grammar, "owner": first.job.owner}
        self._write(op="add", id=id, **message)

    def abort(self, choice) -> bool:
        """
        Stop a choice's request; what it still sends is dropped. False if it has ended or was never
        submitted.
        """
        if not self.choices.pop(choice.engine_id, None):
            return False
        self._write(op="abort", id=choice.engine_id)
        # An engine that does not read, as in a long step, would later compute a prompt for which no
        # choice waits any more; and clients that come and go meanwhile would fill the memory here.
        ids = [sibling.engine_id for sibling in choice.siblings]
        add = f"add {ids[0]}"
        if add in self.unsent and self.choices.keys().isdisjoint(ids):
            for message in (add, *(f"abort {id}" for id in ids)):
                self.unsent.pop(message, None)
        return True

    def listen(self, is_on: bool, tokens: bool):
        """Have the engine publish its record, from a snapshot on; or no listener is left."""
        self._write(op="listen", on=is_on, tokens=tokens)

    def refuse_all(self, error: ApiError):
        """End everything that waits."""
        for choice in list(self.choices.values()):
            choice.job.fail(error)

    def trouble(self) -> str:
        """
        Why the engine is not alive: it is gone, or has work and sent nothing for STALL_SECONDS. ""
        if it is.
        """
        stalls = self.choices and time.monotonic() - self.heard > STALL_SECONDS
        return self.reason or (f"no step in {STALL_SECONDS} s" if stalls else "")

    def _write(self, **message):
        if not self.transport:
            return  # the engine is gone, and forgets by itself what it did
        if self.is_full:
            self.unsent[f"{message['op']} {message.get('id')}"] = to_line(message)
        else:
            self.transport.write(to_line(message))

    # called by asyncio

    def pause_writing(self):
        self.is_full = True

    def resume_writing(self):
        self.is_full = False
        while self.transport and self.unsent and not self.is_full:  # after `close`, too
            first = next(iter(self.unsent))
            self.transport.write(self.unsent.pop(first))

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data: bytes):
        """
        A round: all messages that have come. The tokens of several steps for a request are
        delivered at once.
        """
        started = time.monotonic()
        messages = read_messages(self.unread, data)
        if not messages:
            return
        self.heard = started
        rows = {}  # by request: its rows of these steps, joined
        for message in messages:
            if message["op"] != "step":
                self._deliver(rows)  # an error comes after the tokens before it
                self._on_message(message)
                continue
            for row in message["out"]:
                earlier = rows.setdefault(row[0], row)
                if earlier is not row:
                    join_rows(earlier, row)
            self.stats = message["stats"]
            self.on_stats(self.stats)
        self._deliver(rows)
        # The round ends two turns of the event loop from now: in the first the tasks that this woke
        # run, and write; then what has arrived meanwhile is read; then `_pause` is called.
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, self._pause, self.transport, started)

    def _deliver(self, rows: dict):
        """Give each choice its tokens, once."""
        for id, tokens, finish_reason, *more in rows.values():
            choice = self.choices.pop(id, None) if finish_reason else self.choices.get(id)
            if not choice:
                continue  # it was aborted, and this was already under way
            choice.job.on_tokens(choice, tokens, finish_reason, *more)
            if choice.finish_reason:  # perhaps for a stop string, unknown to the engine
                self.abort(choice)
        rows.clear()

    def connection_lost(self, error):
        if self.transport:  # else `close` did it
            self.transport = None
            self._end(self.last_words or CRASHED)

    # messages of the engine

    def _on_message(self, message):
        match message.pop("op"):
            case "ready":
                self.state = "ready"
                self.reason = ""
                self.info = message
                self.on_state("ready")
            case "events":
                self.on_events(message["lines"].split("\n") if message["lines"] else [])
            case "error":
                if choice := self.choices.get(message["id"]):
                    choice.job.on_refusal(
                        message["kind"], message["message"], message.get("tools", ())
                    )
            case "fatal":
                self.last_words = message["message"]

    def _pause(self, transport, started: float):
        """
        End a round that began at `started`: leave the link unread (backpressure) for as long as the
        round took.
        """
        pause = min(MAX_PAUSE, time.monotonic() - started)
        if pause >= MIN_PAUSE and transport is self.transport and not self.is_paused:
            self.is_paused = True
            transport.pause_reading()
            asyncio.get_running_loop().call_later(pause, self._resume, transport)

    def _resume(self, transport):
        self.is_paused = False
        if transport is self.transport:  # else it is closed
            transport.resume_reading()

    def _end(self, reason: str):
        """The engine is gone: so is all it was working at. The first time, start another one."""
        restart = self.state == "ready" and self.may_restart
        self.reason = f"{reason}, a new one is starting" if restart else reason
        self.state = "restarting" if restart else "dead"
        self.stats = IDLE
        self.on_stats(IDLE)
        self.on_state(self.state)
        self.refuse_all(ApiError(500, self.reason, code="engine_dead"))
        if restart:
            self.may_restart = False
            try:
                self._connect()
            except OSError as error:  # such as too many open files
                return self._end(f"{reason}, and no new one can start: {error}")
            # kept: the loop itself holds tasks weakly
            self.attaching = asyncio.create_task(self.attach())
