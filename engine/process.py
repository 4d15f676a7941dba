"""
The server's loop around the engine: messages of the HTTP process in, a step, its tokens out.

    serve(engine, Link(sock), "out/stdlib")         # until the HTTP process is gone

For a thread or a process of its own. Over the link (link.py has the wire) go

    in   {"op": "add", "id", "prompt", "params", "options": more arguments of add_request, if any,
          "grammar": {"kind", "text"} of Grammars.compile, if its answer is held to one, and then
          "owner", by whose turns grammars are compiled}
         {"op": "abort", "id"}
         {"op": "listen", "on", "tokens"}: there are listeners, or no more
    out  {"op": "ready", "max_model_len", "max_num_seqs", "vocab_size", "eos_token_ids", "stages"}
         {"op": "step", "out": rows of `queue_output`, "stats"}
         {"op": "events", "lines"}: what happens, while there are listeners; see events.py
         {"op": "error", "id", "message", "kind", "tools"}: "invalid" for what the client can
         change, else "internal"; numbers of the tools whose schemas are refused
"""

from engine.engine import Engine
from engine.link import Link
from engine.step import STUCK, Output
from params import SamplingParams


def serve(engine: Engine, link: Link, directory: str = ""):
    """Serve the model of this directory until the HTTP process is gone."""
    greet(engine, link, directory)
    while link.is_open:
        serve_step(engine, link)


def greet(engine: Engine, link: Link, directory: str):
    """Send what the HTTP process must know before its first request: limits, and the stages."""
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
    """Handle the messages that have arrived, compute a step, send its tokens. Sleeps when idle."""
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
    if not link.unsent:  # else rows and delays gather until there is room
        link.flush(engine.stats())
    for stage in stages:
        stage.sent()


def handle_message(engine: Engine, link: Link, message: dict):
    """Carry out a message. The reason of a refusal is queued on the link, not raised."""
    match message["op"]:
        case "add":
            try:
                add_request(engine, message)
            except (ValueError, TypeError, ImportError) as error:
                tools = getattr(error, "tools", [])
                queue_error(link, message["id"], "invalid", str(error), tools)
            except OSError as error:
                reason = f"the grammar was not compiled: {error}"
                queue_error(link, message["id"], "internal", reason)
        case "abort":
            engine.abort(message["id"])


def add_request(engine: Engine, message: dict):
    """
    Add a message's request to the engine. Raises ValueError or TypeError for what the engine
    refuses, ImportError or OSError for a grammar that cannot be compiled here and now.
    """
    params = message["params"]
    bias = params.get("logit_bias")
    if bias:
        params["logit_bias"] = {int(token): b for token, b in bias.items()}  # JSON's keys are texts
    options = message.get("options", {})
    if "grammar" in message:
        params["grammar"] = message["grammar"].result()
    engine.add_request(message["id"], message["prompt"], SamplingParams(**params), **options)


def queue_output(link: Link, output: Output):
    """Have a request's output of a step sent."""
    if output.error:
        kind = "invalid" if output.error.startswith(STUCK) else "internal"
        return queue_error(link, output.id, kind, output.error)
    scores = [output.logprobs] if output.logprobs else None
    row = [output.id, output.tokens, output.finish_reason, output.cached_tokens]
    link.queue_row([*row, scores, output.prompt_logprobs])


def queue_error(link: Link, id: str, kind: str, message: str, tools=()):
    link.queue({"op": "error", "id": id, "message": message, "kind": kind, "tools": tools})
