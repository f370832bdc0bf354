"""The benchmark runs through, at small sizes: its rows, and that the two ways of each agree."""

import benchmark


def test_every_measure_has_its_row(capsys):
    benchmark.main(["--small", "--pairs", "1"])
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[1] for row in rows[2:]] == ["a.", "b.", "c.", "d.", "e.", "f.", "f."]
    assert {row.count("|") for row in rows} == {9}
    for letter in "bcd":
        row = next(r for r in rows if r.startswith(f"| {letter}."))
        assert "largest difference" in row


def test_two_ways_that_disagree_stop_it(monkeypatch):
    scores = benchmark.common.composition_scores
    monkeypatch.setattr(benchmark.common, "composition_scores", lambda *a: scores(*a) + 2e-5)
    try:
        benchmark.main(["--small", "--pairs", "1", "--only", "c"])
    except AssertionError as e:
        assert "the two differ by 2.0e-05" in str(e)
    else:
        raise AssertionError("nothing stopped it")
