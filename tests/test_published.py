"""results/published/*.json: well formed, and every key is a real one."""

import collections
import contextlib
import copy
import functools
import io
import json
import pathlib
import re
import types
from decimal import Decimal

import pytest
import test_part4

import circuits_part4 as part4
import circuits_part5 as part5
import tiny
from results import compare, report

PUBLISHED = pathlib.Path(part5.__file__).parent / "results" / "published"
FILES = {name: json.loads((PUBLISHED / f"{name}.json").read_text("utf-8"))
         for name in ("part4", "part5", "part4_toy", "part5_toy")}
EXPLAINED = json.loads((PUBLISHED / "explained.json").read_text("utf-8"))
PARTS = ("part4", "part5")
ENTRIES = [(part, e) for part in PARTS for e in FILES[part]["entries"]]
KINDS = {"exact", "input", "rounded", "ends", "bound", "range", "sampled", "not comparable"}
FIELDS = {"key", "printed", "value", "decimals", "kind", "section", "line"}
OPTIONAL = {"also", "note", "format", "model_independent", "spread", "n", "reason"}
SECTIONS = {
    "The two circuits of every head", "Skip-trigrams", "A giant pile of cards", "Copying",
    "Copying words that are split in two", "A very simple kind of in-context learning",
    "Not only copying", "Heads that look at position", "Skip-trigram bugs",
    "Making the tables smaller", "Detecting copying with eigenvalues", "One number for each head",
    "A trick to get the eigenvalues", "What the paper found, and what we find",
    "Where the score can fool you", "Other ways to measure copying",
    "Do we understand one-layer models?",
    "Two-Layer Models: How Heads Compose", "Three kinds of composition",
    "The logits as a sum of paths", "The attention scores as a sum of paths",
    "Measuring composition from the weights", "Which terms matter", "Virtual attention heads",
    "Key takeaways", "Run it yourself", "Notes on the paper: key results",
    "Notes on the paper: errors and inconsistencies found",
}
NUMBER = re.compile(
    r"(?<![\w.])([+-]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]\d+)?)(%| million| billion|\^\d+)?")
SCALES = {"%": 2, " million": -6, " billion": -9, "": 0}  # what the word adds to the decimals
MARKUP = re.compile(r"[$\u2212]|\\(?!n)")  # the lines are plain: no mathematics, no long minus
EIGHT_HEADS = tiny.SIZES | {"n_heads": 8, "d_vocab": 61}
TEXT = "a cab had a bad egg and a big dog did dig a fine bed of red peas " * 3


def numbers(printed: str) -> list[tuple[float, int]]:
    """The numbers in a printed string, and how many decimals each is printed with: 2 for 65%,
    -7 for 2.33 billion, -14 for 10^14."""
    found = []
    for text, unit in NUMBER.findall(printed):
        if text == "10" and unit.startswith("^"):
            found.append((10.0 ** int(unit[1:]), -int(unit[1:])))
            continue
        d, shift = Decimal(text.replace(",", "")), SCALES.get(unit, 0)
        found.append((float(d.scaleb(-shift)), max(0, -d.as_tuple().exponent) + shift))
    return found


def plain(line: str) -> str:
    """A line with single spaces, but for those behind a printed newline: they are of the token."""
    return re.sub(r"(\\n *)|\s+", lambda m: m[1] or " ", line).strip()


def problems(e: dict) -> list[str]:
    """What is wrong with an entry by itself."""
    wrong = [f"no {f}" for f in FIELDS - e.keys()] + [f"{f}?" for f in e.keys() - FIELDS - OPTIONAL]
    if wrong:
        return wrong
    places, kind, value = [e, *e.get("also", [])], e["kind"], e["value"]
    is_range = isinstance(value, list) and len(value) == 2 and value != [None, None] and (
        None in value or value[0] < value[1])
    faults = {
        f"kind {kind}": kind not in KINDS,
        "section": any(p["section"] not in SECTIONS for p in places),
        "printed is not in the line": e["printed"] not in e["line"],
        "spaces": any(p["line"] != plain(p["line"]) for p in places),
        "markup": any(MARKUP.search(p["line"]) for p in places),
        "not comparable without a reason": kind == "not comparable" and "reason" not in e,
        "sampled without its spread": kind == "sampled" and not is_range
        and not {"spread", "n"} <= e.keys(),
        "range without [low, high]": kind == "range" and not is_range,
    }
    return [fault for fault, found in faults.items() if found] or value_problems(e)


def value_problems(e: dict) -> list[str]:
    """Whether value and decimals are those of the printed string."""
    printed, value, decimals = e["printed"], e["value"], e["decimals"]
    if decimals is None:
        words = isinstance(value, list) and all(isinstance(v, str) for v in value)
        shown = ", ".join(value) if words else value if isinstance(value, str) else printed
        if "format" in e:
            shown = e["format"].format(*[value], **value if isinstance(value, dict) else {})
        return [f"value gives {shown}"] * (shown != printed)
    found = numbers(printed)
    if not found:
        return ["a number in words without a note"] * ("note" not in e)
    tens = decimals == -1 and "note" in e and value % 10 == 0  # 40, read as "about 40"
    wrong = ["decimals"] * (max(d for _, d in found) != decimals and not tens)
    if isinstance(value, list):
        if e["kind"] in ("range", "sampled") or None in value:
            ends = [x for x in value if x is not None]
            return wrong + ["range is not what is printed"] * (ends != [x for x, _ in found])
        flat = not any(isinstance(x, list) for x in value)
        return wrong + ["list is not what is printed"] * (
            flat and value != [x for x, _ in found][: len(value)])
    elsewhere = [p["line"] for p in e.get("also", []) if not isinstance(value, str)]
    ends = [x for x, _ in found] if e["kind"] == "ends" else [found[0][0]]
    wrong += ["value is not what is printed"] * (value not in ends)
    return wrong + [f"not in {line}" for line in elsewhere if numbers(line)
                    and abs(value) not in [abs(x) for x, _ in numbers(line)]]


@pytest.mark.parametrize("name", FILES)
def test_entries_are_well_formed(name):
    more = {"rows_sha256", "on_text"} if name == "part5" else set()
    assert set(FILES[name]) == {"source", "model", "entries", "paper"} | more
    assert FILES[name]["source"]
    wrong = {e.get("key"): problems(e) for e in FILES[name]["entries"]}
    assert not {k: v for k, v in wrong.items() if v}


def published(part: str, key: str, decimals) -> dict:
    return next(e for e in FILES[part]["entries"] if (e["key"], e["decimals"]) == (key, decimals))


TV = published("part5", "attention_groups.tv.without_K.6", 2)
SIZE = published("part4", "sizes.entries_per_circuit", -7)
FACTOR = published("part4", "at_work.ratios.0", -1)
TOKEN = published("part4", "skip_trigrams.1.dest.2", None)
NEWLINE = published("part4", "keep.ov_top.2", None)
ROW = published("part4", "positional.from_positions.1", 3)
DRAWN = published("part4", "eigen.random.copy_score", 3)


@pytest.mark.parametrize("entry, change, found", [
    (TV, dict(kind="roundish"), "kind roundish"),
    (TV, dict(printed="0.7500"), "printed is not in the line"),
    (TV, dict(value=0.76), "value is not what is printed"),
    (TV, dict(decimals=3), "decimals"),
    (TV, dict(section="Which terms"), "section"),
    (TV, dict(kind="sampled"), "sampled without its spread"),
    (TV, dict(kind="range"), "range without [low, high]"),
    (TV, dict(kind="range", value=[0.44, 0.81]), "range is not what is printed"),
    (TV, dict(kind="not comparable"), "not comparable without a reason"),
    (TV, dict(line="changed  by 0.75"), "spaces"),
    (TV, dict(line="changed by $0.75$"), "markup"),
    (TV, dict(line="from \u22120.75 to 0.75"), "markup"),
    (TV, dict(decimals=None, format="1.{}", value=7), "value gives 1.7"),
    (TV, dict(also=[dict(section="Key takeaways", line="by 0.57")]), "not in by 0.57"),
    (TV, dict(decimal=2), "decimal?"),
    (SIZE, dict(value=2.33), "value is not what is printed"),
    (SIZE, dict(decimals=2), "decimals"),
    (FACTOR, dict(decimals=-2), "decimals"),
    (FACTOR, dict(value=41), "decimals"),
    (TOKEN, dict(value="Van"), "value gives 'Van'"),
    (TOKEN, dict(value=" Vas"), "value gives ' Vas'"),
    (NEWLINE, dict(value="\n"), "value gives '\\n'"),
    (NEWLINE, dict(line=" ".join(NEWLINE["line"].split())), "printed is not in the line"),
    (ROW, dict(value=[0.913, 0.087, 0.1]), "list is not what is printed"),
    (DRAWN, dict(value=[-0.035, 0.07, 0.1]), "sampled without its spread"),
    (DRAWN, dict(value=[-0.035, 0.08]), "range is not what is printed"),
])
def test_a_fault_is_found(entry, change, found):
    assert problems(entry) == []
    assert problems(entry | change)[0] == found


def test_numbers_are_read_as_they_are_printed():
    assert numbers("65% of -1,234.50 at head 0.3, 4.8e-07") == [
        (0.65, 2), (-1234.5, 2), (0.3, 1), (4.8e-07, 8)]
    assert numbers("2.33 billion, 51.0 million, 48,262^3, about 10^14") == [
        (2.33e9, -7), (51e6, -5), (48262, 0), (1e14, -14)]


@pytest.mark.parametrize("name", FILES)
def test_one_key_is_published_once_for_each_precision(name):
    count = collections.Counter((e["key"], e["decimals"]) for e in FILES[name]["entries"])
    assert [k for k, n in count.items() if n > 1] == []
    places = collections.Counter((e["key"], p["section"], p["line"]) for e in FILES[name]["entries"]
                                 for p in [e, *e.get("also", [])])
    assert [k for k, n in places.items() if n > 1] == []


@pytest.mark.parametrize("part, figures", [
    ("part4", {"2.5 billion", "50,000 × 50,000", "10/12"}),
    ("part5", {"0.05", "1.3", "5.2", "4.0", "1.8", "0.3", "144", "24"}),
])
def test_the_papers_own_figures_stand_apart(part, figures):
    paper = FILES[part]["paper"]
    assert figures <= {p["printed"] for p in paper}
    for p in paper:
        assert {"what", "printed", "beside", "section", "line"} <= p.keys()
        assert p["printed"] in p["line"]
        for place in [p, *p.get("also", [])]:
            assert place["section"] in SECTIONS and place["line"] == plain(place["line"])


def test_explained_differences_are_published_and_say_why():
    assert set(EXPLAINED) == set(PARTS)
    for part, differences in EXPLAINED.items():
        keys = {e["key"] for e in FILES[part]["entries"]}
        assert all(set(d) == {"key", "ours", "reason"} and d["key"] in keys
                   and len(d["reason"]) > 20 for d in differences)
    assert [d["key"] for d in EXPLAINED["part4"]] == ["claims.ralph.tokens_back"]


def test_the_articles_slip_against_its_own_token_list():
    tokens = [e["value"] for part, e in ENTRIES if e["key"].startswith("at_work.ralph.tokens.")]
    assert len(tokens) - 1 - tokens.index(" Ralph") == 7
    assert published("part4", "claims.ralph.tokens_back", None)["value"] == 10


def test_beside_the_papers_falls_stand_ours_with_the_same_sign():
    """Every figure that the paper gives as a fall of the loss, and no other, is turned round."""
    falls = [p["what"] for p in FILES["part5"]["paper"] if p.get("fall")]
    assert falls == [p["what"] for p in FILES["part5"]["paper"] if p["what"].endswith(", nats")]
    with contextlib.redirect_stdout(io.StringIO()):
        log = report.Log()
        compare.print_context(FILES["part5"], {"sections": {
            "term_importance": {"marginal": [-0.6754, 0.25, 0.0], "layer0": {"vs_direct": -0.26}},
            "model": {"n_virtual": 64}, "claims": {"first_published_K_heads": 3}}}, log)
    ours = [line.split("   ours ")[1] for line in log.lines[1:]]
    assert ours == ["-", "0.6754", "-0.25", "0", "64", "-", "0.26", "-", "-", "-", "3"]


# ------------------------------------------------------------------ against a run


def run_part4(home: pathlib.Path) -> dict:
    """A tiny model of eight heads, every word of the article one token."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_part4, "MISSING", ())
        text, tokenizer = test_part4.text_of_all_words(), test_part4.make_tokenizer()
    folder = tiny.folder(home / "tiny", test_part4.SIZES | {"d_vocab": len(tokenizer)})
    tokenizer.save_pretrained(folder)
    (home / "text.txt").write_text(text * 3, encoding="utf-8")
    return part4.main(["--model", str(folder), "--text", str(home / "text.txt"),
                       "--out", str(home / "out"), "--no-figures"])


def run_part5(home: pathlib.Path) -> dict:
    (home / "text.txt").write_text(TEXT, encoding="utf-8")
    folder = tiny.folder(home / "tiny", EIGHT_HEADS)
    return part5.main(["--model", str(folder), "--text", str(home / "text.txt"), "--tokens", "39",
                       "--seq-len", "13", "--out", str(home / "out"), "--no-figures"])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Real results of tiny models of eight heads, as the published ones have, and their folder."""
    homes = {part: tmp_path_factory.mktemp(part) for part in PARTS}
    with contextlib.redirect_stdout(io.StringIO()):
        return {"part4": (run_part4(homes["part4"]), homes["part4"] / "out"),
                "part5": (run_part5(homes["part5"]), homes["part5"] / "out")}


@pytest.fixture(scope="module")
def sections(runs):
    """The sections of their results files."""
    return {part: json.loads((out / f"{part}.json").read_text("utf-8"))["sections"]
            for part, (_, out) in runs.items()}


def step(tree, part: str):
    return tree[int(part)] if isinstance(tree, list) else tree[part]


def at(tree, key: str):
    return functools.reduce(step, key.split("."), tree)


def kind_of(value):
    """What can be compared with what: a number, a word, and lists and dicts of them."""
    if isinstance(value, dict):
        return {k: kind_of(v) for k, v in value.items()}
    if isinstance(value, list):
        return [kind_of(v) for v in value]
    return "word" if isinstance(value, str) else "number"


KEYS = {(part, key) for part in PARTS for key in
        [e["key"] for e in FILES[part]["entries"]]
        + [e["spread"] for e in FILES[part]["entries"] if "spread" in e]
        + [p["beside"] for p in FILES[part]["paper"]]}


# The key is there; a random model just has no head that rests on the two nearest tokens.
NONE_WITHOUT_SUCH_HEADS = ("claims.positional.same_min", "claims.positional.same_max")


@pytest.mark.parametrize("part, key", sorted(KEYS))
def test_every_key_is_one_of_a_run(sections, part, key):
    assert at(sections[part], key) is not None or key in NONE_WITHOUT_SUCH_HEADS


def any_length(entry: dict) -> bool:
    """Lists of heads or words that a run finds by rule, and draws of which the range is given."""
    return isinstance(entry["value"], list) and (
        entry["key"].startswith("claims.") or entry["key"] == "positional.lean"
        or entry["kind"] == "sampled")


@pytest.mark.parametrize("part, entry", ENTRIES,
                         ids=[f"{part}-{e['key']}-{e['decimals']}" for part, e in ENTRIES])
def test_what_a_run_gives_can_be_compared(sections, part, entry):
    ours, theirs = at(sections[part], entry["key"]), entry["value"]
    if entry["kind"] == "range" or (isinstance(theirs, list) and None in theirs):
        assert kind_of(ours) == "number"
    elif any_length(entry):
        assert isinstance(ours, list) and set(kind_of(ours)) <= set(kind_of(theirs))
    else:
        assert kind_of(ours) == kind_of(theirs)


@pytest.mark.parametrize("part, at_least", [("part4", 25), ("part5", 8)])
def test_what_does_not_depend_on_the_model_agrees(sections, part, at_least):
    independent = [e for e in FILES[part]["entries"] if e.get("model_independent")]
    assert len(independent) >= at_least
    for e in independent:
        ours = at(sections[part], e["key"])
        if isinstance(e["value"], str):
            assert ours == e["value"], e["key"]
        else:
            tolerance = 0 if e["kind"] == "exact" else 0.5 * 10 ** -e["decimals"]
            assert abs(ours - e["value"]) <= tolerance, e["key"]


# ------------------------------------------------------------------ the log


def with_published_values(results: dict, entries: list[dict]) -> dict:
    """A run's results with the article's numbers in place of its own, the most precise printing
    of each last; of a range of draws, draws with this range."""
    results = copy.deepcopy(results)
    for e in sorted(entries, key=lambda e: e["decimals"] or 0):
        value, (*path, last) = e["value"], e["key"].split(".")
        if e["kind"] == "range" or (isinstance(value, list) and None in value):
            continue
        if e["kind"] == "sampled" and isinstance(value, list):
            value = [value[0]] * 19 + [value[1]]
        parent = functools.reduce(step, path, results["sections"])
        parent[int(last) if isinstance(parent, list) else last] = value
    return results


def log_lines(script, results: dict) -> set[str]:
    log = report.Log()
    with contextlib.redirect_stdout(io.StringIO()):
        for name, _, show in script.SECTIONS:
            show(results["sections"][name], results, log)
    return {plain(line) for line in log.lines}


LOGS = {"part4": (part4, 45), "part5": (part5, 23)}  # the log lines that the articles show whole


@pytest.mark.parametrize("part", PARTS)
def test_the_scripts_print_the_articles_lines_from_its_numbers(runs, part):
    """Words, order and formats of a line, and that each number stands under its own key."""
    script, n = LOGS[part]
    entries = FILES[part]["entries"]
    printed = log_lines(script, with_published_values(runs[part][0], entries))
    published = {p["line"] for e in entries for p in [e, *e.get("also", [])]}
    assert len(published & printed) == n
    swapped = copy.deepcopy(entries)  # two numbers under each other's keys
    one, two = [e for e in swapped if e["kind"] == "rounded" and e["line"] in printed
                and isinstance(e["value"], float)][:2]
    one["value"], two["value"] = two["value"], one["value"]
    printed = log_lines(script, with_published_values(runs[part][0], swapped))
    assert len(published & printed) < n


# ------------------------------------------------------------------ the claims

PART4_BY_HAND = {  # three heads of eight eigenvalues
    "sizes": {"n_heads": 3, "rank": 8},
    "skip_trigrams": [
        {"source": " large", "out": ["small", " large", " small", "huge"]},
        {"source": " Paris", "out": [" Rome", "Paris", " Lyon", " Paris"]}],
    "at_work": {"ralph": {"tokens": ["<|BOS|>", " Ralph", " and", "R"], "source": " Ralph",
                          "head": 0, "pushes": [8.0, -1.5, 2.5]}},
    "positional": {"from_positions": [[0.5, 0.25, 0.125], [0.75, 0.2475, 0.0], [0.9, 0.0975, 0.0]],
                   "on_text": [[0.25, 0.125, 0.5], [0.125, 0.25, 0.0], [0.5, 0.25, 0.75]],
                   "lean": [1, 2], "start_token": [0.5, 0.25, 0.125]},
    "keep": {"pair": [" mind", " bay"], "ov": {" mind": 2.0, " bay": 5.0}, "ov_median": 0.5,
             "prompts": [
                {"ratio": 3.0, "direct": {" bay": -1.5, " mind": 2.5}}, {"ratio": 2.75}],
             "qk": {" in": 1.0, " at": 2.0, " on": 1.5, " under": 0.5, " going": 3.5}},
    "eigen": {"check": {"n_tokens": 30}, "random": {"copy_score": [-0.5, 0.5, -0.5, 0.5, 0.0]},
              "heads": [{"copy_score": 0.9696, "positive": 7, "trace": 5.0, "diagonal_sum": 5.0},
                        {"copy_score": -0.25, "positive": 4, "trace": 4.0, "diagonal_sum": 4.5},
                        {"copy_score": 0.7, "positive": 5, "trace": 3.0, "diagonal_sum": 3.25}]},
}
CFG = types.SimpleNamespace(model=types.SimpleNamespace(cfg=types.SimpleNamespace(d_model=11)))


def part4_claims(sections: dict) -> dict:
    return part4.compute_claims(CFG, {"meta": {"n_tokens": 67}, "sections": sections})


def test_the_claims_of_part_4_by_hand():
    assert part4_claims(PART4_BY_HAND) == {
        "d_model": 11, "text_tokens": 67,
        "ralph": {"other_heads": 2, "others_min": -1.5, "others_max": 2.5, "tokens_back": 2},
        "large_raises": ["small"], "paris_raises_itself": 2,
        "positional": {"n_lean": 2, "present_or_previous": ["0.1", "0.2"],
                       "same_min": 0.75, "same_max": 0.9},
        # only head 0.0 does not lean, and of the copying heads only 0.0 is there
        "on_text": {"one_back": ["0.1"], "others_max": 0.5, "copying_max": 0.25,
                    "start_token": [0.5, 0.25, 0.125]},
        "keep": {"direct": [[2.5, -1.5], None], "ratio_difference": 0.25,
                 "lowest_above_median": 1.5, "going_above_others": 1.5},
        "eigen": {"rest": 22, "above_0_7": 1, "at_least_0_97": 1, "nearly_all_right": ["0.0"],
                  "most_right": ["0.2"], "negative": ["0.1"], "negative_positional": 1,
                  "sums_differ": 0.5},
        "random": {"n": 5, "copy_score_sd": 0.5},
    }


def test_claims_of_skipped_rows_are_none_and_printed_so():
    s = copy.deepcopy(PART4_BY_HAND)
    s["skip_trigrams"] = [{"source": w, "skipped": "", "pieces": []}
                          for w in (" large", " Paris")]
    s["at_work"]["ralph"] = {"tokens": ["<|BOS|>", " R", "alph"], "source": " Ralph", "head": 0}
    s["keep"], s["positional"]["lean"] = {"head": 2, "skipped": "", "pieces": []}, []
    claims = part4_claims(s)
    assert claims["ralph"] == {"other_heads": 2, "others_min": None, "others_max": None,
                               "tokens_back": None}
    assert claims["large_raises"] is claims["paris_raises_itself"] is None
    assert set(claims["keep"].values()) == {None} and claims["eigen"]["negative_positional"] == 0
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        part4.print_claims(claims, {}, report.Log())
    lines = printed.getvalue().splitlines()
    assert lines[:3] == ["== WHAT THE TEXT DERIVES FROM THESE NUMBERS",
                         "  at work: number of other heads: 2", "  at work: their smallest push: -"]
    assert "None" not in printed.getvalue()


PART5_BY_HAND = {  # two heads a layer
    "model": {"n_layers": 2},
    "term_importance": {"uniform": 10.0, "loss_model": 5.0, "loss_by_order": [9.5, 5.75, 5.25],
                        "marginal": [-0.5, -3.75, -0.5], "logit_sd_by_order": [0.5, 1.0, 1.5],
                        "loss_by_order_start_direct": [9.0, 5.5, 5.25],
                        "virtual_largest": [{"reader": "1.1"}, {"reader": "1.1"},
                                            {"reader": "1.0"}]},
    "composition": {"baseline": {"mean": 0.0625}, "prev_token": [0.1, 0.6],
                    "constant_share": [None, 0.75],
                    "first_published": {"baseline": {"mean": 0.0156, "margin": 0.0177},
                                        "K": {"scores": [[0.0625, 0.025], [0.125, 0.03125]]}},
                    "Q": {"mean_by_writer": [0.25, 0.0625], "n_above": 2,
                          "scores": [[0.375, 0.0625], [0.125, 0.0625]]},
                    "K": {"mean_by_writer": [0.125, 0.1875], "n_above": 3,
                          "scores": [[0.0625, 0.125], [0.1875, 0.25]]},
                    "V": {"n_above": 1, "scores": [[0, 0], [0, 1]]}},
    "attention_groups": {"tv": {"without_K": [0.5, 0.75], "without_Q": [0.25, 0.625]},
                         "tv_without_K_of_head": [[0.4649, 0.4], [0.344, 0.4]]},
    "induction": {"score": [[0.5, 0.125], [0.0, 0.25]]},
}


def test_lists_of_numbers_in_the_claims_are_printed_so():
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        part5.print_claims(part5.compute_claims(None, {"sections": PART5_BY_HAND}),
                           {"sections": PART5_BY_HAND}, report.Log())
        part4.print_claims(part4_claims(PART4_BY_HAND), {}, report.Log())
    lines = printed.getvalue().splitlines()
    for line in ("standard deviation of the logits, order by order: 0.50, 1.00, 1.50",
                 "loss by order, the start-token part of the virtual heads counted with the direct "
                 "path: 9.00, 5.50, 5.25",
                 "scores of all three kinds within 0.02 of the baseline: 3",
                 "its smallest Q-composition above the baseline: +0.062",
                 "share of what each layer-0 head writes that is the same at every position (of "
                 "the mean square): -, 75%",
                 "on text, mean attention on the start token, head by head: 0.50, 0.25, 0.12",
                 "\"keep\": the direct path's pushes on the pair, first prompt: +2.50, -1.50",
                 "\"keep\": the direct path's pushes on the pair, second prompt: -"):
        assert f"  {line}" in lines


def test_the_claims_of_part_5_by_hand():
    claims = part5.compute_claims(None, {"sections": PART5_BY_HAND})
    assert claims == {
        "thresholds": {"composition": 0.05, "loss": 0.01},
        "total_drop": 5.0, "single_share": 0.75, "full_sum_minus_model": 0.25,
        "virtual_over_paper": 0.5 / 0.3, "largest_run_through": ["1.0", "1.1"], "pairs_above": 6,
        "near_baseline": 3, "logit_sd_by_order": [0.5, 1.0, 1.5],
        "loss_by_order_start_direct": [9.0, 5.5, 5.25], "constant_share": [None, 0.75],
        "first_published_K_heads": 1,  # two pairs, of one head
        "previous_token_head": "0.1",
        "column": {"head": "0.0", "others_max": 0.1875, "n_above": 3,
                   "Q_mean_above_baseline": 0.1875, "K_mean_above_baseline": 0.0625,
                   "Q_min_above_baseline": 0.0625, "K_min_above_baseline": 0.0,
                   "n_changed": 1, "six_min": 0.344, "six_max": 0.4649},
        "heads_1_0_to_1_5": {"tv_min": 0.25, "tv_max": 0.75},
        "induction": {"top": "0.0", "others_max": 0.25},
    }
