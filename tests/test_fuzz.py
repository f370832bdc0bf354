"""Whatever stands on a command line, and whatever numbers a kernel is given: the scripts refuse in
one line or get as far as loading, and what a kernel promises of every input holds for drawn ones.
"""

import contextlib
import dataclasses
import functools
import io
import itertools
import re
import sys
import types

import hypothesis
import pytest
import test_part5
import torch
from hypothesis import strategies as st

import circuits_part4
import circuits_part4_toy
import circuits_part5
import circuits_part5_toy
import common
from results import compare, loading, report, runner

SCRIPTS = [circuits_part4, circuits_part4_toy, circuits_part5, circuits_part5_toy]
few = hypothesis.settings(max_examples=100, deadline=None, derandomize=True, database=None)

# ================================================================================= Command lines


def refuse(*args, **kwargs):
    raise common.UserError("as far as loading")


@pytest.fixture(scope="module", autouse=True)
def stops_at_loading(tmp_path_factory):
    """Nothing is loaded, computed or drawn; the only results are a broken file."""
    with pytest.MonkeyPatch.context() as m:
        for room, name in ((loading, "load_model"), (compare, "read_published"), (report, "draw")):
            m.setattr(room, name, refuse)
        here = tmp_path_factory.mktemp("here")
        m.setattr(common, "HERE", here)
        m.chdir(here)
        (here / "broken.json").write_text("[")
        yield here


def run(script, argv: list[str]) -> tuple[int | str | None, str, str]:
    """Exit code, stdout and stderr of a script."""
    stdout, stderr, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = [script.SCRIPT.file, *argv]
    try:
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            code = runner.run_script(script.main)
    except SystemExit as e:
        code = e.code
    finally:
        sys.argv = before
    return code, stdout.getvalue(), stderr.getvalue()


def options(script) -> tuple[list[str], list[str]]:
    """The options of a script that take a value, and those that do not."""
    found = re.findall(r"^  (?:-h, )?(--[a-z-]+)( \S)?", run(script, ["--help"])[1], re.MULTILINE)
    return [o for o, value in found if value], [o for o, value in found if not value]


# But for "--": what argparse of Python 3.11 makes of --model=-- is no string.
ODD = ["", " ", "-", "-1", "0", "1e9", "2147483648", "9" * 5000, "\u0663", "\u00b2", "0x1",
       "nan", "\udcff", "a\nb", "\x1b[31m", "%s", "{}", "@x", "'", "mini", "cpu", "cuda:99",
       "float64", ".", "..", "/", "/dev/null", "n" * 300, "x/" * 3000, "--tokens=-5", "--t",
       "broken.json"]
words = st.one_of(st.sampled_from(ODD), st.text(max_size=9), st.integers().map(str),
                  st.floats().map(str)).filter(
    lambda x: "\0" not in x and x != "--")  # no shell can pass a zero byte


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.SCRIPT.stem)
def test_any_command_line(script, stops_at_loading):
    names, alone = options(script)
    valued, flags = st.sampled_from(names), st.sampled_from(alone)
    sound = st.one_of(flags, st.builds("{}={}".format, valued, words))
    lines = st.one_of(st.lists(sound, max_size=3),
                      st.lists(st.one_of(sound, valued, words, st.just("--")), max_size=6))

    def one_line_or_loading(argv):
        code, stdout, stderr = run(script, argv)
        assert code in (0, 2), (code, argv)
        if code:
            start = f"{script.SCRIPT.file}: error: "
            assert stderr.startswith(start) and stderr.count("\n") == 1 and stdout == "", stderr
        else:
            assert stdout.startswith("usage: ") and stderr == ""

    for name, value, more in itertools.product(names, ODD, ([], ["--figures-only"])):
        one_line_or_loading([f"{name}={value}", *more])
    hypothesis.settings(few, max_examples=300)(hypothesis.given(lines)(one_line_or_loading))()
    for argv in ([], ["--out", "somewhere"]):
        assert "as far as loading" in run(script, argv)[2]
    assert [file.name for file in stops_at_loading.iterdir()] == ["broken.json"]


# ======================================================================================= Kernels

seeds, sizes = st.integers(0, 10**6), st.integers(1, 7)


def draw(seed: int, *shape: int, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


@few
@hypothesis.given(seeds, sizes, st.floats(1e-6, 1e6))
def test_a_copy_score_is_in_minus_1_to_1_and_knows_no_size(seed, n, factor):
    """Of n pairs a + bi, a - bi; turned round it changes its sign, and left becomes right."""
    half = draw(seed, 2, n, dtype=torch.complex128)
    values = torch.cat([half, half.conj()], -1)
    score = common.copy_score(values)
    assert (score.abs() <= 1 + 1e-12).all()
    torch.testing.assert_close(common.copy_score(factor * values), score)
    torch.testing.assert_close(common.copy_score(-factor * values), -score)
    assert (common.copy_score(values.abs()) == 1).all()
    positive, real, is_complex = common.eigenvalue_counts(values)
    assert [x.tolist() for x in common.eigenvalue_counts(factor * values)] == [
        x.tolist() for x in (positive, real, is_complex)]
    assert (common.eigenvalue_counts(-values)[0] == 2 * n - positive).all()


@few
@hypothesis.given(seeds, sizes, st.integers(1, 4), st.integers(1, 9), st.integers(1, 3))
def test_a_rank_is_a_rank_whatever_the_block(seed, n, d, block, high):
    """Small whole numbers, so that entries are equal: 1 + the others that are as large."""
    g = torch.Generator().manual_seed(seed)
    A, B = (torch.randint(-high, high + 1, shape, generator=g).double()
            for shape in ((2, n, d), (2, d, n)))
    sources = torch.randint(0, n, (5,), generator=g)
    entries = (A @ B)[:, sources]
    own = entries.gather(2, sources.expand(2, 5)[..., None])
    ranks = common.self_rank(A, B, sources, block)
    assert torch.equal(ranks, (entries >= own).sum(-1))
    assert torch.equal(common.self_rank(3 * A, B / 7, sources, n), ranks)


@few
@hypothesis.given(seeds, sizes, st.sampled_from([0.0, 1.0, 30.0]))
def test_total_variation_takes_no_short_cut(seed, n, size):
    """d(p, r) <= d(p, q) + d(q, r), and only equal patterns have distance 0."""
    p, q, r = common.softmax_causal(size * draw(seed, 3, 1, n, n))
    d = common.total_variation
    assert d(p, r) <= d(p, q) + d(q, r) + 1e-12
    assert (d(p, q) == 0) == torch.equal(p, q)


@pytest.mark.parametrize("dtype, atol", [(torch.float64, 1e-8), (torch.float32, 1e-2)],
                         ids=str)  # measured: 3e-12 and 1.4e-3
@few
@hypothesis.given(seeds, st.floats(-1e3, 1e3))
def test_losses_do_not_see_what_all_logits_share(dtype, atol, seed, constant):
    """b_U + c, and one vector added to every column of W_U, move all logits of a row alike. A
    removal then takes sums of exponentials out of what either type can hold."""
    run = test_part5.frozen(test_part5.model_of("tiny", dtype))
    m, paths = run.model, common.expand(run)
    shifted = types.SimpleNamespace(
        W_U=m.W_U + constant * draw(seed, m.cfg.d_model, 1, dtype=dtype), b_U=m.b_U + constant,
        W_O=m.W_O)
    again = dataclasses.replace(run, model=shifted)
    args = ({"model": run.final, "two": run.final_norm(paths.stream(2))}, {}, paths.z_virtual,
            [reader for reader, _ in common.virtual_pairs(m)])
    close = functools.partial(torch.testing.assert_close, rtol=0, atol=atol)
    found, wanted = (common.unembed(which, *args) for which in (again, run))
    close(found.losses, wanted.losses)
    close(found.loss_increase, wanted.loss_increase)
    logits = run.final @ shifted.W_U + shifted.b_U
    close(logits.new_tensor([found.min, found.max]), torch.stack([logits.min(), logits.max()]))
