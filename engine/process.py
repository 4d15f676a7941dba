"""
The server's loop around the engine: messages of HTTP processes in, a step, its tokens out.

    serve(engine, Links(listener))                  # until all HTTP processes are gone

For a thread or a process of its own. Over each link (links.py has the wire) go

    in   {"op": "add", "id", "prompt", "params", "options": more arguments of add_request, if any,
          "grammar": {"kind", "text"} of Grammars.compile, if its answer is held to one}
         {"op": "abort", "id"}
         {"op": "listen", "on", "tokens"}: there are listeners, or no more
    out  {"op": "ready", "max_model_len", "max_num_seqs", "vocab_size", "eos_token_ids"}
         {"op": "step", "out": rows of `send_output`, "stats"}
         {"op": "events", "lines"}: what happens, while there are listeners; see events.py
         {"op": "error", "id", "message", "kind"}: "invalid" for what the client can change, "full"
         for backpressure (more than `max_queue` choices would wait for a row), else "internal"

Ids are the link's own: in the engine, its number and a colon come before them. When a link closes,
its requests are aborted.
"""

from collections.abc import Callable

from common import plural
from engine.engine import Engine, Output
from engine.events import Subscribers
from engine.grammar import STUCK, Compiler, Grammars
from engine.links import Link, Links
from params import SamplingParams

COMPILE_POLL = 0.002  # seconds between two looks of an idle engine whether a grammar is compiled


def serve(
    engine: Engine,
    links: Links,
    max_queue: int | None = None,
    open_grammars: Callable[[], Grammars] = dict,
):
    """
    Serve until no HTTP process is left. With more than `max_queue` choices waiting for a row,
    further ones are refused; None: any number may wait. `open_grammars`: see `Compiler`.
    """
    links.set_greeting(greeting(engine))
    subscribers = Subscribers(engine)
    compiler = Compiler(open_grammars)
    while links.is_wanted:
        serve_step(engine, links, subscribers, max_queue, compiler)


def greeting(engine: Engine) -> dict:
    """The limits that an HTTP process must know before its first request."""
    return {
        "op": "ready",
        "max_model_len": engine.max_model_len,
        "max_num_seqs": engine.scheduler.max_num_seqs,
        "vocab_size": engine.config.vocab_size,
        "eos_token_ids": engine.config.eos_token_ids,
    }


def serve_step(
    engine: Engine,
    links: Links,
    subscribers: Subscribers,
    max_queue: int | None,
    compiler: Compiler,
):
    """Handle the messages that have arrived, compute a step, send its tokens. Sleeps when idle."""
    timeout = 0 if engine.has_work else subscribers.due_in(links)
    if compiler.waiting and timeout != 0:
        timeout = COMPILE_POLL
    for link, message in compiler.pass_on(links.receive(timeout)):
        if message["op"] == "listen" and message["on"]:
            subscribers.join(link, message["tokens"])
        elif message["op"] in ("listen", "gone"):
            subscribers.leave(link)
        handle_message(engine, link, message, max_queue)
    outputs = engine.step()
    stats = engine.stats()
    for output in outputs:
        send_output(links, output)
    links.flush(stats)
    if subscribers.is_on:
        subscribers.publish(links)


def handle_message(engine: Engine, link: Link, message: dict, max_queue: int | None):
    """Carry out a message. The reason of a refusal is queued on its link, not raised."""
    match message["op"]:
        case "add":
            try:
                kind = "full"
                problem = queue_problem(engine, message, max_queue)
                if not problem:
                    add_request(engine, link, message)
            except (ValueError, TypeError) as error:
                kind = "invalid"
                problem = str(error)
            if problem:
                link.queue({"op": "error", "id": message["id"], "message": problem, "kind": kind})
        case "abort":
            engine.abort(f"{link.number}:{message['id']}")
        case "gone":
            for id in [*engine.requests, *engine.promised]:
                if id.startswith(f"{link.number}:"):
                    engine.abort(id)


def queue_problem(engine: Engine, message: dict, max_queue: int | None) -> str:
    """
    Why the queue cannot take a request, "" if it can. Decided here, where the requests of all HTTP
    processes meet.
    """
    if max_queue is None:
        return ""
    count = message.get("options", {}).get("n", 1)
    at_work = engine.num_at_work
    capacity = engine.scheduler.max_num_seqs + max_queue
    if count + at_work <= capacity:
        return ""
    choices = plural(count, "choice")
    return f"{choices} beside {at_work} in work: at most {capacity} are taken, try again later"


def add_request(engine: Engine, link: Link, message: dict):
    """
    Add a message's request to the engine. Raises ValueError or TypeError for what the engine
    refuses.
    """
    params = message["params"]
    bias = params.get("logit_bias")
    if bias:
        params["logit_bias"] = {int(token): b for token, b in bias.items()}  # JSON's keys are texts
    id = f"{link.number}:{message['id']}"
    options = message.get("options", {})
    if "grammar" in message:
        params["grammar"] = message["grammar"].result()
    engine.add_request(id, message["prompt"], SamplingParams(**params), **options)


def send_output(links: Links, output: Output):
    """Queue a request's output of a step on the link that added it."""
    number, _, id = output.id.partition(":")
    link = links.links.get(int(number))
    if link is None:  # its process is gone, and this was on its way
        return
    if output.error:
        kind = "invalid" if output.error.startswith(STUCK) else "internal"
        link.queue({"op": "error", "id": id, "message": output.error, "kind": kind})
        return
    scores = [output.logprobs] if output.logprobs else None
    row = [id, output.tokens, output.finish_reason, output.cached_tokens]
    link.queue_row([*row, scores, output.prompt_logprobs])
