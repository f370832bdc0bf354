"""Published files whose values are a run's own: what a comparison and a sweep must find again."""

from results import compare, report


def leaves(value) -> list:
    if isinstance(value, list | dict):
        parts = value.values() if isinstance(value, dict) else value
        return [x for part in parts for x in leaves(part)]
    return [value]


def printed_value(entry: dict, ours):
    """The value that an article with this run would print in this entry's place."""
    if isinstance(ours, dict):
        return {k: printed_value(entry, v) for k, v in ours.items()}
    if isinstance(ours, list):
        return [printed_value(entry, v) for v in ours]
    if entry["kind"] in ("exact", "input") or entry["decimals"] is None:
        return ours
    return ours if not report.is_number(ours) else round(ours, entry["decimals"])


def plant(published: dict, results: dict) -> dict:
    """The published file with this run's values, its model and its text; nothing is explained.

    Entries that this run has no value for are left out, and so are those that no run is held to.
    """
    entries = []
    for e in published["entries"]:
        ours = compare.look_up(results, e["key"])
        if ours is None or e["kind"] == "not comparable":
            continue
        value = printed_value(e, ours)
        if e["kind"] == "bound":
            value = ours
        elif isinstance(e["value"], list) and e["kind"] in ("range", "sampled"):
            both = [min(leaves(value)), max(leaves(value))]
            value = [None if end is None else v for end, v in zip(e["value"], both)]
        entries.append(e | {"value": value})
    meta = results["meta"]
    return published | {"entries": entries, "model": meta.get("model"), "explained": {},
                        "rows_sha256": meta.get("rows_sha256")}
