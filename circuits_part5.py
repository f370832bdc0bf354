"""Part 5, two-layer models: how heads compose. Every real-model number of the article.

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
from dataclasses import dataclass

import torch

import common
from common import pairs
from figures import part5 as pictures
from results import claims, loading, report, runner, sweep
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
    "seq_len": [256, 128, 512, 1024],  # tokens of a sequence
    "bos_counted": [True, False],  # the start token is one of them
    "join": ["\n\n", "\n", ""],  # between the rows of WikiText
    "keep_blank": [True, False],  # blank rows of WikiText
    "distinct_places": [False, True],  # virtual patterns over rows i >= 3 only
    "bias_is_moved": [False, True],  # b_O(0) counts as moved by layer 0
    "median": ["middle two", "lower"],  # of the 64 removal losses
    "induction_ids": [50, 20, 100, 200],  # random tokens before they repeat
}
CHOICES = {name: values[0] for name, values in OPEN.items()}


@dataclass(frozen=True)
class Analysis:
    """What every section reads."""

    run: common.FrozenRun
    paths: common.Paths
    text: dict  # what loading.load_tokens says of the text
    choices: dict
    seed: int

    @functools.cached_property
    def from_source(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The virtual heads' sum: what layer 0 read at the start token, and at real tokens."""
        return common.virtual_by_source(self.run)

    @functools.cached_property
    def unembedded(self) -> common.Unembedded:
        """The losses of the model and of sums of terms, all terms against the model, and each
        virtual head removed. Computed on first use, since a sweep skips it when it can."""
        paths, (start, real) = self.paths, self.from_source
        zero, one, two = (paths.stream(order) for order in range(3))
        streams = {"zero": zero, "layer 0": zero + paths.bias + paths.heads(0), "one": one,
                   "start": one + start, "two": two}
        # Direct path and layer-1 heads: zero + one - layer 0. Virtual heads from real tokens alone:
        # one + two - start, unless order two also has a bias term.
        differences = {"layer 1": ("zero", "one", "layer 0"), "real": ("one", "two", "start")}
        if self.choices["bias_is_moved"]:
            differences.pop("real")
            streams = {"real": one + real} | streams
        normed = {name: self.run.final_norm(stream) for name, stream in streams.items()}
        return common.unembed(self.run, {"model": self.run.final} | normed, differences,
                              paths.z_virtual)


def mean_se(x: torch.Tensor) -> tuple[list | float, list | float | None]:
    """Mean over sequences (the last axis) and its standard error, as lists or numbers.

    The standard error is the standard deviation over sequences / sqrt(n); None for one sequence.
    """
    n = x.shape[-1]
    se = (x.std(-1) / math.sqrt(n)).tolist() if n > 1 else None
    return x.mean(-1).tolist(), se


# ------------------------------------------------------------------ 1. the model


def compute_model(a: Analysis, results: dict) -> dict:
    cfg = a.run.model.cfg
    single, virtual = 2 * cfg.n_heads, cfg.n_heads**2
    return {"n_layers": cfg.n_layers, "n_heads": cfg.n_heads, "d_head": cfg.d_head,
            "d_model": cfg.d_model, "d_vocab": cfg.d_vocab, "ratio": cfg.d_head / cfg.d_model,
            "n_single": single, "n_virtual": virtual, "n_terms": 1 + single + virtual,
            "n_tokens": a.text["n_tokens"], "n_sequences": len(a.run.tokens),
            "seq_len": a.text["seq_len"]}


def print_model(r: dict, results: dict, log: report.Log) -> None:
    log(f"== 1. THE MODEL AND THE NUMBER OF TERMS ({results['meta']['model']})")
    log(f"  {r['n_layers']} layers of {r['n_heads']} heads; d_head / d_model = {r['d_head']} / "
        f"{r['d_model']} = {r['ratio']:.3f}; {r['n_tokens']:,} tokens ({r['n_sequences']} x "
        f"{r['seq_len']})")
    log(f"  paths to the logits: 1 direct + {r['n_single']} single heads + {r['n_virtual']} "
        f"virtual heads = {r['n_terms']} terms")


# ------------------------------------------------------------------ 2. path expansion


def compute_path_expansion(a: Analysis, results: dict) -> dict:
    paths = a.paths
    before_1 = a.run.x0 + a.run.b_O[0] + paths.heads(0)
    logits = a.unembedded
    return {"n_terms": results["sections"]["model"]["n_terms"],
            "stream_max_abs_diff": (before_1 - a.run.streams[1]).abs().max().item(),
            "logits_max_abs_diff": logits.max_abs_diff,
            "logits_min": logits.min, "logits_max": logits.max}


def print_path_expansion(r: dict, results: dict, log: report.Log) -> None:
    m = results["sections"]["model"]
    log("== 2. PATH EXPANSION OF THE LOGITS ON REAL TEXT (patterns and layer-norm scales frozen)")
    log("  stream before layer 1 rebuilt from the terms: max |diff| = "
        f"{r['stream_max_abs_diff']:.1e}")
    log(f"  logits rebuilt as direct + {m['n_single']} head terms + {m['n_virtual']} virtual "
        f"heads: max |diff| from the model = {r['logits_max_abs_diff']:.1e} "
        f"(logits range {r['logits_min']:.1f} .. {r['logits_max']:.1f})")


# ------------------------------------------------------------------ 3. term importance


def compute_term_importance(a: Analysis, results: dict) -> dict:
    run, m, (start, real) = a.run, results["sections"]["model"], a.from_source
    loss = {name: x.mean(-1) for name, x in a.unembedded.losses.items()}  # of each sequence
    direct, first, second = loss["zero"], loss["one"], loss["two"]
    uniform = math.log(m["d_vocab"])
    marginal, marginal_se = mean_se(torch.stack([direct - uniform, first - direct, second - first]))
    n_terms = (1, m["n_single"], m["n_virtual"])
    split = _split(loss)
    return {
        "uniform": uniform, "loss_by_order": [x.mean().item() for x in (direct, first, second)],
        "loss_model": loss["model"].mean().item(), "loss_model_se": mean_se(loss["model"])[1],
        "n_sequences": len(run.tokens), "marginal": marginal, "marginal_se": marginal_se,
        "per_term": [change / n for change, n in zip(marginal, n_terms)],
        **_removals(a.unembedded.loss_increase.mean(-1), a.choices["median"]),
        "start_delta": split["virtual"]["start"], "start_delta_se": split["virtual"]["start_se"],
        "real_delta": split["virtual"]["real"], "real_delta_se": split["virtual"]["real_se"],
        "split_check": (start + real - a.paths.virtual()).abs().max().item(),
        "layer0": split["layer0"], "layer1": split["layer1"],
    }


def _removals(loss_increase: torch.Tensor, median: str) -> dict:
    """The loss increases [h2, h1, sequence] of the virtual heads, removed one by one."""
    cost, cost_se = mean_se(loss_increase)
    ranked = sorted(pairs(loss_increase), key=lambda pair: -cost[pair[0]][pair[1]])
    flat = sorted(increase for row in cost for increase in row)
    lower, upper = flat[(len(flat) - 1) // 2], flat[len(flat) // 2]
    return {
        "virtual_removed": cost, "virtual_removed_se": cost_se,
        "virtual_largest": [{"h2": h2, "h1": h1, "loss_increase": cost[h2][h1]}
                            for h2, h1 in ranked[:5]],
        "virtual_above_0_01": sum(increase > LOSS_THRESHOLD for increase in flat),
        "virtual_median": lower if median == "lower" else (lower + upper) / 2,
    }


def _split(loss: dict[str, torch.Tensor]) -> dict:
    """What each layer's single heads and each source of the virtual heads change, in nats."""
    differences = {
        ("layer0", "vs_direct"): loss["layer 0"] - loss["zero"],
        ("layer0", "given_other"): loss["one"] - loss["layer 1"],
        ("layer1", "vs_direct"): loss["layer 1"] - loss["zero"],
        ("layer1", "given_other"): loss["one"] - loss["layer 0"],
        ("virtual", "start"): loss["start"] - loss["one"],
        ("virtual", "real"): loss["real"] - loss["one"],
    }
    split: dict = {"layer0": {}, "layer1": {}, "virtual": {}}
    for (part, name), difference in differences.items():
        split[part][name], split[part][f"{name}_se"] = mean_se(difference)
    return split


def print_term_importance(r: dict, results: dict, log: report.Log) -> None:
    m, loss = results["sections"]["model"], r["loss_by_order"]
    log("== 3. TERM IMPORTANCE: LOSS WHEN ONLY SOME TERMS ARE KEPT (nats per token, lower is "
        "better)")
    log(f"  uniform guess over {m['d_vocab']:,} tokens: ln({m['d_vocab']}) = {r['uniform']:.2f}")
    log(f"  order 0 (direct path only):                 {loss[0]:5.2f}   marginal "
        f"{r['marginal'][0]:+.2f}  ({r['per_term'][0]:+.2f} per term, 1 term)")
    log(f"  order <= 1 (+ {m['n_single']} single-head terms):        {loss[1]:5.2f}   marginal "
        f"{r['marginal'][1]:+.2f}  ({r['per_term'][1]:+.3f} per term)")
    log(f"  order <= 2 (+ {m['n_virtual']} virtual heads):            {loss[2]:.2f}   marginal "
        f"{r['marginal'][2]:+.2f}  ({r['per_term'][2]:+.4f} per term)")
    log(f"  the model itself:                           {r['loss_model']:.2f}")
    log("    largest virtual heads (h2 o h1): " + ", ".join(
        f"1.{v['h2']} o 0.{v['h1']} {v['loss_increase']:+.3f}" for v in r["virtual_largest"]))
    log(f"    virtual heads: {r['virtual_above_0_01']} of {m['n_virtual']} above "
        f"+{LOSS_THRESHOLD}; median {r['virtual_median']:+.4f}")
    log(f"  virtual heads split by what the layer-0 head read (check {r['split_check']:.1e}): from "
        f"the start token {r['start_delta']:+.2f}, from real tokens {r['real_delta']:+.2f} (each "
        "added alone to order <= 1)")
    log("  head terms split by layer:")
    for layer, other in ((0, 1), (1, 0)):
        d = r[f"layer{layer}"]
        log(f"    layer-{layer} heads: {d['vs_direct']:+.2f} vs direct path only, "
            f"{d['given_other']:+.2f} vs direct path + layer-{other} heads")


# ------------------------------------------------------------------ 4. composition


def compute_composition(a: Analysis, results: dict) -> dict:
    model = a.run.model
    W_Q, W_K, W_V, W_O = (w[1] for w in (model.W_Q, model.W_K, model.W_V, model.W_O))
    baselines = common.random_baseline(model.cfg.d_model, model.cfg.d_head, N_BASELINE, a.seed)
    out, first = ({"baseline": _baseline(b, baselines[0])} for b in baselines)
    for name, read, other in (("Q", W_Q, W_K), ("K", W_K, W_Q), ("V", W_V, W_O.mT)):
        args = (model.W_V[0], model.W_O[0], read, other)
        out[name] = _score_summary(common.composition_scores(*args), out["baseline"])
        first[name] = _score_summary(common.first_published_scores(*args), first["baseline"])
    A0 = a.run.patterns[0]
    return out | {"first_published": first,
                  "prev_token": common.mean_attention(A0, 1).tolist(),
                  "two_back": common.mean_attention(A0, 2).tolist(),
                  "start_token": A0[..., 0].mean((-1, -2)).tolist()}


def _baseline(scores: torch.Tensor, corrected: torch.Tensor) -> dict:
    """Random scores of one form; margin: how far above their mean a score of that form counts. The
    article's THRESHOLD is the corrected form's; for the other, as many standard deviations."""
    return {"mean": scores.mean().item(), "sd": scores.std().item(), "n": len(scores),
            "margin": THRESHOLD * (scores.std() / corrected.std()).item()}


def _score_summary(scores: torch.Tensor, baseline: dict) -> dict:
    """Scores [h2, h1] against their own random baseline."""
    scores = scores.cpu()
    h2, h1 = divmod(int(scores.argmax()), scores.shape[1])
    return {"scores": scores.tolist(), "max": scores.max().item(), "max_pair": {"h2": h2, "h1": h1},
            "mean": scores.mean().item(), "mean_by_h1": scores.mean(0).tolist(),
            "n_above": int((scores > baseline["mean"] + THRESHOLD).sum()),
            "z": ((scores - baseline["mean"]) / baseline["sd"]).tolist()}


def print_composition(r: dict, results: dict, log: report.Log) -> None:
    m, first = results["sections"]["model"], r["first_published"]
    log("== 4. COMPOSITION SCORES  ||W_A W_B||_F / (||W_A||_F ||W_B||_F)  (paper shapes, layer-0 "
        "head h1 -> layer-1 head h2)")
    log(f"  random baseline (two random rank-{m['d_head']} {m['d_model']} x {m['d_model']} "
        f"matrices, mean of {r['baseline']['n']}): {r['baseline']['mean']:.4f}")
    for kind in "QKV":
        log(f"  {kind}-composition: {_score_line(r[kind], m)}")
    for what, key in (("the previous token", "prev_token"), ("the start token", "start_token"),
                      ("two tokens back", "two_back")):
        log(f"  layer-0 heads, mean attention to {what}: {_by_head(r[key], 0, 2)}")
    for kind in "QKV":
        log(f"  {kind}-composition, mean over the {m['n_heads']} layer-1 heads, per layer-0 head: "
            f"{_by_head(r[kind]['mean_by_h1'], 0, 3)}")
    log("  as first published, before the correction (the first factor moved to the end); random "
        f"baseline: {first['baseline']['mean']:.4f}")
    for kind in "QKV":
        log(f"    {kind}-composition: {_score_line(first[kind], m)}")


def _by_head(values: list[float], layer: int, digits: int) -> str:
    """One value for each head of a layer: 0.0 0.12, 0.1 0.34, ..."""
    return ", ".join(f"{layer}.{h} {v:.{digits}f}" for h, v in enumerate(values))


def _score_line(s: dict, m: dict) -> str:
    h2, h1 = s["max_pair"]["h2"], s["max_pair"]["h1"]
    return (f"max {s['max']:.3f} (head 1.{h2} reads head 0.{h1}), mean {s['mean']:.3f}, pairs "
            f"above baseline + {THRESHOLD}: {s['n_above']} of {m['n_virtual']}")


def compute_attention_groups(a: Analysis, results: dict) -> dict:
    run, worst = a.run, 0.0
    past = torch.ones(run.scores.shape[-2:], dtype=torch.bool, device=run.scores.device).tril()
    tv: dict = {"without_K": [], "without_Q": [], "without_QK": [], "none_alone": []}
    tv_head = []
    for h2, (scores, pattern) in enumerate(zip(run.scores[1], run.patterns[1])):
        g = common.score_groups(run, a.paths, h2, a.choices["bias_is_moved"])
        full = g.total()
        worst = max(worst, (full - scores)[:, past].abs().max().item())
        for name, rest in zip(tv, (full - g.K, full - g.Q, full - g.QK, g.none)):
            tv[name].append(pattern_change(rest, pattern).item())
        tv_head.append(pattern_change(full - g.K_of_head, pattern).tolist())
    return {"max_abs_diff": worst, "tv": tv, "tv_without_K_of_head": tv_head}


def pattern_change(scores: torch.Tensor, pattern: torch.Tensor) -> torch.Tensor:
    """Total variation between the pattern that unmasked scores give and the model's."""
    return common.total_variation(common.softmax_causal(scores), pattern)


def print_attention_groups(r: dict, results: dict, log: report.Log) -> None:
    log("== 5. ATTENTION SCORES OF THE LAYER-1 HEADS IN FOUR GROUPS (layer-0 patterns frozen; "
        "change of the pattern: total variation)")
    log("  no-composition + Q + K + Q-and-K terms vs the model's scores: max |diff| = "
        f"{r['max_abs_diff']:.1e}")
    tv = r["tv"]
    for h, K in enumerate(tv["without_K"]):
        log(f"    head 1.{h}: without K terms {K:.2f}, without Q terms {tv['without_Q'][h]:.2f}, "
            f"without Q-and-K {tv['without_QK'][h]:.2f}; no-composition term alone "
            f"{tv['none_alone'][h]:.2f}")
    log("  without the K term of one layer-0 head alone:")
    for h, row in enumerate(r["tv_without_K_of_head"]):
        log(f"    head 1.{h}: " + ", ".join(f"0.{h1} {v:.2f}" for h1, v in enumerate(row)))


# ------------------------------------------------------------------ 6. virtual heads


def _virtual_pattern(a: Analysis, h2: int, h1: int) -> dict:
    """The pattern A1[h2] A0[h1] seen as one head's: where it looks, and that it is a pattern."""
    product = a.run.patterns[1, h2] @ a.run.patterns[0, h1]
    rows = 3 if a.choices["distinct_places"] else 0
    seen = product[:, rows:]
    look = [seen[..., 0].mean().item()]
    look += [seen.diagonal(rows - k, -2, -1).mean().item() for k in range(3)]
    return {"h2": h2, "h1": h1, "pattern": look,
            "row_sum_error": (product.sum(-1) - 1).abs().max().item(),
            "future_max": product.triu(1).abs().max().item()}


def with_map(a: Analysis, v: dict) -> dict:
    """A virtual head with its pattern on the first tokens of the first sequence."""
    product = a.run.patterns[1, v["h2"], 0] @ a.run.patterns[0, v["h1"], 0]
    return v | {"map": product[:N_MAP, :N_MAP].tolist(), "map_tokens": [
        loading.token_text(a.run.model, i) for i in a.run.tokens[0, :N_MAP].tolist()]}


def compute_virtual_heads(a: Analysis, results: dict) -> dict:
    s = results["sections"]
    removed, V = s["term_importance"]["virtual_removed"], s["composition"]["V"]["scores"]
    heads = [_virtual_pattern(a, h2, h1) | {"v_composition": V[h2][h1],
                                            "loss_increase": removed[h2][h1]}
             for h2, h1 in pairs(a.paths.z_virtual)]
    return {"most_important": with_map(a, max(heads, key=lambda v: v["loss_increase"])),
            "most_two_back": with_map(a, max(heads, key=lambda v: v["pattern"][3])), "all": heads}


def print_virtual_heads(r: dict, results: dict, log: report.Log) -> None:
    log("== 6. VIRTUAL HEADS AS HEADS: PATTERN A^h2 A^h1 (mean weight on the start token, on the "
        "token itself, 1 back, 2 back)")
    for label, key in (("most important", "most_important"), ("most two-back", "most_two_back")):
        v = r[key]
        log(f"  {label}: 1.{v['h2']} o 0.{v['h1']}: pattern {[round(x, 2) for x in v['pattern']]}; "
            f"rows add up to 1 (max |sum - 1| {v['row_sum_error']:.1e}); future entries "
            f"{v['future_max']:g}; V-composition score {v['v_composition']:.3f}; removing it: loss "
            f"{v['loss_increase']:+.3f}")


def compute_induction(a: Analysis, results: dict) -> dict:
    model = a.run.model
    n = min(a.choices["induction_ids"], (model.cfg.n_ctx - 1) // 2)
    tokens = common.repeated_tokens(model, n, N_INDUCTION_ROWS, a.seed)
    scores = common.induction_scores(common.freeze(model, tokens))
    return {"score": scores.mean(-1).tolist(), "score_sd": scores.std(-1).tolist(),
            "n_ids": (tokens.shape[1] - 1) // 2, "n_rows": N_INDUCTION_ROWS}


def print_induction(r: dict, results: dict, log: report.Log) -> None:
    log(f"  induction scores ({r['n_rows']} sequences of {r['n_ids']} random tokens, twice):")
    for layer, row in enumerate(r["score"]):
        log(f"    {_by_head(row, layer, 2)}")


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
    claims.print_claims(r, claims.PART_5, log)


# ------------------------------------------------------------------ beyond the article

CAUSAL_TV = 0.1  # total variation; without its K term, a pair that changes a pattern more is causal


def rank_correlation(x: list[list[float]], y: list[list[float]]) -> float | None:
    """Spearman's correlation of two maps [h2][h1]; None if one of them is constant."""
    a, b = (_ranks(torch.tensor(scores, dtype=torch.float64).flatten()) for scores in (x, y))
    size = a.norm() * b.norm()
    return (a @ b / size).item() if size > 0 else None


def _ranks(values: torch.Tensor) -> torch.Tensor:
    """Ranks minus their mean; equal values share their mean rank."""
    below = (values[:, None] > values).sum(1)
    equal = (values[:, None] == values).sum(1)
    ranks = below + (equal.double() + 1) / 2
    return ranks - ranks.mean()


def _above(scores: list[list[float]], least: float) -> list[dict]:
    """The pairs with more than `least`."""
    return [{"h2": h2, "h1": h1} for h2, row in enumerate(scores)
            for h1, v in enumerate(row) if v > least]


def compute_correction(a: Analysis, results: dict) -> dict:
    """What the correction of the composition score changes, and what the causal tests say.

    A form calls a pair if its score exceeds the baseline of that form by the margin of that form.
    The causal test of K-composition removes the K term of one layer-0 head from the scores of a
    layer-1 head; that of V-composition removes the virtual head. Q-composition has none here.
    """
    s = results["sections"]
    tests = {"K": (s["attention_groups"]["tv_without_K_of_head"], CAUSAL_TV),
             "V": (s["term_importance"]["virtual_removed"], LOSS_THRESHOLD)}
    forms = {"corrected": s["composition"],
             "first_published": s["composition"]["first_published"]}
    found = {}
    for kind in "QKV":
        maps = {name: form[kind]["scores"] for name, form in forms.items()}
        called = {name: _above(maps[name], form["baseline"]["mean"] + form["baseline"]["margin"])
                  for name, form in forms.items()}
        found[kind] = {"rank_correlation": rank_correlation(*maps.values()), "called": called}
        if kind in tests:
            found[kind] |= _causal(maps, called, *tests[kind])
    return found


def _causal(maps: dict, called: dict, changes: list[list[float]], least: float) -> dict:
    """The pairs whose removal changes more than `least`, and which calls they support."""
    causal = _above(changes, least)
    return {"causal": causal, "causal_threshold": least,
            "supported": {name: [pair for pair in those if pair in causal]
                          for name, those in called.items()},
            "rank_correlation_with_change": {name: rank_correlation(scores, changes)
                                             for name, scores in maps.items()}}


def print_correction(r: dict, results: dict, log: report.Log) -> None:
    c = results["sections"]["composition"]
    log("== BEYOND THE ARTICLE: WHAT THE CORRECTION OF THE COMPOSITION SCORE CHANGES")
    log("  corrected | as first published; * above the formula's own random baseline by "
        f"{THRESHOLD} | {c['first_published']['baseline']['margin']:.3f}, as many of its standard "
        "deviations")
    for kind in "QKV":
        log(f"  {kind}-composition: rank correlation of the two maps "
            f"{_correlation(r[kind]['rank_correlation'])}")
        both = zip(c[kind]["scores"], c["first_published"][kind]["scores"])
        for h2, rows in enumerate(both):
            calls = r[kind]["called"].values()
            sides = [_marked(row, h2, called) for row, called in zip(rows, calls)]
            log(f"    head 1.{h2}: {' | '.join(sides).rstrip()}")
    for kind, what in (("K", "its K term alone removed changes the pattern by more than"),
                       ("V", "the virtual head removed costs more nats than")):
        k = r[kind]
        log(f"  {kind}, causal test ({what} {k['causal_threshold']}): {len(k['causal'])} of "
            f"{results['sections']['model']['n_virtual']} pairs pass (in brackets: a called "
            "one that does not)")
        for name, label in (("corrected", "corrected"), ("first_published", "as first published")):
            log(f"    {label}: rank correlation of score and change "
                f"{_correlation(k['rank_correlation_with_change'][name])}; called "
                f"{pair_list(k, name)}")


def _correlation(x: float | None) -> str:
    return "-" if x is None else f"{x:+.2f}"


def _marked(row: list[float], h2: int, called: list[dict]) -> str:
    """The scores of one layer-1 head; * after those that are called."""
    marks = ["*" if {"h2": h2, "h1": h1} in called else " " for h1 in range(len(row))]
    return " ".join(f"{v:.3f}{mark}" for v, mark in zip(row, marks))


def pair_list(k: dict, name: str) -> str:
    """The pairs that a form calls, those that the causal test does not support in brackets."""
    names = [(f"1.{p['h2']} o 0.{p['h1']}", p in k["supported"][name]) for p in k["called"][name]]
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
TEXT_CHOICES = ("seq_len", "bos_counted", "join", "keep_blank")
SWEEPS = [  # in this order; the choices of one line jointly, each with the sections it changes
    dict.fromkeys(TEXT_CHOICES, ON_TEXT)
    | {"distinct_places": {"virtual_heads"}},
    {"bias_is_moved": ON_TEXT - {"model", "composition"}},
    {"median": {"term_importance"}},
    {"induction_ids": {"induction"}},
]
SCRIPT = report.Script("circuits_part5.py", SECTIONS, pictures.FIGURES, PUBLISHED_MODEL, SWEEPS)


class Setup:
    """Loads the model once, and runs it once for every text setting that is asked for in turn."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.model, self.source = loading.load_model(
            args.model, args.device, loading.DTYPES[args.dtype], 2)
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
        paths = common.expand(run, choices["bias_is_moved"])
        analysis = Analysis(run, paths, text, choices, self.args.seed)
        meta = report.run_meta(SCRIPT.file, self.source, text, self.args, choices)
        return analysis, meta

    def alternatives(self, a: Analysis) -> dict[str, list]:
        """The open choices that this text has, its own sequence length first."""
        lengths = [a.choices["seq_len"], *OPEN["seq_len"]]
        here = OPEN | {"seq_len": list(dict.fromkeys(lengths))}
        if a.text["rows_sha256"] is None:  # the text of a file has no rows to join
            here |= {name: OPEN[name][:1] for name in ("join", "keep_blank")}
        return here


def main(argv: list[str] | None = None) -> dict:
    args = report.parser(__doc__, PUBLISHED_MODEL, N_TOKENS, CHOICES["seq_len"]).parse_args(argv)
    done = runner.from_files(SCRIPT, args)
    if done:
        return done
    setup = Setup(args)
    analysis, meta = setup.analyse(CHOICES | {"seq_len": args.seq_len})
    if args.sweep:
        return sweep.try_settings(SCRIPT, args, setup.analyse, setup.alternatives(analysis))
    return runner.run_analysis(SCRIPT, meta, args, analysis)


if __name__ == "__main__":
    sys.exit(runner.run_script(main))
