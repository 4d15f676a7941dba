"""
What an engine does beside computing tokens: a file each, in the order in which they act.

A stage whose file is deleted together with its lines here is gone, and all else works as before.
"""

from engine.drafts import Drafts
from engine.events import Recorder
from engine.grammar import Constraints
from engine.scores import Scores
from engine.step import Stage

STAGES: dict[str, type[Stage]] = {
    "drafts": Drafts,  # guesses tokens, which a step checks
    "grammar": Constraints,  # after the drafts, of which it forbids some
    "scores": Scores,  # of the tokens that are left
    "record": Recorder,  # last: it writes down what the others have done
}
