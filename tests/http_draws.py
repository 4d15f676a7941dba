"""From a seed to a run of simulator_http.py: its settings, calls, clients and faults."""

import random

KEYS = ["sesame", "simsim"]
CALLS = [
    "stream", "n", "stop", "echo", "scored_echo", "logprobs", "chat", "prompts", "salt", "priority",
    "seedless", "ignore_eos", "usage", "long", "big", "chunked", "bad", "get", "tokenize",
]  # fmt: skip
CLIENTS = ["burst", "slow", "vanish", "pieces", "pipeline"]
FAULTS = ["kill_engine", "stall_engine", "cannot_load", "fail_step", "stop"]


LEAVES = {  # after so many bytes, so many seconds, or this text
    "sent": [1, 100, 250],
    "read": [1, 300, 1000],
    "said": ["finish_reason", '"stop"', "DONE"],
    "seconds": [0.001, 0.01, 0.1, 0.5, 1.0],
}
BAD = [
    {"path": "/v1/completions", "raw": "{", "refused": 400},
    {"path": "/v1/completions", "raw": '{"prompt": 1}', "refused": 400},
    {"path": "/v1/completions", "raw": '{"prompt": "a"}', "type": "text/plain", "refused": 400},
    {"path": "/v1/completions", "raw": '{"prompt": "a\\u0000"}', "refused": 400},
    {"path": "/v1/completions", "raw": '{"prompt": "a", "max_tokens": 100000}', "refused": 400},
    {"path": "/v1/completions", "raw": '{"prompt": "a", "model": "other"}', "refused": 404},
    {"path": "/nowhere", "refused": 404},
    {"path": "/tokenize", "refused": 405},
    {"path": "/v1/completions", "raw": '{"prompt": "a"}', "key": "wrong", "refused": 401},
]
SCORES = {
    "prompt": [{"logprobs": 0}, {"logprobs": 2}],
    "messages": [{"logprobs": True, "top_logprobs": 2}],
}
SETTINGS = {
    "keys": [0, 2],
    "max_num_seqs": [1, 2, 3, 4],
    "max_queue": [0, 2, 8, 20],
    "block_size": [2, 4, 8],
    "num_tokens": [96, 128, 192],
    "token_budget": [4, 8, 64],
    "overlap": [True, False],
    "start_seconds": [0.0, 0.1],
    "load_seconds": [0.0, 0.3],
    "step_seconds": [0.001, 0.02, 0.05],
    "encode_seconds": [0.0, 0.01, 0.2],
    "turn_seconds": [0.0, 0.0, 0.0005, 0.002],
    "request_seconds": [2.0, 5.0, 60.0],
    "client_seconds": [1.0, 4.0],
    "drain_seconds": [0.0, 1.0, 5.0],
    "ping_seconds": [0.05, 10.0],
    "max_connections": [4, 100, 100],
    "short": [20, 4096],
    "max_waiting": [120, 2**26],
    "max_long_answers": [1, 4],
    "tcp_room": [1000, 2**16],
    "tcp_piece": [200, 2**18],
    "link_room": [100, 1000, 2**16],
    "link_piece": [50, 2**18],
    "link_high": [0, 2**16],
}


def draw(seed: int, steps: int) -> tuple[dict, list[dict]]:
    """The settings and the events of a seed."""
    rng = random.Random(seed)
    chosen = {name for name in CALLS + CLIENTS + FAULTS if rng.random() < 0.5}
    for name in ("stop", "cannot_load"):  # after these little is left of a run
        if rng.random() < 0.5:
            chosen.discard(name)
    settings = {"seed": seed}
    settings |= {name: rng.choice(values) for name, values in SETTINGS.items()}
    events = []
    t = rng.choice([0.01, 0.5, 1.0])
    for number in range(steps):
        event = draw_event(rng, number, settings, chosen)
        is_starting = events and events[-1]["do"] == "kill_engine"
        if is_starting and rng.random() < 0.3:
            event = {"do": "kill_engine"}
        pause = rng.random() * 0.4
        is_burst = "burst" in chosen and rng.random() < 0.7
        if is_burst or event["do"] != "call":  # while the call before is in work
            pause = rng.choice([0.0, 0.001, 0.01, 0.05, 0.15])
        t += pause
        events.append(event | {"t": round(t, 4)})
    return settings, events


def draw_event(rng: random.Random, number: int, settings: dict, chosen: set[str]) -> dict:
    faults = [fault for fault in FAULTS if fault in chosen]
    if not faults or rng.random() > 0.15:
        return draw_visit(rng, number, settings, chosen)
    fault = rng.choice(faults)
    event = {"do": fault}
    if fault == "stall_engine":
        event["seconds"] = rng.choice([0.05, 0.5, 3.0])
    if fault == "fail_step":
        event["where"] = rng.choice(["launch", "collect", "logits", "logits"])
    return event


def draw_visit(rng: random.Random, number: int, settings: dict, chosen: set[str]) -> dict:
    """A client's connection."""
    count = rng.randint(2, 4) if "pipeline" in chosen and rng.random() < 0.3 else 1
    calls = [draw_call(rng, 10 * number + i, settings, chosen) for i in range(count)]
    event = {"do": "call", "calls": calls}
    if "pieces" in chosen and rng.random() < 0.4:
        event |= {"pieces": rng.randint(2, 6), "gap": rng.choice([0.001, 0.01, 0.4])}
    if "slow" in chosen and rng.random() < 0.3:
        sip, rest = rng.choice([(50, 0.02), (300, 0.1), (5000, 1.5)])
        event |= {"sip": sip, "rest": rest}
    if "vanish" in chosen and rng.random() < 0.4:
        kind = rng.choice(list(LEAVES))
        event["leaves"] = [kind, rng.choice(LEAVES[kind])]
        event["how"] = rng.choice(["reset", "close"])
    return event


def draw_call(rng: random.Random, id: int, settings: dict, chosen: set[str]) -> dict:
    key = rng.choice(KEYS[: settings["keys"]]) if settings["keys"] else None
    if "bad" in chosen and rng.random() < 0.15:
        bad = rng.choice(BAD[: None if settings["keys"] else -1])
        return {"id": id, "key": key} | bad
    if "get" in chosen and rng.random() < 0.2:
        path = rng.choice(["/metrics", "/health", "/livez", "/readyz", "/v1/models", "/"])
        return {"id": id, "key": key, "path": path}
    if "tokenize" in chosen and rng.random() < 0.1:
        return {"id": id, "key": key, "path": "/tokenize", "body": {"prompt": f"ab€~{id}"}}
    call = {"id": id, "key": key, "path": "/v1/completions", "body": draw_body(rng, id, chosen)}
    if "messages" in call["body"]:
        call["path"] = "/v1/chat/completions"
    if "chunked" in chosen and rng.random() < 0.3:
        call["chunked"] = True
    return call


def draw_body(rng: random.Random, id: int, chosen: set[str]) -> dict:
    """Of a completion. Every prompt ends with its call's number."""

    def text(place: int) -> str:
        start = rng.choice(["abcabcabcabc", "abcabc", "€", "bbbb"])
        return start * (3 if "long" in chosen and rng.random() < 0.3 else 1) + f"~{id}.{place}"

    def has(name: str, chance: float = 0.4) -> bool:
        return name in chosen and rng.random() < chance

    body: dict = {"max_tokens": rng.choice([16, 40] if "big" in chosen else [1, 4, 12])}
    if has("chat"):
        body["messages"] = [{"role": "user", "content": text(0)}]
    else:
        body["prompt"] = [text(i) for i in range(rng.randint(1, 3))] if has("prompts") else text(0)
    if not has("seedless"):
        body["seed"] = rng.randint(0, 99)
    if has("stream", 0.6):
        body["stream"] = True
        if has("usage"):
            body["stream_options"] = {"include_usage": True}
    if has("n"):
        body["n"] = rng.randint(1, 4)
    if has("stop"):
        body["stop"] = rng.choice([["a"], ["b ", "€"], ["ab", "bc", "abc"], ["ccc€"]])
    if has("ignore_eos"):
        body["ignore_eos"] = True
    if has("salt"):
        body["cache_salt"] = rng.choice(["x", "y"])
    if has("priority"):
        body["priority"] = rng.choice([-5, 5])
    if "prompt" in body and has("echo"):
        body["echo"] = True
        if has("scored_echo", 0.2):
            body["max_tokens"] = 0
    if has("logprobs"):
        body |= rng.choice(SCORES["messages" if "messages" in body else "prompt"])
    return body
