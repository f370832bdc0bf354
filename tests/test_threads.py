"""The tiled kernels on several threads: the same numbers, and torch's settings as they were."""

import _thread
import functools
import threading
import time

import pytest
import torch

import common
import tiny


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Many tiles, some of them ragged; and afterwards as many threads as before."""
    monkeypatch.setattr(common, "TILE_ROWS", 11)
    monkeypatch.setattr(common, "TILE_COLUMNS", 2)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@functools.cache
def streams() -> tuple:
    """What a pass over the logits reads, in float32, where the order of a sum shows."""
    run = common.freeze(tiny.model(tiny.state_dict(), dtype=torch.float32), tiny.tokens())
    paths = common.expand(run)
    normed = {str(order): run.final_norm(paths.stream(order)) for order in range(3)}
    heads = [reader for reader, _ in common.virtual_pairs(run.model)]
    return run, {"model": run.final} | normed, {"x": ("model", "1", "2")}, paths.z_virtual, heads


def removals() -> list[torch.Tensor]:
    found = common.unembed(*streams())
    return [torch.stack([*found.losses.values()]), found.loss_increase,
            torch.tensor([found.max_abs_diff, found.min, found.max])]


def ranks() -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    A, B = (torch.randn(3, *shape, generator=g) for shape in ((29, 4), (4, 29)))
    return [common.self_rank(A, B, torch.arange(29), block=7)]


@pytest.mark.parametrize("kernel", [removals, ranks])
def test_the_same_bits_twice(kernel):
    """And on one thread the same numbers; the small products outside the tiles are torch's own."""
    torch.set_num_threads(1)
    wanted = kernel()
    torch.set_num_threads(3)
    first, second = kernel(), kernel()
    assert torch.get_num_threads() == 3
    for a, b, one_thread in zip(first, second, wanted, strict=True):
        assert torch.equal(a, b) and (a - one_thread).abs().max() <= 1e-6


def test_no_bit_of_a_sum_depends_on_the_threads(monkeypatch):
    sums, add = [], common._Sums.add

    def watched(self, more):
        add(self, more)
        sums[-1] = vars(self) | {"exponentials": self.exponentials.tolist()}

    monkeypatch.setattr(common._Sums, "add", watched)
    for n_threads in (1, 2, 3):
        torch.set_num_threads(n_threads)
        sums.append(None)
        removals()
    assert sums[0] == sums[1] == sums[2] and sums[0]["high"] > sums[0]["low"]


@pytest.mark.parametrize("kernel", [removals, ranks])
def test_tiles_are_in_threads_of_their_own(kernel, monkeypatch):
    """As many as the user allows; with one, none."""
    seen, original = [], common._in_parallel

    def watched(tiles, work, take, device):
        def look(tile):
            time.sleep(0.001)  # long enough for the next thread to be there
            seen.append((threading.get_ident(), torch.get_num_threads(), torch.is_grad_enabled()))
            return work(tile)

        original(tiles, look, take, device)

    monkeypatch.setattr(common, "_in_parallel", watched)
    for n_threads in (1, 3):
        seen.clear()
        torch.set_num_threads(n_threads)
        kernel()
        threads, of_torch, grad = map(set, zip(*seen))
        assert len(threads) == n_threads and of_torch == {1} and grad == {False}
        assert (threading.get_ident() in threads) == (n_threads == 1)


CPU = torch.device("cpu")


def test_only_the_processor_has_threads():
    torch.set_num_threads(3)
    found = []
    common._in_parallel(range(5), lambda _: (threading.get_ident(), torch.get_num_threads()),
                        found.append, torch.device("cuda"))
    assert found == [(threading.get_ident(), 3)] * 5


def test_tiles_are_taken_in_order_and_few_at_a_time():
    torch.set_num_threads(2)
    begun, taken, waiting = [], [], []

    def work(tile):
        begun.append(tile)
        time.sleep(0.01 if tile % 3 else 0.03)  # every third is late
        return tile

    def take(tile):
        waiting.append(len(begun) - len(taken))
        taken.append(tile)

    common._in_parallel(range(20), work, take, CPU)
    assert taken == list(range(20)) and sorted(begun) == taken
    assert max(waiting) <= 4


@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize("place", ["work", "take", "tiles", "Ctrl-C"])
def test_an_error_ends_it_at_once(place, n_threads):
    """Wherever it comes from; and torch has its threads back."""
    torch.set_num_threads(n_threads)
    begun = []

    def fail(where, tile):
        if where == "work":
            begun.append(tile)
        if where == place and tile == 3:
            raise ZeroDivisionError
        if (where, place, tile) == ("work", "Ctrl-C", 3):
            _thread.interrupt_main()
        time.sleep(0.002)
        return tile

    others = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt if place == "Ctrl-C" else ZeroDivisionError):
        common._in_parallel((fail("tiles", tile) for tile in range(1000)),
                            lambda tile: fail("work", tile), lambda tile: fail("take", tile), CPU)
    assert torch.get_num_threads() == n_threads and len(begun) < 20
    assert set(threading.enumerate()) <= others


def test_an_error_in_a_kernels_tile(monkeypatch):
    def fail(*args):
        raise ZeroDivisionError

    monkeypatch.setattr(common._Removals, "sums", fail)
    torch.set_num_threads(2)
    with pytest.raises(ZeroDivisionError):
        removals()
    assert torch.get_num_threads() == 2
