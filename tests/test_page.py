"""The page beside the article: all that a run has stands in it once, and it is valid HTML."""

import collections
import dataclasses
import html.parser
import json
import re

import pytest

import circuits_part4
import circuits_part4_toy
import circuits_part5
import circuits_part5_toy
import common
from results import compare, page, report

RESULTS, FIGURES = common.HERE / "results", common.HERE / "figures"
SCRIPTS = {s.SCRIPT.stem: s.SCRIPT for s in (
    circuits_part4, circuits_part4_toy, circuits_part5, circuits_part5_toy)}
STEM = pytest.mark.parametrize("stem", SCRIPTS)
VOID = {"meta"}
HOSTILE = "</pre><script>alert('$$')</script>&amp;{{ 7 * 7 }}\""


class Page(html.parser.HTMLParser):
    """What stands in a page; closing tags have to match."""

    def __init__(self, text: str):
        super().__init__()
        self.open, self.tags, self.texts = [], [], collections.defaultdict(list)
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)
            self.texts[tag].append("")

    def handle_startendtag(self, tag, attrs):
        assert len(attrs) == len(dict(attrs)), (tag, attrs)
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, (tag, self.getpos())

    def handle_data(self, data):
        for tag in set(self.open):
            self.texts[tag][-1] += data

    def having(self, tag: str, **attributes) -> list[dict]:
        return [a for t, a in self.tags if t == tag and attributes.items() <= a.items()]

    def all(self, name: str) -> list[str]:
        """The values of an attribute, of whichever tag."""
        return [a[name] for _, a in self.tags if name in a]


def folders(stem: str):
    """Where the bundled results and figures of a script lie."""
    toy = stem.endswith("toy")
    return (RESULTS, FIGURES) if toy else (RESULTS / "mini", FIGURES / "mini")


def bundled(stem: str) -> tuple[dict, dict]:
    """The results of a script, and their log by section."""
    out = folders(stem)[0]
    results = report.read_results(out / f"{stem}.json", SCRIPTS[stem])
    return results, page.split_log(SCRIPTS[stem], results["meta"], out / f"{stem}_stdout.txt")


def rendered(stem: str) -> str:
    return page.render(SCRIPTS[stem], *bundled(stem), folders(stem)[1])


def by_hand(results: dict, logs: dict, published: dict, monkeypatch) -> str:
    """A page of part 4's toy with other contents."""
    monkeypatch.setattr(compare, "read_published", lambda stem: published)
    return page.render(SCRIPTS["part4_toy"], results, logs, None)


# ------------------------------------------------------------------ everything, once


@STEM
def test_every_section_stands_in_the_order_of_the_log(stem):
    results, logs = bundled(stem)
    p = Page(rendered(stem))
    sections = [a["id"] for a in p.having("section")]
    assert sections == [s.name for s in SCRIPTS[stem].sections if logs[s.name]]
    assert set(results["sections"]) - set(sections) <= {"reader"}  # nothing was asked for
    headings = [lines[0][3:] for lines in logs.values() if lines and lines[0].startswith("== ")]
    assert p.texts["h2"] == headings and len(headings) + len(p.texts["h3"]) == len(sections)


@STEM
def test_every_line_of_the_log_stands_there_as_printed(stem):
    log = (folders(stem)[0] / f"{stem}_stdout.txt").read_text(encoding="utf-8")
    log = log[:log.index("== AGAINST WHAT THE ARTICLE PRINTS")]
    body = "\n".join(line for line in log.splitlines() if not line.startswith("== "))
    assert "\n".join(Page(rendered(stem)).texts["pre"]) == body


@STEM
def test_every_picture_stands_there_once(stem):
    p = Page(rendered(stem))
    pictures = p.having("svg", role="img")
    assert len(pictures) == len(p.having("figure")) == len(SCRIPTS[stem].figures)
    assert all(a["aria-label"] for a in pictures)


@STEM
def test_every_published_entry_stands_there_once(stem):
    entries = compare.read_published(stem)["entries"]
    p = Page(rendered(stem))
    assert sorted(p.texts["code"]) == sorted(e["key"] for e in entries)
    rows = compare.with_published(compare.read_published(stem), bundled(stem)[0])
    cells = collections.Counter(text.strip() for text in p.texts["span"])
    assert sum(n for text, n in cells.items() if text.endswith("agrees")) == sum(
        r.verdict == compare.AGREES for r in rows)
    assert {e["line"] for e in entries} <= set(p.texts["th"])
    folded = sum(r.verdict == compare.NOT_COMPARED for r in rows)
    assert sum(int(t.split()[0]) for t in p.texts["summary"][1:]) == folded


# ------------------------------------------------------------------ valid and alone


@STEM
def test_ids_are_unique_and_every_reference_leads_to_one(stem):
    text = rendered(stem)
    p = Page(text)
    ids = p.all("id")
    assert len(ids) == len(set(ids)) > 5
    links = [h[1:] for h in p.all("href") if h.startswith("#")]
    assert set(links) | set(re.findall(r"url\(#([^)]+)\)", text)) == set(ids)
    assert {h for h in p.all("href") if not h.startswith(("#", "data:image/"))} == {
        f"{stem}.json", f"{stem}_stdout.txt"}


@STEM
def test_a_page_stands_alone_and_says_what_it_is(stem):
    text = rendered(stem)
    p = Page(text)
    assert text.startswith("<!DOCTYPE html>") and p.having("html", lang="en")
    assert p.having("meta", name="viewport") and p.texts["title"] and p.having("main")
    assert not {"script", "link", "iframe", "object"} & {tag for tag, _ in p.tags}
    assert not p.all("src") and "http" not in text and "@import" not in text
    assert not [name for _, a in p.tags for name in a if name.startswith("on")]
    assert len(text.encode()) < 1e6


@STEM
def test_tables_have_headings_and_scroll_in_their_own_box(stem):
    p = Page(rendered(stem))
    assert len(p.having("table")) == len(p.having("caption")) == len(p.having("div"))
    assert p.having("th", scope="row") and p.having("th", scope="rowgroup")
    assert len(p.having("th", scope="col")) == 5 * len(p.having("table"))
    assert all("scope" in a for a in p.having("th"))


def test_the_parser_of_these_tests_finds_faults():
    for fault in ("<p><b></p></b>", "<p>", "</p>", '<p id="a" id="b"></p>'):
        with pytest.raises(AssertionError):
            Page(fault)


# ------------------------------------------------------------------ hostile contents


def test_hostile_contents_stay_text(monkeypatch):
    """Of the log, the model, the results and the article: none becomes a tag or a template."""
    entry = {"key": "keep.token", "section": HOSTILE, "line": HOSTILE, "printed": HOSTILE,
             "value": "x", "decimals": None, "kind": "exact", "model_independent": True}
    published = {"source": HOSTILE, "model": "m", "entries": [entry], "explained": {}}
    meta = {"model": HOSTILE, "revision": HOSTILE, "text": HOSTILE, "n_tokens": 1, "seq_len": 1,
            "dtype": "float64"}
    results = {"meta": meta, "sections": {"keep": {"token": HOSTILE}}}
    logs = collections.defaultdict(list, keep=[f"== {HOSTILE}", HOSTILE])
    text = by_hand(results, logs, published, monkeypatch)
    p = Page(text)
    assert "<script" not in text and "49" not in text
    assert p.texts["h1"] == [HOSTILE.split(";")[0]] and p.texts["h2"] == p.texts["pre"] == [HOSTILE]
    assert p.texts["th"].count(HOSTILE) == 2 and p.texts["td"][1] == HOSTILE
    assert HOSTILE in p.texts["dd"] and p.texts["title"][0].endswith(HOSTILE)


def test_a_hostile_picture_stays_one(tmp_path):
    file = tmp_path / "a.svg"
    file.write_text('<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink='
                    '"http://www.w3.org/1999/xlink"><title>a "&lt;b&gt;"\nc</title>'
                    '<metadata>m</metadata><style>* {color: red}</style><g id="used"/>'
                    '<g id="unused"/><use xlink:href="#used" fill="#ffffff"/>'
                    '<rect clip-path="url(#used)"/><text>&lt;script&gt; <tspan>$$ </tspan>'
                    "x</text></svg>", encoding="utf-8")
    label, svg = page.picture(file, "keep", "p3-")
    assert label == 'a "<b>" c'
    p = Page(str(svg))
    assert [tag for tag, _ in p.tags] == ["svg", "g", "g", "use", "rect", "text", "tspan"]
    assert p.all("id") == ["p3-used"] and p.all("href") == ["#p3-used"]
    assert p.all("clip-path") == ["url(#p3-used)"] and p.all("fill") == ["#ffffff"]
    assert p.texts["text"] == ["<script> $$ x"] and p.having("svg", role="img")[0][
        "aria-label"] == label


# ------------------------------------------------------------------ verdicts and the top


def test_a_difference_stands_out():
    """In words and marks, in its row, its section, the contents and the counts."""
    results, logs = bundled("part4_toy")
    results["sections"]["keep"]["entries"]["mind"] = 3
    p = Page(page.render(SCRIPTS["part4_toy"], results, logs, None))
    assert len(p.having("tr", **{"class": "differs"})) == 1
    assert "✗ DIFFERS" in p.texts["span"] and p.texts["li"][:2] == ["68 reproduced", "1 differ"]
    assert p.texts["b"].count("✗ 1 differs") == 1 and "✗ 1 of 10 compared differs." in p.texts["b"]
    assert not p.having("figure")


def test_a_verdict_that_is_new_has_its_words():
    row = compare.Row("a", "s", "1", "1", "", "input")
    assert page._counts([row])[-1] == (1, "input", "other")


@pytest.mark.parametrize("meta, words", [
    ({"model": "attn-only-2l", "revision": "r"}, []),
    ({"model": "mini-2l", "revision": None}, ["model mini-2l", "attn-only-2l"]),
    ({"model": "attn-only-2l", "revision": None}, ["folder"]),
    ({"model": "attn-only-2l", "revision": "r", "rows_sha256": None}, ["text mine.txt"])])
def test_why_the_numbers_cannot_be_the_articles(meta, words):
    published = compare.read_published("part5")
    meta = {"rows_sha256": published["rows_sha256"], "text": "text mine.txt"} | meta
    found = page.caution(published, meta)
    assert all(word in found for word in words) and bool(found) == bool(words)
    assert page.caution(compare.read_published("part5_toy"), {}) == ""


# ------------------------------------------------------------------ files and options


def run(*options: str) -> None:
    circuits_part4_toy.main(list(options))


def test_a_run_writes_its_page_and_figures_only_makes_it_again(tmp_path, monkeypatch):
    monkeypatch.setattr(circuits_part4_toy, "SCRIPT", dataclasses.replace(
        SCRIPTS["part4_toy"], figures=SCRIPTS["part4_toy"].figures[:1]))
    run("--out", str(tmp_path), "--no-page")
    file = tmp_path / "part4_toy.html"
    assert not file.exists() and (tmp_path / "part4_toy.json").exists()
    run("--out", str(tmp_path))
    first = file.read_bytes()
    assert b"by hand: one head reads" in first  # the title of the figure, as its label
    file.unlink()
    run("--out", str(tmp_path), "--figures-only", "--no-page")
    assert not file.exists()
    run("--out", str(tmp_path), "--figures-only")
    assert file.read_bytes() == first
    run("--out", str(tmp_path), "--no-figures")
    assert b"<svg" not in file.read_bytes()


@pytest.mark.parametrize("fault", ["no log_lines", "no log", "a short log"])
def test_without_a_log_to_split_the_run_must_be_repeated(tmp_path, capsys, fault):
    results, _ = bundled("part5_toy")
    if fault == "no log_lines":
        del results["meta"]["log_lines"]
    (tmp_path / "part5_toy.json").write_text(json.dumps(results), encoding="utf-8")
    if fault != "no log":
        log = (RESULTS / "part5_toy_stdout.txt").read_text(encoding="utf-8")
        log = log[:99] if fault == "a short log" else log
        (tmp_path / "part5_toy_stdout.txt").write_text(log, encoding="utf-8")
    assert page.write(SCRIPTS["part5_toy"], tmp_path, None) is None
    message = capsys.readouterr().err
    assert "run python circuits_part5_toy.py again" in message and message.count("\n") == 1
    assert not (tmp_path / "part5_toy.html").exists()


def test_a_page_that_cannot_be_written(tmp_path):
    for name in ("part5_toy.json", "part5_toy_stdout.txt"):
        (tmp_path / name).write_bytes((RESULTS / name).read_bytes())
    (tmp_path / "part5_toy.html").mkdir()
    with pytest.raises(common.UserError, match="--no-page"):
        page.write(SCRIPTS["part5_toy"], tmp_path, None)


@STEM
def test_the_committed_page_is_of_the_committed_results(stem):
    """But for the pictures, which a later matplotlib draws otherwise: --figures-only mends it."""
    committed = (folders(stem)[0] / f"{stem}.html").read_text(encoding="utf-8")
    assert committed.count("<svg") == len(SCRIPTS[stem].figures)

    def without_pictures(text: str) -> str:
        return re.sub("<figure>.*?</figure>", "", text, flags=re.S)

    assert without_pictures(committed) == without_pictures(rendered(stem))
