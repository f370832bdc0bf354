"""Part 5, two-layer models: how heads compose. Every real-model number of the article.

The same for an attention-only model of any other depth: attn-only-1l, -3l, -4l or a model folder.

    python circuits_part5.py                 # attn-only-2l on 3,072 tokens of WikiText-2
    python circuits_part5.py --model mini    # the bundled two-layer model on its sample text

Writes results/part5.json (every number, full precision), results/part5_stdout.txt (the log) and
figures/part5_*.png and .svg; for another model in results/<model>/ and figures/<model>/. About
half a minute on two CPU cores at the public size.

Each section of the article is a compute_x that returns plain numbers and a print_x that prints the
article's lines from them; figures/part5.py draws their pictures.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass

import torch

import common
from common import Head
from figures import part5 as pictures
from results import claims, loading, report, runner, sweep
from results.claims import number
from results.report import Section

PUBLISHED_MODEL = "attn-only-2l"
N_TOKENS = 3072  # of the text, BOS counted
THRESHOLD = 0.05  # above the random baseline, a pair counts as composing (section 4)
LOSS_THRESHOLD = 0.01  # nats; a virtual head whose removal costs more counts (section 3)
N_BASELINE = 200  # pairs of random matrices (section 4)
N_MAP = 24  # positions of a virtual head's pattern that are kept to be drawn (section 6)
N_INDUCTION_ROWS = 8  # repeated random sequences (section 6)
# What the article leaves open; the first value is ours (--sweep tries the others).
OPEN = {
    "seq_len": [256, 128, 384, 512, 768, 1024],  # tokens of a sequence
    "bos_counted": [True, False],  # the start token is one of them
    "join": ["\n\n", "\n", "", "end-of-text"],  # between the rows of WikiText
    "keep_blank": [True, False],  # blank rows of WikiText
    "wikitext": ["wikitext-2-raw-v1", "wikitext-2-v1"],  # as written, or tokenised
    "distinct_places": [False, True],  # virtual patterns over rows i >= 3 only
    "first_row": [True, False],  # counted in total variation and in means on the start token
    "bias_is_moved": [False, True],  # b_O counts as moved by its layer, if a later one reads it
    "median": ["middle two", "lower"],  # of the removal losses
    "induction_ids": [50, 20, 100, 200],  # random tokens before they repeat
}
CHOICES = {name: values[0] for name, values in OPEN.items()}


@dataclass(frozen=True)
class Analysis:
    """What every section reads."""

    run: common.FrozenRun
    text: dict  # what loading.load_tokens says of the text
    choices: dict
    seed: int

    @functools.cached_property
    def paths(self) -> common.Paths:
        """The expansion, on first use: the quick search of a sweep needs none."""
        return common.expand(self.run, self.choices["bias_is_moved"])

    @functools.cached_property
    def pairs(self) -> list[tuple[Head, Head]]:
        """(reader, writer) of every virtual head of order 2."""
        return common.virtual_pairs(self.run.model)

    def table(self, values: Iterable) -> list[list]:
        """One value for each pair, as rows of reading heads by columns of writing heads; None where
        the reader does not come after the writer."""
        of_pair, model = dict(zip(self.pairs, values, strict=True)), self.run.model
        return [[of_pair.get((reader, writer)) for writer in common.writers(model)]
                for reader in common.readers(model)]

    @functools.cached_property
    def from_source(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The virtual heads' sum: what their first head read at the start token, and elsewhere."""
        start, others = slice(0, 1), slice(1, None)
        return common.virtual_from(self.paths, start), common.virtual_from(self.paths, others)

    @functools.cached_property
    def unembedded(self) -> common.Unembedded:
        """The losses of the model and of sums of terms, all terms against the model, and each
        virtual head removed. Computed on first use, since a sweep skips it when it can."""
        layers = range(len(self.run.patterns))
        streams = {f"order {n}": self.paths.stream(n) for n in range(len(layers) + 1)}
        differences: dict = {}
        for layer in layers:
            alone, others = f"layers {[layer]}", f"layers {[x for x in layers if x != layer]}"
            if alone not in differences:  # of two layers, the other one is all that is left
                streams[alone] = streams["order 0"] + self.paths.heads(layer)
                differences[others] = ("order 0", "order 1", alone)
        if self.pairs:
            self._add_sources(streams, differences)
        every_term = f"order {len(layers)}"
        streams[every_term] = streams.pop(every_term)  # the last: the removals are from it
        normed = {name: self.run.final_norm(stream) for name, stream in streams.items()}
        return common.unembed(self.run, {"model": self.run.final} | normed, differences,
                              self.paths.z_virtual, [reader for reader, _ in self.pairs])

    def _add_sources(self, streams: dict, differences: dict) -> None:
        """Each part of the virtual heads' sum, alone on top of order <= 1."""
        start, real = self.from_source
        streams["start"] = streams["order 1"] + start
        differences["direct and start"] = ("order 0", "start", "order 1")
        if self.choices["bias_is_moved"]:  # is in order 2 too: start and real are not all of it
            streams["real"] = streams["order 1"] + real
        else:
            differences["real"] = ("order 1", "order 2", "start")


def name(head: Head) -> str:
    """0.3 is head 3 of layer 0."""
    return f"{head[0]}.{head[1]}"


def pair_names(reader: Head, writer: Head) -> dict:
    return {"reader": name(reader), "writer": name(writer)}


def in_words(pair: dict) -> str:
    """A pair as the article names a virtual head: 1.6 o 0.3."""
    return f"{pair['reader']} o {pair['writer']}"


def earlier(m: dict, reader: str) -> list[tuple[int, str]]:
    """(column, name) of the heads that a head can read, in the tables of pairs."""
    return [(i, writer) for i, writer in enumerate(m["writers"])
            if int(writer.split(".")[0]) < int(reader.split(".")[0])]


def of_layers(names: list[str], values: list) -> dict[str, dict]:
    """{layer: {head: value}} of one value for each head."""
    layers: dict = {}
    for head, value in zip(names, values, strict=True):
        layers.setdefault(head.split(".")[0], {})[head] = value
    return layers


def plus_layers(layers: list[int]) -> str:
    return " + ".join(f"layer-{layer}" for layer in layers)


def lacks_pairs(m: dict, log: report.Log) -> bool:
    """Whether the model has no pairs of heads; the log then says so."""
    if m["n_layers"] == 1:
        log("  no pairs of heads in one layer")
    return m["n_layers"] == 1


def mean_se(x: torch.Tensor) -> tuple[list | float, list | float | None]:
    """Mean over sequences (the last axis) and its standard error, as lists or numbers.

    The standard error is the standard deviation over sequences / sqrt(n); None for one sequence.
    """
    n = x.shape[-1]
    se = (x.std(-1) / math.sqrt(n)).tolist() if n > 1 else None
    return x.mean(-1).tolist(), se


# ------------------------------------------------------------------ 1. the model


def compute_model(a: Analysis, results: dict) -> dict:
    model, cfg = a.run.model, a.run.model.cfg
    by_order = [math.comb(cfg.n_layers, k) * cfg.n_heads**k for k in range(cfg.n_layers + 1)]
    return {"n_layers": cfg.n_layers, "n_heads": cfg.n_heads, "d_head": cfg.d_head,
            "d_model": cfg.d_model, "d_vocab": cfg.d_vocab, "ratio": cfg.d_head / cfg.d_model,
            "n_single": by_order[1], "n_virtual": len(a.pairs), "n_terms": sum(by_order),
            "n_by_order": by_order, "readers": [name(head) for head in common.readers(model)],
            "writers": [name(head) for head in common.writers(model)],
            "n_tokens": a.text["n_tokens"], "n_sequences": len(a.run.tokens),
            "seq_len": a.text["seq_len"]}


def counted_terms(m: dict, single: str) -> str:
    """16 single heads + 64 virtual heads, and the higher orders."""
    kinds = [single, "virtual heads", *(f"of order {n}" for n in range(3, m["n_layers"] + 1))]
    return " + ".join(f"{n} {kind}" for n, kind in zip(m["n_by_order"][1:], kinds))


def print_model(r: dict, results: dict, log: report.Log) -> None:
    log(f"== 1. THE MODEL AND THE NUMBER OF TERMS ({results['meta']['model']})")
    layers = "1 layer" if r["n_layers"] == 1 else f"{r['n_layers']} layers"
    log(f"  {layers} of {r['n_heads']} heads; d_head / d_model = {r['d_head']} / {r['d_model']} = "
        f"{r['ratio']:.3f}; {r['n_tokens']:,} tokens ({r['n_sequences']} x {r['seq_len']})")
    log(f"  paths to the logits: 1 direct + {counted_terms(r, 'single heads')} = "
        f"{r['n_terms']} terms")


# ------------------------------------------------------------------ 2. path expansion


def compute_path_expansion(a: Analysis, results: dict) -> dict:
    before = a.paths.sums[1:-1].sum(1) - a.run.streams[1:-1]  # each layer but the first
    logits = a.unembedded
    return {"n_terms": results["sections"]["model"]["n_terms"],
            "stream_max_abs_diff": before.abs().max().item() if len(before) else None,
            "logits_max_abs_diff": logits.max_abs_diff,
            "logits_min": logits.min, "logits_max": logits.max}


def print_path_expansion(r: dict, results: dict, log: report.Log) -> None:
    m = results["sections"]["model"]
    log("== 2. PATH EXPANSION OF THE LOGITS ON REAL TEXT (patterns and layer-norm scales frozen)")
    if m["n_layers"] > 1:
        layers = ", ".join(str(layer) for layer in range(1, m["n_layers"]))
        log(f"  stream before layer {layers} rebuilt from the terms: max |diff| = "
            f"{r['stream_max_abs_diff']:.1e}")
    log(f"  logits rebuilt as direct + {counted_terms(m, 'head terms')}: max |diff| from the model "
        f"= {r['logits_max_abs_diff']:.1e} (logits range {r['logits_min']:.1f} .. "
        f"{r['logits_max']:.1f})")


# ------------------------------------------------------------------ 3. term importance


def compute_term_importance(a: Analysis, results: dict) -> dict:
    m, losses = results["sections"]["model"], a.unembedded.losses
    loss = {name: x.mean(-1) for name, x in losses.items()}  # of each sequence
    orders = [loss[f"order {n}"] for n in range(m["n_layers"] + 1)]
    uniform = torch.full_like(orders[0], math.log(m["d_vocab"]))
    marginal, marginal_se = mean_se(torch.stack(orders) - torch.stack([uniform, *orders[:-1]]))
    return {
        "uniform": math.log(m["d_vocab"]), "loss_by_order": [x.mean().item() for x in orders],
        "loss_model": loss["model"].mean().item(), "loss_model_se": mean_se(loss["model"])[1],
        "n_sequences": len(a.run.tokens), "marginal": marginal, "marginal_se": marginal_se,
        "per_term": [change / n for change, n in zip(marginal, m["n_by_order"])],
        "logit_sd_by_order": _logit_deviations(a), **_layer_split(loss, m["n_layers"]),
        **_source_split(a, loss), **_start_as_direct(a, loss), **_removals(a),
    }


def _logit_deviations(a: Analysis) -> list[float]:
    """Standard deviation over the vocabulary of the logits of all terms up to each order, the mean
    over positions: how flat the logits of a partial sum are."""
    orders = range(len(a.run.patterns) + 1)
    normed = torch.stack([a.run.final_norm(a.paths.stream(n)) for n in orders])
    return common.logit_deviation(a.run.model, normed).tolist()


def _start_as_direct(a: Analysis, loss: dict[str, torch.Tensor]) -> dict:
    """The losses by order, with what the virtual heads do from the start token counted with the
    direct path; nothing without virtual heads."""
    if not a.pairs:
        return {}
    rest = [f"order {n}" for n in range(2, len(a.run.patterns) + 1)]
    return {"loss_by_order_start_direct": [loss[key].mean().item()
                                           for key in ("direct and start", "start", *rest)]}


def _layer_split(loss: dict[str, torch.Tensor], n_layers: int) -> dict:
    """What each layer's single heads change, in nats: alone, and given those of all other
    layers."""
    split = {}
    for layer in range(n_layers):
        others = [x for x in range(n_layers) if x != layer]
        split[f"layer{layer}"] = _changes(
            vs_direct=loss[f"layers {[layer]}"] - loss["order 0"],
            given_other=loss["order 1"] - loss[f"layers {others}"])
    return split


def _source_split(a: Analysis, loss: dict[str, torch.Tensor]) -> dict:
    """What the virtual heads change by what their first head read; nothing without virtual
    heads."""
    if not a.pairs:
        return {}
    rest = a.paths.sums[-1, 2] - sum(a.from_source)
    if a.choices["bias_is_moved"]:
        rest = rest - common.virtual_from(a.paths, slice(0, 0), bias=True)
    return {"split_check": rest.abs().max().item(), **_changes(
        start_delta=loss["start"] - loss["order 1"], real_delta=loss["real"] - loss["order 1"])}


def _changes(**losses: torch.Tensor) -> dict:
    """{name: mean, name_se: standard error} of loss differences [sequence]."""
    changes = {}
    for which, difference in losses.items():
        changes[which], changes[f"{which}_se"] = mean_se(difference)
    return changes


def _removals(a: Analysis) -> dict:
    """The loss increases of the virtual heads of order 2, removed one by one."""
    if not a.pairs:
        return {}
    cost, cost_se = mean_se(a.unembedded.loss_increase.mean(-1))
    ranked = sorted(zip(a.pairs, cost), key=lambda pair_and_cost: -pair_and_cost[1])
    flat = sorted(cost)
    lower, upper = flat[(len(flat) - 1) // 2], flat[len(flat) // 2]
    return {
        "virtual_removed": a.table(cost), "virtual_removed_se": cost_se and a.table(cost_se),
        "virtual_largest": [pair_names(*pair) | {"loss_increase": increase}
                            for pair, increase in ranked[:5]],
        "virtual_above_0_01": sum(increase > LOSS_THRESHOLD for increase in flat),
        "virtual_median": lower if a.choices["median"] == "lower" else (lower + upper) / 2,
    }


def print_term_importance(r: dict, results: dict, log: report.Log) -> None:
    m = results["sections"]["model"]
    log("== 3. TERM IMPORTANCE: LOSS WHEN ONLY SOME TERMS ARE KEPT (nats per token, lower is "
        "better)")
    log(f"  uniform guess over {m['d_vocab']:,} tokens: ln({m['d_vocab']}) = {r['uniform']:.2f}")
    for order in range(m["n_layers"] + 1):
        log(_order_line(order, r, m["n_by_order"][order]))
    log(f"  the model itself:                           {r['loss_model']:.2f}")
    if not lacks_pairs(m, log):
        _print_virtual(r, m, log)
    log("  head terms split by layer:")
    for layer in range(m["n_layers"]):
        d, others = r[f"layer{layer}"], [x for x in range(m["n_layers"]) if x != layer]
        given = f", {d['given_other']:+.2f} vs direct path + {plus_layers(others)} heads"
        log(f"    layer-{layer} heads: {d['vs_direct']:+.2f} vs direct path only"
            f"{given if others else ''}")


def _order_line(order: int, r: dict, n: int) -> str:
    """The loss of all terms up to an order, and what the order adds."""
    kind = {1: "single-head terms", 2: "virtual heads"}.get(order, f"terms of order {order}")
    label = f"order <= {order} (+ {n} {kind}):" if order else "order 0 (direct path only):"
    loss, marginal, share = (r[key][order] for key in ("loss_by_order", "marginal", "per_term"))
    return (f"  {label:44}{loss:{'5.2f' if order < 2 else '.2f'}}   marginal {marginal:+.2f}  "
            f"({share:+.{order + 2}f} per term{'' if order else ', 1 term'})")


def _print_virtual(r: dict, m: dict, log: report.Log) -> None:
    log("    largest virtual heads (h2 o h1): " + ", ".join(
        f"{in_words(v)} {v['loss_increase']:+.3f}" for v in r["virtual_largest"]))
    log(f"    virtual heads: {r['virtual_above_0_01']} of {m['n_virtual']} above "
        f"+{LOSS_THRESHOLD}; median {r['virtual_median']:+.4f}")
    first = "layer-0 head" if m["n_layers"] == 2 else "first head"
    log(f"  virtual heads split by what the {first} read (check {r['split_check']:.1e}): from "
        f"the start token {r['start_delta']:+.2f}, from real tokens {r['real_delta']:+.2f} (each "
        "added alone to order <= 1)")


# ------------------------------------------------------------------ 4. composition


def compute_composition(a: Analysis, results: dict) -> dict:
    if not a.pairs:
        return {}
    model, m = a.run.model, results["sections"]["model"]
    reading = {k: w[1:].flatten(0, 1) for k, w in (
        ("Q", model.W_Q), ("K", model.W_K), ("V", model.W_V), ("O", model.W_O.mT))}
    writing = [w[:-1].flatten(0, 1) for w in (model.W_V, model.W_O)]
    baselines = common.random_baseline(model.cfg.d_model, model.cfg.d_head, N_BASELINE, a.seed)
    out, first = ({"baseline": _baseline(b, baselines[0])} for b in baselines)
    for kind, other in (("Q", "K"), ("K", "Q"), ("V", "O")):
        args = (*writing, reading[kind], reading[other])
        out[kind] = _score_summary(common.composition_scores(*args), out["baseline"], m)
        first[kind] = _score_summary(common.first_published_scores(*args), first["baseline"], m)
    share = common.constant_share(a.paths.z_single[0], model.W_O[0])
    return out | {"first_published": first, "constant_share": common.listed(share)} | quick(a)[
        "composition"]


def first_row(a: Analysis) -> int:
    """The first query that counts; query 0 reads nothing but the start token."""
    return 0 if a.choices["first_row"] else 1


def _baseline(scores: torch.Tensor, corrected: torch.Tensor) -> dict:
    """Random scores of one form; margin: how far above their mean a score of that form counts. The
    article's THRESHOLD is the corrected form's; for the other, as many standard deviations."""
    sd, of_corrected = _spread(scores), _spread(corrected)
    return {"mean": scores.mean().item(), "sd": sd, "n": len(scores),
            "margin": THRESHOLD * (sd / of_corrected if of_corrected else 1)}


def _spread(scores: torch.Tensor) -> float:
    """The standard deviation of random scores; 0 if only rounding makes them differ."""
    sd = scores.std().item()
    return sd if sd > 1e-12 * scores.mean().item() else 0.0


def _score_summary(scores: torch.Tensor, baseline: dict, m: dict) -> dict:
    """Scores [reader, writer] against their own random baseline. Null where there is none: the
    reader does not come after the writer, one of them is dead, or the baseline is constant (z)."""
    scores = scores.cpu()
    for row, reader in zip(scores, m["readers"]):
        row[len(earlier(m, reader)):] = math.nan  # the writers of later layers stand at its end
    known = scores[~scores.isnan()]
    row, column = divmod(scores.nan_to_num(-1).argmax().item(), scores.shape[1])
    pair = {"reader": m["readers"][row], "writer": m["writers"][column]}
    z = (scores - baseline["mean"]) / baseline["sd"] if baseline["sd"] else scores * math.nan
    return {"scores": common.listed(scores), "max": common.listed(scores[row, column]),
            "max_pair": pair if len(known) else dict.fromkeys(pair),
            "mean": common.listed(known.mean()),
            "mean_by_writer": common.listed(scores.nanmean(0)),
            "n_above": int((known > baseline["mean"] + baseline["margin"]).sum()),
            "z": common.listed(z)}


def print_composition(r: dict, results: dict, log: report.Log) -> None:
    m = results["sections"]["model"]
    two = m["n_layers"] <= 2
    log("== 4. COMPOSITION SCORES  ||W_A W_B||_F / (||W_A||_F ||W_B||_F)  (paper shapes, "
        f"{'layer-0' if two else 'earlier'} head h1 -> {'layer-1' if two else 'later'} head h2)")
    if lacks_pairs(m, log):
        return
    first = r["first_published"]
    log(f"  random baseline (two random rank-{m['d_head']} {m['d_model']} x {m['d_model']} "
        f"matrices, mean of {r['baseline']['n']}): {r['baseline']['mean']:.4f}")
    for kind in "QKV":
        log(f"  {kind}-composition: {_score_line(r[kind], m, str(THRESHOLD))}")
    for what, key in (("the previous token", "prev_token"), ("the start token", "start_token"),
                      ("two tokens back", "two_back")):
        for layer, values in of_layers(m["writers"], r[key]).items():
            log(f"  layer-{layer} heads, mean attention to {what}: {_by_head(values, 2)}")
    for kind in "QKV":
        for layer, values in of_layers(m["writers"], r[kind]["mean_by_writer"]).items():
            log(f"  {kind}-composition, mean over the {_later_heads(m, int(layer))}, per "
                f"layer-{layer} head: {_by_head(values, 3)}")
    log("  as first published, before the correction (the first factor moved to the end); random "
        f"baseline: {first['baseline']['mean']:.4f}")
    margin = f"{first['baseline']['margin']:.3f}"
    for kind in "QKV":
        log(f"    {kind}-composition: {_score_line(first[kind], m, margin)}")


def _later_heads(m: dict, layer: int) -> str:
    """8 layer-1 heads; or 16 later heads, of more than one layer."""
    last = m["n_layers"] - 1
    which = f"layer-{last}" if layer == last - 1 else "later"
    return f"{(last - layer) * m['n_heads']} {which} heads"


def _by_head(values: dict[str, float], digits: int) -> str:
    """One value for each head: 0.0 0.12, 0.1 0.34, ..."""
    return ", ".join(f"{head} {number(v, f'.{digits}f')}" for head, v in values.items())


def _score_line(s: dict, m: dict, margin: str) -> str:
    pair = s["max_pair"]
    which = f" (head {pair['reader']} reads head {pair['writer']})" if pair["reader"] else ""
    return (f"max {number(s['max'], '.3f')}{which}, mean {number(s['mean'], '.3f')}, pairs above "
            f"baseline + {margin}: {s['n_above']} of {m['n_virtual']}")


def compute_attention_groups(a: Analysis, results: dict) -> dict:
    if not a.pairs:
        return {}
    run, worst = a.run, 0.0
    past = torch.ones(run.scores.shape[-2:], dtype=torch.bool, device=run.scores.device).tril()
    tv: dict = {"without_K": [], "without_Q": [], "without_QK": [], "none_alone": []}
    tv_of_pair = []
    for layer, head in common.progress(common.readers(run.model), "score groups"):
        g, pattern = common.score_groups(a.paths, layer, head), run.patterns[layer, head]
        full = g.total()
        worst = max(worst, (full - run.scores[layer, head])[:, past].abs().max().item())
        for without, rest in zip(tv, (full - g.K, full - g.Q, full - g.QK, g.none)):
            tv[without].append(pattern_change(rest, pattern, first_row(a)).item())
        tv_of_pair += pattern_change(full - g.K_of_head, pattern, first_row(a)).tolist()
    return {"max_abs_diff": worst, "tv": tv, "tv_without_K_of_head": a.table(tv_of_pair)}


def pattern_change(scores: torch.Tensor, pattern: torch.Tensor, first: int) -> torch.Tensor:
    """Total variation between the pattern that unmasked scores give and the model's, from the
    query `first` on."""
    changed = common.softmax_causal(scores)
    return common.total_variation(changed[..., first:, :], pattern[..., first:, :])


def print_attention_groups(r: dict, results: dict, log: report.Log) -> None:
    m = results["sections"]["model"]
    two, readers = m["n_layers"] <= 2, m["readers"]
    log(f"== 5. ATTENTION SCORES OF THE {'LAYER-1' if two else 'LATER'} HEADS IN FOUR GROUPS "
        f"({'layer-0' if two else 'all'} patterns frozen; change of the pattern: total variation)")
    if lacks_pairs(m, log):
        return
    log("  no-composition + Q + K + Q-and-K terms vs the model's scores: max |diff| = "
        f"{r['max_abs_diff']:.1e}")
    tv = r["tv"]
    for i, head in enumerate(readers):
        log(f"    head {head}: without K terms {tv['without_K'][i]:.2f}, without Q terms "
            f"{tv['without_Q'][i]:.2f}, without Q-and-K {tv['without_QK'][i]:.2f}; no-composition "
            f"term alone {tv['none_alone'][i]:.2f}")
    log(f"  without the K term of one {'layer-0' if two else 'earlier'} head alone:")
    for head, row in zip(readers, r["tv_without_K_of_head"]):
        log(f"    head {head}: " + ", ".join(f"{w} {row[j]:.2f}" for j, w in earlier(m, head)))


# ------------------------------------------------------------------ 6. virtual heads


def _virtual_pattern(a: Analysis, reader: Head, writer: Head) -> dict:
    """The pattern A[reader] A[writer] seen as one head's: where it looks, and that it is one."""
    product = a.run.patterns[reader] @ a.run.patterns[writer]
    rows = 3 if a.choices["distinct_places"] else 0
    seen = product[:, rows:]
    look = [seen[..., 0].mean().item()]
    look += [seen.diagonal(rows - k, -2, -1).mean().item() for k in range(3)]
    return {**pair_names(reader, writer), "pattern": look,
            "row_sum_error": (product.sum(-1) - 1).abs().max().item(),
            "future_max": product.triu(1).abs().max().item()}


def with_map(a: Analysis, v: dict) -> dict:
    """A virtual head with its pattern on the first tokens of the first sequence."""
    (l2, h2), (l1, h1) = (map(int, v[role].split(".")) for role in ("reader", "writer"))
    product = a.run.patterns[l2, h2, 0] @ a.run.patterns[l1, h1, 0]
    return v | {"map": product[:N_MAP, :N_MAP].tolist(), "map_tokens": [
        loading.token_text(a.run.model, i) for i in a.run.tokens[0, :N_MAP].tolist()]}


def compute_virtual_heads(a: Analysis, results: dict) -> dict:
    if not a.pairs:
        return {}
    s, heads = results["sections"], []
    tables = a.table(range(len(a.pairs))), s["composition"]["V"]["scores"], s[
        "term_importance"]["virtual_removed"]
    for pair, V, increase in _known_pairs(*tables):
        heads.append(_virtual_pattern(a, *a.pairs[pair])
                     | {"v_composition": V, "loss_increase": increase})
    return {"most_important": with_map(a, max(heads, key=lambda v: v["loss_increase"])),
            "most_two_back": with_map(a, max(heads, key=lambda v: v["pattern"][3])), "all": heads}


def _known_pairs(first: list[list], *others: list[list]) -> list[tuple]:
    """The values of several tables, pair by pair, where the first one has a value."""
    return [values for rows in zip(first, *others) for values in zip(*rows)
            if values[0] is not None]


def print_virtual_heads(r: dict, results: dict, log: report.Log) -> None:
    log("== 6. VIRTUAL HEADS AS HEADS: PATTERN A^h2 A^h1 (mean weight on the start token, on the "
        "token itself, 1 back, 2 back)")
    if lacks_pairs(results["sections"]["model"], log):
        return
    for label, key in (("most important", "most_important"), ("most two-back", "most_two_back")):
        v = r[key]
        log(f"  {label}: {in_words(v)}: pattern {[round(x, 2) for x in v['pattern']]}; "
            f"rows add up to 1 (max |sum - 1| {v['row_sum_error']:.1e}); future entries "
            f"{v['future_max']:g}; V-composition score {number(v['v_composition'], '.3f')}; "
            f"removing it: loss {v['loss_increase']:+.3f}")


def compute_induction(a: Analysis, results: dict) -> dict:
    model = a.run.model
    n = min(a.choices["induction_ids"], (model.cfg.n_ctx - 1) // 2)
    tokens = common.repeated_tokens(model, n, N_INDUCTION_ROWS, a.seed)
    run = common.freeze(model, tokens)
    scores = common.induction_scores(run)
    previous = common.mean_attention(run.patterns, 1)  # for a second source, which has it too
    return {"score": scores.mean(-1).tolist(), "score_sd": scores.std(-1).tolist(),
            "previous_token": previous.tolist(),
            "n_ids": (tokens.shape[1] - 1) // 2, "n_rows": N_INDUCTION_ROWS}


def print_induction(r: dict, results: dict, log: report.Log) -> None:
    log(f"  induction scores ({r['n_rows']} sequences of {r['n_ids']} random tokens, twice):")
    for layer, row in enumerate(r["score"]):
        log(f"    {_by_head({name((layer, h)): v for h, v in enumerate(row)}, 2)}")


def compute_counting(a: Analysis, results: dict) -> dict:
    """How many virtual heads of order 2 there are in a model of 12 layers of 12 heads."""
    layers, heads = 12, 12
    pairs_of_layers = layers * (layers - 1) // 2
    return {"heads": layers * heads, "layer_pairs": pairs_of_layers,
            "virtual_order_2": pairs_of_layers * heads**2}


def print_counting(r: dict, results: dict, log: report.Log) -> None:
    log(f"  12 layers of 12 heads: {r['heads']} heads, {r['layer_pairs']} pairs of layers, "
        f"{r['virtual_order_2']:,} virtual heads of order 2")


# ------------------------------------------------------------------ what the text derives


def compute_claims(a: Analysis, results: dict) -> dict:
    return claims.part_5(results["sections"], THRESHOLD, LOSS_THRESHOLD)


def print_claims(r: dict, results: dict, log: report.Log) -> None:
    if results["sections"]["model"]["n_layers"] == 2:
        claims.print_claims(r, claims.PART_5, log)


# ------------------------------------------------------------------ beyond the article

CAUSAL_TV = 0.1  # total variation; without its K term, a pair that changes a pattern more is causal


def rank_correlation(x: list[list[float]], y: list[list[float]]) -> float | None:
    """Spearman's correlation of two tables of pairs, over the pairs that both have; None if one of
    them is constant."""
    both = [(a, b) for a, b in _known_pairs(x, y) if b is not None]
    a, b = (_ranks(column) for column in torch.tensor(both, dtype=torch.float64).reshape(-1, 2).T)
    size = a.norm() * b.norm()
    return (a @ b / size).item() if size > 0 else None


def _ranks(values: torch.Tensor) -> torch.Tensor:
    """Ranks minus their mean; equal values share their mean rank."""
    below = (values[:, None] > values).sum(1)
    equal = (values[:, None] == values).sum(1)
    ranks = below + (equal.double() + 1) / 2
    return ranks - ranks.mean()


def _above(scores: list[list[float]], least: float, m: dict) -> list[dict]:
    """The pairs with more than `least`."""
    return [{"reader": reader, "writer": writer} for reader, row in zip(m["readers"], scores)
            for writer, v in zip(m["writers"], row) if v is not None and v > least]


def compute_correction(a: Analysis, results: dict) -> dict:
    """What the correction of the composition score changes, and what the causal tests say.

    A form calls a pair if its score exceeds the baseline of that form by the margin of that form.
    The causal test of K-composition removes the K term of one writing head from the scores of the
    reading head; that of V-composition removes the virtual head. Q-composition has none here.
    """
    s, m = results["sections"], results["sections"]["model"]
    if m["n_layers"] == 1:
        return {}
    tests = {"K": (s["attention_groups"]["tv_without_K_of_head"], CAUSAL_TV),
             "V": (s["term_importance"]["virtual_removed"], LOSS_THRESHOLD)}
    forms = {"corrected": s["composition"],
             "first_published": s["composition"]["first_published"]}
    found = {}
    for kind in "QKV":
        maps = {name: form[kind]["scores"] for name, form in forms.items()}
        called = {name: _above(maps[name], form["baseline"]["mean"] + form["baseline"]["margin"],
                               m)
                  for name, form in forms.items()}
        found[kind] = {"rank_correlation": rank_correlation(*maps.values()), "called": called}
        if kind in tests:
            found[kind] |= _causal(maps, called, *tests[kind], m)
    return found


def _causal(maps: dict, called: dict, changes: list[list[float]], least: float,
            m: dict) -> dict:
    """The pairs whose removal changes more than `least`, and which calls they support."""
    causal = _above(changes, least, m)
    return {"causal": causal, "causal_threshold": least,
            "supported": {name: [pair for pair in those if pair in causal]
                          for name, those in called.items()},
            "rank_correlation_with_change": {name: rank_correlation(scores, changes)
                                             for name, scores in maps.items()}}


def print_correction(r: dict, results: dict, log: report.Log) -> None:
    m = results["sections"]["model"]
    log("== BEYOND THE ARTICLE: WHAT THE CORRECTION OF THE COMPOSITION SCORE CHANGES")
    if lacks_pairs(m, log):
        return
    c = results["sections"]["composition"]
    log("  corrected | as first published; * above the formula's own random baseline by "
        f"{THRESHOLD} | {c['first_published']['baseline']['margin']:.3f}, as many of its standard "
        "deviations")
    for kind in "QKV":
        log(f"  {kind}-composition: rank correlation of the two maps "
            f"{number(r[kind]['rank_correlation'], '+.2f')}")
        calls = r[kind]["called"].values()
        for head, *rows in zip(m["readers"], c[kind]["scores"],
                               c["first_published"][kind]["scores"]):
            sides = [_marked(row, head, called, m) for row, called in zip(rows, calls)]
            log(f"    head {head}: {' | '.join(sides).rstrip()}")
    for kind, what in (("K", "its K term alone removed changes the pattern by more than"),
                       ("V", "the virtual head removed costs more nats than")):
        _print_causal(kind, what, r[kind], m, log)


def _print_causal(kind: str, what: str, k: dict, m: dict, log: report.Log) -> None:
    log(f"  {kind}, causal test ({what} {k['causal_threshold']}): {len(k['causal'])} of "
        f"{m['n_virtual']} pairs pass (in brackets: a called one that does not)")
    for form, label in (("corrected", "corrected"), ("first_published", "as first published")):
        log(f"    {label}: rank correlation of score and change "
            f"{number(k['rank_correlation_with_change'][form], '+.2f')}; called "
            f"{pair_list(k, form)}")


def _marked(row: list[float], reader: str, called: list[dict], m: dict) -> str:
    """The scores of one reading head; * after those that are called."""
    marks = ["*" if {"reader": reader, "writer": writer} in called else " "
             for _, writer in earlier(m, reader)]
    return " ".join(f"{number(v, '.3f')}{mark}" for v, mark in zip(row, marks))


def pair_list(k: dict, form: str) -> str:
    """The pairs that a form calls, those that the causal test does not support in brackets."""
    names = [(in_words(pair), pair in k["supported"][form]) for pair in k["called"][form]]
    return ", ".join(n if supported else f"({n})" for n, supported in names) or "none"


SECTIONS = [
    Section("model", compute_model, print_model),
    Section("path_expansion", compute_path_expansion, print_path_expansion),
    Section("term_importance", compute_term_importance, print_term_importance),
    Section("composition", compute_composition, print_composition),
    Section("attention_groups", compute_attention_groups, print_attention_groups),
    Section("virtual_heads", compute_virtual_heads, print_virtual_heads),
    Section("induction", compute_induction, print_induction),
    Section("counting", compute_counting, print_counting),
    Section("claims", compute_claims, print_claims),
    Section("correction", compute_correction, print_correction),
]
ON_TEXT = {"model", "path_expansion", "term_importance", "composition", "attention_groups",
           "virtual_heads", "correction"}
TEXT_CHOICES = ("seq_len", "bos_counted", "join", "keep_blank", "wikitext")
SWEEPS = [  # in this order; the choices of one line jointly, each with the sections it changes
    dict.fromkeys(TEXT_CHOICES, ON_TEXT)
    | {"distinct_places": {"virtual_heads"}, "first_row": {"composition", "attention_groups"}},
    {"bias_is_moved": ON_TEXT - {"model", "composition"}},
    {"median": {"term_importance"}},
    {"induction_ids": {"induction"}},
]


def quick(a: Analysis) -> dict:
    """The attention of the writing heads: what needs no more than the frozen run."""
    A = a.run.patterns[:-1].flatten(0, 1)
    return {"composition": {"prev_token": common.mean_attention(A, 1).tolist(),
                            "two_back": common.mean_attention(A, 2).tolist(),
                            "start_token": A[..., first_row(a):, 0].mean((-1, -2)).tolist()}}


SCRIPT = report.Script("circuits_part5.py", SECTIONS, pictures.FIGURES, PUBLISHED_MODEL, SWEEPS,
                       quick)


class Setup:
    """Loads the model once, and runs it once for every text setting that is asked for in turn."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.model, self.source = loading.load_model(
            args.model, args.device, loading.DTYPES[args.dtype])
        self.run_of: dict = {}  # {text setting: (run, text)} of the last one

    def freeze(self, **text_setting) -> tuple[common.FrozenRun, dict]:
        key = tuple(text_setting.values())
        if key not in self.run_of:
            n_tokens = N_TOKENS if self.args.tokens is None else self.args.tokens
            tokens, text = loading.load_tokens(
                self.model, self.args.model, self.args.text, n_tokens,
                default_len=CHOICES["seq_len"], **text_setting)
            self.run_of = {key: (common.freeze(self.model, tokens), text)}
        return self.run_of[key]

    def analyse(self, choices: dict) -> tuple[Analysis, dict]:
        """The analysis under these choices, and the meta of its results."""
        run, text = self.freeze(**{name: choices[name] for name in TEXT_CHOICES})
        length = run.tokens.shape[1] - (0 if choices["bos_counted"] else 1)
        choices = choices | {"seq_len": length}
        analysis = Analysis(run, text, choices, self.args.seed)
        meta = report.run_meta(SCRIPT.file, self.source, text, self.args, choices)
        return analysis, meta

    def alternatives(self, a: Analysis) -> dict[str, list]:
        """The open choices that this text has, its own sequence length first."""
        lengths = [a.choices["seq_len"], *OPEN["seq_len"]]
        here = OPEN | {"seq_len": list(dict.fromkeys(lengths))}
        if a.text["rows_sha256"] is None:  # the text of a file has no rows to join
            here |= {name: OPEN[name][:1] for name in ("join", "keep_blank", "wikitext")}
        return here


def main(argv: list[str] | None = None) -> dict:
    args = report.parser(__doc__, PUBLISHED_MODEL, N_TOKENS, CHOICES["seq_len"]).parse_args(argv)
    done = runner.from_files(SCRIPT, args)
    if done:
        return done
    with common.status(f"loading and running {args.model}"):
        setup = Setup(args)
        analysis, meta = setup.analyse(CHOICES | {"seq_len": args.seq_len})
    if args.sweep:
        return sweep.try_settings(SCRIPT, args, setup.analyse, setup.alternatives(analysis))
    return runner.run_analysis(SCRIPT, meta, args, analysis)


if __name__ == "__main__":
    sys.exit(runner.run_script(main))
