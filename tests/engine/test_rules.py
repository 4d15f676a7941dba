"""Clients' grammars that never end, or end where they should not, are refused immediately."""

import pytest
from test_schemas import library, rows, takes

pytest.importorskip("llguidance")
__all__ = ["library"]  # a fixture

REFUSED = r"""
start: "a" start -> start cannot end: add an alternative without that rule
start: x; x: "a" x | "b" y; y: "c" y -> start, x, y cannot end
start: "c" x?; x: "b" x -> x cannot end
start: "a" start # | "b" -> start cannot end
start: B start; B: "b" | "c" -> start cannot end
start: "a" start; %ignore /x/ | /y/ -> start cannot end
start: "c" [x]; x: ("b" | "c") x{1,2} -> x cannot end
start: "c" | x; x: "b"+ x+ -> x cannot end
start: "a" start~1..2 -> start cannot end
start: "c" | x; x[lazy]: (y "c"?)~2; y.2: (x | y) -> x, y cannot end
root ::= "a" root -> start cannot end
root ::= x-y? # | "a"; x-y ::= "b" (x-y | x-y "c") -> x_y cannot end
start: <|x|> start -> start cannot end
start: "a" <[256]> -> <[256]> would end the answer
start: ("a" | <[3,200-256]>) "b" -> <[3,200-256]> would end
start: "a" <[^97]> "b" -> <[^97]> would end
start: "a" <[*]> "b" -> <[*]> would end
start: "a" <|endoftext|> "b" -> <|endoftext|> would end the answer, and an
start: x{500} "x"{500}; x: /(x?){500}x{500}/ -> too many expressions
"""
SERVED = r"""
start: "a" start | "b" -> aab -> aaa
start: x; x: x "a" | "b" -> baa -> aab
start: "a" x; x: ["c" start] -> aca -> ac
start: "a" (start "b")? -> aab -> ab
start: "a" start* "b" -> aabb -> aab
start: "a" start{0,2} "b" -> aabb -> aab
start: "a" start~0..2 "b" -> aabb -> aab
start: "a" x ~ 2; x: "b" | "c" x ~ 0 -> abc -> ab
start: x; x: "a" // x; | "b" -> b -> c
start: "a" %json {; "type": "null"; } x; x: B; B: "b" -> anullb -> anull
start: x; x: "a" # x, <[256]> or " -> a -> b
start: "start: x" /x: x\/ start/i X; X: "x" -> start: xX: X/ sTARTx -> start
start: "<[256]>" /<[256]>/ "<|endoftext|>" -> <[256]><5><|endoftext|> -> <[256]><[256]><|endoftext|>
start: "a" <[97-99]> <[^256]> -> abd -> ada
start: %json {"type": "object", "required": ["start"]} "b" -> {"start": 1}b -> {}b
root ::= "a" root | "b" -> aab -> aa
root ::= "[" root? "]" -> [[]] -> [
"""


def spread(grammar: str) -> str:
    return grammar.replace("; ", "\n")


@pytest.mark.parametrize("grammar, reason", rows(REFUSED))
def test_a_grammar_that_cannot_end_as_it_says_is_refused(library, grammar, reason):
    """
    Previously such an answer stopped half way, or ended only at max_tokens. If terminals came after
    the rules, their alternatives later counted as those of the last rule.
    """
    matcher, said = library.try_to_compile("grammar", spread(grammar))
    assert not matcher
    assert reason in said


@pytest.mark.parametrize("grammar, right, wrong", rows(SERVED))
def test_a_grammar_that_can_end_is_served(library, grammar, right, wrong):
    """
    Would catch: every rule that names itself taken for endless; texts read as rules. Previously
    comments after # were, too.
    """
    matcher, said = library.try_to_compile("grammar", spread(grammar))
    assert matcher, said
    for text, fits in (right, True), (wrong, False):
        assert takes(matcher, text) == fits


@pytest.mark.parametrize("regex", ["(x?){500}x{500}", "a{3}(x?){500}x{500}"])
def test_a_regular_expression_that_gets_stuck_at_once_is_refused(library, regex):
    """Previously it compiled, and its answers ended in an error after one letter."""
    matcher, said = library.try_to_compile("regex", regex)
    assert not matcher
    assert said == "it has too many expressions: make its regular expressions smaller"
