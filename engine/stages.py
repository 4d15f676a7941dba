"""
What an engine does beside computing tokens: a file each, in the order in which they act.

    stages = build_stages(engine)       # {"drafts": Drafts(engine), ..}
    require("drafts")                   # a ValueError, where the line of the drafts is gone

Delete a file and its line in `STAGES`, and all else works as before; a flag or a field that needs
the file is refused by its name. The HTTP process also reads these tables, so no stage is imported
before `build_stages`.
"""

from importlib import import_module

STAGES = {
    "drafts": "engine.drafts.Drafts",  # guesses tokens, which a step checks
    "grammar": "engine.grammar.Constraints",  # with server/tools.py; checks tokens and guesses
    "scores": "engine.scores.Scores",  # scores the tokens that are left
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
    """Return the message for a flag or a field that needs a stage that is gone."""
    return f"this server has no {name} ({FILES[name]})"


def require(name: str):
    """Raise ValueError unless there is a stage of this name."""
    if name not in STAGES:
        raise ValueError(absent(name))


def build_stages(engine) -> dict:
    """Return the stages (`step.Stage`) of an engine, by their names."""
    stages = {}
    for name, path in STAGES.items():
        module, _, kind = path.rpartition(".")
        stages[name] = getattr(import_module(module), kind)(engine)
    return stages
