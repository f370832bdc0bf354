"""A tiny Hugging Face cache in the layout of the public models, built by the tests."""

import json
import pathlib
import shutil

import datasets
import tokenizers
import torch
from transformers import PreTrainedTokenizerFast

import tiny

# The vocabulary is as large as the ids of "Hello, world!" in the public models' tokenizer ask.
SIZES = tiny.SIZES | dict(d_vocab=11766, n_ctx=24)
MODEL = "NeelNanda/Attn_Only_2L512W_C4_Code"
ONE_LAYER = "NeelNanda/Attn_Only_1L512W_C4_Code"
WITH_MLP = "NeelNanda/SoLU_2L512W_C4_Code"
SHORTFORMER = "NeelNanda/Attn-Only-2L512W-Shortformer-6B-big-lr"
TOKENIZER = "NeelNanda/gpt-neox-tokenizer-digits"
REVISION = "0123456789" * 4
NOT_THERE = ("config.json", "added_tokens.json", "chat_template.jinja", "chat_template.json",
             "tokenizer.model")  # what transformers asks of a tokenizer's repository as well
ROWS = ["", " = Heading = \n", " \n", " The cat sat on the mat . \n", " The dog did not . \n"] * 40


def snapshot(cache: pathlib.Path, repo: str) -> pathlib.Path:
    """Where the files of a cached repository lie."""
    return cache / "hub" / f"models--{repo.replace('/', '--')}" / "snapshots" / REVISION


def add_repo(cache: pathlib.Path, repo: str) -> pathlib.Path:
    """An empty repository in the cache; returns the folder for its files."""
    folder = snapshot(cache, repo)
    folder.mkdir(parents=True)
    (folder.parents[1] / "refs").mkdir()
    (folder.parents[1] / "refs" / "main").write_text(REVISION)
    return folder


def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE that gives "Hello, world!" the ids it has in the public models."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    ids = {t: i for i, t in enumerate([*tiny.SPECIAL.values(), *alphabet])}
    merges = []
    for word, id_ in ("Hello", 11765), ("Ġworld", 1499):
        merges += [(word[:i], word[i]) for i in range(1, len(word))]
        ids |= {word[:i]: len(ids) + i for i in range(2, len(word))} | {word: id_}
    unused = set(range(SIZES["d_vocab"])) - set(ids.values())
    ids |= {f"[{i}]": i for i in unused}
    raw = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=ids, merges=merges))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = tokenizers.decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw, **tiny.SPECIAL)


def add_wikitext(cache: pathlib.Path, rows: list[str]) -> None:
    """The test split of WikiText-2 as `datasets` caches it, with rows of our own."""
    folder = cache / "datasets" / "Salesforce___wikitext" / "wikitext-2-raw-v1" / "0.0.0" / REVISION
    saved = folder / "saved"
    datasets.Dataset.from_dict({"text": rows}).save_to_disk(str(saved))
    arrow = folder / "wikitext-test.arrow"
    shutil.move(next(saved.glob("*.arrow")), arrow)
    shutil.rmtree(saved)
    size = arrow.stat().st_size
    split = {"name": "test", "num_bytes": size, "num_examples": len(rows),
             "dataset_name": "wikitext"}
    (folder / "dataset_info.json").write_text(json.dumps({
        "builder_name": "wikitext", "dataset_name": "wikitext", "config_name": "wikitext-2-raw-v1",
        "version": {"version_str": "0.0.0", "major": 0, "minor": 0, "patch": 0},
        "features": {"text": {"dtype": "string", "_type": "Value"}}, "splits": {"test": split},
        "download_size": size, "dataset_size": size, "size_in_bytes": 2 * size}))


def build(cache: pathlib.Path) -> pathlib.Path:
    """attn-only-1l and -2l whole; of the models that every script refuses, the config.json."""
    refused = {WITH_MLP: dict(attn_only=False), SHORTFORMER: dict(shortformer_pos=True)}
    for repo, change in {MODEL: {}, ONE_LAYER: dict(n_layers=1), **refused}.items():
        config = tiny.config_json(SIZES, tokenizer_name=TOKENIZER) | change
        (add_repo(cache, repo) / "config.json").write_text(json.dumps(config))
    for repo, n_layers in (ONE_LAYER, 1), (MODEL, 2):
        state = {k: v.float() for k, v in tiny.state_dict(SIZES | dict(n_layers=n_layers)).items()}
        for layer in range(n_layers):  # the public files hold these two as well
            n = SIZES["n_ctx"]
            state[f"blocks.{layer}.attn.mask"] = torch.ones(n, n).tril().bool()
            state[f"blocks.{layer}.attn.IGNORE"] = torch.tensor(-torch.inf)
        torch.save(state, snapshot(cache, repo) / "model_final.pth")
    words = add_repo(cache, TOKENIZER)
    tokenizer().save_pretrained(words)
    for name in NOT_THERE:  # an answer of the hub that the cache remembers
        known = words.parents[1] / ".no_exist" / REVISION / name
        known.parent.mkdir(parents=True, exist_ok=True)
        known.touch()
    add_wikitext(cache, ROWS)
    return cache
