"""Caches that are forked, saved and taken back go on as if the text had been read so from the start."""

from __future__ import annotations

import sys
from dataclasses import asdict

import pytest
import torch

from fw_fairseq import Mistake
from fw_fairseq.config import FastWeightConfig

sys.modules.setdefault("torchaudio", None)  # fairseq's, of another torch than ours: transformers would trip over it
pytest.importorskip("transformers")
from fw_fairseq.huggingface import (  # noqa: E402
    Cache,
    FastWeightForCausalLM,
    FastWeightHFConfig,
    Prefixes,
    load_cache,
    save_cache,
)
from fw_fairseq.huggingface.parts import CACHE  # noqa: E402

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("one_thread")]

SIZES = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
PARTS = {"update_rule": "gated_delta", "short_conv": 3, "rotary": True}
MODELS = {
    "delta": {"mixer_options": {"update_rule": "delta"}, "positions": "sinusoidal"},
    "parts": {"mixer_options": PARTS},
    "gated": {"mixer_options": {"update_rule": "gated", "feature_norm": "none", "attention_norm": True}},
    "favor": {"mixer_options": {"update_rule": "sum", "feature_map": "favor", "feature_norm": "none", "attention_norm": True}},
    "hybrid": {"mixers": ["softmax", "fast_weight"], "positions": "learned", "max_position_embeddings": 90},
    "sru": {"mixers": ["sru", "srupp"]},
    "pools": {"mixers": ["leap", "additive"]},
    "windows": {"mixers": ["local_attention", "abc"]},
}
TEXT = torch.randint(4, 40, (1, 24), generator=torch.Generator().manual_seed(3))


def build(name: str, seed: int = 0) -> FastWeightForCausalLM:
    torch.manual_seed(seed)
    given = {key: value for key, value in asdict(FastWeightConfig()).items() if not key.startswith("_")}
    options = {"mixers": ["fast_weight"] * 2, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1} | MODELS[name]
    options["mixer_options"] = given | MODELS[name].get("mixer_options", {})
    return FastWeightForCausalLM(FastWeightHFConfig(**SIZES | options)).double().eval()


def read(model, ids, cache):
    """The logits after each of the tokens, which are read as they are given: at once, or one by one for a list."""
    parts = ids if isinstance(ids, list) else [ids]
    return torch.cat([model(part, **{CACHE: cache}).logits for part in parts], 1)


def one_by_one(ids):
    return [*ids.split(1, 1)]


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_forks(name):
    """Each goes on by itself, from a prompt and from within generation."""
    model = build(name)
    for start in (TEXT[:, :9], one_by_one(TEXT[:, :9])):
        cache = Cache()
        read(model, start, cache)
        other = cache.fork()
        for tokens in (TEXT[:, 9:14], TEXT[:, 14:20]):  # in the fork, then in the first, which the fork must not have changed
            for way in (tokens, one_by_one(tokens)):
                fresh = Cache()
                read(model, TEXT[:, :9], fresh)
                want = read(model, tokens, fresh)
                torch.testing.assert_close(read(model, way, other.fork()), want)
                torch.testing.assert_close(read(model, way, cache.fork()), want)
        torch.testing.assert_close(read(model, one_by_one(TEXT[:, 9:14]), cache), read(model, TEXT[:, 9:14], other))


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_files(name, tmp_path):
    """A saved text goes on, from a prompt and from within generation; nothing is left in the file but the state."""
    model = build(name)
    for number, start in enumerate((TEXT[:, :9], one_by_one(TEXT[:, :9]))):
        cache = Cache()
        read(model, start, cache)
        save_cache(cache, tmp_path / f"{number}.pt", model)
        loaded = load_cache(tmp_path / f"{number}.pt", model)
        assert loaded.get_seq_length() == 9 and loaded.tokens.equal(torch.tensor([9]))
        want = read(model, TEXT[:, 9:14], cache)
        torch.testing.assert_close(read(model, one_by_one(TEXT[:, 9:12]), loaded), want[:, :3])
        torch.testing.assert_close(read(model, TEXT[:, 12:14], loaded), want[:, 3:])


@torch.no_grad()
def test_files_of_others_are_refused(tmp_path):
    model, cache = build("delta"), Cache()
    read(model, TEXT, cache)
    save_cache(cache, tmp_path / "text.pt", model)
    with pytest.raises(Mistake, match=r"text\.pt has the state of another model"):
        load_cache(tmp_path / "text.pt", build("delta", seed=1))
    (tmp_path / "broken.pt").write_bytes((tmp_path / "text.pt").read_bytes()[:300])
    with pytest.raises(Mistake, match=r"broken\.pt cannot be read as the state of a text"):
        load_cache(tmp_path / "broken.pt", model)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_taken_back(name, tmp_path):
    """Any number of those that are remembered, after passes of one token and of several, and again after that."""
    model = build(name)
    whole = read(model, TEXT, Cache())
    for back in (1, 3, 4, 7, 12):
        cache = Cache()
        cache.remember(12)
        read(model, TEXT[:, :6], cache)
        read(model, one_by_one(TEXT[:, 6:10]), cache)
        read(model, TEXT[:, 10:13], cache)
        read(model, one_by_one(TEXT[:, 13:18]), cache)
        cache.crop(-back if back % 2 else 18 - back)
        assert cache.get_seq_length() == 18 - back and int(cache.tokens) == 18 - back
        other = cache.fork()
        save_cache(cache.fork(), tmp_path / "text.pt", model)
        for each in (cache, other, load_cache(tmp_path / "text.pt", model)):
            torch.testing.assert_close(read(model, TEXT[:, 18 - back : 22], each), whole[:, 18 - back : 22])
        for taken in (3, 2):
            cache.crop(-taken)
        torch.testing.assert_close(read(model, one_by_one(TEXT[:, 17:24]), cache), whole[:, 17:24])


@torch.no_grad()
def test_what_is_remembered_is_bounded():
    """A cache keeps the states of few places and the embeddings of few tokens, and never less than it was asked for."""
    model, cache = build("delta"), Cache()
    cache.remember(5)
    for t in range(24):
        read(model, TEXT[:, t : t + 1], cache)
        assert len(cache.marks) <= 3 and sum(x.shape[1] for x in cache.embedded) <= 11
        assert cache.length - cache.marks[0].length >= min(5, t + 1)
    with pytest.raises(Mistake, match=r"can take back \d+ tokens, not 20; call its remember\(20\) before they are read"):
        cache.crop(-20)
    padding = torch.ones(1, 25, dtype=torch.long)
    padding[0, -1] = 0
    model(TEXT[:, :1], attention_mask=padding, **{CACHE: cache})
    with pytest.raises(Mistake, match="can take back 0 tokens, not 1"):
        cache.crop(-1)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_speculative_generation_is_greedy_generation(name):
    """With drafts of another model, of the model itself, and of what the text said before; some are right, and some are wrong."""
    model, given = build(name), {"max_new_tokens": 30, "min_new_tokens": 30, "do_sample": False}
    prompt = torch.cat([TEXT[:, :8]] * 2, 1)
    greedy = model.generate(prompt, **given)
    assert model.generate(prompt, prompt_lookup_num_tokens=3, **given).equal(greedy)
    passes: list[int] = []
    model.register_forward_pre_hook(lambda module, args, kwargs: passes.append(1), with_kwargs=True)
    for assistant in (build(name, seed=1), build(name)):
        passes.clear()
        assistant.generation_config.update(num_assistant_tokens=4, assistant_confidence_threshold=0.0)
        assert model.generate(prompt, assistant_model=assistant, **given).equal(greedy)
    assert len(passes) <= 8, "all drafts of the same model are right"


@torch.no_grad()
def test_prefixes(tmp_path):
    """The longest beginning that a folder has is read no more; one by another model is no beginning."""
    model, prefixes = build("hybrid"), Prefixes(tmp_path / "texts", build("hybrid"))
    assert prefixes.find(TEXT).get_seq_length() == 0
    prefixes.keep(TEXT[:, :8])
    prefixes.keep(TEXT[:, :15])
    assert [prefixes.find(TEXT[:, :count]).get_seq_length() for count in (8, 9, 15, 16, 24)] == [0, 8, 8, 15, 15]
    assert prefixes.find(TEXT.flip(1)).get_seq_length() == 0
    assert Prefixes(tmp_path / "texts", build("hybrid", seed=1)).find(TEXT).get_seq_length() == 0
    read_tokens: list[int] = []
    model.register_forward_pre_hook(lambda module, args, kwargs: read_tokens.append(kwargs["input_ids"].shape[1]), with_kwargs=True)
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    want = model.generate(TEXT, **options)
    assert read_tokens[0] == 24
    read_tokens.clear()
    assert model.generate(TEXT, **{CACHE: prefixes.find(TEXT)}, **options).equal(want) and read_tokens[0] == 9


@torch.no_grad()
@pytest.mark.parametrize("name", ["delta", "parts", "gated", "hybrid", "sru"])
def test_memories_in_int8(name, tmp_path):
    """They go on, forked, saved and in another order, as those that were read, but for the rounding; files are smaller."""
    model, cache = build(name), Cache()
    read(model, TEXT[:, :12], cache)
    save_cache(cache, tmp_path / "whole.pt", model)
    want = read(model, TEXT[:, 12:], cache.fork())
    errors = {}
    for feedback in (True, False):
        small = cache.fork()
        small.shrink(feedback)
        save_cache(small, tmp_path / "small.pt", model)
        loaded = load_cache(tmp_path / "small.pt", model)
        reordered = small.fork()
        reordered.reorder_cache(torch.tensor([0, 0]))
        again = read(model, TEXT[:, 12:].expand(2, -1), reordered)
        for one in (again[:1], again[1:], read(model, TEXT[:, 12:], loaded), read(model, one_by_one(TEXT[:, 12:]), small)):
            torch.testing.assert_close(one, want, rtol=0, atol=2e-4 if feedback else 0.03)
        errors[feedback] = (again[:1] - want).abs().max()
    has_memory = name in ("parts", "gated")  # the others' is a matrix of few tokens, or none
    assert errors[True] < errors[False] if has_memory else True
    assert (tmp_path / "small.pt").stat().st_size < (tmp_path / "whole.pt").stat().st_size or not has_memory
