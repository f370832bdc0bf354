"""The few kinds of chart that the pictures are made of."""

from __future__ import annotations

import functools
import json
import pathlib
import textwrap

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000", "#F0E442")
SEQUENTIAL, DIVERGING = "viridis", "PuOr_r"  # colour-blind safe, as COLOURS (Okabe and Ito) are
HERE = pathlib.Path(__file__).resolve().parent


def style():
    """A context in which everything is drawn in the house style."""
    import matplotlib

    return matplotlib.rc_context(fname=HERE / "house.mplstyle")


def published(stem: str) -> dict:
    """The file of what the article prints."""
    file = HERE.parent / "results" / "published" / f"{stem}.json"
    return json.loads(file.read_text(encoding="utf-8"))


def new_figure(width: float, height: float, rows: int = 1, columns: int = 1, **subplots):
    """A Figure of width x height inches whose parts keep clear of each other, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure((width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **subplots)


@functools.cache
def _drawable() -> frozenset[int]:
    from matplotlib import font_manager

    return frozenset(font_manager.get_font(font_manager.findfont("DejaVu Sans")).get_charmap())


def drawable(text: str) -> str:
    """A text for a figure: what is no printable sign of its font is written as Python escapes it,
    so that no token or file name can break the figure."""
    return "".join(_signs(text))


def _signs(text: str) -> list[str]:
    return [c if c.isprintable() and ord(c) in _drawable() else ascii(c)[1:-1] for c in text]


def label(token: str, limit: int = 18) -> str:
    """A token in quotes for a figure, as drawable() writes it; one that is longer than `limit`
    ends in an ellipsis."""
    signs, short = _signs(token), ""
    if sum(map(len, signs)) <= limit:
        return f"'{''.join(signs)}'"
    while len(short) + len(signs[0]) < limit:
        short += signs.pop(0)
    return f"'{short}…'"


def heat_map(ax, values, rows: list[str], columns: list[str], bar: str, digits: int | None = 2,
             limits: tuple[float, float] | None = None, diverging: bool = False):
    """values [row, column] as coloured cells with their numbers in them (digits None: without; and
    without where they would not fit), and a colour bar with the label `bar`, if there is one.
    Diverging scales are centred on zero."""
    import numpy as np

    values = np.asarray(values, dtype=float)
    if limits is None:
        limits = (values.min(), values.max()) if not diverging else (-abs(values).max(), 0)
    low, high = (-max(map(abs, limits)), max(map(abs, limits))) if diverging else limits
    image = ax.imshow(values, cmap=DIVERGING if diverging else SEQUENTIAL, vmin=low, vmax=high,
                      aspect="auto")
    ax.set_xticks(range(len(columns)), columns, rotation=0 if font_size(ax, columns, 9) else 90)
    ax.set_yticks(range(len(rows)), rows)
    cells = [[f"{v:z.{digits or 0}f}" for v in row] for row in values]
    size = font_size(ax, max(cells, key=lambda row: max(map(len, row))), 9, 8, 7)
    for (i, j), v in np.ndenumerate(values) if digits is not None and size else ():
        ax.text(j, i, cells[i][j], ha="center", va="center", fontsize=size,
                color=ink(image.cmap(image.norm(v))))
    for axis, n in ((ax.xaxis, len(columns)), (ax.yaxis, len(rows))):
        axis.set_ticks([i + 0.5 for i in range(n - 1)], minor=True)
    ax.grid(which="minor", color="white", linewidth=0.6)
    ax.spines[:].set_visible(False)
    ax.tick_params(which="both", length=0)
    return ax.figure.colorbar(image, ax=ax, label=bar) if bar else None


def ink(colour) -> str:
    """Black or white, whichever can be read on a colour."""
    from matplotlib.colors import to_rgb

    r, g, b = to_rgb(colour)
    return "white" if 0.299 * r + 0.587 * g + 0.114 * b < 0.5 else "black"


def font_size(ax, texts: list[str], *sizes: float) -> float | None:
    """The first of the sizes at which these texts have room side by side across the axes."""
    room = ax.figure.get_figwidth() * ax.get_position().width / len(texts)
    return next((s for s in sizes if text_width(max(texts, key=len), s) + 0.05 < room), None)


def heat_maps(axes, maps, rows: list[str], columns: list[str], bar: str, digits: int | None = 2,
              diverging: bool = False):
    """A heat map on each of the axes, all on one scale from zero, or on both sides of it, and one
    colour bar for them."""
    import numpy as np

    limits = (0, np.nanmax(np.abs(maps)))
    for ax, values in zip(axes, maps):
        heat_map(ax, values, rows, columns, "", digits, limits, diverging)
    return axes[0].figure.colorbar(axes[0].images[0], ax=list(axes), label=bar)


def headline(figure, results: dict, text: str) -> None:
    """The title of a figure: the model, and what is seen of it."""
    text = f"{drawable(results['meta']['model'])[:40]}: {text}"
    figure.suptitle(textwrap.fill(text, int(10 * figure.get_figwidth())))


def text_width(text: str, size: float) -> float:
    """Inches that a text takes."""
    from matplotlib.textpath import TextPath

    return TextPath((0, 0), text, size=size).get_extents().width / 72 if text else 0.0


def bars(ax, groups: list[str], series: dict[str, list[float]],
         form: str | tuple | None = "{:z.2f}", errors: dict | None = None):
    """The values of every series side by side in each group, from a line at zero; each with its
    number as `form` writes it (a tuple: of each series; None: without) unless the bars are more
    than 24, and with its error bar where errors {series: values} has one. More than one series has
    a legend."""
    width = 0.8 / len(series)
    for i, (name, values) in enumerate(series.items()):
        x = [g + (i + 0.5) * width - 0.4 for g in range(len(values))]
        drawn = ax.bar(x, values, 0.94 * width, label=name, color=COLOURS[i],
                       yerr=(errors or {}).get(name), error_kw={"elinewidth": 1, "capsize": 3})
        if form and len(groups) * len(series) <= 24:
            ax.bar_label(drawn, fmt=form if isinstance(form, str) else form[i], padding=2,
                         fontsize=8)
    ax.set_xticks(range(len(groups)), groups)
    ax.tick_params(axis="x", length=0)
    ax.spines["bottom"].set_visible(False)
    ax.axhline(0, color="black", linewidth=0.8, clip_on=False)
    middle, half = (len(groups) - 1) / 2, max(len(groups), 2) / 2 + 0.1
    ax.set_xlim(middle - half, middle + half)
    ax.margins(y=0.12)
    if len(series) > 1:
        ax.legend(frameon=False, ncols=len(series), loc="lower right", bbox_to_anchor=(1, 1))


def number(value: list[float]) -> str:
    """A complex number [real, imaginary]."""
    real, imaginary = value
    part = {0: "", 1: "+i", -1: "-i"}.get(imaginary, f"{imaginary:+g}i")
    return (f"{real:g}" if real or not part else "") + part


def vector(values) -> str:
    return "(" + ", ".join(f"{v:g}" for v in values) + ")"


def plain(rows) -> str:
    return " ".join(vector(row) for row in rows)
