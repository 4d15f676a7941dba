"""
A single decoder for GPT-2, Llama, Qwen, Gemma and others. Training, serving, and the reference
without a cache all run the same forward pass.

    logits, loss = model(tokens, targets)     # whole texts (B, T): training, evaluation, generate
    x = model.hidden(batch, pool.kv)          # a serving step (T, C): K and V in the paged pool
    logits = model.logits(x[batch.logits_index], batch.ops)

Families differ in the fields of `GPTConfig`, which families.py reads from config.json. Machines
differ in `Ops`, the table of operators that each batch carries. This file has the reference table,
`TORCH_OPS`, which is plain and differentiable, and spells out attention. The other tables
(ops/choice.py, training/fast.py) compute the same results faster. Start reading at the bottom with
`GPT`, or at `attention`.

Letters: B requests, T tokens, L layers, H query heads, Hk KV heads, D head size, V vocabulary size,
and (only in this file) C = n_embd, the width. A shape "(..., T, C)" is (B, T, C) for whole texts,
and (T, C) on a serving step's flat token axis.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from decimal import Decimal
from functools import partial
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

# --------------------------------------------------------------------------------------------------
# Operators

ACTIVATIONS = {
    "gelu_new": partial(F.gelu, approximate="tanh"),  # GPT-2's; the name is from transformers
    "gelu": F.gelu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
}


class Ops(NamedTuple):
    """
    A table of the operators that compute the decoder. There is one table for each type of machine.
    A `layer` has a weight and a bias. `kv` is one layer's part of the paged pool when serving, and
    None otherwise.
    """

    name: str
    # (tokens, positions, wte, wpe or None, scale) -> x (..., T, C)
    embed: Callable
    # (positions, frequencies) -> the rotation for `rotate` to apply
    rotation: Callable
    # (q (..., T, H, D), k, the rotation) -> q and k, with each head rotated by its token's position
    rotate: Callable
    # (x, delta or None, norm) -> (x + delta, norm(x + delta)). May overwrite x, so only use the
    # returned tensors.
    add_norm: Callable
    # (x, norm) -> norm(x). May overwrite x.
    norm: Callable
    # (y, an `Attention`, kv, batch) -> (q, what `store_kv` returns). q is (..., T, H, D), and is
    # normalised and rotated if the model does so.
    project_qkv: Callable
    # (k (..., T, Hk, D), v, kv, batch) -> what `attend` reads: either the pair (k, v) itself, or
    # the pool after both have been written to batch.slot_mapping
    store_kv: Callable
    # (q, the result of store_kv, an `Attention`, batch) -> (..., T, H, D): for each token and head,
    # a weighted sum of the values that the token may see
    attend: Callable
    # (x, layer, activation=None, gated=False, partial_sums=False) -> activation(layer(x)). If
    # gated, layer(x) has two halves, and the result is activation(gate) * up. With partial_sums,
    # the result may be (P, T, out), the P terms of a sum (split-K), and must be passed to add_norm
    # as its delta, where the terms are added up.
    linear: Callable
    # (x, layer, softcap=0.0) -> logits (..., T, V)
    head: Callable
    # (x, layer, targets, softcap for the logits) -> mean cross-entropy in nats
    loss: Callable

    # Only for serving:
    # (batch, H, kv of any layer, window=0) -> batch.attention_plans[window], for all layers with
    # this window
    plan_attention: Callable | None = None
    # see `inputs.decode_inputs`, `sampling.sample_torch` and `logprobs`, `packed.pack_weights`,
    # `fused.send`
    decode_inputs: Callable | None = None
    sample: Callable | None = None
    logprobs: Callable | None = None
    pack_weights: Callable | None = None
    send: Callable | None = None
    # see `CpuKernels.program`; None: compute each step one operator at a time
    program: Callable | None = None
    # True if a CUDA graph can capture a step, because the host never waits for the device, and its
    # launches depend only on the step's padded shape
    fixed_shapes: bool = False
    # True if an answer is the same to the bit no matter which other requests are in its steps
    is_deterministic: bool = False
    # (G, S) -> an object that finds decodes whose texts begin with the same blocks, so that
    # `attend` can read these blocks once for the whole group (ops/prefix.py); None: not supported
    group_finder: Callable | None = None


@dataclass
class WholeTexts:
    """A batch for training and the reference: whole texts of equal length, without a KV cache."""

    tokens: Tensor  # (B, T) int64
    positions: Tensor  # (T,) int64
    ops: Ops
    dropout: float = 0.0  # dropout probability, 0 unless training
    rotations: dict | None = None  # window -> rotation of the heads in its layers


def drop(x: Tensor, share: float) -> Tensor:
    """Apply dropout. If share is 0, just calling F.dropout would take 2% of a decode step."""
    return F.dropout(x, share) if share else x


def embed(
    tokens: Tensor, positions: Tensor, wte: nn.Embedding, wpe: nn.Embedding | None, scale: float
) -> Tensor:
    x = wte(tokens)
    if scale != 1:
        x = x * scale
    return x if wpe is None else x + wpe(positions)


def add_norm(x: Tensor, delta: Tensor | None, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Residual connection and pre-norm in one operator: return x + delta and its norm."""
    if delta is not None:
        x = x + delta
    return x, norm(x)


def normalise(x: Tensor, norm: nn.Module) -> Tensor:
    return norm(x)


def norm_heads(q: Tensor, k: Tensor, attn: "Attention") -> list[Tensor]:
    """
    Normalise q (..., T, H, D) and k. A norm takes either D numbers (one head), or all of a token's
    heads together.
    """
    norms = ((q, attn.q_norm), (k, attn.k_norm))
    rows = [x.flatten(-2).unflatten(-1, (-1, len(norm.weight))) for x, norm in norms]
    return [norm(x).view_as(heads) for x, (heads, norm) in zip(rows, norms, strict=True)]


def project_qkv(y: Tensor, attn: "Attention", kv: Tensor | None, batch):
    """
    Compute the queries, keys and values for y (..., T, C) in one matrix product. Return the queries
    (..., T, H, D) and what `store_kv` returns for the keys and values.
    """
    sizes = (attn.H, attn.Hk, attn.Hk)
    qkv = batch.ops.linear(y, attn.c_attn)  # (..., T, (H + 2 Hk) D)
    heads = qkv.view(*qkv.shape[:-1], sum(sizes), attn.D)  # (..., T, H + 2 Hk, D)
    q, k, v = heads.split_with_sizes(sizes, -2)
    has_norms = attn.q_norm is not None
    if has_norms and not attn.norms_late:
        q, k = norm_heads(q, k, attn)
    if batch.rotations:
        q, k = batch.ops.rotate(q, k, batch.rotations[attn.rope])
    if has_norms and attn.norms_late:
        q, k = norm_heads(q, k, attn)
    return q, batch.ops.store_kv(k, v, kv, batch)


def rotation(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """
    Return the cosines and sines (..., T, 1, D / 2) of positions (..., T) times frequencies
    (D / 2,), in fp32.
    """
    angles = positions[..., None, None].float() * frequencies
    return angles.cos(), angles.sin()


def rotate(q: Tensor, k: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """
    Apply rotary position embedding (RoPE, Su et al. 2021). In each head of q (..., T, H, D) and k
    (..., T, Hk, D), numbers i and i + D / 2 form a pair, as in transformers. Each pair is rotated
    by the angle position * frequencies[i]. As a result, the dot product of q and k depends on the
    distance between their positions.
    """
    cos, sin = rotation
    # Rotate q and k together. On a CPU, a decode step's time depends on how many small operations
    # there are.
    x = torch.cat((q, k), -2)
    first, second = x.chunk(2, -1)  # (..., T, H + Hk, D / 2) each
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    heads = (q.shape[-2], k.shape[-2])
    return rotated.to(x.dtype).split_with_sizes(heads, -2)


def store_kv(k: Tensor, v: Tensor, kv: None, batch: WholeTexts) -> tuple[Tensor, Tensor]:
    """Return k and v unchanged, since whole texts do not need a pool."""
    return k, v


def may_see(query_positions: Tensor, key_positions: Tensor, window: int) -> Tensor:
    """
    Return a bool tensor, broadcast from both arguments, that says whether each query may see each
    key. A token sees itself and all tokens before it (causality) or, if there is a window, only the
    last `window` of these.
    """
    seen = key_positions <= query_positions
    if window:
        seen &= key_positions > query_positions - window
    return seen


def attend(q: Tensor, kv: tuple[Tensor, Tensor], attn: "Attention", batch: WholeTexts) -> Tensor:
    """Compute each token's attention to the visible tokens of the same text."""
    _, T, H, _ = q.shape
    k, v = kv  # (B, T, Hk, D)
    G = H // k.shape[2]  # grouped-query attention: G query heads share each KV head
    q = q.transpose(1, 2)  # (B, H, T, D)
    k = k.transpose(1, 2).repeat_interleave(G, dim=1)  # (B, H, T, D)
    v = v.transpose(1, 2).repeat_interleave(G, dim=1)  # (B, H, T, D)
    seen = may_see(batch.positions[:, None], batch.positions, attn.window)  # (T, T)
    mask = torch.zeros(T, T, device=q.device).masked_fill(~seen, -torch.inf)
    mixed = attention(q, k, v, mask, attn.scale, batch.dropout, attn.softcap)  # (B, H, T, D)
    return mixed.transpose(1, 2)


def attention(q, k, v, attn_mask: Tensor | None, scale: float, dropout_p=0.0, softcap=0.0):
    """
    Scaled dot-product attention (Vaswani et al. 2017), spelled out. q is (.., n, D), and k and v
    are (.., m, D). attn_mask broadcasts to (.., n, m), and is 0 where a query may see a key and
    -inf elsewhere. If it is None, every query sees every key. Return (.., n, D), computed in fp32
    or wider.

    The arguments are those of torch's F.scaled_dot_product_attention, plus `softcap` (Gemma 2),
    which squeezes scores into the range -softcap to softcap. A softcap of 0 leaves them unchanged.
    """
    dtype = q.dtype
    wide = torch.promote_types(dtype, torch.float32)
    q, k, v = q.to(wide), k.to(wide), v.to(wide)
    scores = q @ k.mT * scale  # (.., n, m)
    scores = soft_cap(scores, softcap)
    if attn_mask is not None:
        scores = scores + attn_mask
    weights = scores.softmax(-1)
    weights = drop(weights, dropout_p)
    return (weights @ v).to(dtype)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Squeeze x smoothly into the range -cap to cap. If cap is 0, return x unchanged."""
    return cap * (x / cap).tanh() if cap else x


def linear(x: Tensor, layer: nn.Module, activation=None, gated=False, partial_sums=False):
    y = layer(x)
    if activation is None:
        return y
    activate = ACTIVATIONS[activation]
    if gated:
        gate, up = y.chunk(2, -1)
        return activate(gate) * up
    return activate(y)


def head(x: Tensor, layer: nn.Module, softcap: float = 0.0) -> Tensor:
    return soft_cap(layer(x), softcap)


def loss(x: Tensor, layer: nn.Module, targets: Tensor, softcap: float = 0.0) -> Tensor:
    """
    Return the mean cross-entropy of the logits layer(x), in nats, for x (B, T, C) and targets
    (B, T) int64. Targets of -100 are ignored. For softcap, see `attention`.
    """
    logits = layer(x.flatten(0, 1)).float()  # (B T, V)
    logits = soft_cap(logits, softcap)
    targets = targets.flatten()
    total = F.cross_entropy(logits, targets, reduction="sum")
    return total / (targets >= 0).sum().clamp(min=1)  # 0, not NaN, if there are no targets


TORCH_OPS = Ops(
    "torch",
    embed,
    rotation,
    rotate,
    add_norm,
    normalise,
    project_qkv,
    store_kv,
    attend,
    linear,
    head,
    loss,
)

# --------------------------------------------------------------------------------------------------
# The architecture

NO_ROPE = -1  # used instead of a window in GPTConfig.rope, for layers whose heads are not rotated


class Rope(NamedTuple):
    """
    Rotary positions. `theta` is the base for the frequencies. `factor` stretches positions so that
    longer texts fit. For `llama3` and `yarn`, see `frequencies`. yarn multiplies cosines and sines
    by `attention_factor`. Here, the attention scale is multiplied by its square instead, which is
    equivalent.
    """

    theta: float
    factor: float = 1.0
    # (low_freq_factor, high_freq_factor, original context length)
    llama3: tuple[float, float, float] | None = None
    # (beta_fast, beta_slow, original context length)
    yarn: tuple[float, float, float] | None = None
    attention_factor: float = 1.0

    def frequencies(self, D: int) -> Tensor:
        """
        Return the frequencies (D / 2,) in fp32: radians per position, for each pair of numbers in a
        head.

        Both scalings divide low frequencies by `factor`, keep high ones unchanged, and interpolate
        in between. What counts as low or high depends on how many turns a frequency makes within
        the original context length. For Llama 3.1, low means less than low_freq_factor turns, and
        high means more than high_freq_factor turns. The transition is linear in the number of
        turns. For yarn (Peng et al. 2023), the limits are beta_slow and beta_fast turns, and the
        transition is linear in the pair's index.
        """
        pairs = torch.arange(0, D, 2, device="cpu").float() / D
        # Compute theta^pairs as (e^x)^1024, because torch's powers may differ between CPUs in the
        # last bit.
        x = pairs.double() * (float(Decimal(self.theta).ln()) / 1024)
        power = torch.ones_like(x)
        for n in range(9, 0, -1):  # e^x as 1 + x/1 * (1 + x/2 * (1 + x/3 * ..))
            power = 1 + power * x / n
        for _ in range(10):
            power = power * power
        frequencies = 1.0 / power.float()
        if self.llama3:
            low, high, length = self.llama3
            # keep transformers' order of operations: the last bit matters after 2,000 positions
            turns = length / (2 * math.pi / frequencies)
            kept = ((turns - low) / (high - low)).clamp(0, 1)
        elif self.yarn:
            *turns, length = self.yarn
            first, last = (
                D * math.log(length / (2 * math.pi * n)) / (2 * math.log(self.theta)) for n in turns
            )
            first = max(math.floor(first), 0)
            last = max(min(math.ceil(last), D - 1), first + 0.001)
            kept = 1 - ((torch.arange(D // 2, device="cpu") - first) / (last - first)).clamp(0, 1)
        else:
            kept = 0.0
        return (1 - kept) * frequencies / self.factor + kept * frequencies


@dataclass
class GPTConfig:
    """
    The shape of the model. The defaults describe gpt2-124M. Raises ValueError if values are out of
    range or contradict each other.
    """

    vocab_size: int = 50257
    context_length: int = 1024  # number of positions: the maximum length of prompt plus answer
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    # grouped-query attention: number of K and V heads, a divisor of n_head; None: n_head
    n_kv_head: int | None = None
    head_size: int | None = None  # None: n_embd // n_head
    n_inner: int | None = None  # width inside the MLP; None: 4 * n_embd
    norm: str = "layer"  # or "rms"
    norm_epsilon: float = 1e-5
    norm_weights: bool = True  # False for nanochat
    pre_norm: bool = True  # normalise the inputs to attention and MLP; False for OLMo
    post_norm: bool = False  # Gemma, OLMo: normalise the outputs of attention and MLP
    embedding_norm: bool = False  # nanochat: normalise the embeddings
    qk_norm: bool = False  # Qwen 3, Gemma 3: normalise each head of q and k
    qk_norm_wide: bool = False  # OLMo: normalise all heads of q together, and likewise for k
    qk_norm_late: bool = False  # Hunyuan: normalise q and k after the rotation
    bias: bool = True  # linear layers and layer norms have biases
    # whether these linear layers have biases; None: same as `bias`
    qkv_bias: bool | None = None
    proj_bias: bool | None = None  # attention's output projection
    mlp_bias: bool | None = None
    activation: str = "gelu_new"
    gated: bool = False  # SwiGLU, GeGLU: activation(gate) * up
    # sliding-window attention: for each layer, how many of the last tokens a token sees, including
    # itself; 0: all of them
    windows: tuple[int, ...] = ()  # (): 0 for every layer
    # window -> rotary positions for the layers with that window; {}: learned positions
    rope: dict[int, Rope] = field(default_factory=dict)
    no_rope: tuple[int, ...] = ()  # SmolLM3: layers that use rope[NO_ROPE] instead
    rope_backwards: bool = False  # nanochat: rotate in the opposite direction
    attention_scale: float | None = None  # None: head_size ** -0.5
    attention_softcap: float = 0.0  # Gemma 2, see `attention`; 0: none
    logit_softcap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # Granite: multiplies the outputs of attention and MLP
    logit_scale: float = 1.0  # divides the logits; checkpoint.py applies it to the last norm
    tied: bool = True  # the head shares the embedding's weights
    dropout: float = 0.0
    eos_token_ids: tuple[int, ...] = ()  # end-of-text tokens

    @property
    def eos_token_id(self) -> int | None:
        """The first end-of-text token, or None."""
        return next(iter(self.eos_token_ids), None)

    def __post_init__(self):
        """Fill in the fields that are None, and check all of them."""
        for f in fields(self):
            value = getattr(self, f.name)
            for kind in RULES:
                if f.type == kind or (f.type == kind | None and value is not None):
                    check_value(kind, f.name, value)
        if self.n_kv_head is None:
            self.n_kv_head = self.n_head
        if self.head_size is None:
            self.head_size = self.n_embd // self.n_head
            check_multiple(self, "n_embd", "n_head")
        if self.n_inner is None:
            self.n_inner = 4 * self.n_embd
        self.windows = tuple(self.windows) or (0,) * self.n_layer
        if self.attention_scale is None:
            self.attention_scale = self.head_size**-0.5
        for name in ("qkv_bias", "proj_bias", "mlp_bias"):
            if getattr(self, name) is None:
                setattr(self, name, self.bias)
        self.check_together()

    def check_together(self):
        """Raise ValueError if fields contradict each other."""
        check_multiple(self, "n_head", "n_kv_head")
        for token in self.eos_token_ids:
            if type(token) is not int or not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"eos_token_id is {token!r}, wanted a token id, 0 to {self.vocab_size - 1}, "
                    "or none"
                )
        for window in self.windows:
            if window != 0:
                check_value(int, "sliding_window", window)
        if len(self.windows) != self.n_layer:
            raise ValueError(
                f"{len(self.windows)} windows for {self.n_layer} layers: give one for each layer"
            )
        if self.no_rope:
            self.rope = self.rope | {NO_ROPE: Rope(1.0, math.inf)}  # all angles are 0
        if self.rope and not self.rope.keys() >= set(self.windows):
            raise ValueError(
                f"rope has windows {list(self.rope)}, layers have {self.windows}: give rotary "
                "positions for each window"
            )
        if self.qk_norm and self.norm != "rms":
            raise ValueError("qk_norm needs norm 'rms': change one of them")
        if self.rope and self.head_size % 2:
            raise ValueError(f"head_size {self.head_size} is odd: rotary positions need pairs")
        for name, names in (("activation", ACTIVATIONS), ("norm", ("layer", "rms"))):
            value = getattr(self, name)
            if value not in names:
                raise ValueError(f"{name} {value!r} is unknown; choose one of {', '.join(names)}")


# field type -> (types its values may have, least value, exclusive end, description)
RULES = {
    int: ({int}, 1, 2**31, "a whole number of at least 1, and below {:,}"),
    float: ({int, float}, 0, 1e30, "a number from 0 to below {:g}"),
    bool: ({bool}, 0, 2, "true or false"),
}
# Lower ends for some fields. The number of layers is limited because layers are built before weight
# files are checked.
ENDS = {"n_layer": 2**10, "num_hidden_layers": 2**10, "dropout": 1, "norm_epsilon": 1}


def check_value(kind: type, name: str, value):
    """Raise ValueError unless the value is valid for a field with this name and type."""
    types, least, end, expected = RULES[kind]
    end = ENDS.get(name, end)
    # compare types because isinstance(True, int) is True
    if type(value) not in types or not least <= value < end:
        raise ValueError(f"{name} is {value!r:.40}, wanted {expected.format(end)}")


def check_multiple(config: GPTConfig, large: str, small: str):
    n, m = getattr(config, large), getattr(config, small)
    if n % m:
        raise ValueError(f"{large} {n} is not a multiple of {small} {m}: change one of them")


class RMSNorm(nn.Module):
    """
    Root mean square norm (Zhang and Sennrich 2019) of x (..., n), always computed in fp32. The
    weights are fp32 as well, because 16 bits would truncate Gemma's 1 + w.
    """

    bias = None

    def __init__(self, n: int, eps: float, has_weights: bool = True):
        super().__init__()
        if has_weights:
            self.weight = nn.Parameter(torch.ones(n))
        else:
            self.register_buffer("weight", torch.ones(n, device="cpu"), persistent=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        normed = F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)
        return normed.to(x.dtype)


def norm(config: GPTConfig, n: int | None = None) -> nn.Module:
    """Return a norm over n numbers, by default one for the residual stream (see `GPT.hidden`)."""
    epsilon = config.norm_epsilon
    if n is None:
        n = config.n_embd
        epsilon /= config.residual_scale**2
    if config.norm == "rms":
        return RMSNorm(n, epsilon, config.norm_weights)
    return nn.LayerNorm(n, eps=epsilon, bias=config.bias)


class Attention(nn.Module):
    """
    Attention, (..., T, C) -> (..., T, C): project to queries, keys and values, take weighted
    averages of the values, and project back.
    """

    def __init__(self, config: GPTConfig, window: int, rope: int):
        super().__init__()
        self.H = config.n_head
        self.Hk = config.n_kv_head
        self.D = config.head_size
        self.window = window
        self.rope = rope  # key of config.rope
        self.scale = config.attention_scale
        if config.rope and not config.qk_norm_late:
            self.scale *= config.rope[self.rope].attention_factor ** 2
        self.softcap = config.attention_softcap
        heads = self.H + 2 * self.Hk
        self.c_attn = nn.Linear(config.n_embd, heads * self.D, bias=config.qkv_bias)
        self.c_proj = nn.Linear(self.H * self.D, config.n_embd, bias=config.proj_bias)
        q, k = (self.H, self.Hk) if config.qk_norm_wide else (1, 1)  # heads per norm
        self.q_norm = norm(config, q * self.D) if config.qk_norm else None
        self.k_norm = norm(config, k * self.D) if config.qk_norm else None
        self.norms_late = config.qk_norm_late
        self.post_norm = norm(config) if config.post_norm else None

    def forward(self, y: Tensor, kv, batch) -> Tensor:
        # This is where K and V are written. When serving, kv is this layer's part of the pool.
        # project_qkv stores the new K and V there at batch.slot_mapping, and attend reads the pool.
        q, kv = batch.ops.project_qkv(y, self, kv, batch)
        mixed = batch.ops.attend(q, kv, self, batch)  # (..., T, H, D)
        mixed = mixed.flatten(-2)  # (..., T, H D)
        return project_back(mixed, self, batch.ops)


class MLP(nn.Module):
    """
    Feed-forward layer, (..., T, C) -> (..., T, C), applied to each token independently: widen,
    activate, project back.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        C = config.n_embd
        self.activation = config.activation
        self.gated = config.gated
        halves = 2 if config.gated else 1  # gate and up, in a single product
        self.c_fc = nn.Linear(C, halves * config.n_inner, bias=config.mlp_bias)
        self.c_proj = nn.Linear(config.n_inner, C, bias=config.mlp_bias)
        self.post_norm = norm(config) if config.post_norm else None

    def forward(self, y: Tensor, ops: Ops) -> Tensor:
        wide = ops.linear(y, self.c_fc, self.activation, self.gated)  # (..., T, n_inner)
        return project_back(wide, self, ops)


def project_back(x: Tensor, part: Attention | MLP, ops: Ops) -> Tensor:
    """Return what attention or MLP adds to the residual stream: x (..., T, in) -> (..., T, C)."""
    delta = ops.linear(x, part.c_proj, partial_sums=part.post_norm is None)
    return delta if part.post_norm is None else ops.norm(delta, part.post_norm)


class Block(nn.Module):
    """
    One layer. In plain torch, it would be:

        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))

    Here, each addition is left to the *next* norm, because one kernel can do both. So a block
    receives `delta`, which the previous block has computed but not yet added, and returns the delta
    from its own MLP.
    """

    def __init__(self, config: GPTConfig, window: int, rope: int):
        super().__init__()
        self.ln_1 = norm(config) if config.pre_norm else nn.Identity()
        self.attn = Attention(config, window, rope)
        self.ln_2 = norm(config) if config.pre_norm else nn.Identity()
        self.mlp = MLP(config)

    def forward(self, x: Tensor, delta: Tensor | None, kv, batch):
        x, y = batch.ops.add_norm(x, delta, self.ln_1)
        delta = drop(self.attn(y, kv, batch), batch.dropout)
        x, y = batch.ops.add_norm(x, delta, self.ln_2)
        delta = drop(self.mlp(y, batch.ops), batch.dropout)
        return x, delta


class GPT(nn.Module):
    """
    The decoder: embeddings, L blocks, a final norm, and the head, which may share the embedding's
    weights. `forward` takes whole texts. `hidden` computes everything except the head, and is also
    used for serving.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.config_json = None  # from the checkpoint, if loaded from one; written again on saving
        C = config.n_embd
        self.wte = nn.Embedding(config.vocab_size, C)
        self.wpe = None if config.rope else nn.Embedding(config.context_length, C)
        for window, rope in config.rope.items():
            frequencies = rope.frequencies(config.head_size)
            if config.rope_backwards:
                frequencies = -frequencies
            self.register_buffer(f"frequencies_{window}", frequencies, persistent=False)
        self.ln_0 = norm(config) if config.embedding_norm else None
        self.h = nn.ModuleList(
            Block(config, window, NO_ROPE if i in config.no_rope else window)
            for i, window in enumerate(config.windows)
        )
        self.ln_f = norm(config)
        # if tied, the head uses the embedding's weights and does not have its own
        device = "meta" if config.tied else None
        self.lm_head = nn.Linear(C, config.vocab_size, bias=False, device=device)
        self.apply(self._init_weights)
        if config.tied:
            self.lm_head.weight = self.wte.weight

    @property
    def num_weights(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def _init_weights(self, module: nn.Module):
        """
        Initialise weights as GPT-2 does, from N(0, 0.02), with projections into the residual stream
        scaled by 1 / sqrt(2 L).
        """
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, Attention | MLP):
            std = 0.02 / math.sqrt(2 * self.config.n_layer)
            nn.init.normal_(module.c_proj.weight, std=std)

    def hidden(self, batch, kv) -> Tensor:
        """
        Compute everything up to the head. Return the normalised hidden states (..., T, C). `batch`
        is a `WholeTexts` or, when serving, a `kernels.Batch`. `kv` has one entry per layer: either
        None or, when serving, the layer's part of the pool, in which new K and V are stored.
        """
        batch.rotations = {
            window: batch.ops.rotation(batch.positions, getattr(self, f"frequencies_{window}"))
            for window in self.config.rope
        }
        scale = self.config.embedding_scale
        if self.wte.weight.element_size() == 2:  # round as Gemma's reference does
            scale = torch.tensor(scale, dtype=self.wte.weight.dtype).item()
        # Granite multiplies each delta by residual_scale. Instead, divide x by it once. Then deltas
        # can be added unchanged, and a norm of x (with a scaled epsilon) gives the same result.
        scale /= self.config.residual_scale
        x = batch.ops.embed(batch.tokens, batch.positions, self.wte, self.wpe, scale)
        if self.ln_0 is not None:
            x = batch.ops.norm(x, self.ln_0)
        x = drop(x, batch.dropout)  # (..., T, C)
        delta = None
        for block, kv_of_layer in zip(self.h, kv, strict=True):
            x, delta = block(x, delta, kv_of_layer, batch)
        _, y = batch.ops.add_norm(x, delta, self.ln_f)
        return y

    def logits(self, x: Tensor, ops: Ops) -> Tensor:
        """Return the logits (..., V) for hidden states x (..., C)."""
        return ops.head(x, self.lm_head, softcap=self.config.logit_softcap)

    def forward(self, tokens: Tensor, targets: Tensor | None = None, ops: Ops = TORCH_OPS):
        """
        Run the model on whole texts without a cache: tokens (B, T) int64, T <= context_length.
        Return (logits (B, T, V), None). If targets (B, T) int64 are given (-100 for no target),
        return (None, mean cross-entropy in nats) instead, because training never needs all logits
        at once, and a CPU is much faster if it does not store them. Raises ValueError if the texts
        are too long.
        """
        T = tokens.shape[1]
        limit = self.config.context_length
        if limit < T:
            raise ValueError(f"{T} tokens do not fit the model's context_length of {limit}")
        positions = torch.arange(T, device=tokens.device)
        dropout = self.config.dropout if self.training else 0.0
        batch = WholeTexts(tokens, positions, ops, dropout)
        x = self.hidden(batch, [None] * self.config.n_layer)
        if targets is None:
            return self.logits(x, ops), None
        return None, ops.loss(x, self.lm_head, targets, self.config.logit_softcap)

    @torch.no_grad()
    def generate(
        self, tokens: Tensor, max_new_tokens: int, choose: Callable | None = None
    ) -> Tensor:
        """
        Continue texts (B, T) -> (B, T + new) without a cache, recomputing the whole text for each
        new token, and stop at context_length at the latest. Tests compare the engine with this
        method. `choose(logits (B, V), position)` picks the next tokens (B,), by default the most
        likely ones.
        """
        most = self.config.context_length - tokens.shape[1]
        for _ in range(min(max_new_tokens, most)):
            logits, _ = self(tokens)
            last = logits[:, -1]  # (B, V)
            new = last.argmax(-1)  # (B,)
            if choose:
                new = choose(last, tokens.shape[1])
            tokens = torch.cat([tokens, new[:, None]], dim=1)
        return tokens
