"""What the correction of the composition score changes: by loops, on made-up maps."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import circuits_part5 as part5
from results import report


def naive_spearman(x: list[float], y: list[float]) -> float:
    """Pearson's correlation of the ranks; equal values share the mean of their places."""
    def ranks(values):
        places = sorted(values)
        return [sum(i + 1 for i, p in enumerate(places) if p == v) / places.count(v)
                for v in values]

    a, b = ranks(x), ranks(y)
    mean = (len(a) + 1) / 2
    cross = sum((i - mean) * (j - mean) for i, j in zip(a, b))
    return cross / (sum((i - mean) ** 2 for i in a) * sum((j - mean) ** 2 for j in b)) ** 0.5


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=2, max_size=12))
def test_rank_correlation(pairs):
    x, y = ([float(p[i]) for p in pairs] for i in (0, 1))
    found = part5.rank_correlation([x], [y])
    if len({*x}) == 1 or len({*y}) == 1:
        assert found is None
    else:
        assert found == pytest.approx(naive_spearman(x, y), abs=1e-12)


def test_rank_correlation_of_what_rises_together():
    x = [[0.1, 0.2], [0.3, 0.9]]
    assert part5.rank_correlation(x, [[1, 2], [3, 4]]) == pytest.approx(1)
    assert part5.rank_correlation(x, [[4, 3], [2, 1]]) == pytest.approx(-1)


def test_rank_correlation_in_double_precision():
    """Values that float32 cannot tell apart have ranks of their own, in either map."""
    x = [[0.5 + 1e-12 * i for i in range(4)]]
    assert part5.rank_correlation(x, [[1, 2, 3, 4]]) == pytest.approx(1)
    assert part5.rank_correlation([[1, 2, 3, 4]], x) == pytest.approx(1)
    assert part5.rank_correlation([[1, 3, 2, 4]], x) == pytest.approx(0.8)


def sections(seed: int) -> dict:
    """Composition maps of 3 layer-1 and 2 layer-0 heads, and the causal tests' changes."""
    r = random.Random(seed)
    a_map = lambda high: [[r.uniform(0, high) for _ in range(2)] for _ in range(3)]  # noqa: E731
    form = lambda base: {"baseline": {"mean": base, "margin": base * 5 / 6}} | {  # noqa: E731
        kind: {"scores": a_map(0.2)} for kind in "QKV"}
    model = {"n_layers": 2, "n_virtual": 6, "readers": ["1.0", "1.1", "1.2"],
             "writers": ["0.0", "0.1"]}
    return {"model": model, "composition": form(0.06) | {"first_published": form(0.03)},
            "attention_groups": {"tv_without_K_of_head": a_map(0.2)},
            "term_importance": {"virtual_removed": a_map(0.02)}}


@pytest.mark.parametrize("seed", range(5))
def test_pairs_called_and_supported(seed):
    s = sections(seed)
    found = part5.compute_correction(None, {"sections": s})
    c, first = s["composition"], s["composition"]["first_published"]
    causal = {"K": (s["attention_groups"]["tv_without_K_of_head"], 0.1),
              "V": (s["term_importance"]["virtual_removed"], 0.01)}
    cells = list(itertools.product(range(3), range(2)))
    flat = lambda rows: [rows[i][j] for i, j in cells]  # noqa: E731
    assert set(found) == {*"QKV"} and "causal" not in found["Q"]
    for kind, forms in ((k, {"corrected": (c[k]["scores"], 0.11),
                             "first_published": (first[k]["scores"], 0.055)}) for k in "QKV"):
        assert found[kind]["rank_correlation"] == pytest.approx(
            naive_spearman(*(flat(rows) for rows, _ in forms.values())))
        for name, (rows, least) in forms.items():
            called = [{"reader": f"1.{i}", "writer": f"0.{j}"} for i, j in cells
                      if rows[i][j] > least]
            assert found[kind]["called"][name] == called
            if kind in causal:
                changes, threshold = causal[kind]
                supports = [{"reader": f"1.{i}", "writer": f"0.{j}"} for i, j in cells
                            if changes[i][j] > threshold]
                assert found[kind]["causal"] == supports
                assert found[kind]["supported"][name] == [p for p in called if p in supports]
                assert found[kind]["rank_correlation_with_change"][name] == pytest.approx(
                    naive_spearman(flat(rows), flat(changes)))


def test_the_log_has_the_two_maps_side_by_side(capsys):
    s = sections(0)
    log = report.Log()
    r = part5.compute_correction(None, {"sections": s})
    part5.print_correction(r, {"sections": s}, log)
    c, first = s["composition"], s["composition"]["first_published"]
    rows = [line for line in log.lines if line.startswith("    head 1.")]
    assert len(rows) == 9
    for line, (kind, h2) in zip(rows, itertools.product("QKV", range(3))):
        left, right = line.split(": ")[1].split(" | ")
        for half, values, least in ((left, c[kind]["scores"][h2], 0.11),
                                    (right, first[kind]["scores"][h2], 0.055)):
            shown = [f"{v:.3f}" + "*" * (v > least) for v in values]
            assert half.split() == shown
    for kind, name in itertools.product("KV", ("corrected", "first_published")):
        wanted = [f"{p['reader']} o {p['writer']}" if p in r[kind]["causal"] else
                  f"({p['reader']} o {p['writer']})" for p in r[kind]["called"][name]]
        assert any(line.endswith("; called " + (", ".join(wanted) or "none")) for line in log.lines)
    assert f"): {len(r['K']['causal'])} of 6 pairs pass" in "".join(log.lines)
