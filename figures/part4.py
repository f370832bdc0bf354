"""The pictures of part 4, drawn from a results dict."""

from __future__ import annotations

import itertools
import math

from figures import charts

DECADES = 3  # of |l| below a head's largest that its picture shows (section 6)
SMALL = 0.3  # shares that are all below it have a scale of their own
ARROW = 2.3  # inches of the arrow from a prompt to the next token


def plot_skip_trigrams(r: list[dict], results: dict):
    """The table: a row per source, the largest entry of each list first."""
    shown = [t for t in r if "skipped" not in t]
    if not shown:
        return None
    rows = [[f"0.{t['head']}", *map(charts.label, [t["source"], *t["dest"], *t["out"]])]
            for t in shown]
    columns = zip(["head", "source", *[""] * 10], *rows)
    lefts = list(itertools.accumulate((2 + max(map(len, c)) for c in columns), initial=0))
    width = max(lefts[-1] * charts.CHARACTER, 8)
    figure, ax = charts.new_figure(width + 0.2, 0.25 * len(rows) + 1.35)
    _write_table(ax, lefts, shown, rows)
    ax.set(xlim=(0, width / charts.CHARACTER), ylim=(len(rows) - 0.3, -1.7))
    ax.set_axis_off()
    figure.supxlabel(_how_to_read([t["source"] for t in r if "skipped" in t]), fontsize=9)
    return charts.finished(figure, "skip-trigrams read from the weights, head by head", results)


def _write_table(ax, lefts: list[int], shown: list[dict], rows: list[list[str]]) -> None:
    """Write the cells at `lefts` characters, and shade those with the source's own word."""
    shade = {"facecolor": charts.COLOURS[4], "alpha": 0.4, "linewidth": 0, "pad": 2}
    heads = {0: "head", 1: "source", 2: "top destinations (QK)", 7: "top out tokens (OV)"}
    for j, text in heads.items():
        ax.text(lefts[j], -1, text, fontsize=9, va="center")
    for i, (t, row) in enumerate(zip(shown, rows)):
        words = ["", "", *t["dest"], *t["out"]]
        for x, cell, word in zip(lefts, row, words):
            own = _same_word(word, t["source"])
            ax.text(x, i, cell, va="center", bbox=shade if own else None, **charts.MONOSPACED)
    ax.hlines((-1.6, -0.5, len(rows) - 0.4), 0, lefts[-1], color="black", linewidth=(1.2, 0.6, 1.2))
    ax.vlines(lefts[7] - 1, -1.6, len(rows) - 0.4, color="black", linewidth=0.6)


def _same_word(token: str, other: str) -> bool:
    return token.strip().lower() == other.strip().lower()


def _how_to_read(missing: list[str]) -> str:
    text = ("A row reads [source] … [destination] → [out]; the largest entry of each list is "
            "first. Shaded: the source's own word.\nA list ranks the entries of one head; it does "
            "not predict the next token.")
    if missing:
        text += f"\nSkipped, not in this model: {', '.join(map(charts.label, missing))}."
    return text


def plot_at_work(r: dict, results: dict):
    """What one head reads in a prompt, and every head's push on the next token."""
    word = r["ralph"]
    if "skipped" in word:
        return None
    out, source, n = charts.label(word["next"]), charts.label(word["source"]), len(word["pushes"])
    places, length = _places([charts.label(t) for t in word["tokens"]], out)
    figure, (strip, ax) = charts.new_figure(max(8, length + 1.2, min(n + 1, 13)), 4.8, 2,
                                            height_ratios=(1, 2.6))
    _write_prompt(strip, word, places)
    _draw_arrows(strip, word, places)
    spare = max(figure.get_figwidth() - 1.2 - length, 0) / 2
    strip.set(xlim=(-spare, length + spare), ylim=(-0.4, 1.2))
    strip.set_axis_off()
    series = {"whole head": word["pushes"],
              f"through {source} alone": word["pushes_through_source"]}
    charts.bars(ax, [f"0.{h}" for h in range(n)], series, "{:+.2f}")
    ax.set(xlabel="head", ylabel=f"push on the logit of {out} (logits)")
    title = (f"each head's push on {out} after {charts.label(word['tokens'][-1])}, whole and "
             f"through {source} alone")
    return charts.finished(figure, title, results)


def _places(prompt: list[str], out: str) -> tuple[list[float], float]:
    """Where the middles of the tokens and of the next one are, and how far they reach, in inches.

    Before the next token there is room for the arrow and what is written at it.
    """
    widths = [len(text) * charts.CHARACTER + 0.2 for text in prompt]
    ends = list(itertools.accumulate(widths))
    last = len(out) * charts.CHARACTER + 0.2
    middles = [end - width / 2 for end, width in zip(ends, widths)]
    return [*middles, ends[-1] + ARROW + last / 2], ends[-1] + ARROW + last


def _write_prompt(ax, word: dict, places: list[float]) -> None:
    """Write the tokens of a prompt and the next one in boxes; the one that is read has a colour."""
    tokens = [*word["tokens"], word["next"]]
    colours = [charts.COLOURS[1] if t == word["source"] else "0.8" for t in word["tokens"]]
    for x, token, colour in zip(places, tokens, [*colours, charts.COLOURS[0]]):
        box = {"facecolor": colour, "alpha": 0.4, "linewidth": 0, "boxstyle": "round,pad=0.25"}
        ax.text(x, 0, charts.label(token), ha="center", va="center", bbox=box,
                **charts.MONOSPACED)


def _draw_arrows(ax, word: dict, places: list[float]) -> None:
    """Draw an arrow from the last token to each that is read, and one to the next token."""
    read = [x for x, t in zip(places[:-2], word["tokens"]) if t == word["source"]]
    for x in read:
        bend = 0.75 / (places[-2] - x)
        ax.annotate("", (x, 0.2), (places[-2], 0.2), arrowprops={
            "arrowstyle": "-|>", "color": "black", "connectionstyle": f"arc3,rad={bend}"})
    head, source = word["head"], charts.label(word["source"])
    middle = (min(read, default=places[0]) + places[-2]) / 2
    ax.text(middle, 0.9, f"head 0.{head} reads {source} with weight {word['attention']:.2f}",
            ha="center", va="bottom", fontsize=9)
    start = places[-2] + len(charts.label(word["tokens"][-1])) * charts.CHARACTER / 2 + 0.1
    ax.annotate("", (start + ARROW - 0.05, 0), (start + 0.05, 0),
                arrowprops={"arrowstyle": "-|>", "color": "black"})
    through, whole = (charts.written(word[key][head], "{:+.2f}")
                      for key in ("pushes_through_source", "pushes"))
    ax.text(start + ARROW / 2, 0.12, f"through {source}:\n{through} of {whole} logits",
            ha="center", va="bottom", fontsize=9)


def names_of_heads(results: dict) -> list[str]:
    """0.0, 0.1, ..., with a star at those that lean on position."""
    r = results["sections"]["positional"]
    names = [f"0.{h}" for h in range(len(r["from_positions"]))]
    for h in r["lean"]:
        names[h] += "*"
    return names


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
    return charts.finished(figure, "attention of every head 0, 1 and 2 tokens back: "
                           f"{len(r['lean'])} of {len(heads)} lean on position", results)


def plot_keep(r: dict, results: dict):
    """The pushes of one head through one source after two prompts: one ratio."""
    prompts = [p for p in r.get("prompts", []) if "skipped" not in p]
    if not prompts:
        return None
    source = charts.label(r["source"])
    figure, ax = charts.new_figure(8, 4.2)
    charts.bars(ax, [_what_is_read(r, p) for p in prompts],
                {charts.label(w): [p["through"][w] for p in prompts] for w in r["pair"]},
                "{:+.2f}")
    ax.set_ylabel(f"push through {source} (logits)")
    return charts.finished(figure, f"the bug of head 0.{r['head']}: one ratio after {source}, "
                           "whatever the destination", results)


def _what_is_read(bug: dict, prompt: dict) -> str:
    one, two = map(charts.label, bug["pair"])
    return (f"{charts.label(prompt['prompt'], 40)}\n"
            f"reads {charts.label(bug['source'])} with weight {prompt['attention']:.2f}\n"
            f"{two} / {one} = {charts.written(prompt['ratio'], '{:.2f}')}")


def plot_eigenvalues(r: dict, results: dict):
    """The eigenvalues of every head and of one random head: direction, and size on a log scale."""
    panels = [(f"head 0.{h}", x["eigenvalues"], x["copy_score"])
              for h, x in enumerate(r["heads"])]
    panels.append(("a random head", r["random"]["eigenvalues"], r["random"]["copy_score"][0]))
    columns = math.ceil(len(panels) ** 0.5)
    rows = math.ceil(len(panels) / columns)
    figure, axes = charts.new_figure(max(7, 2.3 * columns), 2.4 * rows + 1, rows, columns,
                                     squeeze=False)
    for ax in axes.flat:
        ax.set_axis_off()
    for ax, (name, values, score) in zip(axes.flat, panels):
        largest = max((math.hypot(*v) for v in values), default=0)
        _plot_plane(ax, values, largest)
        size = f"{largest:,.0f}" if largest >= 100 else f"{largest:.3g}"
        ax.set_title(f"{name}: copy score {charts.written(score, '{:+.2f}')}\nlargest |λ| {size}",
                     fontsize=9)
    figure.supxlabel(
        "To the right: real part, upwards: imaginary part. Distance from the centre: |λ| on a\n"
        "log scale, a factor of 10 from ring to ring; the largest of the head is at the rim, and\n"
        f"1/{10**DECADES:,} of it or less at the centre. The line: the positive real axis. Blue: "
        "real\npart above 0, orange: below.", fontsize=9)
    return charts.finished(figure, f"the {len(panels[0][1])} non-zero eigenvalues λ of every OV "
                           "circuit: those of a head that copies lie to the right", results)


def _plot_plane(ax, values: list[list[float]], largest: float) -> None:
    """Dots in the complex plane: their direction is true, their distance is on a log scale."""
    from matplotlib.patches import Circle

    for ring in range(1, DECADES + 1):
        colour = "black" if ring == DECADES else "0.7"
        ax.add_patch(Circle((0, 0), ring, fill=False, edgecolor=colour))
    ax.plot((0, DECADES), (0, 0), color="0.5", linewidth=0.6, zorder=1)
    dots = [_on_log_scale(*v, largest) for v in values]
    ax.scatter([x for x, _ in dots], [y for _, y in dots], s=16, alpha=0.7, linewidth=0,
               c=[charts.COLOURS[0 if re > 0 else 5] for re, _ in values], clip_on=False, zorder=3)
    limit = 1.03 * DECADES
    ax.set(xlim=(-limit, limit), ylim=(-limit, limit), aspect="equal")


def _on_log_scale(real: float, imaginary: float, largest: float) -> tuple[float, float]:
    """The place of an eigenvalue, the largest DECADES from the centre."""
    size = math.hypot(real, imaginary)
    if not size:
        return 0.0, 0.0
    radius = max(0, math.log10(size / largest) + DECADES)
    return radius * real / size, radius * imaginary / size


def plot_copy_scores(r: dict, results: dict):
    """The copy score of every head, the largest first, and the band of the random heads."""
    heads, random = names_of_heads(results), r["random"]["copy_score"]
    scores = [x["copy_score"] for x in r["heads"]]
    known = sorted((h for h, score in enumerate(scores) if score is not None),
                   key=scores.__getitem__, reverse=True)
    order = [*known, *(h for h, score in enumerate(scores) if score is None)]
    figure, ax = charts.new_figure(max(8, 0.6 * len(heads) + 1), 4.2)
    charts.bars(ax, [heads[h] for h in order], {"copy score": [scores[h] for h in order]},
                "{:+.2f}")
    ax.axhspan(min(random), max(random), -0.01, 1.01, facecolor="0.85", edgecolor="black",
               linestyle="--", linewidth=0.8, zorder=0, label=charts.minus(
                   f"{len(random)} random heads: {min(random):+.3f} to {max(random):+.3f}"))
    for text in ax.texts:
        text.set_bbox({"facecolor": "white", "linewidth": 0, "pad": 0.8})
    ax.set(ylim=(-1.15, 1.15), ylabel="copy score  Σλ / Σ|λ|  (dimensionless)",
           xlabel="head (* leans on position)")
    ax.legend(handles=ax.patches[-1:], frameon=False, loc="lower right", bbox_to_anchor=(1, 1))
    above = sum(scores[h] > max(random) for h in known)
    return charts.finished(figure, f"{above} of {len(scores)} heads have a copy score above those "
                           f"of {len(random)} random heads", results)


def plot_copying(r: list[dict], results: dict):
    """The measures of copying side by side, one unit equally high in all.

    Only shares that are all small have a scale of their own, which their title then says.
    """
    heads, s = names_of_heads(results), results["sections"]
    first, last = r[0]["sources"]
    scores = [x["copy_score"] for x in s["eigen"]["heads"]]
    some = f"tokens {first:,} to {last:,}"
    shares = {"diagonal_positive": f"diagonal > 0: share of all {s['sizes']['d_vocab']:,} tokens "
                                   "that raise themselves",
              "top1": f"top-1 self: share of {some} that raise no token more",
              "top5": f"top-5 self: share of {some} that are among the five they raise most"}
    low = min([0, *(x for x in scores if x is not None)]) - 0.25
    figure, (top, *rest) = charts.new_figure(max(8, 0.6 * len(heads) + 1), 6.4, 4, sharex=True,
                                             height_ratios=(1.25 - low, 1.25, 1.25, 1.25))
    _plot_measure(top, heads, "copy score", scores, "{:+.2f}")
    top.set(ylim=(low, 1.25), ylabel="Σλ / Σ|λ|")
    for ax, (key, title) in zip(rest, shares.items()):
        values = [x[key] for x in r]
        small = max(values) < SMALL
        _plot_measure(ax, heads, f"{title} (enlarged)" if small else title, values, "{:.2f}")
        ax.set(ylim=(0, 1.25 * max(*values, 0.01) if small else 1.25), ylabel="share")
    rest[-1].set_xlabel("head (* leans on position)")
    return charts.finished(figure, "four measures of copying, head by head", results)


def _plot_measure(ax, heads: list[str], title: str, values: list, form: str) -> None:
    charts.bars(ax, heads, {title: values}, form)
    ax.set_title(title, loc="left", fontsize=10)


# ------------------------------------------------------------------ the toy heads

NAMES = {"copy": "a copying head", "swap": "a swapping head", "rotation": "a rotating head",
         "pathological": "a pathological one", "negative": "the first, negative"}


def plot_toy_keep(r: dict, results: dict):
    """What the text needs, and what one head gives."""
    low, high = sorted(r["weights"], key=r["weights"].get)
    one, two = sorted(r["entries"], key=r["entries"].get)
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
    return charts.finished(figure, "by hand: one head reads 'keep', and has one ratio after every "
                           "destination")


def plot_matrices(r: dict, results: dict):
    """What each head of the article does to the two logits, and its eigenvectors."""
    figure, axes = charts.new_figure(10, 3.7, 1, 4)
    for ax, name in zip(axes, ("copy", "swap", "rotation", "pathological")):
        m = r[name]
        _draw_matrix(ax, m)
        values = ", ".join(charts.number(v) for v in m["eigenvalues"])
        angle = f"eigenvectors {m['angle']:.1f}° apart" if m["vectors"] else "no real eigenvector"
        ax.set_title(charts.minus(
            f"{NAMES[name]}: score {m['copy_score']:g}\neigenvalues {values}\n{angle}\n"
            f"token 1 read: logits {charts.vector(m['columns'][0])}"), fontsize=9)
    figure.legend(handles=axes[0].lines[1:], loc="outside lower center", ncols=3, frameon=False)
    return charts.finished(figure, "by hand: what reading a token does to two logits, and the "
                           "eigenvectors")


def _draw_matrix(ax, m: dict) -> None:
    """The columns of a matrix as arrows in the plane of the two logits, over its eigenvectors."""
    for t in m["vectors"]:
        ax.axline((0, 0), t["v"], color="0.6", linestyle="--", linewidth=1, label="eigenvector")
    for i, (x, y) in enumerate(m["columns"]):
        ax.annotate("", (x, y), (0, 0), arrowprops={
            "color": charts.COLOURS[i], "width": 2, "headwidth": 8, "headlength": 8})
        ax.plot(x, y, color=charts.COLOURS[i], label=f"reading token {i + 1}")
    limit = 1.25 * max(abs(value) for column in m["columns"] for value in column)
    ax.set(xlim=(-limit, limit), ylim=(-limit, limit), aspect="equal",
           xlabel="logit of token 1", ylabel="logit of token 2")
    ax.locator_params(nbins=5, integer=True)


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
