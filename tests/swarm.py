"""
From a seed to the life of an engine: its settings and what happens to it, for the simulator
(simulator.py).

Swarm testing: a life has a random subset of all features and faults. With all of them in each, some
would hide others: an engine that restarts all the time never fills its queue. Not run by itself.
"""

import random

FEATURES = [
    "n", "priorities", "salts", "stop tokens", "prompt scores", "logprobs", "shared prefixes",
    "forks", "beams", "overlap", "padding", "prefix cache", "several links", "windows",
]  # fmt: skip
FAULTS = [
    "abort", "step raises", "late step", "broken logits", "tiny pool", "clock jump",
    "id used again", "full queue", "refused", "link gone", "restart",
]  # fmt: skip
STATES = [
    "any", "waiting", "preempted", "prefilling", "scoring", "promising", "active", "to come",
    "ending",
]  # fmt: skip


def a_life(seed: int) -> tuple[dict, list[dict]]:
    """Settings and events."""
    rng = random.Random(seed)
    has = {name: rng.random() < 0.7 for name in FEATURES} | {
        name: rng.random() < 0.4 for name in FAULTS
    }
    settings = settings_of(rng, has)
    makers = [request] * 20
    for name, maker, weight in MAKERS:
        makers += [maker] * (weight * has[name])
    events = [
        rng.choice(makers)(rng, has, settings, number) for number in range(rng.randint(20, 400))
    ]
    pace = rng.choice([0, 1, 4, 10])  # the mean of steps between two events
    for event in events:
        after = min(50, int(rng.expovariate(1 / pace))) if pace else 0
        event["after"] = 0 if event.pop("at once", False) else after
    return settings, events


def settings_of(rng: random.Random, has: dict) -> dict:
    block_size = rng.randint(1, 4)
    num_blocks = rng.randint(2, 12) if has["tiny pool"] else rng.randint(12, 32)
    max_num_seqs = rng.randint(1, 8)
    engine = {
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
    V = rng.choice([2, 3, 16, 250, 250])
    return {
        "features": [name for name in FEATURES if has[name]],
        "faults": [name for name in FAULTS if has[name]],
        "V": V,
        "context": rng.choice([4, 12, 40, 100]),
        "eos": rng.randrange(V) if has["stop tokens"] and rng.random() < 0.5 else None,
        "padded": has["padding"],
        "max_queue": rng.choice([0, 1, 4]) if has["full queue"] else None,
        "links": rng.randint(2, 3) if has["several links"] else 1,
        "tick": rng.choice([0.0, 0.01, 1.0, 30.0]),  # seconds that a step takes
        "window": rng.choice([0] * 7 + [1, 2, 3, 5, 8, 13, 21]) if has["windows"] else 0,
        "engine": engine,
    }


def blocks_of_window(settings: dict) -> int | None:
    """How many blocks a window touches at most, wherever it begins."""
    S = settings["engine"]["block_size"]
    window = settings.get("window", 0)  # older traces have none
    return max(len({p // S for p in range(i, i + window)}) for i in range(S)) if window else None


def longest_text(settings: dict) -> int:
    """A text whose windows fit into the pool may be longer than it."""
    engine = settings["engine"]
    num_blocks = engine["num_blocks"]
    slides = settings.get("window", 0) and blocks_of_window(settings) <= num_blocks
    pool = settings["context"] if slides else num_blocks * engine["block_size"]
    return min(settings["context"], pool)


def request(rng: random.Random, has: dict, settings: dict, number: int) -> dict:
    longest = longest_text(settings)
    length = rng.choice([rng.randint(1, longest - 1), rng.randint(1, min(longest - 1, 9))])
    most = longest - length
    params = {"max_tokens": rng.choice([most, rng.randint(1, most)]), "seed": rng.randrange(2**32)}
    if has["stop tokens"]:
        params["stop_token_ids"] = rng.choices(range(settings["V"]), k=rng.randint(0, 2))
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
    prompt = a_prompt(rng, has, settings["V"], length)
    return {
        "do": "add",
        "link": rng.randrange(3),
        "id": str(number),
        "prompt": prompt,
        "params": params,
        "options": options,
    }


def a_prompt(rng: random.Random, has: dict, V: int, length: int) -> list[int]:
    """The trunk of a small tree of texts as far as it is shared, then tokens of its own."""
    shared = rng.choice([length, rng.randint(0, length)]) if has["shared prefixes"] else 0
    trunk = random.Random(rng.randrange(3))
    return [trunk.randrange(V) for _ in range(shared)] + [
        rng.randrange(V) for _ in range(length - shared)
    ]


def refused(rng, has, settings, number) -> dict:
    """
    What the engine must not take: too long, empty, or with a token that the vocabulary has not.
    """
    event = request(rng, has, settings, number)
    wrong = rng.choice(["long", "empty", "token"])
    if wrong == "long":
        event["params"]["max_tokens"] += settings["context"]
    elif wrong == "empty":
        event["prompt"] = []
    else:
        event["prompt"][-1] = settings["V"]
    return event


def burst(rng, has, settings, number) -> dict:
    """A request right after what was before it, so that the queue fills."""
    return request(rng, has, settings, number) | {"at once": True}


def aimed(rng) -> dict:
    """At somebody in a certain state, if there is one within some steps."""
    return {
        "state": rng.choice(STATES),
        "pick": rng.randrange(100),
        "patience": rng.choice([0, 20]),
    }


def abort(rng, has, settings, number) -> dict:
    return {"do": "abort"} | aimed(rng)


def id_used_again(rng, has, settings, number) -> dict:
    """Of one who is aborted just now, or of whoever has it."""
    if rng.random() < 0.3:
        earlier = rng.randrange(number + 1)
        return request(rng, has, settings, earlier)
    state = rng.choice(
        ["any", "prefilling", "scoring", "scoring", "promising", "to come"]
    )  # it has something to lose
    return request(rng, has, settings, number) | {"do": "replace"} | aimed(rng) | {"state": state}


def step_raises(rng, has, settings, number) -> dict:
    where, how = rng.choice([("launch", "before"), ("launch", "after"), ("collect", "at all")])
    return {"do": "fault", "where": where, "how": how}


def late_step(rng, has, settings, number) -> dict:
    return {"do": "fault", "where": "late", "how": rng.choice([0.5, 100.0])}


def broken_logits(rng, has, settings, number) -> dict:
    return {"do": "broken"} | aimed(rng)


def clock_jump(rng, has, settings, number) -> dict:
    return {"do": "jump", "seconds": rng.choice([0.001, 10.0, 10_000.0])}


def link_gone(rng, has, settings, number) -> dict:
    return {"do": "gone", "link": rng.randrange(3)}


def restart(rng, has, settings, number) -> dict:
    return {"do": "restart"}


def fork(rng, has, settings, number) -> dict:
    return {
        "do": "fork",
        "id": number,
        "choice": 100 + number,
        "state": "active",
        "pick": rng.randrange(100),
        "patience": 5,
    }


def beam(rng, has, settings, number) -> dict:
    longest = longest_text(settings)
    length = rng.randint(1, min(longest - 1, 12))
    prompt = a_prompt(rng, has, settings["V"], length)
    event = {
        "do": "beam",
        "prompt": prompt,
        "width": rng.randint(1, 3),
        "max_tokens": rng.randint(1, 8),
    }
    return event | {"patience": rng.choice([0, 100, 100])}  # until the engine is idle


# Feature or fault; what makes an event of it, from (rng, what the life has, settings, number of the
# event); and how often, where requests have 20.
MAKERS = [
    ("abort", abort, 10),
    ("step raises", step_raises, 1),
    ("late step", late_step, 1),
    ("broken logits", broken_logits, 1),
    ("clock jump", clock_jump, 1),
    ("id used again", id_used_again, 8),
    ("refused", refused, 1),
    ("full queue", burst, 10),
    ("link gone", link_gone, 1),
    ("restart", restart, 1),
    ("forks", fork, 4),
    ("beams", beam, 1),
]


def simpler(event: dict):
    """Proposals, the simplest first, for the shrinking of a failing list of events."""
    for after in (0, 1, event["after"] // 2):
        if after < event["after"]:
            yield event | {"after": after}
    if event["do"] not in ("add", "replace"):
        return
    prompt = event["prompt"]
    for length in (1, len(prompt) // 2, len(prompt) - 1):
        if 0 < length < len(prompt):
            yield event | {"prompt": prompt[:length]}
    params = event["params"]
    most = params["max_tokens"]
    for fewer in (1, most // 2, most - 1):
        if 0 < fewer < most:
            yield event | {"params": params | {"max_tokens": fewer}}
    for name in event["options"]:
        yield event | {"options": without(event["options"], name)}
    for name in sorted(params.keys() - {"max_tokens", "seed"}):
        yield event | {"params": without(params, name)}


def without(fields: dict, name: str) -> dict:
    return {key: value for key, value in fields.items() if key != name}
