"""From a seed to a run of simulator_http.py: its settings, calls, clients and faults."""

import random

KEYS = ["sesame", "simsim"]
CALLS = ["stream", "usage", "n", "stop", "logprobs", "prompts", "salt", "priority", "ignore_eos"]
CALLS += ["big", "bad", "get"]
CLIENTS = ["burst", "slow", "vanish", "pieces", "pipeline"]
FAULTS = ["kill_engine", "stall_engine", "cannot_load", "fail_step", "stop"]
PATHS = ["/metrics", "/health", "/livez", "/readyz", "/v1/models", "/"]
LEAVES = {  # after so many bytes, so many seconds, or this text
    "sent": [1, 100, 250],
    "read": [1, 300, 1000],
    "said": ["finish_reason", '"stop"', "DONE"],
    "seconds": [0.001, 0.01, 0.1, 0.5, 1.0],
}
BAD = [
    {"raw": "{", "refused": 400},
    {"raw": '{"prompt": "a"}', "type": "text/plain", "refused": 400},
    {"raw": '{"prompt": "a", "model": "other"}', "refused": 404},
    {"raw": '{"prompt": "a"}', "key": "wrong", "refused": 401},
    {"path": "/nowhere", "refused": 404},
]
SETTINGS = {
    "max_num_seqs": [1, 2, 3, 4],
    "max_queue": [0, 2, 8, 20],
    "num_blocks": [24, 48],
    "token_budget": [4, 64],
    "overlap": [True, False],
    "load_seconds": [0.0, 0.3],
    "step_seconds": [0.001, 0.02, 0.05],
    "encode_seconds": [0.0, 0.01, 0.2],
    "turn_seconds": [0.0, 0.0, 0.0005, 0.002],
    "request_seconds": [2.0, 5.0, 60.0],
    "client_seconds": [1.0, 4.0],
    "drain_seconds": [0.0, 1.0, 5.0],
    "ping_seconds": [0.05, 10.0],
    "max_connections": [4, 100, 100],
    "tcp_room": [1000, 2**16],
    "tcp_piece": [200, 2**18],
    "link_room": [100, 1000, 2**16],
    "link_piece": [50, 2**18],
    "link_high": [0, 2**16],
}


def draw(seed: int, steps: int) -> tuple[dict, list[dict]]:
    """The settings and the events of a seed."""
    run = Run(seed)
    return run.settings, run.events(steps)


class Run:
    """Swarm testing: a run has a random half of all features, clients and faults."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        names = CALLS + CLIENTS + FAULTS
        self.chosen = {name for name in names if self.rng.random() < 0.5}
        for name in ("stop", "cannot_load"):  # after these little is left of a run
            if self.rng.random() < 0.5:
                self.chosen.discard(name)
        self.faults = [fault for fault in FAULTS if fault in self.chosen]
        self.settings = {"seed": seed}
        for name, values in SETTINGS.items():
            self.settings[name] = self.rng.choice(values)

    def has(self, name: str, chance: float = 0.4) -> bool:
        return name in self.chosen and self.rng.random() < chance

    def events(self, steps: int) -> list[dict]:
        events = []
        t = self.rng.choice([0.01, 0.5, 1.0])
        for number in range(steps):
            event = self.event(number)
            if events and events[-1]["do"] == "kill_engine" and self.rng.random() < 0.3:
                event = {"do": "kill_engine"}  # the next one, while it starts
            t += self.pause(event)
            events.append(event | {"t": round(t, 4)})
        return events

    def pause(self, event: dict) -> float:
        """Before an event; a short one while the call before is in work."""
        if self.has("burst", 0.7) or event["do"] != "call":
            return self.rng.choice([0.0, 0.001, 0.01, 0.05, 0.15])
        return self.rng.random() * 0.4

    def event(self, number: int) -> dict:
        if not self.faults or self.rng.random() > 0.15:
            return self.visit(number)
        event = {"do": self.rng.choice(self.faults)}
        if event["do"] == "stall_engine":
            event["seconds"] = self.rng.choice([0.05, 0.5, 3.0])
        if event["do"] == "fail_step":
            event["where"] = self.rng.choice(["launch", "collect", "logits", "logits"])
        return event

    def visit(self, number: int) -> dict:
        """A client's connection."""
        count = self.rng.randint(2, 4) if self.has("pipeline", 0.3) else 1
        event = {"do": "call", "calls": [self.call(10 * number + i) for i in range(count)]}
        if self.has("pieces"):
            event["pieces"] = self.rng.randint(2, 6)
            event["gap"] = self.rng.choice([0.001, 0.01, 0.4])
        if self.has("slow", 0.3):
            sizes = [(50, 0.02), (300, 0.1), (5000, 1.5)]
            event["sip"], event["rest"] = self.rng.choice(sizes)
        if self.has("vanish"):
            kind = self.rng.choice(list(LEAVES))
            event["leaves"] = [kind, self.rng.choice(LEAVES[kind])]
            event["how"] = self.rng.choice(["reset", "close"])
        return event

    def call(self, id: int) -> dict:
        call = {"id": id, "key": self.rng.choice(KEYS), "path": "/v1/completions"}
        if self.has("bad", 0.15):
            return call | self.rng.choice(BAD)
        if self.has("get", 0.2):
            return call | {"path": self.rng.choice(PATHS)}
        return call | {"body": self.body(id)}

    def body(self, id: int) -> dict:
        """Of a completion. Every prompt ends with its call's number."""
        rng = self.rng
        count = rng.randint(1, 3) if self.has("prompts") else 1
        starts = ["abcabcabcabc" * 3, "abcabc", "€", "bbbb"]
        body = {"prompt": [f"{rng.choice(starts)}~{id}.{i}" for i in range(count)]}
        body["max_tokens"] = rng.choice([16, 40] if "big" in self.chosen else [1, 4, 12])
        body["seed"] = rng.randint(0, 99)
        if self.has("stream", 0.6):
            body["stream"] = True
            if self.has("usage"):
                body["stream_options"] = {"include_usage": True}
        if self.has("n"):
            body["n"] = rng.randint(1, 4)
        if self.has("stop"):
            body["stop"] = rng.choice(["a", "bc", "ccc€"])
        if self.has("ignore_eos"):
            body["ignore_eos"] = True
        if self.has("salt"):
            body["cache_salt"] = rng.choice(["x", "y"])
        if self.has("priority"):
            body["priority"] = rng.choice([-5, 5])
        if self.has("logprobs"):
            body["logprobs"] = rng.choice([0, 2])
        return body
