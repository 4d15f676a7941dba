"""
What an engine does beside computing tokens: a file each, in the order in which they act.

    stages = build_stages(engine)       # {"drafts": Drafts(engine), ..}
    require("drafts")                   # a ValueError, where the line of the drafts is gone

Delete a file and its line in `STAGES`, and all else works as before; who asks for what is gone is
told so. The HTTP process reads these tables, too, so nothing is imported before it is built.
"""

from importlib import import_module

STAGES = {
    "drafts": "engine.drafts.Drafts",  # guesses tokens, which a step checks
    "grammar": "engine.grammar.Constraints",  # with server/tools.py; forbids some of the guesses
    "scores": "engine.scores.Scores",  # of the tokens that are left
    "windows": "engine.window.Window",  # gives back the blocks that no token sees any more
    "record": "engine.events.Recorder",  # last: it writes down what the others have done
}
FILES = {
    "drafts": "engine/drafts.py",
    "grammar": "engine/grammar.py",
    "scores": "engine/scores.py",
    "windows": "engine/window.py",
    "record": "engine/events.py",
}


def absent(name: str) -> str:
    """Return what is said to one who asks for a stage that is gone."""
    return f"this server has no {name} ({FILES[name]})"


def require(name: str):
    """Raise ValueError unless there is such a stage."""
    if name not in STAGES:
        raise ValueError(absent(name))


def build_stages(engine) -> dict:
    """Return the stages (`step.Stage`) of an engine, by their names."""
    stages = {}
    for name, path in STAGES.items():
        module, _, kind = path.rpartition(".")
        stages[name] = getattr(import_module(module), kind)(engine)
    return stages
