"""The pictures of part 4, drawn from a results dict."""

from __future__ import annotations

import itertools
import math

from figures import charts

DECADES = 3  # of |l| below a head's largest that its picture shows (section 6)


def plot_skip_trigrams(r: list[dict], results: dict):
    """The table: a row per source, the largest entry of each list first."""
    shown, size = [t for t in r if "skipped" not in t], 9
    if not shown:
        return None
    four = [""] * 4
    rows = [["head", "source", "top destinations (QK)", *four, "top out tokens (OV)", *four]]
    rows += [[f"0.{t['head']}", charts.label(t["source"]), *map(charts.label, t["dest"] + t["out"])]
             for t in shown]
    widths = [max(charts.text_width(x, size) for x in column[i > 1:]) + 0.2 + 0.2 * (i in (1, 6))
              for i, column in enumerate(zip(*rows))]
    lefts = list(itertools.accumulate(widths, initial=0))
    figure, ax = charts.new_figure(max(lefts[-1], 8) + 0.2, 0.25 * len(rows) + 1.35)
    shade = dict(facecolor=charts.COLOURS[4], alpha=0.4, linewidth=0, pad=2)
    for i, row in enumerate(rows):
        for j, (x, cell) in enumerate(zip(lefts, row)):
            own = j > 1 and _word(cell) == _word(row[1])
            ax.text(x, i, cell, fontsize=size, va="center", bbox=shade if own else None)
    ax.hlines((-0.6, 0.5, len(rows) - 0.4), 0, lefts[-1], color="black", linewidth=(1.2, 0.6, 1.2))
    ax.set(xlim=(0, max(lefts[-1], 8)), ylim=(len(rows) - 0.3, -0.7))
    ax.set_axis_off()
    missing = ", ".join(charts.label(t["source"]) for t in r if "skipped" in t)
    figure.supxlabel(
        "A row reads [source] … [destination] → [out]; the largest entry of each list is first. "
        "Shaded: the source's own word.\nA list ranks the entries of one head and is no prediction."
        + f"\nSkipped, not in this model: {missing}." * bool(missing), fontsize=size)
    charts.headline(figure, results, "skip-trigrams read from the weights, head by head")
    return figure


def _word(cell: str) -> str:
    return cell.strip("' ").lower()


def plot_at_work(r: dict, results: dict):
    """What one head reads in a prompt, and every head's push on the next token."""
    sample = r["sample"]["word"] if r["sample"] else r["ralph"]
    word = sample if "skipped" in r["ralph"] else r["ralph"]
    if "skipped" in word:
        return None
    out, source, n = charts.label(word["next"]), charts.label(word["source"]), len(word["pushes"])
    widths = [charts.text_width(charts.label(t), 9) + 0.2 for t in [*word["tokens"], word["next"]]]
    figure, (strip, ax) = charts.new_figure(max(8, sum(widths) + 1, min(n + 1, 13)), 4.8, 2,
                                            height_ratios=(1, 2.6))
    draw_prompt(strip, word, widths)
    series = {"whole head": word["pushes"],
              f"through {source} alone": word["pushes_through_source"]}
    charts.bars(ax, [f"0.{h}" for h in range(n)], series, "{:+.2f}")
    ax.set(xlabel="head", ylabel=f"push on the logit of {out} (logits)")
    kind = ""
    if word is not r["ralph"]:
        kind = f" (sample text; {charts.label(r['ralph']['next'])} was skipped)"
    charts.headline(figure, results,
                    f"each head's push on {out} after {charts.label(word['tokens'][-1])}{kind}")
    return figure


def draw_prompt(ax, word: dict, widths: list[float]) -> None:
    """The tokens of a prompt and the next one, `widths` inches each, an arrow to what is read."""
    from matplotlib.patches import FancyArrowPatch
    from matplotlib.path import Path

    ends = list(itertools.accumulate(widths))
    x = [end - width / 2 for end, width in zip(ends, widths)]
    x[-1] += 0.5
    for i, (at, token) in enumerate(zip(x, [*word["tokens"], word["next"]])):
        read, last = token == word["source"], i == len(x) - 1
        box = dict(facecolor=charts.COLOURS[0 if last else 1] if read or last else "0.8", alpha=0.4,
                   linewidth=0, boxstyle="round,pad=0.25")
        ax.text(at, 0, charts.label(token), ha="center", va="center", fontsize=9, bbox=box)
        if read and not last:
            curve = Path([(x[-2], 0.3), (x[-2], 1.1), (at, 1.1), (at, 0.3)], [1, 4, 4, 4])
            ax.add_patch(FancyArrowPatch(path=curve, arrowstyle="-|>", mutation_scale=12,
                                         color="black"))
            ax.text((at + x[-2]) / 2, 1, f"head 0.{word['head']} reads {charts.label(token)} with "
                    f"weight {word['attention']:.2f}", ha="center", va="bottom", fontsize=9)
    push = word["pushes_through_source"][word["head"]]
    ax.text(x[-1], 0.38, f"{push:+.2f} logits", ha="center", va="bottom", fontsize=9)
    ax.annotate("", (x[-1] - widths[-1] / 2, 0), (ends[-2], 0),
                arrowprops={"arrowstyle": "-|>", "color": "black"})
    middle, half = (ends[-1] + 0.5) / 2, max(ends[-1] + 0.9, 0.95 * ax.figure.get_figwidth()) / 2
    ax.set(xlim=(middle - half, middle + half), ylim=(-0.4, 1.4))
    ax.set_axis_off()


def names_of_heads(results: dict) -> list[str]:
    """0.0, 0.1, ..., with a star at those that lean on position."""
    r = results["sections"]["positional"]
    return [f"0.{h}" + "*" * (h in r["lean"]) for h in range(len(r["from_positions"]))]


def plot_positional(r: dict, results: dict):
    """Attention by distance, from the position embeddings alone and on text, on one scale."""
    heads, meta = names_of_heads(results), results["meta"]
    figure, axes = charts.new_figure(min(max(len(heads) + 1, 9), 12), 5.6, 2, sharex=True,
                                     sharey=True)
    titles = (f"from the position embeddings alone (query at {r['query']})",
              f"on text, the mean over {meta['n_tokens']:,} tokens")
    distances = ("on the token itself", "1 back", "2 back")
    for ax, rows, title in zip(axes, (r["from_positions"], r["on_text"]), titles):
        series = {d: list(values) for d, values in zip(distances, zip(*rows))}
        charts.bars(ax, heads, series)
        ax.set_title(title, loc="left")
        ax.set_ylabel("share of attention")
    if len(series) > 1:
        axes[1].get_legend().remove()
    axes[1].set_xlabel("head (* leans on position: more than 0.5 in the upper panel)")
    charts.headline(figure, results, "attention of every head 0, 1 and 2 tokens back")
    return figure


def plot_keep(r: dict, results: dict):
    """The pushes of one head through one source after two prompts: one ratio. Beside them, on the
    same scale, the article's example by hand."""
    bugs = [b for b in (r, r["sample"]) if b and "skipped" not in b]
    found = [(b, [p for p in b["prompts"] if "skipped" not in p]) for b in bugs]
    bug, prompts = next((x for x in found if x[1]), (None, None))
    if not bug:
        return None
    source, (one, two) = charts.label(bug["source"]), bug["pair"]
    groups = [f"{charts.label(p['prompt'], 40)}\nreads {source} with weight {p['attention']:.2f}\n"
              f"{charts.label(two)} / {charts.label(one)} = {_ratio(p)}" for p in prompts]
    toy = {e["key"]: e["value"] for e in charts.published("part4_toy")["entries"]}
    figure, (hand, ax) = charts.new_figure(12, 4.2, 1, 2, sharey=True, width_ratios=[2, 3])
    charts.bars(hand, [f"after '{b}'\nreads 'keep' with weight {toy[f'keep.weights.{b}']}"
                       for b in ("in", "at")],
                {f"'{c}'": [toy[f"keep.pushes.{b}.{c}"] for b in ("in", "at")]
                 for c in ("mind", "bay")}, "{:+.1f}")
    hand.set_title("by hand", loc="left")
    hand.set_ylabel("push (logits)")
    pushes = {charts.label(w): [p["through"][w] for p in prompts] for w in (one, two)}
    charts.bars(ax, groups, pushes, "{:+.2f}")
    ax.set_title(f"measured: head 0.{bug['head']}, through {source}", loc="left")
    charts.headline(figure, results, f"the bug of head 0.{bug['head']}: one ratio after {source}, "
                    "whatever the destination")
    return figure


def _ratio(prompt: dict) -> str:
    return "-" if prompt["ratio"] is None else f"{prompt['ratio']:.2f}"


def plot_eigenvalues(r: dict, results: dict):
    """The eigenvalues of every head and of one random head: direction, and size on a log scale."""
    panels = [(f"head 0.{h}", x["eigenvalues"], x["copy_score"])
              for h, x in enumerate(r["heads"])]
    panels.append(("a random head", r["random"]["eigenvalues"], r["random"]["copy_score"][0]))
    columns = math.ceil(len(panels) ** 0.5)
    rows = math.ceil(len(panels) / columns)
    figure, axes = charts.new_figure(max(7, 2.3 * columns), 2.4 * rows + 1, rows, columns,
                                     squeeze=False, subplot_kw={"projection": "polar"})
    for ax in axes.flat[len(panels):]:
        ax.remove()
    for ax, (name, values, score) in zip(axes.flat, panels):
        size = [math.hypot(*v) for v in values]
        radius = [max(0, math.log10(s / max(size)) + DECADES) if s else 0 for s in size]
        ax.plot((0, 0), (0, DECADES), color="black", linewidth=1.2)  # the positive real axis
        ax.scatter([math.atan2(im, re) for re, im in values], radius, s=16, alpha=0.7, linewidth=0,
                   c=[charts.COLOURS[0 if re > 0 else 5] for re, _ in values], clip_on=False,
                   zorder=3)
        ax.set(rlim=(0, DECADES), rticks=range(1, DECADES))
        ax.set_yticklabels([])
        ax.set_thetagrids((0, 90, 180, 270), ("+", "+i", "−", "−i"))
        ax.tick_params(pad=0)
        largest = f"{max(size):,.0f}" if max(size) >= 100 else f"{max(size):.3g}"
        ax.set_title(f"{name}: copy score {score:+.2f}\nlargest |λ| {largest}", fontsize=9)
    figure.supxlabel(
        "Distance from the centre: |λ| on a log scale, a factor of 10 from ring to ring, the\n"
        f"largest of the head at the rim, 1/{10**DECADES:,} of it or less at the centre.\n"
        "Black: the positive real axis. Blue: real part above 0, orange: below.",
        fontsize=9)
    charts.headline(figure, results, f"the {len(panels[0][1])} non-zero eigenvalues λ of every OV "
                    "circuit")
    return figure


def plot_copy_scores(r: dict, results: dict):
    """The copy score of every head, the largest first, and the band of the random heads."""
    heads, random = names_of_heads(results), r["random"]["copy_score"]
    scores = [x["copy_score"] for x in r["heads"]]
    order = sorted(range(len(heads)), key=lambda h: -scores[h])
    figure, ax = charts.new_figure(max(8, 0.6 * len(heads) + 1), 4.2)
    charts.bars(ax, [heads[h] for h in order], {"copy score": [scores[h] for h in order]},
                "{:+.2f}")
    ax.axhspan(min(random), max(random), -0.01, 1.01, facecolor="0.85", edgecolor="black",
               linestyle="--", linewidth=0.8, zorder=0, label=f"{len(random)} random heads: "
               f"{min(random):+.3f} to {max(random):+.3f}")
    for text in ax.texts:
        text.set_bbox(dict(facecolor="white", linewidth=0, pad=0.8))
    ax.set(ylim=(-1.15, 1.15), ylabel="copy score  Σλ / Σ|λ|  (dimensionless)",
           xlabel="head (* leans on position)")
    ax.legend(handles=ax.patches[-1:], frameon=False, loc="lower right", bbox_to_anchor=(1, 1))
    charts.headline(figure, results, "the copy score of every head, against random heads")
    return figure


def plot_copying(r: list[dict], results: dict):
    """The measures of copying side by side, one unit equally high in all."""
    heads, s = names_of_heads(results), results["sections"]
    first, last = r[0]["sources"]
    scores, some = [x["copy_score"] for x in s["eigen"]["heads"]], f"tokens {first:,} to {last:,}"
    all_tokens = f"all {s['sizes']['d_vocab']:,} tokens"
    measures = {"copy score": scores,
                f"diagonal > 0: share of {all_tokens} that raise themselves":
                    [x["diagonal_positive"] for x in r],
                f"top-1 self: share of {some} that raise no token more": [x["top1"] for x in r],
                f"top-5 self: share of {some} that are among the five they raise most":
                    [x["top5"] for x in r]}
    low = min(0, *scores) - 0.25
    figure, axes = charts.new_figure(max(8, 0.6 * len(heads) + 1), 6.4, 4, sharex=True,
                                     height_ratios=(1.25 - low, 1.25, 1.25, 1.25))
    for ax, (name, values) in zip(axes, measures.items()):
        score = values is scores
        charts.bars(ax, heads, {name: values}, "{:+.2f}" if score else "{:.2f}")
        ax.set(ylim=(low if score else 0, 1.25), ylabel="Σλ / Σ|λ|" if score else "share")
        ax.set_title(name, loc="left", fontsize=10)
    axes[-1].set_xlabel("head (* leans on position)")
    charts.headline(figure, results, "the measures of copying side by side")
    return figure


# ------------------------------------------------------------------ the toy heads

NAMES = {"copy": "a copying head", "swap": "a swapping head", "rotation": "a rotating head",
         "pathological": "a pathological one", "negative": "the first, negative"}


def plot_toy_keep(r: dict, results: dict):
    """What the text needs, and what one head gives."""
    (low, high), (one, two) = (sorted(r[k], key=r[k].get) for k in ("weights", "entries"))
    figure, (needs, gives) = charts.new_figure(9, 3.8, 1, 2)
    charts.bars(needs, [f"after '{b}'" for b in (low, high)], {one: [1, 0.2], two: [0.2, 1]}, None)
    for bars, labels in zip(needs.containers, (("high", "low"), ("low", "high"))):
        needs.bar_label(bars, labels, padding=2, fontsize=8)
    needs.set(ylabel="push", yticks=[])
    needs.set_title("what the text needs", loc="left")
    needs.get_legend().remove()
    groups = [f"after '{b}'\nweight {r['weights'][b]:g} on 'keep'\n{two} / {one} = "
              f"{r['ratio'][b]:g}" for b in (low, high)]
    charts.bars(gives, groups, {c: [r["pushes"][b][c] for b in (low, high)] for c in (one, two)},
                "{:+.1f}")
    gives.set_ylabel("push (logits)")
    gives.set_title("what one head gives", loc="left")
    figure.suptitle("by hand: one head reads 'keep', and has one ratio after every destination")
    return figure


def plot_matrices(r: dict, results: dict):
    """What each head of the article does to the two logits, and its eigenvectors."""
    figure, axes = charts.new_figure(10, 3.7, 1, 4)
    for ax, name in zip(axes, ("copy", "swap", "rotation", "pathological")):
        m = r[name]
        for t in m["vectors"]:
            ax.axline((0, 0), t["v"], color="0.6", linestyle="--", linewidth=1, label="eigenvector")
        for i, (x, y) in enumerate(m["columns"]):
            ax.annotate("", (x, y), (0, 0), arrowprops={
                "color": charts.COLOURS[i], "width": 2, "headwidth": 8, "headlength": 8})
            ax.plot(x, y, color=charts.COLOURS[i], label=f"reading token {i + 1}")
        limit = 1.25 * max(map(abs, sum(m["columns"], [])))
        ax.set(xlim=(-limit, limit), ylim=(-limit, limit), aspect="equal",
               xlabel="logit of token 1", ylabel="logit of token 2")
        ax.locator_params(nbins=5, integer=True)
        values = ", ".join(charts.number(v) for v in m["eigenvalues"])
        angle = f"eigenvectors {m['angle']:.1f}° apart" if m["vectors"] else "no real eigenvector"
        ax.set_title(f"{NAMES[name]}: score {m['copy_score']:g}\neigenvalues {values}\n{angle}\n"
                     f"token 1 read: logits {charts.vector(m['columns'][0])}", fontsize=9)
    figure.legend(handles=axes[0].lines[1:], loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle("by hand: what reading a token does to two logits, and the eigenvectors")
    return figure


FIGURES = [  # file name, section, plot
    ("part4_skip_trigrams", "skip_trigrams", plot_skip_trigrams),
    ("part4_at_work", "at_work", plot_at_work),
    ("part4_positional", "positional", plot_positional),
    ("part4_keep", "keep", plot_keep),
    ("part4_eigenvalues", "eigen", plot_eigenvalues),
    ("part4_copy_scores", "eigen", plot_copy_scores),
    ("part4_copying", "copying", plot_copying),
]
TOY_FIGURES = [  # file name, section, plot
    ("part4_toy_keep", "keep", plot_toy_keep),
    ("part4_toy_matrices", "matrices", plot_matrices),
]
