r"""
Make small tokenizers of every kind found on the hub, and texts that tell them apart.

    directory = save("llama2", tmp_path)     # tokenizer.json and tokenizer_config.json
    texts = random_texts(1000, seed=0)
"""

import functools
import json
import random
import re
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

ROOT = Path(__file__).resolve().parents[1]
WORDS = re.split(
    "¦",
    "the¦The ¦def¦self¦ in¦'ll¦don't¦naïve¦e\u0301¦語と文字¦中文，测试。¦שלום¦हिन्दी¦ไทย¦👩\u200d👧"
    "¦🇨🇭¦½²Ⅷ¦12¦1234¦١٢٣¦3.14¦  ¦   ¦\n\n¦\r\n¦▁▁¦<0x41>¦##¦!?¦<s>¦</s>¦<|end|>¦<think>"
    "¦</think>¦<|en¦[MASK]¦[mask]¦<b>¦//",
)
WORDS += "ǅﬁ\u0301字😀\U0010ffff𝄞1 \n\t\u00a0\u3000\u200b\x85\x00\x7f\ufffd▁Ġ.…a_-"

# The steps and added tokens of each kind, as in its tokenizer.json. LEVEL, PIECES and LLAMA3 stand
# for steps that several kinds share. The vocabulary is byte-level unless one is named.
KINDS = {
    "gpt2": '{"pre_tokenizer": LEVEL, "post_processor": LEVEL}',
    # its vocabulary lacks some bytes, so characters with them give fewer tokens, or none
    "smollm2": """{"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        {"type": "Digits", "individual_digits": true}, LEVEL]}}""",
    "llama3": '{"pre_tokenizer": LLAMA3, "model": {"type": "BPE", "ignore_merges": true}}',
    "qwen2": """{"normalizer": {"type": "NFC"}, "pre_tokenizer": LLAMA3, "post_processor": null,
        "added_tokens": [{"content": "<think>", "special": false},
                         {"content": "</think>", "special": false}]}""",
    "deepseek": r"""{"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": "\\p{N}{1,3}"},
         "behavior": "Isolated", "invert": false},
        {"type": "Split", "pattern": {"Regex": "[一-龥]+"},
         "behavior": "Isolated", "invert": false},
        {"type": "Split", "pattern": {"Regex": "[!-/:-~]?[A-Za-z]+|\\s+"},
         "behavior": "Isolated", "invert": false}, PIECES]}}""",
    # its truncation and padding are ignored
    "falcon": """{"truncation": {"direction": "Right", "max_length": 2,
        "strategy": "LongestFirst", "stride": 0}, "padding": {"strategy": {"Fixed": 9},
        "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "<s>"}, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        {"type": "Punctuation", "behavior": "Contiguous"}, LEVEL,
        {"type": "Digits", "individual_digits": false},
        {"type": "Split", "pattern": {"Regex": "[0-9][0-9][0-9]"},
         "behavior": "Isolated", "invert": false}]}}""",
    "llama2": """{"model": {"vocabulary": "fallback"},
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}}""",
    "mistral": """{"model": {"vocabulary": "fallback"},
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first",
                          "split": false},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}}""",
    "gemma": r"""{"model": {"vocabulary": "fallback"}, "post_processor": null,
        "added_tokens": [{"content": "\n\n", "special": false}, {"content": "▁▁", "special": false},
                         {"content": "<b>", "special": false}],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": {"type": "Split", "pattern": {"String": " "},
                          "behavior": "MergedWithPrevious", "invert": false},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"}]}}""",
    # like T5: the first token loses its space, and each run of unknown characters is one token
    "unigram": """{"model": {"vocabulary": "unigram"}, "normalizer": {"type": "NFKC"},
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"},
        "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}}""",
    # like BERT: a space is added before every token, except for the first and some punctuation
    "wordpiece": """{"model": {"vocabulary": "wordpiece"},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "normalizer": {"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
                       "strip_accents": null, "lowercase": true},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true}}""",
    # added tokens with every flag, found before and after normalizing
    "flags": """{"pre_tokenizer": LEVEL, "normalizer": {"type": "Lowercase"}, "added_tokens": [
        {"content": "[MASK]", "lstrip": true, "normalized": true},
        {"content": "</s>", "rstrip": true},
        {"content": "the", "single_word": true, "special": false},
        {"content": "<think>", "rstrip": true, "normalized": true, "special": false}]}""",
    # no decoder: tokens are joined by spaces
    "words": """{"model": {"vocabulary": "words"}, "decoder": null,
        "pre_tokenizer": {"type": "WhitespaceSplit"}}""",
}
SHARED = {
    "LEVEL": """{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
        "use_regex": true}""",
    "LLAMA3": r"""{"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {"Regex":
        "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?"""
    r"""[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"},
        "behavior": "Isolated", "invert": false}, PIECES]}""",
    "PIECES": """{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
        "use_regex": false}""",
}
# settings that are only in tokenizer_config.json, or are different there
CONFIGS = {
    "gpt2": '{"eos_token": "<|end|>"}',
    "llama3": '{"eos_token": {"__type": "AddedToken", "content": "<|end|>"}}',
    "deepseek": '{"bos_token": "<new>", "pad_token": "[MASK]", "eos_token": "_"}',
    "falcon": """{"additional_special_tokens": ["<b>", "//"], "added_tokens_decoder": {"602":
        {"content": "<b>", "special": false, "lstrip": true, "normalized": true}}}""",
    "gemma": '{"add_bos_token": true, "chat_template": "{{ messages }}"}',
}


def random_texts(count: int, seed: int) -> list[str]:
    """Return words and single characters of all kinds, joined at random."""
    chance = random.Random(seed)
    planes = [(0, 0x80), (0x80, 0x800), (0x800, 0xD800), (0xE000, 0x10000), (0x10000, 0x110000)]

    def piece() -> str:
        if chance.random() < 0.7:
            return chance.choice(WORDS)
        return chr(chance.randrange(*chance.choice(planes)))

    return ["".join(piece() for _ in range(chance.randrange(12))) for _ in range(count)]


@functools.cache
def learnt(pre_tokenizer: str) -> tuple[list[str], list]:
    """Train a BPE, and return its pieces and merges."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = getattr(pre_tokenizers, pre_tokenizer)()
    alphabet = pre_tokenizers.ByteLevel.alphabet() if pre_tokenizer == "ByteLevel" else []
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=sorted(alphabet), limit_alphabet=300, show_progress=False
    )
    sources = [path.read_text() for path in sorted(ROOT.glob("*.py"))[:4]]
    learner.train_from_iterator(sources + WORDS * 3, trainer)
    model = json.loads(learner.to_str())["model"]
    return [*model["vocab"]], model["merges"]


def bpe(pieces: list[str], merges: list, **fields) -> dict:
    return {"type": "BPE", "vocab": numbered(pieces), "merges": merges} | fields


def numbered(pieces: list[str]) -> dict[str, int]:
    return {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}


def model_of(kind: str, vocabulary: str | None, **fields) -> dict:
    """Return the "model" section of a tokenizer.json, including its vocabulary."""
    front = ["<unk>", "<s>", "</s>"]
    unknown = {"unk_token": "<unk>"}
    pieces, merges = learnt("Metaspace")
    match vocabulary:
        case "fallback":
            front += [f"<0x{byte:02X}>" for byte in range(256)]
            return bpe(front + pieces, merges, byte_fallback=True, fuse_unk=True, **unknown)
        case "unigram":
            scored = [[piece, -i / 20] for i, piece in enumerate([*front, *reversed(pieces)])]
            return {"type": "Unigram", "unk_id": 0, "byte_fallback": False, "vocab": scored}
        case "wordpiece":
            inner = [f"##{piece}" for piece in pieces]
            vocab = numbered([*front, *inner, *(piece.lstrip("▁") or "▁" for piece in pieces)])
            unknown |= {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
            return {"type": "WordPiece", "vocab": vocab} | unknown
        case "words":
            return {"type": "WordLevel", "vocab": numbered([*front[:2], *WORDS])} | unknown
    pieces, merges = learnt("ByteLevel")
    if kind == "smollm2":
        lacking = {"ĉ", "ð", "Ã", "\xad"}
        pieces = [piece for piece in pieces if lacking.isdisjoint(piece)]
        merges = [pair for pair in merges if lacking.isdisjoint("".join(pair))]
    return bpe(pieces + ["ĠzzzzÃ©", "unmerged"] * (kind == "llama3"), merges, **fields)


@functools.cache
def spec(kind: str) -> str:
    """Return the tokenizer.json of a kind. Most kinds put <s> before a text."""
    text = KINDS[kind]
    for name, step in SHARED.items():
        text = text.replace(name, step)
    content = {"version": "1.0", "decoder": json.loads(SHARED["LEVEL"])} | json.loads(text)
    content["model"] = model_of(kind, **{"vocabulary": None} | content.get("model", {}))
    added = content.pop("added_tokens", [])
    backend = Tokenizer.from_str(json.dumps({"added_tokens": [], "post_processor": None} | content))
    known = [name for name in ("<unk>", "<s>", "</s>") if backend.token_to_id(name) is not None]
    for token in [*({"content": name} for name in known or ("<s>", "<|end|>")), *added]:
        backend.add_tokens([AddedToken(**{"special": True, "normalized": False} | token)])
    if "post_processor" not in content:
        bos = ("<s>", backend.token_to_id("<s>"))
        backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[bos])
    return backend.to_str()


def save(kind: str, folder: Path) -> Path:
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | json.loads(CONFIGS.get(kind, "{}"))
    (folder / "tokenizer.json").write_text(spec(kind))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
