"""The few kinds of chart that the pictures are made of."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
import sys
import textwrap

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000", "#F0E442")
SEQUENTIAL, DIVERGING = "viridis", "PuOr_r"  # colour-blind safe, as COLOURS (Okabe and Ito) are
CELL = (0.45, 0.28)  # inches across and down: room for a number of three decimals
PLAIN_CELL = (0.2, 0.2)  # of a map without numbers
CHARACTER = 0.602 * 9 / 72  # inches that a character takes in DejaVu Sans Mono at 9 points
MONOSPACED = {"family": "monospace", "size": 9}
MOST_COLUMNS = 24  # a map of more is drawn small, without numbers
MOST_UPRIGHT = 16  # the names of more groups of bars are turned
MOST_LABELS = 24  # more bars than these have no room for their numbers
HERE = pathlib.Path(__file__).resolve().parent


def style():
    """A context in which everything is drawn in the house style, whatever the user's settings.

    Matplotlib's defaults come first, then house.mplstyle; no matplotlibrc counts.
    """
    if "matplotlib" not in sys.modules:
        _import_matplotlib(os.environ.pop("MPLBACKEND", None))
    import matplotlib

    return matplotlib.rc_context(fname=HERE / "house.mplstyle")


def _import_matplotlib(backend: str | None) -> None:
    """Import it without MPLBACKEND, then set that backend for others; no picture here needs it.

    The import would fail on an unknown backend, such as that of a notebook in another environment.
    """
    try:
        import matplotlib
    finally:
        if backend is not None:
            os.environ["MPLBACKEND"] = backend
    if backend:
        with contextlib.suppress(ValueError):
            matplotlib.rcParams["backend"] = backend


def published(stem: str) -> dict:
    """The numbers that the article prints, from their file."""
    file = HERE.parent / "results" / "published" / f"{stem}.json"
    return json.loads(file.read_text(encoding="utf-8"))


# ------------------------------------------------------------------ figures


def new_figure(width: float, height: float, rows: int = 1, columns: int = 1, **subplots):
    """A figure of width x height inches, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure((width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **subplots)


def map_figure(table: list[list], rows: int = 1, columns: int = 1, cell=CELL, **subplots):
    """A figure with room for rows x columns maps of this table; cells have a fixed size."""
    cell = PLAIN_CELL if len(table[0]) > MOST_COLUMNS else cell
    width = max(cell[0] * len(table[0]), 2.6)
    height = max(cell[1] * len(table), 1.8)
    return new_figure(max(1.9 + columns * (width + 0.2), 6.4), 1.3 + rows * (height + 0.4), rows,
                      columns, **subplots)


def finished(figure, title: str, results: dict | None = None):
    """The figure with its title, which names the model of the results.

    The layout is worked out here, once, and not again for each file that is saved.
    """
    if results:
        title = f"{ascii(results['meta']['model'])[1:-1][:40]}: {title}"
    figure.suptitle(textwrap.fill(title, int(10 * figure.get_figwidth())))
    figure.get_layout_engine().execute(figure)
    figure.set_layout_engine(None)  # "none" would keep a stand-in, for which savefig draws twice
    return figure


# ------------------------------------------------------------------ text


def label(token: str, limit: int = 18) -> str:
    """A token in quotes and in ASCII, so that every font has it; cut after `limit` characters.

    The quotes of a token that holds an apostrophe are curved, so that all of them can be told.
    """
    text = ascii(token)
    if len(text) > limit + 2:
        text = f"{text[:limit]}…{text[0]}"
    return f"“{text[1:-1]}”" if text[0] == '"' else text


def minus(number: str) -> str:
    """A number with a minus sign in place of the hyphen."""
    return number.replace("-", "\N{MINUS SIGN}")


def written(value: float | None, form: str) -> str:
    """A number in the given form, and a dash where there is none."""
    return "-" if value is None else minus(form.format(value))


def ink(colour) -> str:
    """Black or white, whichever can be read on a colour."""
    from matplotlib.colors import to_rgb

    r, g, b = to_rgb(colour)
    return "white" if 0.299 * r + 0.587 * g + 0.114 * b < 0.5 else "black"


def number(value: list[float]) -> str:
    """A complex number [real, imaginary]."""
    real, imaginary = value
    part = {0: "", 1: "+i", -1: "-i"}.get(imaginary, f"{imaginary:+g}i")
    return (f"{real:g}" if real or not part else "") + part


def vector(values) -> str:
    return "(" + ", ".join(f"{v:g}" for v in values) + ")"


def plain(rows) -> str:
    return " ".join(vector(row) for row in rows)


# ------------------------------------------------------------------ charts


def heat_maps(axes, maps, rows: list[str], columns: list[str], bar: str, digits: int | None = 2,
              diverging: bool = False) -> None:
    """A table of coloured cells on each of the axes, and one colour bar with the label `bar`.

    All have one scale, which starts at zero or, if it is diverging, has zero in the middle. Cells
    hold their number, unless digits is None or the map is too wide. Where there is no number the
    cell is hatched: None stands for a value that is not defined, and has a dash; NaN for a pair
    that does not exist.
    """
    import numpy as np

    values = np.array(maps, dtype=float)  # None becomes NaN
    high = np.nanmax(np.abs(values), initial=0) or 1
    low = -high if diverging else 0
    for ax, table, cells in zip(axes, values, maps):
        mesh = ax.pcolormesh(np.arange(len(columns) + 1) - 0.5, np.arange(len(rows) + 1) - 0.5,
                             table, cmap=DIVERGING if diverging else SEQUENTIAL, vmin=low,
                             vmax=high, edgecolors="white", linewidth=0.6)
        if np.isnan(table).any():
            ax.patch.set(facecolor="0.92", edgecolor="0.65", hatch="////")
        if digits is not None and len(columns) <= MOST_COLUMNS:
            write_cells(ax, mesh, cells, f"{{:z.{digits}f}}")
        name_cells(ax, rows, columns)
    axes[0].figure.colorbar(mesh, ax=list(axes), label=bar)


def write_cells(ax, mesh, cells: list[list], form: str) -> None:
    """Write the number of every cell into it.

    These texts belong to the figure, so that none has a clip path and the layout measures none:
    they are most of what is drawn.
    """
    colours = mesh.cmap(mesh.norm(mesh.get_array()))
    for i, row in enumerate(cells):
        for j, value in enumerate(row):
            if value is None or not math.isnan(value):
                colour = "black" if value is None else ink(colours[i, j])
                ax.figure.text(j, i, written(value, form), ha="center", va="center", fontsize=7,
                               color=colour, in_layout=False, transform=ax.transData)


def name_cells(ax, rows: list[str], columns: list[str]) -> None:
    """Name the rows left of the first map and the columns below the last; long names are turned."""
    place = ax.get_subplotspec()
    below = columns if place.is_last_row() else []
    beside = rows if place.is_first_col() else []
    ax.set_xticks(range(len(below)), below)
    ax.set_yticks(range(len(beside)), beside)
    ax.tick_params(length=0)
    if max(map(len, columns)) > 4 or len(columns) > MOST_COLUMNS:
        ax.tick_params(axis="x", rotation=90)
    ax.invert_yaxis()
    ax.spines[:].set_visible(False)


def name_axes(ax, title: str, across: str, down: str) -> None:
    """The title of a map, and what its rows and columns are where these have names."""
    ax.set_title(title)
    if ax.get_subplotspec().is_last_row():
        ax.set_xlabel(across)
    if ax.get_subplotspec().is_first_col():
        ax.set_ylabel(down)


def bars(ax, groups: list[str], series: dict[str, list], form: str | tuple | None = "{:z.2f}",
         errors: dict | None = None) -> None:
    """The values of every series side by side in each group, from a line at zero.

    Each bar has its number as `form` writes it (a tuple: one form for each series; None: without
    numbers), if there are few enough, and its error where errors {series: values} has one. A value
    of None is a gap with a dash. More than one series has a legend.
    """
    width = 0.8 / len(series)
    forms = form if isinstance(form, tuple) else (form,) * len(series)
    few = len(groups) * len(series) <= MOST_LABELS
    for i, (name, values) in enumerate(series.items()):
        x = [g + (i + 0.5) * width - 0.4 for g in range(len(values))]
        error = (errors or {}).get(name)
        drawn = ax.bar(x, without_gaps(values), 0.94 * width, label=name, color=COLOURS[i],
                       yerr=error and without_gaps(error), error_kw={"capsize": 3})
        label_bars(ax, drawn, values, forms[i] if few else None)
    name_groups(ax, groups)
    if len(series) > 1:
        ax.legend(frameon=False, ncols=len(series), loc="lower right", bbox_to_anchor=(1, 1))


def without_gaps(values: list) -> list[float]:
    """The values with zero, which cannot be seen, in place of None."""
    return [value or 0 for value in values]


def label_bars(ax, drawn, values: list, form: str | None) -> None:
    """Write the values at their bars; without a form only the dash of those that are missing."""
    texts = [written(v, form) if form or v is None else "" for v in values]
    if any(texts):
        ax.bar_label(drawn, texts, padding=2, fontsize=8, in_layout=False)


def name_groups(ax, groups: list[str]) -> None:
    """Name the groups of bars below a line at zero, with some room beside and above them."""
    ax.set_xticks(range(len(groups)), groups, rotation=90 if len(groups) > MOST_UPRIGHT else 0)
    ax.tick_params(axis="x", length=0)
    ax.spines["bottom"].set_visible(False)
    ax.axhline(0, color="black", linewidth=0.8, clip_on=False)
    middle = (len(groups) - 1) / 2
    half = max(len(groups), 2) / 2 + 0.1
    ax.set_xlim(middle - half, middle + half)
    ax.margins(y=0.12)
