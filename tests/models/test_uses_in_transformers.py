"""What users of transformers do with an exported model: evaluate, pad, adapt, pass caches and configure."""

from __future__ import annotations

import math
import sys
from dataclasses import asdict

import pytest
import torch
from torch import nn

from fw_fairseq import Mistake
from fw_fairseq.config import FastWeightConfig, FastWeightTransformerConfig

sys.modules.setdefault("torchaudio", None)  # fairseq's, of another torch than ours: transformers would trip over it
transformers = pytest.importorskip("transformers")
from transformers.utils.generic import find_labels  # noqa: E402

from fw_fairseq.huggingface import (  # noqa: E402
    Cache,
    FastWeightForCausalLM,
    FastWeightForTranslation,
    FastWeightHFConfig,
    FastWeightTranslationConfig,
    parts,
)
from fw_fairseq.huggingface.parts import CACHE, CUTS_CHUNKS, OPTIONS  # noqa: E402
from fw_fairseq.mixers import MIXERS  # noqa: E402

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("one_thread")]
SIZES = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
BANDS = {"input_bands": [[20, 32], [30, 16]], "output_bands": [[20, 32], [30, 16]]}
PAD = 1


def build(mixer: str = "fast_weight", given: dict | None = None, **options) -> FastWeightForCausalLM:
    torch.manual_seed(0)
    mixing = {name: value for name, value in asdict(FastWeightConfig(**given or {})).items() if not name.startswith("_")}
    config = {"mixers": [mixer] * 2, "mixer_options": mixing, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": PAD}
    return FastWeightForCausalLM(FastWeightHFConfig(**SIZES | config | options)).double().eval()


def padded(rows: list[torch.Tensor], left: bool) -> dict[str, torch.Tensor]:
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD, padding_side="left" if left else "right")
    return {"input_ids": tokens, "attention_mask": tokens.ne(PAD).long()}


def texts(*lengths: int) -> list[torch.Tensor]:
    return [torch.randint(4, 50, (length,)) for length in lengths]


@pytest.mark.parametrize("rule", ["gated_delta", "kda", "rwkv7"])
@torch.no_grad()
def test_torch_export_of_any_length(rule):
    """Lengths and batches that were not in the example, below and above that of a chunk, beside one token at a time."""
    model, options = {}, {"feature_map": "identity", "feature_norm": "l2", "short_conv": 4, "update_rule": rule}
    for backend in ("auto", "recurrent"):
        model[backend] = build(given=options | {"fast_weight_backend": backend}, positions="none")
    sizes = {"input_ids": {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens")}, "use_cache": None}
    example = {"input_ids": torch.randint(4, 50, (2, 12)), "use_cache": False}
    program = torch.export.export(model["auto"], (), example, dynamic_shapes=sizes, strict=False).module()
    for length in (1, 7, 33, 70):
        ids = torch.randint(4, 50, (3, length))
        found, expected = program(input_ids=ids, use_cache=False).logits, model["recurrent"](ids).logits
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_trainer_evaluates(tmp_path):
    """Trainer takes all arguments with "label" in their names for labels that every text must have."""
    pytest.importorskip("accelerate")
    model, tokens = build(positions="sinusoidal").float(), torch.randint(4, 50, (6, 9))
    assert find_labels(FastWeightForCausalLM) == find_labels(FastWeightForTranslation) == ["labels"]
    options = transformers.TrainingArguments(tmp_path, report_to=[], use_cpu=True, disable_tqdm=True, per_device_eval_batch_size=3)
    data = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = transformers.Trainer(model, options, eval_dataset=data, compute_metrics=lambda found: {"seen": len(found.label_ids)})
    measured = trainer.evaluate()
    logits = model.eval()(tokens).logits[:, :-1].log_softmax(-1)
    assert measured["eval_loss"] == pytest.approx(-logits.gather(-1, tokens[:, 1:, None]).mean().item(), rel=1e-4)
    assert measured["eval_seen"] == 6


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("mixer", ["fast_weight", "leap", "softmax"])
def test_padding_changes_no_generated_word_in_any_way_to_read_a_prompt(mixer, left):
    """Hidden states, training mode and a second turn read a prompt in other ways than the first turn does."""
    model, rows, more = build(mixer, positions="sinusoidal"), texts(3, 7), texts(4, 2)
    exactly = {"max_new_tokens": 5, "min_new_tokens": 5}
    alone = [model.generate(row[None], **exactly)[0, len(row) :].tolist() for row in rows]
    batch = padded(rows, left)

    def found(**options) -> list:
        return model.generate(**batch, **exactly, **options)[:, 7:].tolist()

    assert found() == alone
    assert (
        model.generate(**batch, **exactly, output_hidden_states=True, return_dict_in_generate=True).sequences[:, 7:].tolist()
        == alone
    )
    with torch.no_grad():
        first = model(**batch)
        second = padded(more, left)
        seen = torch.cat([batch["attention_mask"], second["attention_mask"]], 1)
        logits = model(second["input_ids"], attention_mask=seen, past_key_values=first.past_key_values).logits[:, -1]
        for row, following, score in zip(rows, more, logits):
            torch.testing.assert_close(score, model(torch.cat([row, following])[None]).logits[0, -1])


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("gradients", [True, False])
def test_the_loss_of_a_batch_is_that_of_its_texts(gradients, left):
    model, rows = build(positions="sinusoidal"), texts(4, 30, 9)
    batch = padded(rows, left)
    labels = batch["input_ids"].masked_fill(batch["input_ids"].eq(PAD), -100)
    with torch.set_grad_enabled(gradients):
        loss = model(**batch, labels=labels).loss
        alone = [model(row[None], labels=row[None]).loss * (len(row) - 1) for row in rows]
    torch.testing.assert_close(loss, sum(alone) / sum(len(row) - 1 for row in rows))


def test_an_adaptive_vocabulary_trains_under_autocast():
    model, tokens = build(**BANDS).float().train(), torch.randint(4, 50, (2, 9))
    plain = model(tokens, labels=tokens).loss
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens, labels=tokens).loss
    loss.backward()
    assert loss.item() == pytest.approx(plain.item(), rel=0.02) and model.embed_tokens.maps[1].weight.grad.isfinite().all()


@pytest.mark.parametrize("made", [transformers.DynamicCache, lambda: "cache"])
def test_another_models_cache_is_refused(made):
    """An empty one too, which is no better than none."""
    model, tokens = build(), torch.randint(4, 50, (1, 4))
    with pytest.raises(
        ValueError, match=r"^(cache|past_key_values) is a (DynamicCache|str); it must be what this model returned, or None$"
    ):
        model(tokens, past_key_values=made())
    assert isinstance(model(tokens, past_key_values=()).past_key_values, Cache)


@torch.no_grad()
def test_a_cache_is_taken_by_either_of_its_names():
    """That of transformers up to 5.23, and that since 5.24. It is returned by the one that transformers has."""
    words = torch.tensor([[4, 5, 6, 7]])
    translation = FastWeightForTranslation(FastWeightTranslationConfig()).double().eval()
    for model, name, source in ((build(), "input_ids", {}), (translation, "decoder_input_ids", {"input_ids": words})):
        expected = model(**source, **{name: words}).logits[:, 2:]
        going_on = source | {name: words[:, 2:]}
        for given in ("past_key_values", "cache"):
            cache = model(**source, **{name: words[:, :2]})[CACHE]
            torch.testing.assert_close(model(**going_on, **{given: cache}).logits, expected)
        with pytest.raises(Mistake, match=f"^{CACHE} is a DynamicCache; it must be what this model returned, or None$"):
            model(**going_on, cache=transformers.DynamicCache())


@pytest.mark.parametrize(
    "mixer, options",
    [*((mixer, {}) for mixer in ("fast_weight", "leap", "srupp", "softmax")), ("fast_weight", {"num_beams": 2})],
    ids=str,
)
def test_a_prompt_in_chunks_is_the_prompt(mixer, options, monkeypatch):
    """Alone, in a batch where chunks have nothing of some prompts, and in a second turn."""
    model, rows = build(mixer, positions="sinusoidal"), texts(3, 7, 1, 8)
    exactly, widths, embed = {"max_new_tokens": 4, "min_new_tokens": 4} | options, [], type(model).embed
    batch = padded(rows, left=True)
    expected = model.generate(**batch, **exactly)
    monkeypatch.setattr(type(model), "embed", lambda self, x, *rest: widths.append(x.shape[1]) or embed(self, x, *rest))
    for size, pieces in ((1, [1] * 8), (3, [3, 3, 2]), (9, [8])):
        widths.clear()
        assert model.generate(**batch, **exactly, prefill_chunk_size=size).equal(expected)
        assert widths == [*pieces, 1, 1, 1]
        assert model.generate(rows[1][None], **exactly, prefill_chunk_size=size)[0].equal(expected[1, 1:])
    if not options and CUTS_CHUNKS:
        first = model.generate(rows[1][None], **exactly, prefill_chunk_size=2, return_dict_in_generate=True)
        whole = torch.cat([first.sequences, rows[3][None]], 1)
        widths.clear()
        second = model.generate(whole, past_key_values=first.past_key_values, **exactly, prefill_chunk_size=5)
        assert second.equal(model.generate(whole, **exactly)) and widths[:2] == [5, 4]


def test_chunks_that_would_be_read_wrongly_are_refused(monkeypatch):
    model, batch = build(), padded(texts(3, 7), left=False)
    translating = FastWeightForTranslation(FastWeightTranslationConfig(eos_token_id=2, decoder_start_token_id=2))
    embedded = {"inputs_embeds": model.get_input_embeddings()(batch["input_ids"])}
    for each, given, said in (
        (model, batch, "prompts that are read in chunks must be padded on the left"),
        (model, embedded, "it is for prompts of input_ids, so leave it out with inputs_embeds"),
        (translating, {"input_ids": batch["input_ids"] % 8}, "a translation model reads its source at once, so leave it out"),
    ):
        with pytest.raises(Mistake, match=f"^prefill_chunk_size is 6; {said}$"):
            each.generate(**given, max_new_tokens=2, prefill_chunk_size=6)
    whole = model.generate(**batch, max_new_tokens=2)
    assert model.generate(**batch, max_new_tokens=2, prefill_chunk_size=7).equal(whole)
    monkeypatch.setattr(parts, "CUTS_CHUNKS", False)
    model.generate(whole, max_new_tokens=2, prefill_chunk_size=2)
    with pytest.raises(
        Mistake, match=r"^prefill_chunk_size is 2; transformers before 5\.21 reads again what a cache has read, so leave"
    ):
        model.generate(whole, past_key_values=model(whole[:, :3])[CACHE], max_new_tokens=2, prefill_chunk_size=2)


@pytest.mark.parametrize("shape", [(2, 1, 4, 4), (4,), (1, 4), (2, 3), (2, 9)])
def test_a_mask_of_another_shape_is_refused(shape):
    """A longer one is that of all tokens so far, where there are earlier ones."""
    said = r"attention_mask has the shape \(.*\); it must be \(batch, tokens\), here \(2, 4\), with 0 at padding$"
    words, mask = torch.randint(4, 8, (2, 4)), torch.ones(shape)
    model, translation = build(), FastWeightForTranslation(FastWeightTranslationConfig())
    with pytest.raises(ValueError, match=f"^{said}"):
        model(words, attention_mask=mask)
    for name in ("attention_mask", "decoder_attention_mask"):
        with pytest.raises(ValueError, match=f"^{name.removesuffix('attention_mask')}{said}"):
            translation(words, decoder_input_ids=words, **{name: mask})
    before = model.eval()(words, use_cache=True).past_key_values
    again = model(words, use_cache=True).past_key_values
    want = model(words, past_key_values=again).logits
    assert torch.equal(model(words, attention_mask=torch.ones(2, 8), past_key_values=before).logits, want)


@pytest.mark.parametrize("shape", [(3,), (2, 0), (2, 3, 1)])
def test_ids_and_embeddings_of_another_shape_are_refused(shape):
    words, ids, embeddings = torch.randint(4, 8, (2, 4)), torch.zeros(shape).long(), torch.zeros(*shape, 32).double()
    model, translation = build(), FastWeightForTranslation(FastWeightTranslationConfig()).eval()
    for call, name in (
        (lambda: model(ids), "input_ids"),
        (lambda: model(inputs_embeds=embeddings), "input_ids"),
        (lambda: translation(ids, decoder_input_ids=words), "input_ids"),
        (lambda: translation(words, decoder_input_ids=ids), "decoder_input_ids"),
    ):
        with pytest.raises(Mistake, match=rf"^{name} has the shape \(.*\); it must be \(batch, tokens\)$"):
            call()


def test_every_option_of_an_exported_folder_is_known():
    """And no name is allowed that no model has."""
    assert {*asdict(FastWeightConfig()), *asdict(FastWeightTransformerConfig())} == OPTIONS


def test_the_configuration_says_whether_a_cache_is_returned():
    assert build(use_cache=False)(torch.tensor([[4]])).past_key_values is None
    model = build()
    assert model(torch.tensor([[4]])).past_key_values is not None and model.train()(torch.tensor([[4]])).past_key_values is None
    model.eval().config.use_cache = False
    assert model(torch.tensor([[4]])).past_key_values is None and model(torch.tensor([[4]]), use_cache=True).past_key_values


def test_a_cache_takes_back_what_it_remembers():
    """Of a model of text; a translation model's takes nothing back."""
    cache = build()(torch.tensor([[4, 5]])).past_key_values
    with pytest.raises(
        ValueError, match=r"^this cache can take back 0 tokens, not 1; call its remember\(1\) before they are read$"
    ):
        cache.crop(1)
    cache.crop(0)
    cache.crop(2)
    assert not cache.is_croppable and cache.get_seq_length() == 2


class Adapted(nn.Module):
    """A linear map with an adapter of low rank beside it, which shows the weight of the map alone, as that of peft does."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base
        self.down, self.up = (nn.Linear(*sizes, bias=False).double() for sizes in ((base.in_features, 2), (2, base.out_features)))
        self.weight, self.bias, self.out_features = base.weight, base.bias, base.out_features

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))

    def merged(self) -> nn.Linear:
        linear = nn.Linear(self.base.in_features, self.base.out_features, bias=self.bias is not None).double()
        linear.weight.data = self.weight.data + self.up.weight.data @ self.down.weight.data
        if self.bias is not None:
            linear.bias.data = self.bias.data
        return linear


@pytest.mark.parametrize("name", ["in_proj", "out_proj"])
@pytest.mark.parametrize("mixer", ["fast_weight", "additive", "leap", "sru", "srupp", "local_attention", "transformer_xl", "abc"])
@torch.no_grad()
def test_an_adapter_around_a_projection_counts_in_every_way_to_read(mixer, name):
    """All tokens at once, and one by one."""
    model, tokens = build(mixer, positions="sinusoidal"), torch.randint(4, 50, (2, 9))
    if getattr(model.layers[0].self_attn, name, None) is None:
        pytest.skip(f"{mixer} has no {name}")
    found = []
    for step in (Adapted, Adapted.merged):
        for layer in model.layers:
            setattr(layer.self_attn, name, step(getattr(layer.self_attn, name)))
        cache, one_by_one = None, []
        for token in tokens.split(1, 1):
            output = model(token, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            one_by_one.append(output.logits)
        found += [model(tokens).logits, torch.cat(one_by_one, 1)]
    for logits in found[:-1]:
        torch.testing.assert_close(logits, found[-1])


@torch.no_grad()
def test_token_shift_refuses_an_adapter():
    model = build(given={"token_shift": True})
    model.layers[0].self_attn.in_proj = Adapted(model.layers[0].self_attn.in_proj)
    with pytest.raises(ValueError, match="in_proj was replaced, and token shift reads its weight; merge an adapter into it first"):
        model(torch.tensor([[4, 5]]))


@pytest.mark.parametrize("mixer", MIXERS)
def test_options_that_are_left_out_have_their_defaults(mixer):
    all_given, none_given = build(mixer), build(mixer, mixer_options={})
    tokens = torch.randint(4, 50, (2, 40))
    torch.testing.assert_close(none_given(tokens).logits, all_given(tokens).logits, rtol=0, atol=0)


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"positions": "rotary"}, "positions is 'rotary'; it must be one of: none, learned, sinusoidal"),
        ({"activation": "mish"}, "activation is 'mish'; it must be one of: relu, gelu, "),
        ({"mixers": ["sru", "foo"]}, "mixers is 'foo'; it must be one of: fast_weight, "),
        ({"mixers": ["sru"] * 3}, "the number of mixers is 3; it must be one of: 2"),
        ({"mixer_options": {"update_rule": "foo"}}, "update_rule is 'foo'; it must be one of: sum, "),
        ({"mixer_options": {"feature_dim": -3}}, "feature_dim is -3; it must be at least 0"),
        ({"mixer_options": {"attention_norm": "yes"}}, "attention_norm is 'yes'; it must be True or False"),
        ({"mixer_options": {"sru_highway_bias": math.nan}}, "sru_highway_bias is nan; it must be at least -100 and below 100"),
        ({"mixer_options": {"update_rules": "sum"}}, "mixer_options is 'update_rules'; it must be one of: .*, update_rule, "),
        ({"input_bands": [[20, 32], [20, 16]]}, "the words of bands is 40; it must be one of: 50"),
    ],
)
def test_a_configuration_of_no_model_is_refused(wrong, said):
    with pytest.raises(ValueError, match=f"^{said}"):
        build(**wrong)
    sides = [FastWeightHFConfig(**SIZES | {"mixers": [mixer] * 2}) for mixer in ("linear", "fast_weight")]
    with pytest.raises(ValueError, match=r"^mixers is .fast_weight.; it must be one of: linear, softmax$"):
        FastWeightForTranslation(FastWeightTranslationConfig(sides[1], sides[1]))
    made = FastWeightForTranslation(FastWeightTranslationConfig(*sides)), FastWeightForTranslation(FastWeightTranslationConfig())
    words = torch.tensor([[4, 2]])
    assert all(model(words, decoder_input_ids=words).logits.isfinite().all() for model in made)
