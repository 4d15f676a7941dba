"""
The GPT: GPT-2's architecture, one set of weights, two ways through it.

    logits, loss = model(tokens, targets)              # dense and causal, tokens (B, T): training, evaluation
    logits = model.logits(model.forward_paged(batch, pool.kv)[batch.logits_index])   # flat and paged: serving

Both use the same layers and differ in attention: to what came before in the text, or in the KV
pool. A checkpoint is a directory in the Hugging Face layout; `GPT2LMHeadModel.from_pretrained`
opens it, and what it saves opens here. Letters: B requests, T tokens, L layers, H query heads, Hk
KV heads, D head size, V vocabulary, R rows of logits, S block size, and only here C = n_embd, the
width.
"""

import json
import math
import timeit
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import kernels
from serving.fused import ACTIVATIONS, add_norm, embed, linear, project_qkv
from tokenizer import write_atomically, write_json


@dataclass
class GPTConfig:
    """The shape of the model; the defaults are gpt2-124M."""

    vocab_size: int = 50257
    context_length: int = 1024  # positions the model has; the longest prompt plus answer
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    n_kv_head: int | None = (
        None  # grouped query attention: fewer heads of K and V; None: as many as n_head
    )
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
            self._require(
                name,
                (int,),
                lambda x: 0 < x < 2**31,
                "a whole number of at least 1, and below 2**31,",
            )
        self._require("dropout", (int, float), lambda x: 0 <= x < 1, "a number from 0 to below 1")
        self._require(
            "layer_norm_epsilon", (int, float), lambda x: 0 <= x < 1, "a number from 0 to below 1"
        )
        self._require("bias", (bool,), lambda x: True, "true or false")
        for token in self.eos_token_ids:
            if type(token) is not int or not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"eos_token_id is {token!r}: a token id, 0 to {self.vocab_size - 1}, or none is wanted"
                )
        if self.n_embd % self.n_head:
            raise ValueError(
                f"n_embd {self.n_embd} is not a multiple of n_head {self.n_head}: change one of them"
            )
        if self.n_head % self.n_kv_head:
            raise ValueError(
                f"n_head {self.n_head} is not a multiple of n_kv_head {self.n_kv_head}: change one of them"
            )
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"activation {self.activation!r} is unknown; there is {', '.join(ACTIVATIONS)}"
            )

    def _require(self, name: str, types: tuple, in_range: Callable, wanted: str):
        value = getattr(self, name)
        if type(value) not in types or not in_range(
            value
        ):  # not isinstance, to which True is an int
            raise ValueError(f"{name} is {value!r}: {wanted} is wanted")

    @property
    def head_size(self) -> int:
        return self.n_embd // self.n_head

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All tokens that end a text."""
        return () if self.eos_token_id is None else (self.eos_token_id, *self.more_eos_token_ids)


class Attention(nn.Module):
    """Project to q, k, v; let `attend` mix them over time; project back."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.H, self.Hk, self.D = config.n_head, config.n_kv_head, config.head_size
        self.c_attn = nn.Linear(config.n_embd, (self.H + 2 * self.Hk) * self.D, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: torch.Tensor, attend: Callable) -> torch.Tensor:
        return self.c_proj(
            attend(*self.heads(self.c_attn(x))).flatten(-2)
        )  # (..., T, H, D) -> (..., T, C)

    def heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(..., T, (H + 2 Hk) D) -> q (..., T, H, D), k and v (..., T, Hk, D), views"""
        heads = qkv.view(*qkv.shape[:-1], self.H + 2 * self.Hk, self.D)
        return heads.split_with_sizes((self.H, self.Hk, self.Hk), -2)


class MLP(nn.Module):
    """Each token by itself: four times as wide, the activation, and back."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.activation = config.activation
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(ACTIVATIONS[self.activation](self.c_fc(x)))


class Block(nn.Module):
    """Attention and MLP, each normalised before and added after: (..., T, C) -> (..., T, C)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        norm = partial(nn.LayerNorm, config.n_embd, eps=config.layer_norm_epsilon, bias=config.bias)
        self.ln_1, self.attn = norm(), Attention(config)
        self.ln_2, self.mlp = norm(), MLP(config)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor, attend: Callable) -> torch.Tensor:
        x = x + self.drop(self.attn(self.ln_1(x), attend))
        x = x + self.drop(self.mlp(self.ln_2(x)))
        return x

    def serve(
        self, x: torch.Tensor, delta: torch.Tensor | None, kv: torch.Tensor, batch: kernels.Batch
    ):
        """
        The same of (T, C), without dropout, in few launches, with keys and values in this layer's
        pool kv. What a layer adds to x is added, in place, where the next norm reads x: `delta` is
        of the block before, and what this one's MLP adds is returned.
        """
        q = project_qkv(
            add_norm(x, delta, self.ln_1), self.attn, kv, batch
        )  # K and V go to the pool
        mixed = batch.backend.paged_attention(q, kv, batch)
        delta = linear(mixed.flatten(-2), self.attn.c_proj, parts=True)
        wide = linear(add_norm(x, delta, self.ln_2), self.mlp.c_fc, activation=self.mlp.activation)
        return linear(wide, self.mlp.c_proj, parts=True)


def causal_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float = 0.0
) -> torch.Tensor:
    """
    Dense attention of each token to itself and what came before: q (B, T, H, D), k and v (B, T, Hk,
    D) -> as q.
    """
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, T, D)
    grouped = q.shape[1] != k.shape[1]
    if q.dtype == torch.bfloat16 and q.device.type == "cpu" and q.shape[2] <= 512 and not grouped:
        return plain_attention(q, k, v, dropout).transpose(1, 2)
    y = F.scaled_dot_product_attention(
        q, k, v, is_causal=True, dropout_p=dropout, enable_gqa=grouped
    )
    return y.transpose(1, 2)


def plain_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float
) -> torch.Tensor:
    """
    Causal attention (B, H, T, D) spelt out with its T x T scores, for training on CPUs: there,
    forward and backward in bfloat16 take half the time of torch's fused one (26 against 59 ms at
    B=32, H=4, T=256, D=64; 14 against 66 at H=2).
    """
    (B, H, T, D), (q, k, v) = q.shape, (x.flatten(0, 1) for x in (q, k, v))  # (B H, T, D)
    future = torch.full((T, T), -torch.inf, dtype=q.dtype).triu(1)
    scores = torch.baddbmm(future.expand(B * H, T, T), q, k.mT, alpha=D**-0.5)
    return (F.dropout(scores.softmax(-1), dropout) @ v).view(B, H, T, D)


class ChunkedHeadLoss(torch.autograd.Function):
    """
    Mean cross-entropy of the logits x @ head.T, a few rows at a time. Logits of 4,096 tokens by
    4,096 words are 64 MB, and passing them through memory for softmax, loss and gradients took half
    of a training step on a CPU. Here the gradient of a chunk, softmax - one hot, is made while its
    logits are in the cache; backward only scales it.
    """

    ROWS = 256

    @staticmethod
    def forward(
        ctx, x: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """
        x (N, C), head (V, C), targets (N,) with -100 where there is none; matrix products in
        `dtype`.
        """
        rows = ChunkedHeadLoss.ROWS
        w = head.to(dtype)
        count = (targets >= 0).sum()
        total = x.new_zeros(())
        dx = torch.empty_like(x)
        dw = torch.zeros_like(head)
        for x_rows, dx_rows, t in zip(
            x.split(rows), dx.split(rows), targets.split(rows), strict=True
        ):
            x_rows = x_rows.to(dtype)
            there = (t >= 0)[:, None]
            t = t.clamp(min=0)[:, None]
            # one buffer (rows, V) is in turn logits, exponentials and gradient: each pass finds it
            # in the cache
            scores = (x_rows @ w.T).float()
            scores -= scores.amax(-1, keepdim=True)
            target_scores = scores.gather(1, t)
            scores.exp_()
            norm = scores.sum(-1, keepdim=True)
            total += ((norm.log() - target_scores) * there).sum()
            if any(ctx.needs_input_grad):
                scores.mul_(there / norm).scatter_add_(1, t, -there.float())
                grad = scores.to(dtype)
                dx_rows.copy_(grad @ w)
                dw += grad.T @ x_rows
        ctx.save_for_backward(dx, dw, count)
        return total / count

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        dx, dw, count = ctx.saved_tensors
        return dx * (grad / count), dw * (grad / count), None, None


def head_loss(x: torch.Tensor, head: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """
    Mean cross-entropy in nats of the head's logits: x (B, T, C), head (V, C), targets (B, T), -100
    where none.
    """
    x, targets = x.flatten(0, 1), targets.flatten()
    if x.device.type == "cpu":
        autocast = torch.is_autocast_enabled("cpu")
        return ChunkedHeadLoss.apply(
            x, head, targets, torch.get_autocast_dtype("cpu") if autocast else x.dtype
        )
    return F.cross_entropy(F.linear(x, head).float(), targets)  # on a GPU the compiler fuses these


class GPT(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(
            config.vocab_size, config.n_embd
        )  # also the head: logits = x @ wte.T
        self.wpe = nn.Embedding(config.context_length, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon, bias=config.bias)
        self.head: nn.Module | None = None  # only in `packed_for_cpu`'s copy, in the place of wte
        self.apply(self._init_weights)

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
            nn.init.normal_(module.c_proj.weight, std=0.02 / math.sqrt(2 * self.config.n_layer))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Compare what `forward_paged` returns with every word: (R, C) -> (R, V)"""
        return linear(x, self.head or SimpleNamespace(weight=self.wte.weight, bias=None))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None):
        """
        Dense causal pass. tokens (B, T) int64, T <= context_length; targets (B, T) int64, -100
        where there is none. Returns (logits (B, T, V), None); with targets (None, the mean
        cross-entropy in nats), because training never looks at the logits and a CPU is much faster
        when they need not exist all at once.
        """
        T = tokens.shape[1]
        if self.config.context_length < T:
            raise ValueError(
                f"{T} tokens do not fit the model's context_length of {self.config.context_length}"
            )
        attend = partial(causal_attention, dropout=self.config.dropout if self.training else 0.0)
        x = self.drop(
            self.wte(tokens) + self.wpe(torch.arange(T, device=tokens.device))
        )  # (B, T, C)
        for block in self.h:
            x = block(x, attend)
        x = self.ln_f(x)
        if targets is None:
            return self.head(x) if self.head else F.linear(x, self.wte.weight), None
        if self.head:
            return None, F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())
        return None, head_loss(x, self.wte.weight, targets)

    def forward_paged(self, batch: kernels.Batch, kv: torch.Tensor) -> torch.Tensor:
        """
        One serving step over the flat token axis: each layer writes its K, V into the pool `kv` [L,
        2, num_blocks + 1, Hk, S, D] at `batch.slot_mapping` (in place), then attends through the
        block tables. Returns (T, C), normalised, which `logits` turns into logits where they are
        wanted.
        """
        x, delta = embed(batch.tokens, batch.positions, self.wte, self.wpe), None  # (T, C)
        for block, kv_of_layer in zip(self.h, kv, strict=True):
            delta = block.serve(x, delta, kv_of_layer, batch)
        return add_norm(x, delta, self.ln_f)

    @torch.no_grad()
    def generate(
        self, tokens: torch.Tensor, max_new_tokens: int, choose: Callable | None = None
    ) -> torch.Tensor:
        """
        The reference that tests compare the engine with: no cache, the whole text again for each
        token. Stops at context_length. tokens (B, T) -> (B, T + new). `choose(logits (B, V),
        position)` picks the next tokens (B,), the most likely one by default.
        """
        choose = choose or (lambda logits, position: logits.argmax(-1))
        for _ in range(min(max_new_tokens, self.config.context_length - tokens.shape[1])):
            logits, _ = self(tokens)
            tokens = torch.cat([tokens, choose(logits[:, -1], tokens.shape[1])[:, None]], dim=1)
        return tokens


# --------------------------------------------------------------------------------------------------
# Serving on a CPU


class PackedLinear(nn.Module):
    """
    A linear layer whose weights [out, in] are kept in the layout that oneDNN multiplies fastest, in
    fp32 or bf16; x and the result are fp32. No compiler needed, and no gradients. On an AMD EPYC
    with AVX-512, from 1 to 256 rows, fp32 is 2 to 3 times as fast as `F.linear` at width 768 (as
    fast at one row of 384), bf16 1.1 to 1.9 times as fast as that. Up to `plain_rows` rows are
    multiplied with `plain`, the same weights [in, out], by `F.linear`: see `rows_of_plain`.
    """

    ROWS = (
        64  # oneDNN chooses the layout for so many rows of x; measured, other numbers differ little
    )

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        plain: torch.Tensor | None = None,
        plain_rows=0,
    ):
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), self.ROWS)
        self.bias = (
            None if bias is None else bias.detach()
        )  # no parameter: it has the dtype of the weights
        self.plain, self.plain_rows = plain, plain_rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.plain_rows and x.shape[:-1].numel() <= self.plain_rows:
            return F.linear(x, self.plain.t(), self.bias)
        x = x.to(self.weight.dtype)
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "").float()


def rows_of_plain(weight: torch.Tensor) -> int:
    """
    Up to how many rows (0, 1 or 16) torch's own product with plain fp32 weights is so much faster
    than the packed one that it is worth to keep them, too. It depends on the CPU and the width, so
    both are timed, for some milliseconds: on an Intel Xeon one row takes 0.5 (width 384) to 0.7
    (width 768) of the packed time and 16 rows 0.7 (width 384), on an AMD EPYC plain weights are no
    faster.
    """
    packed, plain = PackedLinear(weight, None), weight.t().contiguous()

    def seconds(product: Callable, x: torch.Tensor) -> float:
        return min(timeit.repeat(lambda: product(x), number=1, repeat=20))

    for rows in 16, 1:
        x = torch.ones(rows, weight.shape[1])
        if seconds(lambda x: x @ plain, x) < 0.85 * seconds(packed, x):
            return rows
    return 0


def int8_weights(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [out, in] as integers from -127 to 127, and the fp32 scale of each output, [out]."""
    weight = weight.detach().float()
    scale = weight.abs().amax(1).clamp(min=1e-12) / 127
    return (weight / scale[:, None]).round().to(torch.int8), scale


class Int8Linear(nn.Module):
    """
    A linear layer of 8-bit integers, for oneDNN too: x and the result are fp32, a quarter of the
    bytes of fp32. Weights [out, in] have one scale for each output. Rows of x are rounded as well,
    each with a scale of its own: whatever else is in the batch, a row gets the same result, to the
    last bit. At width 768 it takes 0.3 to 0.7 of fp32's time; the rounding costs 15 us, too much
    for one row of 384. (torch's own product of int8 weights and bf16 rows takes a third of that
    there, and from 64 rows on more than fp32.)
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        super().__init__()
        self.bias = bias
        weights, scale = int8_weights(weight)
        self.weight = torch.ops.onednn.qlinear_prepack(weights, None)
        self.scale, self.zero = (
            scale / 127,
            torch.zeros_like(scale, dtype=torch.int64),
        )  # 127, too, is that of x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        largest = x.abs().amax(
            -1, keepdim=True
        )  # (..., 1); of 0, the row's integers are anything, and their weight 0
        steps = (
            (x * (127 / largest)).add_(128.5).to(torch.uint8)
        )  # rounded to 1 .. 255, where 128 stands for 0
        options = (
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )  # no bias, as y is not scaled yet; fp32 out
        y = torch.ops.onednn.qlinear_pointwise(
            steps, 1.0, 128, self.weight, self.scale, self.zero, *options
        )
        y *= largest
        return y if self.bias is None else y.add_(self.bias)


class OneRowLinear(nn.Module):
    """
    What PackedLinear or Int8Linear compute, of one row of x, for the compiler: it makes of the sum
    of products a loop that reads the weights as fast as memory can, where libraries reach a half.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, quantize: str):
        super().__init__()
        self.weight, self.bias, self.scale = (
            weight.detach(),
            None if bias is None else bias.detach().float(),
            None,
        )
        if quantize == "int8":
            weights, scale = int8_weights(self.weight)
            self.weight, self.scale = weights, scale / 127

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale is None:
            y = (self.weight * x.to(self.weight.dtype).float()).sum(-1)
        else:
            largest = x.abs().amax().clamp(min=1e-30)
            steps = (x * (127 / largest) + 128.5).floor() - 128
            y = (self.weight * steps).sum(-1) * self.scale * largest
        return (y if self.bias is None else y + self.bias)[None]


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def serving_dtype(name: str, device: str | torch.device) -> torch.dtype:
    """
    The dtype of that name, for `load_checkpoint`; "auto" is bf16 on a GPU, fp32 on a CPU. Raises
    ValueError.
    """
    cpu = torch.device(device).type == "cpu"
    if cpu and name == "fp16":
        raise ValueError("--dtype fp16 is for GPUs: on a CPU choose fp32 or bf16")
    return DTYPES[("fp32" if cpu else "bf16") if name == "auto" else name]


def packed_for_cpu(model: GPT, quantize: str = "none") -> GPT:
    """
    A copy of the model for serving on a CPU, its matrices packed in the dtype that they have or,
    with `quantize` "int8", as integers; all else is fp32. On a GPU, or without oneDNN, the model
    itself. Raises ValueError where there are no integers to be had.
    """
    weight = model.wte.weight
    onednn = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
    if quantize not in ("none", "int8"):
        raise ValueError(f"quantize is {quantize!r}: there is none and int8")
    if quantize == "int8" and not (
        onednn and torch.cpu._is_vnni_supported()
    ):  # older instructions overflow
        raise ValueError(
            f"--quantize int8 needs a CPU with VNNI instructions, and oneDNN, not {weight.device}"
        )
    packs = (
        {torch.float32: lambda: True, torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported}
        if onednn
        else {}
    )
    if quantize == "none" and not packs.get(weight.dtype, bool)():
        return model
    if quantize == "int8":
        return with_layers(model, Int8Linear)
    rows = (
        rows_of_plain(model.h[0].mlp.c_fc.weight.detach()) if weight.dtype == torch.float32 else 0
    )

    def pack(weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        return PackedLinear(weight, bias, weight.detach().t().contiguous() if rows else None, rows)

    def pack_head(weight: torch.Tensor) -> PackedLinear:
        return PackedLinear(
            weight, None, weight.detach().t(), min(rows, 1)
        )  # the embedding itself: no copy

    return with_layers(model, pack, pack_head)


def with_layers(model: GPT, layer: Callable, head: Callable | None = None) -> GPT:
    """
    A copy of the model with layer(weight, bias) for each matrix, head(weight) for the head, fp32
    for all else.
    """
    model = deepcopy(model)
    model.head = head(model.wte.weight) if head else layer(model.wte.weight, None)
    for module in [model.h, *model.h.modules()]:
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, layer(child.weight, child.bias))
    return model.float().requires_grad_(
        False
    )  # packed weights are no parameters, and stay what they are


def compiled_decode(model: GPT, quantize: str = "none") -> Callable:
    """
    A step of one request that decodes, on a CPU, as one compiled function: step(tokens [1],
    positions [1], kv_rows [2, 1, Hk, C], kv), where kv_rows are those of its context, as
    `kernels.pool_rows`, without the new token. Returns logits (1, V) and the new K, V, [L, 2, 1,
    Hk, D], for the caller to store: a graph that wrote into the pool would copy it. Compiles in the
    first call, 10 to 60 s; from then on only values and C may change, which nobody checks.
    """
    model = with_layers(model, partial(OneRowLinear, quantize=quantize))

    def step(tokens, positions, kv_rows, kv):
        new = []

        def attend(q, kv_of_layer, batch):  # q (1, H, D)
            k, v = torch.cat(
                [F.embedding(kv_rows, kv_of_layer.view(-1, q.shape[-1])), new[-1].transpose(2, 3)],
                dim=3,
            )
            return F.scaled_dot_product_attention(
                q[:, :, None], k, v, enable_gqa=q.shape[1] != k.shape[1]
            )[:, :, 0]

        def store(k, v, kv_of_layer, batch):  # (1, Hk, D)
            new.append(torch.stack((k, v))[:, :, None])

        backend = kernels.Backend("compiled", "", None, store, attend)
        batch = kernels.Batch(tokens, positions, *[None] * 6, 1, [1], [], backend)
        x = model.forward_paged(batch, kv)
        return model.logits(x), torch.stack(new)[:, :, 0]

    step.__code__ = (
        step.__code__.replace()
    )  # compiled code is found by this object: another model's must not be
    options = {
        "guard_filter_fn": torch.compiler.skip_all_guards_unsafe
    }  # to check all took 0.2 ms a step
    compiled = torch.compile(step, fullgraph=True, options=options)

    def call(tokens, positions, kv_rows, kv):
        torch._dynamo.mark_dynamic(kv_rows, 3)
        return compiled(tokens, positions, kv_rows, kv)

    return call


# --------------------------------------------------------------------------------------------------
# Checkpoints: a directory in the Hugging Face layout

# our name -> GPT-2's name in config.json
CONFIG_NAMES = {
    "context_length": "n_positions",
    "activation": "activation_function",
    "dropout": "resid_pdrop",
}
# GPT-2 options that would change the computation, with the only value that this code computes
FIXED_OPTIONS = {
    "model_type": "gpt2",
    "n_inner": None,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
# transformers' other names for the tanh approximation
ACTIVATION_NAMES = {"gelu_pytorch_tanh": "gelu_new", "gelu_fast": "gelu_new"}
# What transformers writes for a GPT-2 of any vocabulary when nobody names an end of text.
DEFAULT_EOS = 50256
# Of a directory from elsewhere: what holds weights, but not those that are read here.
FOREIGN_WEIGHTS = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin",
    "*.pt",
    "*.pth",
    "*.gguf",
    "*.h5",
    "*.msgpack",
)


def is_transposed(name: str) -> bool:
    """GPT-2 keeps the matrices of its linear layers as [in, out], torch as [out, in]."""
    return name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))


def save_checkpoint(model: GPT, directory: str | Path):
    """
    Write model.safetensors and config.json, each atomically. The tokenizer writes its own files
    beside them, before: config.json comes last, a directory without it holds no model.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = {CONFIG_NAMES.get(k, k): v for k, v in vars(model.config).items()}
    config |= FIXED_OPTIONS | {
        "architectures": ["GPT2LMHeadModel"],
        "bos_token_id": model.config.eos_token_id,
    }
    if more := config.pop("more_eos_token_ids"):
        config["eos_token_id"] = [model.config.eos_token_id, *more]
    config |= {"embd_pdrop": model.config.dropout, "attn_pdrop": model.config.dropout}
    config["dtype"] = str(model.wte.weight.dtype).removeprefix("torch.")
    tensors = {name: w.detach().cpu() for name, w in model.state_dict().items()}
    if not model.config.bias:  # transformers' GPT-2 always has biases: zeros compute the same
        biased = {n: w for n, w in tensors.items() if n not in ("wte.weight", "wpe.weight")}
        tensors |= {
            n.removesuffix("weight") + "bias": w.new_zeros(w.shape[0]) for n, w in biased.items()
        }
    tensors = {
        f"transformer.{n}": (w.t() if is_transposed(n) else w).contiguous()
        for n, w in tensors.items()
    }
    write_atomically(
        directory / "model.safetensors", lambda path: save_file(tensors, path, {"format": "pt"})
    )
    write_json(directory / "config.json", config)


class CheckpointError(ValueError):
    """A directory that holds no model we can load; the message says what to run."""


def load_config(directory: str | Path) -> GPTConfig:
    """
    Read config.json, and what generation_config.json adds to it: tokens that end a text. Raises
    CheckpointError where it is missing, broken or asks for what we do not compute.
    """
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise CheckpointError(no_model(path))
    try:
        saved = json.loads(path.read_text())
        check_options(path, saved)
        ours = {
            field: saved.get(CONFIG_NAMES.get(field, field))
            for field in GPTConfig.__dataclass_fields__
        }
        ours["activation"] = ACTIVATION_NAMES.get(ours["activation"], ours["activation"])
        eos = read_eos(path, saved)
        ours["eos_token_id"] = eos[0] if eos else None
        ours["more_eos_token_ids"] = tuple(eos[1:])
        return GPTConfig(**{field: value for field, value in ours.items() if value is not None})
    except CheckpointError:
        raise
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not a model configuration ({error}): train again or restore the file"
        ) from error


def no_model(missing: Path) -> str:
    """What to say of a directory that lacks a file which is read here: how it can be had."""
    folder = missing.parent
    found = sorted(
        {path.name for pattern in FOREIGN_WEIGHTS for path in folder.glob(pattern)}
        - {"train_state.pt"}
    )
    if not found:
        mend = f"run `python train.py --out {folder}`, or name another directory"
        return f"no model in {folder}, {missing.name} is missing: {mend}"
    if missing.name == "config.json":
        return f"{missing} is missing beside {found[0]}: download it, too"
    return (
        f"{missing} is missing, the weights are in {', '.join(found[:3])}: they are read from one safetensors file. "
        "Let transformers write it: GPT2LMHeadModel.from_pretrained(DIR).save_pretrained(NEW, max_shard_size='100GB')"
    )


def check_options(path: Path, saved: dict):
    """Raises CheckpointError for options that change the computation."""
    for name, wanted in FIXED_OPTIONS.items():
        value = saved.get(name, wanted)
        same = value == wanted or (value is None and wanted is False)
        if not same and not (name == "n_inner" and value == 4 * saved["n_embd"]):
            mend = "vLLM serves such a directory"
            raise CheckpointError(
                f"{path}: {name} is {value!r}, this code computes only {wanted!r}: {mend}"
            )


def read_eos(path: Path, saved: dict) -> list[int]:
    """The tokens that end a text, config.json's first; each file has one, a list, or none."""
    other_path = path.with_name("generation_config.json")
    other = json.loads(other_path.read_text()) if other_path.is_file() else {}
    ids = []
    for value in (saved.get("eos_token_id"), other.get("eos_token_id")):
        if value is not None:
            ids += value if isinstance(value, list) else [value]
    ids = list(dict.fromkeys(ids))
    if DEFAULT_EOS in ids and saved.get("vocab_size", DEFAULT_EOS + 1) <= DEFAULT_EOS:
        ids.remove(DEFAULT_EOS)
    return ids


def load_checkpoint(directory: str | Path, device="cpu", dtype: torch.dtype = torch.float32) -> GPT:
    """
    Build the model of a checkpoint directory, in evaluation mode. Raises CheckpointError with what
    to change.
    """
    config, path = load_config(directory), Path(directory) / "model.safetensors"
    try:
        saved = load_file(path)
    except FileNotFoundError:
        raise CheckpointError(no_model(path)) from None
    except Exception as error:  # safetensors raises its own types for truncated or foreign files
        raise CheckpointError(
            f"{path} cannot be read ({error}): train again or restore the file"
        ) from error
    # the hub's GPT-2 has no prefix
    saved = {n.removeprefix("transformer."): w for n, w in saved.items()}
    saved = {n: w.t() if is_transposed(n) else w for n, w in saved.items()}
    found = {n: tuple(w.shape) for n, w in saved.items()}
    V, C = config.vocab_size, config.n_embd
    # first the sizes themselves: a model of a billion layers takes for ever to build, even without
    # its weights
    check_shapes(path, found, {"wte.weight": (V, C), "wpe.weight": (config.context_length, C)})
    check_shapes(path, found, {f"h.{config.n_layer - 1}.ln_1.weight": (C,)})
    with torch.device("meta"):
        model = GPT(config)
    wanted = {n: tuple(w.shape) for n, w in model.state_dict().items()}
    check_shapes(path, found, wanted)
    check_rest(path, saved, wanted)
    model.load_state_dict({n: saved[n].to(device, dtype).contiguous() for n in wanted}, assign=True)
    return model.eval()


def check_rest(path: Path, saved: dict[str, torch.Tensor], wanted: dict):
    """
    Raises CheckpointError for weights that the model does not have, unless it computes the same
    without them.
    """
    for name, weight in saved.items():
        if name in wanted or name.endswith(
            (".attn.bias", ".attn.masked_bias")
        ):  # the hub's causal masks
            continue
        if name == "lm_head.weight":
            if not torch.equal(weight, saved["wte.weight"]):
                what = "the head, lm_head.weight, is not the embedding"
                raise CheckpointError(
                    f"{path}: {what}: untied heads are not computed here, vLLM serves such a directory"
                )
        elif (
            not name.endswith(".bias") or weight.any()
        ):  # a model without biases is saved with zeros
            raise CheckpointError(
                f"{path} does not match config.json: {name} is no part of this model"
            )


def check_shapes(path: Path, found: dict[str, tuple], wanted: dict[str, tuple]):
    for name, shape in wanted.items():
        if found.get(name) != shape:
            raise CheckpointError(
                f"{path} does not match config.json: {name} is {found.get(name)}, wanted {shape}"
            )
