"""One static page to read beside the article, made from the files of a run."""

from __future__ import annotations

import itertools
import json
import operator
import pathlib
import re
import xml.etree.ElementTree as ET
from collections import Counter
from typing import NamedTuple

import jinja2
from markupsafe import Markup

import common
from results import compare, loading, report

TEMPLATE = "page.html.jinja"
HEADING = "== "  # starts a heading of the log
SVG, XLINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}"
LEFT_OUT = {SVG + tag for tag in ("metadata", "title", "style")}  # the template has the style
REFERENCE = re.compile(r"url\(#([^)]+)\)")
MARKS = {compare.AGREES: ("agrees", "✓"), compare.EXPLAINED: ("explained", "≈"),
         **dict.fromkeys(compare.DISAGREEMENTS, ("differs", "✗"))}
NO_MARK = ("other", "–")


class Number(NamedTuple):
    """One thing that the article prints, beside ours."""

    row: compare.Row
    words: str  # the article's sentence
    colour: str  # the CSS class of the verdict
    mark: str


class Picture(NamedTuple):
    label: str  # says what is seen
    svg: Markup


class Part(NamedTuple):
    """One section of the log, with its pictures and what the article prints of it."""

    name: str  # its key in the results, and its anchor
    heading: str  # "" if it prints under the heading before it
    log: str
    pictures: list[Picture]
    compared: list[Number]
    others: list[Number]  # those that are not compared

    @property
    def n_differ(self) -> int:
        return sum(n.colour == "differs" for n in self.compared)


def write(
    script: report.Script, out: pathlib.Path, figures: pathlib.Path | None
) -> pathlib.Path | None:
    """Write {stem}.html beside the results and the log that it is made from; figures: the folder
    of the pictures, None for a page without.

    Returns:
        its path; None, after a notice, if the log cannot be split into the sections.
    """
    file = out / f"{script.stem}.html"
    results = report.read_results(file.with_suffix(".json"), script)
    logs = split_log(script, results["meta"], out / f"{script.stem}_stdout.txt")
    if logs is None:
        common.notice(f"no {file.name}: {script.stem}.json does not say which lines of the log "
                      f"belong to which section: run python {script.file} again")
        return None
    html = render(script, results, logs, figures)
    try:
        with report.whole(file) as part:
            part.write_text(html, encoding="utf-8", newline="")
    except OSError as e:
        raise common.UserError(f"cannot write {file}: {e.strerror}; use --no-page, or name another "
                               "folder with --out DIR") from None
    return file


def split_log(script: report.Script, meta: dict, file: pathlib.Path) -> dict[str, list] | None:
    """{section: its lines of the log}; None if the log is missing or not that of these results."""
    counts = meta.get("log_lines", {})
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError):
        return None
    logs, start = {}, 0
    for section in script.sections:
        end = start + counts.get(section.name, 0)
        logs[section.name], start = lines[start:end], end
    return logs if 0 < start <= len(lines) else None


def render(
    script: report.Script, results: dict, logs: dict[str, list], figures: pathlib.Path | None
) -> str:
    """The page as HTML."""
    published = compare.read_published(script.stem)
    rows = compare.with_published(published, results)
    numbers = [Number(row, entry["line"], *MARKS.get(row.verdict, NO_MARK))
               for row, entry in zip(rows, published["entries"], strict=True)]
    parts = [_part(script, section.name, logs, numbers, figures) for section in script.sections]
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent), autoescape=True,
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True)
    templates.filters["by_sentence"] = by_sentence
    return templates.get_template(TEMPLATE).render(
        script=script, meta=results["meta"], article=published["source"].split(";")[0],
        settings=_settings(results["meta"]), caution=caution(published, results["meta"]),
        counts=_counts(rows), parts=[p for p in parts if any(p[2:])])


def _part(script, name: str, logs: dict, numbers: list[Number], figures) -> Part:
    """The part of a page that one section of the results makes."""
    lines, heading = logs[name], ""
    if lines and lines[0].startswith(HEADING):
        heading, lines = lines[0].removeprefix(HEADING), lines[1:]
    of_part = [n for n in numbers if n.row.key.split(".")[0] == name]
    others = [n for n in of_part if n.row.verdict == compare.NOT_COMPARED]
    compared = [n for n in of_part if n.row.verdict != compare.NOT_COMPARED]
    return Part(name, heading, "\n".join(lines), _pictures(script, name, figures), compared, others)


def by_sentence(numbers: list[Number]) -> list[list[Number]]:
    """The numbers that follow each other in one sentence of the article, together."""
    groups = itertools.groupby(numbers, key=operator.attrgetter("row.section", "words"))
    return [list(group) for _, group in groups]


# ------------------------------------------------------------------ the top of the page


def caution(published: dict, meta: dict) -> str:
    """Why the numbers of this run cannot be the article's; "" if they can."""
    if published["model"] is None:
        return ""
    name, whys = published["model"], []
    if meta["model"] != name:
        whys.append(f"they are of the model {meta['model']}, the article's of {name}")
    elif meta.get("revision") is None and name in loading.PUBLIC:
        whys.append(f"they are of a model folder named {name}, the article's of the public model")
    if published.get("rows_sha256") != meta.get("rows_sha256") and published.get("on_text"):
        whys.append(f"they are of another text, {meta['text']}")
    return "; ".join(whys)


def _counts(rows: list[compare.Row]) -> list[tuple]:
    """(how many, in words, CSS class) of each verdict; those not compared by their reason."""
    n = Counter(r.verdict for r in rows)
    counts = [(n.pop(compare.AGREES, 0), "reproduced", "agrees"),
              (sum(n.pop(v, 0) for v in compare.DISAGREEMENTS), "differ", "differs"),
              (n.pop(compare.EXPLAINED, 0), "differ and are explained", "explained")]
    whys = Counter(r.why for r in rows if r.verdict == compare.NOT_COMPARED)
    n.pop(compare.NOT_COMPARED, None)
    counts += [(many, verdict, "other") for verdict, many in n.items()]
    return counts + [(many, f"not compared: {why}", "other") for why, many in sorted(whys.items())]


def _settings(meta: dict) -> list[tuple[str, str]]:
    """What made the results: every setting, hash and version."""
    leaves = report.leaves({k: v for k, v in sorted(meta.items()) if k != "log_lines"})
    return [(key, _shown(value)) for key, value in leaves]


def _shown(value) -> str:
    plain = isinstance(value, str) and value.isprintable() and value
    return value if plain else json.dumps(value)


# ------------------------------------------------------------------ pictures


def _pictures(script: report.Script, name: str, figures: pathlib.Path | None) -> list[Picture]:
    """The pictures of a section that were drawn."""
    files = [(i, figures / f"{stem}.svg") for i, (stem, section, _) in enumerate(script.figures)
             if figures is not None and section == name]
    return [picture(file, name, f"p{i}-") for i, file in files if file.exists()]


def picture(file: pathlib.Path, section: str, prefix: str) -> Picture:
    """A picture as an element of the page. Its label is its title; without one, its section.

    Ids that nothing refers to are left out. The others get the prefix, since an id may stand only
    once in a page.
    """
    root = ET.parse(file).getroot()
    label = " ".join((root.findtext(f"{SVG}title") or section.replace("_", " ")).split())
    used = {ref for element in root.iter() for ref in _references(element)}
    for element in list(root.iter()):
        for child in [c for c in element if c.tag in LEFT_OUT]:
            element.remove(child)
        _in_page(element, prefix, used)
    root.attrib |= {"role": "img", "aria-label": label}
    return Picture(label, Markup(ET.tostring(root, encoding="unicode")))


def _references(element: ET.Element) -> list[str]:
    """The ids that an element refers to."""
    link = element.get(f"{XLINK}href", element.get("href", ""))
    found = [link[1:]] if link.startswith("#") else []
    return found + REFERENCE.findall(" ".join(element.attrib.values()))


def _in_page(element: ET.Element, prefix: str, used: set[str]) -> None:
    """Write an element of an SVG file as HTML has it: without name spaces, ids prefixed."""
    attributes = {}
    for key, value in element.attrib.items():
        key = key.removeprefix(XLINK)
        if key == "id":
            if value not in used:
                continue
            value = prefix + value
        elif key == "href" and value.startswith("#"):
            value = f"#{prefix}{value[1:]}"
        attributes[key] = REFERENCE.sub(rf"url(#{prefix}\1)", value)
    element.attrib = attributes
    element.tag = element.tag.removeprefix(SVG)
    in_text = element.tag in ("text", "tspan")
    if not in_text:
        element.text = (element.text or "").strip()
    if element.tag != "tspan":
        element.tail = None
