"""
Replicas of a server on a Ray cluster. Ray Serve places them on machines and restarts those that
fail. It starts more replicas while more requests are running than max-num-seqs per replica.

    pip install -r requirements.txt 'ray[serve]>=2.60'     # on every machine, with the model
    serve run examples.ray_serve:app model=out/stdlib replicas=2 max-replicas=4

All other options are serve.py flags that take a value, for example `dtype=bf16`. The flags host,
port and client-seconds have no effect here. Each replica has its own engine. The engine runs on a
GPU of its own if `serve run` finds a GPU or device=cuda is given. Otherwise, it uses one core, or
as many as the environment variable OMP_NUM_THREADS says.

A replica that is being removed finishes its answers first, for at most drain-seconds. Ctrl-C cuts
answers off, because Ray ends its proxies first; to avoid this, call `serve.delete("default")` in
Python. If an engine dies, its replica restarts it. If the restart fails, or the engine dies again,
Ray restarts the replica. Until then, the replica responds with 503.

Each machine has a Ray proxy, which listens on 127.0.0.1:8000 by default. Keys, Host and Origin are
checked as in serve.py. But unlike serve.py, this application starts on any address without a key,
so set $PAGEDGPT_API_KEY before the proxies listen elsewhere. Ray's own ports are open to the
network, and are protected by Ray's own token.

What this application does not do:
- Route by prefix: each call goes to the less busy of two replicas, wherever its prompt is cached.
  Routers inside Ray Serve do not see the prompts of an ASGI application. A dedicated router in
  front of several serve.py instances does (see replicas.py).
- Limit connections, slow clients and the size of headers: Ray's proxy replaces
  server/connection.py, and buffers without limit what a client sends or does not read.
- Show everything in one place: the page and /metrics only show the replica that happens to answer.

Measured with the default model on two cores of a CPU that was not idle: 40 streams of 200 tokens,
one at a time, alternating with 40 from serve.py. The medians are 18 ms for the first token
(serve.py: 8.5), and 2.8 ms for each further token (serve.py: 2.1). RAY_worker_niceness=0 was set in
the environment. Without it, Ray's processes yield to all others, and the first token took 22 to 66
ms.
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
    Serves calls like serve.py's HTTP process, but without a port of its own: Ray's proxies forward
    the calls.
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

        # a function, because Ray would call a method with only `scope`
        async def respond(scope, receive, send):
            if scope["type"] != "http":  # the server's start and end; WebSockets (refused)
                return await self.service.router(scope, receive, send)
            scope["call"] = Call(request_id(dict(scope["headers"])[b"x-request-id"]))
            await gate(scope, receive, send)

        return respond

    async def check_health(self):
        if trouble := self.service.client.trouble():
            raise RuntimeError(trouble)


def app(options: dict[str, str]) -> serve.Application:
    """Return the application for `serve run`. Raises ValueError, or exits if a flag is wrong."""
    import torch  # imported here because a replica's answering process does not need it

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
