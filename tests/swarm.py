"""
Turns a seed into the life of an engine: its settings and what happens to it, for the simulator
(simulator.py).

This is swarm testing: a life has a random subset of all features and faults. If every life had all
of them, some would hide others. For example, an engine that restarts all the time never fills its
queue. Not run by itself.
"""

import random

FEATURES = [
    "n", "priorities", "salts", "stop tokens", "prompt scores", "logprobs", "shared prefixes",
    "forks", "overlap", "padding", "prefix cache", "windows",
]  # fmt: skip
FAULTS = [
    "abort", "step raises", "late step", "broken logits", "tiny pool", "clock jump",
    "id used again", "refused", "restart",
]  # fmt: skip
STATES = [
    "any", "waiting", "preempted", "prefilling", "scoring", "promising", "active", "to come",
    "ending",
]  # fmt: skip
FATEFUL = ["any", "prefilling", "scoring", "scoring", "promising", "to come"]  # much to lose


def a_life(seed: int) -> tuple[dict, list[dict]]:
    """Return settings and events."""
    life = Life(random.Random(seed))
    events = life.events()
    engine = life.settings["engine"]
    # drawn last, so that everything else in a life is as it would be without drafts
    engine["speculate"] = life.rng.random() < 0.7
    return life.settings, events


def longest_text(settings: dict) -> int:
    engine = settings["engine"]
    return min(settings["context"], engine["num_blocks"] * engine["block_size"])


# How often something happens while 20 requests come, if the life has this feature or fault
WEIGHTS = {
    "abort": 10, "step raises": 1, "late step": 1, "broken logits": 1, "clock jump": 1,
    "id used again": 8, "refused": 1, "restart": 1, "forks": 4,
}  # fmt: skip
SIMPLE_FAULTS = {
    "step raises": [
        {"do": "fault", "where": "launch", "how": "before"},
        {"do": "fault", "where": "launch", "how": "after"},
        {"do": "fault", "where": "collect", "how": "at all"},
    ],
    "late step": [{"do": "fault", "where": "late", "how": seconds} for seconds in (0.5, 100.0)],
    "clock jump": [{"do": "jump", "seconds": seconds} for seconds in (0.001, 10.0, 10_000.0)],
    "restart": [{"do": "restart"}],
}


class Life:
    """Draws settings and events."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.has = {name: rng.random() < 0.7 for name in FEATURES}
        self.has |= {name: rng.random() < 0.4 for name in FAULTS}
        engine = self.engine_settings()
        self.V = rng.choice([2, 3, 16, 250, 250])
        self.settings = self.other_settings() | {"engine": engine}
        self.longest = longest_text(self.settings)

    def engine_settings(self) -> dict:
        rng = self.rng
        has = self.has
        block_size = rng.randint(1, 4)
        num_blocks = rng.randint(2, 12) if has["tiny pool"] else rng.randint(12, 32)
        max_num_seqs = rng.randint(1, 8)
        return {
            "block_size": block_size,
            "num_blocks": num_blocks,
            "max_num_seqs": max_num_seqs,
            "token_budget": max_num_seqs + rng.choice([0, 0, 1, 2, 8, 30]),
            "prefix_cache": has["prefix cache"],
            "policy": rng.choice(["priority", "sjf"]) if has["priorities"] else "fcfs",
            "prefill_share": rng.choice([0.0, 0.25, 0.9]),
            "max_num_partial_prefills": rng.randint(1, 4),
            "max_long_partial_prefills": rng.randint(1, 3),
            "long_prefill_threshold": rng.choice([1, 4, 8, 512]),
            "watermark": rng.choice([0.0, 0.01, 0.1]),
            "overlap": has["overlap"],
        }

    def other_settings(self) -> dict:
        rng = self.rng
        has = self.has
        return {
            "V": self.V,
            "context": rng.choice([4, 12, 40, 100]),
            "eos": rng.randrange(self.V) if has["stop tokens"] and rng.random() < 0.5 else None,
            "padded": has["padding"],
            "tick": rng.choice([0.0, 0.01, 1.0, 30.0]),  # seconds that a step takes
            "window": rng.choice([0] * 7 + [1, 2, 3, 5, 8, 13, 21]) if has["windows"] else 0,
        }

    def events(self) -> list[dict]:
        rng = self.rng
        kinds = ["request"] * 20
        for name, weight in WEIGHTS.items():
            kinds += [name] * (weight * self.has[name])
        events = [self.event(rng.choice(kinds), i) for i in range(rng.randint(20, 400))]
        pace = rng.choice([0, 1, 4, 10])  # the mean number of steps between two events
        for event in events:
            event["after"] = min(50, int(rng.expovariate(1 / pace))) if pace else 0
        return events

    def event(self, kind: str, number: int) -> dict:
        match kind:
            case "request":
                return self.request(number)
            case "refused":
                return self.refused(number)
            case "id used again":
                return self.id_used_again(number)
            case "abort":
                return {"do": "abort"} | self.aimed()
            case "broken logits":
                return {"do": "broken"} | self.aimed()
            case "forks":
                event = {"do": "fork", "id": number, "choice": 100 + number, "state": "active"}
                return event | {"pick": self.rng.randrange(100), "patience": 5}
        return dict(self.rng.choice(SIMPLE_FAULTS[kind]))

    def request(self, number: int) -> dict:
        rng = self.rng
        has = self.has
        most = self.longest - 1
        length = rng.choice([rng.randint(1, most), rng.randint(1, min(most, 9))])
        most = self.longest - length
        max_tokens = rng.choice([most, rng.randint(1, most)])
        params = {"max_tokens": max_tokens, "seed": rng.randrange(2**32)}
        if has["stop tokens"]:
            params["stop_token_ids"] = rng.choices(range(self.V), k=rng.randint(0, 2))
            params["ignore_eos"] = rng.random() < 0.3
        if has["logprobs"] and rng.random() < 0.5:
            params["logprobs"] = rng.randint(0, 2)
        options = {}
        if has["n"] and rng.random() < 0.4:
            options["n"] = rng.randint(2, 4)
        if has["priorities"]:
            options["priority"] = rng.choice([0, 0, 1, 5, -3])
        if has["salts"]:
            options["cache_salt"] = rng.choice(["", "pepper", "thyme"])
        if has["prompt scores"] and rng.random() < 0.6:
            options["prompt_logprobs"] = rng.choice([0, 0, 1, 2])
        prompt = self.prompt(length)
        event = {"do": "add", "id": str(number)}
        return event | {"prompt": prompt, "params": params, "options": options}

    def prompt(self, length: int) -> list[int]:
        """Return the shared trunk of a small tree of texts, then tokens of its own."""
        rng = self.rng
        shared = 0
        if self.has["shared prefixes"]:
            shared = rng.choice([length, rng.randint(0, length)])
        trunk = random.Random(rng.randrange(3))
        tokens = [trunk.randrange(self.V) for _ in range(shared)]
        return tokens + [rng.randrange(self.V) for _ in range(length - shared)]

    def refused(self, number: int) -> dict:
        """
        Return a request that the engine must refuse: too long, empty, or with a token that the
        vocabulary lacks.
        """
        event = self.request(number)
        wrong = self.rng.choice(["long", "empty", "token"])
        if wrong == "long":
            event["params"]["max_tokens"] += self.settings["context"]
        elif wrong == "empty":
            event["prompt"] = []
        else:
            event["prompt"][-1] = self.V
        return event

    def aimed(self) -> dict:
        """Aim at a text in a certain state, if there is one within some steps."""
        rng = self.rng
        aim = {"state": rng.choice(STATES), "pick": rng.randrange(100)}
        return aim | {"patience": rng.choice([0, 20])}

    def id_used_again(self, number: int) -> dict:
        """Reuse the id of a text that is being aborted, or of an earlier event."""
        rng = self.rng
        if rng.random() < 0.3:
            return self.request(rng.randrange(number + 1))
        state = rng.choice(FATEFUL)
        return self.request(number) | {"do": "replace"} | self.aimed() | {"state": state}


def simpler(event: dict):
    """Yield proposals, the simplest first, for shrinking a failing list of events."""
    for after in (0, 1, event["after"] // 2):
        if after < event["after"]:
            yield event | {"after": after}
    if event["do"] not in ("add", "replace"):
        return
    prompt = event["prompt"]
    for length in fewer(len(prompt)):
        yield event | {"prompt": prompt[:length]}
    params = event["params"]
    for max_tokens in fewer(params["max_tokens"]):
        yield event | {"params": params | {"max_tokens": max_tokens}}
    for part, kept in (("options", set()), ("params", {"max_tokens", "seed"})):
        fields = event[part]
        for name in sorted(fields.keys() - kept):
            yield event | {part: {key: fields[key] for key in fields if key != name}}


def fewer(most: int) -> list[int]:
    return [n for n in (1, most // 2, most - 1) if 0 < n < most]
