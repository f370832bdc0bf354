"""The kernels of the circuits_part*.py scripts.

From top to bottom, as the data goes: the frozen run, path expansion, losses, attention
patterns, composition, eigenvalues and copying. A kernel takes tensors and returns tensors; it knows
nothing about the article's sentences, and a script knows nothing about tiles.

Notation: row vectors, TransformerLens shapes. A head reads x [batch, pos, d_model] as x W_Q,
x W_K, x W_V (W: [d_model, d_head]) and writes z W_O ([d_head, d_model]). Axes stand in the order
layer, head, batch, query (or pos), key, then d_head, d_model or d_vocab; of a pair of heads, the
one that reads before the one that writes. `cen(x)` is x minus its mean over d_model, and LayerNorm
is cen(x) / scale, its weight and bias folded into the next matrices. Losses are in nats per token.
"""

from __future__ import annotations

import contextlib
import math
import pathlib
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
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


@contextlib.contextmanager
def status(what: str) -> Iterator[None]:
    """Show on a terminal what is happening, until it is done; in a file nothing is left of it."""
    shown = bool(sys.stderr) and sys.stderr.isatty()
    if shown:
        print(f"{what} ...", end="\r", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if shown:
            print(" " * (len(what) + 4), end="\r", file=sys.stderr, flush=True)


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

    def read(self, layer: int, stream: Float[Tensor, "batch pos d_model"]) -> Tensor:
        """cen(stream) / s, with the scale of the full run: what a layer reads. Same shape."""
        return cen(stream) / self.scales[layer]

    def final_norm(self, stream: Float[Tensor, "batch pos d_model"]) -> Tensor:
        """cen(stream) / s_final: what W_U reads."""
        return self.read(-1, stream)


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

Head = tuple[int, int]  # (layer, number)


def readers(model: HookedTransformer) -> list[Head]:
    """The heads that can read another head's output: those of every layer but the first."""
    return list(np.ndindex(*model.W_O.shape[:2]))[len(model.W_O[0]):]


def writers(model: HookedTransformer) -> list[Head]:
    """The heads whose output another head can read: those of every layer but the last."""
    return list(np.ndindex(*model.W_O.shape[:2]))[: -len(model.W_O[0])]


def virtual_pairs(model: HookedTransformer) -> list[tuple[Head, Head]]:
    """(reader, writer) of every virtual head of order 2; the writer's layer comes first."""
    return [(r, w) for r in readers(model) for w in writers(model) if w[0] < r[0]]


@dataclass(frozen=True)
class Paths:
    """The (1 + heads)^layers paths of a model: their sums by order, and the terms of order 1 and 2.

    The order of a path is the number of heads that it runs through. A head's term is z W_O with
    z [..., d_head] wide; only z is kept, so a virtual head costs d_head numbers a position and
    never d_model.
    """

    run: FrozenRun
    sums: Float[Tensor, "norm order batch pos d_model"]  # before each layer, and at the end
    b_moved: Float[Tensor, "layer d_model"]  # the part of b_O that counts as moved by its layer
    z_single: Float[Tensor, "layer head batch pos d_head"]
    z_virtual: Float[Tensor, "pair batch pos d_head"]  # in the order of virtual_pairs

    def heads(self, layer: int) -> Float[Tensor, "batch pos d_model"]:
        """The sum of one layer's single-head terms, with what of b_O counts as moved by it."""
        return write(self.z_single[layer], self.run.model.W_O[layer]) + self.b_moved[layer]

    def stream(self, order: int) -> Float[Tensor, "batch pos d_model"]:
        """The sum of all terms that run through at most `order` heads."""
        return self.sums[-1, : order + 1].sum(0)


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
    """The path expansion of a model of any depth, patterns and scales frozen.

    S_k(l) is the sum of all terms of order k before layer l ("The logits as a sum of paths", with
    LayerNorm as a fixed scale):

        S_0(0) = x0,  S_0(l+1) = S_0(l) + b_O(l)
        S_k(l+1) = S_k(l) + sum_h A_l[h] (cen(S_{k-1}(l)) / s_l W_V[l, h]) W_O[l, h]

    so no sum needs a term of its own. Exact up to rounding: the S_k add up to the run's stream,
    since with A and s held every step is linear.

    Args:
        bias_is_moved: count b_O with what its layer moves instead of with the direct path, where a
            later layer reads it.

    Cost: layers x (layers + 1) / 2 times what one layer's heads cost in the model, and pairs x
    batch x pos^2 x d_head multiplications for the virtual heads.
    """
    W_V, W_O, b_moved = run.model.W_V, run.model.W_O, torch.zeros_like(run.b_O)
    if bias_is_moved:
        b_moved[:-1] = run.b_O[:-1]
    n = len(run.patterns)
    sums, z_single = run.x0.new_zeros(n + 1, n + 1, *run.x0.shape), []
    sums[0, 0] = run.x0
    for layer, pattern in enumerate(run.patterns):
        sums[layer + 1] = sums[layer]
        sums[layer + 1, 0] += run.b_O[layer] - b_moved[layer]
        sums[layer + 1, 1] += b_moved[layer]
        z = [attend(pattern, run.read(layer, y), W_V[layer]) for y in sums[layer, : layer + 1]]
        for order, z_of_order in enumerate(z, 1):
            sums[layer + 1, order] += write(z_of_order, W_O[layer])
        z_single.append(z[0])
    z_single = torch.stack(z_single)
    return Paths(run, sums, b_moved, z_single, _virtual_heads(run, z_single))


def _virtual_heads(run: FrozenRun, z_single: Tensor) -> Float[Tensor, "pair batch pos d_head"]:
    """z of every virtual head of order 2: A[reader] (cen(z_single[writer] W_O[writer]) / s W_V).

    cen(z W_O) = z cen(W_O), so what a writer adds to the stream is never written out.
    """
    W_V, W_O, n_heads = run.model.W_V, run.model.W_O, z_single.shape[1]
    z, end = z_single.new_empty(len(virtual_pairs(run.model)), *z_single.shape[2:]), 0
    for layer, head in readers(run.model):
        start, end = end, end + layer * n_heads
        W_OV = cen(W_O[:layer].flatten(0, 1)) @ W_V[layer, head]  # [writer, d_head, d_head]
        read = z_single[:layer].flatten(0, 1) / run.scales[layer]
        z[start:end] = run.patterns[layer, head] @ (read @ W_OV[:, None])
    return z


@torch.no_grad()
def virtual_from(paths: Paths, source: slice, bias: bool = False) -> Tensor:
    """The sum of the virtual heads of order 2 whose writing heads read these source positions only.

    Args:
        bias: add what of b_O counts as moved, as read by a later head. With all source positions,
            and that, it is the whole sum of order 2.

    Returns:
        [batch, pos, d_model].
    """
    run, once, twice = paths.run, torch.zeros_like(paths.run.x0), torch.zeros_like(paths.run.x0)
    for layer in range(1, len(run.patterns)):
        direct = run.read(layer - 1, paths.sums[layer - 1, 0])[:, source]
        z = attend(run.patterns[layer - 1][..., source], direct, run.model.W_V[layer - 1])
        once = once + write(z, run.model.W_O[layer - 1])
        if bias:
            once = once + paths.b_moved[layer - 1]
        z = attend(run.patterns[layer], run.read(layer, once), run.model.W_V[layer])
        twice = twice + write(z, run.model.W_O[layer])
    return twice


def direct_push(run: FrozenRun, out: int) -> float:
    """The push of the direct path, embedding + position, on one logit at the last position:
    cen(x0) W_U[:, out] / s_final, as the push of a head in `pushes`, without b_O and b_U."""
    return (run.final_norm(run.x0)[0, -1] @ run.model.W_U[:, out]).item()


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

# A tile of logits: 6 MB in float32, of which every thread has one for each stream and one more.
TILE_ROWS, TILE_COLUMNS = 3072, 512
LOG2_E = 1.4426950408889634  # in a nat: exp(x) is 2^(LOG2_E x), and exp2 takes half of exp's time


def _tiles(n: int, size: int) -> list[slice]:
    return [slice(i, min(i + size, n)) for i in range(0, n, size)]


def _in_parallel(tiles: Iterable, work: Callable, take: Callable, device: torch.device) -> None:
    """take(work(tile)) for every tile in turn, while other threads work on the next tiles.

    Threads that share each small step of a tile wait for each other after each, and wait long if
    another process has one of the processors. So every thread has whole tiles to itself, and torch
    runs a step on one thread. As many threads as torch would use; a GPU needs none of this. Tiles
    are taken in their order, so that the number of threads changes no bit of their sum.
    """
    n_threads = torch.get_num_threads() if device.type == "cpu" else 1
    if n_threads == 1:
        for tile in tiles:
            take(work(tile))
        return
    work, started = torch.no_grad()(work), deque()  # no_grad holds in one thread only
    with contextlib.ExitStack() as at_end:
        at_end.callback(torch.set_num_threads, n_threads)
        torch.set_num_threads(1)  # here and in threads that begin later
        pool = ThreadPoolExecutor(n_threads)
        at_end.callback(pool.shutdown, cancel_futures=True)  # first, after an error too
        for tile in tiles:
            started.append(pool.submit(work, tile))
            if len(started) == 2 * n_threads:  # one to work on and one to be taken for each
                take(started.popleft().result())
        while started:
            take(started.popleft().result())


@dataclass(frozen=True)
class Unembedded:
    """What one pass over the logits of a text finds. Losses are in nats, summed in float64."""

    losses: dict[str, Float[Tensor, "batch next"]]  # -log p(next token)
    loss_increase: Float[Tensor, "term batch next"]  # when the term is removed
    max_abs_diff: float  # between the logits of the first and the last stream, at all positions
    min: float  # of the first stream's logits; infinite, as max, if there is only one stream
    max: float


@torch.no_grad()
def unembed(
    run: FrozenRun,
    normed: dict[str, Float[Tensor, "batch pos d_model"]],
    differences: dict[str, tuple[str, str, str]] | None = None,
    z: Float[Tensor, "term batch pos d_head"] | None = None,
    heads: Sequence[Head] = (),
) -> Unembedded:
    """Losses of many streams and removals, in one tiled pass over the vocabulary.

        loss = log sum_v exp(x W_U[:, v] + b_U[v]) - (x W_U[:, t] + b_U[t]), t the next token

    Logits are linear in the normed stream x, so two kinds of losses need no unembedding of their
    own:

        differences: (i, j, k)  of x_i + x_j - x_k, from the logits of these three streams
        z[i]                    of the last stream without the term z[i] W_O[heads[i]], a
                                rank-d_head update: logit_v - u W_OU[:, v] with u = z[i] / s_final
                                and W_OU = cen(W_O[heads[i]]) W_U

    Every exponential is shifted by the logit of the next token in the full stream. A row whose sum
    leaves the range in which this is safe is recomputed. Exact up to rounding, since nothing is
    approximated.

    Args:
        normed: run.final_norm(stream) by name, or run.final for the model itself.
        differences: by names that do not clash with those of normed.
        heads: the (layer, head) that writes each term of z.

    Returns:
        the losses of normed and differences by name, and the loss increase of every term of z.

    Cost: one unembedding per stream, one exponential per logit and loss, d_head multiplications
    per logit and removal. Of a stream's logits, one tile of TILE_ROWS x TILE_COLUMNS exists at a
    time and thread.
    """
    differences, pos, (*_, last) = differences or {}, run.tokens.shape[1], normed
    x = {name: stream.flatten(0, 1) for name, stream in normed.items()}  # [n, d_model]
    x |= {name: x[i] + x[j] - x[k] for name, (i, j, k) in differences.items()}
    removals = _Removals(run, z, heads)
    # The last token of a row predicts nothing; it is its own target here, and is dropped below.
    targets = torch.cat([run.tokens[:, 1:], run.tokens[:, -1:]], 1).flatten()
    W_U, b_U, to_target = run.model.W_U, run.model.b_U, run.model.W_U[:, targets]
    shift = {name: (y * to_target.T).sum(-1) + b_U[targets] for name, y in x.items()}
    total = _Sums.zero(len(x) + len(removals.of), run.tokens.numel(), run.x0.device)
    logits = _Logits(run.model, x, shift, len(normed), differences, removals)
    _in_parallel(progress(_tiles(W_U.shape[1], TILE_COLUMNS), "unembedding"),
                 logits.sums, total.add, run.x0.device)
    losses = {name: _log(of_stream, shift[name], x[name], W_U, b_U)
              for name, of_stream in zip(x, total.exponentials)}
    increase = removals.loss_increase(total.exponentials[len(x):], run.model, x[last], shift[last],
                                      losses[last], to_target)
    return Unembedded({name: _with_next(loss, pos) for name, loss in losses.items()},
                      _with_next(increase, pos), total.difference / LOG2_E,
                      total.low / LOG2_E, total.high / LOG2_E)


@dataclass
class _Sums:
    """What is known after some of the vocabulary. Logits are in bits, exp(x) = 2^(LOG2_E x)."""

    exponentials: Float[Tensor, "loss n"]  # sum of exp(logit - shift): each stream, each removal
    difference: float = 0.0  # the largest between the first stream's logits and the last's
    low: float = math.inf  # of the first stream's logits
    high: float = -math.inf

    @classmethod
    def zero(cls, n_losses: int, n: int, device: torch.device) -> _Sums:
        return cls(torch.zeros(n_losses, n, dtype=torch.float64, device=device))

    def add(self, more: _Sums) -> None:
        self.exponentials += more.exponentials
        self.difference = max(self.difference, more.difference)
        self.low, self.high = min(self.low, more.low), max(self.high, more.high)

    def compare(self, first: Tensor, last: Tensor) -> None:
        if first is last:
            return
        self.difference = max(self.difference, (last - first).abs_().max().item())
        self.low = min(self.low, first.min().item())
        self.high = max(self.high, first.max().item())


@dataclass(frozen=True)
class _Logits:
    """Those of one pass: its streams, and the terms to remove from the last of n_normed."""

    model: HookedTransformer
    x: dict[str, Float[Tensor, "n d_model"]]
    shift: dict[str, Float[Tensor, " n"]]
    n_normed: int  # streams of x multiplied with W_U; the others follow from their logits
    differences: dict[str, tuple[str, str, str]]
    removals: _Removals

    def sums(self, columns: slice) -> _Sums:
        """Over these columns, in the dtype of the logits; the total of all is float64."""
        W, b = self.model.W_U[:, columns], self.model.b_U[columns]
        W_OU, n = self.removals.W_O @ W, len(next(iter(self.x.values())))
        found = _Sums(W.new_empty(len(self.x) + len(self.removals.of), n))
        for rows in _tiles(n, TILE_ROWS):
            bits = self.tile(rows, W, b)
            streams = [*bits.values()]
            full = streams[self.n_normed - 1]
            found.compare(streams[0], full)
            out = torch.empty_like(full)
            for name, logits, total in zip(bits, streams, found.exponentials):
                logits.sub_(self.shift[name][rows, None], alpha=LOG2_E)
                total[rows] = torch.exp2(logits, out=out).sum(1)
            self.removals.sums(full, rows, W_OU, out, found.exponentials[len(bits):])
        return found

    def tile(self, rows: slice, W: Tensor, b: Tensor) -> dict[str, Tensor]:
        """The logits of every stream, in bits."""
        bits = {name: torch.addmm(b, self.x[name][rows], W, beta=LOG2_E, alpha=LOG2_E)
                for name in [*self.x][:self.n_normed]}
        return bits | {name: (bits[i] + bits[j]).sub_(bits[k])
                       for name, (i, j, k) in self.differences.items()}


class _Removals:
    """The terms z[i] W_O[heads[i]] of one stream, each removed by itself."""

    def __init__(self, run: FrozenRun, z: Tensor | None, heads: Sequence[Head]):
        writing, W_O = sorted(set(heads)), run.model.W_O
        self.u = [] if z is None else (z / run.scales[-1]).flatten(1, 2)  # [term, n, d_head]
        self.W_O = cen(torch.stack([W_O[head] for head in writing])) if writing else W_O[:0, 0]
        self.of = [writing.index(head) for head in heads]  # the row of W_O for each term

    def sums(self, bits: Tensor, rows: slice, W_OU: Tensor, out: Tensor, sums: Tensor) -> None:
        """The exponentials of one tile of logits, shifted and in bits, without each term: into
        these rows of sums. The tile `out` is for the steps between."""
        for u, h, total in zip(self.u, self.of, sums):
            torch.addmm(bits, u[rows], W_OU[h], alpha=-LOG2_E, out=out)
            total[rows] = out.exp2_().sum(1)

    def loss_increase(self, sums: Tensor, model, x: Tensor, shift: Tensor, loss: Tensor,
                      to_target: Tensor) -> Tensor:
        """The loss without each term minus the loss of the stream x: [term, n], in place."""
        W_OT = self.W_O @ to_target
        for u, h, total in zip(self.u, self.of, sums):
            total.copy_(_log(total, shift, x, model.W_U, model.b_U, u, self.W_O[h]) - loss)
            total += (u * W_OT[h].T).sum(-1)
        return sums


@torch.no_grad()
def logit_deviation(
    model: HookedTransformer, normed: Float[Tensor, "stream ... d_model"]
) -> Float[Tensor, " stream"]:
    """Standard deviation over the vocabulary of the logits x W_U + b_U, the mean over positions.

    The variance of a position's logits is [x 1] C [x 1]^T, C the covariance of the columns of
    [W_U; b_U] over the vocabulary, so no logits are needed. Exact up to rounding.

    Args:
        normed: run.final_norm(stream) of several streams.

    Cost: d_vocab x d_model^2 multiplications once, and d_model^2 for each position and stream.
    """
    with_bias = torch.cat([model.W_U, model.b_U[None]])  # [d_model + 1, d_vocab]
    with_bias = with_bias - with_bias.mean(1, keepdim=True)
    covariance = (with_bias @ with_bias.T / with_bias.shape[1]).double()
    deviation = []
    for stream in normed:
        x = torch.cat([stream, torch.ones_like(stream[..., :1])], -1).double()
        variance = (x @ covariance * x).sum(-1)
        deviation.append(variance.clamp(min=0).sqrt().mean())
    return torch.stack(deviation)


def constant_share(
    z: Float[Tensor, "head ... d_head"], W_O: Float[Tensor, "head d_head d_model"]
) -> Float[Tensor, " head"]:
    """|m|^2 / mean over positions of |o|^2, o = z W_O what a head writes and m its mean.

    The share of the mean square of its output that its mean over all positions explains: 1 if the
    head writes the same at every position. NaN for a head that writes nothing.
    """
    z, W_O = z.double().flatten(1, -2), W_O.double()
    square = ((z @ (W_O @ W_O.mT)) * z).sum(-1).mean(-1)
    return (z.mean(1, keepdim=True) @ W_O).square().sum((-1, -2)) / square


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
    """Unmasked scores of one head, split by which side earlier heads have moved:
    [batch, query, key] each."""

    none: Tensor
    Q: Tensor
    K: Tensor
    QK: Tensor
    K_of_head: Float[Tensor, "writer batch query key"]  # from the key that one head alone has moved

    def total(self) -> Tensor:
        """The head's scores; the mask then hides those above the diagonal."""
        return self.none + self.Q + self.K + self.QK


@torch.no_grad()
def score_groups(paths: Paths, layer: int, head: int) -> ScoreGroups:
    """Split the scores of a head by path ("The attention scores as a sum of paths").

    s_ij = (d_i + m_i) W_QK (d_j + m_j) / sqrt(d_head), query and key each split into the direct
    part d = cen(S_0) / s (with b_Q or b_K) and the moved part m, all the rest of the stream before
    the layer: none (d, d), Q (m, d), K (d, m), QK (m, m). Exact up to rounding.
    """
    run, m, scale = paths.run, paths.run.model, paths.run.model.cfg.attn_scale
    W_Q, W_K, b_Q, b_K = (w[layer, head] for w in (m.W_Q, m.W_K, m.b_Q, m.b_K))
    direct = run.read(layer, paths.sums[layer, 0])
    moved = run.read(layer, paths.sums[layer, 1:].sum(0))
    q_direct, q_moved = direct @ W_Q + b_Q, moved @ W_Q
    k_direct, k_moved = direct @ W_K + b_K, moved @ W_K
    z = paths.z_single[:layer].flatten(0, 1) / run.scales[layer]  # z cen(W_O) is what it moves
    k_of_head = z @ (cen(m.W_O[:layer].flatten(0, 1)) @ W_K)[:, None]

    def scores(q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT / scale

    return ScoreGroups(
        none=scores(q_direct, k_direct), Q=scores(q_moved, k_direct),
        K=scores(q_direct, k_moved), QK=scores(q_moved, k_moved),
        K_of_head=scores(q_direct, k_of_head))


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
    only the trace survives a cyclic permutation. NaN where a head is dead, its norm 0.

    Cost: heads^2 x d_head^3 + heads^2 x d_model x d_head^2; no d_model x d_model matrix.
    """
    W_V, W_O, read, other = (w.double() for w in (W_V, W_O, read, other))
    gram_V, gram_other = W_V.mT @ W_V, other.mT @ other
    X = torch.tensordot(W_O, read, ([2], [1])).permute(2, 0, 1, 3)  # [h2, h1, d_head, d_head]
    product = (gram_V @ X * (X @ gram_other[:, None])).sum((-1, -2))
    size_1 = (gram_V * (W_O @ W_O.mT)).sum((-1, -2))
    size_2 = ((read.mT @ read) * gram_other).sum((-1, -2))
    return (product.clamp(min=0) / (size_2[:, None] * size_1)).sqrt()  # rounding can make it < 0


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
    """Re(sum l) / sum |l| over the last axis, in [-1, 1] ("One number for each head").

    NaN where every eigenvalue is 0, as those of a dead head are.
    """
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
    Large or infinite where M has no full set of eigenvectors; NaN where M = 0, as a dead head's is.
    On the CPU; cost as the eigenvalues.
    """
    small = (B.double() @ A.double()).mT.cpu()
    w = torch.linalg.eig(small)[1]
    v = torch.linalg.qr(B.mT.double().cpu(), mode="r")[1].to(w.dtype) @ w
    size = v.norm(dim=-2, keepdim=True)
    unit = (v / size).where(size > 0, 0)  # a column of 0 makes the condition number infinite
    dead = ~small.flatten(-2).any(-1)
    return torch.linalg.cond(unit).masked_fill(dead, math.nan)


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

    Cost: head x source x n x d_head; a tile of `block` rows at a time and thread.
    """
    B, ids = B.double(), sources.to(A.device)
    rounding = TIE * B.norm(dim=1).amax(1)

    def count(tile: tuple[int, Tensor]) -> Int[Tensor, " source"]:
        head, tokens = tile
        x, b = A[head, tokens].double(), B[head]
        least = (x * b[:, tokens].T).sum(1) - rounding[head] * x.norm(dim=1)
        return sum((x @ b[:, columns]).ge_(least[:, None]).sum(1)  # the token itself is counted too
                   for columns in _tiles(b.shape[1], 4 * TILE_COLUMNS)).long()

    tiles, counts = [(head, tokens) for head in range(len(A)) for tokens in ids.split(block)], []
    _in_parallel(progress(tiles, "places of tokens"), count, counts.append, A.device)
    return torch.cat(counts).view(len(A), len(sources)).cpu()


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


def listed(x: Tensor) -> list | float | None:
    """The numbers of a tensor, None in place of NaN: what results files hold."""
    if x.dim():
        return [listed(part) for part in x]
    value = x.item()
    return None if math.isnan(value) else value
