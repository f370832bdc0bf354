"""Part 5, two-layer models: how heads compose. Every real-model number of the article.

    python circuits_part5.py                 # attn-only-2l on 3,072 tokens of WikiText-2
    python circuits_part5.py --model mini    # the bundled two-layer model on its sample text

Writes results/part5.json (every number, full precision), results/part5_stdout.txt (the log) and
figures/part5_*.png and .svg; for another model in results/<model>/ and figures/<model>/. About
half a minute on two CPU cores at the public size.

Each section of the article is a compute_x that returns plain numbers, a print_x that prints the
article's lines from them, and a plot_x that draws its picture from them.
"""

from __future__ import annotations

import functools
import math
import sys
from dataclasses import dataclass

import torch

import common
from common import pairs, token_text
from figures import part5 as pictures
from results import report, runner, sweep

PUBLISHED_MODEL = "attn-only-2l"
N_TOKENS = 3072  # of the text, BOS counted
THRESHOLD = 0.05  # above the random baseline, a pair counts as composing (section 4)
LOSS_THRESHOLD = 0.01  # nats; a virtual head whose removal costs more counts (section 3)
PAPER_FALL = (1.8, 5.2, 0.3)  # nats; what each order gives in the paper's own model (section 3)
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
    meta: dict
    choices: dict
    seed: int

    @functools.cached_property
    def from_source(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The virtual heads' sum: what layer 0 read at the start token, and at real tokens."""
        return common.virtual_by_source(self.run)

    @functools.cached_property
    def unembedded(self) -> common.Unembedded:
        """The losses of the model and of sums of terms, all terms against the model, and each
        virtual head removed."""
        paths, (start, real) = self.paths, self.from_source
        zero, one, two = (paths.stream(order) for order in range(3))
        streams = {"zero": zero, "layer 0": zero + paths.bias + paths.heads(0), "one": one,
                   "start": one + start, "two": two}
        # zero + (one - layer 0): the direct path and the layer-1 heads. one + (two - start): the
        # virtual heads less those from the start token, unless order two has a bias term besides.
        combined = {"layer 1": ("zero", "one", "layer 0"), "real": ("one", "two", "start")}
        if self.choices["bias_is_moved"]:
            combined.pop("real")
            streams = {"real": one + real} | streams
        normed = {name: self.run.final_norm(stream) for name, stream in streams.items()}
        return common.unembed(self.run, {"model": self.run.final} | normed, combined,
                              paths.z_virtual)


def mean_se(x: torch.Tensor) -> tuple:
    """Mean over sequences (the last axis) and its standard error, as lists or numbers.

    The error is the standard deviation over sequences / sqrt(n); None for a single sequence.
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
            "n_tokens": a.meta["n_tokens"], "n_sequences": len(a.run.tokens),
            "seq_len": a.meta["seq_len"]}


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
    loss = {name: x.mean(-1) for name, x in a.unembedded.losses.items()}
    model, direct, first, second = (loss[k] for k in ("model", "zero", "one", "two"))
    plus_0, plus_1, plus_start, plus_real = (
        loss[k] for k in ("layer 0", "layer 1", "start", "real"))
    uniform = math.log(m["d_vocab"])
    marginal, marginal_se = mean_se(torch.stack([direct - uniform, first - direct, second - first]))
    removed = a.unembedded.removed.mean(-1)
    cost, cost_se = mean_se(removed)
    ranked = sorted(pairs(removed), key=lambda p: -cost[p[0]][p[1]])
    flat = sorted(c for row in cost for c in row)
    upper, lower = flat[len(flat) // 2], flat[(len(flat) - 1) // 2]
    differences = {
        ("layer0", "vs_direct"): plus_0 - direct, ("layer0", "given_other"): first - plus_1,
        ("layer1", "vs_direct"): plus_1 - direct, ("layer1", "given_other"): first - plus_0,
        ("virtual", "start"): plus_start - first, ("virtual", "real"): plus_real - first,
    }
    split: dict = {"layer0": {}, "layer1": {}, "virtual": {}}
    for (part, name), difference in differences.items():
        split[part][name], split[part][f"{name}_se"] = mean_se(difference)
    return {
        "uniform": uniform, "loss_by_order": [x.mean().item() for x in (direct, first, second)],
        "loss_model": model.mean().item(), "loss_model_se": mean_se(model)[1],
        "n_sequences": len(run.tokens), "marginal": marginal, "marginal_se": marginal_se,
        "per_term": [d / n for d, n in zip(marginal, (1, m["n_single"], m["n_virtual"]))],
        "virtual_removed": cost, "virtual_removed_se": cost_se,
        "virtual_largest": [{"h2": h2, "h1": h1, "loss_increase": cost[h2][h1]}
                            for h2, h1 in ranked[:5]],
        "virtual_above_0_01": sum(c > LOSS_THRESHOLD for c in flat),
        "virtual_median": lower if a.choices["median"] == "lower" else (lower + upper) / 2,
        "start_delta": split["virtual"]["start"], "start_delta_se": split["virtual"]["start_se"],
        "real_delta": split["virtual"]["real"], "real_delta_se": split["virtual"]["real_se"],
        "split_check": (start + real - a.paths.virtual()).abs().max().item(),
        "layer0": split["layer0"], "layer1": split["layer1"],
    }


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
    heads = lambda values, digits: ", ".join(  # noqa: E731
        f"0.{h} {v:.{digits}f}" for h, v in enumerate(values))
    log(f"  layer-0 heads, mean attention to the previous token: {heads(r['prev_token'], 2)}")
    log(f"  layer-0 heads, mean attention to the start token: {heads(r['start_token'], 2)}")
    log(f"  layer-0 heads, mean attention to two tokens back: {heads(r['two_back'], 2)}")
    for kind in "QKV":
        log(f"  {kind}-composition, mean over the {m['n_heads']} layer-1 heads, per layer-0 head: "
            f"{heads(r[kind]['mean_by_h1'], 3)}")
    log("  as first published, before the correction (the first factor moved to the end); random "
        f"baseline: {first['baseline']['mean']:.4f}")
    for kind in "QKV":
        log(f"    {kind}-composition: {_score_line(first[kind], m)}")


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
        for name, left in zip(tv, (full - g.K, full - g.Q, full - g.QK, g.none)):
            tv[name].append(pattern_change(left, pattern).item())
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
        token_text(a.run.model, i) for i in a.run.tokens[0, :N_MAP].tolist()]}


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
        log("    " + ", ".join(f"{layer}.{h} {v:.2f}" for h, v in enumerate(row)))


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

COUNTED_RANGE = (0.35, 0.46)  # the changes that the text counts six of, at two decimals (section 4)


def compute_claims(a: Analysis, results: dict) -> dict:
    """What the article's sentences derive from the sections before. Heads are found by rule."""
    s = results["sections"]
    t, c, g = s["term_importance"], s["composition"], s["attention_groups"]
    threshold, total = c["baseline"]["mean"] + THRESHOLD, t["uniform"] - t["loss_model"]
    means = {k: c[k]["mean_by_h1"] for k in "QK"}
    columns = range(len(means["Q"]))
    column = max(columns, key=lambda h: means["Q"][h] + means["K"][h])
    changes = sorted(row[column] for row in g["tv_without_K_of_head"])[::-1]
    tv = [v for name in ("without_K", "without_Q") for v in g["tv"][name][:6]]
    induction = sorted(((v, f"{layer}.{h}") for layer, row in enumerate(s["induction"]["score"])
                        for h, v in enumerate(row)), reverse=True)
    return {
        "thresholds": {"composition": THRESHOLD, "loss": LOSS_THRESHOLD},
        "total_drop": total, "single_share": -t["marginal"][1] / total,
        "full_sum_minus_model": t["loss_by_order"][2] - t["loss_model"],
        "virtual_over_paper": -t["marginal"][2] / PAPER_FALL[2],
        "largest_run_through": sorted({f"1.{v['h2']}" for v in t["virtual_largest"]}),
        "pairs_above": sum(c[k]["n_above"] for k in "QKV"),
        "previous_token_head": f"0.{max(columns, key=lambda h: c['prev_token'][h])}",
        "column": {
            "head": f"0.{column}",
            "others_max": max((m[h] for m in means.values() for h in columns if h != column),
                              default=None),
            "n_above": sum(row[column] > threshold for k in "QK" for row in c[k]["scores"]),
            **{f"{k}_mean_above_baseline": m[column] - c["baseline"]["mean"]
               for k, m in means.items()},
            "n_changed": sum(COUNTED_RANGE[0] <= round(v, 2) <= COUNTED_RANGE[1] for v in changes),
            "six_min": changes[:6][-1], "six_max": changes[0],
        },
        "heads_1_0_to_1_5": {"tv_min": min(tv), "tv_max": max(tv)},
        "induction": {"top": induction[0][1], "others_max": induction[1][0]},
    }


def print_claims(r: dict, results: dict, log: report.Log) -> None:
    c = r["column"]
    log("== WHAT THE TEXT DERIVES FROM THESE NUMBERS (heads found by rule, but for 1.0 to 1.5)")
    log(f"  all terms together: {r['total_drop']:.2f} nats, of them single heads "
        f"{r['single_share']:.0%}; virtual heads {r['virtual_over_paper']:.1f} times the paper's "
        f"{PAPER_FALL[2]}; full sum minus the model {r['full_sum_minus_model']:.1e}")
    log(f"  the {len(results['sections']['term_importance']['virtual_largest'])} largest virtual "
        f"heads run through {', '.join(r['largest_run_through'])}; previous-token head "
        f"{r['previous_token_head']}; induction head {r['induction']['top']}, no other above "
        f"{r['induction']['others_max']:.2f}")
    log(f"  layer-0 head with the highest mean Q- and K-composition: {c['head']}; no other above "
        f"{'-' if c['others_max'] is None else format(c['others_max'], '.3f')}; its pairs above "
        f"the threshold: {c['n_above']}")
    log(f"  without its K term alone {c['n_changed']} layer-1 heads change by {COUNTED_RANGE[0]} to {COUNTED_RANGE[1]} "
        f"(the six that change most: {c['six_min']:.2f} to {c['six_max']:.2f})")
    log(f"  without K terms or without Q terms the first six layer-1 heads change by "
        f"{r['heads_1_0_to_1_5']['tv_min']:.2f} to {r['heads_1_0_to_1_5']['tv_max']:.2f}")


# ------------------------------------------------------------------ beyond the article

CAUSAL_TV = 0.1  # total variation; without its K term, a pair that changes a pattern more is causal


def rank_correlation(x: list[list[float]], y: list[list[float]]) -> float | None:
    """Spearman's correlation of two maps [h2][h1]; equal values share their mean rank. None where
    one of the two is constant."""
    ranks = []
    for v in (torch.tensor(x, dtype=torch.float64).flatten(), torch.tensor(y).double().flatten()):
        below, equal = (v[:, None] > v).sum(1), (v[:, None] == v).sum(1)
        rank = below + (equal.double() + 1) / 2
        ranks.append(rank - rank.mean())
    size = ranks[0].norm() * ranks[1].norm()
    return (ranks[0] @ ranks[1] / size).item() if size > 0 else None


def compute_correction(a: Analysis, results: dict) -> dict:
    """What the correction of the composition score changes, and what the causal tests say.

    A pair is called where its score is above the baseline of its own formula by its margin. The
    causal test of K-composition takes the K term of one layer-0 head out of a layer-1 head's
    scores; that of V-composition removes the virtual head. For Q there is none here.
    """
    s = results["sections"]
    tests = {"K": (s["attention_groups"]["tv_without_K_of_head"], CAUSAL_TV),
             "V": (s["term_importance"]["virtual_removed"], LOSS_THRESHOLD)}
    corrected, found = s["composition"], {}
    forms = {"corrected": corrected, "first_published": corrected["first_published"]}
    above = lambda rows, least: [{"h2": h2, "h1": h1} for h2, row in enumerate(rows)  # noqa: E731
                                 for h1, v in enumerate(row) if v > least]
    for kind in "QKV":
        maps = {name: form[kind]["scores"] for name, form in forms.items()}
        called = {name: above(maps[name], form["baseline"]["mean"] + form["baseline"]["margin"])
                  for name, form in forms.items()}
        found[kind] = {"rank_correlation": rank_correlation(*maps.values()), "called": called}
        if kind in tests:
            changes, least = tests[kind]
            causal = above(changes, least)
            found[kind] |= {"causal": causal, "causal_threshold": least, "supported": {
                name: [p for p in those if p in causal] for name, those in called.items()},
                "rank_correlation_with_change": {
                    name: rank_correlation(scores, changes) for name, scores in maps.items()}}
    return found


def print_correction(r: dict, results: dict, log: report.Log) -> None:
    c = results["sections"]["composition"]
    number = lambda x: "-" if x is None else f"{x:+.2f}"  # noqa: E731
    log("== BEYOND THE ARTICLE: WHAT THE CORRECTION OF THE COMPOSITION SCORE CHANGES")
    log("  corrected | as first published; * above the formula's own random baseline by "
        f"{THRESHOLD} | {c['first_published']['baseline']['margin']:.3f}, as many of its standard "
        "deviations")
    for kind in "QKV":
        k = r[kind]
        log(f"  {kind}-composition: rank correlation of the two maps "
            f"{number(k['rank_correlation'])}")
        for h2, rows in enumerate(zip(c[kind]["scores"], c["first_published"][kind]["scores"])):
            log(f"    head 1.{h2}: " + " | ".join(
                " ".join(f"{v:.3f}" + " *"[{"h2": h2, "h1": h1} in k["called"][name]]
                         for h1, v in enumerate(row)) for row, name in zip(rows, k["called"])
            ).rstrip())
    for kind, what in (("K", "its K term alone taken out changes the pattern by more than"),
                       ("V", "the virtual head removed costs more nats than")):
        k = r[kind]
        log(f"  {kind}, causal test ({what} {k['causal_threshold']}): {len(k['causal'])} of "
            f"{results['sections']['model']['n_virtual']} pairs pass (in brackets: a called "
            "one that does not)")
        for name, label in (("corrected", "corrected"), ("first_published", "as first published")):
            log(f"    {label}: rank correlation of score and change "
                f"{number(k['rank_correlation_with_change'][name])}; called {pair_list(k, name)}")


def pair_list(k: dict, name: str) -> str:
    """The pairs that a form calls, those that the causal test does not support in brackets."""
    names = [(f"1.{p['h2']} o 0.{p['h1']}", p in k["supported"][name]) for p in k["called"][name]]
    return ", ".join(n if supported else f"({n})" for n, supported in names) or "none"
SECTIONS = [
    ("model", compute_model, print_model),
    ("path_expansion", compute_path_expansion, print_path_expansion),
    ("term_importance", compute_term_importance, print_term_importance),
    ("composition", compute_composition, print_composition),
    ("attention_groups", compute_attention_groups, print_attention_groups),
    ("virtual_heads", compute_virtual_heads, print_virtual_heads),
    ("induction", compute_induction, print_induction),
    ("counting", compute_counting, print_counting),
    ("claims", compute_claims, print_claims),
    ("correction", compute_correction, print_correction),
]
ON_TEXT = {"model", "path_expansion", "term_importance", "composition", "attention_groups",
           "virtual_heads", "correction"}
SWEEPS = [  # in this order; the choices of one line jointly, each with the sections it changes
    dict.fromkeys(("seq_len", "bos_counted", "join", "keep_blank"), ON_TEXT)
    | {"distinct_places": {"virtual_heads"}},
    {"bias_is_moved": ON_TEXT - {"model", "composition"}},
    {"median": {"term_importance"}},
    {"induction_ids": {"induction"}},
]
SCRIPT = report.Script("circuits_part5.py", SECTIONS, pictures.FIGURES, PUBLISHED_MODEL, SWEEPS)


def main(argv: list[str] | None = None) -> dict:
    args = report.parser(__doc__, PUBLISHED_MODEL, N_TOKENS, CHOICES["seq_len"]).parse_args(argv)
    if done := runner.from_files(SCRIPT, args):
        return done
    model, source = common.load_model(args.model, args.device, common.DTYPES[args.dtype], 2)

    @functools.lru_cache(maxsize=1)
    def freeze(seq_len: int | None, bos_counted: bool, join: str, keep_blank: bool):
        tokens, text = common.load_tokens(
            model, args.model, args.text, N_TOKENS if args.tokens is None else args.tokens,
            seq_len, bos_counted, join, keep_blank, default_len=CHOICES["seq_len"])
        return common.freeze(model, tokens), text

    def analyse(choices: dict) -> tuple[Analysis, dict]:
        run, text = freeze(*(choices[k] for k in ("seq_len", "bos_counted", "join", "keep_blank")))
        length = run.tokens.shape[1] - (not choices["bos_counted"])
        choices = choices | {"seq_len": length}
        a = Analysis(run, common.expand(run, choices["bias_is_moved"]), text, choices, args.seed)
        return a, report.run_meta(SCRIPT.file, source, text, args, choices)

    a, meta = analyse(CHOICES | {"seq_len": args.seq_len})
    if args.sweep:
        here = OPEN | {"seq_len": list(dict.fromkeys([a.choices["seq_len"], *OPEN["seq_len"]]))}
        if a.meta["rows_sha256"] is None:  # no rows to join
            here |= {name: OPEN[name][:1] for name in ("join", "keep_blank")}
        return sweep.try_settings(SCRIPT, args, analyse, here)
    return runner.run_sections(SCRIPT, meta, args, a)
if __name__ == "__main__":
    sys.exit(runner.run_script(main))
