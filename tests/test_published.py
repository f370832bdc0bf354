"""results/published/*.json: well formed, and every key is a real one."""

import collections
import contextlib
import copy
import io
import json
import pathlib
import re
import types
from decimal import Decimal

import pytest

import circuits_part4 as part4
import circuits_part5 as part5
import common
import test_part4
import tiny

PUBLISHED = pathlib.Path(part5.__file__).parent / "results" / "published"
FILES = {name: json.loads((PUBLISHED / f"{name}.json").read_text("utf-8"))
         for name in ("part4", "part5", "part4_toy", "part5_toy")}
EXPLAINED = json.loads((PUBLISHED / "explained.json").read_text("utf-8"))
PARTS = ("part4", "part5")
ENTRIES = [(part, e) for part in PARTS for e in FILES[part]["entries"]]
KINDS = {"exact", "rounded", "bound", "range", "sampled", "not comparable"}
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
    if e["kind"] in ("range", "sampled") and isinstance(value, list):
        ends = [x for x in value if x is not None]
        return wrong + ["range is not what is printed"] * (ends != [x for x, _ in found])
    if isinstance(value, list):
        return wrong
    elsewhere = [p["line"] for p in e.get("also", []) if not isinstance(value, str)]
    wrong += ["value is not what is printed"] * (value != found[0][0])
    return wrong + [f"not in {line}" for line in elsewhere if numbers(line)
                    and abs(value) not in [abs(x) for x, _ in numbers(line)]]


@pytest.mark.parametrize("name", FILES)
def test_entries_are_well_formed(name):
    assert set(FILES[name]) == {"source", "entries", "paper"} and FILES[name]["source"]
    wrong = {e.get("key"): problems(e) for e in FILES[name]["entries"]}
    assert not {k: v for k, v in wrong.items() if v}


@pytest.mark.parametrize("change, found", [
    (dict(kind="roundish"), "kind roundish"),
    (dict(printed="0.7500"), "printed is not in the line"),
    (dict(value=0.76), "value is not what is printed"),
    (dict(decimals=3), "decimals"),
    (dict(section="Which terms"), "section"),
    (dict(kind="sampled"), "sampled without its spread"),
    (dict(kind="range"), "range without [low, high]"),
    (dict(kind="range", value=[0.44, 0.81]), "range is not what is printed"),
    (dict(kind="not comparable"), "not comparable without a reason"),
    (dict(line="changed  by 0.75"), "spaces"),
    (dict(decimals=None, format="1.{}", value=7), "value gives 1.7"),
    (dict(also=[dict(section="Key takeaways", line="by 0.57")]), "not in by 0.57"),
    (dict(decimal=2), "decimal?"),
])
def test_a_fault_is_found(change, found):
    entry = next(e for e in ENTRIES if e["printed"] == "0.75")
    assert problems(entry) == []
    assert problems(entry | change)[0] == found


@pytest.mark.parametrize("name", FILES)
def test_one_key_is_published_once_for_each_precision(name):
    count = collections.Counter((e["key"], e["decimals"]) for e in FILES[name]["entries"])
    assert [k for k, n in count.items() if n > 1] == []
    places = collections.Counter((e["key"], p["section"], p["line"]) for e in FILES[name]["entries"]
                                 for p in [e, *e.get("also", [])])
    assert [k for k, n in places.items() if n > 1] == []


def test_the_papers_own_figures_stand_apart():
    paper = FILES["part5"]["paper"]
    assert {"0.05", "1.3", "5.2", "4.0", "1.8", "0.3", "144", "24"} <= {p["printed"] for p in paper}
    assert all({"what", "printed", "beside", "section", "line"} <= p.keys()
               and p["printed"] in p["line"] and p["section"] in SECTIONS for p in paper)


# ------------------------------------------------------------------ against a run


@pytest.fixture(scope="module")
def sections(tmp_path_factory):
    """A real results JSON: a tiny model of eight heads, as the published one has."""
    home = tmp_path_factory.mktemp("published5")
    (home / "text.txt").write_text(TEXT, encoding="utf-8")
    folder = tiny.folder(home / "tiny", EIGHT_HEADS)
    part5.main(["--model", str(folder), "--text", str(home / "text.txt"), "--tokens", "39",
                "--seq-len", "13", "--out", str(home / "out"), "--no-figures"])
    return json.loads((home / "out" / "part5.json").read_text("utf-8"))["sections"]


def at(tree, key: str):
    for part in key.split("."):
        tree = tree[int(part)] if isinstance(tree, list) else tree[part]
    return tree


def kind_of(value):
    """What can be compared with what: a number, a word, and lists and dicts of them."""
    if isinstance(value, dict):
        return {k: kind_of(v) for k, v in value.items()}
    if isinstance(value, list):
        return [kind_of(v) for v in value]
    return "word" if isinstance(value, str) else "number"


KEYS = ([e["key"] for e in ENTRIES] + [e["spread"] for e in ENTRIES if "spread" in e]
        + [p["beside"] for p in FILES["part5"]["paper"]])


@pytest.mark.parametrize("key", sorted(set(KEYS)))
def test_every_key_is_one_of_a_run(sections, key):
    assert at(sections, key) is not None


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: f"{e['key']}-{e['decimals']}")
def test_what_a_run_gives_can_be_compared(sections, entry):
    ours = at(sections, entry["key"])
    if entry["kind"] == "range":
        assert kind_of(ours) == "number"
    elif entry["key"].endswith("largest_run_through"):  # as many heads as there are
        assert set(kind_of(ours)) == {"word"}
    else:
        assert kind_of(ours) == kind_of(entry["value"])


def test_what_does_not_depend_on_the_model_agrees(sections):
    independent = [e for e in ENTRIES if e.get("model_independent")]
    assert len(independent) >= 8
    for e in independent:
        tolerance = 0 if e["kind"] == "exact" else 0.5 * 10 ** -e["decimals"]
        assert abs(at(sections, e["key"]) - e["value"]) <= tolerance, e["key"]


# ------------------------------------------------------------------ the claims

BY_HAND = {  # two heads a layer
    "term_importance": {"uniform": 10.0, "loss_model": 5.0, "loss_by_order": [9.5, 5.75, 5.25],
                        "marginal": [-0.5, -3.75, -0.5],
                        "virtual_largest": [{"h2": 1, "h1": 0}, {"h2": 1, "h1": 1},
                                            {"h2": 0, "h1": 1}]},
    "composition": {"baseline": {"mean": 0.0625}, "prev_token": [0.1, 0.6],
                    "Q": {"mean_by_h1": [0.25, 0.0625], "n_above": 2,
                          "scores": [[0.375, 0.0625], [0.125, 0.0625]]},
                    "K": {"mean_by_h1": [0.125, 0.1875], "n_above": 3,
                          "scores": [[0.0625, 0.125], [0.1875, 0.25]]},
                    "V": {"n_above": 1, "scores": [[0, 0], [0, 1]]}},
    "attention_groups": {"tv": {"without_K": [0.5, 0.75], "without_Q": [0.25, 0.625]},
                         "tv_without_K_of_head": [[0.4649, 0.4], [0.344, 0.4]]},
    "induction": {"score": [[0.5, 0.125], [0.0, 0.25]]},
}


def test_the_claims_by_hand():
    claims = part5.compute_claims(None, {"sections": BY_HAND})
    assert claims == {
        "thresholds": {"composition": 0.05, "loss": 0.01},
        "total_drop": 5.0, "single_share": 0.75, "full_sum_minus_model": 0.25,
        "virtual_over_paper": 0.5 / 0.3, "largest_run_through": ["1.0", "1.1"], "pairs_above": 6,
        "previous_token_head": "0.1",
        "column": {"head": "0.0", "others_max": 0.1875, "n_above": 3,
                   "Q_mean_above_baseline": 0.1875, "K_mean_above_baseline": 0.0625,
                   "n_changed": 1, "six_min": 0.344, "six_max": 0.4649},
        "heads_1_0_to_1_5": {"tv_min": 0.25, "tv_max": 0.75},
        "induction": {"top": "0.0", "others_max": 0.25},
    }
