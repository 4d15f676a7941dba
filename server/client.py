"""
The HTTP process's end of the link to the engine: sends requests, and receives tokens in rounds.

    client = EngineClient(start)           # the engine starts to load before the event loop runs
    await client.attach()                  # inside the event loop
    client.submit(choices)                 # later calls the job's `on_tokens` or `on_refusal`

Not run by itself: serve.py creates an EngineClient. link.py is the other end, and process.py lists
the messages. answers.py converts the tokens to text.
"""

import asyncio
import itertools
import time

from engine.link import add_row, read_messages, to_line
from server.protocol import ApiError

STALL_SECONDS = 120  # an engine with work that sends nothing for this long counts as dead
CRASHED = "the engine stopped unexpectedly"
IDLE = {"running": 0, "waiting": 0, "kv_usage": 0.0}  # fields needed from Engine.stats(), when idle

# Backpressure: the busier this process is, the more tokens it sends in one write. In each round, it
# reads everything that the engine has sent, and writes it to the streams. Each write to a stream
# costs much more than a token. With 256 streams and a write for each token, this process would do
# nothing else, and new requests would not be read until earlier streams had ended.
#
# So after each round, the engine's messages are left unread for as long as the round took, up to a
# limit. A round lasts until the event loop has run everything that was ready, including other work.
# The further this process falls behind, the more tokens are joined: first here and, once the link
# is full, also in the engine. New requests are read between rounds. A single stream never waits,
# because its rounds are shorter than the timer resolution.
MIN_PAUSE = 0.001  # seconds; the timer resolution
MAX_PAUSE = 0.02  # seconds; the most this adds to the gap between two tokens


class EngineClient(asyncio.Protocol):
    """
    The link to the engine, and the table of choices that are waiting for tokens. It runs in the
    event loop and never blocks it.

        HTTP process  ------- add, abort, listen ------>  engine process
                      <-- ready, step, error, events, fatal --

    `start()` starts the engine's process, and returns the multiprocessing.Process and the link's
    socket. It is called once, and once more if the engine dies.

    state      loading -> ready -> restarting -> ready -> dead
    info       the engine's "ready" message: max_model_len and other limits
    reason     the reason the engine is gone, or ""
    stats      the latest Engine.stats() from the engine

    Three attributes are callbacks. `on_state(state)` and `on_stats(stats)` are called with each new
    value. After `listen`, `on_events(lines)` is called with new lines from the engine's record
    (events.py), or with no lines if the engine has stopped publishing.
    """

    def __init__(self, start):
        self.start = start
        self.may_restart = True
        self.state = "loading"
        self.info = {}
        self.reason = ""
        self.stats = IDLE
        self.choices = {}  # request id -> the answers.Choice waiting for its tokens
        # clients' own ids are not used, because a client may send the same request_id twice
        self.ids = map(str, itertools.count())
        # time of the engine's last message, or of the first request since it became idle
        self.heard = time.monotonic()
        self.is_paused = False  # waiting between two rounds
        self.on_state = self.on_stats = self.on_events = lambda *changes: None
        self._connect()

    def _connect(self):
        self.unread = bytearray()  # start of a message that has not arrived completely
        # messages to send when the link has room again; a key is operation and request, "abort 5.1"
        self.unsent = {}
        self.is_full = False
        self.fatal_error = ""  # the message that the engine sent before it ended
        self.transport = None
        self.process, self.sock = self.start()

    async def attach(self):
        """Start reading from the link."""
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: self, sock=self.sock)

    def close(self):
        """Close the link, which ends the engine."""
        transport = self.transport
        self.transport = None  # tells `connection_lost` that this side closed the link
        if transport:
            transport.close()

    def submit(self, choices):
        """Send the choices for one prompt to the engine."""
        # an idle engine sends nothing, so its silence is measured from the first request
        if not self.choices:
            self.heard = time.monotonic()
        id = next(self.ids)
        for number, choice in enumerate(choices):  # the engine numbers forks in the same way
            choice.engine_id = f"{id}.{number}" if number else id
            self.choices[choice.engine_id] = choice
        first = choices[0]
        body = first.body
        options = {"n": len(choices), "priority": body.priority, "name": first.job.call.id}
        options |= {"cache_salt": first.job.salt, "prompt_logprobs": body.num_prompt_logprobs}
        params = body.sampling_params(len(first.prompt), self.info["max_model_len"])
        message = {"prompt": first.prompt, "params": params, "options": options}
        if first.job.grammar:
            message |= {"grammar": first.job.grammar, "owner": first.job.call.owner}
        self._write(op="add", id=id, **message)

    def abort(self, choice) -> bool:
        """
        Stop a choice's request. Any tokens that still arrive are dropped. Returns False if the
        request has ended or was never submitted.
        """
        if not self.choices.pop(choice.engine_id, None):
            return False
        self._write(op="abort", id=choice.engine_id)
        # If the engine is not reading, for example during a long step, the request may still be
        # unsent. If so, drop it here. Otherwise, the engine would later compute a prompt for
        # nothing, and clients that come and go in the meantime would fill this process's memory.
        ids = [sibling.engine_id for sibling in choice.siblings]
        add = f"add {ids[0]}"
        if add in self.unsent and self.choices.keys().isdisjoint(ids):
            for message in (add, *(f"abort {id}" for id in ids)):
                self.unsent.pop(message, None)
        return True

    def listen(self, is_on: bool, tokens: bool):
        """
        Tell the engine whether there are listeners. If there are, the engine publishes its record,
        starting with a snapshot. `tokens`: whether to include token ids.
        """
        self._write(op="listen", on=is_on, tokens=tokens)

    def refuse_all(self, error: ApiError):
        """End all calls that are waiting for the engine with this error."""
        for choice in list(self.choices.values()):
            choice.job.fail(error)

    def trouble(self) -> str:
        """
        Return the reason the engine is down, or "" if it is alive. An engine that has work but has
        sent nothing for STALL_SECONDS counts as down.
        """
        stalls = self.choices and time.monotonic() - self.heard > STALL_SECONDS
        return self.reason or (f"no step in {STALL_SECONDS} s" if stalls else "")

    def _write(self, **message):
        if not self.transport:
            return  # the engine is gone, and so are its requests
        if self.is_full:
            self.unsent[f"{message['op']} {message.get('id')}"] = to_line(message)
        else:
            self.transport.write(to_line(message))

    # called by asyncio

    def pause_writing(self):
        self.is_full = True

    def resume_writing(self):
        self.is_full = False
        while self.transport and self.unsent and not self.is_full:  # may run after `close`
            first = next(iter(self.unsent))
            self.transport.write(self.unsent.pop(first))

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data: bytes):
        """
        Run a round: handle all messages that have arrived. If a request has tokens from several
        steps, they are joined and delivered together.
        """
        started = time.monotonic()
        messages = read_messages(self.unread, data)
        if not messages:
            return
        self.heard = started
        rows = {}  # request id -> its rows from these steps, joined
        for message in messages:
            if message["op"] != "step":
                self._deliver(rows)  # deliver tokens that came before an error first
                self._on_message(message)
                continue
            for row in message["out"]:
                add_row(rows, row)
            self.stats = message["stats"]
            self.on_stats(self.stats)
        self._deliver(rows)
        # The round ends two iterations of the event loop from now. In the first iteration, the
        # tasks woken by this round run and write. Then the loop reads what has arrived, and calls
        # `_pause`.
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, self._pause, self.transport, started)

    def _deliver(self, rows: dict):
        """Pass the tokens of each row to its choice, and clear the rows."""
        for id, tokens, finish_reason, *more in rows.values():
            choice = self.choices.pop(id, None) if finish_reason else self.choices.get(id)
            if not choice:
                continue  # aborted while these tokens were on their way
            choice.job.on_tokens(choice, tokens, finish_reason, *more)
            if choice.finish_reason:  # perhaps at a stop string, which the engine does not see
                self.abort(choice)
        rows.clear()

    def connection_lost(self, error):
        if self.transport:  # None if `close` has closed the link
            self.transport = None
            self._end(self.fatal_error or CRASHED)

    # messages from the engine

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
                self.fatal_error = message["message"]

    def _pause(self, transport, started: float):
        """
        End a round that began at `started`, and leave the link unread for as long as the round took
        (backpressure).
        """
        pause = min(MAX_PAUSE, time.monotonic() - started)
        if pause >= MIN_PAUSE and transport is self.transport and not self.is_paused:
            self.is_paused = True
            transport.pause_reading()
            asyncio.get_running_loop().call_later(pause, self._resume, transport)

    def _resume(self, transport):
        self.is_paused = False
        if transport is self.transport:  # otherwise, this transport is closed
            transport.resume_reading()

    def _end(self, reason: str):
        """Fail all calls, because the engine is gone. The first time, also start a new engine."""
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
            # keep a reference to the task, because the event loop has only a weak one
            self.attaching = asyncio.create_task(self.attach())
