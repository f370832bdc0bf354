"""The pictures of part 5, drawn from a results dict."""

from __future__ import annotations

import math

from figures import charts


def one_layer(heads: list[str], role: str) -> str:
    """What heads are called: layer-1 head if all are of layer 1, and the role if they are not."""
    layers = {head.split(".")[0] for head in heads}
    return f"layer-{layers.pop()} head" if len(layers) == 1 else role


def table_of_pairs(m: dict, values: list[list]) -> list[list]:
    """A table of pairs, a row for each head that reads, with NaN where there is no such pair.

    A head reads only what heads of earlier layers have written.
    """
    return [[v if int(writer.split(".")[0]) < int(reader.split(".")[0]) else math.nan
             for writer, v in zip(m["writers"], row)] for reader, row in zip(m["readers"], values)]


def largest(m: dict, values: list[list]) -> tuple[str, str, float]:
    """The pair with the largest value of a table: head that reads, head that is read, value."""
    return max(((reader, writer, v) for reader, row in zip(m["readers"], values)
                for writer, v in zip(m["writers"], row) if v is not None and not math.isnan(v)),
               key=lambda pair: pair[2])


def name_pairs(ax, m: dict, title: str) -> None:
    """The title of a map of pairs, and what its rows and columns are."""
    charts.name_axes(ax, title, f"{one_layer(m['writers'], 'head')} that is read",
                     f"{one_layer(m['readers'], 'head')} that reads")


AFTER = "\N{RING OPERATOR}"  # between the heads of a virtual head: first the one on the right
CENTS = "{:z.2f}"
PAPER_TERMS = (24, 144)  # single and virtual heads of the paper's model, two layers of 12 heads


def paper_fall() -> list[float]:
    """The fall of the loss that each order of terms gives in the paper's model, in nats."""
    return [float(figure["printed"]) for figure in charts.published("part5")["paper"]
            if figure["what"].endswith("fall of the loss, nats")]


def plot_term_importance(r: dict, results: dict):
    """The fall of the loss with each order of terms, beside that in the paper's two layers."""
    m, fall = results["sections"]["model"], [-x for x in r["marginal"]]
    figure, ax = charts.new_figure(max(7, 1.2 + 1.7 * len(fall)), 4.4)
    if m["n_layers"] == 2:
        series, forms = {"the paper's model": paper_fall(), "this model": fall}, ("{:.1f}", CENTS)
        counts = [f"{n} here, {paper} in the paper's" for n, paper in zip(
            m["n_by_order"][1:], PAPER_TERMS)]
    else:
        series, forms, counts = {"this model": fall}, CENTS, m["n_by_order"][1:]
    kinds = ["single heads", "virtual heads", *(f"of order {n}" for n in range(3, len(fall)))]
    charts.bars(ax, ["direct path\n(from a uniform guess)",
                     *(f"{kind}\n({n})" for kind, n in zip(kinds, counts))],
                series, forms, {"this model": r["marginal_se"]})
    ax.set_ylabel(f"fall of the loss (nats per token){_spread(r)}")
    return charts.finished(figure, "how much each order of terms lowers the loss", results)


def _spread(r: dict) -> str:
    return f"\n± standard error, {r['n_sequences']} sequences" if r["marginal_se"] else ""


def plot_virtual_removed(r: dict, results: dict):
    """The rise of the loss without each virtual head, and the fall that all of them give."""
    if "virtual_removed" not in r:
        return None
    m = results["sections"]["model"]
    cost = table_of_pairs(m, r["virtual_removed"])
    figure, (left, right) = charts.map_figure(cost, 1, 2, width_ratios=(1.4, 1))
    charts.heat_maps([left], [cost], m["readers"], m["writers"],
                     "nats per token", 3, diverging=True)
    name_pairs(left, m, "Without one virtual head\nthe loss rises by")
    _plot_virtual_added(right, r, one_layer(m["writers"], "first head"))
    reader, writer, rise = largest(m, cost)
    return charts.finished(figure, f"of all virtual heads {reader} {AFTER} {writer} costs most "
                           f"when removed, {charts.written(rise, '{:+.3f}')} nats per token",
                           results)


def _plot_virtual_added(ax, r: dict, reading: str) -> None:
    """The fall of the loss that all virtual heads give, and its two parts."""
    fall = [-r["marginal"][2], -r["start_delta"], -r["real_delta"]]
    error = r["marginal_se"] and [r["marginal_se"][2], r["start_delta_se"], r["real_delta_se"]]
    charts.bars(ax, ["all of it", "the start\ntoken", "real\ntokens"], {"": fall},
                errors={"": error})
    ax.set(title="With all of them added to\ndirect path and single heads\nit falls by",
           xlabel=f"what the {reading}s read", ylabel=f"nats per token{_spread(r)}")


def plot_composition(r: dict, results: dict):
    """The corrected composition scores minus the random baseline."""
    m = results["sections"]["model"]
    figure, axes = charts.map_figure(r["Q"]["scores"], 1, 3)
    _composition_maps(axes, r, m, "")
    counts = [f"{len(ax.patches)} {kind}-" for ax, kind in zip(axes, "QKV")]
    return charts.finished(figure, f"{counts[0]}, {counts[1]} and {counts[2]}composition scores "
                           "exceed the random baseline by more than "
                           f"{r['baseline']['margin']} (framed)", results)


def plot_first_published(r: dict, results: dict):
    """The corrected composition scores above those of the form that was published first."""
    m, first = results["sections"]["model"], r["first_published"]
    figure, axes = charts.map_figure(r["Q"]["scores"], 2, 3)
    _composition_maps(axes[0], r, m, ", corrected")
    _composition_maps(axes[1], first, m, ", as first published")
    return charts.finished(
        figure, "composition scores, corrected and as first published, minus their own random "
        f"baseline; each row has its own colours (framed: by more than {r['baseline']['margin']}; "
        f"in the lower row {first['baseline']['margin']:.3f}, as many of the baseline's standard "
        "deviations)", results)


def _composition_maps(axes, s: dict, m: dict, form: str) -> None:
    """Q, K and V side by side, each score minus the random baseline."""
    baseline = s["baseline"]["mean"]
    maps = [table_of_pairs(m, [[_minus(v, baseline) for v in row] for row in s[kind]["scores"]])
            for kind in "QKV"]
    charts.heat_maps(axes, maps, m["readers"], m["writers"],
                     f"score \N{MINUS SIGN} its baseline, {baseline:.4f}", 3, diverging=True)
    for ax, kind, values in zip(axes, "QKV", maps):
        name_pairs(ax, m, f"{kind}-composition{form}")
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
    """The change of every pattern but layer 0's without all Q terms, and without all K terms."""
    m, tv = results["sections"]["model"], r["tv"]
    figure, ax = charts.new_figure(max(8, 1 + 0.2 * len(m["readers"])), 4)
    charts.bars(ax, m["readers"], {"without Q terms": tv["without_Q"],
                                   "without K terms": tv["without_K"]})
    ax.set(xlabel=one_layer(m["readers"], "head"), ylim=(0, 1.05),
           ylabel="total variation of the pattern (0 to 1)")
    return charts.finished(figure, f"{_more(tv['without_K'], tv['without_Q'])} of "
                           f"{len(m['readers'])} patterns change more without K terms than "
                           "without Q terms", results)


def _more(values: list, others: list) -> int:
    """How many values are larger than the other one, where both are defined."""
    return sum(a > b for a, b in zip(values, others) if None not in (a, b))


def plot_without_K_of_head(r: dict, results: dict):
    """The change of every pattern but layer 0's without the K term of one earlier head."""
    m = results["sections"]["model"]
    tv = table_of_pairs(m, r["tv_without_K_of_head"])
    figure, ax = charts.map_figure(tv)
    charts.heat_maps([ax], [tv], m["readers"], m["writers"],
                     "total variation of the pattern\n(0 to 1)")
    ax.set(xlabel=f"{one_layer(m['writers'], 'head')} whose K term alone is removed",
           ylabel=f"{one_layer(m['readers'], 'head')} whose\npattern changes")
    reader, writer, change = largest(m, tv)
    return charts.finished(figure, f"the pattern of head {reader} changes most, by {change:.2f}, "
                           f"without the K term of head {writer}", results)


def plot_virtual_heads(r: dict, results: dict):
    """The patterns of two virtual heads; a token cannot read those that follow it."""
    chosen = {"costs most when removed": r["most_important"],
              "looks two back most": r["most_two_back"]}
    tokens = [charts.label(t) for t in r["most_important"]["map_tokens"]]
    past = [_past(v["map"]) for v in chosen.values()]
    figure, axes = charts.map_figure(past[0], 1, 2, charts.PLAIN_CELL)
    charts.heat_maps(axes, past, tokens, tokens, "weight (share of a row)", None)
    for ax, (reason, v) in zip(axes, chosen.items()):
        charts.name_axes(ax, f"{v['reader']} {AFTER} {v['writer']}: {reason}", "token read (key)",
                         "token that reads (query)")
    return charts.finished(figure, "two virtual heads, their pattern Aʰ² Aʰ¹ on the first "
                           f"{len(tokens)} tokens", results)


def _past(pattern: list[list[float]]) -> list[list[float]]:
    """A pattern with NaN in place of the keys that come after their query."""
    return [row[:i + 1] + [math.nan] * (len(row) - i - 1) for i, row in enumerate(pattern)]


def plot_induction(r: dict, results: dict):
    """The induction score of every head: a row per layer, only as high as its scores need.

    One unit is equally high in all.
    """
    tops = [_room(*of_layer) for of_layer in zip(r["score"], r["score_sd"])]
    figure, axes = charts.new_figure(max(8, 1 + 0.2 * len(r["score"][0])),
                                     1.5 + 0.4 * len(tops) + 2.4 * sum(tops), len(tops),
                                     height_ratios=tops, squeeze=False)
    for layer, (ax, top, score, sd) in enumerate(zip(axes[:, 0], tops, r["score"], r["score_sd"])):
        charts.bars(ax, [f"{layer}.{h}" for h in range(len(score))], {"": score}, errors={"": sd})
        ax.set(ylabel=f"layer {layer}", ylim=(0, top), yticks=[0, *_ticks(top)])
    ax.set_xlabel(f"head (± standard deviation over {r['n_rows']} sequences of {r['n_ids']} random "
                  "tokens, twice)")
    figure.supylabel("induction score (share of attention)", fontsize=10)
    score, head = max((v, f"{layer}.{h}") for layer, row in enumerate(r["score"])
                      for h, v in enumerate(charts.without_gaps(row)))
    return charts.finished(figure, f"head {head} has the largest induction score, {score:.2f}",
                           results)


def _room(score: list, sd: list) -> float:
    """How far the axis of these scores reaches, with room for the numbers at the bars."""
    ends = [s + d for s, d in zip(charts.without_gaps(score), charts.without_gaps(sd))]
    return min(max(0.25, max(ends) + 0.15), 1.1)


def _ticks(top: float) -> list[float]:
    """The marks of an axis above zero: 0.2, 0.4, ..."""
    return [mark / 10 for mark in range(2, math.floor(10 * top) + 1, 2)]


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
