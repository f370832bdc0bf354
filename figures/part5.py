"""The pictures of part 5, drawn from a results dict."""

from __future__ import annotations

import math

from figures import charts

# What the figures share.
FROM, TO = "layer-0 head that is read", "layer-1 head that reads"


def head_names(layer: int, values: list) -> list[str]:
    """The names of a layer's heads, as many as there are values."""
    return [f"{layer}.{h}" for h in range(len(values))]


def paper_fall() -> list[float]:
    """The fall of the loss that each order of terms gives in the paper's model, in nats."""
    return [float(figure["printed"]) for figure in charts.published("part5")["paper"]
            if figure["what"].endswith("fall of the loss, nats")]


def plot_term_importance(r: dict, results: dict):
    m = results["sections"]["model"]
    figure, ax = charts.new_figure(7, 4.4)
    charts.bars(ax, ["direct path\n(from a uniform guess)",
                     f"single heads\n({m['n_single']} here, 24 in the paper's)",
                     f"virtual heads\n({m['n_virtual']} here, 144 in the paper's)"],
                {"the paper's model": paper_fall(), "this model": [-x for x in r["marginal"]]},
                ("{:.1f}", "{:z.2f}"), {"this model": r["marginal_se"]})
    ax.set_ylabel(f"fall of the loss (nats per token){_spread(r)}")
    charts.headline(figure, results, "how much each order of terms lowers the loss")
    return figure


def _spread(r: dict) -> str:
    return f"\n± standard error, {r['n_sequences']} sequences" if r["marginal_se"] else ""


def plot_virtual_removed(r: dict, results: dict):
    figure, (left, right) = charts.new_figure(12, 4.8, 1, 2, width_ratios=(1.7, 1))
    cost = r["virtual_removed"]
    charts.heat_maps([left], [cost], head_names(1, cost), head_names(0, cost),
                     "rise of the loss (nats per token)", 3, diverging=True)
    left.set(title="One virtual head removed from the model", xlabel=FROM, ylabel=TO)
    fall = [-r["marginal"][2], -r["start_delta"], -r["real_delta"]]
    error = r["marginal_se"] and [r["marginal_se"][2], r["start_delta_se"], r["real_delta_se"]]
    charts.bars(right, ["all of it", "the start\ntoken", "real\ntokens"], {"": fall},
                errors={"": error})
    right.set(title="Added to direct path and single heads",
              xlabel="what the layer-0 heads read",
              ylabel=f"fall of the loss (nats per token){_spread(r)}")
    charts.headline(figure, results, "what the virtual heads are worth, one by one and together")
    return figure


def plot_composition(r: dict, results: dict):
    figure, axes = charts.new_figure(13, 4.4, 1, 3, sharey=True)
    _composition_maps(axes, r, "")
    charts.headline(figure, results, "composition scores minus the random baseline (framed: by "
                    f"more than {r['baseline']['margin']})")
    return figure


def plot_first_published(r: dict, results: dict):
    figure, axes = charts.new_figure(13, 7.6, 2, 3, sharex=True, sharey=True)
    _composition_maps(axes[0], r, ", corrected")
    first = r["first_published"]
    _composition_maps(axes[1], first, ", as first published")
    charts.headline(figure, results, "composition scores, corrected and as first published, minus "
                    "their own random baseline; each row has its own colours (framed: by more than "
                    f"{r['baseline']['margin']}; in the lower row "
                    f"{first['baseline']['margin']:.3f}, as many of the baseline's standard "
                    "deviations)")
    return figure


def _composition_maps(axes, s: dict, what: str) -> None:
    """Q, K and V side by side, each score minus the random baseline."""
    from matplotlib.patches import Rectangle

    baseline, scores = s["baseline"]["mean"], [s[kind]["scores"] for kind in "QKV"]
    maps = [[[v - baseline for v in row] for row in of_kind] for of_kind in scores]
    charts.heat_maps(axes, maps, head_names(1, scores[0]), head_names(0, scores[0]),
                     f"score \N{MINUS SIGN} its baseline, {baseline:.4f}", 3, diverging=True)
    for ax, kind, values in zip(axes, "QKV", maps):
        ax.set(title=f"{kind}-composition{what}", xlabel=FROM, ylabel=TO)
        ax.label_outer()
        for h2, h1 in ((i, j) for i, row in enumerate(values) for j, v in enumerate(row)
                       if v > s["baseline"]["margin"]):
            ax.add_patch(Rectangle((h1 - 0.5, h2 - 0.5), 1, 1, fill=False, linewidth=2,
                                   zorder=3))


def plot_attention_groups(r: dict, results: dict):
    tv = r["tv"]
    figure, ax = charts.new_figure(8, 4)
    charts.bars(ax, head_names(1, tv["without_K"]), {"without Q terms": tv["without_Q"],
                                                     "without K terms": tv["without_K"]})
    ax.set(xlabel="layer-1 head", ylabel="total variation of the pattern (0 to 1)", ylim=(0, 1.05))
    charts.headline(figure, results, "change of the patterns without Q- or K-composition")
    return figure


def plot_without_K_of_head(r: dict, results: dict):
    tv = r["tv_without_K_of_head"]
    figure, ax = charts.new_figure(7, 5)
    charts.heat_maps([ax], [tv], head_names(1, tv), head_names(0, tv),
                     "total variation of the pattern (0 to 1)")
    ax.set(xlabel="layer-0 head whose K term alone is removed",
           ylabel="layer-1 head whose pattern changes")
    charts.headline(figure, results, "change of the patterns without one head's K term")
    return figure


def plot_virtual_heads(r: dict, results: dict):
    chosen = {"costs most when removed": r["most_important"],
              "looks two back most": r["most_two_back"]}
    tokens = [charts.label(t) for t in r["most_important"]["map_tokens"]]
    past = [[[w if j <= i else math.nan for j, w in enumerate(row)]
             for i, row in enumerate(v["map"])] for v in chosen.values()]
    figure, axes = charts.new_figure(12, 6.4, 1, 2, sharey=True)
    charts.heat_maps(axes, past, tokens, tokens, "weight (share of a row)", None)
    for ax, (what, v) in zip(axes, chosen.items()):
        ax.set(title=f"{v['reader']} o {v['writer']}: {what}", xlabel="token read (key)")
    axes[0].set_ylabel("token that reads (query)")
    charts.headline(figure, results, "two virtual heads, their pattern A^h2 A^h1 on the first "
                    f"{len(tokens)} tokens")
    return figure


def plot_induction(r: dict, results: dict):
    figure, axes = charts.new_figure(12, 3.8, 1, 2, sharey=True)
    for layer, ax in enumerate(axes):
        score = r["score"][layer]
        charts.bars(ax, head_names(layer, score), {"": score}, errors={"": r["score_sd"][layer]})
        ax.set(title=f"layer {layer}", xlabel="head", ylim=(0, 1.05))
    axes[0].set_ylabel("induction score (share of attention)")
    charts.headline(figure, results, f"induction scores on {r['n_rows']} sequences of {r['n_ids']} "
                    "random tokens, twice (± standard deviation)")
    return figure


# ------------------------------------------------------------------ the toy model


def path_labels(r: dict) -> dict:
    return {"direct": "direct path", "head_1": f"head 1 alone (w1 = {r['w1']:g})",
            "head_2": f"head 2 alone (w2 = {r['w2']:g})", "virtual": "virtual head, 2 o 1"}


def plot_path_expansion(r: dict, results: dict):
    figure, ax = charts.new_figure(6.4, 5)
    names, below = [f"token {i}" for i in range(1, 4)], [0.0] * 3
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
    figure.suptitle("The toy model: four paths add up to the output of two layers")
    return figure


def plot_previous_tokens(r: dict, results: dict):
    figure, axes = charts.new_figure(9.6, 3.4, 1, 3, sharey=True)
    tokens = [f"{i}" for i in range(1, len(r["product"]) + 1)]
    charts.heat_maps(axes, [r["pattern"], r["pattern"], r["product"]], tokens, tokens,
                     "weight (share of a row)", 0)
    for ax, title in zip(axes, ("layer 1: one back", "layer 2: one back",
                                "their product: two back")):
        ax.set(title=title, xlabel="token read")
    axes[0].set_ylabel("token that reads")
    figure.suptitle("The toy model: two previous-token patterns make a virtual head that looks "
                    "two back")
    return figure


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
