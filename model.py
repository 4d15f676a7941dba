"""
The decoder: GPT-2's architecture, written once. Training, the uncached reference and serving run
the same forward.

    logits, loss = model(tokens, targets)     # whole texts (B, T): training, evaluation, generate
    x = model.hidden(batch, pool.kv)          # a serving step (T, C): K and V in the paged pool
    logits = batch.ops.head(x[batch.logits_index], model.lm_head)

What differs between machines is the table of operators, `Ops`, that each batch carries. `TORCH`, in
this file, is the reference: plain, differentiable, attention spelled out. The other tables
(serving/ops.py, training/fast.py) compute the same, faster. Read from the bottom, `GPT`, or from
`attention`.

Letters: B requests, T tokens, L layers, H query heads, Hk KV heads, D head size, V vocabulary, and
only here C = n_embd, the width. A shape "(..., T, C)" is (B, T, C) for whole texts, and (T, C) on
the flat token axis of a serving step.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

# --------------------------------------------------------------------------------------------------
# Operators

ACTIVATIONS = {
    "gelu_new": partial(F.gelu, approximate="tanh"),  # GPT-2's own, by transformers' name
    "gelu": F.gelu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


class Ops(NamedTuple):
    """
    What the decoder is computed with: a table for each kind of machine. A `layer` has a weight
    and a bias; `kv` is one layer's part of the paged pool when serving, else None.
    """

    name: str
    # (tokens, positions, wte, wpe) -> x (..., T, C)
    embed: Callable
    # (x, delta or None, norm) -> x + delta, which may be x itself, changed in place (use only what
    # is returned); and norm(x + delta)
    add_norm: Callable
    # (y, an `Attention`, kv, batch) -> q (..., T, H, D), and what `store_kv` returns
    project_qkv: Callable
    # (k (..., T, Hk, D), v, kv, batch) -> what `attend` reads them from: the pair of them, or the
    # pool, where they are now at batch.slot_mapping
    store_kv: Callable
    # (q, what store_kv returned, batch) -> (..., T, H, D), each token's mixture of what it sees
    attend: Callable
    # (x, layer, activation=None, partial_sums=False) -> activation(layer(x)); with partial_sums it
    # may be (P, T, out), the parts of a sum (split-K) for add_norm, whose delta it is, to add up
    linear: Callable
    # (x, layer) -> logits (..., T, V)
    head: Callable
    # (x, layer, targets) -> mean cross-entropy in nats
    loss: Callable

    # To serve:
    # (batch, H, kv of any layer, window=0) -> batch.prepared, once for all layers
    prepare: Callable | None = None
    # see `inputs.decode_inputs`, `sampling.sample_torch`, `cpu.packed_for_cpu`
    decode_inputs: Callable | None = None
    sample: Callable | None = None
    pack_weights: Callable | None = None
    # whether the host never waits for the device and launches what the step's padded shape alone
    # decides, so that a CUDA graph can hold it
    fixed_shapes: bool = False


class WholeTexts(NamedTuple):
    """A batch for training and for the reference: whole texts side by side, without a KV cache."""

    tokens: Tensor  # (B, T) int64
    positions: Tensor  # (T,) int64
    ops: Ops
    dropout: float = 0.0  # the share that `drop` leaves out: in training alone


def drop(x: Tensor, share: float) -> Tensor:
    """Dropout. F.dropout itself, with nothing to drop, would take 2% of a CPU's decode step."""
    return F.dropout(x, share) if share else x


def embed(tokens: Tensor, positions: Tensor, wte: nn.Embedding, wpe: nn.Embedding) -> Tensor:
    return wte(tokens) + wpe(positions)


def add_norm(x: Tensor, delta: Tensor | None, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """
    Residual connection and pre-norm: what a layer adds to x is added where the next norm reads x.
    """
    if delta is not None:
        x = x + delta
    return x, norm(x)


def project_qkv(y: Tensor, attention: "Attention", kv: Tensor | None, batch):
    """
    Queries (..., T, H, D) of y (..., T, C), and what `store_kv` makes of keys and values: all three
    are one product.
    """
    sizes = (attention.H, attention.Hk, attention.Hk)
    qkv = batch.ops.linear(y, attention.c_attn)  # (..., T, (H + 2 Hk) D)
    heads = qkv.view(*qkv.shape[:-1], sum(sizes), attention.D)  # (..., T, H + 2 Hk, D)
    q, k, v = heads.split_with_sizes(sizes, -2)
    return q, batch.ops.store_kv(k, v, kv, batch)


def store_kv(k: Tensor, v: Tensor, kv: None, batch: WholeTexts) -> tuple[Tensor, Tensor]:
    """Whole texts need no pool: their keys and values are all here."""
    return k, v


def attend(q: Tensor, kv: tuple[Tensor, Tensor], batch: WholeTexts) -> Tensor:
    """Causal attention of each token to itself and what came before it in its text."""
    _, T, H, _ = q.shape
    k, v = kv  # (B, T, Hk, D)
    G = H // k.shape[2]  # grouped-query attention: so many query heads share a KV head
    q = q.transpose(1, 2)  # (B, H, T, D)
    k = k.transpose(1, 2).repeat_interleave(G, dim=1)  # (B, H, T, D)
    v = v.transpose(1, 2).repeat_interleave(G, dim=1)  # (B, H, T, D)
    # causal mask: -inf where the key is later than the query
    future = torch.full((T, T), -torch.inf, device=q.device).triu(1)
    mixed = attention(q, k, v, future, batch.dropout)  # (B, H, T, D)
    return mixed.transpose(1, 2)


def attention(q, k, v, attn_mask: Tensor | None = None, dropout_p: float = 0.0):
    """
    Scaled dot-product attention (Vaswani et al. 2017) spelled out: q (.., n, D), k and v (.., m,
    D), attn_mask broadcasting to (.., n, m): 0 where a query may see a key, else -inf; None: it
    sees all. Returns (.., n, D), computed in fp32 at least. The arguments are those of torch's
    F.scaled_dot_product_attention.
    """
    dtype = q.dtype
    wide = torch.promote_types(dtype, torch.float32)
    q, k, v = q.to(wide), k.to(wide), v.to(wide)
    scale = q.shape[-1] ** -0.5
    scores = q @ k.mT * scale  # (.., n, m)
    if attn_mask is not None:
        scores = scores + attn_mask
    weights = scores.softmax(-1)
    weights = drop(weights, dropout_p)
    return (weights @ v).to(dtype)


def linear(x: Tensor, layer: nn.Module, activation: str | None = None, partial_sums=False):
    y = layer(x)
    return ACTIVATIONS[activation](y) if activation else y


def loss(x: Tensor, layer: nn.Module, targets: Tensor) -> Tensor:
    """
    Mean cross-entropy in nats of the logits layer(x): x (B, T, C), targets (B, T) int64, -100 where
    there is none.
    """
    # Flat before the head, so that torch.compile sees no views between head and loss: with them a
    # training step took a GPU 3% longer.
    logits = layer(x.flatten(0, 1)).float()  # (B T, V)
    return F.cross_entropy(logits, targets.flatten())


TORCH = Ops("torch", embed, add_norm, project_qkv, store_kv, attend, linear, head=linear, loss=loss)

# --------------------------------------------------------------------------------------------------
# The architecture


@dataclass
class GPTConfig:
    """The shape of the model; the defaults are gpt2-124M. Raises ValueError for what cannot be."""

    vocab_size: int = 50257
    context_length: int = 1024  # positions the model has; the longest prompt plus answer
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    # grouped-query attention: fewer heads of K and V; None: as many as n_head
    n_kv_head: int | None = None
    activation: str = "gelu_new"
    bias: bool = True  # in linear layers and layer norms
    dropout: float = 0.0
    layer_norm_epsilon: float = 1e-5
    eos_token_id: int | None = None  # the token that ends a text; None where the tokenizer has none
    more_eos_token_ids: tuple[int, ...] = ()  # others that end one, too

    def __post_init__(self):
        if self.n_kv_head is None:
            self.n_kv_head = self.n_head
        for name in ("vocab_size", "context_length", "n_layer", "n_head", "n_embd", "n_kv_head"):
            size = getattr(self, name)
            # not isinstance, to which True is an int
            if type(size) is not int or not 0 < size < 2**31:
                wanted = "a whole number of at least 1, and below 2**31,"
                raise ValueError(f"{name} is {size!r}: {wanted} is wanted")
        for name in ("dropout", "layer_norm_epsilon"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 <= value < 1:
                raise ValueError(f"{name} is {value!r}: a number from 0 to below 1 is wanted")
        if type(self.bias) is not bool:
            raise ValueError(f"bias is {self.bias!r}: true or false is wanted")
        for token in self.eos_token_ids:
            if type(token) is not int or not 0 <= token < self.vocab_size:
                wanted = f"a token id, 0 to {self.vocab_size - 1}, or none"
                raise ValueError(f"eos_token_id is {token!r}: {wanted} is wanted")
        change = "change one of them"
        if self.n_embd % self.n_head:
            raise ValueError(
                f"n_embd {self.n_embd} is not a multiple of n_head {self.n_head}: {change}"
            )
        if self.n_head % self.n_kv_head:
            raise ValueError(
                f"n_head {self.n_head} is not a multiple of n_kv_head {self.n_kv_head}: {change}"
            )
        if self.activation not in ACTIVATIONS:
            there = ", ".join(ACTIVATIONS)
            raise ValueError(f"activation {self.activation!r} is unknown; there is {there}")

    @property
    def head_size(self) -> int:
        return self.n_embd // self.n_head

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All tokens that end a text."""
        return () if self.eos_token_id is None else (self.eos_token_id, *self.more_eos_token_ids)


class Attention(nn.Module):
    """
    Project to queries, keys and values; mix the values over time; project back: (..., T, C) ->
    (..., T, C).
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        C = config.n_embd
        self.H = config.n_head
        self.Hk = config.n_kv_head
        self.D = config.head_size
        heads = self.H + 2 * self.Hk
        self.c_attn = nn.Linear(C, heads * self.D, bias=config.bias)
        self.c_proj = nn.Linear(self.H * self.D, C, bias=config.bias)

    def forward(self, y: Tensor, kv, batch) -> Tensor:
        q, kv = batch.ops.project_qkv(y, self, kv, batch)
        mixed = batch.ops.attend(q, kv, batch)  # (..., T, H, D)
        mixed = mixed.flatten(-2)  # (..., T, H D)
        return batch.ops.linear(mixed, self.c_proj, partial_sums=True)


class MLP(nn.Module):
    """
    Each token by itself: four times as wide, the activation, and back: (..., T, C) -> (..., T, C).
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        C = config.n_embd
        self.activation = config.activation
        self.c_fc = nn.Linear(C, 4 * C, bias=config.bias)
        self.c_proj = nn.Linear(4 * C, C, bias=config.bias)

    def forward(self, y: Tensor, ops: Ops) -> Tensor:
        wide = ops.linear(y, self.c_fc, activation=self.activation)  # (..., T, 4 C)
        return ops.linear(wide, self.c_proj, partial_sums=True)


def layer_norm(config: GPTConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon, bias=config.bias)


class Block(nn.Module):
    """
    Attention and MLP, each normalised before and added to x after. The addition is part of the norm
    that follows, so a block is given what the block before adds, `delta`, and returns what its own
    MLP adds.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.ln_1 = layer_norm(config)
        self.attn = Attention(config)
        self.ln_2 = layer_norm(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, delta: Tensor | None, kv, batch):
        x, y = batch.ops.add_norm(x, delta, self.ln_1)
        delta = drop(self.attn(y, kv, batch), batch.dropout)
        x, y = batch.ops.add_norm(x, delta, self.ln_2)
        delta = drop(self.mlp(y, batch.ops), batch.dropout)
        return x, delta


class GPT(nn.Module):
    """
    The decoder: embeddings, L blocks, a last norm, and the head, which shares the embeddings'
    weights. `forward` takes whole texts; `hidden`, all but the head, serves too.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.context_length, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = layer_norm(config)
        self.apply(self._init_weights)
        # tied weights: the head compares with the embeddings, and has no weights of its own
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False, device="meta")
        self.lm_head.weight = self.wte.weight

    def _init_weights(self, module: nn.Module):
        """
        GPT-2's initialisation: N(0, 0.02), the projections into the residual stream scaled by 1 /
        sqrt(2 L).
        """
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, Attention | MLP):
            shrunk = 0.02 / math.sqrt(2 * self.config.n_layer)
            nn.init.normal_(module.c_proj.weight, std=shrunk)

    def hidden(self, batch, kv) -> Tensor:
        """
        The decoder up to the head: normalised (..., T, C). `batch` is a `WholeTexts` or, to serve,
        a `kernels.Batch`; `kv` has something for each layer: None, or its part of the pool, in
        which the new K and V are stored.
        """
        x = batch.ops.embed(batch.tokens, batch.positions, self.wte, self.wpe)
        x = drop(x, batch.dropout)  # (..., T, C)
        delta = None
        for block, kv_of_layer in zip(self.h, kv, strict=True):
            x, delta = block(x, delta, kv_of_layer, batch)
        _, y = batch.ops.add_norm(x, delta, self.ln_f)
        return y

    def forward(self, tokens: Tensor, targets: Tensor | None = None, ops: Ops = TORCH):
        """
        Dense causal pass. tokens (B, T) int64, T <= context_length; targets (B, T) int64, -100
        where there is none. Returns (logits (B, T, V), None); with targets (None, the mean
        cross-entropy in nats), because training never looks at the logits and a CPU is much faster
        when they need not exist all at once. Raises ValueError for texts that are too long.
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
            return ops.head(x, self.lm_head), None
        return None, ops.loss(x, self.lm_head, targets)

    @torch.no_grad()
    def generate(
        self, tokens: Tensor, max_new_tokens: int, choose: Callable | None = None
    ) -> Tensor:
        """
        The reference that tests compare the engine with: no cache, the whole text again for each
        token. Stops at context_length. tokens (B, T) -> (B, T + new). `choose(logits (B, V),
        position)` picks the next tokens (B,), the most likely one by default.
        """
        room = self.config.context_length - tokens.shape[1]
        for _ in range(min(max_new_tokens, room)):
            logits, _ = self(tokens)
            last = logits[:, -1]  # (B, V)
            new = last.argmax(-1)  # (B,)
            if choose:
                new = choose(last, tokens.shape[1])
            tokens = torch.cat([tokens, new[:, None]], dim=1)
        return tokens
