"""What the article's sentences derive from the sections of a run: "no other above 0.04".

Heads are found by rule, except those that a sentence names. A claim is None where the rows it
needs were skipped. Every claim is printed on a line of its own, in the order of the lists below.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from results import compare, report

PAPER_VIRTUAL_FALL = 0.3  # nats that the virtual heads give in the paper's own model (part 5)
NEAR_BASELINE = 0.02  # composition scores no further from the random baseline: "near" (part 5)
COUNTED_RANGE = (0.35, 0.46)  # changes of a pattern that part 5 counts, at two decimals
FIRST_HEADS = range(6)  # layer-1 heads 1.0 to 1.5, whose changes part 5 bounds
BOUNDED_HEADS = (0, 3, 4)  # copying heads whose weight on near tokens part 4 bounds
NEARLY_ALL = 7 / 8  # of the eigenvalues: our reading of "nearly all" (part 4)

PART_5 = [  # (key, label, format)
    ("total_drop", "nats that all terms together lower the loss by", ".2f"),
    ("single_share", "of them, the share of the single heads", ".0%"),
    ("full_sum_minus_model", "loss of all terms minus loss of the model", ".1e"),
    ("virtual_over_paper", f"fall through virtual heads over the paper's {PAPER_VIRTUAL_FALL}",
     ".1f"),
    ("largest_run_through", "the largest virtual heads run through", ""),
    ("logit_sd_by_order", "standard deviation of the logits, order by order", ".2f"),
    ("loss_by_order_start_direct", "loss by order, the start-token part of the virtual heads "
     "counted with the direct path", ".2f"),
    ("pairs_above", "scores of all three kinds above the threshold", "d"),
    ("near_baseline", f"scores of all three kinds within {NEAR_BASELINE} of the baseline", "d"),
    ("first_published_K_heads", "layer-0 heads that the keys read, as first published", "d"),
    ("previous_token_head", "previous-token head", ""),
    ("column.head", "layer-0 head with the highest mean Q- and K-composition", ""),
    ("column.others_max", "highest mean of any other layer-0 head", ".3f"),
    ("column.n_above", "its Q and K scores above the threshold", "d"),
    ("column.Q_mean_above_baseline", "its mean Q-composition above the baseline", "+.3f"),
    ("column.K_mean_above_baseline", "its mean K-composition above the baseline", "+.3f"),
    ("column.Q_min_above_baseline", "its smallest Q-composition above the baseline", "+.3f"),
    ("column.K_min_above_baseline", "its smallest K-composition above the baseline", "+.3f"),
    ("column.n_changed", "layer-1 heads that change by {} to {} without its K term".format(
        *COUNTED_RANGE), "d"),
    ("column.six_min", "smallest of the six largest such changes", ".2f"),
    ("column.six_max", "largest such change", ".2f"),
    ("constant_share", "share of what each layer-0 head writes that is the same at every position "
     "(of the mean square)", ".0%"),
    ("heads_1_0_to_1_5.tv_min", "heads 1.0 to 1.5 without K or Q terms: smallest change", ".2f"),
    ("heads_1_0_to_1_5.tv_max", "heads 1.0 to 1.5 without K or Q terms: largest change", ".2f"),
    ("induction.top", "head with the highest induction score", ""),
    ("induction.others_max", "highest induction score of any other head", ".2f"),
]
PART_4 = [
    ("ralph.other_heads", "at work: number of other heads", "d"),
    ("ralph.others_min", "at work: their smallest push", "+.2f"),
    ("ralph.others_max", "at work: their largest push", "+.2f"),
    ("ralph.tokens_back", "at work: tokens from the name to the end", "d"),
    ("large_raises", "of \"large\" and \"small\", the row of ' large' has", ""),
    ("paris_raises_itself", "its own word in the row of ' Paris', times", "d"),
    ("positional.n_lean", "heads that lean on position", "d"),
    ("positional.present_or_previous", "all weight on the token itself and the one before", ""),
    ("positional.same_min", "of them on the token itself, smallest", ".2f"),
    ("positional.same_max", "of them on the token itself, largest", ".2f"),
    ("on_text.one_back", "on text, leaning heads with the most weight one back", ""),
    ("on_text.others_max", "on text, largest weight of a head that does not lean", ".3f"),
    ("on_text.copying_max", "on text, largest near weight of heads {}".format(
        ", ".join(f"0.{h}" for h in BOUNDED_HEADS)), ".3f"),
    ("on_text.start_token", "on text, mean attention on the start token, head by head", ".2f"),
    ("keep.direct.0", "\"keep\": the direct path's pushes on the pair, first prompt", "+.2f"),
    ("keep.direct.1", "\"keep\": the direct path's pushes on the pair, second prompt", "+.2f"),
    ("keep.ratio_difference", "\"keep\": one ratio minus the other", ".1e"),
    ("keep.lowest_above_median", "\"keep\": lowest listed word minus the median", "+z.2f"),
    ("keep.going_above_others", "\"keep\": the last destination minus the next highest", "+.2f"),
    ("eigen.above_0_7", "heads with a copy score above 0.7", "d"),
    ("eigen.at_least_0_97", "heads with a copy score of 0.97 or more", "d"),
    ("eigen.negative", "heads with a negative copy score", ""),
    ("eigen.negative_positional", "of them, heads that lean on position", "d"),
    ("eigen.nearly_all_right", "nearly all eigenvalues on the right", ""),
    ("eigen.most_right", "most eigenvalues on the right", ""),
    ("eigen.sums_differ", "trace minus sum of the diagonal, at most", ".1e"),
    ("eigen.rest", "eigenvalues of the piece that match none", "d"),
    ("random.copy_score_sd", "standard deviation of the random heads' copy scores", ".3f"),
]


def number(x: float | None, form: str) -> str:
    """A number for the log; "-" where there is none, as for a dead head."""
    return "-" if x is None else format(x, form)


def print_claims(claims: dict, lines: list[tuple], log: report.Log) -> None:
    log("== WHAT THE TEXT DERIVES FROM THESE NUMBERS")
    for key, label, form in lines:
        log(f"  {label}: {_in_words(compare.look_up({'sections': claims}, key), form)}")


def _in_words(value, form: str) -> str:
    if isinstance(value, list):
        return ", ".join(v if isinstance(v, str) else number(v, form) for v in value) or "none"
    return number(value, form)


# ------------------------------------------------------------------ part 5


def part_5(sections: dict, threshold: float, loss_threshold: float) -> dict:
    """The claims of part 5, which the article makes of two layers; of other models, only
    what the sum of all terms misses. threshold: a composition score above the baseline,
    loss_threshold in nats."""
    terms, composition = sections["term_importance"], sections["composition"]
    of_any_model = {"thresholds": {"composition": threshold, "loss": loss_threshold},
                    "full_sum_minus_model": terms["loss_by_order"][-1] - terms["loss_model"]}
    if sections["model"]["n_layers"] != 2:
        return of_any_model
    total = terms["uniform"] - terms["loss_model"]
    previous = composition["prev_token"]
    return of_any_model | {
        "total_drop": total,
        "single_share": -terms["marginal"][1] / total if total else None,
        "virtual_over_paper": -terms["marginal"][2] / PAPER_VIRTUAL_FALL,
        "largest_run_through": sorted({v["reader"] for v in terms["virtual_largest"]}),
        "logit_sd_by_order": terms["logit_sd_by_order"],
        "loss_by_order_start_direct": terms["loss_by_order_start_direct"],
        "pairs_above": sum(composition[kind]["n_above"] for kind in "QKV"),
        "near_baseline": _near_baseline(composition),
        "constant_share": composition["constant_share"],
        "first_published_K_heads": _heads_read(composition["first_published"], "K"),
        "previous_token_head": f"0.{previous.index(max(previous))}",
        "column": _column(sections, composition["baseline"]["mean"], threshold),
        "heads_1_0_to_1_5": _first_heads(sections["attention_groups"]["tv"]),
        "induction": _induction(sections["induction"]["score"]),
    }


def _known(values) -> list:
    """The values without those of dead heads, which are None."""
    return [v for v in values if v is not None]


def _near_baseline(composition: dict) -> int:
    """How many scores, Q, K and V, are near the random baseline."""
    scores = _known(score for kind in "QKV" for row in composition[kind]["scores"] for score in row)
    baseline = composition["baseline"]["mean"]
    return sum(abs(score - baseline) <= NEAR_BASELINE for score in scores)


def _heads_read(form: dict, kind: str) -> int:
    """How many layer-0 heads have a score of this kind above the form's own baseline and margin."""
    least = form["baseline"]["mean"] + form["baseline"]["margin"]
    return sum(any(score > least for score in _known(of_head))
               for of_head in zip(*form[kind]["scores"]))


def _column(sections: dict, baseline: float, threshold: float) -> dict:
    """The layer-0 head with the highest mean Q- and K-composition, and what it changes; nothing
    if there is none, since all heads are dead."""
    composition = sections["composition"]
    means = {kind: composition[kind]["mean_by_writer"] for kind in "QK"}
    both = {h: sum(pair) for h, pair in enumerate(zip(*means.values())) if None not in pair}
    if not both:
        return {}
    column = max(both, key=both.__getitem__)
    others = [of_kind[h] for of_kind in means.values() for h in both if h != column]
    above = {f"{kind}_mean_above_baseline": means[kind][column] - baseline for kind in "QK"}
    return {
        "head": f"0.{column}", "others_max": max(others, default=None), **above,
        **_cells(composition, column, baseline, threshold),
        **_changed(row[column] for row in sections["attention_groups"]["tv_without_K_of_head"]),
    }


def _cells(composition: dict, column: int, baseline: float, threshold: float) -> dict:
    """The Q and K scores of one column: how many count as composing, and the smallest."""
    scores = {kind: _known(row[column] for row in composition[kind]["scores"]) for kind in "QK"}
    smallest = {f"{kind}_min_above_baseline": min(scores[kind]) - baseline for kind in "QK"}
    return {"n_above": sum(v > baseline + threshold for v in scores["Q"] + scores["K"]), **smallest}


def _changed(changes: Iterable[float]) -> dict:
    """How many patterns change as the article counts, and the six that change most."""
    largest, (low, high) = sorted(changes, reverse=True), COUNTED_RANGE
    return {"n_changed": sum(low <= round(v, 2) <= high for v in largest),
            "six_min": largest[:6][-1], "six_max": largest[0]}


def _first_heads(tv: dict) -> dict:
    changes = [tv[name][h] for name in ("without_K", "without_Q")
               for h in FIRST_HEADS if h < len(tv[name])]
    return {"tv_min": min(changes), "tv_max": max(changes)}


def _induction(scores: list[list[float]]) -> dict:
    """The head with the highest induction score, and the highest score of the others."""
    heads = [(score, f"{layer}.{h}") for layer, row in enumerate(scores)
             for h, score in enumerate(row)]
    (_, top), (others_max, _) = sorted(heads, reverse=True)[:2]
    return {"top": top, "others_max": others_max}


# ------------------------------------------------------------------ part 4


def part_4(sections: dict, text_tokens: int, d_model: int, destinations: list[str]) -> dict:
    """The claims of part 4; destinations: those of the bug, the one that stands out last."""
    return {
        "d_model": d_model,
        "text_tokens": text_tokens,
        "ralph": _at_work(sections["at_work"]["ralph"], sections["sizes"]["n_heads"]),
        **_rows(sections["skip_trigrams"]),
        "keep": _keep(sections["keep"], destinations),
        "positional": _positional(sections["positional"]),
        "on_text": _on_text(sections["positional"]),
        "eigen": _eigen(sections),
        "random": _random(sections["eigen"]["random"]["copy_score"]),
    }


def _at_work(word: dict, n_heads: int) -> dict:
    """The pushes of the other heads, and how far back the source stands."""
    others = [push for h, push in enumerate(word.get("pushes", [])) if h != word["head"]]
    tokens, source = word["tokens"], word["source"]
    back = len(tokens) - 1 - tokens.index(source) if source in tokens else None
    return {"other_heads": n_heads - 1, "others_min": min(others, default=None),
            "others_max": max(others, default=None), "tokens_back": back}


def _rows(table: list[dict]) -> dict:
    """What the table's rows of " large" and " Paris" raise."""
    out = {row["source"]: row.get("out") for row in table}
    large, paris = out[" large"], out[" Paris"]
    return {"large_raises": large and [w for w in ("large", "small") if w in large],
            "paris_raises_itself": paris and sum(w.strip() == "Paris" for w in paris)}


def _keep(bug: dict, destinations: list[str]) -> dict:
    ratios = [p["ratio"] for p in bug.get("prompts", []) if p.get("ratio") is not None]
    ov, qk = bug.get("ov"), bug.get("qk", {})
    *others, last = destinations
    above = qk[last] - max(qk[w] for w in others) if len(qk) == len(destinations) else None
    return {"direct": [_direct(p, bug["pair"]) for p in bug.get("prompts", [])] or None,
            "ratio_difference": ratios[0] - ratios[1] if len(ratios) == 2 else None,
            "lowest_above_median": min(ov.values()) - bug["ov_median"] if ov else None,
            "going_above_others": above}


def _direct(prompt: dict, pair: list[str]) -> list[float] | None:
    """What the direct path pushes the two words by, after a prompt that was not skipped."""
    return [prompt["direct"][word] for word in pair] if "direct" in prompt else None


def _positional(position: dict) -> dict:
    """The heads with all weight on the token itself and the one before, at two decimals."""
    weights = position["from_positions"]
    near = [h for h, (here, back, *_) in enumerate(weights) if round(here + back, 2) == 1]
    here = [weights[h][0] for h in near]
    return {"n_lean": len(position["lean"]), "present_or_previous": _names(near),
            "same_min": min(here, default=None), "same_max": max(here, default=None)}


def _on_text(position: dict) -> dict:
    text, lean = position["on_text"], position["lean"]
    others = [max(weights) for h, weights in enumerate(text) if h not in lean]
    near = [max(weights[:2]) for h, weights in enumerate(text) if h in BOUNDED_HEADS]
    return {"one_back": _names(h for h in lean if max(text[h]) == text[h][1]),
            "others_max": max(others, default=None), "copying_max": max(near),
            "start_token": position["start_token"]}


def _eigen(sections: dict) -> dict:
    heads, rank = sections["eigen"]["heads"], sections["sizes"]["rank"]
    right = [head["positive"] / rank for head in heads]
    return {
        "rest": sections["eigen"]["check"]["n_tokens"] - rank,
        **_scores([head["copy_score"] for head in heads], sections["positional"]["lean"]),
        "nearly_all_right": _names(h for h, share in enumerate(right) if share >= NEARLY_ALL),
        "most_right": _names(h for h, share in enumerate(right) if 0.5 < share < NEARLY_ALL),
        "sums_differ": max(abs(head["trace"] - head["diagonal_sum"]) for head in heads),
    }


def _scores(of_head: list[float | None], lean: list[int]) -> dict:
    """What the copy scores of the heads that have one amount to."""
    scores = {h: score for h, score in enumerate(of_head) if score is not None}
    negative = [h for h, score in scores.items() if score < 0]
    return {"above_0_7": sum(score > 0.7 for score in scores.values()),
            "at_least_0_97": sum(round(score, 3) >= 0.97 for score in scores.values()),
            "negative": _names(negative), "negative_positional": len({*negative} & {*lean})}


def _random(scores: list[float]) -> dict:
    known = _known(scores)
    return {"n": len(scores), "copy_score_sd": statistics.stdev(known) if len(known) > 1 else None}


def _names(heads) -> list[str]:
    return [f"0.{h}" for h in heads]
