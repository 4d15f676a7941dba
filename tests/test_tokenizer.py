"""
tokenizer.py: every text and every byte comes back, and any tokenizer.json has the ids, and the
texts, of transformers, whole and as a stream.
"""

import json
import os
import random
import time
from pathlib import Path

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_kinds import KINDS, random_texts, save

import tokenizer as module
from tokenizer import TextStream, Tokenizer, TokenizerError, load_tokenizer
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
def bpe() -> Tokenizer:
    """A small BPE learnt from this repo's own sources."""
    return train_bpe([path.read_text() for path in sorted(ROOT.glob("*.py"))], vocab_size=700)


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
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
    """Some regular expressions panic on a million blanks; anyone may send such a prompt."""
    text = "def f():" + " " * 600_000 + "x"
    assert bpe.decode(bpe.encode(text)) == text


def test_transformers_reads_our_bpe_with_the_same_ids(bpe, tmp_path):
    assert_same_as_transformers(bpe, tmp_path)


def test_transformers_reads_our_gpt2_with_the_same_ids(gpt2, tmp_path):
    assert_same_as_transformers(gpt2, tmp_path)


def assert_same_as_transformers(ours: Tokenizer, directory: Path):
    from transformers import AutoTokenizer

    ours.save(directory)
    theirs, again = AutoTokenizer.from_pretrained(directory), load_tokenizer(directory)
    assert len(theirs) == ours.vocab_size
    assert theirs.eos_token_id == ours.eos_token_id == again.eos_token_id
    # the characters where Unicode tables of two libraries could differ: each once beside a letter,
    # a digit, a space
    every = [
        f"a{chr(c)}1{chr(c)} {chr(c)}" for c in range(0, 0x30000, 37) if not 0xD800 <= c < 0xE000
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
    with pytest.raises(TokenizerError, match=r"no tokenizer in .*: name a model's directory"):
        load_tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match=r"no directory .*/none: run `python train\.py --out"):
        load_tokenizer(tmp_path / "none")
    path = tmp_path / "tokenizer.json"
    for broken in (
        "{",
        "[]",
        "{}",
        bpe.backend.to_str()[:-9],
        bpe.backend.to_str().replace('"merges"', '"merged"'),
        bpe.backend.to_str(pretty=True).replace("699", "-1"),
        "[" * 100_000,
    ):
        path.write_text(broken)
        with pytest.raises(TokenizerError, match="restore it"):
            load_tokenizer(tmp_path)


def spec_of(tokenizer: Tokenizer) -> dict:
    return json.loads(tokenizer.backend.to_str())


def write_changed(bpe, folder, model=(), token=(), config=(), **changes):
    """
    Save the tokenizer with changes to tokenizer.json, its model, its added token, and
    tokenizer_config.json.
    """
    spec = spec_of(bpe) | changes
    spec["model"] |= dict(model)
    spec["added_tokens"][0] |= dict(token)
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    (folder / "tokenizer_config.json").write_text(json.dumps(dict(config)))


def test_merges_may_be_texts(bpe, tmp_path):
    """As the hub's GPT-2 has them, with a blank between the two parts."""
    merges = [" ".join(pair) for pair in spec_of(bpe)["model"]["merges"]]
    write_changed(bpe, tmp_path, model={"merges": merges})
    assert all(load_tokenizer(tmp_path).encode(text) == bpe.encode(text) for text in NASTY)


def test_the_end_of_text_is_the_one_that_is_named(bpe, tmp_path):
    """By a text or by a dictionary; where none is named it is GPT-2's, if there is such a token."""
    for name in ("<s>", {"content": "<s>"}, {"content": "<s>", "lstrip": True, "__type": "x"}):
        write_changed(bpe, tmp_path, config={"eos_token": name})
        assert load_tokenizer(tmp_path).eos_token_id == 700
    write_changed(bpe, tmp_path, config={"eos_token": None})
    assert load_tokenizer(tmp_path).eos_token_id == 699
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<old>"}')
    tokenizer = load_tokenizer(tmp_path)  # as before transformers 4.34
    assert tokenizer.eos_token_id == 700 == tokenizer.control["<old>"]
    write_changed(bpe, tmp_path, token={"content": "<other>"})
    (tmp_path / "special_tokens_map.json").unlink()
    assert load_tokenizer(tmp_path).eos_token_id is None


def test_characters_may_have_a_control_token(tmp_path):
    chars = char_tokenizer("abc")
    chars.backend.add_special_tokens(["<end>"])
    chars.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.eos_token_id, tokenizer.vocab_size) == (3, 4)
    for text in ("ab<end>c", b"ab<end>c"):
        assert tokenizer.encode(text, allow_special=True) == [0, 1, 3, 2]
        with pytest.raises(TokenizerError, match="character '<'"):
            tokenizer.encode(text)
    assert tokenizer.decode([0, 3, 1]) == "ab"


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": None},
        {"model": {"type": "WordLevel", "vocab": {"a": 0, "?": 1}, "unk_token": "?"}},
    ],
)
def test_only_plain_characters_are_read_by_us(tmp_path, changes):
    """All else goes through the library, which may know other steps, and unknown tokens."""
    from tokenizers import Tokenizer as Backend

    (tmp_path / "tokenizer.json").write_text(json.dumps(spec_of(char_tokenizer("aA")) | changes))
    tokenizer = load_tokenizer(tmp_path)
    assert type(tokenizer) is Tokenizer
    theirs = Backend.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("A") == theirs.encode("A").ids
    if "model" not in changes:
        with pytest.raises(TokenizerError, match=r"cannot encode this text: .*UNK"):
            tokenizer.encode("x")


def test_an_id_may_be_left_out(bpe, tmp_path):
    """
    The size is that of the highest id: the model needs so many rows. An id without a token has no
    text.
    """
    vocab = spec_of(bpe)["model"]["vocab"] | {END: 699, "zz": 705}
    write_changed(bpe, tmp_path, model={"vocab": vocab})
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.eos_token_id) == (706, 699)
    assert [tokenizer.spelled_bytes(i) for i in (699, 704, 705, 706)] == [
        END.encode(),
        b"",
        b"zz",
        b"",
    ]


def test_a_control_token_that_is_in_the_vocabulary_too_has_no_text(bpe, tmp_path):
    """The hub's GPT-2 has it in both places."""
    write_changed(bpe, tmp_path, model={"vocab": spec_of(bpe)["model"]["vocab"] | {END: 699}})
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode([*tokenizer.encode("a"), 699]) == "a"
    assert (tokenizer.token_bytes(699), tokenizer.spelled_bytes(699)) == (b"", END.encode())


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
        saved = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        assert saved == spec_of(tokenizer)
    assert "é" in (folder / "tokenizer.json").read_text(encoding="utf-8")  # to be read by people


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
    # Gemma 3 adds a token of images, of which models of text have no row: prompts are checked
    write_changed(bpe, tmp_path, config={"pad_token": "<image>"})
    (tmp_path / "config.json").write_text('{"vocab_size": 700}')
    assert load_tokenizer(tmp_path).encode("<image>", allow_special=True) == [700]


# --------------------------------------------------------------------------------------------------
# What is not understood

SPLIT = {"type": "Split", "pattern": {"Regex": r"\d|\D+"}, "behavior": "Isolated", "invert": False}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
REPLACE = {"type": "Replace", "pattern": {"String": "_"}, "content": " "}
FUSE, LEVEL = {"type": "Fuse"}, {"type": "ByteLevel", "add_prefix_space": False}
LEVEL |= {"trim_offsets": True, "use_regex": True}


@pytest.mark.parametrize(
    "changes",
    [
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digitz"}, LEVEL]}},
        {"pre_tokenizer": SPLIT | {"type": "Digitz"}},
        {"normalizer": {"type": "Digitz"}},
        {"post_processor": {"type": "Digitz"}},
        # the library takes it for a WordPiece, because it has its fields
        {"decoder": {"type": "Digitz", "prefix": "##", "cleanup": True}},
        {"model": {"type": "Digitz"}},
    ],
    ids=str,
)
def test_a_step_that_nobody_knows_is_named(bpe, tmp_path, changes):
    """Digits was skipped in silence, and the text cut as GPT-2 does."""
    write_changed(bpe, tmp_path, **changes)
    with pytest.raises(TokenizerError, match=r"has a step of the type 'Digitz': not supported"):
        load_tokenizer(tmp_path)


def test_a_step_that_is_broken_is_said(bpe, tmp_path):
    write_changed(bpe, tmp_path, pre_tokenizer=SPLIT | {"pattern": {"Regex": "("}})
    with pytest.raises(TokenizerError, match=r"unmatched parenthesis.*restore it"):
        load_tokenizer(tmp_path)


def test_a_model_that_draws_lots_is_refused(bpe, tmp_path):
    write_changed(bpe, tmp_path, model={"dropout": 0.1})
    with pytest.raises(TokenizerError, match="is a BPE with dropout"):
        load_tokenizer(tmp_path)


def in_sequence(*steps):
    return {"type": "Sequence", "decoders": list(steps)}


@pytest.mark.parametrize(
    ("decoder", "is_refused"),
    [
        ({"type": "CTC", "pad_token": "a", "word_delimiter_token": "b", "cleanup": True}, True),
        ({"type": "BPEDecoder", "suffix": "</w>"}, True),
        (STRIP, False),
        (STRIP | {"stop": 1}, True),
        (in_sequence(FUSE, STRIP), False),
        (in_sequence(FUSE, STRIP | {"start": 2}), True),
        (in_sequence(STRIP | {"start": 2}, FUSE), False),
        (in_sequence(FUSE, REPLACE), False),
        (in_sequence(FUSE, REPLACE | {"pattern": {"String": "__"}}), True),
        (in_sequence(FUSE, REPLACE | {"pattern": {"Regex": "_"}}), True),
        (in_sequence(FUSE, {"type": "ByteFallback"}), True),
        (in_sequence(LEVEL, FUSE), True),
        (LEVEL, False),
    ],
)
def test_a_decoder_that_looks_at_what_follows_is_refused(bpe, tmp_path, decoder, is_refused):
    """A stream cannot: its text would be another than that of all tokens at once."""
    write_changed(bpe, tmp_path, decoder=decoder)
    if not is_refused:
        load_tokenizer(tmp_path)
        return
    with pytest.raises(TokenizerError, match=r'makes text of tokens by {"type": "'):
        load_tokenizer(tmp_path)


# --------------------------------------------------------------------------------------------------
# The same ids and texts as transformers


def assert_same(directory: Path, texts: list[str]):
    """
    Ids with and without a BOS, texts of all ids with and without control tokens, and streams: from
    the first token, and behind a prompt.
    """
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(directory), load_tokenizer(directory)
    for add in (False, True):
        wanted = theirs(texts, add_special_tokens=add)["input_ids"]
        for text, ids in zip(texts, wanted, strict=True):
            assert ours.encode(text, True, add_special_tokens=add) == ids, text
    chance = random.Random(0)
    for skip in (False, True):
        keep = {"skip_special_tokens": skip, "clean_up_tokenization_spaces": False}
        for text, ids, whole in zip(
            texts, wanted, theirs.batch_decode(wanted, **keep), strict=True
        ):
            assert ours.decode(ids, skip) == whole
            stream = ours.stream(skip_special_tokens=skip)
            pieces = [*map(stream.push, ids), stream.flush()]
            assert "".join(pieces) == whole, text
            if "\ufffd" not in whole:
                assert "\ufffd" not in "".join(pieces), "half a character"
            middle = chance.randrange(len(ids) + 1)
            begun = theirs.decode(ids[:middle], **keep)
            if whole.startswith(begun) and not begun.endswith("\ufffd"):
                stream = ours.stream(ids[:middle], skip)
                answer = "".join(map(stream.push, ids[middle:])) + stream.flush()
                assert begun + answer == whole, text


TEXTS = random_texts(10_000, seed=14)
CHUNK = -(-len(TEXTS) // len(KINDS))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_the_ids_and_texts_of_transformers(kind, tmp_path):
    """10,000 texts, as many for each kind; and whole files."""
    start = list(KINDS).index(kind) * CHUNK
    texts = TEXTS[start : start + CHUNK] + NASTY + [Path(__file__).read_text()]
    assert_same(save(kind, tmp_path), texts)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_all_ids_and_texts_of_transformers(kind, tmp_path):
    assert_same(save(kind, tmp_path), TEXTS)


@pytest.mark.slow
@pytest.mark.real_models
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_real_tokenizers_have_the_ids_and_texts_of_transformers(name):
    import real_models

    try:
        directory = real_models.make(name)
    except real_models.Unavailable as reason:
        pytest.skip(str(reason))
    corpus = [path.read_text() for path in sorted(ROOT.glob("*.py"))]
    play = ROOT.parent / "shared" / "data" / "tinyshakespeare" / "input.txt"
    if play.is_file():
        corpus.append(play.read_text())
    corpus += [
        "".join(TEXTS[:2000]),
        "他说：“你好，世界！”\n" * 500,
        "🏳️‍🌈👩🏽‍🚀 é e\u0301 ที่ि\n" * 500,
    ]
    assert_same(directory, TEXTS + corpus)


def test_transformers_reads_a_gpt2_tokenizer_as_we_do(bpe, tmp_path):
    """It has a post-processor that adds nothing, and names end of text in three roles."""
    from transformers import GPT2Tokenizer

    merges = [tuple(pair) for pair in spec_of(bpe)["model"]["merges"]]
    theirs = GPT2Tokenizer(vocab=bpe.backend.get_vocab(), merges=merges)
    theirs.save_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    assert ours.eos_token_id == theirs.eos_token_id == 699
    assert all(ours.encode(text, allow_special=True) == theirs.encode(text) for text in NASTY)


PIECES = st.one_of(
    st.text(max_size=6),
    st.text(" \n\t\r\u00a0\u3000\x85\x1c'sdlrevm019-_<|>aé語", max_size=12),
    st.sampled_from(
        [END, "<|endof", "text|>", "def ", "    ", "\n\n\n", "😀", "e\u0301", "'ll", "١٢"]
    ),
)


@pytest.fixture(scope="module")
def theirs(bpe, tmp_path_factory):
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("saved")
    bpe.save(folder)
    return AutoTokenizer.from_pretrained(folder)


@given(st.lists(PIECES, max_size=8).map("".join))
@settings(max_examples=500, deadline=None)
def test_any_text_has_the_ids_of_transformers(bpe, theirs, text):
    """
    Control tokens in a prompt are tokens, with add_special_tokens or without: <|endoftext|> was
    seven of text.
    """
    ids = bpe.encode(text, allow_special=True)
    assert ids == theirs.encode(text) == theirs.encode(text, add_special_tokens=False)


# --------------------------------------------------------------------------------------------------
# Streams of tokens whose text depends on where they stand


def load(kind: str, folder: Path) -> Tokenizer:
    return load_tokenizer(save(kind, folder))


def pushed(stream: TextStream, tokens: list[int]) -> list[str]:
    return [*map(stream.push, tokens), stream.flush()]


@pytest.mark.parametrize("kind", ["llama2", "mistral", "unigram", "wordpiece", "words"])
def test_an_answer_behind_a_text_keeps_its_blank(kind, tmp_path):
    """
    Decoders drop the blank of the first word, so an answer that was decoded alone stuck to its
    prompt: "the" + "self". A BOS alone is no text, a token shown by its name is.
    """
    tokenizer = load(kind, tmp_path)
    [bos] = tokenizer.bos
    one, two = "the", "def" if kind == "words" else "of"
    first, second = tokenizer.encode(f"{one} {two}")
    assert pushed(tokenizer.stream(), [first, second]) == [one, f" {two}", ""]
    assert pushed(tokenizer.stream([bos, first]), [second]) == [f" {two}", ""]
    assert pushed(tokenizer.stream([bos]), [second]) == [two, ""]
    assert pushed(tokenizer.stream(), [bos, second, first]) == ["", two, f" {one}", ""]
    shown = pushed(tokenizer.stream([bos], skip_special_tokens=False), [second])
    assert shown == [f" {two}", ""]


def test_an_answer_completes_a_character_that_the_prompt_begins(bpe):
    """Once a server answered such a prompt, of token ids, with the prompt itself."""
    prompt = [*b"prompt ", *"€".encode()[:2], bpe.eos_token_id, bpe.eos_token_id]
    assert pushed(bpe.stream(prompt), [0xAC, 97]) == ["€", "a", ""]
    assert pushed(bpe.stream(prompt), [97]) == ["a", ""]  # the U+FFFD is the prompt's
    assert pushed(bpe.stream(prompt), []) == [""]
    assert pushed(bpe.stream(prompt[:-4]), [0xAC]) == ["\ufffd", ""]


@pytest.mark.parametrize("kind", ["gpt2", "llama2"])
def test_characters_are_whole(kind, tmp_path):
    """Each comes with its last byte, not sooner and not later."""
    tokenizer = load(kind, tmp_path)
    ids = [tokenizer._byte_token(byte) for byte in "a\n😀é".encode()]
    wanted = ["a", "\n", "", "", "", "😀", "", "é", ""]
    assert pushed(tokenizer.stream(ids[:1]), ids) == wanted
    # half of one, at the end
    text = pushed(tokenizer.stream(ids[:1]), ids[:4])
    assert text == ["a", "\n", "", "", "\ufffd" if kind == "gpt2" else "\ufffd\ufffd"]


def test_a_stop_string_ends_a_text_at_its_last_byte(tmp_path):
    """Llama 2 has no token for a line end but that of its byte."""
    tokenizer = load("llama2", tmp_path)
    stream = tokenizer.stream([5], stop=["\né"])
    tokens = [tokenizer._byte_token(byte) for byte in "a\né".encode()]
    assert [*map(stream.push, tokens)] == ["a", "", "", ""] and stream.matched == "\né"


def test_byte_tokens_that_are_no_character(tmp_path):
    """
    A U+FFFD for each, as in transformers; but that takes back the characters right before them,
    which a stream has sent.
    """
    from transformers import AutoTokenizer

    tokenizer, theirs = load("llama2", tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    word = tokenizer.encode("the")[0]
    broken = [tokenizer._byte_token(byte) for byte in b"\xe2\x82"]
    ids = [word, *broken, word, *broken]
    assert "".join(pushed(tokenizer.stream(), ids)) == theirs.decode(ids)
    ids = [word, tokenizer._byte_token(97), *broken, word]
    assert "".join(pushed(tokenizer.stream(), ids)) == "thea\ufffd\ufffd the"
    assert theirs.decode(ids) == "the\ufffd\ufffd\ufffd the"


def test_tokens_that_are_no_characters_cost_as_much_as_others(gpt2):
    """
    GPT-2's token 100 alone is U+FFFD. A server that decoded again and again until there was none
    took quadratic time, and sent nothing.
    """
    assert gpt2.decode([100]) == "\ufffd"
    stream = gpt2.stream()
    started = time.process_time()
    pieces = [stream.push(100) for _ in range(200_000)]
    assert time.process_time() - started < 3  # 0.3 s
    assert len("".join(pieces[:10])) >= 9


# --------------------------------------------------------------------------------------------------
# Bytes


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "falcon", "gemma"])
def test_bytes_have_tokens_where_the_vocabulary_has_them(kind, tmp_path):
    tokenizer = load(kind, tmp_path)
    for data in (b"\xff", b"ok \xe2\x82 cut", b"a\xc0\xaf\n", "é語".encode() + b"\x80"):
        assert tokenizer.decode_bytes(tokenizer.encode(data)) == data


def test_bytes_that_have_no_token_are_named(tmp_path):
    """SmolLM2's vocabulary lacks 21 of them, a Unigram's all."""
    for kind, byte in (("smollm2", 0xF0), ("unigram", 0xFF)):
        tokenizer = load(kind, tmp_path)
        assert tokenizer.encode(b"the") == tokenizer.encode("the")
        with pytest.raises(
            TokenizerError, match=f"the vocabulary lacks the byte 0x{byte:02X}: send text"
        ):
            tokenizer.encode(b"the " + bytes([byte]))
    assert len(load("smollm2", tmp_path).encode(b"\xff")) == 1


# --------------------------------------------------------------------------------------------------
# Bounded work

# What costs the most for each byte: one piece of one character, pieces of one or two, pieces that
# merge to the end or never
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
    "\ud800",
]


@pytest.mark.parametrize("kind", ["gpt2", "smollm2", "qwen2", "llama2", "gemma", "unigram"])
def test_the_work_is_bounded_for_each_byte(kind, tmp_path):
    """Nothing that a client sends takes more than a few microseconds a byte, however long it is."""
    tokenizer = load(kind, tmp_path)
    for unit in COSTLY:
        text = unit * (60_000 // len(unit))
        started = time.process_time()
        ids = tokenizer.encode(text, allow_special=True)
        assert tokenizer.stream(ids).push_all(ids) or kind == "smollm2"
        assert time.process_time() - started < 1, unit  # 0.01 to 0.2 s
