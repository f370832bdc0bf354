"""Both scripts with --device cuda where there is a GPU; else on one that is played.

The played GPU computes on the CPU, so every number must come out the same to the last bit. It
refuses what a real one refuses: one operation on tensors of both devices. It calls itself "lazy",
the one name besides the CPU's for which torch asks no driver.
"""

import contextlib
import io

import pytest
import test_part4
import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    return_and_correct_aliasing,
)
from torch.utils._pytree import tree_leaves, tree_map

import circuits_part4
import circuits_part5
import tiny
from results import compare, loading

aten = torch.ops.aten
# A GPU takes indices of the CPU.
INDEXED = {aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default}


class OnGPU(torch.Tensor):
    """A tensor of the played GPU; its numbers are in `here`, on the CPU."""

    @staticmethod
    def __new__(cls, here: torch.Tensor):
        self = torch.Tensor._make_wrapper_subclass(
            cls, here.shape, here.stride(), here.storage_offset(), dtype=here.dtype, device="lazy")
        self.here = here
        return self

    def tolist(self) -> list:
        return self.here.tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        gpu = [isinstance(x, cls) for x in tensors]
        cpu = [not on and x.dim() > 0 for on, x in zip(gpu, tensors)]
        if any(gpu) and any(cpu) and func is not aten.copy_.default and not (
                func in INDEXED and gpu[0]):
            raise RuntimeError(f"{func} of tensors on the CPU and on the GPU")
        stays, here = any(gpu), tree_map(lambda x: getattr(x, "here", x), (args, kwargs))
        if kwargs.get("device") is not None:
            stays, here[1]["device"] = torch.device(kwargs["device"]).type == "lazy", "cpu"
        found = func(*here[0], **here[1])
        if stays:
            found = tree_map(lambda x: cls(x) if isinstance(x, torch.Tensor) else x, found)
        return return_and_correct_aliasing(func, args, kwargs, found)


class PlayedGPU(TorchDispatchMode):
    """While it is on, "lazy" is a device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return OnGPU.__torch_dispatch__(func, types, args, kwargs)


def run(script, out, device: str, *more: str) -> dict:
    with contextlib.redirect_stdout(io.StringIO()):
        return script.main(["--device", device, "--no-figures", "--out", str(out), *more])


def differences(a: dict, b: dict, rtol: float) -> list[dict]:
    return [r for r in compare.with_results(a, b, rtol) if r.verdict != compare.AGREES]


@pytest.mark.parametrize("script, n_layers, more", [
    (circuits_part4, 1, ["--source", " Ralph", "--prompt", "Ralph", "--next", "alph"]),
    (circuits_part5, 2, ["--tokens", "201"])])
def test_on_a_played_gpu(script, n_layers, more, tmp_path, monkeypatch):
    """Every section, on a model whose tokenizer has the words of the article."""
    folder = tiny.folder(tmp_path / "mini-1l", test_part4.SIZES | dict(n_layers=n_layers))
    test_part4.TOKENIZER.save_pretrained(folder)
    (tmp_path / "text.txt").write_text(test_part4.text_of_all_words() * 3, encoding="utf-8")
    more = ["--model", str(folder), "--text", str(tmp_path / "text.txt"), *more]
    read_weights, tensor = loading._read_weights, torch.tensor

    def read(file):
        with _disable_current_modes():  # a memory map has no operations
            return read_weights(file)

    monkeypatch.setattr(loading, "_read_weights", read)
    monkeypatch.setattr(torch, "tensor", lambda *a, device=None, **k: tensor(*a, **k).to(device))
    cpu = run(script, tmp_path, "cpu", *more)
    with PlayedGPU():
        played = run(script, tmp_path, "lazy", *more)
    assert played["meta"]["device"] == "lazy"
    assert differences(played, cpu, 1e-9) == []


FAULTS = {
    "a sum": lambda gpu, cpu: gpu + cpu,
    "a sum, the other way round": lambda gpu, cpu: cpu + gpu,
    "in place": lambda gpu, cpu: cpu.add_(gpu),
    "a product": lambda gpu, cpu: cpu @ gpu,
    "one tensor of both": lambda gpu, cpu: torch.cat([gpu, cpu]),
    "indices": lambda gpu, cpu: cpu[(gpu > 0)],
    "a mask": lambda gpu, cpu: gpu.masked_fill(cpu > 0, 0),
    "numpy": lambda gpu, cpu: gpu.numpy(),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_the_played_gpu_refuses_what_a_real_one_refuses(fault):
    with PlayedGPU():
        gpu = torch.eye(3, device="lazy")
        assert (gpu + gpu).sum().item() == 6 and gpu[torch.tensor([0, 1])].tolist()[1][1] == 1
        assert gpu.device.type == "lazy" and gpu.cpu().device.type == "cpu"
        with pytest.raises((RuntimeError, TypeError)):
            fault(gpu, torch.eye(3))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("script", [circuits_part4, circuits_part5])
def test_on_a_real_gpu(script, tmp_path):
    """The same numbers and words on both; float32 rounds otherwise there."""
    cpu, cuda = (run(script, tmp_path, x, "--model", "mini") for x in ("cpu", "cuda"))
    torch.use_deterministic_algorithms(False)
    assert differences(cuda, cpu, 1e-4) == []
    assert cuda["meta"]["token_ids_sha256"] == cpu["meta"]["token_ids_sha256"]
