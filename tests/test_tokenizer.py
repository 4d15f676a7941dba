"""
tokenizer.py: every text and every byte survives a round trip, and any tokenizer.json gives the ids
and texts that transformers gives, whole and as a stream.
"""

import json
import os
import random
import time
from collections.abc import Iterator
from contextlib import nullcontext
from hashlib import sha1
from pathlib import Path
from unittest.mock import Mock

import pytest
import tiktoken
from tokenizer_kinds import KINDS, SHARED, random_texts, save

from common import write_json
from tokenizer import (
    TextStream,
    Tokenizer,
    TokenizerError,
    check_fits_model,
    load_tokenizer,
    token_name,
)
from training.corpus import (
    GPT2_MERGES,
    bpe_tokenizer,
    char_tokenizer,
    gpt2_tokenizer,
    train_bpe,
)

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
    """Return a small BPE learned from this repo's own source code."""
    return train_bpe([path.read_text() for path in sorted(ROOT.glob("*.py"))], vocab_size=700)


@pytest.fixture(scope="module")
def gpt2() -> Iterator[Tokenizer]:
    """Return GPT-2's own tokenizer, from an offline copy of its vocabulary."""
    shared = ROOT.parent / "shared/data/tiktoken_cache"
    folder = os.environ.get("TIKTOKEN_CACHE_DIR") or shared
    if not (Path(folder) / sha1(GPT2_MERGES.encode()).hexdigest()).is_file():  # tiktoken's name
        pytest.skip("needs GPT-2's vocabulary: set TIKTOKEN_CACHE_DIR")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(folder))
        yield gpt2_tokenizer()


def read_both(directory: Path) -> tuple:
    """Return transformers' tokenizer of a directory, and ours."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory), load_tokenizer(directory)


# --------------------------------------------------------------------------------------------------
# Our own


@pytest.mark.parametrize("name", ["bpe", "gpt2"])
def test_transformers_reads_ours_with_the_same_ids(name, request, tmp_path):
    """transformers always reads the name of a control token as that token."""
    ours = request.getfixturevalue(name)
    ours.save(tmp_path)
    reference, again = read_both(tmp_path)
    assert len(reference) == ours.vocab_size
    assert reference.eos_token_id == ours.eos_token_id == again.eos_token_id
    # characters for which the Unicode tables of two libraries might differ, each once after a
    # letter, a digit and a space
    points = [chr(code) for code in range(0, 0x30000, 37) if not 0xD800 <= code < 0xE000]
    for text in [*NASTY, "".join(f"a{point}1{point} {point}" for point in points)]:
        ids = ours.encode(text, allow_special=True)
        assert ids == reference.encode(text) == again.encode(text, allow_special=True), text
        assert reference.decode(ours.encode(text)) == text


def test_gpt2_ids_are_those_of_tiktoken(gpt2):
    """We read the merges file that tiktoken stores; tiktoken's own encoding is the reference."""
    reference = tiktoken.get_encoding("gpt2")
    assert (gpt2.vocab_size, gpt2.eos_token_id) == (50257, 50256)
    for text in ["Hello world", *NASTY]:
        assert gpt2.encode(text) == reference.encode_ordinary(text)


def test_offline_gpt2_says_what_to_set(monkeypatch):
    def no_network(address):
        raise ConnectionError("no route to host")

    monkeypatch.setattr("tiktoken.load.read_file_cached", no_network)
    with pytest.raises(TokenizerError, match="set TIKTOKEN_CACHE_DIR"):
        gpt2_tokenizer()


def test_a_spelt_control_token_is_text_unless_asked(bpe):
    """The token itself has no text unless its name is requested."""
    end = bpe.eos_token_id
    assert end == bpe.vocab_size - 1 == 699
    text = f"a{END}b"
    plain = bpe.encode(text)
    assert end not in plain
    assert bpe.decode(plain) == text
    ids = bpe.encode(text, allow_special=True)
    assert ids == [97, end, 98]
    assert b"".join(map(bpe.spelled_bytes, ids)) == text.encode()
    assert bpe.token_bytes(end) == b""
    assert bpe.decode(ids) == "ab"


def test_characters(tmp_path):
    text = "wörld\r\n 😀e\u0301"
    chars = char_tokenizer(text + text)
    assert chars.vocab_size == len(set(text))
    assert chars.eos_token_id is None
    assert chars.encode("\n\r") == [0, 1]  # sorted, numbered from 0
    chars.save(tmp_path)  # in a form that people can also read
    assert "ö" in (tmp_path / "tokenizer.json").read_text(encoding="utf-8")
    reference, again = read_both(tmp_path)
    assert again.has_known_pattern
    for part in (text, text[::-1], "  ", ""):
        ids = reference.encode(part)
        assert chars.encode(part) == again.encode(part) == ids
        assert chars.decode(ids) == reference.decode(ids) == part
    with pytest.raises(
        TokenizerError,
        match=r"'x' \(U\+0078, at position 2\) is not among the 11 .* train with a BPE",
    ):
        again.encode("rdxrx")  # names the first one


def test_names_of_tokens():
    """
    Bytes that form no character are written as two digits each, so no two tokens have the same
    name.
    """
    data = [b"", b"a b", "é".encode(), b"\xc3", b"\n\xff"]
    assert [*map(token_name, data)] == ["", "a b", "é", "bytes:\\xc3", "bytes:\\x0a\\xff"]


def test_the_configuration_that_is_saved(tmp_path):
    """It has everything that transformers reads."""
    bpe_tokenizer([]).save(tmp_path)
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    config |= {"clean_up_tokenization_spaces": False, "bos_token": END, "eos_token": END}
    assert json.loads((tmp_path / "tokenizer_config.json").read_text()) == config


# --------------------------------------------------------------------------------------------------
# A directory, changed


def write_changed(bpe, folder, spec="{}", config="{}"):
    """
    Save the tokenizer with changes (JSON) to tokenizer.json, whose model is merged, and to
    tokenizer_config.json.
    """
    content = json.loads(bpe.backend.to_str())
    changes = json.loads(spec)
    model = content["model"] | changes.pop("model", {})
    (folder / "tokenizer.json").write_text(json.dumps(content | changes | {"model": model}))
    (folder / "tokenizer_config.json").write_text(config)


# what tokenizer.json says -> the refusal, or nothing
CHANGES = r"""
{"pre_tokenizer": {"type": "Digitz"}} -> has a step of the type 'Digitz': this is not supported
{"normalizer": {"type": "Sequence", "normalizers": [{"type": "Digitz"}]}} -> the type 'Digitz'
{"decoder": {"type": "Digitz", "prefix": "##", "cleanup": true}} -> the type 'Digitz'
{"decoder": {"type": "CTC", "pad_token": "a", "word_delimiter_token": "b", "cleanup": true}} -> has the decoder step {"type": "CTC
{"decoder": {"type": "Strip", "content": " ", "start": 1, "stop": 0}} ->
{"decoder": {"type": "Strip", "content": " ", "start": 1, "stop": 1}} -> has the decoder step
{"decoder": {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}} ->
{"decoder": {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 2, "stop": 0}]}} -> has the decoder step
{"decoder": {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteFallback"}]}} -> has the decoder step
{"decoder": {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}]}} -> has the decoder step
{"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": false}} -> unmatched parenthesis.*restore it
{"model": {"merges": [["a", "zz"]]}} -> restore it
{"model": {"type": 5}} -> restore it
{"model": {"dropout": 0.1}} -> is a BPE with dropout, which encodes a text differently each time
"""  # noqa: E501


@pytest.mark.parametrize("row", CHANGES.strip().splitlines())
def test_a_changed_file_is_read_or_refused(bpe, tmp_path, row):
    """
    Previously Digits was skipped silently. The library takes a decoder of an unknown type for
    another one with its fields. A decoder that looks at what follows would give a stream another
    text.
    """
    changes, _, words = row.partition(" ->")
    write_changed(bpe, tmp_path, changes)
    if not words:
        load_tokenizer(tmp_path)
        return
    with pytest.raises(TokenizerError, match=words.strip()):
        load_tokenizer(tmp_path)


def test_a_broken_file_is_refused(bpe, tmp_path):
    with pytest.raises(TokenizerError, match=r"there is no directory .*none"):
        load_tokenizer(tmp_path / "none")
    negative = bpe.backend.to_str(pretty=True).replace("699", "-1")
    for content in ["{", "[]", "{}", "[" * 100_000, negative]:
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(TokenizerError, match="restore it"):
            load_tokenizer(tmp_path)


def test_added_tokens_that_the_configuration_lists_keep_their_numbers(bpe, tmp_path):
    """
    Previously they were sorted as text, so 1000 came before 999, and each was taken for the other.
    The file may list them in any order.
    """
    listed = {str(i): {"content": f"<{i}>", "special": i == 701} for i in range(1001, 699, -1)}
    write_changed(bpe, tmp_path, config=json.dumps({"added_tokens_decoder": listed}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("<999><1000><701>", allow_special=True) == [999, 1000, 701]
    assert tokenizer.control == {END: 699, "<701>": 701}


NAMED = """{"mask_token": "<m>", "image_token": "<i>", "eos_token": "<e>", "cls_token": "<c>",
    "extra_special_tokens": ["<y>", "<x>"], "bos_token": "<b>", "pad_token": "<e>",
    "tokenizer_class": "PreTrainedTokenizerFast"}"""


def test_named_tokens_are_added_in_transformers_order(bpe, tmp_path):
    """
    Whatever the order in the file, the seven names come first, then those that only the file has.
    """
    write_changed(bpe, tmp_path, config=NAMED)
    text = "<x><y><i><m><c><e><b>"
    reference, ours = read_both(tmp_path)
    ids = ours.encode(text, allow_special=True)
    assert ids == reference.encode(text)
    assert sorted(ids) == [*range(700, 707)]
    assert ids[:2] == [706, 705]


ENDS = {  # what tokenizer_config.json says -> the end of text
    '{"eos_token": "<s>"}': 700,
    '{"eos_token": {"content": "<s>", "lstrip": true, "__type": "x"}}': 700,
    '{"eos_token": null}': 699,  # none is named: GPT-2's, if there is such a token
}


def test_the_end_of_text_is_the_one_that_is_named(bpe, tmp_path):
    for config, end in ENDS.items():
        write_changed(bpe, tmp_path, config=config)
        assert load_tokenizer(tmp_path).eos_token_id == end, config
    old = tmp_path / "special_tokens_map.json"  # before transformers 4.34
    old.write_text('{"eos_token": "<old>"}')
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_token_id == 700 == tokenizer.control["<old>"]
    newer = '{"added_tokens_decoder": {}, "eos_token": "<s>"}'  # makes the other file stale
    write_changed(bpe, tmp_path, config=newer)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_token_id == tokenizer.control["<s>"]
    assert "<old>" not in tokenizer.control
    old.unlink()
    write_changed(bpe, tmp_path, '{"added_tokens": []}')
    assert load_tokenizer(tmp_path).eos_token_id is None


def test_an_id_may_be_left_out(bpe, tmp_path):
    """
    The vocabulary's size follows from the highest id, because the model needs that many rows. An id
    without a token, which a model with more rows may sample, has no text. Nor has a control token
    that is in the vocabulary, as in the hub's GPT-2.
    """
    vocab = bpe.backend.get_vocab() | {"zz": 705}
    write_changed(bpe, tmp_path, json.dumps({"model": {"vocab": vocab}}))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.eos_token_id) == (706, 699)
    names = [tokenizer.spelled_bytes(i) for i in (699, 704, 705, 706)]
    assert names == [END.encode(), b"", b"zz", b""]
    assert tokenizer.decode_bytes([97, 704, 699, 706]) == b"a"
    assert tokenizer.decode([97, 699]) == "a"


def test_a_tokenizer_of_more_tokens_than_the_model_is_refused(bpe, tmp_path):
    """
    Previously a prompt with one of the extra tokens ended, at best, in an error of the engine.
    """
    bpe.save(tmp_path)
    config = tmp_path / "config.json"
    config.write_text('{"vocab_size": 699}')
    with pytest.raises(TokenizerError, match=r"it has 700 tokens, .* the model has 699"):
        load_tokenizer(tmp_path)
    # the model's loader reports a broken file
    for fine in ('{"vocab_size": 700}', '{"vocab_size": 704}', "{}", "{", "[]"):
        config.write_text(fine)
        assert load_tokenizer(tmp_path).vocab_size == 700
    # Gemma 3 adds an image token, for which text models have no row: prompts are checked for it
    write_changed(bpe, tmp_path, config='{"pad_token": "<image>"}')
    config.write_text('{"vocab_size": 700}')
    assert load_tokenizer(tmp_path).encode("<image>", allow_special=True) == [700]


# a model's rows, the tokens of its tokenizer, perhaps the model's end of text, whether it is
# refused: real ones, then mistakes
ROWS = """
GPT-2 50257 50257
nanoGPT's 50304 50257
SmolLM2 49152 49152
Qwen2.5-0.5B 151936 151665
Qwen2.5-14B 152064 151665
DeepSeek-Coder 32256 32022
DeepSeek-LLM 102400 100015
GPT-2-with-its-end 50304 50257 50256
tiny 127 64
tiny-and-a-row-more 128 64 refused
the-default-model's-beside-SmolLM2 49152 4096 refused
cut 4096 300 refused
SmolLM2's-beside-GPT-2 50257 49152 50256 refused
GPT-2's-beside-Qwen 151936 50257 refused
Qwen's-beside-GPT-2 50257 151665 refused
"""


@pytest.mark.parametrize("row", ROWS.strip().splitlines())
def test_a_tokenizer_of_fewer_tokens_than_padding_explains_is_refused(row, tmp_path):
    """
    Previously the rows of a wrong tokenizer were answered as empty text, and the rest as noise.
    """
    _, rows, tokens, *end = row.removesuffix(" refused").split()
    refused = row.endswith(" refused")
    ends = {"vocab_size": int(rows), "eos_token_id": [0, *map(int, end)]}
    write_json(tmp_path / "config.json", {"text_config": ends})
    tokenizer = Mock(vocab_size=int(tokens), eos_token_id=0)
    tokenizer.backend.get_vocab.return_value = {"last": int(tokens) - 1}
    says = f"it has {tokens} tokens, .* the model has {rows}: .* copy the model's own"
    with pytest.raises(TokenizerError, match=says) if refused else nullcontext():
        check_fits_model(tokenizer, tmp_path)


# --------------------------------------------------------------------------------------------------
# The same ids and texts as transformers


def assert_same(directory: Path, texts: list[str]):
    """
    Compare ids with and without a BOS, texts of all ids with and without control tokens, and
    streams: from the first token, and after a prompt.
    """
    reference, ours = read_both(directory)
    for add in (False, True):
        expected = reference(texts, add_special_tokens=add)["input_ids"]
        for text, ids in zip(texts, expected, strict=True):
            assert ours.encode(text, True, add_special_tokens=add) == ids, text
    chance = random.Random(0)
    for skip in (False, True):
        keep = {"skip_special_tokens": skip, "clean_up_tokenization_spaces": False}
        decoded = reference.batch_decode(expected, **keep)
        for text, ids, whole in zip(texts, expected, decoded, strict=True):
            assert ours.decode(ids, skip) == whole
            pieces = pushed(ours.stream(skip_special_tokens=skip), ids)
            assert "".join(pieces) == whole, text
            if "\ufffd" not in whole:
                assert "\ufffd" not in "".join(pieces), "half a character"
            middle = chance.randrange(len(ids) + 1)
            begun = reference.decode(ids[:middle], **keep)
            if whole.startswith(begun) and not begun.endswith("\ufffd"):
                answer = "".join(pushed(ours.stream(ids[:middle], skip), ids[middle:]))
                assert begun + answer == whole, text


def pushed(stream: TextStream, tokens: list[int]) -> list[str]:
    return [*map(stream.push, tokens), stream.flush()]


TEXTS = random_texts(10_000, seed=14)
CHUNK = -(-len(TEXTS) // len(KINDS))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_the_ids_and_texts_of_transformers(kind, tmp_path):
    """There are 10,000 texts, divided equally among the kinds, and whole files."""
    start = list(KINDS).index(kind) * CHUNK
    texts = TEXTS[start : start + CHUNK] + NASTY + [Path(__file__).read_text()]
    assert_same(save(kind, tmp_path), texts)


@pytest.mark.slow
@pytest.mark.real_models
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_real_tokenizers_have_the_ids_and_texts_of_transformers(name):
    import real_models

    directory = real_models.make(name)
    corpus = [path.read_text() for path in sorted(ROOT.glob("*.py"))]
    corpus.append("".join(TEXTS[:2000]))
    corpus += ["他说：“你好，世界！”\n" * 500, "🏳️‍🌈👩🏽‍🚀 é e\u0301 ที่ि\n" * 500]
    assert_same(directory, TEXTS + corpus)


# --------------------------------------------------------------------------------------------------
# Streams of tokens whose text depends on their position


ANSWERS = [b"", b"\x9fa", b"\x9f\x98\x80\xffa", b"\x98\x80\xf0\x9fa", b"a\xff\xff", b"\x80\xe2"]


@pytest.mark.parametrize("character", ["é", "€", "😀"])
@pytest.mark.parametrize("before", ["", "a", "é", "😀", "\ufffd", "a" * 9])
def test_an_answer_continues_a_character_wherever_it_is_cut(before, character):
    """
    Previously too little of the prompt was read. A server answered such a prompt with the prompt
    itself, and after three of an emoji's four bytes the answer began with U+FFFD. The prompt's own
    text has already shown broken characters at its end; those that come later belong to the answer.
    """
    tokens = [bytes([byte]) for byte in range(256)]
    data = character.encode()
    for cut in range(1, len(data)):
        prompt = before.encode() + data[:cut]
        shown = prompt.decode("utf-8", "replace")
        for answer in [data[cut:] + data, *ANSWERS]:
            whole = (prompt + answer).decode("utf-8", "replace")
            # if the answer completes a character, the prompt's text has not shown it correctly
            expected = whole[len(shown if whole.startswith(shown) else before) :]
            stream = TextStream(tokens.__getitem__, tokens.__getitem__, prompt)
            assert "".join(pushed(stream, answer)) == expected, (prompt, answer)


def test_behind_an_echo_of_nothing_an_answer_begins_the_text(tmp_path):
    """The decoder drops the blank before a text's first word."""
    tokenizer = load_tokenizer(save("llama2", tmp_path))
    [word] = tokenizer.encode("the")
    stream = tokenizer.stream()
    stream.push_all([])
    stream.token_bytes = tokenizer.token_bytes
    assert "".join(pushed(stream, [word, word])) == "the the"


def test_tokens_that_are_no_characters_cost_as_much_as_others(bpe):
    """
    A server that decoded again until there was no U+FFFD would take quadratic time, and send
    nothing.
    """
    stream = bpe.stream()
    started = time.process_time()
    pieces = [stream.push(0xE2) for _ in range(100_000)]
    assert time.process_time() - started < 3  # it takes 0.15 s
    assert len("".join(pieces[:10])) >= 9


# --------------------------------------------------------------------------------------------------
# The smallest number of tokens for a text

# kinds that lose characters, each with a text that has almost no tokens for its length
LOSSY = {
    "smollm2": "\t" * 500,
    "qwen2": "e" + "\u0300\u0301\u0302" * 200,
    "falcon": " " * 500 + "<b>",
    "unigram": "\U0010ffff" * 500,
    "wordpiece": "\x00" * 500,
    "flags": " " * 500 + "[MASK]",
    "words": " " * 500,
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_text_has_fewer_tokens_than_are_certain(kind, tmp_path):
    """
    Texts that must exceed a limit are refused by this number, unencoded. It is 0 if characters may
    get lost.
    """
    tokenizer = load_tokenizer(save(kind, tmp_path))
    longest = max(tokenizer.backend.get_vocab(), key=len)
    for text in [*TEXTS[:CHUNK], LOSSY.get(kind, ""), longest * 50, longest[:-1] * 50]:
        assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text, True)), text
    expected = 0 if kind in LOSSY else 6400 // len(longest)
    assert tokenizer.least_tokens("a" * 6400) == expected


# what tokenizer.json says
LOSING = r"""
{"normalizer": {"type": "Strip", "strip_left": true, "strip_right": true}}
{"normalizer": {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"String": "ab"}, "content": "c"}]}}
{"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Punctuation", "behavior": "Removed"}, LEVEL]}}
{"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "CharDelimiterSplit", "delimiter": "."}, LEVEL]}}
{"added_tokens": [{"id": 257, "content": "x", "rstrip": true, "lstrip": false, "single_word": false, "normalized": false, "special": false}]}
"""  # noqa: E501


@pytest.mark.parametrize("steps", LOSING.strip().splitlines())
def test_one_step_that_loses_characters_makes_nothing_certain(steps, tmp_path):
    assert char_tokenizer("ab").least_tokens("ab" * 9) == 18
    plain = bpe_tokenizer([])
    write_changed(plain, tmp_path, "{}")
    assert load_tokenizer(tmp_path).least_tokens("a" * 130) == 10
    write_changed(plain, tmp_path, steps.replace("LEVEL", SHARED["LEVEL"]))
    assert load_tokenizer(tmp_path).least_tokens("a" * 130) == 0
