"""The kernels of the circuits_part*.py scripts.

From top to bottom, as the data goes: the frozen run, path expansion, losses, attention
patterns, composition, eigenvalues and copying. A kernel takes tensors and returns tensors; it knows
nothing about the article's sentences, and a script knows nothing about tiles.

Notation: row vectors, TransformerLens shapes. A head reads x [batch, pos, d_model] as x W_Q,
x W_K, x W_V (W: [d_model, d_head]) and writes z W_O ([d_head, d_model]). Axes stand in the order
layer, head, batch, query (or pos), key, then d_head, d_model or d_vocab; h2 (layer 1) before h1
(layer 0) for pairs. `cen(x)` is x minus its mean over d_model, and LayerNorm is cen(x) / scale,
its weight and bias folded into the next matrices. Losses are in nats per token.
"""

from __future__ import annotations

import math
import pathlib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

if TYPE_CHECKING:
    from transformer_lens import HookedTransformer

HERE = pathlib.Path(__file__).resolve().parent


class UserError(Exception):
    """An error that the user can fix, told in one line with its remedy; exit code 2."""


def notice(line: str) -> None:
    """Print a notice to stderr; stdout holds the article's log alone."""
    if sys.stderr:
        print(line, file=sys.stderr, flush=True)


def cause(e: BaseException) -> str:
    """The first line of an exception's message, shortened; its type if there is none."""
    return next((line for line in str(e).splitlines() if line.strip()), type(e).__name__)[:120]


# ================================================================================= Frozen run


def cen(x: Tensor) -> Tensor:
    """x minus its mean over the last axis (d_model), the centring of LayerNorm."""
    return x - x.mean(-1, keepdim=True)


def layer_norm(model: HookedTransformer, x: Float[Tensor, "... d_model"]) -> Tensor:
    """cen(x) / scale with the scale of x itself, for embeddings outside any run."""
    x = cen(x)
    return x / (x.pow(2).mean(-1, keepdim=True) + model.cfg.eps).sqrt()


@dataclass(frozen=True)
class FrozenRun:
    """Cache of one forward pass: what the expansion holds fixed, and what it is checked against."""

    model: HookedTransformer
    tokens: Int[Tensor, "batch pos"]
    streams: Float[Tensor, "norm batch pos d_model"]  # before each layer, and at the end
    scales: Float[Tensor, "norm batch pos 1"]  # of each layer's LayerNorm and the final one
    patterns: Float[Tensor, "layer head batch query key"]
    scores: Float[Tensor, "layer head batch query key"]  # masked, before the softmax
    final: Float[Tensor, "batch pos d_model"]  # what the unembedding reads

    @property
    def x0(self) -> Float[Tensor, "batch pos d_model"]:
        """Embedding + position."""
        return self.streams[0]

    @property
    def b_O(self) -> Float[Tensor, "layer d_model"]:
        """What each layer adds independently of its input: b_O, and b_V W_O if not folded in."""
        m = self.model
        return m.b_O + torch.einsum("lhe,lhed->ld", m.b_V, m.W_O)

    def final_norm(self, stream: Float[Tensor, "batch pos d_model"]) -> Tensor:
        """cen(stream) / s_final, with the scale of the full run: what W_U reads. Same shape."""
        return cen(stream) / self.scales[-1]


@torch.no_grad()
def freeze(model: HookedTransformer, tokens: Int[Tensor, "batch pos"]) -> FrozenRun:
    """Run the model once and keep patterns, scales and streams. No logits are computed."""
    layers = range(model.cfg.n_layers)
    end = f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"
    kept = {"hook_resid_pre", "hook_resid_post", "hook_scale", "hook_pattern", "hook_attn_scores",
            "hook_normalized"}
    _, cache = model.run_with_cache(
        tokens, return_type=None, names_filter=lambda n: n.rsplit(".", 1)[-1] in kept
    )

    def per_head(hook: str) -> Tensor:
        return torch.stack([cache[f"blocks.{i}.attn.{hook}"].transpose(0, 1) for i in layers])

    return FrozenRun(
        model=model,
        tokens=tokens,
        streams=torch.stack([*(cache[f"blocks.{i}.hook_resid_pre"] for i in layers), cache[end]]),
        scales=torch.stack([*(cache[f"blocks.{i}.ln1.hook_scale"] for i in layers),
                            cache["ln_final.hook_scale"]]),
        patterns=per_head("hook_pattern"),
        scores=per_head("hook_attn_scores"),
        final=cache["ln_final.hook_normalized"],
    )


# ============================================================================= Path expansion


@dataclass(frozen=True)
class Paths:
    """The terms of a two-layer model: 1 direct, 2 x heads single, heads x heads virtual.

    A head's term is z W_O with z [..., d_head] wide; only z is kept, so a virtual head costs
    d_head numbers a position and never d_model.
    """

    run: FrozenRun
    direct: Float[Tensor, "batch pos d_model"]
    bias: Float[Tensor, "batch pos d_model"]  # zero, unless b_O(0) counts as moved
    bias_moved: Float[Tensor, "batch pos d_model"]  # layer 1 reading b_O(0), likewise
    z_single: Float[Tensor, "layer head batch pos d_head"]
    z_virtual: Float[Tensor, "h2 h1 batch pos d_head"]

    def heads(self, layer: int) -> Float[Tensor, "batch pos d_model"]:
        """The sum of one layer's single-head terms."""
        return write(self.z_single[layer], self.run.model.W_O[layer])

    def virtual(self) -> Float[Tensor, "batch pos d_model"]:
        """The sum of all virtual-head terms."""
        return write(self.z_virtual.sum(1), self.run.model.W_O[1])

    def stream(self, order: int) -> Float[Tensor, "batch pos d_model"]:
        """The sum of all terms that run through at most `order` heads."""
        y = self.direct
        if order >= 1:
            y = y + self.bias + self.heads(0) + self.heads(1)
        if order >= 2:
            y = y + self.bias_moved + self.virtual()
        return y


def write(
    z: Float[Tensor, "head batch pos d_head"], W_O: Float[Tensor, "head d_head d_model"]
) -> Float[Tensor, "batch pos d_model"]:
    """sum over heads of z W_O: what these heads add to the stream."""
    head, batch, pos, d_head = z.shape
    flat = z.permute(1, 2, 0, 3).reshape(batch, pos, head * d_head)
    return flat @ W_O.reshape(head * d_head, -1)


def attend(
    pattern: Float[Tensor, "head batch query key"],
    x: Float[Tensor, "batch key d_model"],
    W_V: Float[Tensor, "head d_model d_head"],
) -> Float[Tensor, "head batch query d_head"]:
    """z = A (x W_V) for every head, x already centred and scaled."""
    return pattern @ (x @ W_V[:, None])


@torch.no_grad()
def expand(run: FrozenRun, bias_is_moved: bool = False) -> Paths:
    """All terms of the two-layer path expansion, patterns and scales frozen.

    T = Id x W_E W_U + sum_h A^h x W_E W_OV^h W_U
        + sum_{h2,h1} (A^h2 A^h1) x W_E W_OV^h1 W_OV^h2 W_U
    ("The logits as a sum of paths"), with LayerNorm as a fixed scale:
        direct           x0 + b_O(0) + b_O(1)
        layer-0 head h   o0[h] = A0[h] (cen(x0) / s0 W_V) W_O
        layer-1 head h   A1[h] (cen(x0 + b_O(0)) / s1 W_V) W_O
        virtual h2 o h1  A1[h2] (cen(o0[h1]) / s1 W_V[h2]) W_O[h2]

    Exact up to rounding: the terms add up to the run's final stream, since with A and s held
    every step is linear. cen(z W_O) = z cen(W_O), so o0 is never written out per head.

    Args:
        bias_is_moved: count b_O(0) with what layer 0 moves instead of with the direct path.

    Cost: heads^2 x batch x pos^2 x d_head multiplications for the virtual heads.
    """
    W_V, W_O = run.model.W_V, run.model.W_O
    if len(W_V) != 2:
        raise ValueError(f"expand is for two layers, the model has {len(W_V)}")
    s0, s1, _ = run.scales
    A0, A1 = run.patterns
    b0, b1 = run.b_O
    read_by_1 = run.x0 if bias_is_moved else run.x0 + b0
    z0 = attend(A0, cen(run.x0) / s0, W_V[0])
    z1 = attend(A1, cen(read_by_1) / s1, W_V[1])
    W_OV = cen(W_O[0]) @ W_V[1][:, None]  # [h2, h1, d_head, d_head]
    z_virtual = torch.stack([A1[h2] @ (z0 / s1 @ W_OV[h2][:, None]) for h2 in range(len(A1))])
    nothing = torch.zeros_like(run.x0)
    if bias_is_moved:
        direct, bias = run.x0 + b1, nothing + b0
        bias_moved = write(attend(A1, cen(bias) / s1, W_V[1]), W_O[1])
    else:
        direct, bias, bias_moved = run.x0 + b0 + b1, nothing, nothing
    return Paths(run, direct, bias, bias_moved, torch.stack([z0, z1]), z_virtual)


@torch.no_grad()
def virtual_by_source(run: FrozenRun) -> tuple[Tensor, Tensor]:
    """The virtual heads' sum, split by what the layer-0 heads read.

    Every layer-0 pattern is split into the column of source position 0 and the other columns;
    layer 1 moves each part on separately.

    Returns:
        (start, real) [batch, pos, d_model], whose sum is Paths.virtual().
    """
    W_V, W_O = run.model.W_V, run.model.W_O
    start = run.patterns[0].clone()
    start[..., 1:] = 0
    halves = []
    for A0 in (start, run.patterns[0] - start):
        moved = write(attend(A0, cen(run.x0) / run.scales[0], W_V[0]), W_O[0])
        halves.append(write(attend(run.patterns[1], cen(moved) / run.scales[1], W_V[1]), W_O[1]))
    return halves[0], halves[1]


def pushes(run: FrozenRun, out: int) -> Float[Tensor, "head source"]:
    """The push of every head on one logit at the last position, through each source position.

    push[h, j] = A^h[last, j] cen(v_j W_O) W_U[:, out] / s_final, v_j = cen(x_j) / s_0 W_V + b_V

    with the pattern, positions and scales of the run ("How much does a source push an out
    token?"). Its sum over the sources is the head's push; the pushes of all heads, the direct path,
    b_O and b_U add up to the logit, exactly.

    Args:
        run: of a prompt, one sequence.
        out: the token whose logit it is.
    """
    m = run.model
    v = (cen(run.x0) / run.scales[0])[0] @ m.W_V[0] + m.b_V[0][:, None]
    direction = cen(m.W_O[0]) @ m.W_U[:, out] / run.scales[-1, 0, -1]
    return run.patterns[0, :, 0, -1] * (v @ direction[..., None])[..., 0]


# ===================================================================================== Losses

# A tile of logits: 6 MB in float32, two fit the cache that cores share.
TILE_ROWS, TILE_COLUMNS = 3072, 512
LOG2_E = 1.4426950408889634  # in a nat: exp(x) is 2^(LOG2_E x), and exp2 takes half of exp's time


def _tiles(n: int, size: int) -> list[slice]:
    return [slice(i, min(i + size, n)) for i in range(0, n, size)]


@dataclass(frozen=True)
class Unembedded:
    """What one pass over the logits of a text finds. Losses are in nats, summed in float64."""

    losses: dict[str, Float[Tensor, "batch next"]]  # -log p(next token)
    loss_increase: Float[Tensor, "head term batch next"]  # when the term is removed
    max_abs_diff: float  # between the logits of the first and the last stream, at all positions
    min: float  # of the first stream's logits; infinite, as max, if there is only one stream
    max: float


@torch.no_grad()
def unembed(
    run: FrozenRun,
    normed: dict[str, Float[Tensor, "batch pos d_model"]],
    differences: dict[str, tuple[str, str, str]] | None = None,
    z: Float[Tensor, "head term batch pos d_head"] | None = None,
) -> Unembedded:
    """Losses of many streams and removals, in one tiled pass over the vocabulary.

        loss = log sum_v exp(x W_U[:, v] + b_U[v]) - (x W_U[:, t] + b_U[t]), t the next token

    Logits are linear in the normed stream x, so two kinds of losses need no unembedding of their
    own:

        differences: (i, j, k)  of x_i + x_j - x_k, from the logits of these three streams
        z[h, i]                 of the last stream without the term z[h, i] W_O[h] of the last
                                layer's head h, a rank-d_head update: logit_v - u W_OU[:, v] with
                                u = z[h, i] / s_final and W_OU = cen(W_O[h]) W_U

    Every exponential is shifted by the logit of the next token in the full stream. A row whose sum
    leaves the range in which this is safe is recomputed. Exact up to rounding, since nothing is
    approximated.

    Args:
        normed: run.final_norm(stream) by name, or run.final for the model itself.
        differences: by names that do not clash with those of normed.

    Returns:
        the losses of normed and differences by name, and the loss increase of every z[h, i].

    Cost: one unembedding per stream, one exponential per logit and loss, d_head multiplications
    per logit and removal. Of a stream's logits, one tile of TILE_ROWS x TILE_COLUMNS exists at a
    time.
    """
    W_U, b_U, (batch, pos) = run.model.W_U, run.model.b_U, run.tokens.shape
    differences, names = differences or {}, list(normed)
    first, last = names[0], names[-1]
    x = {name: stream.flatten(0, 1) for name, stream in normed.items()}  # [n, d_model]
    x |= {name: x[i] + x[j] - x[k] for name, (i, j, k) in differences.items()}
    z = run.model.W_O.new_zeros(0, 0, batch, pos, run.model.W_O.shape[2]) if z is None else z
    u, W_O = (z / run.scales[-1]).flatten(2, 3), cen(run.model.W_O[-1, : len(z)])
    # The last token of a row predicts nothing; it is its own target here, and is dropped below.
    targets = torch.cat([run.tokens[:, 1:], run.tokens[:, -1:]], 1).flatten()
    to_target = W_U[:, targets]
    shift = {name: (y * to_target.T).sum(-1) + b_U[targets] for name, y in x.items()}
    sums = {name: torch.zeros_like(y, dtype=torch.float64) for name, y in shift.items()}
    without = sums[last].new_zeros(u.shape[:3])
    extremes = _Extremes()
    for columns in progress(_tiles(W_U.shape[1], TILE_COLUMNS), "unembedding"):
        W, b = W_U[:, columns], b_U[columns]
        W_OU = W_O @ W
        for rows in _tiles(batch * pos, TILE_ROWS):
            bits = {name: torch.addmm(b, x[name][rows], W, beta=LOG2_E, alpha=LOG2_E)
                    for name in names}
            if first != last:
                extremes.add(bits[first], bits[last])
            bits |= {name: (bits[i] + bits[j]).sub_(bits[k])
                     for name, (i, j, k) in differences.items()}
            out = torch.empty_like(bits[last])
            for name, full in bits.items():
                full.sub_(shift[name][rows, None], alpha=LOG2_E)
                sums[name][rows] += torch.exp2(full, out=out).sum(1)
            for h, i in pairs(u):
                torch.addmm(bits[last], u[h, i, rows], W_OU[h], alpha=-LOG2_E, out=out)
                without[h, i, rows] += out.exp2_().sum(1)

    losses = {name: _log(sums[name], shift[name], x[name], W_U, b_U) for name in x}
    for h, i in pairs(u):
        without[h, i] = _log(without[h, i], shift[last], x[last], W_U, b_U, u[h, i], W_O[h])
        without[h, i] -= losses[last]
    without += torch.einsum("hind,hdn->hin", u, W_O @ to_target)
    return Unembedded({name: _with_next(loss, pos) for name, loss in losses.items()},
                      _with_next(without, pos), extremes.difference / LOG2_E,
                      extremes.low / LOG2_E, extremes.high / LOG2_E)


@dataclass
class _Extremes:
    """The range of the first stream's logits, and their largest difference from the last's."""

    difference: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    def add(self, first: Tensor, last: Tensor) -> None:
        self.difference = max(self.difference, (last - first).abs_().max().item())
        self.low = min(self.low, first.min().item())
        self.high = max(self.high, first.max().item())


def _with_next(loss: Float[Tensor, "... n"], pos: int) -> Float[Tensor, "... batch next"]:
    """The losses of the positions that have a next token."""
    return loss.unflatten(-1, (-1, pos))[..., :-1]


def _log(total: Float[Tensor, " n"], shift: Tensor, x: Tensor, W_U: Tensor, b_U: Tensor,
         u: Tensor | None = None, W_O: Tensor | None = None) -> Tensor:
    """log of total, the sum of exp(logit - shift) of each row.

    Unsafe rows are recomputed from the logits of x, or of x without the term u W_O.
    """
    unsafe = ~((total > 1e-30) & (total < 1e30))
    rows = x[unsafe] if u is None else x[unsafe] - u[unsafe] @ W_O
    normalizer = [(part @ W_U + b_U).logsumexp(-1) for part in rows.split(64)]
    again = torch.cat(normalizer) - shift[unsafe]
    return total.log().masked_scatter(unsafe, again.double())


def pairs(x: Tensor) -> list[tuple[int, ...]]:
    """The indices of a tensor's first two axes, (h2, h1) of virtual heads."""
    return list(np.ndindex(*x.shape[:2]))


# ========================================================================= Attention patterns


def mean_attention(pattern: Float[Tensor, "... query key"], back: int) -> Float[Tensor, "..."]:
    """Mean of A[i, i - back] over the rows i >= back; batch is averaged too if it is axis -3."""
    return pattern.diagonal(-back, -2, -1).mean(-1).mean(-1)


def softmax_causal(scores: Float[Tensor, "... query key"]) -> Float[Tensor, "... query key"]:
    """Mask the future, then softmax over the keys."""
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(future, -torch.inf).softmax(-1)


def total_variation(
    p: Float[Tensor, "... query key"], q: Float[Tensor, "... query key"]
) -> Float[Tensor, "..."]:
    """1/2 sum over keys of |p - q|, mean over rows and over the batch axis -3. In [0, 1]."""
    return (p - q).abs().sum(-1).mean((-1, -2)) / 2


@dataclass(frozen=True)
class ScoreGroups:
    """Unmasked scores of one layer-1 head, split by which side a layer-0 head has moved:
    [batch, query, key] each."""

    none: Tensor
    Q: Tensor
    K: Tensor
    QK: Tensor
    K_of_head: Float[Tensor, "h1 batch query key"]  # K, from one layer-0 head's moved key alone

    def total(self) -> Tensor:
        """The head's scores; the mask then hides those above the diagonal."""
        return self.none + self.Q + self.K + self.QK


@torch.no_grad()
def score_groups(
    run: FrozenRun, paths: Paths, h2: int, bias_is_moved: bool = False
) -> ScoreGroups:
    """Split the scores of layer-1 head h2 by path ("The attention scores as a sum of paths").

    s_ij = (d_i + m_i) W_QK (d_j + m_j) / sqrt(d_head), query and key each split into the direct
    part d = cen(x0 + b_O(0)) / s1 (with b_Q or b_K) and the moved part m = cen(sum_h1 o0[h1]) / s1:
    none (d, d), Q (m, d), K (d, m), QK (m, m). Exact up to rounding.
    """
    m, s1, b0 = run.model, run.scales[1], run.b_O[0]
    W_Q, W_K = m.W_Q[1, h2], m.W_K[1, h2]
    read = cen(run.x0 if bias_is_moved else run.x0 + b0) / s1
    moved = paths.z_single[0] / s1  # [h1, batch, pos, d_head]; moved @ cen(W_O) is cen(o0) / s1
    W_O = cen(m.W_O[0])[:, None]
    q_moved, k_moved = moved @ (W_O @ W_Q), moved @ (W_O @ W_K)
    extra = cen(b0) / s1 if bias_is_moved else torch.zeros_like(read)
    q_direct, q_all_moved = read @ W_Q + m.b_Q[1, h2], q_moved.sum(0) + extra @ W_Q
    k_direct, k_all_moved = read @ W_K + m.b_K[1, h2], k_moved.sum(0) + extra @ W_K
    scale = m.cfg.attn_scale

    def scores(q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT / scale

    return ScoreGroups(
        none=scores(q_direct, k_direct), Q=scores(q_all_moved, k_direct),
        K=scores(q_direct, k_all_moved), QK=scores(q_all_moved, k_all_moved),
        K_of_head=scores(q_direct, k_moved))


@torch.no_grad()
def repeated_tokens(model: HookedTransformer, n_ids: int, n_rows: int, seed: int) -> Tensor:
    """Rows of BOS and n_ids random tokens, twice over: [n_rows, 1 + 2 n_ids].

    The ids of a row are all different (so that each has one first occurrence) and not special.
    """
    generator = torch.Generator().manual_seed(seed)
    special = set(model.tokenizer.all_special_ids)
    usable = torch.tensor([i for i in range(model.cfg.d_vocab) if i not in special])
    n_ids = min(n_ids, len(usable))
    rows = torch.stack([usable[torch.randperm(len(usable), generator=generator)[:n_ids]]
                        for _ in range(n_rows)])
    bos = torch.full((n_rows, 1), model.tokenizer.bos_token_id)
    return torch.cat([bos, rows, rows], 1).to(model.cfg.device)


def induction_scores(run: FrozenRun) -> Float[Tensor, "layer head batch"]:
    """Mean attention from each token of the second half to the one after its first occurrence.

    For a run on repeated_tokens: query 1 + n + i, key 1 + i + 1, so n - 1 back, i = 0 .. n - 1.
    """
    n = (run.tokens.shape[1] - 1) // 2
    back = run.patterns.diagonal(1 - n, -2, -1)  # entry j: query n - 1 + j, key j
    return back[..., 2 : n + 2].mean(-1)


# ================================================================================ Composition


def composition_scores(
    W_V: Float[Tensor, "h1 d_model d_head"],
    W_O: Float[Tensor, "h1 d_head d_model"],
    read: Float[Tensor, "h2 d_model d_head"],
    other: Float[Tensor, "h2 d_model d_head"],
) -> Float[Tensor, "h2 h1"]:
    """||W_V W_O read other^T||_F / (||W_V W_O||_F ||read other^T||_F), dimensionless, in [0, 1].

    ("Measuring composition from the weights".) K-composition: read = W_K, other = W_Q; Q: the two
    the other way round; V: read = W_V and other = W_O^T of the later head. Dense, for one pair:

        A, B = W_V @ W_O, read @ other.T
        score = (A @ B).norm() / (A.norm() * B.norm())

    With X = W_O read [d_head, d_head] the squared norm is tr(W_V^T W_V X other^T other X^T): Gram
    matrices of d_head x d_head, in float64. The order of the factors matters, ||AB|| is not ||BA||;
    only the trace survives a cyclic permutation.

    Cost: heads^2 x d_head^3 + heads^2 x d_model x d_head^2; no d_model x d_model matrix.
    """
    W_V, W_O, read, other = (w.double() for w in (W_V, W_O, read, other))
    gram_V, gram_other = W_V.mT @ W_V, other.mT @ other
    X = torch.tensordot(W_O, read, ([2], [1])).permute(2, 0, 1, 3)  # [h2, h1, d_head, d_head]
    product = (gram_V @ X * (X @ gram_other[:, None])).sum((-1, -2))
    size_1 = (gram_V * (W_O @ W_O.mT)).sum((-1, -2))
    size_2 = ((read.mT @ read) * gram_other).sum((-1, -2))
    return (product / (size_2[:, None] * size_1)).sqrt()


def first_published_scores(W_V: Tensor, W_O: Tensor, read: Tensor, other: Tensor) -> Tensor:
    """The score as first published, before the authors' correction: ||other^T W_V W_O read||_F
    over the same norms. The first factor has moved to the end. Shapes as composition_scores."""
    W_V, W_O, read, other = (w.double() for w in (W_V, W_O, read, other))
    product = ((other.mT[:, None] @ W_V) @ (W_O @ read[:, None])).norm(dim=(-1, -2))
    size_1 = ((W_V.mT @ W_V) * (W_O @ W_O.mT)).sum((-1, -2)).sqrt()
    size_2 = ((read.mT @ read) * (other.mT @ other)).sum((-1, -2)).sqrt()
    return product / (size_2[:, None] * size_1)


def random_baseline(d_model: int, d_head: int, n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Scores of n pairs of random rank-d_head d_model x d_model matrices.

    Products of Gaussian factors, drawn on the CPU from a private generator. Returns (corrected
    [n], first published [n]), of the same matrices, float64.
    """
    generator = torch.Generator().manual_seed(seed)
    corrected, first_published = [], []
    for batch in _tiles(n, 10):
        drawn = torch.stack([
            torch.randn(4, d_model, d_head, dtype=torch.float64, generator=generator)
            for _ in range(batch.start, batch.stop)])
        for V, O_T, read, other in drawn[:, :, None]:
            corrected.append(composition_scores(V, O_T.mT, read, other)[0, 0])
            first_published.append(first_published_scores(V, O_T.mT, read, other)[0, 0])
    return torch.stack(corrected), torch.stack(first_published)


# ======================================================================== Eigenvalues and copying

REAL = 1e-6  # of |l|: a real or imaginary part of an eigenvalue l below this counts as zero
TIE = 1e-12  # of ||a|| ||b||: two entries of a row that differ by less are a tie


# A circuit is a product A B, [source, out]: for an OV circuit A = W_E W_V and B = W_O W_U. The
# article's M = P Q is its transpose, [out, source], so P = B^T and Q = A^T; the eigenvalues, the
# diagonal and the trace of the two are the same. [n, n] is never built; every kernel is float64.


@torch.no_grad()
def circuit_eigenvalues(
    A: Float[Tensor, "... n d_head"], B: Float[Tensor, "... d_head n"]
) -> tuple[Tensor, Tensor]:
    """The non-zero eigenvalues of A B and its trace, from the d_head x d_head product B A.

    Non-zero eigenvalues of P Q = those of Q P ("A trick to get the eigenvalues").

    Returns:
        (eigenvalues [..., d_head] complex, trace of B A [...]), on the CPU, no order promised.

    Exact up to rounding, for n >= d_head. Cost: n d_head^2 + d_head^3, one call for all heads.
    """
    small = (B.double() @ A.double()).cpu()
    return torch.linalg.eigvals(small), small.diagonal(0, -2, -1).sum(-1)


def match_eigenvalues(large: Tensor, small: Tensor) -> tuple[float, float]:
    """The eigenvalues of A B (large) against those of B A (small).

    Each eigenvalue of B A, the largest first, is matched with the nearest unmatched one of A B:
    the right one as long as the differences are smaller than the gaps.

    Returns:
        the largest difference, and the largest |l| of A B that is unmatched.
    """
    distance = (small[:, None] - large).abs()
    unmatched, worst = torch.ones(len(large), dtype=torch.bool), 0.0
    for i in small.abs().argsort(descending=True).tolist():
        j = int(distance[i].where(unmatched, torch.inf).argmin())
        worst = max(worst, distance[i, j].item())
        unmatched[j] = False
    return worst, large[unmatched].abs().max().item() if unmatched.any() else 0.0


def copy_score(eigenvalues: Tensor) -> Float[Tensor, "..."]:
    """Re(sum l) / sum |l| over the last axis, in [-1, 1] ("One number for each head")."""
    return eigenvalues.sum(-1).real / eigenvalues.abs().sum(-1)


def eigenvalue_counts(eigenvalues: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """How many eigenvalues [..., d_head] have a positive real part, are real and positive, and are
    complex: [...] each. Parts below REAL |l| count as zero."""
    near_zero = REAL * eigenvalues.abs()
    positive, is_complex = eigenvalues.real > near_zero, eigenvalues.imag.abs() > near_zero
    return positive.sum(-1), (positive & ~is_complex).sum(-1), is_complex.sum(-1)


@torch.no_grad()
def eigenvector_condition(
    A: Float[Tensor, "... n d_head"], B: Float[Tensor, "... d_head n"]
) -> Float[Tensor, "..."]:
    """Condition number of the unit eigenvectors of the article's M = (A B)^T: 1 if orthogonal.

    ("Where the score can fool you".) M B^T w = l B^T w where w is an eigenvector of (B A)^T. With
    B^T = Q R the columns R w have the lengths and angles of B^T w. The same for A S, S^-1 B.
    Large or infinite where M has no full set of eigenvectors. On the CPU; cost as the eigenvalues.
    """
    w = torch.linalg.eig((B.double() @ A.double()).mT.cpu())[1]
    v = torch.linalg.qr(B.mT.double().cpu(), mode="r")[1].to(w.dtype) @ w
    return torch.linalg.cond(v / v.norm(dim=-2, keepdim=True))


def circuit_diagonal(
    A: Float[Tensor, "... n d_head"], B: Float[Tensor, "... d_head n"]
) -> Float[Tensor, "... n"]:
    """What reading each token does to its own logit, M_tt ("Other ways to measure copying")."""
    return (A.double() * B.double().mT).sum(-1)


@torch.no_grad()
def self_rank(
    A: Float[Tensor, "head n d_head"], B: Float[Tensor, "head d_head n"],
    sources: Int[Tensor, " source"], block: int = 256,
) -> Int[Tensor, "head source"]:
    """The rank of each source token in its own row of n out tokens; 1 is the most raised.

    1 + the number of other tokens with an entry at least as large. Entries that differ by rounding
    alone (TIE) are a tie, which is not first, so the block size changes nothing ("top-1 self" is
    rank 1, "top-5 self" rank <= 5).

    Cost: head x source x n x d_head; a tile of `block` rows at a time.
    """
    ranks = torch.zeros(len(A), len(sources), dtype=torch.int64, device=A.device)
    ids = sources.to(A.device)
    for a, b, rank in progress([*zip(A, B.double(), ranks)], "places of tokens"):
        x = a[ids].double()
        own = (x * b[:, ids].T).sum(1) - TIE * b.norm(dim=0).max() * x.norm(dim=1)
        for columns in _tiles(b.shape[1], 4 * TILE_COLUMNS):
            for rows in _tiles(len(x), block):  # the token itself is one of those it counts
                rank[rows] += (x[rows] @ b[:, columns]).ge_(own[rows, None]).sum(1).long()
    return ranks.cpu()


def random_heads(
    model: HookedTransformer, reading: str, n_heads: int, seed: int
) -> Complex[Tensor, "draw d_head"]:
    """The eigenvalues of n_heads random heads of a model's shapes ("What the paper found").

    Drawn on the CPU from a private generator, one head after the other. At the shapes of
    attn-only-1l "factors" with seed 0 draws every figure that the article prints of its random
    heads.

    Args:
        reading: "factors": both factors of the circuit are Gaussian; "all": W_E, W_V, W_O and W_U
            are; "head": W_V and W_O are, between the model's own W_E and W_U.
    """
    d_vocab, d_model, d_head = model.cfg.d_vocab, model.cfg.d_model, model.cfg.d_head
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    core = (model.W_U.double() @ model.W_E.double()).cpu() if reading == "head" else None
    found = []
    for _ in progress(range(n_heads), "random heads"):
        if reading == "factors":
            A, B = draw(d_vocab, d_head), draw(d_head, d_vocab)
        elif reading == "all":
            A = draw(d_vocab, d_model) @ draw(d_model, d_head)
            B = draw(d_head, d_model) @ draw(d_model, d_vocab)
        else:  # B A is W_O W_U W_E W_V, in whatever order it is multiplied
            A, B = core @ draw(d_model, d_head), draw(d_head, d_model)
        found.append(circuit_eigenvalues(A, B)[0])
    return torch.stack(found)


def progress(items: Sequence, what: str) -> Iterable:
    """The items, with a bar on stderr if they take longer than two seconds."""
    from tqdm import tqdm

    return tqdm(items, desc=what, file=sys.stderr, delay=2, leave=False)


def tensor(rows) -> Tensor:
    """Rows of numbers as a float64 tensor."""
    return torch.tensor(rows, dtype=torch.float64)
