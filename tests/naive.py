"""A slow oracle: every number of part 5 from its equation, as loops, in float64 numpy.

It shares nothing with the scripts. Where they keep a term d_head wide, every term here is written
out over the whole stream; where they use tiles and Gram matrices, here stand all logits and dense
d_model x d_model products. It is meant to be read next to the equations.

`weights` is a dict of arrays under TransformerLens names, the layer axis first:

    W_E [d_vocab, d_model]   W_pos [n_ctx, d_model]   W_U [d_model, d_vocab]   b_U [d_vocab]
    W_Q, W_K, W_V [layer, head, d_model, d_head]      b_Q, b_K, b_V [layer, head, d_head]
    W_O [layer, head, d_head, d_model]                b_O [layer, d_model]     eps
    ln_w, ln_b [layer, d_model], ln_final_w, ln_final_b [d_model]: only where they are not folded

Vectors are rows. Head (l, h) is head h of layer l, both from 0. A path is a tuple of heads in the
order in which information runs through them; () is the direct path. A pair is (reader, writer), the
writer in an earlier layer; a table has a row for each head of layers 1.. and a column for each head
of all layers but the last, None where they are no pair.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np


def centred(x):
    """x minus its mean, for one vector."""
    return x - sum(x) / len(x)


def norm_scale(x, eps: float) -> float:
    """LayerNorm's scale of one vector: sqrt(mean of cen(x)^2 + eps)."""
    return math.sqrt(sum(v * v for v in centred(x)) / len(x) + eps)


def softmax(scores) -> np.ndarray:
    """exp(s) / sum exp(s), shifted so that the largest exponent is 0."""
    high = max(scores)
    exponentials = [math.exp(s - high) for s in scores]
    return np.array(exponentials) / sum(exponentials)


def causal_pattern(scores) -> np.ndarray:
    """Row i: softmax of its scores for the keys 0..i; the future stays 0."""
    pattern = np.zeros_like(scores)
    for i in range(len(scores)):
        pattern[i, : i + 1] = softmax(scores[i, : i + 1])
    return pattern


def frobenius(matrix) -> float:
    """Square root of the sum of the squares of all entries."""
    return math.sqrt(sum(v * v for row in matrix for v in row))


# ------------------------------------------------------------------ the model itself


@dataclass
class Run:
    """One sequence through the whole model, everything kept."""

    ids: list
    streams: list  # [layer + 1] of [pos, d_model]: before each layer, and at the end
    scales: list  # [layer + 1] of [pos]: of each layer's LayerNorm and of the final one
    scores: list  # [layer][head] of [query, key], without the mask
    patterns: list  # [layer][head] of [query, key]
    logits: np.ndarray  # [pos, d_vocab]


def forward(w: dict, ids) -> Run:
    """The model, token by token: embed, then per layer LayerNorm and attention, then unembed."""
    n, (layers, heads, _, d_head) = len(ids), np.shape(w["W_Q"])
    x = np.array([w["W_E"][t] + w["W_pos"][i] for i, t in enumerate(ids)])
    run = Run(list(ids), [x], [], [], [], np.zeros((n, len(w["b_U"]))))
    for layer in range(layers):
        scale, read = normalised(x, w, "ln_w", "ln_b", layer)
        written = np.zeros_like(x)
        run.scores.append([])
        run.patterns.append([])
        for h in range(heads):
            q, k, v = ([r @ w[f"W_{name}"][layer][h] + w[f"b_{name}"][layer][h] for r in read]
                       for name in "QKV")
            scores = np.array([[q[i] @ k[j] / math.sqrt(d_head) for j in range(n)]
                               for i in range(n)])
            A = causal_pattern(scores)
            for i in range(n):
                z = sum(A[i, j] * v[j] for j in range(i + 1))
                written[i] += z @ w["W_O"][layer][h]
            run.scores[layer].append(scores)
            run.patterns[layer].append(A)
        x = x + written + w["b_O"][layer]
        run.scales.append(scale)
        run.streams.append(x)
    scale, read = normalised(x, w, "ln_final_w", "ln_final_b", None)
    run.scales.append(scale)
    for i in range(n):
        run.logits[i] = read[i] @ w["W_U"] + w["b_U"]
    return run


def normalised(x, w: dict, weight: str, bias: str, layer: int | None):
    """LayerNorm at every position, with its own weight and bias where these are not folded.

    Returns the scales [pos] and what the next matrix reads [pos, d_model].
    """
    scale = np.array([norm_scale(v, w["eps"]) for v in x])
    read = np.array([centred(v) / s for v, s in zip(x, scale)])
    if weight in w:
        gain, shift = (w[k] if layer is None else w[k][layer] for k in (weight, bias))
        read = read * gain + shift
    return scale, read


# ------------------------------------------------------------------ 2. path expansion


def head_output(A, x, scale, W_V, W_O):
    """out_i = sum over j <= i of A_ij (cen(x_j) / s_j W_V) W_O, A and s held."""
    out = np.zeros_like(x)
    for i in range(len(x)):
        for j in range(i + 1):
            out[i] += A[i, j] * (centred(x[j]) / scale[j] @ W_V @ W_O)
    return out


def constant_of(w: dict, layer: int):
    """b_O, and b_V W_O of every head: the rows of a pattern add up to 1, so it adds b_V once."""
    return w["b_O"][layer] + sum(b @ W for b, W in zip(w["b_V"][layer], w["W_O"][layer]))


def heads_of(w: dict, layers) -> list[tuple]:
    return [(layer, h) for layer in layers for h in range(len(w["W_O"][0]))]


def readers(w: dict) -> list[tuple]:
    return heads_of(w, range(1, len(w["W_O"])))


def writers(w: dict) -> list[tuple]:
    return heads_of(w, range(len(w["W_O"]) - 1))


def pairs(w: dict) -> list[tuple]:
    return [(r, wr) for r in readers(w) for wr in writers(w) if wr[0] < r[0]]


def table(w: dict, of_pair: dict) -> list:
    """Rows of readers by columns of writers."""
    return [[of_pair.get((r, wr)) for wr in writers(w)] for r in readers(w)]


def name(head: tuple) -> str:
    return f"{head[0]}.{head[1]}"


def unmoved(w: dict, run: Run, layer: int, bias_is_moved: bool) -> np.ndarray:
    """x0 and the constants of the layers before `layer`, but for those that count as moved; that of
    the last layer, which no head reads, never does."""
    last = len(w["W_O"]) - 1
    stream = run.streams[0].copy()
    for k in range(layer):
        if k == last or not bias_is_moved:
            stream = stream + constant_of(w, k)
    return stream


def terms(w: dict, run: Run, bias_is_moved: bool = False) -> dict:
    """Every path's term, [pos, d_model] each, for any number of layers.

    ()                        x0 + all constants
    ((l, h),)                 head (l, h) reading x0 + the constants of the layers before l
    ((l, h), (m, g))          head (m, g) reading what head (l, h) wrote; and so on

    With bias_is_moved the constant of a layer but the last is written by a path of its own,
    ((l, "bias"),), and later heads read it from there: ((l, "bias"), (m, g)).
    """
    layers, found = len(w["W_O"]), {}
    for layer in range(layers):
        read = {(): unmoved(w, run, layer, bias_is_moved)} | found
        if bias_is_moved and layer < layers - 1:
            found[((layer, "bias"),)] = np.zeros_like(run.streams[0]) + constant_of(w, layer)
        for (path, stream), h in itertools.product(read.items(), range(len(w["W_O"][0]))):
            found[*path, (layer, h)] = head_output(
                run.patterns[layer][h], stream, run.scales[layer], w["W_V"][layer][h],
                w["W_O"][layer][h])
    return {(): unmoved(w, run, layers, bias_is_moved)} | found


def moved_before(found: dict, layer: int):
    """The sum of all paths through one head or more, all of them before `layer`."""
    return sum(term for path, term in found.items() if path and path[-1][0] < layer)


def up_to(order: int, found: dict):
    """The sum of all terms that run through at most `order` heads."""
    return sum(term for path, term in found.items() if len(path) <= order)


def is_virtual(path: tuple) -> bool:
    """A head on a head of an earlier layer."""
    return len(path) == 2 and path[0][1] != "bias"


def partial_logits(w: dict, run: Run, stream):
    """cen(y) / s_final W_U + b_U, s_final of the full run."""
    return np.array([centred(y) / s @ w["W_U"] + w["b_U"]
                     for y, s in zip(stream, run.scales[-1])])


def path_expansion(w: dict, runs: list, bias_is_moved: bool = False) -> dict:
    """Terms against the model: the stream before every layer but the first, and every logit."""
    layers, stream_diff, logit_diff, n_terms = len(w["W_O"]), [], 0.0, 0
    for run in runs:
        found = terms(w, run, bias_is_moved)
        n_terms = sum(not path or path[0][1] != "bias" for path in found)
        for layer in range(1, layers):
            before = unmoved(w, run, layer, bias_is_moved) + moved_before(found, layer)
            stream_diff.append(abs(before - run.streams[layer]).max())
        ours = partial_logits(w, run, up_to(layers, found))
        logit_diff = max(logit_diff, abs(ours - run.logits).max())
    return {"n_terms": n_terms, "stream_max_abs_diff": max(stream_diff, default=None),
            "logits_max_abs_diff": logit_diff,
            "logits_min": min(run.logits.min() for run in runs),
            "logits_max": max(run.logits.max() for run in runs)}


# ------------------------------------------------------------------ 3. term importance


def loss_of_logits(logits, ids) -> float:
    """Mean over positions 1.. of -log p(token): position i predicts token i + 1."""
    total = 0.0
    for i in range(len(ids) - 1):
        high = max(logits[i])
        log_sum = high + math.log(sum(math.exp(v - high) for v in logits[i]))
        total += log_sum - logits[i][ids[i + 1]]
    return total / (len(ids) - 1)


def virtual_from(w: dict, run: Run, is_read, bias_is_moved: bool = False) -> np.ndarray:
    """All virtual heads of order 2, the writing heads reading the source positions j with
    is_read(j) only."""
    total = np.zeros_like(run.streams[0])
    for l1, h1 in writers(w):
        A = run.patterns[l1][h1].copy()
        for j in range(len(A)):
            if not is_read(j):
                A[:, j] = 0
        wrote = head_output(A, unmoved(w, run, l1, bias_is_moved), run.scales[l1],
                            w["W_V"][l1][h1], w["W_O"][l1][h1])
        for l2, h2 in readers(w):
            if l1 < l2:
                total += head_output(run.patterns[l2][h2], wrote, run.scales[l2], w["W_V"][l2][h2],
                                     w["W_O"][l2][h2])
    return total


def kept_streams(w: dict, run: Run, found: dict, start, real) -> dict:
    """The final streams by what is kept of all terms."""
    layers = range(len(w["W_O"]))
    single = [found_sum(found, lambda path, layer=layer: len(path) == 1 and path[0][0] == layer)
              for layer in layers]
    streams = {f"order {n}": up_to(n, found) for n in range(len(layers) + 1)}
    streams |= {"start": up_to(1, found) + start, "real": up_to(1, found) + real,
                "start in direct": up_to(0, found) + start}
    for layer in layers:
        streams["alone", layer] = found[()] + single[layer]
        streams["without", layer] = up_to(1, found) - single[layer]
    full = up_to(len(layers), found)
    return streams | {(r, wr): full - found[wr, r] for r, wr in pairs(w)}


def found_sum(found: dict, is_wanted) -> np.ndarray:
    """The sum of the terms of all paths that are wanted."""
    return sum((term for path, term in found.items() if is_wanted(path)),
               np.zeros_like(found[()]))


def sequence_losses(w: dict, run: Run, bias_is_moved: bool) -> tuple[dict, float]:
    """Losses of one sequence by what is kept, and how far start + real is from all virtual."""
    found = terms(w, run, bias_is_moved)
    start = virtual_from(w, run, lambda j: j == 0, bias_is_moved)
    real = virtual_from(w, run, lambda j: j != 0, bias_is_moved)
    losses = {key: loss_of_logits(partial_logits(w, run, stream), run.ids)
              for key, stream in kept_streams(w, run, found, start, real).items()}
    losses["model"] = loss_of_logits(run.logits, run.ids)
    return losses, abs(start + real - found_sum(found, is_virtual)).max()


def mean(values) -> float:
    return sum(values) / len(values)


def standard_deviation(values) -> float:
    """With n - 1 below."""
    middle = mean(values)
    return math.sqrt(sum((v - middle) ** 2 for v in values) / (len(values) - 1))


def term_importance(w: dict, runs: list, bias_is_moved: bool = False,
                    median: str = "middle two") -> dict:
    """Losses by order and their differences; a difference is paired, sequence by sequence."""
    per_sequence, checks = zip(*(sequence_losses(w, run, bias_is_moved) for run in runs))
    layers, uniform = len(w["W_O"]), math.log(len(w["b_U"]))

    def change(to, before):
        """Mean and standard error over the sequences of loss(to) - loss(before)."""
        d = [({"uniform": uniform} | s)[to] - ({"uniform": uniform} | s)[before]
             for s in per_sequence]
        return mean(d), standard_deviation(d) / math.sqrt(len(d))

    found = losses_by_order(w, runs, per_sequence, change) | {"uniform": uniform}
    for layer in range(layers):
        found[f"layer{layer}"] = named(vs_direct=change(("alone", layer), "order 0"),
                                       given_other=change("order 1", ("without", layer)))
    deviations = [logit_deviations(w, run, terms(w, run, bias_is_moved)) for run in runs]
    found["logit_sd_by_order"] = [mean(sum(of_order, [])) for of_order in zip(*deviations)]
    if layers > 1:
        shifted = ["start in direct", "start", *(f"order {n}" for n in range(2, layers + 1))]
        found["loss_by_order_start_direct"] = [mean([s[key] for s in per_sequence])
                                               for key in shifted]
        found |= removals(w, {pair: change(pair, f"order {layers}") for pair in pairs(w)}, median)
        found |= named(start_delta=change("start", "order 1"), real_delta=change("real", "order 1"))
        found["split_check"] = max(checks)
    return found


def logit_deviations(w: dict, run: Run, found: dict) -> list:
    """[order][pos]: standard deviation over the vocabulary of the logits of the terms up to an
    order; with the number of tokens below."""
    out = []
    for order in range(len(w["W_O"]) + 1):
        out.append([])
        for logits in partial_logits(w, run, up_to(order, found)):
            middle = mean(logits)
            out[-1].append(math.sqrt(sum((v - middle) ** 2 for v in logits) / len(logits)))
    return out


def losses_by_order(w: dict, runs: list, per_sequence: tuple, change) -> dict:
    layers = len(w["W_O"])
    orders = ["uniform", *(f"order {n}" for n in range(layers + 1))]
    marginal, se = zip(*(change(to, before) for before, to in itertools.pairwise(orders)))
    n_paths = [sum(len(path) == n for path in terms(w, runs[0])) for n in range(layers + 1)]
    return {
        "loss_by_order": [mean([s[order] for s in per_sequence]) for order in orders[1:]],
        "loss_model": mean([s["model"] for s in per_sequence]),
        "marginal": list(marginal), "marginal_se": list(se),
        "per_term": [m / n for m, n in zip(marginal, n_paths)]}


def removals(w: dict, removed: dict, median: str) -> dict:
    """What the (mean, standard error) of each pair's removal amount to."""
    ranked = sorted(((removed[pair][0], pair) for pair in removed), reverse=True)
    costs = sorted(cost for cost, _ in ranked)
    lower, upper = costs[(len(costs) - 1) // 2], costs[len(costs) // 2]
    return {
        "virtual_removed": table(w, {pair: cost for pair, (cost, _) in removed.items()}),
        "virtual_removed_se": table(w, {pair: se for pair, (_, se) in removed.items()}),
        "virtual_largest": [named_pair(pair) | {"loss_increase": cost}
                            for cost, pair in ranked[:5]],
        "virtual_above_0_01": sum(cost > 0.01 for cost in costs),
        "virtual_median": lower if median == "lower" else (lower + upper) / 2}


def named_pair(pair: tuple) -> dict:
    return {"reader": name(pair[0]), "writer": name(pair[1])}


def named(**changes) -> dict:
    """{name: mean, name_se: standard error} of each change."""
    return {name: m for name, (m, _) in changes.items()} | {
        f"{name}_se": se for name, (_, se) in changes.items()}


# ------------------------------------------------------------------ 4. composition


def over(product: float, *norms: float) -> float | None:
    """product / the norms; None for a dead head, whose norm is 0."""
    return product / math.prod(norms) if all(norms) else None


def composition_score(W_V1, W_O1, first, second) -> float | None:
    """||W_V1 W_O1 first second|| / (||first second|| ||W_V1 W_O1||), all d_model x d_model.

    K: first, second = W_K2, W_Q2^T;  Q: W_Q2, W_K2^T;  V: W_V2, W_O2.
    """
    wrote, reads = W_V1 @ W_O1, first @ second
    return over(frobenius(wrote @ reads), frobenius(reads), frobenius(wrote))


def first_published_score(W_V1, W_O1, first, second) -> float | None:
    """||second W_V1 W_O1 first|| over the same norms: the factors moved round by one."""
    wrote, reads = W_V1 @ W_O1, first @ second
    return over(frobenius(second @ W_V1 @ W_O1 @ first), frobenius(reads), frobenius(wrote))


def composition(w: dict, runs: list, draws: list) -> dict:
    """Scores of all pairs by both forms, and the mean attentions of the writing heads.

    draws: four random d_model x d_head factors a pair, A, B, C, D: the score of A B^T -> C D^T.
    """
    corrected = composition_by(composition_score, w, draws)
    first = composition_by(first_published_score, w, draws, corrected["baseline"]["sd"])
    return corrected | {"first_published": first,
                        "prev_token": [mean_at_distance(runs, h, 1) for h in writers(w)],
                        "two_back": [mean_at_distance(runs, h, 2) for h in writers(w)],
                        "constant_share": [constant_share(w, runs, h)
                                           for h in range(len(w["W_O"][0]))],
                        "start_token": [mean([row[0] for run in runs
                                              for row in run.patterns[layer][h]])
                                        for layer, h in writers(w)]}


def constant_share(w: dict, runs: list, head: int) -> float | None:
    """|mean over positions|^2 / mean of |o|^2, o what a head of layer 0 writes at a position."""
    o = [v for run in runs for v in head_output(
        run.patterns[0][head], run.streams[0], run.scales[0], w["W_V"][0][head], w["W_O"][0][head])]
    middle = sum(o) / len(o)
    return over(middle @ middle, sum(v @ v for v in o) / len(o))


def composition_by(score, w: dict, draws: list, corrected_sd: float | None = None) -> dict:
    """The scores of all pairs by one form, and its random baseline. A score counts 0.05 above the
    baseline's mean; in another form than the corrected one, as many standard deviations above."""
    drawn = [score(A, B.T, C, D.T) for A, B, C, D in draws]
    sd = standard_deviation(drawn)
    margin = 0.05 if corrected_sd is None else 0.05 * sd / corrected_sd
    form = {"baseline": {"mean": mean(drawn), "sd": sd, "n": len(drawn), "margin": margin}}
    factors = {"Q": lambda h: (w["W_Q"][h], w["W_K"][h].T),
               "K": lambda h: (w["W_K"][h], w["W_Q"][h].T),
               "V": lambda h: (w["W_V"][h], w["W_O"][h])}
    for kind, read in factors.items():
        scores = {(r, wr): score(w["W_V"][wr], w["W_O"][wr], *read(r)) for r, wr in pairs(w)}
        form[kind] = score_summary(w, scores, **form["baseline"])
    return form


def score_summary(w: dict, scores: dict, mean: float, sd: float, n: int, margin: float) -> dict:
    """Scores of the pairs against the mean and spread of their random baseline."""
    known = {pair: score for pair, score in scores.items() if score is not None}
    by_writer = [[score for (_, wr), score in known.items() if wr == writer]
                 for writer in writers(w)]
    best = max(known, key=known.get, default=None)
    return {"scores": table(w, scores), "max": known.get(best),
            "max_pair": named_pair(best) if best else {"reader": None, "writer": None},
            "mean": sum(known.values()) / len(known) if known else None,
            "n_above": sum(score > mean + margin for score in known.values()),
            "mean_by_writer": [sum(column) / len(column) if column else None
                               for column in by_writer],
            "z": table(w, {pair: (score - mean) / sd for pair, score in known.items()})}


def mean_at_distance(runs: list, head: tuple, back: int) -> float:
    """Mean of A[i, i - back] over all rows i >= back of all sequences."""
    return mean([run.patterns[head[0]][head[1]][i, i - back] for run in runs
                 for i in range(back, len(run.ids))])


# ------------------------------------------------------------------ 5. attention scores


def score_groups(w: dict, run: Run, head: tuple, bias_is_moved: bool = False) -> dict:
    """Scores of a head by what prepared query and key, [query, key] each, no mask.

    s_ij = (q direct_i + q moved_i) . (k direct_j + k moved_j) / sqrt(d_head)

    "K of", writer: the direct query and the key that this head alone moved, reading what no head
    has moved.
    """
    (layer, h), found = head, terms(w, run, bias_is_moved)
    n, d_head, scale = len(run.ids), w["W_Q"].shape[-1], run.scales[layer]
    direct = unmoved(w, run, layer, bias_is_moved)
    moved = moved_before(found, layer)

    def read(x, name):
        return [centred(x[i]) / scale[i] @ w[f"W_{name}"][layer][h] for i in range(n)]

    q_direct, k_direct = ([v + w[f"b_{name}"][layer][h] for v in read(direct, name)]
                          for name in "QK")
    q_moved, k_moved = (read(moved, name) for name in "QK")

    def products(q, k):
        return np.array([[q[i] @ k[j] / math.sqrt(d_head) for j in range(n)] for i in range(n)])

    return {"none": products(q_direct, k_direct), "Q": products(q_moved, k_direct),
            "K": products(q_direct, k_moved), "QK": products(q_moved, k_moved)} | {
        ("K of", writer): products(q_direct, read(found[(writer,)], "K"))
        for writer in heads_of(w, range(layer))}


def total_variation_rows(p, q) -> list:
    """1/2 sum over keys of |p - q|, row by row."""
    return [sum(abs(a - b) for a, b in zip(p[i], q[i])) / 2 for i in range(len(p))]


def attention_groups(w: dict, runs: list, bias_is_moved: bool = False) -> dict:
    """Change of every reading head's pattern without one group, or with the direct group alone."""
    worst = 0.0
    tv = {name: [] for name in ("without_K", "without_Q", "without_QK", "none_alone")}
    of_pair = {}
    for layer, h in readers(w):
        earlier, rows = heads_of(w, range(layer)), {}
        for run in runs:
            g = score_groups(w, run, (layer, h), bias_is_moved)
            total = g["none"] + g["Q"] + g["K"] + g["QK"]
            for i in range(len(run.ids)):
                for j in range(i + 1):
                    worst = max(worst, abs(total[i, j] - run.scores[layer][h][i, j]))
            left = {"without_K": total - g["K"], "without_Q": total - g["Q"],
                    "without_QK": total - g["QK"], "none_alone": g["none"]}
            left |= {writer: total - g["K of", writer] for writer in earlier}
            for which, scores in left.items():
                rows.setdefault(which, []).extend(
                    total_variation_rows(causal_pattern(scores), run.patterns[layer][h]))
        for which, values in tv.items():
            values.append(mean(rows[which]))
        of_pair |= {((layer, h), writer): mean(rows[writer]) for writer in earlier}
    return {"max_abs_diff": worst, "tv": tv, "tv_without_K_of_head": table(w, of_pair)}


# ------------------------------------------------------------------ 6. virtual heads


def virtual_pattern(A1, A0) -> np.ndarray:
    """Entry ij: sum over k of A1_ik A0_kj: what i reads from k, which k has read from j."""
    n = len(A1)
    return np.array([[sum(A1[i, k] * A0[k, j] for k in range(n)) for j in range(n)]
                     for i in range(n)])


def virtual_head(runs: list, pair: tuple, distinct_places: bool) -> dict:
    """Mean weight on the start token, itself, 1 back, 2 back; and that it is a pattern."""
    (l2, h2), (l1, h1) = pair
    places: dict = {name: [] for name in ("start", 0, 1, 2)}
    row_sum_error, future = 0.0, 0.0
    for run in runs:
        A = virtual_pattern(run.patterns[l2][h2], run.patterns[l1][h1])
        n = len(A)
        for i in range(n):
            row_sum_error = max(row_sum_error, abs(sum(A[i]) - 1))
            future = max([future, *(abs(A[i, j]) for j in range(i + 1, n))])
            if distinct_places and i < 3:
                continue
            places["start"].append(A[i, 0])
            for back in range(min(i, 2) + 1):
                places[back].append(A[i, i - back])
    return named_pair(pair) | {"pattern": [mean(values) for values in places.values()],
                               "row_sum_error": row_sum_error, "future_max": future}


def virtual_heads(w: dict, runs: list, removed: list, V_scores: list,
                  distinct_places: bool = False, n_map: int = 24) -> dict:
    """All virtual heads as heads, the one that costs most and the one that looks 2 back most.

    These two with their map: rows and columns 0..n_map - 1 of the first sequence's pattern.
    """
    found = {pair: virtual_head(runs, pair, distinct_places)
             | {"v_composition": V_scores[readers(w).index(pair[0])][writers(w).index(pair[1])],
                "loss_increase": removed[readers(w).index(pair[0])][writers(w).index(pair[1])]}
             for pair in pairs(w)}
    chosen = {"most_important": max(found, key=lambda pair: found[pair]["loss_increase"]),
              "most_two_back": max(found, key=lambda pair: found[pair]["pattern"][3])}
    first, out = runs[0].patterns, {"all": list(found.values())}
    for which, ((l2, h2), (l1, h1)) in chosen.items():
        A = virtual_pattern(first[l2][h2], first[l1][h1])
        out[which] = found[chosen[which]] | {"map": [list(row[:n_map]) for row in A[:n_map]]}
    return out


def induction(w: dict, repeated_rows: list) -> dict:
    """Mean attention from each token of the second half to the one after its first occurrence.

    Over all sequences, and its standard deviation from sequence to sequence.
    """
    runs = [forward(w, ids) for ids in repeated_rows]

    def attention(run, layer, h):
        half = (len(run.ids) - 1) // 2
        return mean([run.patterns[layer][h][i, run.ids.index(run.ids[i]) + 1]
                     for i in range(1 + half, 1 + 2 * half)])

    layers, heads = np.shape(w["W_O"])[:2]
    by_run = [[[attention(run, layer, h) for run in runs] for h in range(heads)]
              for layer in range(layers)]
    return {"score": [[mean(values) for values in row] for row in by_run],
            "score_sd": [[standard_deviation(values) for values in row] for row in by_run],
            "previous_token": [[mean_at_distance(runs, (layer, h), 1) for h in range(heads)]
                               for layer in range(layers)]}


def counting(layers: int = 12, heads: int = 12) -> dict:
    """Heads and virtual heads of order 2, counted one by one."""
    all_heads = [(layer, h) for layer in range(layers) for h in range(heads)]
    return {"heads": len(all_heads),
            "layer_pairs": sum(a < b for a in range(layers) for b in range(layers)),
            "virtual_order_2": sum(a[0] < b[0] for a in all_heads for b in all_heads)}


def sections(w: dict, rows: list, draws: list, repeated_rows: list, bias_is_moved: bool = False,
             median: str = "middle two", distinct_places: bool = False) -> dict:
    """Every number of part 5, in the layout of the results file.

    Args:
        rows: lists of token ids, each from the start token on.
        draws: the random factors of the composition baseline.
        repeated_rows: lists of token ids for the induction score.
    """
    runs = [forward(w, ids) for ids in rows]
    layers, heads, d_model, d_head = np.shape(w["W_Q"])
    importance = term_importance(w, runs, bias_is_moved, median)
    found = {
        "model": {"ratio": d_head / d_model, "n_single": layers * heads,
                  "n_virtual": len(pairs(w)), "n_terms": len(terms(w, runs[0])),
                  "n_sequences": len(rows), "readers": [name(head) for head in readers(w)],
                  "writers": [name(head) for head in writers(w)]},
        "path_expansion": path_expansion(w, runs, bias_is_moved),
        "term_importance": importance,
        "induction": induction(w, repeated_rows),
        "counting": counting(),
    }
    if layers == 1:
        return found
    scores = composition(w, runs, draws)
    return found | {
        "composition": scores,
        "attention_groups": attention_groups(w, runs, bias_is_moved),
        "virtual_heads": virtual_heads(w, runs, importance["virtual_removed"],
                                       scores["V"]["scores"], distinct_places),
    }
