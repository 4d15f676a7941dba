"""
tokenizer.py: every text and every byte comes back, and transformers reads the same ids from the
same files.
"""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenizer as module
from tokenizer import BPETokenizer, TextStream, TokenizerError, load_tokenizer
from training.corpus import bpe_tokenizer, char_tokenizer, gpt2_tokenizer, train_bpe

ROOT = Path(__file__).resolve().parents[1]
END = "<|endoftext|>"
NASTY = [
    "",
    " ",
    "plain text, don't split 1234 numbers",
    "line\r\nline\rline\n\n\n  indented\t\ttabs \n",
    "e\u0301 combining, ﬁ ligature, ａ wide, \u200b zero width, \u3000 wide space, \x85 next line",
    "😀 👩‍👩‍👧 🇨🇭 \U0010ffff",
    "\x00\x01\x1b[0m\x7f\x1c\x1d",
    "語と文字 العربية שלום हिन्दी",
    "½ ² Ⅷ ١٢٣ 'S 'll 'LL",
    f"a{END}b <|endoftext <|endoftext|",
    "x" * 500 + " " * 500 + "\n" * 100 + "y",
    "�",
]


@pytest.fixture(scope="module")
def bpe() -> BPETokenizer:
    """A small BPE learnt from this repo's own sources."""
    return train_bpe([path.read_text() for path in sorted(ROOT.glob("*.py"))], vocab_size=700)


@pytest.fixture(scope="module")
def gpt2() -> BPETokenizer:
    """GPT-2's own, from an offline copy of its vocabulary."""
    folder = (
        os.environ.get("TIKTOKEN_CACHE_DIR") or ROOT.parent / "shared" / "data" / "tiktoken_cache"
    )
    if not Path(folder).is_dir():
        pytest.skip("GPT-2's vocabulary is not at hand: set TIKTOKEN_CACHE_DIR")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(folder))
        return gpt2_tokenizer()


@given(st.binary())
@settings(deadline=None)
def test_any_bytes_come_back(bpe, data):
    assert bpe.decode_bytes(bpe.encode(data)) == data


@given(st.text())
@settings(deadline=None)
def test_any_text_comes_back_and_bytes_of_text_are_that_text(bpe, text):
    ids = bpe.encode(text)
    assert bpe.decode(ids) == text
    assert bpe.encode(text.encode()) == ids
    assert b"".join(map(bpe.token_bytes, ids)) == text.encode()


@pytest.mark.parametrize(
    "data", [b"\xff", b"ok \xe2\x82 cut", b"\xed\xa0\x80", b"\xc0\xaf", bytes(range(256))]
)
def test_bytes_that_are_not_utf8_come_back(bpe, data):
    assert bpe.decode_bytes(bpe.encode(data)) == data


def test_lone_surrogate_is_read_as_the_replacement_character(bpe):
    """
    JSON can carry half of a surrogate pair, which no UTF-8 can: the server must not fall over it.
    """
    assert bpe.decode(bpe.encode("a\ud800b")) == "a\ufffdb"


def test_endless_blanks_come_back(bpe):
    """
    tiktoken's regular expressions panic on a million blanks in a row; anyone may send such a
    prompt.
    """
    text = "def f():" + " " * 1_200_000 + "x"
    assert bpe.decode(bpe.encode(text)) == text


def test_transformers_reads_our_bpe_with_the_same_ids(bpe, tmp_path):
    assert_same_as_transformers(bpe, tmp_path)


def test_transformers_reads_our_gpt2_with_the_same_ids(gpt2, tmp_path):
    assert_same_as_transformers(gpt2, tmp_path)


def assert_same_as_transformers(ours: BPETokenizer, directory: Path):
    from transformers import AutoTokenizer

    ours.save(directory)
    theirs, again = AutoTokenizer.from_pretrained(directory), load_tokenizer(directory)
    assert len(theirs) == ours.vocab_size
    assert theirs.eos_token_id == ours.eos_token_id == again.eos_token_id
    # the characters where Unicode tables of two libraries could differ: each once beside a letter,
    # a digit, a space
    every = [
        f"a{chr(c)}1{chr(c)} {chr(c)}" for c in range(0, 0x30000, 7) if not 0xD800 <= c < 0xE000
    ]
    for text in [*NASTY, *every]:
        ids = ours.encode(
            text, allow_special=True
        )  # transformers always reads a spelt control token as one
        assert ids == theirs.encode(text), text
        assert ids == again.encode(text, allow_special=True)
    for text in NASTY:
        assert theirs.decode(ours.encode(text)) == text


def test_gpt2_ids_are_those_of_tiktoken(gpt2):
    """We rebuild the merges from tiktoken's ranks; its own encoding is the reference."""
    reference = tiktoken.get_encoding("gpt2")
    assert (gpt2.vocab_size, gpt2.eos_token_id) == (50257, 50256)
    assert gpt2.encode("Hello world") == [15496, 995]
    for text in NASTY:
        assert gpt2.encode(text) == reference.encode_ordinary(text)


def test_reads_a_gpt2_directory_as_the_hub_has_it(gpt2, tmp_path):
    """
    The hub's GPT-2 writes merges as "a b", and its tokenizer_config.json names no end-of-text
    token.
    """
    spec = json.loads(json.dumps(gpt2.spec))
    spec["model"]["merges"] = [" ".join(pair) for pair in spec["model"]["merges"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 1024}')
    theirs = load_tokenizer(tmp_path)
    assert theirs.eos_token_id == 50256
    assert all(theirs.encode(text) == gpt2.encode(text) for text in NASTY)


def test_reads_another_pattern_a_normalizer_and_a_named_end_token(bpe, tmp_path):
    """
    As Qwen's directories have it: the pattern in a Split, NFC, and the end token in
    tokenizer_config.json.
    """
    spec = json.loads(json.dumps(bpe.spec))
    split = {
        "type": "Split",
        "pattern": {"Regex": r"\d|\D+"},
        "behavior": "Isolated",
        "invert": False,
    }
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, level]}
    spec["normalizer"] = {"type": "NFC"}
    spec["added_tokens"].append(
        spec["added_tokens"][0] | {"id": bpe.vocab_size, "content": "<|im_end|>"}
    )
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|im_end|>"}}')
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_token_id == bpe.vocab_size
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == "\u00e9"

    from tokenizers import Tokenizer

    theirs = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in ("in 1234 parts e\u0301", "  def f():\n    return 12"):
        assert tokenizer.encode(text) == theirs.encode(text).ids


def test_spelt_control_token_is_text_unless_asked(bpe):
    text = f"a{END}b"
    assert bpe.eos_token_id not in bpe.encode(text)
    assert bpe.eos_token_id not in bpe.encode(text.encode())
    assert bpe.decode(bpe.encode(text)) == text
    assert bpe.encode(text, allow_special=True) == [
        *bpe.encode("a"),
        bpe.eos_token_id,
        *bpe.encode("b"),
    ]


def test_control_token_has_no_text(bpe):
    assert bpe.token_bytes(bpe.eos_token_id) == b""
    assert bpe.decode([*bpe.encode("a"), bpe.eos_token_id, *bpe.encode("b")]) == "ab"


def test_bytes_are_the_first_tokens_and_the_end_is_the_last(bpe):
    assert [bpe.token_bytes(i) for i in range(256)] == [bytes([i]) for i in range(256)]
    assert bpe.eos_token_id == bpe.vocab_size - 1 == 699


def test_characters(tmp_path):
    from transformers import AutoTokenizer

    text = "wörld\r\n 😀e\u0301"
    chars = char_tokenizer(text + text)
    assert chars.vocab_size == len(set(text)) and chars.eos_token_id is None
    assert chars.encode("\n\r") == [0, 1]  # sorted, numbered from 0
    chars.save(tmp_path)
    theirs, again = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    for part in (text, text[::-1], "  ", ""):
        assert (
            chars.encode(part)
            == theirs.encode(part)
            == again.encode(part)
            == chars.encode(part.encode())
        )
        assert chars.decode(chars.encode(part)) == theirs.decode(chars.encode(part)) == part


def test_names_of_control_tokens_in_bytes(bpe):
    """As in texts: they are text, and with allow_special=True the tokens."""
    data = f"a{END}b".encode() + b"\xff" + END.encode()
    assert bpe.eos_token_id not in bpe.encode(data) and bpe.decode_bytes(bpe.encode(data)) == data
    ids = bpe.encode(data, allow_special=True)
    assert ids == [97, bpe.eos_token_id, 98, 255, bpe.eos_token_id]
    assert b"".join(map(bpe.spelled_bytes, ids)) == data


def test_bytes_that_are_no_character_are_shown(bpe):
    """The first two of the three bytes of \u20ac are one replacement character, as everywhere."""
    assert (
        bpe.decode([97, 0xE2, 0x82, 98]) == "a\ufffdb"
        and bpe.decode_bytes([0xE2, 0x82]) == b"\xe2\x82"
    )


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"", ""),
        (b"a b", "a b"),
        ("é".encode(), "é"),
        (b"\xc3", "bytes:\\xc3"),
        (b"\n\xff", "bytes:\\x0a\\xff"),
    ],
)
def test_names_of_tokens(data, name):
    """Two digits for each byte: no two tokens are called the same."""
    assert module.token_name(data) == name


def test_a_pattern_that_gives_up_is_said(bpe, monkeypatch):
    """tiktoken's regular expressions stop at a million steps."""

    def gives_up(text):
        raise ValueError("Max stack size exceeded for backtracking")

    monkeypatch.setattr(bpe, "bpe", SimpleNamespace(encode_ordinary=gives_up))
    with pytest.raises(TokenizerError, match=r"gives up on this text: shorten it \(Max stack"):
        bpe.encode("a")


@pytest.mark.parametrize("include_stop", [False, True])
def test_a_stream_ends_once(include_stop):
    """What was held is given out once; what a stop string left is nothing."""
    stream = TextStream(lambda token: bytes([token]), ["ab"], include_stop)
    assert [stream.push(token) for token in b"xaya"] == ["x", "", "ay", ""]
    assert stream.flush() == "a" and stream.flush() == "" and stream.matched is None
    stream = TextStream(lambda token: bytes([token]), ["ab", "b", "cab"], include_stop)
    assert "".join(stream.push(token) for token in b"xcab") == ("xcab" if include_stop else "x")
    assert stream.matched == "cab" and stream.flush() == ""
    assert stream.num_characters == 4


def test_a_stream_that_is_pushed_all_at_once_counts_its_characters():
    stream = TextStream(lambda token: bytes([token]))
    assert stream.push_all([*"aé€".encode()[:-1]]) == "aé" and stream.num_characters == 2
    assert stream.push(0xAC) == "€" and stream.num_characters == 3


def test_unknown_character_is_named():
    with pytest.raises(
        TokenizerError,
        match=r"'x' \(U\+0078, at position 2\) is not among the 4 .* train with a BPE",
    ):
        char_tokenizer("helo").encode("hexox")  # the first of them


def test_offline_gpt2_says_what_to_set(monkeypatch):
    def no_network(name):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(tiktoken, "get_encoding", no_network)
    with pytest.raises(TokenizerError, match="set TIKTOKEN_CACHE_DIR"):
        gpt2_tokenizer()


def test_training_without_the_library_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(TokenizerError, match="pip install tokenizers"):
        train_bpe(["text"], 300)


@pytest.mark.parametrize("make", [lambda: char_tokenizer("abc"), lambda: bpe_tokenizer([])])
def test_ids_beyond_the_vocabulary_have_no_text(make):
    """
    A model may have more rows than there are tokens. Its sampling one left the server's client
    waiting for ever.
    """
    tokenizer = make()
    first, beyond = tokenizer.token_bytes(0), tokenizer.vocab_size
    assert (
        first
        and tokenizer.token_bytes(beyond) == b""
        and tokenizer.decode_bytes([0, beyond, 0]) == first * 2
    )


def test_downloads_without_a_tokenizer_are_not_told_to_train(tmp_path):
    """train.py would have trained another model over the download."""
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        TokenizerError, match=r"tokenizer\.json is missing: copy it there, from where the model is"
    ):
        load_tokenizer(tmp_path)
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(
        TokenizerError, match=r"the tokenizer is in vocab\.json: let transformers write it: Auto"
    ):
        load_tokenizer(tmp_path)


def test_directories_that_hold_no_tokenizer(bpe, tmp_path):
    with pytest.raises(TokenizerError, match=r"python train\.py --out"):
        load_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    for broken in (
        "{",
        "[]",
        "{}",
        json.dumps(bpe.spec)[:-9],
        "[" * 100_000,
    ):
        path.write_text(broken)
        with pytest.raises(TokenizerError, match="restore it"):
            load_tokenizer(tmp_path)


SPLIT = {"type": "Split", "pattern": {"Regex": r"\d|\D+"}, "behavior": "Isolated", "invert": False}
BARE = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
LEVEL = BARE | {"use_regex": True}
NO_REGEX_SAID = {
    key: value for key, value in LEVEL.items() if key != "use_regex"
}  # then there is one
CLS = [{"SpecialToken": {"id": END, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": CLS,
    "pair": [],
    "special_tokens": {END: {"id": END}},
}


def sequence(*parts):
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": list(parts)}}


# what stands in tokenizer.json, and what the refusal says; most were read as plain GPT-2, without a
# word
FOREIGN = [
    (
        sequence({"type": "Digits", "individual_digits": True}, LEVEL),
        "cuts text by Digits and ByteLevel",
    ),
    (
        sequence({"type": "Punctuation", "behavior": "Contiguous"}, LEVEL),
        "cuts text by Punctuation and ByteLevel",
    ),
    (sequence(SPLIT, SPLIT, BARE), "cuts text by Split and Split and ByteLevel"),
    (sequence(SPLIT, LEVEL), "cuts text by Split and ByteLevel, supported"),
    (sequence(SPLIT, NO_REGEX_SAID), "cuts text by Split and ByteLevel, supported"),
    (sequence(SPLIT | {"behavior": "Removed"}, BARE), "behaviour Removed"),
    (sequence(SPLIT | {"behavior": "MergedWithNext"}, BARE), "behaviour MergedWithNext"),
    (sequence(SPLIT | {"invert": True}, BARE), "other than of isolated"),
    (sequence(SPLIT | {"pattern": {"String": " "}}, BARE), "other than of isolated"),
    (sequence(SPLIT | {"pattern": {"Regex": r"^a|\S+"}}, BARE), "the regular expression"),
    (sequence(SPLIT | {"pattern": {"Regex": r"(a)\1|\S+"}}, BARE), "the regular expression"),
    ({"pre_tokenizer": None}, "cuts text by None"),
    ({"pre_tokenizer": BARE}, "cuts text by ByteLevel"),
    ({"pre_tokenizer": LEVEL | {"add_prefix_space": True}}, "prefix space"),
    (sequence(SPLIT, BARE | {"add_prefix_space": True}), "prefix space"),
    (sequence(BARE, SPLIT), "cuts text by ByteLevel and Split"),
    ({"normalizer": {"type": "Lowercase"}}, "normalizes text by Lowercase"),
    ({"normalizer": {"type": "NFC"}, "token": {"normalized": True}}, "found in normalized text"),
    ({"post_processor": TEMPLATE}, "adds tokens to every text .*TemplateProcessing"),
    (
        {"post_processor": {"type": "RobertaProcessing"}},
        "adds tokens to every text .*RobertaProcessing",
    ),
    (
        {"post_processor": {"type": "Sequence", "processors": [LEVEL, TEMPLATE]}},
        "adds tokens to every text",
    ),
    ({"decoder": {"type": "Metaspace"}}, "makes text of tokens by Metaspace"),
    ({"model": {"dropout": 0.1}}, "dropout"),
    ({"model": {"continuing_subword_prefix": "##"}}, "continuing_subword_prefix"),
    ({"model": {"end_of_word_suffix": "</w>"}}, "end_of_word_suffix"),
    ({"model": {"type": "Unigram"}}, "is of the kind Unigram"),
    ({"model": {"type": "WordLevel"}}, "WordLevel of other pieces"),
    *(({"token": {flag: True}}, f"with {flag}") for flag in ("lstrip", "rstrip", "single_word")),
    ({"token": {"special": False}}, r"special: false"),
    (
        {"config": {"added_tokens_decoder": {"7": {"content": "<think>", "special": True}}}},
        "lacks '<think>'",
    ),
    (
        {
            "config": {
                "added_tokens_decoder": {"7": {"content": END, "special": True, "lstrip": True}}
            }
        },
        "with lstrip",
    ),
]


@pytest.mark.parametrize(("changes", "message"), FOREIGN, ids=[message for _, message in FOREIGN])
def test_foreign_tokenizers_are_refused_by_name(bpe, tmp_path, changes, message):
    """
    Each of these encoded, or decoded, to something else than in transformers, and nothing said so.
    """
    write_changed(bpe, tmp_path, **changes)
    with pytest.raises(
        TokenizerError, match=f"{message}.* not supported here, vLLM or transformers open"
    ):
        load_tokenizer(tmp_path)


ADDS_NOTHING = {"type": "TemplateProcessing", "single": CLS[1:], "pair": [], "special_tokens": {}}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"pre_tokenizer": NO_REGEX_SAID},
        {"post_processor": LEVEL},
        {"post_processor": ADDS_NOTHING},
        {"post_processor": {"type": "Sequence", "processors": [LEVEL, ADDS_NOTHING]}},
        {"token": {"normalized": True}},  # there is no normalizer
        {"normalizer": {"type": "NFC"}},
        sequence(SPLIT, BARE),
        sequence(SPLIT | {"pattern": {"Regex": r"\p{L}{1,2}|\n"}}, BARE),
        {"config": {"added_tokens_decoder": {"699": {"content": END, "special": True}}}},
        {"config": {"eos_token": None}},
    ],
    ids=str,
)
def test_what_is_understood_has_the_ids_of_the_library(bpe, tmp_path, changes):
    """The positive controls of the refusals above."""
    from tokenizers import Tokenizer

    write_changed(bpe, tmp_path, **changes)
    theirs, ours = Tokenizer.from_file(str(tmp_path / "tokenizer.json")), load_tokenizer(tmp_path)
    assert ours.eos_token_id == 699
    for text in NASTY:
        assert ours.encode(text, allow_special=True) == theirs.encode(text).ids


def write_changed(bpe, folder, model=(), token=(), config=(), **changes):
    """
    Save the tokenizer with changes to tokenizer.json, its model, its added token, and
    tokenizer_config.json.
    """
    spec = json.loads(json.dumps(bpe.spec)) | changes
    spec["model"] |= dict(model)
    spec["added_tokens"][0] |= dict(token)
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    (folder / "tokenizer_config.json").write_text(json.dumps(dict(config)))


def test_merges_may_be_texts(bpe, tmp_path):
    """As the hub's GPT-2 has them, with a blank between the two parts."""
    write_changed(
        bpe, tmp_path, model={"merges": [" ".join(pair) for pair in bpe.spec["model"]["merges"]]}
    )
    assert all(load_tokenizer(tmp_path).encode(text) == bpe.encode(text) for text in NASTY)


def test_characters_may_have_a_control_token(tmp_path):
    chars = char_tokenizer("abc")
    token = {"id": 3, "content": "<end>", "special": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(chars.spec | {"added_tokens": [token]}))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.eos_token_id, tokenizer.vocab_size) == (3, 4)
    for text in ("ab<end>c", b"ab<end>c"):
        assert tokenizer.encode(text, allow_special=True) == [0, 1, 3, 2]
        with pytest.raises(TokenizerError, match="character '<'"):
            tokenizer.encode(text)
    assert tokenizer.decode([0, 3, 1]) == "ab"


def test_an_id_may_be_left_out(bpe, tmp_path):
    """
    The size is that of the highest id: the model needs so many rows. An id without a token has no
    text.
    """
    write_changed(bpe, tmp_path, token={"id": 705})
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.eos_token_id) == (706, 705)
    assert [tokenizer.spelled_bytes(i) for i in (699, 704, 705, 706)] == [
        b"",
        b"",
        END.encode(),
        b"",
    ]


def test_a_control_token_that_is_in_the_vocabulary_too_has_no_text(bpe, tmp_path):
    """The hub's GPT-2 has it in both places."""
    write_changed(bpe, tmp_path, model={"vocab": bpe.vocab | {END: 699}})
    tokenizer = load_tokenizer(tmp_path)
    assert (
        tokenizer.decode([*tokenizer.encode("a"), 699]) == "a"
        and tokenizer.spelled_bytes(699) == END.encode()
    )


@pytest.mark.parametrize(("length", "fits"), [(1, True), (256, True), (257, False)])
def test_names_of_control_tokens_have_a_longest(bpe, tmp_path, length, fits):
    write_changed(bpe, tmp_path, token={"content": "語" * length})
    if fits:
        assert load_tokenizer(tmp_path).control == {"語" * length: 699}
        return
    with pytest.raises(TokenizerError, match="has an added token of 257 characters"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"normalizer": {"type": "NFC"}}, "WordLevel of other pieces than single characters"),
        ({"pre_tokenizer": LEVEL}, "WordLevel of other pieces than single characters"),
        ({"decoder": {"type": "ByteLevel"}}, "makes text of tokens by ByteLevel"),
        ({"decoder": None}, "makes text of tokens by None"),
        ({"post_processor": TEMPLATE}, "adds tokens to every text"),
    ],
)
def test_characters_of_another_kind_are_refused(tmp_path, changes, message):
    chars = char_tokenizer("abc")
    (tmp_path / "tokenizer.json").write_text(json.dumps(chars.spec | changes))
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(tmp_path)


def test_what_is_saved(bpe, tmp_path):
    """All that transformers reads, as it is written, and no file that was only on the way."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for tokenizer, more in (
        (bpe, {"bos_token": END, "eos_token": END}),
        (char_tokenizer("aé"), {}),
    ):
        folder = tmp_path / type(tokenizer).__name__ / "new"
        tokenizer.save(folder)
        assert sorted(path.name for path in folder.iterdir()) == [
            "tokenizer.json",
            "tokenizer_config.json",
        ]
        assert json.loads((folder / "tokenizer_config.json").read_text()) == config | more
        assert json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")) == tokenizer.spec
    assert "é" in (folder / "tokenizer.json").read_text(encoding="utf-8")  # to be read by people


def test_ids_in_another_order_than_the_merges_are_refused(bpe, tmp_path):
    """tiktoken merges by the order of ids."""
    names = [*bpe.vocab]
    write_changed(
        bpe, tmp_path, model={"vocab": dict(zip(names, range(len(names) - 1, -1, -1), strict=True))}
    )
    with pytest.raises(TokenizerError, match="another order"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("merges", [["a"], [["a"]], [["a", "", ""]], {"a": -1}, "a", [7], None])
def test_a_merge_is_of_two_pieces(bpe, tmp_path, merges):
    write_changed(bpe, tmp_path, model={"merges": merges})
    with pytest.raises(TokenizerError, match="not a tokenizer this code reads"):
        load_tokenizer(tmp_path)


def test_tokens_that_no_merge_makes_are_refused_where_they_count(bpe, tmp_path):
    """
    With ignore_merges a piece that is a token as a whole is that token, however it came into the
    vocabulary.
    """
    vocab = bpe.vocab | {"zzzzzz": bpe.vocab_size}
    write_changed(bpe, tmp_path, model={"vocab": vocab, "ignore_merges": True})
    with pytest.raises(TokenizerError, match="tokens that no merge makes"):
        load_tokenizer(tmp_path)
    write_changed(bpe, tmp_path, model={"vocab": vocab})
    assert len(load_tokenizer(tmp_path).encode("zzzzzz")) > 1


def test_a_vocabulary_without_some_bytes_is_refused(bpe, tmp_path):
    """SmolLM2's lacks 21 of them: a KeyError named one."""
    write_changed(
        bpe,
        tmp_path,
        model={"vocab": {piece: i for piece, i in bpe.vocab.items() if piece not in "ab"}},
    )
    with pytest.raises(TokenizerError, match="lacks 2 of the 256 bytes"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("bad", [10**9, 2**20, -1, 1.0, "7", True, None])
def test_absurd_ids_are_refused(bpe, tmp_path, bad):
    """An id of 10**9 took 8 GB of memory, a negative one was another token's."""
    write_changed(bpe, tmp_path, token={"id": bad})
    with pytest.raises(TokenizerError, match=r"has the id .*, wanted 0 to 1048575: restore it"):
        load_tokenizer(tmp_path)
    write_changed(bpe, tmp_path, model={"vocab": bpe.vocab | {"zz": bad}})
    with pytest.raises(TokenizerError, match=r"has the id .*, wanted 0 to 1048575: restore it"):
        load_tokenizer(tmp_path)


def test_ids_that_two_tokens_share_are_refused(bpe, tmp_path):
    write_changed(bpe, tmp_path, model={"vocab": bpe.vocab | {"zz": 5}})
    with pytest.raises(TokenizerError, match="2 tokens share the id 5: restore it"):
        load_tokenizer(tmp_path)
    write_changed(bpe, tmp_path, model={"vocab": bpe.vocab | {END: 5}})
    with pytest.raises(TokenizerError, match="has two ids, 5 and 699"):
        load_tokenizer(tmp_path)
    write_changed(bpe, tmp_path, added_tokens=bpe.spec["added_tokens"] * 2)
    with pytest.raises(TokenizerError, match="added token twice"):
        load_tokenizer(tmp_path)
    write_changed(bpe, tmp_path, token={"content": ""})
    with pytest.raises(TokenizerError, match="added token of 0 characters"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_of_more_tokens_than_the_model_is_refused(bpe, tmp_path):
    """A prompt with one of the others ended in an error of the engine, if it came to that."""
    bpe.save(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 699}')
    with pytest.raises(TokenizerError, match=r"it has 700 tokens, .* the model has 699"):
        load_tokenizer(tmp_path)
    for fine in (
        '{"vocab_size": 700}',
        '{"vocab_size": 704}',
        "{}",
        "{",
        "[]",
    ):  # what is broken, the model's loader says
        (tmp_path / "config.json").write_text(fine)
        assert load_tokenizer(tmp_path).vocab_size == 700


# --------------------------------------------------------------------------------------------------
# The same ids as transformers


@pytest.fixture(scope="module")
def theirs(bpe, tmp_path_factory):
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("saved")
    bpe.save(folder)
    return AutoTokenizer.from_pretrained(folder)


PIECES = st.one_of(
    st.text(max_size=6),
    st.text(" \n\t\r\u00a0\u3000\x85\x1c'sdlrevm019-_<|>aé語", max_size=12),
    st.sampled_from(
        [END, "<|endof", "text|>", "def ", "    ", "\n\n\n", "😀", "e\u0301", "'ll", "١٢"]
    ),
)


@given(st.lists(PIECES, max_size=8).map("".join))
@settings(max_examples=1000, deadline=None)
def test_any_text_has_the_ids_of_transformers(bpe, theirs, text):
    """
    Control tokens in a prompt are tokens, with add_special_tokens or without: <|endoftext|> was
    seven of text.
    """
    ids = bpe.encode(text, allow_special=True)
    assert ids == theirs.encode(text) == theirs.encode(text, add_special_tokens=False)
    assert bpe.encode(text) == bpe.bpe.encode_ordinary(text)  # without our guard of blanks


def test_of_names_that_begin_alike_the_longer_one_counts(bpe, tmp_path):
    """As in transformers, whichever comes first in the file."""
    from tokenizers import Tokenizer

    token = bpe.spec["added_tokens"][0]
    more = [token | {"id": 700, "content": "<|a"}, token | {"id": 701, "content": "<|a|>"}]
    write_changed(bpe, tmp_path, added_tokens=[token, *more])
    theirs, ours = Tokenizer.from_file(str(tmp_path / "tokenizer.json")), load_tokenizer(tmp_path)
    for text in ("x<|a|>y<|a <|a<|a|>|>", "<|<|a|><|endoftext|>"):
        assert ours.encode(text, allow_special=True) == theirs.encode(text).ids


def test_text_that_no_piece_matches_is_a_piece(bpe, tmp_path):
    """tiktoken drops what its pattern does not match: all but digits were lost without a word."""
    from tokenizers import Tokenizer

    write_changed(bpe, tmp_path, **sequence(SPLIT | {"pattern": {"Regex": r"\p{N}{1,3}"}}, BARE))
    theirs, ours = Tokenizer.from_file(str(tmp_path / "tokenizer.json")), load_tokenizer(tmp_path)
    for text in ("in 1234 parts, and 5\n", "none", "12345"):
        assert ours.encode(text) == theirs.encode(text).ids
        assert ours.decode(ours.encode(text)) == text


def test_reads_what_transformers_writes_of_a_gpt2_tokenizer(bpe, tmp_path):
    """It has a post-processor that adds nothing, and names end of text in three roles."""
    from transformers import GPT2Tokenizer

    merges = [tuple(pair) for pair in bpe.spec["model"]["merges"]]
    vocab = bpe.vocab | bpe.control
    theirs = GPT2Tokenizer(vocab=vocab, merges=merges)
    theirs.save_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    assert ours.eos_token_id == theirs.eos_token_id == 699
    assert all(ours.encode(text, allow_special=True) == theirs.encode(text) for text in NASTY)


# --------------------------------------------------------------------------------------------------
# Bounded work


def test_runs_of_blanks_below_the_limit_are_looked_at_once():
    """
    The guard's expression tried each blank of a run of 499,999 as the first of 500,000: 8 runs took
    minutes.
    """
    started = time.process_time()
    assert len(module.cut_blanks((" " * 200_000 + "x") * 2)) == 1  # 20 s
    assert time.process_time() - started < 2


def test_long_runs_of_blanks_are_cut_and_nothing_else():
    n = module.MAX_BLANKS
    for blanks in (0, 1, n - 1, n, n + 1, 2 * n, 2 * n + 3):
        pieces = module.cut_blanks("a" + " " * blanks + "b\n")
        assert "".join(pieces) == "a" + " " * blanks + "b\n"
        assert len(pieces) == 1 + blanks // n and max(map(len, pieces)) <= n + 3


# What costs the most for each byte, here and in tiktoken's own issues: one piece of one character,
# pieces of one or two, pieces that merge to the end or never
COSTLY = [
    "a",
    " ",
    "\n",
    "1",
    "-",
    "é",
    "語",
    "🧿",
    "\u0301",
    "\x00",
    "'s",
    " \n",
    "a1 -",
    "<",
    "<|",
    END,
]


@pytest.mark.parametrize("unit", COSTLY)
def test_the_work_is_bounded_for_each_byte(bpe, unit):
    """
    Nothing that a client sends takes more than a few microseconds a byte, nor more for longer
    texts.
    """
    text = unit * (200_000 // len(unit.encode()))
    started = time.process_time()
    assert bpe.decode(bpe.encode(text)) == text
    assert time.process_time() - started < 1  # 0.01 to 0.2 s
