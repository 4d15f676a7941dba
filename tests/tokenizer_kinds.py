"""
Small tokenizers of every kind that the hub has, made with the `tokenizers` library, and texts that
tell them apart.

    directory = save("llama2", tmp_path)     # tokenizer.json and tokenizer_config.json
    texts = random_texts(1000, seed=0)
"""

import functools
import json
import random
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

ROOT = Path(__file__).resolve().parents[1]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORDS = ["the", "The ", "def", "self", " in", "'ll", "don't", "naïve", "e\u0301", "語と文字"]
WORDS += [
    "中文，测试。",
    "שלום",
    "हिन्दी",
    "ไทย",
    "👩\u200d👧",
    "🇨🇭",
    "½²Ⅷ",
    "12",
    "1234",
    "١٢٣",
    "3.14",
]
WORDS += [
    "  ",
    "   ",
    "\n\n",
    "\r\n",
    "▁▁",
    "<0x41>",
    "##",
    "!?",
    "<s>",
    "</s>",
    "<|end|>",
    "<think>",
]
WORDS += ["</think>", "<|en", "[MASK]", "[mask]", "<b>", "//"]
WORDS += list("ǅﬁ\u0301字😀\U0010ffff𝄞1 \n\t\u00a0\u3000\u200b\x85\x00\x7f\ufffd▁Ġ.…a_-")
TEMPLATE = {"single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}]}
TEMPLATE["single"] += [{"Sequence": {"id": "A", "type_id": 0}}]
TEMPLATE |= {"type": "TemplateProcessing", "pair": TEMPLATE["single"]}


def random_texts(count: int, seed: int) -> list[str]:
    """Words and single characters of all kinds, glued together."""
    chance = random.Random(seed)
    planes = [(0, 0x80), (0x80, 0x800), (0x800, 0xD800), (0xE000, 0x10000), (0x10000, 0x110000)]

    def piece() -> str:
        if chance.random() < 0.7:
            return chance.choice(WORDS)
        return chr(chance.randrange(*chance.choice(planes)))

    return ["".join(piece() for _ in range(chance.randrange(12))) for _ in range(count)]


@functools.cache
def sources() -> list[str]:
    return [path.read_text() for path in sorted(ROOT.glob("*.py"))[:4]] + WORDS * 3


def learnt(pre_tokenizer, alphabet=()) -> tuple[dict, list]:
    """A vocabulary and its merges."""
    learner = Backend(models.BPE())
    learner.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=list(alphabet), limit_alphabet=300, show_progress=False
    )
    learner.train_from_iterator(sources(), trainer)
    model = json.loads(learner.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


@functools.cache
def byte_level() -> tuple[dict, list]:
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return learnt(level, sorted(level.alphabet()))


@functools.cache
def metaspace() -> tuple[dict, list]:
    """With <unk>, <s>, </s> and the 256 bytes in front."""
    vocab, merges = learnt(pre_tokenizers.Metaspace())
    front = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    return {piece: i for i, piece in enumerate(dict.fromkeys([*front, *vocab]))}, merges


def level_steps(*before) -> pre_tokenizers.Sequence:
    return pre_tokenizers.Sequence([*before, pre_tokenizers.ByteLevel(False, use_regex=False)])


def of_bytes(pre_tokenizer, vocab=None, **options) -> Backend:
    own, merges = byte_level()
    backend = Backend(models.BPE(vocab or own, merges, **options))
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "<|end|>"])
    return backend


def with_fallback(strip: int) -> Backend:
    vocab, merges = metaspace()
    model = models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    backend = Backend(model)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + [decoders.Strip(" ", strip, 0)] * strip)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def gpt2() -> Backend:
    return of_bytes(pre_tokenizers.ByteLevel(add_prefix_space=False))


def smollm2() -> Backend:
    """Its vocabulary lacks some bytes: such characters encode to less, or to nothing."""
    vocab, merges = byte_level()
    lacking = {"ĉ", "ð", "Ã", "\xad"}
    vocab = {piece: i for piece, i in vocab.items() if lacking.isdisjoint(piece)}
    merges = [pair for pair in merges if lacking.isdisjoint("".join(pair))]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend = of_bytes(pre_tokenizers.Sequence([pre_tokenizers.Digits(True), level]))
    backend.model = models.BPE(vocab, merges)
    return backend


def llama3() -> Backend:
    vocab = byte_level()[0]
    vocab = vocab | {"ĠzzzzÃ©": len(vocab), "unmerged": len(vocab) + 1}
    split = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
    return of_bytes(level_steps(split), vocab, ignore_merges=True)


def qwen2() -> Backend:
    backend = of_bytes(level_steps(pre_tokenizers.Split(Regex(LLAMA3), "isolated")))
    backend.normalizer = normalizers.NFC()
    backend.add_tokens([AddedToken(name, normalized=False) for name in ("<think>", "</think>")])
    return backend


def deepseek() -> Backend:
    splits = [r"\p{N}{1,3}", r"[一-龥]+", r"[!-/:-~]?[A-Za-z]+|\s+"]
    return of_bytes(level_steps(*(pre_tokenizers.Split(Regex(s), "isolated") for s in splits)))


def falcon() -> Backend:
    steps = [pre_tokenizers.Punctuation("contiguous"), pre_tokenizers.ByteLevel(False)]
    steps += [
        pre_tokenizers.Digits(False),
        pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
    ]
    return of_bytes(pre_tokenizers.Sequence(steps))


def llama2() -> Backend:
    backend = with_fallback(strip=1)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return backend


def mistral() -> Backend:
    backend = with_fallback(strip=1)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return backend


def gemma() -> Backend:
    backend = with_fallback(strip=0)
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.add_tokens([AddedToken(name, normalized=False) for name in ("\n\n", "▁▁", "<b>")])
    return backend


def unigram() -> Backend:
    """As T5: the first token loses its blank, all else that is not known is one token."""
    learner = Backend(models.Unigram())
    learner.normalizer = normalizers.NFKC()
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    learner.decoder = decoders.Metaspace()
    names = ["<unk>", "<s>", "</s>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=400, unk_token="<unk>", special_tokens=names, show_progress=False
    )
    learner.train_from_iterator([text[:5000] for text in sources()], trainer)
    return learner


def wordpiece() -> Backend:
    """As BERT: tokens but the first get a blank in front, but before some punctuation."""
    learner = Backend(models.WordPiece(unk_token="<unk>"))
    learner.normalizer = normalizers.BertNormalizer()
    learner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    learner.decoder = decoders.WordPiece()
    names = ["<unk>", "<s>", "</s>"]
    trainer = trainers.WordPieceTrainer(
        vocab_size=500, limit_alphabet=200, special_tokens=names, show_progress=False
    )
    learner.train_from_iterator([text[:5000] for text in sources()], trainer)
    return learner


def flags() -> Backend:
    """Added tokens with every flag, found before and after normalizing."""
    backend = gpt2()
    backend.normalizer = normalizers.Lowercase()
    backend.add_special_tokens(
        [AddedToken("[MASK]", lstrip=True, normalized=True), AddedToken("</s>", rstrip=True)]
    )
    backend.add_tokens(
        [AddedToken("the", single_word=True, normalized=False), AddedToken("<think>", rstrip=True)]
    )
    return backend


def words() -> Backend:
    """No decoder: tokens are joined by blanks."""
    vocab = {word: i for i, word in enumerate(["<unk>", "<s>", *WORDS])}
    backend = Backend(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<s>"])
    return backend


KINDS = [gpt2, smollm2, llama3, qwen2, deepseek, falcon, llama2, mistral, gemma, unigram]
KINDS = {make.__name__: make for make in [*KINDS, wordpiece, flags, words]}
CONFIGS = {
    "gpt2": {"eos_token": "<|end|>"},
    "llama3": {"eos_token": {"__type": "AddedToken", "content": "<|end|>"}},
}
# what only this file has, or describes otherwise
CONFIGS["deepseek"] = {"bos_token": "<new>", "pad_token": "[MASK]", "eos_token": "_"}
CONFIGS["falcon"] = {"additional_special_tokens": ["<b>", "//"], "added_tokens_decoder": {}}
DESCRIBED = {"content": "<b>", "special": False, "lstrip": True, "normalized": True}
CONFIGS["falcon"]["added_tokens_decoder"]["602"] = DESCRIBED
CONFIGS["gemma"] = {"add_bos_token": True, "chat_template": "{{ messages }}"}


@functools.cache
def spec(kind: str) -> str:
    """Its tokenizer.json. All but some put <s> before a text."""
    content = json.loads(KINDS[kind]().to_str())
    if kind not in ("gpt2", "qwen2", "gemma"):
        bos = next(token["id"] for token in content["added_tokens"] if token["content"] == "<s>")
        added = {"<s>": {"id": "<s>", "ids": [bos], "tokens": ["<s>"]}}
        content["post_processor"] = TEMPLATE | {"special_tokens": added}
    return json.dumps(content)


def save(kind: str, folder: Path) -> Path:
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | CONFIGS.get(kind, {})
    (folder / "tokenizer.json").write_text(spec(kind))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
