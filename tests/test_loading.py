"""Loading, the errors a user can meet there, and the writing of results.

An error is one line on stderr that names cause and remedy, with exit code 2, no traceback and
nothing in --out. The scripts run in this process where they can; a subprocess, which takes seconds
to import TransformerLens, only where the environment is what is tested.
"""

import importlib.metadata
import json
import os
import pathlib
import pickle
import re
import shutil
import socket
import subprocess
import sys
import time
import types

import datasets
import huggingface_hub
import pytest
import safetensors.torch
import tokenizers
import torch
from transformer_lens import HookedTransformer
from transformer_lens.utilities import hf_utils
from transformers import PreTrainedTokenizerFast

import circuits_part4
import circuits_part5
import common
import hub
import tiny
from results import loading, report, runner

SCRIPT = "circuits_part5.py"
CLOSED_PORT = "http://127.0.0.1:9"  # nothing listens there: a machine without network
SIZES = tiny.SIZES | dict(d_vocab=70)  # room for all letters of tiny's tokenizer
PATTERN_TEXT = "The cat sat on the mat. The dog did not.\n"


# ==================================================================================== Helpers


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """A cache with everything in it. Tests that damage it take a copy."""
    return hub.build(tmp_path_factory.mktemp("huggingface"))


def use_cache(monkeypatch, cache: pathlib.Path) -> None:
    """Point the libraries in this process at a cache, offline."""
    loading._wikitext_rows.cache_clear()
    loading.hub_problem.cache_clear()
    constants = huggingface_hub.constants
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache / "hub"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache / "datasets")
    monkeypatch.setattr(hf_utils.download_file_from_hf, "__defaults__",
                        (".", str(cache / "hub"), False))


def hub_is_silent(monkeypatch, endpoint: str = CLOSED_PORT) -> None:
    """The user did not ask for offline mode; there just is no network."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)


def hub_answers(monkeypatch) -> None:
    """The hub seems to be there, until something is asked of it."""
    monkeypatch.setattr(loading, "hub_problem", lambda: None)


ROUTES = {"offline": lambda monkeypatch: None, "silent": hub_is_silent, "online": hub_answers}
both_routes = pytest.mark.parametrize("route", ["offline", "online"])


@pytest.fixture
def part5(tmp_path, monkeypatch, capsys):
    """Run circuits_part5.py in this process: its exit code, stdout and stderr."""

    def run(*args) -> tuple[int, str, str]:
        if "--out" not in args:
            args = (*args, "--out", tmp_path / "out")
        monkeypatch.setattr(sys, "argv", [SCRIPT, *map(str, args)])
        capsys.readouterr()
        code = runner.run_script(circuits_part5.main)
        return code, *capsys.readouterr()

    return run


def error_of(code: int, stdout: str, stderr: str) -> str:
    """The error message of a run, checked for its form."""
    *others, last = stderr.splitlines()
    prefix = f"{SCRIPT}: error: "
    assert code == 2 and last.startswith(prefix) and stdout == ""
    assert not [line for line in others if "error" in line or "Traceback" in line], stderr
    return last.removeprefix(prefix)


@pytest.fixture
def refused(part5, tmp_path):
    """Run circuits_part5.py on a mistake: its error message. --out must stay empty."""

    def run(*args) -> str:
        message = error_of(*part5(*args))
        assert list((tmp_path / "out").rglob("*")) == []
        return message

    return run


@pytest.fixture
def folder(tmp_path):
    return tiny.folder(tmp_path / "my-model", SIZES)


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(PATTERN_TEXT * 100, encoding="utf-8")
    return file


def same_parameters(a: HookedTransformer, b: HookedTransformer) -> bool:
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


# ================================================================================ Public models


@pytest.mark.parametrize("dtype", loading.DTYPES)
@pytest.mark.parametrize("route", ROUTES)
def test_every_route_gives_the_same_model(route, dtype, warm, monkeypatch):
    """With or without network: same parameters and logits as HookedTransformer.from_pretrained,
    and as TransformerLens' own processing of the same state dict."""
    use_cache(monkeypatch, warm)
    ROUTES[route](monkeypatch)
    model, source = loading.load_model("attn-only-2l", dtype=loading.DTYPES[dtype], n_layers=2)

    weights = hub.snapshot(warm, hub.MODEL) / "model_final.pth"
    assert source == {"model": "attn-only-2l", "revision": hub.REVISION,
                      "weights_sha256": loading.sha256(weights)}
    assert loading.encode(model, "Hello, world!") == [11765, 14, 1499, 3]
    state = {k: v.float() for k, v in tiny.state_dict(hub.SIZES).items()}
    expected = tiny.model(state, hub.SIZES, loading.DTYPES[dtype])
    assert same_parameters(model, expected)
    tokens = tiny.tokens(d_vocab=hub.SIZES["d_vocab"])
    assert torch.equal(model(tokens), expected(tokens))
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files",
                        lambda self, repo_id: ["config.json", "model_final.pth"])
    oracle = HookedTransformer.from_pretrained("attn-only-2l", device="cpu",
                                               dtype=loading.DTYPES[dtype], **loading.PROCESSING)
    assert same_parameters(model, oracle)


@pytest.mark.parametrize("name, script, text_tokens", [
    ("attn-only-1l", circuits_part4, 24), ("attn-only-2l", circuits_part5, 48)])
def test_every_route_gives_the_same_results(name, script, text_tokens, warm, tmp_path, monkeypatch):
    """Both scripts, from the model and text of the cache to the JSON: byte for byte the same."""
    use_cache(monkeypatch, warm)
    for route, prepare in ROUTES.items():
        with monkeypatch.context() as m:
            prepare(m)
            script.main(["--model", name, "--tokens", str(text_tokens), "--no-figures", "--out",
                         str(tmp_path / route)])
    part = script.__name__.removeprefix("circuits_")
    first, *others = ((tmp_path / route / f"{part}.json").read_bytes() for route in ROUTES)
    assert others == [first, first]
    assert json.loads(first)["meta"]["revision"] == hub.REVISION


@both_routes
@pytest.mark.parametrize("name", ["attn-only-2l", "attn-only-2l-c4-code", hub.MODEL])
def test_tokenizer_with_other_ids_is_refused(name, route, warm, tmp_path, monkeypatch, refused):
    """The installed tokenizer library splits words in another way than it used to."""
    cache = shutil.copytree(warm, tmp_path / "cache")
    tiny.tokenizer(hub.SIZES["d_vocab"]).save_pretrained(hub.snapshot(cache, hub.TOKENIZER))
    use_cache(monkeypatch, cache)
    ROUTES[route](monkeypatch)
    message = refused("--model", name)
    assert f"tokenizer of {name}" in message and "requirements.txt" in message


@pytest.mark.parametrize("name, words", {
    "solu-2l": ["not attention-only", "attn-only-2l"],
    "attn-only-2l-shortformer-6b-big-lr": ["shortformer position", "attn-only-2l"],
    "attn-only-9l": ["no model 'attn-only-9l'", "attn-only-2l", "mini"],
    "./no/such/folder": ["no model './no/such/folder'", "folder"],
}.items())
@both_routes
def test_a_model_that_the_script_cannot_read(route, name, words, warm, monkeypatch, refused):
    """--model names something unknown, or a model that the kernels are not exact for."""
    use_cache(monkeypatch, warm)
    ROUTES[route](monkeypatch)
    message = refused("--model", name)
    assert all(word in message for word in words), message


def test_transformer_lens_of_another_generation(folder, monkeypatch, refused):
    """Version 4 has no HookedTransformer."""
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version",
                        lambda name: "4.0.1" if name == "transformer_lens" else version(name))
    assert "transformer_lens<4" in refused("--model", folder)


# Damage to the files of a model, in a folder of the user's or in the cache. Each takes the folder.


def write(name: str, data: bytes):
    return lambda folder: (folder / name).write_bytes(data)


def cut(name: str):
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size // 2)


def remove(pattern: str):
    return lambda folder: [file.unlink() for file in folder.glob(pattern)]


def config(**change):
    def damage(folder):
        file = folder / "config.json"
        new = json.loads(file.read_text()) | change
        file.write_text(json.dumps({k: v for k, v in new.items() if v != "removed"}))
    return damage


def state(change):
    """Weights that `change` has altered or replaced."""
    def damage(folder):
        file = folder / "model.safetensors"
        if file.exists():
            weights = safetensors.torch.load_file(file)
            safetensors.torch.save_file(change(weights) or weights, file)
        else:
            file = folder / "model_final.pth"
            weights = torch.load(file)
            torch.save(change(weights) or weights, file)
    return damage


def pth(make):
    """model_final.pth in place of model.safetensors, holding something else than weights."""
    def damage(folder):
        remove("model.safetensors")(folder)
        torch.save(make(folder), folder / "model_final.pth")
    return damage


class Code:
    """A pickle of it makes a folder named "executed" when it is read."""

    def __init__(self, folder):
        self.mark = folder / "executed"

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def pickled_code(folder):
    remove("model.safetensors")(folder)
    (folder / "model_final.pth").write_bytes(pickle.dumps(Code(folder)))


def one_is_nan(weights):
    weights["unembed.W_U"][0, 0] = torch.nan


def one_is_missing(weights):
    del weights["blocks.1.attn.W_Q"]


def one_has_another_shape(weights):
    weights["blocks.1.attn.W_Q"] = weights["blocks.1.attn.W_Q"].mT.contiguous()


def a_third_layer(weights):
    weights |= {k.replace(".1.", ".2."): v.clone() for k, v in weights.items() if ".1." in k}


def one_more(key: str):
    return lambda weights: weights | {key: torch.ones(3)}


def one_overflows(weights):
    weights["pos_embed.W_pos"] = torch.full((17, 11), 1e300, dtype=torch.float64)


def whole_numbers(folder):
    return {k: (99 * v).long() for k, v in tiny.state_dict(SIZES).items()}


def complex_numbers(folder):
    return {k: v * (1 + 1j) for k, v in tiny.state_dict(SIZES).items()}


def empty_pth(folder):
    remove("model.safetensors")(folder)
    write("model_final.pth", b"")(folder)


def folder_for(name: str):
    return lambda folder: ((folder / name).unlink(), (folder / name).mkdir())


def pipe_for(name: str):
    return lambda folder: ((folder / name).unlink(), os.mkfifo(folder / name))


def vocabulary(clear: bool = False, **change):
    def damage(folder):
        file = folder / "tokenizer.json"
        new = json.loads(file.read_text())
        if clear:
            new["model"]["vocab"] = {}
        new["model"]["vocab"] |= change
        file.write_text(json.dumps(new))
    return damage


def start_token(bos: str | None):
    """Another bos_token in the tokenizer's files, or none."""
    def damage(folder):
        file = folder / "tokenizer_config.json"
        settings = json.loads(file.read_text()) | {"bos_token": bos}
        file.write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))
        (folder / "special_tokens_map.json").unlink(missing_ok=True)
    return damage


def tokenizer_with_code(folder):
    (folder / "code.py").write_text(f"import os; os.mkdir({str(folder / 'executed')!r})")
    settings = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["code.Own", "code.Own"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


SIZES_WRONG = [("d_model", "eleven"), ("n_heads", "3"), ("n_heads", 0), ("n_heads", 3.0),
               ("n_ctx", -1), ("d_head", 0), ("d_head", None), ("d_vocab", -1),
               ("d_vocab", True)]
OTHER_MODELS = [  # config.json's keys with values that change what the model computes
    ("use_attn_scale", False), ("attn_scale", 1.5), ("attention_dir", "bidirectional"),
    ("use_local_attn", True), ("window_size", 8), ("attn_types", ["local", "global"]),
    ("scale_attn_by_inverse_layer_idx", True), ("attn_scores_soft_cap", 30.0),
    ("output_logits_soft_cap", 30.0), ("final_rms", True), ("use_qk_norm", True),
    ("n_key_value_heads", 1), ("default_prepend_bos", False), ("layer_norm_eps", 0.1),
    ("ln_eps", 0.1), ("eps", "1e-5"), ("eps", 0), ("eps", -1.0), ("attn_only", "false"),
    ("attn_only", "true"), ("post_embedding_ln", True),
    ("d_vocab_out", 71), ("clip_qkv", 6.0), ("use_attention_sinks", True),
    ("factored_embed", True), ("use_alibi", True), ("logit_scale", 2.0)]
DAMAGED_FOLDER = {
    **{f"another model: {k} {v}": (config(**{k: v}), [k]) for k, v in OTHER_MODELS},
    "folded LayerNorm": (config(normalization="LNPre"), ["LNPre", "fold_ln"]),
    **{f"weights of another model: {k}": (state(one_more(k)), ["model.safetensors", k]) for k in (
        "blocks.0.mlp.W_in", "embed.ln.w", "blocks.0.attn.rel_pos_bias.weight", "a.lora")},
    "no config": (remove("config.json"), ["config.json", "model folder holds"]),
    "config is no JSON": (write("config.json", b"{"), ["config.json"]),
    "config is not text": (write("config.json", b"\xff\xfe\x00"), ["config.json"]),
    "config is a list": (write("config.json", b"[1, 2]"), ["config.json"]),
    "config lacks a key": (config(d_head="removed"), ["config.json", "d_head"]),
    "config is a number": (write("config.json", b"5"), ["config.json"]),
    "config is nested too deep": (write("config.json", b"[" * 100_000), ["config.json"]),
    "config is a folder": (folder_for("config.json"), ["has no config.json"]),
    "config is a pipe": (pipe_for("config.json"), ["has no config.json"]),
    **{f"config has {k} {v!r}": (config(**{k: v}), ["config.json", k]) for k, v in SIZES_WRONG},
    "config has a context out of all proportion": (config(n_ctx=10**9), ["W_pos", "not fit"]),
    "config has a vocabulary out of all proportion": (config(d_vocab=10**9), ["W_E", "not fit"]),
    "config has more heads than fit anywhere": (config(n_heads=2**31 - 1), ["W_Q", "not fit"]),
    "config has line ends and colours": (
        config(normalization="\n\x1b[31m" * 99), ["LayerNorm", r"\n\x1b"]),
    "config of another model": (config(d_model=12), ["model.safetensors", "does not fit"]),
    "one layer": (config(n_layers=1), ["model.safetensors", "blocks.1."]),
    "MLPs": (config(attn_only=False), ["not attention-only", "mini"]),
    "shortformer positions": (config(shortformer_pos=True), ["shortformer", "mini"]),
    "rotary positions": (config(positional_embedding_type="rotary"), ["rotary", "mini"]),
    "RMSNorm": (config(normalization="RMS"), ["LayerNorm", "mini"]),
    "no weights": (remove("model.safetensors"), ["model.safetensors", "model_final.pth"]),
    "weights cut short": (cut("model.safetensors"), ["model.safetensors"]),
    "weights empty": (write("model.safetensors", b""), ["model.safetensors"]),
    "weights are a folder": (folder_for("model.safetensors"), ["has no model.safetensors"]),
    "weights are a pipe": (pipe_for("model.safetensors"), ["has no model.safetensors"]),
    "weights overflow": (state(one_overflows), ["model.safetensors", "W_pos", "float32"]),
    "NaN": (state(one_is_nan), ["unembed.W_U", "not finite"]),
    "key missing": (state(one_is_missing), ["model.safetensors", "blocks.1.attn.W_Q"]),
    "wrong shape": (state(one_has_another_shape), ["model.safetensors", "blocks.1.attn.W_Q"]),
    "more layers than config": (state(a_third_layer), ["model.safetensors", "blocks.2."]),
    "pth is empty": (empty_pth, ["model_final.pth", "state dict"]),
    "pth has whole numbers": (pth(whole_numbers), ["model_final.pth", "W_E", "type"]),
    "pth has complex numbers": (pth(complex_numbers), ["model_final.pth", "W_E", "type"]),
    "pth is a list": (pth(lambda folder: [1, 2]), ["model_final.pth", "state dict"]),
    "pth has no tensors": (pth(lambda folder: {"a": "b"}), ["model_final.pth", "state dict"]),
    "pth has code": (pth(Code), ["model_final.pth", "state dict"]),
    "pth is a bare pickle": (pickled_code, ["model_final.pth", "state dict"]),
    "no tokenizer": (remove("tokenizer*"), ["my-model", "tokenizer"]),
    "tokenizer is no JSON": (write("tokenizer.json", b"{"), ["my-model", "tokenizer"]),
    "tokenizer is a list": (write("tokenizer.json", b"[]"), ["my-model", "tokenizer"]),
    "tokenizer is noise": (write("tokenizer.json", bytes(range(256))), ["my-model", "tokenizer"]),
    "tokenizer is nested too deep": (
        write("tokenizer.json", b"[" * 100_000), ["my-model", "tokenizer"]),
    "tokenizer has code": (tokenizer_with_code, ["my-model", "custom code"]),
    "tokenizer without a start token": (start_token(None), ["my-model", "bos_token"]),
    "tokenizer with a gap in its ids": (vocabulary(e=10**6), ["my-model", "1,000,001"]),
    "tokenizer without words": (vocabulary(clear=True), ["tokenizer fails", "fetch"]),
    "tokenizer of a larger model": (
        lambda folder: tiny.tokenizer(99).save_pretrained(folder), ["my-model", "tokenizer"]),
}


@pytest.mark.parametrize("damage, words", DAMAGED_FOLDER.values(), ids=DAMAGED_FOLDER)
def test_a_damaged_model_folder(damage, words, folder, text, refused):
    """A model folder with files missing, cut short, mixed up, or not what their names say."""
    damage(folder)
    message = refused("--model", folder, "--text", text, "--tokens", 170)
    assert all(word in message for word in words), message
    assert not (folder / "executed").exists()


TRAINING = dict(  # what config.json of a published model says beside its sizes
    seed=98742, lr=1e-3, batch_size=64, batches_per_device=32, weight_decay=0.05, beta1=0.9,
    max_tokens=22 * 10**9, use_bfloat16_matmul=True, weight_init_scale=1.0, grad_norm_clip=1.0,
    train_loss_ema_beta=0.99, warmup_tokens=3 * 10**8, dataset_name="c4+code", version=40,
    neuron_scale=1, neuron_temp=1, final_rms=False, tokenizer_name="a/b", n_devices=8,
    d_vocab_out=SIZES["d_vocab"], checkpoint_every_tokens=10**8, use_pos_resid=True, ln_eps=1e-5)


def test_a_config_with_more_keys(folder):
    """Settings of the training, and all that TransformerLens writes, do no harm."""
    plain, _ = loading.load_model(str(folder))
    config(**TRAINING)(folder)
    assert same_parameters(loading.load_model(str(folder))[0], plain)
    written = tiny.model(tiny.state_dict(SIZES), SIZES, flags={}).cfg.to_dict()
    assert written["normalization_type"] == "LN" and len(written) > 80
    (folder / "config.json").write_text(json.dumps(written, default=str))
    assert same_parameters(loading.load_model(str(folder))[0], plain)


def test_weights_that_nothing_reads(folder):
    """Masks, and the LayerNorm before an MLP that is not there."""
    plain, _ = loading.load_model(str(folder))
    state(one_more("blocks.0.ln2.w"))(folder)
    state(one_more("blocks.0.attn.mask"))(folder)
    assert same_parameters(loading.load_model(str(folder))[0], plain)


@pytest.mark.parametrize("eps", [None, 0.5])
def test_the_eps_of_a_model_folder(eps, folder):
    if eps:
        config(eps=eps)(folder)
    model, _ = loading.load_model(str(folder))
    assert model.cfg.eps == model.blocks[1].ln1.cfg.eps == (eps or 1e-5)
    run = common.freeze(model, tiny.tokens(d_vocab=SIZES["d_vocab"]))
    expected = (common.cen(run.streams[2]).pow(2).mean(-1, keepdim=True) + (eps or 1e-5)).sqrt()
    torch.testing.assert_close(run.scales[2], expected)


DAMAGED_CACHE = {
    "config is no JSON": (write("config.json", b"{"), ["config.json"]),
    "config names no tokenizer": (config(tokenizer_name="removed"), ["tokenizer"]),
    "config gone": (remove("config.json"), ["config.json", "--model mini"]),
    "weights gone": (remove("model_final.pth"), [hub.MODEL, "--model mini"]),
    "weights cut short": (cut("model_final.pth"), ["model_final.pth"]),
    "NaN": (state(one_is_nan), ["unembed.W_U", "not finite"]),
    "key missing": (state(one_is_missing), ["model_final.pth", "blocks.1.attn.W_Q"]),
    "wrong shape": (state(one_has_another_shape), ["model_final.pth", "blocks.1.attn.W_Q"]),
    "code": (pth(Code), ["model_final.pth", "state dict"]),
}


@pytest.mark.parametrize("damage, words", DAMAGED_CACHE.values(), ids=DAMAGED_CACHE)
@both_routes
def test_a_damaged_cache(route, damage, words, warm, tmp_path, monkeypatch, refused):
    """A download that broke off, or a cache that something has tidied; network or not."""
    cache = shutil.copytree(warm, tmp_path / "cache")
    snapshot = hub.snapshot(cache, hub.MODEL)
    damage(snapshot)
    use_cache(monkeypatch, cache)
    ROUTES[route](monkeypatch)
    message = refused("--model", "attn-only-2l")
    assert all(word in message for word in words), message
    assert not (snapshot / "executed").exists()


@both_routes
def test_a_cache_without_the_tokenizer(route, warm, tmp_path, monkeypatch, refused):
    """The tokenizer has a repository of its own; the message must name that one."""
    cache = shutil.copytree(warm, tmp_path / "cache")
    shutil.rmtree(hub.snapshot(cache, hub.TOKENIZER))
    use_cache(monkeypatch, cache)
    ROUTES[route](monkeypatch)
    assert hub.TOKENIZER in refused("--model", "attn-only-2l")


def test_a_download_that_fails(warm, tmp_path, monkeypatch, refused):
    """The hub answered the first question and not the next."""
    cache = shutil.copytree(warm, tmp_path / "cache")
    remove("model_final.pth")(hub.snapshot(cache, hub.MODEL))
    use_cache(monkeypatch, cache)
    hub_answers(monkeypatch)
    message = refused("--model", "attn-only-2l")
    assert hub.MODEL in message and "download failed" in message


def test_a_network_that_swallows_everything(monkeypatch):
    """A firewall that drops packets must not hold the user up for minutes."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        use_cache(monkeypatch, pathlib.Path("nowhere"))
        hub_is_silent(monkeypatch, f"http://127.0.0.1:{silent.getsockname()[1]}")
        start = time.monotonic()
        loading.hub_problem.cache_clear()
        assert loading.hub_problem()
        loading.hub_problem.cache_clear()
        assert time.monotonic() - start < 6


# ================================================================ The environment, in subprocesses


def run_apart(cwd: pathlib.Path, *args, **environment) -> tuple[int, str, str]:
    """circuits_part5.py as a user runs it, with no other HF_ variable than those given."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_"))}
    env["OMP_NUM_THREADS"] = "1"  # see conftest.py
    done = subprocess.run([sys.executable, common.HERE / SCRIPT, *args], cwd=cwd, text=True,
                          encoding="utf-8", capture_output=True, env=env | environment)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def ten_seconds():
    """Or, where the machine is busy, five times what importing torch takes: 2 s on two cores."""
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return max(10.0, 5 * (time.monotonic() - start))


@pytest.mark.parametrize("network", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": CLOSED_PORT}])
def test_cold_cache_without_network(network, tmp_path, ten_seconds):
    """A first run without network says within 10 seconds what is missing where, and what to do."""
    start = time.monotonic()
    done = run_apart(tmp_path, "--out", "out", HF_HOME=str(tmp_path / "hf"), **network)
    assert time.monotonic() - start < ten_seconds
    message = error_of(*done)
    for words in hub.MODEL, str(tmp_path / "hf" / "hub"), f"python {SCRIPT} --model mini":
        assert words in message
    assert not list((tmp_path / "out").rglob("*"))


def test_warm_cache_without_network(warm, tmp_path):
    """The public model and WikiText from the cache, start to end, from any working directory."""
    code, stdout, stderr = run_apart(tmp_path, "--tokens", "240", "--out", "out", "--no-figures",
                                     HF_HOME=str(warm), HF_ENDPOINT=CLOSED_PORT)
    assert code == 0, stderr
    assert stderr.count("warning: the WikiText-2 test split here is not the one") == 1
    assert stderr.splitlines()[-1].startswith("wrote ")
    files = {file.name: file.read_text(encoding="utf-8") for file in (tmp_path / "out").iterdir()}
    assert files.keys() == {"part5.html", "part5.json", "part5_stdout.txt"}
    assert files["part5_stdout.txt"] == stdout
    meta = json.loads(files["part5.json"])["meta"]
    assert meta["model"] == "attn-only-2l" and meta["revision"] == hub.REVISION
    assert meta["n_tokens"] == 240 and meta["seq_len"] == 24
    assert meta["text_sha256"] == loading.sha256("\n\n".join(hub.ROWS))
    assert meta["rows_sha256"] == loading.sha256("".join(hub.ROWS))


# ================================================================================ Model folders


@pytest.mark.parametrize("kind", ["safetensors", "pth", "pth without b_U"])
@pytest.mark.parametrize("dtype", loading.DTYPES)
def test_a_model_folder(dtype, kind, folder):
    """float16 weights are processed in the dtype asked for, as TransformerLens does it."""
    weights = folder / "model.safetensors"
    state = safetensors.torch.load_file(weights)
    assert {v.dtype for v in state.values()} == {torch.float16}
    if kind != "safetensors":
        if kind == "pth without b_U":
            state["unembed.b_U"].zero_()
        stored = {k: v for k, v in state.items() if k != "unembed.b_U" or kind == "pth"}
        weights.unlink()
        weights = folder / "model_final.pth"
        torch.save(stored, weights)
    model, source = loading.load_model(str(folder), dtype=loading.DTYPES[dtype], n_layers=2)
    assert source == {"model": "my-model", "revision": None,
                      "weights_sha256": loading.sha256(weights)}
    assert same_parameters(model, tiny.model(state, SIZES, loading.DTYPES[dtype]))
    assert not any(p.requires_grad for p in model.parameters()) and not model.training


def test_any_number_of_layers(tmp_path):
    """Without n_layers nothing is asked of the depth."""
    sizes = SIZES | dict(n_layers=3)
    model, _ = loading.load_model(str(tiny.folder(tmp_path / "three", sizes)))
    assert model.cfg.n_layers == 3


def test_another_number_of_layers_than_the_script_is_for(folder):
    message = "my-model has 2 layer.*models of 1: use attn-only-1l"
    with pytest.raises(common.UserError, match=message):
        loading.load_model(str(folder), n_layers=1)


# ================================================================================= Command line


OPTIONS = {
    "--no-such-option": ["--no-such-option"],
    "--dtype bfloat16": ["--dtype", "float32", "float64"],
    "--tokens many": ["--tokens", "many"],
    "--tokens 170.0": ["--tokens", "170.0"],
    "--tokens 16": ["--tokens 16", "sequences of 17", "--seq-len"],
    "--tokens 0": ["--tokens"],
    "--tokens -170": ["--tokens"],
    "--tokens 99999999999999999999": ["--tokens"],
    "--seq-len 18": ["--seq-len", "17"],
    "--seq-len 2": ["--seq-len"],
    "--seq-len 0": ["--seq-len"],
    "--seq-len -5": ["--seq-len"],
    "--seed x": ["--seed"],
    "--seed 99999999999999999999": ["--seed"],
    "--device nonsense": ["nonsense", "--device cpu"],
    "--device cuda:99": ["cuda:99", "--device cpu"],
    "--device meta": ["meta", "--device cpu"],
    "--text no-such-file.txt": ["no-such-file.txt"],
    "--text .": ["--text"],
}


@pytest.mark.parametrize("option, words", OPTIONS.items(), ids=OPTIONS)
def test_an_option_that_makes_no_sense(option, words, folder, text, refused):
    """A slip of the hand, or a size that the model or the machine does not have."""
    message = refused("--model", folder, "--text", text, "--tokens", 170, *option.split())
    assert all(word in message for word in words), message


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_where_there_is_none(folder, text, refused):
    """--device cuda on a laptop."""
    message = refused("--model", folder, "--text", text, "--device", "cuda")
    assert "'cuda'" in message and "--device cpu" in message


@pytest.mark.parametrize("content, words", {
    b"": ["0 tokens"],
    b"abcde": ["5 tokens"],
    "h\u00e9".encode("latin-1") * 999: ["not UTF-8"],
    "h\u00e9".encode() * 999 + b"\xc3": ["not UTF-8"],
    b"ab <|BOS|> cd" * 999: ["start token"],
}.items(), ids=["empty", "a word", "Latin-1", "cut in a letter", "start token"])
def test_a_text_of_no_use(content, words, folder, tmp_path, refused):
    """A text that is empty, too short for one sequence, in another encoding or has the model's
    start token spelled out. Numbers of tokens are advised only where they help."""
    file = tmp_path / "other.txt"
    file.write_bytes(content)
    message = refused("--model", folder, "--text", file)
    assert all(word in message for word in [file.name, *words]), message
    assert ("--tokens" in message) == (content == b"abcde")


@pytest.mark.parametrize("kind", ["", "folder", "pipe", "/dev/zero"])
def test_a_text_that_is_no_file(kind, folder, tmp_path, refused):
    """A variable of the shell that is empty, a folder, and what has no end or is gone once read."""
    file = tmp_path / kind
    if kind == "folder":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    message = refused("--model", folder, "--text", file if kind else "")
    assert (f"--text {file} is not" if kind else "cannot read --text :") in message, message


def test_a_text_of_odd_characters(folder, tmp_path, part5):
    """NUL bytes, lonely carriage returns, a byte order mark: text like any other."""
    file = tmp_path / "odd.txt"
    file.write_bytes(b"\xef\xbb\xbfa\0b\r" * 99)
    code, _, stderr = part5("--model", folder, "--text", file, "--tokens", 34, "--no-figures")
    assert code == 0, stderr


def test_a_text_that_is_too_short(folder, tmp_path, part5, refused):
    """The message names the number that there is, and what it advises works."""
    file = tmp_path / "short.txt"
    file.write_text("abcde" * 20)
    command = "--model", folder, "--text", file, "--no-figures"
    message = refused(*command)
    advice = re.search(r"--tokens (\d+)", message)
    assert "100 tokens" in message and advice
    code, _, stderr = part5(*command, "--tokens", advice[1])
    assert code == 0, stderr
    n_rows = json.loads((tmp_path / "out" / "part5.json").read_text())["meta"]["n_tokens"] // 17
    assert n_rows == 100 // 16


@pytest.mark.parametrize("where", ["file", "file/below", "n" * 300])
def test_results_cannot_be_written(where, folder, text, tmp_path, part5):
    """--out is a file, lies below one, or has a name that the file system refuses."""
    (tmp_path / "file").write_text("mine")
    out = tmp_path / where
    message = error_of(*part5("--model", folder, "--text", text, "--out", out))
    assert str(out) in message and "--out" in message
    assert (tmp_path / "file").read_text() == "mine"


# ======================================================================================== Tokens


def reader(tokenizer: PreTrainedTokenizerFast, n_ctx: int = 64):
    """As much of a model as load_tokens looks at."""
    return types.SimpleNamespace(tokenizer=tokenizer,
                                 cfg=types.SimpleNamespace(n_ctx=n_ctx, device="cpu"))


@pytest.fixture(scope="module")
def trained():
    """A tokenizer with merges up to long words, as real ones have."""
    raw = tokenizers.Tokenizer(tokenizers.models.BPE())
    raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600, show_progress=False, special_tokens=[*tiny.SPECIAL.values()],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = ["antidisestablishmentarianism " * 50, "internationalisation " * 50, "a" * 64]
    raw.train_from_iterator([*words, PATTERN_TEXT * 50], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, **tiny.SPECIAL)


@pytest.mark.parametrize("bos_counted", [True, False])
@pytest.mark.parametrize("seq_len", [None, 10])
def test_rows_are_consecutive_stretches_of_the_text(seq_len, bos_counted, trained, text):
    """The text is tokenised once, as a whole, and each row begins with BOS, once."""
    model = reader(trained, n_ctx=33)
    longest = 33 if bos_counted else 32
    seq_len, n_tokens = seq_len or longest, 7 * (seq_len or longest)
    rows, meta = loading.load_tokens(model, "any", str(text), n_tokens, seq_len, bos_counted)
    assert rows.shape == (7, seq_len if bos_counted else seq_len + 1)
    assert (rows[:, 0] == 1).all() and not (rows[:, 1:] == 1).any()
    whole = trained(text.read_text(), add_special_tokens=False)["input_ids"]
    assert rows[:, 1:].flatten().tolist() == whole[: rows[:, 1:].numel()]
    assert meta == {"n_tokens": n_tokens, "seq_len": seq_len, "text": "text.txt",
                    "text_sha256": loading.sha256(text), "rows_sha256": None,
                    "token_ids_sha256": loading.sha256(" ".join(map(str, rows.flatten().tolist())))}


@pytest.mark.parametrize("bos_counted", [True, False])
def test_default_length_fits_the_context(bos_counted, trained, text):
    """256, or what the model can take where that is less: with BOS it fills the context."""
    for n_ctx, longest in (33, 33), (300, 256 if bos_counted else 257):
        rows, _ = loading.load_tokens(reader(trained, n_ctx), "any", str(text), 600,
                                     bos_counted=bos_counted)
        assert rows.shape[1] == longest


LONG_TEXTS = {
    "prose": PATTERN_TEXT * 5_000,
    "long words": ("antidisestablishmentarianism " * 3 + "internationalisation ") * 5_000,
    "one word": "a" * 300_000,
    "no spaces": "antidisestablishmentarianism" * 10_000,
    "blank": "\n" * 9_000 + " " * 9_000 + PATTERN_TEXT * 3_000,
    "wide characters": "日本語の文章" * 30_000,
}


@pytest.mark.parametrize("content", LONG_TEXTS.values(), ids=LONG_TEXTS)
@pytest.mark.parametrize("n_tokens", [64, 640])
def test_a_long_text_is_read_as_if_whole(n_tokens, content, trained, tmp_path, monkeypatch):
    """A novel of which a run takes the first pages: the ids are those of the whole, the hash too,
    though only a part is tokenised."""
    file = tmp_path / "long.txt"
    file.write_text(content, encoding="utf-8", newline="")
    lengths, encode = [], loading.encode
    monkeypatch.setattr(loading, "encode", lambda model, text: lengths.append(len(text))
                        or encode(model, text))
    rows, meta = loading.load_tokens(reader(trained), "any", str(file), n_tokens)
    whole = trained(content, add_special_tokens=False)["input_ids"]
    assert rows[:, 1:].flatten().tolist() == whole[: rows[:, 1:].numel()]
    assert max(lengths) < len(content)
    assert meta["text_sha256"] == loading.sha256(file)


def test_a_word_cut_by_the_end_of_what_is_read(trained, tmp_path):
    """About as many tokens as are needed lie before the place where reading stops first; the word
    that is cut there falls into pieces, which must not be taken for the text's."""
    content = ("antidisestablishmentarianism " + 3 * "internationalisation ") * 1_000
    whole = trained(content, add_special_tokens=False)["input_ids"]
    file = tmp_path / "long.txt"
    file.write_text(content)
    for n_rows in range(270, 320):
        rows, _ = loading.load_tokens(reader(trained), "any", str(file), 3 * n_rows, 3)
        assert rows[:, 1:].flatten().tolist() == whole[: 2 * n_rows]


def test_line_ends_are_kept(trained, tmp_path):
    """A text from Windows has the hash of its file, and its own ids."""
    file = tmp_path / "windows.txt"
    file.write_bytes(b"The cat\r\nsat on\r\n" * 100)
    rows, meta = loading.load_tokens(reader(trained), "any", str(file), 64)
    assert meta["text_sha256"] == loading.sha256(file)
    assert "\r\n" in trained.decode(rows[0])


def test_a_byte_order_mark_is_no_text(trained, text, tmp_path):
    marked = tmp_path / "marked.txt"
    marked.write_bytes(b"\xef\xbb\xbf" + text.read_bytes())
    (rows, meta), (wanted, _) = (loading.load_tokens(reader(trained), "any", str(file), 64)
                                 for file in (marked, text))
    assert torch.equal(rows, wanted) and meta["text_sha256"] == loading.sha256(marked)


def test_same_hashes_every_time(trained, text):
    """The hash of the text does not depend on how much of it is used; that of the ids does."""
    load = lambda n: loading.load_tokens(reader(trained), "any", str(text), n)[1]  # noqa: E731
    assert load(128) == load(128)
    assert load(128)["text_sha256"] == load(192)["text_sha256"]
    assert load(128)["token_ids_sha256"] != load(192)["token_ids_sha256"]


@pytest.mark.parametrize("name", ["attn-only-2l", "mini", "mini-2l", "some/folder"])
def test_text_of_the_user_is_taken_for_any_model(name, trained, text):
    """--text wins over WikiText and over the sample of the bundled models."""
    rows, meta = loading.load_tokens(reader(trained), name, str(text), 64)
    assert meta["text"] == text.name
    assert trained.decode(rows[0, 1:]).startswith(PATTERN_TEXT[:20])


def test_sample_for_the_bundled_models_only(trained, warm, monkeypatch):
    """A model folder of the user's, whatever its name, is read on WikiText."""
    use_cache(monkeypatch, warm)
    used = {name: loading.load_tokens(reader(trained), name, n_tokens=64)[1]["text"]
            for name in ("mini", "mini-1l", "mini-2l", "miniature", "attn-only-2l")}
    sample, wikitext = "sample.txt", "/".join(loading.WIKITEXT)
    assert list(used.values()) == [sample, sample, sample, wikitext, wikitext]


# ================================================================================= Token names


def names(tokenizer: PreTrainedTokenizerFast, d_vocab: int) -> list[str]:
    model = reader(tokenizer)
    model.cfg.d_vocab = d_vocab
    return [loading.token_text(model, i) for i in range(d_vocab)]


def check_names(found: list[str]) -> None:
    assert len(set(found)) == len(found) and all(found)
    assert not any("\ufffd" in name for name in found)


def test_names_of_bytes(trained):
    """Every byte of the alphabet is a token; those of text keep their text."""
    found = names(trained, len(trained) + 3)
    check_names(found)
    vocabulary = trained.get_vocab()
    for entry, name in {"\u00d7": "<0xD7>", "\u00e2": "<0xE2>", "\u0122": "<0x80>", "a": "a",
                        "\u0120": " ", "\u010a": "\n"}.items():
        assert found[vocabulary[entry]] == name
    assert found[len(trained):] == [f"<id {len(trained) + i}>" for i in range(3)]
    for i, name in enumerate(found[: len(trained)]):
        text = trained.decode([i])
        assert name == text or "\ufffd" in text
    assert "".join(found[i] for i in trained("\u05d0")["input_ids"]) == "<0xD7><0x90>"


def test_names_of_bytes_inside_longer_tokens():
    """A space or a letter before part of a character; the character U+FFFD; one text twice."""
    vocab = {"a": 0, "\u0120\u00e2\u0122": 1, "a\u00e2": 2, "\u00ef\u00bf\u00bd": 3,
             "\u00e2": 4, "<0xE2>": 5, "\u0120\u0120": 6, "<id 10>": 7}
    raw = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = tokenizers.decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=raw)
    made.add_tokens(["  "])
    found = names(made, 12)
    check_names(found)
    assert found[:4] == ["a", " <0xE2><0x80>", "a<0xE2>", "<0xEF><0xBF><0xBD>"]
    assert found[4].startswith("<0xE2>") and found[7].startswith("<id 10>")
    assert found[6] == "  <id 6>" and found[8] == "  " and found[11] == "<id 11>"


def test_names_of_sentencepiece():
    """Words keep their space, bytes are bytes, though decode() drops both."""
    pieces = ["<unk>", "<s>", "</s>", "<0x41>", "<0xE2>", "\u2581", "\u2581cat", "cat", "A",
              "\u2581\u2581", "\ufffd"]
    raw = tokenizers.Tokenizer(tokenizers.models.Unigram([(p, -1.0) for p in pieces], 0, True))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    raw.decoder = tokenizers.decoders.Sequence([
        tokenizers.decoders.ByteFallback(), tokenizers.decoders.Metaspace()])
    found = names(PreTrainedTokenizerFast(tokenizer_object=raw), len(pieces))
    check_names(found)
    assert found == ["<unk>", "<s>", "</s>", "<0x41>", "<0xE2>", " ", " cat", "cat", "A", "  ",
                     "<0xEF><0xBF><0xBD>"]


# ====================================================================================== WikiText


def test_another_wikitext_warns_and_goes_on(warm, monkeypatch, capsys):
    """The hub has changed the data set under its name."""
    use_cache(monkeypatch, warm)
    assert loading.wikitext()[0] == "\n\n".join(hub.ROWS)
    captured = capsys.readouterr()
    assert captured.err.startswith("warning: ") and captured.err.count("\n") == 1
    assert captured.out == ""


def test_the_known_wikitext_is_taken_silently(warm, monkeypatch, capsys):
    """Rows are joined as asked, blank ones kept or not."""
    use_cache(monkeypatch, warm)
    monkeypatch.setattr(loading, "WIKITEXT_ROWS", len(hub.ROWS))
    monkeypatch.setattr(loading, "WIKITEXT_SHA256", loading.sha256("".join(hub.ROWS)))
    assert loading.wikitext("|")[0] == "|".join(hub.ROWS)
    assert loading.wikitext("", keep_blank=False)[0] == "".join(r for r in hub.ROWS if r.strip())
    assert capsys.readouterr().err == ""


def test_no_wikitext(folder, tmp_path, monkeypatch, refused):
    """No network, and the data set was never fetched: it can be replaced by any text."""
    use_cache(monkeypatch, tmp_path / "empty")
    message = refused("--model", folder)
    for words in "Salesforce/wikitext", str(tmp_path / "empty" / "datasets"), "--text FILE":
        assert words in message


def test_a_hub_that_answers_is_not_called_silent(monkeypatch):
    """What else fails, a full disk or a broken download, is named."""
    def fails(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr(loading, "hub_problem", lambda: None)
    monkeypatch.setattr("datasets.load_dataset", fails)
    loading._wikitext_rows.cache_clear()
    with pytest.raises(common.UserError, match="no space left"):
        loading.wikitext()


# ======================================================================================= Results


def a_log(*lines: str) -> report.Log:
    log = report.Log()
    log.lines += lines
    return log


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


@pytest.fixture
def written(tmp_path):
    """A folder with the results of an earlier run, and what it holds."""
    report.write_results(tmp_path, "part5", {"meta": {}, "a": 1.5}, a_log("old"))
    return tmp_path, contents(tmp_path)


def test_results_are_the_same_bytes_every_time(written):
    """Neither a second run nor the order of the keys changes a byte."""
    out, before = written
    results = {"meta": {}, "b": [1, 0.1, None, True], "a": {"y": "\u00e9", "x": 1e-300}}
    paths = report.write_results(out, "part5", results, a_log("one", "", "two \u00b1"))
    first = contents(out)
    assert [p.name for p in paths] == list(first) == ["part5.json", "part5_stdout.txt"]
    assert first["part5_stdout.txt"].decode() == "one\n\ntwo \u00b1\n"
    assert json.loads(first["part5.json"]) == results and first != before
    other_order = {k: results[k] for k in ("b", "meta")} | {"a": {"x": 1e-300, "y": "\u00e9"}}
    report.write_results(out, "part5", other_order, a_log("one", "", "two \u00b1"))
    assert contents(out) == first


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place, key", [
    (lambda x: {"a": x}, "a"),
    (lambda x: {"a": {"b": [0.0, [1.0, x]]}}, "a.b.1.1"),
])
def test_numbers_that_are_not_finite_are_refused(place, key, bad):
    """NaN from unsound weights must not look like a result."""
    with pytest.raises(common.UserError, match=f"^{re.escape(key)} is not finite"):
        report.check_finite({"sections": place(bad)})


@pytest.mark.parametrize("size_json, size_log", [(100_000, 10), (10, 100_000)])
def test_the_disk_is_full(size_json, size_log, written):
    """Half a file is no file: what was there stays as it was."""
    resource = pytest.importorskip("resource")
    out, before = written
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(common.UserError, match="--out"):
            report.write_results(out, "part5", {"meta": {}, "a": "x" * size_json},
                                 a_log("y" * size_log))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert contents(out) == before


@pytest.mark.parametrize("first_run", [True, False])
def test_a_file_cannot_be_replaced(first_run, written, monkeypatch):
    """The old log is open in an editor that locks it: the JSON must not be of another run."""
    out, before = written
    if first_run:
        before = {}
        for file in out.iterdir():
            file.unlink()

    def fail(source, target):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(common.UserError, match="Permission denied"):
        report.write_results(out, "part5", {"meta": {}, "a": 2}, a_log("new"))
    assert contents(out) == before


# ===================================================== Other people's settings, names and caches


def test_a_default_device_of_a_notebook_does_not_leak(folder, text, tmp_path, part5):
    """torch.set_default_device was called before: --device alone counts."""
    torch.set_default_device("meta")
    try:
        code, _, stderr = part5("--model", folder, "--text", text, "--tokens", 170, "--no-figures")
    finally:
        torch.set_default_device(None)
    assert code == 0, stderr


def test_a_folder_with_the_name_of_a_bundled_model_is_another_model(tmp_path):
    folder = tiny.folder(tmp_path / "mini-2l", SIZES)
    assert loading.load_model(str(folder))[1]["model"] == "mini-2l (a folder)"
    assert loading.load_model("mini-2l")[1]["model"] == "mini-2l"
    assert loading.bundled(str(folder)) is None and loading.bundled("mini-2l")


def test_a_cache_without_its_refs_has_one_snapshot(warm, tmp_path, monkeypatch):
    cache = shutil.copytree(warm, tmp_path / "cache")
    for refs in (cache / "hub").glob("models--*/refs"):
        shutil.rmtree(refs)
    use_cache(monkeypatch, cache)
    assert loading.load_model("attn-only-2l")[1]["revision"] == hub.REVISION


@pytest.mark.parametrize("option", ["--model=--", "--out=--", "--text=--", "--dtype=--"])
def test_two_dashes_are_no_value(option, part5):
    code, stdout, stderr = part5(option)
    assert (code, stdout) == (2, "") and stderr.count("\n") == 1 and option in stderr
