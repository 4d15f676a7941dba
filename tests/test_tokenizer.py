"""tokenizer.py: every text and every byte comes back, and transformers reads the same ids from the same files."""

import json
import os
from pathlib import Path

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenizer as module
from tokenizer import BPETokenizer, TokenizerError, char_tokenizer, gpt2_tokenizer, load_tokenizer, train_bpe

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
    folder = os.environ.get("TIKTOKEN_CACHE_DIR") or ROOT.parent / "shared" / "data" / "tiktoken_cache"
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


@pytest.mark.parametrize("data", [b"\xff", b"ok \xe2\x82 cut", b"\xed\xa0\x80", b"\xc0\xaf", bytes(range(256))])
def test_bytes_that_are_not_utf8_come_back(bpe, data):
    assert bpe.decode_bytes(bpe.encode(data)) == data


def test_lone_surrogate_is_read_as_the_replacement_character(bpe):
    """JSON can carry half of a surrogate pair, which no UTF-8 can: the server must not fall over it."""
    assert bpe.decode(bpe.encode("a\ud800b")) == "a\ufffdb"


def test_endless_blanks_come_back(bpe):
    """tiktoken's regular expressions panic on a million blanks in a row; anyone may send such a prompt."""
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
    # the characters where Unicode tables of two libraries could differ: each once beside a letter, a digit, a space
    every = [f"a{chr(c)}1{chr(c)} {chr(c)}" for c in range(0, 0x30000, 7) if not 0xD800 <= c < 0xE000]
    for text in [*NASTY, *every]:
        ids = ours.encode(text, allow_special=True)  # transformers always reads a spelt control token as one
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
    """The hub's GPT-2 writes merges as "a b", and its tokenizer_config.json names no end-of-text token."""
    spec = json.loads(json.dumps(gpt2.spec))
    spec["model"]["merges"] = [" ".join(pair) for pair in spec["model"]["merges"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 1024}')
    theirs = load_tokenizer(tmp_path)
    assert theirs.eos_token_id == 50256
    assert all(theirs.encode(text) == gpt2.encode(text) for text in NASTY)


def test_reads_another_pattern_a_normalizer_and_a_named_end_token(bpe, tmp_path):
    """As Qwen's directories have it: the pattern in a Split, NFC, and the end token in tokenizer_config.json."""
    spec = json.loads(json.dumps(bpe.spec))
    split = {"type": "Split", "pattern": {"Regex": r"\d|\D+"}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, level]}
    spec["normalizer"] = {"type": "NFC"}
    spec["added_tokens"].append(spec["added_tokens"][0] | {"id": bpe.vocab_size, "content": "<|im_end|>"})
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
    assert bpe.encode(text, allow_special=True) == [*bpe.encode("a"), bpe.eos_token_id, *bpe.encode("b")]


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
        assert chars.encode(part) == theirs.encode(part) == again.encode(part) == chars.encode(part.encode())
        assert chars.decode(chars.encode(part)) == theirs.decode(chars.encode(part)) == part


def test_unknown_character_is_named():
    with pytest.raises(TokenizerError, match=r"'x' \(U\+0078, at position 2\) is not among the 4 .* train with a BPE"):
        char_tokenizer("helo").encode("hexo")


def test_offline_gpt2_says_what_to_set(monkeypatch):
    def no_network(name):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(tiktoken, "get_encoding", no_network)
    with pytest.raises(TokenizerError, match="set TIKTOKEN_CACHE_DIR"):
        gpt2_tokenizer()


def test_training_without_the_library_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(TokenizerError, match="pip install tokenizers"):
        module.train_bpe(["text"], 300)


@pytest.mark.parametrize("make", [lambda: char_tokenizer("abc"), lambda: module.bpe_tokenizer([])])
def test_ids_beyond_the_vocabulary_have_no_text(make):
    """A model may have more rows than there are tokens. Its sampling one left the server's client waiting for ever."""
    tokenizer = make()
    first, beyond = tokenizer.token_bytes(0), tokenizer.vocab_size
    assert first and tokenizer.token_bytes(beyond) == b"" and tokenizer.decode_bytes([0, beyond, 0]) == first * 2


def test_directories_that_hold_no_tokenizer(bpe, tmp_path):
    with pytest.raises(TokenizerError, match=r"python train\.py --out"):
        load_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    for broken in (
        "{",
        "[]",
        "{}",
        '{"model": {"type": "Unigram", "vocab": {}}}',
        json.dumps(bpe.spec)[:-9],
        "[" * 100_000,
    ):
        path.write_text(broken)
        with pytest.raises(TokenizerError, match="restore it"):
            load_tokenizer(tmp_path)


def test_refuses_what_tiktoken_would_encode_differently(bpe, tmp_path):
    """Ids out of merge order, a prefix space, another normalizer: ids would be wrong without a word."""
    changes = {
        "another order": lambda s: s["model"]["vocab"].update(
            zip(s["model"]["vocab"], range(698, -1, -1), strict=True)
        ),
        "prefix space": lambda s: s["pre_tokenizer"].update(add_prefix_space=True),
        "Lowercase": lambda s: s.update(normalizer={"type": "Lowercase"}),
    }
    for message, change in changes.items():
        spec = json.loads(json.dumps(bpe.spec))
        change(spec)
        (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
        with pytest.raises(TokenizerError, match=message):
            load_tokenizer(tmp_path)
