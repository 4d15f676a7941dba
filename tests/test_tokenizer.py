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

from tokenizer import TextStream, Tokenizer, TokenizerError, load_tokenizer, token_name
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


def test_texts_that_stop_others_come_back(bpe):
    """
    Half of a surrogate pair, which JSON can carry and UTF-8 cannot; a million blanks, on which some
    regular expressions panic.
    """
    assert bpe.decode(bpe.encode("a\ud800b")) == "a\ufffdb"
    text = "def f():" + " " * 600_000 + "x"
    assert bpe.decode(bpe.encode(text)) == text


@pytest.mark.parametrize("name", ["bpe", "gpt2"])
def test_transformers_reads_ours_with_the_same_ids(name, request, tmp_path):
    """It always reads a spelt control token as one."""
    from transformers import AutoTokenizer

    ours = request.getfixturevalue(name)
    ours.save(tmp_path)
    theirs, again = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    assert len(theirs) == ours.vocab_size
    assert theirs.eos_token_id == ours.eos_token_id == again.eos_token_id
    # the characters where Unicode tables of two libraries could differ: each once beside a letter,
    # a digit, a space
    points = [code for code in range(0, 0x30000, 37) if not 0xD800 <= code < 0xE000]
    for text in [*NASTY, *(f"a{chr(code)}1{chr(code)} {chr(code)}" for code in points)]:
        ids = ours.encode(text, allow_special=True)
        assert ids == theirs.encode(text) == again.encode(text, allow_special=True), text
        assert theirs.decode(ours.encode(text)) == text


def test_gpt2_ids_are_those_of_tiktoken(gpt2):
    """We rebuild the merges from tiktoken's ranks; its own encoding is the reference."""
    reference = tiktoken.get_encoding("gpt2")
    assert (gpt2.vocab_size, gpt2.eos_token_id) == (50257, 50256)
    assert gpt2.encode("Hello world") == [15496, 995]
    for text in NASTY:
        assert gpt2.encode(text) == reference.encode_ordinary(text)


def test_a_spelt_control_token_is_text_unless_asked(bpe):
    """In texts and in bytes. The token itself has no text, where its name is not asked for."""
    end = bpe.eos_token_id
    assert end == bpe.vocab_size - 1 == 699
    assert [bpe.token_bytes(i) for i in range(256)] == [bytes([i]) for i in range(256)]
    for data, ids in (f"a{END}b", [97, end, 98]), (f"a{END}".encode() + b"\xff", [97, end, 255]):
        plain = bpe.encode(data)
        assert end not in plain
        assert bpe.decode_bytes(plain) == (data.encode() if isinstance(data, str) else data)
        assert bpe.encode(data, allow_special=True) == ids
        assert b"".join(map(bpe.spelled_bytes, ids)) == bpe.decode_bytes(plain)
    assert bpe.token_bytes(end) == b"" and bpe.decode([97, end, 98]) == "ab"
    # the first two of the three bytes of \u20ac are one replacement character, as everywhere
    assert bpe.decode([97, 0xE2, 0x82, 98]) == "a\ufffdb"
    assert bpe.decode_bytes([0xE2, 0x82]) == b"\xe2\x82"


def test_characters(tmp_path):
    from transformers import AutoTokenizer

    text = "wörld\r\n 😀e\u0301"
    chars = char_tokenizer(text + text)
    assert chars.vocab_size == len(set(text)) and chars.eos_token_id is None
    assert chars.encode("\n\r") == [0, 1]  # sorted, numbered from 0
    chars.save(tmp_path)
    theirs, again = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    for part in (text, text[::-1], "  ", ""):
        ids = theirs.encode(part)
        assert chars.encode(part) == again.encode(part) == chars.encode(part.encode()) == ids
        assert chars.decode(ids) == theirs.decode(ids) == part


NAMES = {b"": "", b"a b": "a b", "é".encode(): "é"}
NAMES |= {b"\xc3": "bytes:\\xc3", b"\n\xff": "bytes:\\x0a\\xff"}


@pytest.mark.parametrize("data", NAMES)
def test_names_of_tokens(data):
    """Two digits for each byte: no two tokens are called the same."""
    assert token_name(data) == NAMES[data]


def test_a_stream_ends_once():
    """What was held is given out once; what a stop string left is nothing."""
    stream = TextStream(lambda token: bytes([token]), ["ab"])
    assert [stream.push(token) for token in b"xaya"] == ["x", "", "ay", ""]
    assert stream.flush() == "a" and stream.flush() == "" and stream.matched is None
    stream = TextStream(lambda token: bytes([token]), ["ab", "b", "cab"])
    assert "".join(stream.push(token) for token in b"xcab") == "x"
    assert stream.matched == "cab" and stream.flush() == ""
    assert stream.num_characters == 4


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


def test_a_broken_tokenizer(bpe, tmp_path):
    with pytest.raises(TokenizerError, match=r"no model in .*: tokenizer\.json is missing"):
        load_tokenizer(tmp_path)
    text = bpe.backend.to_str()
    broken = ["{", "[]", "{}", "[" * 100_000, text[:-9], text.replace('"merges"', '"merged"')]
    broken.append(bpe.backend.to_str(pretty=True).replace("699", "-1"))
    for content in broken:
        (tmp_path / "tokenizer.json").write_text(content)
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


def test_added_tokens_that_the_configuration_lists_keep_their_numbers(bpe, tmp_path):
    """
    Sorted as text, 1000 came before 999, and each was taken for the other. The file may list them
    in any order.
    """
    numbers = [*range(700, 1002)]
    random.Random(0).shuffle(numbers)
    listed = {str(i): {"content": f"<{i}>", "special": i % 2 == 0} for i in numbers}
    write_changed(bpe, tmp_path, config={"added_tokens_decoder": listed})
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("".join(f"<{i}>" for i in numbers), allow_special=True) == numbers
    assert {f"<{i}>": i for i in numbers if i % 2 == 0}.items() <= tokenizer.control.items()
    assert "<701>" not in tokenizer.control


def test_named_tokens_are_added_in_transformers_order(bpe, tmp_path):
    """Whatever the order in the file: the seven names first, then those that only it knows."""
    from transformers import AutoTokenizer

    config = {"mask_token": "<m>", "image_token": "<i>", "eos_token": "<e>", "cls_token": "<c>"}
    config |= {"extra_special_tokens": ["<y>", "<x>"], "bos_token": "<b>"}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<e>"}
    write_changed(bpe, tmp_path, config=config)
    text = "<x><y><i><m><c><e><b>"
    ids = load_tokenizer(tmp_path).encode(text, allow_special=True)
    assert ids == AutoTokenizer.from_pretrained(tmp_path).encode(text)
    assert sorted(ids) == [*range(700, 707)] and ids[:2] == [706, 705]


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
    The size is that of the highest id: the model needs so many rows. An id without a token, which a
    model with more rows may sample, has no text; nor has a control token that the vocabulary has,
    as in the hub's GPT-2.
    """
    vocab = spec_of(bpe)["model"]["vocab"] | {END: 699, "zz": 705}
    write_changed(bpe, tmp_path, model={"vocab": vocab})
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.eos_token_id) == (706, 699)
    names = [tokenizer.spelled_bytes(i) for i in (699, 704, 705, 706)]
    assert names == [END.encode(), b"", b"zz", b""]
    assert tokenizer.decode_bytes([97, 704, 699, 706]) == b"a"
    assert tokenizer.decode([97, 699]) == "a"


def test_the_files_that_are_saved(tmp_path):
    """All that transformers reads, to be read by people, too; and no file of the way there."""
    char_tokenizer("aé").save(tmp_path / "new")
    assert "é" in (tmp_path / "new" / "tokenizer.json").read_text(encoding="utf-8")
    bpe_tokenizer([]).save(tmp_path)
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"tokenizer.json", "tokenizer_config.json", "new"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= dict.fromkeys(["bos_token", "eos_token"], END)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text()) == config


def test_a_tokenizer_of_more_tokens_than_the_model_is_refused(bpe, tmp_path):
    """A prompt with one of the others ended in an error of the engine, if it came to that."""
    bpe.save(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 699}')
    with pytest.raises(TokenizerError, match=r"it has 700 tokens, .* the model has 699"):
        load_tokenizer(tmp_path)
    # a broken file is reported by the model's loader
    for fine in ('{"vocab_size": 700}', '{"vocab_size": 704}', "{}", "{", "[]"):
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


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pre_tokenizer": SPLIT | {"pattern": {"Regex": "("}}}, "unmatched parenthesis.*restore"),
        ({"model": {"dropout": 0.1}}, "is a BPE with dropout"),
        ({"token": {"content": "x" * 1025}}, "has an added token of 1025 characters"),
    ],
)
def test_a_step_that_cannot_be_run_is_refused(bpe, tmp_path, changes, words):
    write_changed(bpe, tmp_path, **changes)
    with pytest.raises(TokenizerError, match=words):
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


@pytest.mark.parametrize("kind", ["gpt2", "llama2"])
@pytest.mark.parametrize("character", ["é", "€", "😀"], ids=["2 bytes", "3 bytes", "4 bytes"])
def test_an_answer_completes_a_character_wherever_it_is_cut(kind, character, tmp_path):
    """
    Once a server answered such a prompt with the prompt itself; and after three of an emoji's four
    bytes the answer began with U+FFFD: too little of the prompt was read.
    """
    tokenizer = load(kind, tmp_path)
    data = character.encode()
    for before in "", "a", "é", "😀", "\ufffd", "a" * 9:
        ids = [tokenizer._byte_token(byte) for byte in (before + character).encode()]
        for cut in range(len(before.encode()) + 1, len(ids)):
            rest = pushed(tokenizer.stream(ids[:cut]), [*ids[cut:], *ids[-len(data) :]])
            assert "".join(rest) == 2 * character
            assert pushed(tokenizer.stream(ids[:cut]), []) == [""]  # the prompt has shown it
            assert pushed(tokenizer.stream(ids[:cut]), ids[-len(data) :])[-2] == character


@pytest.mark.parametrize("kind", ["gpt2", "llama2"])
def test_broken_characters_are_shown_once(kind, tmp_path):
    """
    Those that the prompt ends with it has shown. One more byte of them makes no text yet, and what
    is broken later is the answer's own.
    """
    tokenizer = load(kind, tmp_path)
    errors = "replace" if kind == "gpt2" else "each_byte"
    answers = [b"\x9fa", b"\x9f\x98\x80\xffa", b"\x98\x80\xf0\x9fa", b"a\xff\xff", b"\x80\xe2"]
    for end in b"\xf0", b"\xf0\x9f", b"\xf0\x9f\x98":
        for answer in answers:
            prompt = b"a" + end
            shown = (prompt + answer).decode("utf-8", errors)
            before = prompt.decode("utf-8", errors)
            # of a character that the answer completes the prompt has shown nothing that is right
            wanted = shown[len(before) if shown.startswith(before) else 1 :]
            stream = tokenizer.stream([*map(tokenizer._byte_token, prompt)])
            got = "".join(pushed(stream, [*map(tokenizer._byte_token, answer)]))
            assert got == wanted, (prompt, answer)


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
    END,
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
