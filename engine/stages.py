"""
The features of an engine, apart from computing tokens. Each is a stage in a file of its own.

    stages = build_stages(engine)       # {"drafts": Drafts(engine), ..}
    require("drafts")                   # raises ValueError if STAGES has no "drafts"

To remove a feature, delete its file and its line in `STAGES`. Everything else still works. A flag
or a field that needs the file is then refused with a message that names the file. The HTTP process
also reads these tables but does not need any stage, so only `build_stages` imports the stages.
"""

from pkgutil import resolve_name

# in the order in which they act
STAGES = {
    "drafts": "engine.drafts:Drafts",  # guesses tokens, which a step then checks
    "grammar": "engine.grammar:Constraints",  # checks tokens and guesses; server/tools.py needs it
    "scores": "engine.scores:Scores",  # scores the tokens that the grammars accept
    "windows": "engine.window:Window",  # frees the blocks that no token can see any more
    "record": "engine.events:Recorder",  # last, because it records what the others have done
}
FILES = {
    "drafts": "engine/drafts.py",
    "grammar": "engine/grammar.py",
    "scores": "engine/scores.py",
    "windows": "engine/window.py",
    "record": "engine/events.py",
}


def absent(name: str) -> str:
    """Return the message for a flag or a field that needs a deleted stage."""
    return f"this server has no {name} ({FILES[name]})"


def require(name: str):
    """Raise ValueError unless there is a stage with this name."""
    if name not in STAGES:
        raise ValueError(absent(name))


def build_stages(engine) -> dict:
    """Return the stages (`step.Stage`) of an engine, by name."""
    stages = {}
    for name, kind in STAGES.items():
        stages[name] = resolve_name(kind)(engine)
    return stages
