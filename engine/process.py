"""
The server's loop around the engine: read the HTTP process's messages, run a step, send tokens.

    serve(engine, Link(sock), "out/stdlib")         # until the HTTP process is gone

The loop runs in a thread or process of its own. These messages are sent over the link (link.py):

    in   {"op": "add", "id", "prompt", "params", "options", "grammar", "owner"}
             options    further arguments of add_request, if any
             grammar    {"kind", "text"} as for Grammars.compile, if there is a grammar
             owner      with a grammar: who sent it; owners take turns to have grammars compiled
         {"op": "abort", "id"}
         {"op": "listen", "on", "tokens"}
             on         whether there are listeners
             tokens     whether they get token ids
    out  {"op": "ready", "max_model_len", "max_num_seqs", "vocab_size", "eos_token_ids", "stages"}
         {"op": "step", "out", "stats"}
             out        the rows of `queue_output`
         {"op": "events", "lines"}
             lines      what the engine does, while there are listeners (see events.py)
         {"op": "error", "id", "message", "kind", "tools"}
             kind       "invalid" if the client can correct the error, otherwise "internal"
             tools      the numbers of the tools whose schemas are refused
"""

from engine.engine import Engine
from engine.link import Link
from engine.step import STUCK, Output
from params import SamplingParams


def serve(engine: Engine, link: Link, directory: str = ""):
    """Serve the model in this directory until the HTTP process is gone."""
    greet(engine, link, directory)
    while link.is_open:
        serve_step(engine, link)


def greet(engine: Engine, link: Link, directory: str):
    """Send the limits and the stages, which the HTTP process must know before its first request."""
    for stage in engine.stages.values():
        stage.connect(link, directory)
    ready = {
        "op": "ready",
        "max_model_len": engine.max_model_len,
        "max_num_seqs": engine.scheduler.max_num_seqs,
        "vocab_size": engine.config.vocab_size,
        "eos_token_ids": engine.config.eos_token_ids,
        "stages": list(engine.stages),
    }
    link.send(ready)


def serve_step(engine: Engine, link: Link):
    """
    Handle the messages that have arrived, compute a step, and send its tokens. Sleeps while idle.
    """
    stages = engine.stages.values()
    timeout = 0
    if not engine.has_work:
        due = [stage.due_in() for stage in stages]
        timeout = min((seconds for seconds in due if seconds is not None), default=None)
    messages = link.receive(timeout)
    for stage in stages:
        messages = stage.arrived(messages)
    for message in messages:
        handle_message(engine, link, message)
    for output in engine.step():
        queue_output(link, output)
    if not link.unsent:  # otherwise rows and delays accumulate until the link is free
        link.flush(engine.stats())
    for stage in stages:
        stage.sent()


def handle_message(engine: Engine, link: Link, message: dict):
    """Carry out a message. If it is refused, queue the reason on the link; nothing is raised."""
    match message["op"]:
        case "add":
            try:
                add_request(engine, message)
            except (ValueError, TypeError, ImportError) as error:
                tools = getattr(error, "tools", [])
                queue_error(link, message["id"], "invalid", str(error), tools)
            except OSError as error:
                reason = f"the grammar could not be compiled: {error}"
                queue_error(link, message["id"], "internal", reason)
        case "abort":
            engine.abort(message["id"])


def add_request(engine: Engine, message: dict):
    """
    Add a message's request to the engine. Raises ValueError or TypeError if the engine refuses it,
    and ImportError or OSError if its grammar could not be compiled here.
    """
    params = message["params"]
    bias = params.get("logit_bias")
    if bias:
        # JSON keys are strings
        params["logit_bias"] = {int(token): b for token, b in bias.items()}
    options = message.get("options", {})
    if "grammar" in message:
        params["grammar"] = message["grammar"].result()
    engine.add_request(message["id"], message["prompt"], SamplingParams(**params), **options)


def queue_output(link: Link, output: Output):
    """Queue the output of a step for one request, for the next flush."""
    if output.error:
        kind = "invalid" if output.error.startswith(STUCK) else "internal"
        return queue_error(link, output.id, kind, output.error)
    scores = [output.logprobs] if output.logprobs else None
    row = [output.id, output.tokens, output.finish_reason, output.cached_tokens]
    link.queue_row([*row, scores, output.prompt_logprobs])


def queue_error(link: Link, id: str, kind: str, message: str, tools=()):
    link.queue({"op": "error", "id": id, "message": message, "kind": kind, "tools": tools})
