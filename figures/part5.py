"""The pictures of part 5, drawn from a results dict."""

from __future__ import annotations

import math

from figures import charts

FROM, TO = "layer-0 head that is read", "layer-1 head that reads"


def head_names(layer: int, values: list) -> list[str]:
    """The names of a layer's heads, as many as there are values."""
    return [f"{layer}.{h}" for h in range(len(values))]


def paper_fall() -> list[float]:
    """The fall of the loss that each order of terms gives in the paper's model, in nats."""
    return [float(figure["printed"]) for figure in charts.published("part5")["paper"]
            if figure["what"].endswith("fall of the loss, nats")]


def plot_term_importance(r: dict, results: dict):
    """The fall of the loss with each order of terms, beside that in the paper's model."""
    m = results["sections"]["model"]
    figure, ax = charts.new_figure(7, 4.4)
    charts.bars(ax, ["direct path\n(from a uniform guess)",
                     f"single heads\n({m['n_single']} here, 24 in the paper's)",
                     f"virtual heads\n({m['n_virtual']} here, 144 in the paper's)"],
                {"the paper's model": paper_fall(), "this model": [-x for x in r["marginal"]]},
                ("{:.1f}", "{:z.2f}"), {"this model": r["marginal_se"]})
    ax.set_ylabel(f"fall of the loss (nats per token){_spread(r)}")
    return charts.finished(figure, "how much each order of terms lowers the loss", results)


def _spread(r: dict) -> str:
    return f"\n± standard error, {r['n_sequences']} sequences" if r["marginal_se"] else ""


def plot_virtual_removed(r: dict, results: dict):
    """The rise of the loss without each virtual head, and the fall that all of them give."""
    cost = r["virtual_removed"]
    figure, (left, right) = charts.map_figure(cost, 1, 2, width_ratios=(1.4, 1))
    charts.heat_maps([left], [cost], head_names(1, cost), head_names(0, cost[0]),
                     "rise of the loss (nats per token)", 3, diverging=True)
    charts.name_axes(left, "One virtual head removed from the model", FROM, TO)
    _plot_virtual_added(right, r)
    return charts.finished(figure, "what the virtual heads are worth, one by one and together",
                           results)


def _plot_virtual_added(ax, r: dict) -> None:
    """The fall of the loss that all virtual heads give, and its two parts."""
    fall = [-r["marginal"][2], -r["start_delta"], -r["real_delta"]]
    error = r["marginal_se"] and [r["marginal_se"][2], r["start_delta_se"], r["real_delta_se"]]
    charts.bars(ax, ["all of it", "the start\ntoken", "real\ntokens"], {"": fall},
                errors={"": error})
    ax.set(title="Added to direct path\nand single heads", xlabel="what the layer-0 heads read",
           ylabel=f"fall of the loss (nats per token){_spread(r)}")


def plot_composition(r: dict, results: dict):
    """The corrected composition scores minus the random baseline."""
    figure, axes = charts.map_figure(r["Q"]["scores"], 1, 3)
    _composition_maps(axes, r, "")
    return charts.finished(figure, "composition scores minus the random baseline (framed: by more "
                           f"than {r['baseline']['margin']})", results)


def plot_first_published(r: dict, results: dict):
    """The corrected composition scores above those of the form that was published first."""
    first = r["first_published"]
    figure, axes = charts.map_figure(r["Q"]["scores"], 2, 3)
    _composition_maps(axes[0], r, ", corrected")
    _composition_maps(axes[1], first, ", as first published")
    return charts.finished(
        figure, "composition scores, corrected and as first published, minus their own random "
        f"baseline; each row has its own colours (framed: by more than {r['baseline']['margin']}; "
        f"in the lower row {first['baseline']['margin']:.3f}, as many of the baseline's standard "
        "deviations)", results)


def _composition_maps(axes, s: dict, form: str) -> None:
    """Q, K and V side by side, each score minus the random baseline."""
    baseline, scores = s["baseline"]["mean"], [s[kind]["scores"] for kind in "QKV"]
    maps = [[[_minus(v, baseline) for v in row] for row in of_kind] for of_kind in scores]
    charts.heat_maps(axes, maps, head_names(1, scores[0]), head_names(0, scores[0][0]),
                     f"score \N{MINUS SIGN} its baseline, {baseline:.4f}", 3, diverging=True)
    for ax, kind, values in zip(axes, "QKV", maps):
        charts.name_axes(ax, f"{kind}-composition{form}", FROM, TO)
        _frame(ax, values, s["baseline"]["margin"])


def _minus(score: float | None, baseline: float) -> float | None:
    return None if score is None else score - baseline


def _frame(ax, values: list[list], least: float) -> None:
    """Frame the cells with more than `least`."""
    from matplotlib.patches import Rectangle

    for i, row in enumerate(values):
        for j, v in enumerate(row):
            if v is not None and v > least:
                ax.add_patch(Rectangle((j - 0.5, i - 0.5), 1, 1, fill=False, linewidth=2,
                                       zorder=3))


def plot_attention_groups(r: dict, results: dict):
    """The change of every layer-1 pattern without all Q terms, and without all K terms."""
    tv = r["tv"]
    figure, ax = charts.new_figure(8, 4)
    charts.bars(ax, head_names(1, tv["without_K"]), {"without Q terms": tv["without_Q"],
                                                     "without K terms": tv["without_K"]})
    ax.set(xlabel="layer-1 head", ylabel="total variation of the pattern (0 to 1)", ylim=(0, 1.05))
    return charts.finished(figure, "change of the patterns without Q- or K-composition", results)


def plot_without_K_of_head(r: dict, results: dict):
    """The change of every layer-1 pattern without the K term of one layer-0 head."""
    tv = r["tv_without_K_of_head"]
    figure, ax = charts.map_figure(tv)
    charts.heat_maps([ax], [tv], head_names(1, tv), head_names(0, tv[0]),
                     "total variation of the pattern\n(0 to 1)")
    ax.set(xlabel="layer-0 head whose K term alone is removed",
           ylabel="layer-1 head whose\npattern changes")
    return charts.finished(figure, "change of the patterns without one head's K term", results)


def plot_virtual_heads(r: dict, results: dict):
    """The patterns of two virtual heads; a token cannot read those that follow it."""
    chosen = {"costs most when removed": r["most_important"],
              "looks two back most": r["most_two_back"]}
    tokens = [charts.label(t) for t in r["most_important"]["map_tokens"]]
    past = [_past(v["map"]) for v in chosen.values()]
    figure, axes = charts.map_figure(past[0], 1, 2, charts.PLAIN_CELL)
    charts.heat_maps(axes, past, tokens, tokens, "weight (share of a row)", None)
    for ax, (reason, v) in zip(axes, chosen.items()):
        charts.name_axes(ax, f"{v['reader']} o {v['writer']}: {reason}", "token read (key)",
                         "token that reads (query)")
    return charts.finished(figure, "two virtual heads, their pattern A^h2 A^h1 on the first "
                           f"{len(tokens)} tokens", results)


def _past(pattern: list[list[float]]) -> list[list[float]]:
    """A pattern with NaN in place of the keys that come after their query."""
    return [row[:i + 1] + [math.nan] * (len(row) - i - 1) for i, row in enumerate(pattern)]


def plot_induction(r: dict, results: dict):
    """The induction score of every head, layer by layer."""
    layers = len(r["score"])
    figure, axes = charts.new_figure(6 * layers, 3.8, 1, layers, sharey=True, squeeze=False)
    for layer, (ax, score, sd) in enumerate(zip(axes[0], r["score"], r["score_sd"])):
        charts.bars(ax, head_names(layer, score), {"": score}, errors={"": sd})
        ax.set(title=f"layer {layer}", xlabel="head", ylim=(0, 1.05))
    axes[0, 0].set_ylabel("induction score (share of attention)")
    return charts.finished(figure, f"induction scores on {r['n_rows']} sequences of {r['n_ids']} "
                           "random tokens, twice (± standard deviation)", results)


# ------------------------------------------------------------------ the toy model


def path_labels(r: dict) -> dict:
    return {"direct": "direct path", "head_1": f"head 1 alone (w1 = {r['w1']:g})",
            "head_2": f"head 2 alone (w2 = {r['w2']:g})", "virtual": "virtual head, 2 o 1"}


def plot_path_expansion(r: dict, results: dict):
    """The four paths stacked for each token, and the output of the two layers as a line."""
    figure, ax = charts.new_figure(6.4, 5)
    names = [f"token {i}" for i in range(1, 4)]
    below = [0.0] * 3
    for (path, label), colour in zip(path_labels(r).items(), charts.COLOURS):
        drawn = ax.bar(names, r["paths"][path], 0.5, below, color=colour, label=label,
                       edgecolor="white")
        ax.bar_label(drawn, fmt="{:g}", label_type="center", fontsize=9,
                     color=charts.ink(colour))
        below = [a + b for a, b in zip(below, r["paths"][path])]
    ax.hlines(r["x2"], [-0.32, 0.68, 1.68], [0.32, 1.32, 2.32], "black", linewidth=2,
              label="the two layers, run the normal way")
    ax.bar_label(drawn, [f"{total:g}" for total in r["sum"]], padding=4, fontweight="bold")
    ax.set_ylabel("stream (one number per token, no unit)")
    ax.legend(frameon=False, loc="upper left", reverse=True)
    return charts.finished(figure, "The toy model: four paths add up to the output of two layers")


def plot_previous_tokens(r: dict, results: dict):
    """The patterns of two heads that look one token back, and of the virtual head of both."""
    figure, axes = charts.map_figure(r["product"], 1, 3)
    tokens = [f"{i}" for i in range(1, len(r["product"]) + 1)]
    charts.heat_maps(axes, [r["pattern"], r["pattern"], r["product"]], tokens, tokens,
                     "weight (share of a row)", 0)
    for ax, title in zip(axes, ("layer 1: one back", "layer 2: one back",
                                "their product: two back")):
        charts.name_axes(ax, title, "token read", "token that reads")
    return charts.finished(figure, "The toy model: two previous-token patterns make a virtual head "
                           "that looks two back")


FIGURES = [  # file name, section, plot
    ("part5_term_importance", "term_importance", plot_term_importance),
    ("part5_virtual_removed", "term_importance", plot_virtual_removed),
    ("part5_composition", "composition", plot_composition),
    ("part5_first_published", "composition", plot_first_published),
    ("part5_attention_groups", "attention_groups", plot_attention_groups),
    ("part5_without_K_of_head", "attention_groups", plot_without_K_of_head),
    ("part5_virtual_heads", "virtual_heads", plot_virtual_heads),
    ("part5_induction", "induction", plot_induction),
]
TOY_FIGURES = [  # file name, section, plot
    ("part5_toy_path_expansion", "path_expansion", plot_path_expansion),
    ("part5_toy_previous_tokens", "previous_tokens", plot_previous_tokens),
]
