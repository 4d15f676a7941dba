"""
Replicas of a server on a Ray cluster, by Ray Serve, which places them on machines, starts again
those that fail, and starts more while more requests run than max-num-seqs.

    pip install -r requirements.txt 'ray[serve]>=2.60'     # on every machine; and the model
    serve run examples.ray_serve:app model=out/stdlib replicas=2 max-replicas=4

All other options are serve.py's flags that have a value, such as `dtype=bf16`; but host, port and
client-seconds have no meaning here. Each replica has an engine: on a GPU of its own, where `serve
run` finds one or device=cuda is given; else on one core, or as many as OMP_NUM_THREADS in the
environment says.

A replica that is removed finishes its answers first, for at most drain-seconds. Ctrl-C cuts them
off, as Ray ends its proxies first: `serve.delete("default")` in Python does not. A replica
starts its engine again when it dies. If the engine does not come back, or dies again, Ray starts
the replica again. Until then the replica answers 503.

Ray's proxies, one a machine, listen at 127.0.0.1:8000 unless told otherwise. Keys, Host and Origin
are checked as always: before they listen elsewhere set $PAGEDGPT_API_KEY, for nothing refuses to
start without one. Ray's own ports are open to the network, behind a token of its own.

What this does not do:
- route by prefix: each call goes to the less busy of two replicas, wherever its prompt is cached.
  A router of requests in Ray Serve does not see an ASGI application's prompts. A router made for
  it, in front of several serve.py, does.
- limit connections, slow clients and the size of headers: Ray's proxy stands in for
  server/connection.py, and holds what a client sends or does not read, without a limit.
- show all at once: the page and /metrics are those of the replica that happens to answer.

Measured on two cores of a CPU that others used, too, with the default model: one stream of 200
tokens at a time, 40 in turns with serve.py, medians. To the first token 18 ms, where serve.py takes
8.5; between two tokens 2.8 ms, where it takes 2.1. That is with RAY_worker_niceness=0 in the
environment: else Ray's processes give way to all others, and the first token took 22 to 66 ms.
"""

import asyncio
from argparse import Namespace

from ray import serve

from flags import parse_args
from params import CPU_SEQS, GPU_SEQS
from serve import api_keys, client_and_encoder, set_environment
from server.app import Service
from server.connection import Call, request_id
from server.gate import Gate


@serve.ingress()
class Replica:
    """
    Serve calls as serve.py's HTTP process does, but without a port: Ray's proxies pass the calls
    on.
    """

    async def __init__(self, args: Namespace, keys: list[str]):
        set_environment()
        client, encoder = client_and_encoder(args)
        self.service = Service(client, encoder, args, keys)
        await client.attach()
        while client.state == "loading":
            await asyncio.sleep(0.05)
        await self.check_health()

    def __serve_build_asgi_app__(self):
        gate = Gate(self.service)

        async def respond(scope, receive, send):  # no method: Ray would call it with only scope
            if scope["type"] != "http":  # ASGI's start and end; and WebSockets, which it refuses
                return await self.service.router(scope, receive, send)
            scope["call"] = Call(request_id(dict(scope["headers"])[b"x-request-id"]))
            await gate(scope, receive, send)

        return respond

    async def check_health(self):
        if trouble := self.service.client.trouble():
            raise RuntimeError(trouble)


def app(options: dict[str, str]) -> serve.Application:
    """Return what `serve run` runs. Raises ValueError; exits if a flag is wrong."""
    import torch  # here: a replica needs none in the process that answers

    replicas = int(options.pop("replicas", 1))
    scaling = {"min_replicas": replicas, "max_replicas": int(options.pop("max-replicas", replicas))}
    args = parse_args([f"--{name}={value}" for name, value in options.items()])
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.startswith("cuda")
    scaling["target_ongoing_requests"] = args.max_num_seqs or (GPU_SEQS if on_gpu else CPU_SEQS)
    deployment = serve.deployment(
        Replica,
        name="pagedgpt",
        autoscaling_config=scaling,
        max_ongoing_requests=args.max_connections,
        graceful_shutdown_timeout_s=args.drain_seconds,
        health_check_period_s=3,
        ray_actor_options={"num_gpus": int(on_gpu)},
    )
    return deployment.bind(args, api_keys(args))
