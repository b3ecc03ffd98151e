"""fw-export-hf, and what transformers makes of its folder."""

from __future__ import annotations

import ast
import json
import math
import os
import shutil
import sys
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from fairseq.tasks import setup_task
from omegaconf import OmegaConf
from support.checkpoints import ADAPTIVE, logits, save, source
from support.commands import ROOT, USER_DIR, fairseq, run, succeed

from fw_fairseq import Mistake
from fw_fairseq.config import FastWeightConfig
from fw_fairseq.mixers import MIXERS
from fw_fairseq.tools import standalone
from fw_fairseq.tools.checkpoints import load_language_model
from fw_fairseq.tools.convert.conversion import convert
from fw_fairseq.tools.export_hf import export as exporting
from fw_fairseq.tools.export_hf.__main__ import main as export_command
from fw_fairseq.tools.export_hf.export import export
from fw_fairseq.tools.export_hf.language_models import difference
from fw_fairseq.tools.export_hf.tokenizers import word_tokenizer
from fw_fairseq.tools.standalone import code, quoted

sys.modules.setdefault("torchaudio", None)  # fairseq's, of another torch than ours: transformers would trip over it
transformers = pytest.importorskip("transformers")
from fw_fairseq.huggingface import (  # noqa: E402
    Cache,
    FastWeightForCausalLM,
    FastWeightForTranslation,
    FastWeightHFConfig,
    FastWeightTranslationConfig,
)
from fw_fairseq.huggingface.layers import BandedEmbedding  # noqa: E402
from fw_fairseq.huggingface.parts import padding_of  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread", "checked_here")

ADAPTIVE_INPUT = "--adaptive-input --adaptive-input-cutoff 20,40 --adaptive-input-factor 2"
OPTIONS = {
    "plain": "",
    "adaptive": ADAPTIVE,
    "adaptive-untied": ADAPTIVE.replace("--tie-adaptive-weights", "--decoder-normalize-before"),
    "adaptive-tied-maps": f"{ADAPTIVE} --tie-adaptive-proj --decoder-input-dim 24 --decoder-output-dim 24",
    "adaptive-input": ADAPTIVE_INPUT,
    "adaptive-input-widths": f"{ADAPTIVE_INPUT} --decoder-input-dim 24 --decoder-output-dim 16 --quant-noise-pq 0.1"
    " --quant-noise-pq-block-size 2",
    "learned-positions": "--share-decoder-input-output-embed --decoder-learned-pos --activation-fn gelu --no-scale-embedding",
    "other-widths": "--decoder-input-dim 16 --decoder-output-dim 24 --layernorm-embedding",
    "published-parts": "--no-token-positional-embeddings --update-rule gated_delta --feature-map identity --feature-norm l2_eps"
    " --exponential-decay --expand-values 2 --output-norm --output-norm-of centred_head --output-gate --output-gate-form of_sigmoid"
    " --output-gate-rank 3 --short-conv 4 --short-conv-bias --read-own-value",
    "decay": "--no-token-positional-embeddings --update-rule decay --feature-map identity --feature-norm none",
    "favor": "--feature-map favor --feature-norm none --update-rule gated --attention-norm",
    "relu": "--feature-map relu --feature-dim 6",
    "hybrid": "--mixer-pattern softmax,fast_weight --update-rule gated_delta --feature-map dpfp",
    "no-biases": "--mixer-pattern softmax,transformer_xl --bias-free",
    "retnet": "--update-rule retnet --feature-map identity --feature-norm none --output-norm --rotary",
    "rwkv7": "--update-rule rwkv7 --feature-map identity --feature-norm none --token-shift --value-mixing-rank 2",
    "channel-mixing": "--arch rwkv7_lm --decoder-layers 2 --decoder-embed-dim 32 --decoder-input-dim 32 --decoder-output-dim 32"
    " --decoder-ffn-embed-dim 24 --decoder-attention-heads 2 --output-gate-rank 4 --value-mixing-rank 4",
    "channel-mixing-6": "--ffn-form rwkv6 --update-rule gla --feature-map identity --feature-norm none",
    "kda": "--update-rule kda --feature-map identity --feature-norm l2 --short-conv 4 --output-gate --key-heads 2"
    " --token-shift --token-shift-rank 2",
    "swiglu": "--norm-form rms --norm-eps 0.01 --ffn-form swiglu --decoder-normalize-before --layernorm-embedding",
    "norms": "--norm-eps 0.1",
    "no-feed-forward": "--decoder-ffn-embed-dim 0 --scale-output --decoder-normalize-before --no-decoder-final-norm",
    "published": "--mixer additive --pooling-form published --window-sizes 3 --decoder-learned-pos --decoder-normalize-before",
} | {name: f"--mixer {name} --decoder-normalize-before" for name in MIXERS if name != "fast_weight"}


def exported(options: str, data, folder):
    """fairseq's model, and the one that transformers loads."""
    model, _, state = source(f"--arch fast_weight_lm {options}", data)
    export(save(state, folder), folder / "out", data=data)
    return model, load(folder / "out")


def test_a_checkpoint_and_a_folder_of_before_scale_reads_after_the_norm(dictionary, tmp_path):
    """Their options lack the switch, and the older order is kept when they are saved again."""
    order = "--output-norm --scale-reads --scale-after-norm"
    model, _, state = source(f"--arch fast_weight_lm {OPTIONS['kda']} {order}", dictionary)
    state["cfg"]["model"].pop("scale_after_norm")
    export(save(state, tmp_path), tmp_path / "out", data=dictionary)
    config, tokens = json.loads((tmp_path / "out" / "config.json").read_text()), torch.randint(4, 64, (2, 9))
    assert config["mixer_options"].pop("scale_after_norm") is True
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    older = load(tmp_path / "out")
    older.save_pretrained(tmp_path / "again")
    for exported_model in (older, FastWeightForCausalLM.from_pretrained(tmp_path / "again").eval()):
        torch.testing.assert_close(exported_model(tokens).logits, logits(model, tokens), rtol=1e-4, atol=1e-5)
    new = FastWeightHFConfig(mixer_options={"scale_reads": True, "output_norm": True})
    assert "scale_after_norm" not in new.mixer_options


def load(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()


@pytest.mark.cases_in_ci(3)
@pytest.mark.parametrize("name", OPTIONS)
@torch.no_grad()
def test_logits_are_fairseqs(name, dictionary, tmp_path):
    """In one pass, in two, one by one, and of a padded batch."""
    fairseqs, model = exported(OPTIONS[name], dictionary, tmp_path)
    if name == "fwm_lstm":  # its norms of what is read magnify rounding
        fairseqs, model = fairseqs.double(), model.double()
    tokens = torch.randint(4, 64, (2, 9))
    expected = logits(fairseqs, tokens)
    torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-4, atol=1e-5)
    first = model(tokens[:, :5], use_cache=True)
    second = model(tokens[:, 5:], past_key_values=first.past_key_values)
    torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), expected, rtol=1e-4, atol=1e-5)
    cache = model(tokens[:, :5]).past_key_values
    steps = [model(token, past_key_values=cache).logits for token in tokens[:, 5:].split(1, 1)]
    torch.testing.assert_close(torch.cat(steps, 1), expected[:, 5:], rtol=1e-4, atol=1e-5)
    padded = torch.cat([torch.full((2, 3), 1), tokens], 1)
    mask = padded.ne(1).long()
    torch.testing.assert_close(model(padded, attention_mask=mask).logits[:, 3:], expected, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def folder(dictionary, tmp_path_factory):
    path = tmp_path_factory.mktemp("exported")
    exported(OPTIONS["hybrid"], dictionary, path)
    return path / "out"


@pytest.mark.parametrize("options", [{"do_sample": False}, {"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 2}])
def test_generation_with_the_state_is_generation_without(options, folder):
    """And one by one as in a batch."""
    model, tokenizer = load(folder), transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    texts = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w9 unheard"]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    assert batch["input_ids"][0].tolist() == [1, 1, 1, 2, 5, 6, 7] and batch["input_ids"][2, -1] == 3
    options = options | {"max_new_tokens": 12, "min_new_tokens": 12}
    together = model.generate(**batch, **options)
    torch.testing.assert_close(model.generate(**batch, **options, use_cache=False), together)
    rows = together.split(options.get("num_return_sequences", 1))
    for text, row in zip(texts, rows):
        alone = model.generate(**tokenizer(text, return_tensors="pt"), **options)
        assert tokenizer.batch_decode(alone, skip_special_tokens=True) == tokenizer.batch_decode(row, skip_special_tokens=True)


def test_samples_with_the_state_are_samples_without(folder):
    """Of the most likely words, the same draws; a batch of unequal lengths."""
    model, tokenizer = load(folder), transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    batch = tokenizer(["w1 w2 w3", "w4"], return_tensors="pt", padding=True)
    options = dict(do_sample=True, top_k=8, num_return_sequences=3, max_new_tokens=12, min_new_tokens=12)
    drawn = [torch.manual_seed(0) and model.generate(**batch, **options, use_cache=cached) for cached in (True, False)]
    assert drawn[0].equal(drawn[1]) and len(drawn[0].unique(dim=0)) > 2


def test_a_token_at_a_time_reads_one_token(folder, monkeypatch):
    model = load(folder)
    widths = []
    embed = type(model).embed
    monkeypatch.setattr(type(model), "embed", lambda self, ids, *rest: widths.append(ids.shape[1]) or embed(self, ids, *rest))
    model.generate(torch.tensor([[2, 5, 6, 7]]), max_new_tokens=5, min_new_tokens=5)
    assert widths == [4, 1, 1, 1, 1]


def test_it_trains_and_is_saved_again(folder, tmp_path):
    model = load(folder).train()
    tokens = torch.randint(4, 64, (4, 12))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(10):
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        assert load(tmp_path)(tokens).logits.equal(model.eval()(tokens).logits)


@pytest.mark.long
def test_a_model_with_adaptive_inputs_alone_is_trained_and_saved_again(dictionary, tmp_path):
    """Its output has scores of its own for all words, and the vocabulary keeps its size."""
    _, model = exported(OPTIONS["adaptive-input"], dictionary, tmp_path)
    assert isinstance(model.embed_tokens, BandedEmbedding) and model.output.weight.shape == (64, 32)
    tokens, before = torch.arange(4, 64)[None, ::4], [x.clone() for x in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()(tokens, labels=tokens).loss.backward()
    optimizer.step()
    words = [*model.embed_tokens.parameters(), *model.output.parameters()]
    assert all(x.grad.abs().sum() > 0 for x in words) and any(not x.equal(y) for x, y in zip(model.parameters(), before))
    with pytest.raises(ValueError, match="new_num_tokens is 70; an adaptive vocabulary keeps its size, 64"):
        model.resize_token_embeddings(70)
    model.eval().save_pretrained(tmp_path / "again")
    options = dict(max_new_tokens=6, min_new_tokens=6, num_beams=2)
    found = [each.generate(tokens, **options) for each in (model, load(tmp_path / "again"))]
    assert found[0].equal(found[1]) and found[0].shape == (1, tokens.shape[1] + 6)


def small(**options):
    return FastWeightForCausalLM(FastWeightHFConfig(mixer_options=asdict(FastWeightConfig()), vocab_size=16, **options))


def test_trainer_is_to_divide_the_loss_by_accumulated_steps():
    """It looks at the signature of ``forward`` otherwise, and takes ``**unused`` for the number of items in the batch."""
    assert FastWeightForCausalLM.accepts_loss_kwargs is False


@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_another_number_of_words(tied):
    model, tokens = small(tie_word_embeddings=tied).eval(), torch.arange(16)[None]
    before = model(tokens).logits
    model.resize_token_embeddings(20)
    after = model(torch.cat([tokens, tokens + 4], 1)).logits
    assert after.shape == (1, 32, 20) and model.config.vocab_size == 20
    torch.testing.assert_close(after[:, :16, :16], before)


def test_new_words_are_drawn_as_those_of_a_new_model():
    model = small(hidden_size=64, num_attention_heads=2)
    model.resize_token_embeddings(2500, mean_resizing=False)
    assert model.embed_tokens.weight[16:].std().item() == pytest.approx(64**-0.5, rel=0.02)


def test_a_new_model_is_drawn_as_fairseqs():
    """Embeddings and output have the standard deviation width**-0.5; layers draw their own weights, evenly from -width**-0.5 on."""
    model = small(hidden_size=64, positions="learned", max_position_embeddings=20, tie_word_embeddings=False)
    for weight in (model.embed_tokens.weight, model.embed_positions.weight, model.output.weight):
        assert weight.std().item() == pytest.approx(1 / 8, rel=0.1) and weight.abs().max() > 2 / 8
    inner = model.layers[0].fc1.weight
    assert inner.std().item() == pytest.approx(1 / 8 / 3**0.5, rel=0.1) and inner.abs().max() <= 1 / 8


def test_what_transformers_asks_for_in_vain():
    for side in ("input_bands", "output_bands"):
        model = small(**{side: [[10, 8], [6, 4]]}, tie_word_embeddings=False)
        with pytest.raises(ValueError, match="new_num_tokens is 20; an adaptive vocabulary keeps its size, 16"):
            model.resize_token_embeddings(20)
    with pytest.raises(ValueError, match="batch"):
        small()(torch.ones(1, 4).long(), labels=torch.ones(1, 4).long(), logits_to_keep=1)


@torch.no_grad()
def test_arguments_that_are_not_known_or_cannot_be_obeyed_are_refused():
    model, tokens = small().eval(), torch.arange(8)[None]
    for given, said in (
        ({"output_attentions": True}, "forward takes no output_attentions; leave it out"),
        ({"head_mask": torch.ones(1)}, "forward takes no head_mask; leave it out"),
        ({"inputs_embeds": torch.zeros(1, 8, 8)}, "forward takes either input_ids or inputs_embeds"),
        ({"labels": tokens, "shift_labels": tokens}, "labels and shift_labels are both given"),
    ):
        with pytest.raises(ValueError, match=said):
            model(tokens, **given)
    as_tuple = model(tokens, return_dict=False)
    assert isinstance(as_tuple, tuple) and as_tuple[0].equal(model(tokens).logits)


@torch.no_grad()
def test_what_it_computes_on_its_way_and_from_what(folder):
    """Hidden states are the inputs of the layers and of the output; embeddings may be given; labels may be shifted already."""
    model, tokens = load(folder), torch.randint(4, 64, (2, 9))
    output = model(tokens, output_hidden_states=True, labels=tokens)
    assert len(output.hidden_states) == model.config.num_hidden_layers + 1
    assert model.scores(output.hidden_states[-1]).equal(output.logits)
    first, _ = model.layers[0](output.hidden_states[0].transpose(0, 1), None, None)
    assert first.transpose(0, 1).equal(output.hidden_states[1])
    assert model(inputs_embeds=model.get_input_embeddings()(tokens)).logits.equal(output.logits)
    shifted = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
    expected = -output.logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None]).mean()
    torch.testing.assert_close(output.loss, expected)
    torch.testing.assert_close(model(tokens, shift_labels=shifted).loss, expected)
    assert model(tokens, logits_to_keep=torch.tensor([2, 5])).logits.equal(output.logits[:, [2, 5]])


@pytest.mark.parametrize(
    "options", [{}, {"mixers": ["softmax", "fast_weight"], "num_hidden_layers": 2}, {"positions": "sinusoidal"}]
)
@torch.no_grad()
def test_packed_texts_do_not_see_each_other(options):
    """A position of 0 begins a text, also one that a cache continues."""
    torch.manual_seed(0)
    model = small(num_attention_heads=2, max_position_embeddings=20, **options).eval()
    for length in (1, 5):
        one, two = torch.randint(16, (1, length)), torch.randint(16, (1, 4))
        alone = torch.cat([model(one).logits, model(two).logits], 1)
        tokens, positions = torch.cat([one, two], 1), torch.tensor([[*range(length), *range(4)]])
        torch.testing.assert_close(model(tokens, position_ids=positions).logits, alone)
        for cut in (1, length, length + 2):  # within a text, or between the two
            first = model(tokens[:, :cut], position_ids=positions[:, :cut], use_cache=True)
            rest = model(tokens[:, cut:], position_ids=positions[:, cut:], past_key_values=first.past_key_values)
            torch.testing.assert_close(rest.logits, alone[:, cut:])
        assert not torch.allclose(model(tokens).logits[:, length:], alone[:, length:])


def test_others_may_read_what_the_owner_may(folder):
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1
    assert not json.loads((folder / "generation_config.json").read_text()).get("_from_model_config")


def test_gradient_checkpointing_changes_no_gradient(folder):
    tokens, gradients = torch.randint(4, 64, (2, 9)), []
    for checkpointing in (False, True):
        model = load(folder).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(tokens, labels=tokens).loss.backward()
        gradients.append({name: x.grad for name, x in model.named_parameters()})
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected)
    assert all(layer.gradient_checkpointing for layer in model.layers)


@pytest.mark.parametrize("mixer", ["additive", "leap"])
def test_no_state_is_made_where_none_is_kept(mixer):
    """The state of a window has as many tokens as the window, most of them empty while a text is short."""
    model, states = small(mixers=[mixer] * 2, num_hidden_layers=2).train(), []
    for layer in model.layers:
        layer.self_attn.register_forward_hook(lambda *call: states.append(call[-1][1]))
    tokens = torch.arange(9)[None]
    plain, kept = model(tokens), model(tokens, use_cache=True)
    model(tokens, past_key_values=kept.past_key_values)
    assert [state is None for state in states] == [True] * 2 + [False] * 4 and plain.logits.equal(kept.logits)


def test_gradient_checkpointing_with_values_of_another_layer():
    options = asdict(FastWeightConfig(update_rule="sum", value_mixing_rank=2))
    model = FastWeightForCausalLM(
        FastWeightHFConfig(mixer_options=options, mixers=["fast_weight"] * 2, num_hidden_layers=2)
    ).train()
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match=r"^gradient checkpointing computes layers again without the first layer's values; switch"):
        model(torch.arange(4)[None])


@pytest.mark.parametrize("missing", ["layers.0.fc1.weight", "layers.0.self_attn.in_proj.bias", "embed_tokens.weight"])
@torch.no_grad()
def test_weights_that_a_checkpoint_lacks_are_drawn(missing, tmp_path, monkeypatch):
    """As a new model draws them, which is built once for that; the others are the checkpoint's."""
    model = small(hidden_size=32, num_attention_heads=2)
    kept = {name: x for name, x in model.state_dict().items() if name != missing}
    model.save_pretrained(tmp_path, state_dict=kept)
    built, draw = [], FastWeightForCausalLM.draw_as_fairseq
    monkeypatch.setattr(FastWeightForCausalLM, "draw_as_fairseq", lambda self: built.append(self) or draw(self))
    loaded = FastWeightForCausalLM.from_pretrained(tmp_path)
    assert len(built) == 2
    assert all(loaded.state_dict()[name].equal(x) for name, x in kept.items())
    drawn = loaded.state_dict()[missing]
    assert drawn.isfinite().all() and drawn.abs().max() < 10
    assert drawn.std() == pytest.approx(model.state_dict()[missing].std(), rel=0.5)
    other = FastWeightHFConfig.from_pretrained(tmp_path, intermediate_size=24)
    resized = FastWeightForCausalLM.from_pretrained(tmp_path, config=other, ignore_mismatched_sizes=True)
    assert all(x.isfinite().all() and x.abs().max() < 10 for x in resized.state_dict().values())


@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_a_new_model_knows_nothing_rather_than_the_wrong_words(tied):
    """Its loss is near that of equally likely words."""
    scale = {"embedding_scale": 32**0.5, "hidden_size": 32, "num_attention_heads": 2}
    config = FastWeightHFConfig(mixer_options=asdict(FastWeightConfig()), vocab_size=99, tie_word_embeddings=tied, **scale)
    model, tokens = FastWeightForCausalLM(config).eval(), torch.randint(99, (8, 20))
    assert model(tokens, labels=tokens).loss < 2 * torch.tensor(99.0).log()


def test_the_tokenizer_joins_what_the_corpus_had_split(folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    assert "token_type_ids" not in tokenizer("w1 w2")
    words = ["the", "cat", ",", "(", "well", "-", "known", ")", ",", "does", "n't", "see", "1", "@,@", "000", "dogs", "."]

    class Words:
        symbols, nspecial, eos_word, unk_word, pad_word = ["<s>", "<pad>", "</s>", "<unk>", *words], 4, "</s>", "<unk>", "<pad>"

        def eos(self):
            return 2

    made = word_tokenizer(Words())
    ids = [made.convert_tokens_to_ids(word) for word in words]
    assert made.decode(ids) == " the cat, (well - known), doesn't see 1,000 dogs."
    assert made.decode(ids[:2]) + made.decode(ids[2:]) == made.decode(ids)
    Words.symbols = ["<s>", "<pad>", "</s>", "<unk>", "lo@@", "w@@", "er"]
    pieces = word_tokenizer(Words())
    assert pieces.decode([4, 5, 6, 6]) == " lower er"
    Words.symbols = ["<s>", "<pad>", "</s>", "<unk>", "3@@", ",@@", ",", "5"]
    assert word_tokenizer(Words()).decode([4, 6, 4, 5, 7]) == " 3, 3,5"


def begun_by_fairseq(state: dict, words: torch.Tensor, data) -> list[int]:
    """The words with what the task of a checkpoint begins a text with, where it generates and scores."""
    task = setup_task(OmegaConf.create(state["cfg"]["task"] | {"data": str(data)}))
    [text] = task.build_dataset_for_inference([words], [len(words)])
    return text["net_input.src_tokens"].tolist()


@pytest.mark.parametrize("options, first", [("", 2), ("--add-bos-token", 0)])
def test_texts_begin_as_those_of_fairseq(options, first, dictionary, tmp_path):
    """Alone and in a batch; the symbol is no word of what is decoded, and ``generate`` begins with it too."""
    _, _, state = source(f"--arch fast_weight_lm {options}", dictionary)
    export(save(state, tmp_path), tmp_path / "out", data=dictionary)
    tokenizer, model = transformers.AutoTokenizer.from_pretrained(tmp_path / "out"), load(tmp_path / "out")
    assert tokenizer("w1 w2")["input_ids"] == begun_by_fairseq(state, torch.tensor([5, 6]), dictionary) == [first, 5, 6]
    assert tokenizer(["w1 w2", "w3"], padding=True)["input_ids"] == [[first, 5, 6], [1, first, 7]]
    assert tokenizer("w1", "w2")["input_ids"] == [first, 5, first, 6]
    for known in (model.config, model.generation_config, tokenizer):
        assert (known.bos_token_id, known.eos_token_id, known.pad_token_id) == (first, 2, 1)
    assert model.generate(max_new_tokens=1)[0, 0] == first
    start = "<s>" if options else "</s>"
    assert tokenizer.decode([first, 5, 6, 2]) == f"{start} w1 w2</s>"
    assert tokenizer.decode([first, 5, 6, 2], skip_special_tokens=True) == " w1 w2"


def test_the_tokenizer_of_a_gpt2_has_no_symbol_before_a_text(gpt2, tmp_path):
    convert(gpt2[0], tmp_path / "gpt2.pt", "decay")
    state = torch.load(tmp_path / "gpt2.pt")
    state["cfg"]["task"]["add_bos_token"] = True
    asked = save(state, tmp_path), tmp_path / "out", tmp_path
    with pytest.raises(Mistake, match=r"^--tokenizer is for a CHECKPOINT that fw-convert made of a GPT-2, whose"):
        export(*asked, tokenizer=gpt2[0])
    assert not (tmp_path / "out").exists() and export(*asked).config.bos_token_id == 0


def test_the_pipeline_keeps_spaces(folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    pipeline = transformers.pipeline("text-generation", model=load(folder), tokenizer=tokenizer)
    [result] = pipeline("w1 w2 w3", max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert result["generated_text"].startswith("w1 w2 w3 ") and len(result["generated_text"].split()) == 7


def test_trainer_trains(folder, tmp_path):
    pytest.importorskip("accelerate")
    model, tokens = load(folder), torch.randint(4, 64, (8, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = model.eval()(tokens, labels=tokens).loss
    data = [{"input_ids": row, "labels": row} for row in tokens]
    options = transformers.TrainingArguments(
        tmp_path, max_steps=8, learning_rate=0.01, per_device_train_batch_size=4, report_to=[], use_cpu=True, save_steps=8,
        gradient_checkpointing=True, disable_tqdm=True,
    )  # fmt: skip
    transformers.Trainer(model, options, train_dataset=data).train()
    with torch.no_grad():
        after = model.eval()(tokens, labels=tokens).loss
        assert after < before - 0.3
        saved = FastWeightForCausalLM.from_pretrained(tmp_path / "checkpoint-8").eval()
        assert saved(tokens, labels=tokens).loss == after


@pytest.mark.cases_in_ci(1)
@pytest.mark.parametrize("missing", [["fairseq"], ["fairseq", "fw_fairseq", "omegaconf", "hydra"]])
def test_the_folder_stands_alone(missing, folder):
    """With the package it is the package's code, without it that of the folder."""
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({[*missing, 'torchaudio']}))\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "tokens = model.generate(**tokenizer('w1 w2', return_tensors='pt'), max_new_tokens=3, min_new_tokens=3)\n"
        "print(any(name.startswith('fw_fairseq_of_a_model_') and name.endswith('.ops') for name in sys.modules))\n"
        "print(tokenizer.decode(tokens[0]))"
    )
    done = run(sys.executable, "-c", code, folder)
    assert done.returncode == 0, done.stderr[-2000:]
    *_, alone, text = done.stdout.splitlines()
    assert alone == str("fw_fairseq" in missing)
    assert text.startswith("</s> w1 w2 ") and len(text.split()) == 6


@torch.no_grad()
def test_a_gpt2_comes_back(gpt2, tmp_path):
    """To fairseq and back: its tokenizer, its ids, and its logits where nothing was converted."""
    folder, original = gpt2
    convert(folder, tmp_path / "gpt2.pt", "softmax")
    export(tmp_path / "gpt2.pt", tmp_path / "out", data=tmp_path, tokenizer=folder)
    ids = transformers.GPT2Tokenizer.from_pretrained(tmp_path / "out")("the other thing", return_tensors="pt")["input_ids"]
    assert ids.equal(transformers.GPT2Tokenizer.from_pretrained(folder)("the other thing", return_tensors="pt")["input_ids"])
    model = load(tmp_path / "out")
    assert model.config.vocab_size == original.config.vocab_size == model(ids).logits.shape[-1]
    torch.testing.assert_close(model(ids).logits, original(ids).logits, rtol=1e-4, atol=1e-5)
    same = dict(max_new_tokens=8, do_sample=False)
    assert model.generate(ids, **same).equal(original.generate(ids, **same))


@pytest.mark.long
def test_a_fine_tuned_gpt2_keeps_its_tokenizer(gpt2, tmp_path):
    """Converted, trained by fairseq-train, exported: the logits are fairseq's in the order of the tokenizer. It generates text."""
    folder, original = gpt2
    convert(folder, tmp_path / "start.pt", "decay")
    ids = transformers.GPT2Tokenizer.from_pretrained(folder)("the other thing is there")["input_ids"]
    for split in ("train", "valid"):
        (tmp_path / split).write_text((" ".join(map(str, ids)) + "\n") * 16)
    made = ["--only-source", "--srcdict", tmp_path / "dict.txt", "--destdir", tmp_path / "bin", "--workers", 1]
    succeed(fairseq("preprocess", *made, "--trainpref", tmp_path / "train", "--validpref", tmp_path / "valid"))
    taken = ["--arch", "fast_weight_lm", "--options-from", tmp_path / "start.pt", "--finetune-from-model", tmp_path / "start.pt"]
    rest = "--task language_modeling --tokens-per-sample 12 --batch-size 4 --optimizer adam --lr 0.01 --max-update 8"
    saved = ["--save-dir", tmp_path / "tuned", "--no-epoch-checkpoints", "--disable-validation"]
    succeed(fairseq("train", tmp_path / "bin", *USER_DIR, *taken, *rest.split(), *saved))
    tuned = tmp_path / "tuned" / "checkpoint_last.pt"
    export(tuned, tmp_path / "out", data=tmp_path / "bin", tokenizer=folder)
    model, tokenizer = load(tmp_path / "out"), transformers.GPT2Tokenizer.from_pretrained(tmp_path / "out")
    fairseqs, words, _ = load_language_model(tuned, tmp_path / "bin", "the test", ("fast_weight_lm",))
    size, end = original.config.vocab_size, original.config.eos_token_id
    order = torch.tensor([words.eos() if i == end else words.index(str(i)) for i in range(size)])
    text = torch.tensor([[end, *ids]])
    torch.testing.assert_close(model(text).logits, logits(fairseqs, order[text])[..., order], rtol=1e-4, atol=1e-4)
    start, *_ = load_language_model(tmp_path / "start.pt", tmp_path / "bin", "the test", ("fast_weight_lm",))
    inputs, wanted = order[text[:, :-1]], order[text[0, 1:], None]
    likely = [logits(each, inputs).log_softmax(-1)[0].gather(-1, wanted).sum() for each in (start, fairseqs)]
    assert likely[1] > likely[0] + 1, "it was trained"
    written = tokenizer.decode(model.generate(text[:, :3], max_new_tokens=6, do_sample=False)[0])
    assert written.startswith(tokenizer.decode(text[0, :3])) and len(written) > len(tokenizer.decode(text[0, :3]))


def words_file(name: str, count: int) -> dict[str, str]:
    vocabulary, added = {f"w{i}": i for i in range(count)}, [{"id": count, "content": "<end>"}]
    whole = {"model": {"vocab": vocabulary}, "added_tokens": added}
    return {name: json.dumps(whole if name == "tokenizer.json" else vocabulary | {"<end>": count})}


def test_words_are_not_a_tokenizers_numbers(dictionary, tmp_path):
    """Nor are words and numbers."""
    _, _, state = source("--arch fast_weight_lm", dictionary)
    checkpoint, out = save(state, tmp_path), tmp_path / "out"
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    (mixed / "dict.txt").write_text("".join(f"{word} 1\n" for word in [*range(1, 31), *(f"w{i}" for i in range(30))]))
    for data, count in ((dictionary, 60), (mixed, 30)):
        for file, text in words_file("vocab.json", count).items():
            (tmp_path / file).write_text(text)
        with pytest.raises(ValueError, match=r"^--tokenizer needs a checkpoint that fw-convert made of a GPT-2"):
            export(checkpoint, out, data=data, tokenizer=tmp_path)
        assert not out.exists()


@pytest.mark.parametrize("name", ["vocab.json", "tokenizer.json"])
def test_a_tokenizer_of_another_size_is_refused(name, gpt2, tmp_path):
    convert(gpt2[0], tmp_path / "gpt2.pt", "decay")
    other, tokens = tmp_path / "other", gpt2[1].config.vocab_size
    other.mkdir()
    for count, wrong in ((tokens - 2, True), (tokens, True), (tokens - 1, False)):
        for file, text in words_file(name, count).items():
            (other / file).write_text(text)
        if wrong:
            with pytest.raises(ValueError, match=f"--tokenizer .*other has {count + 1} tokens; .*, which has {tokens}$"):
                export(tmp_path / "gpt2.pt", tmp_path / "out", data=tmp_path, tokenizer=other)
            assert not (tmp_path / "out").exists()
    made = export(tmp_path / "gpt2.pt", tmp_path / "out", data=tmp_path, tokenizer=other)
    assert all(x.requires_grad for x in made.parameters())
    (other / name).write_text("{")
    with pytest.raises(ValueError, match=rf"{name} cannot be read as a tokenizer"):
        export(tmp_path / "gpt2.pt", tmp_path / "again", data=tmp_path, tokenizer=other)


def test_force_replaces_an_earlier_export_and_nothing_else(dictionary, tmp_path, monkeypatch):
    _, _, state = source("--arch fast_weight_lm", dictionary)
    checkpoint, out = save(state, tmp_path), tmp_path / "out"
    out.mkdir()
    export(checkpoint, out, data=dictionary, force=True)
    (out / "model.safetensors").write_bytes(b"old")
    data = tmp_path / "data"
    shutil.copytree(dictionary, data)
    with monkeypatch.context() as patch:
        patch.setattr(exporting, "load_model", lambda *_: pytest.fail("it must be refused first"))
        for mistaken in (data, checkpoint):
            with pytest.raises(ValueError, match=r"OUTPUT .* is no earlier export"):
                export(checkpoint, mistaken, data=data, force=True)
    assert (data / "dict.txt").exists() and checkpoint.exists()
    move = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: move(a, b) if ".old" in f"{a}{b}" else full_disk())
    with pytest.raises(OSError, match="disk full"):
        export(checkpoint, out, data=dictionary, force=True)
    assert (out / "model.safetensors").read_bytes() == b"old"
    monkeypatch.undo()
    export(checkpoint, out, data=dictionary, force=True)
    assert load(out).config.vocab_size == 64
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "out", "source.pt"]


def test_the_output_is_tied_unless_it_is_said_otherwise():
    assert FastWeightHFConfig().tie_word_embeddings and not FastWeightHFConfig(tie_word_embeddings=False).tie_word_embeddings


@pytest.mark.parametrize("others, named", [(["README.md"], "README.md"), ([".git/", "notes"], ".git")])
def test_force_deletes_nothing_that_an_export_did_not_write(others, named, dictionary, tmp_path):
    _, _, state = source("--arch fast_weight_lm", dictionary)
    checkpoint, out = save(state, tmp_path), tmp_path / "out"
    export(checkpoint, out, data=dictionary)
    for name in others:
        (out / name).mkdir() if name.endswith("/") else (out / name).write_text("kept")
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    with pytest.raises(ValueError, match=f"^OUTPUT .* has {named}, which fw-export-hf did not write and --force would delete; "):
        export(checkpoint, out, data=dictionary, force=True)
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before


def full_disk():
    raise OSError("disk full")


def test_mistakes_leave_what_is_there(dictionary, folder, tmp_path):
    _, _, state = source("--arch transformer_lm", dictionary)
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(ValueError, match=r"OUTPUT .* exists; name another folder, or give --force"):
        export(save(state, tmp_path), folder, data=dictionary)
    with pytest.raises(ValueError, match="holds a TransformerLanguageModel; fw-export-hf takes fast_weight_lm and "):
        export(tmp_path / "source.pt", tmp_path / "out", data=dictionary)
    with pytest.raises(ValueError, match=r"CHECKPOINT .*nowhere\.pt is not a file"):
        export(tmp_path / "nowhere.pt", tmp_path / "out")
    with pytest.raises(ValueError, match="holds a transformer_lm; fw-export-hf takes fast_weight_lm and fast_weight_transformer"):
        export(tmp_path / "source.pt", tmp_path / "out", data=tmp_path)
    _, _, state = source("--arch fast_weight_lm", dictionary)
    with pytest.raises(ValueError, match=r"no dictionary at .*; name its folder by --data"):
        export(save(state, tmp_path), tmp_path / "out", data=tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == before and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "options, said",
    [
        ("--output-dictionary-size 30", "--output-dictionary-size"),
        ("--character-embeddings", "--character-embeddings"),
        ("--positions-from-end", "--positions-from-end"),
        ("--quant-noise-pq 0.1", "--quant-noise-pq"),
    ],
)
def test_what_it_cannot_export_is_refused(options, said, dictionary, tmp_path):
    _, _, state = source(f"--arch fast_weight_lm {options}", dictionary)
    with pytest.raises(Mistake, match=f"^CHECKPOINT was trained with {said}, which fw-export-hf does not have$"):
        export(save(state, tmp_path), tmp_path / "out", data=dictionary)
    assert not (tmp_path / "out").exists()


def test_an_output_of_all_words_is_no_smaller_one(dictionary, tmp_path):
    exported("--output-dictionary-size 64", dictionary, tmp_path)


@pytest.mark.cases_in_ci(2)
@pytest.mark.parametrize("difference, is_written", [(1e-4, True), (1.5e-4, False), (float("inf"), False)])
@pytest.mark.parametrize("before", [True, False])
def test_a_model_that_computes_other_logits_is_not_written(before, difference, is_written, dictionary, tmp_path, monkeypatch):
    """Before the folder is written, and as it is loaded of it."""
    _, _, state = source("--arch fast_weight_lm", dictionary)
    found = iter([difference] if before and not is_written else [0.0, difference])
    monkeypatch.setattr(exporting.language_models, "compare", lambda *_, **given: next(found))
    checkpoint, out = save(state, tmp_path), tmp_path / "new" / "out"
    if is_written:
        export(checkpoint, out, data=dictionary)
    else:
        with pytest.raises(ValueError, match=r"computes other logits in transformers, by .*; nothing was written"):
            export(checkpoint, out, data=dictionary)
    assert out.exists() == is_written and not list(out.parent.glob(".*")) and not [*found]


@pytest.mark.cases_in_ci(1)
@pytest.mark.parametrize("tokenizer", [False, True])
def test_the_folder_is_compared_as_it_was_written(tokenizer, gpt2, tmp_path, monkeypatch):
    """Here its weights do not fit the model's words."""
    convert(gpt2[0], tmp_path / "gpt2.pt", "decay")
    write, asked = exporting.write, {"data": tmp_path, "tokenizer": gpt2[0] if tokenizer else None}

    def swapped(model, tokenizers, folder):
        rows = model.embed_tokens.weight.data
        rows[[5, 6]] = rows[[6, 5]]
        write(model, tokenizers, folder)

    monkeypatch.setattr(exporting, "write", swapped)
    with pytest.raises(ValueError, match=r"computes other logits in transformers.*; nothing was written$"):
        export(tmp_path / "gpt2.pt", tmp_path / "out", **asked)
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(exporting, "write", write)
    export(tmp_path / "gpt2.pt", tmp_path / "out", **asked)


def test_a_model_of_nan_is_named(dictionary, tmp_path, capsys):
    _, _, state = source("--arch fast_weight_lm", dictionary)
    state["model"]["decoder.layers.1.fc2.weight"][0, 0] = float("nan")
    with pytest.raises(SystemExit) as end:
        export_command([str(save(state, tmp_path)), str(tmp_path / "out"), "--data", str(dictionary)])
    said = "computes NaN; the parameter decoder.layers.1.fc2.weight is not finite, and nothing was written"
    assert end.value.code == 3 and said in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_the_difference_is_that_of_log_probabilities_beside_the_largest():
    """1/4 and 3/4 against 1/2 and 1/2: log 2 of log 4; any logits of the same probabilities are equal."""
    fairseqs = SimpleNamespace(get_normalized_probs=lambda chances, log_probs: chances.log() if log_probs else chances)
    chances = torch.tensor([[0.25, 0.75]])
    assert difference(fairseqs, chances, torch.tensor([[7.0, 7.0]])) == pytest.approx(0.5)
    assert difference(fairseqs, chances, chances.log() + 3) == pytest.approx(0, abs=1e-6)


def test_what_appears_at_the_output_meanwhile_stays(dictionary, tmp_path, monkeypatch):
    _, _, state = source("--arch fast_weight_lm", dictionary)
    out = tmp_path / "out"
    write = exporting.write
    monkeypatch.setattr(exporting, "write", lambda *given: write(*given) or out.mkdir())
    with pytest.raises(ValueError, match=r"OUTPUT .* exists; name another folder"):
        export(save(state, tmp_path), out, data=dictionary)


def test_the_command_says_what_it_wrote(dictionary, tmp_path, capsys):
    _, _, state = source(f"--arch fast_weight_lm {OPTIONS['hybrid']}", dictionary)
    export_command([str(save(state, tmp_path)), str(tmp_path / "out"), "--data", str(dictionary)])
    count = load(tmp_path / "out").num_parameters()
    assert capsys.readouterr().out.splitlines()[-1] == f"{tmp_path / 'out'}: {count:,} parameters, softmax, fast_weight"


def test_an_option_that_a_folder_leaves_out_has_its_default():
    config = FastWeightHFConfig()
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    switches = {"normalize_before": True, "final_norm": True, "embedding_norm": False, "decoding_graph": True}
    others = {"embedding_scale": 1.0, "output_scale": 1.0, "first_position": 0}
    for name, value in (sizes | switches | others).items():
        assert getattr(config, name) == value, name
    both = FastWeightTranslationConfig()
    assert both.linear_cross and both.is_encoder_decoder and not both.tie_word_embeddings


@pytest.mark.parametrize("kind", [FastWeightForCausalLM, FastWeightForTranslation])
def test_what_transformers_is_told(kind):
    assert kind._is_stateful == (kind is FastWeightForTranslation) and not kind._supports_default_dynamic_cache()
    assert not Cache.is_compileable and not Cache().is_croppable


@torch.no_grad()
def test_learned_positions_end():
    model = small(positions="learned", max_position_embeddings=4, first_position=2).eval()
    assert model(torch.zeros(1, 4).long()).logits.isfinite().all()
    with pytest.raises(ValueError, match="longer than max_position_embeddings, 4 tokens"):
        model(torch.zeros(1, 5).long())
    with pytest.raises(ValueError, match="longer than max_position_embeddings, 0 tokens"):
        small(positions="learned")(torch.zeros(1, 1).long())


def test_sinusoidal_positions_have_rates_from_one_to_a_ten_thousandth():
    """An odd width has a zero at its end."""
    waves = [wave(10000 * rate) for wave in (math.sin, math.cos) for rate in (1, 1 / 100, 1 / 10000)]
    found = small(hidden_size=7, positions="sinusoidal").positions(torch.tensor([[0, 10000]]))
    torch.testing.assert_close(found, torch.tensor([[[0, 0, 0, 1, 1, 1, 0], [*waves, 0]]]).float(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("bands", [[[16, 4]], [[5, 8], [3, 4], [8, 2]]])
@torch.no_grad()
def test_words_are_numbered_through_all_bands(bands):
    embed, ids = BandedEmbedding(bands, 8), torch.arange(16).view(2, 8)
    tables = [words.weight @ linear.weight.t() for words, linear in zip(embed.words, embed.maps)]
    torch.testing.assert_close(embed(ids).flatten(0, 1), torch.cat(tables))


@torch.no_grad()
def test_arguments_of_transformers_that_change_nothing():
    model, tokens = small().eval(), torch.arange(8)[None]
    plain = model(tokens)
    unused = {"cache_position": torch.arange(8), "token_type_ids": tokens, "head_mask": None}
    assert model(tokens, **unused).logits.equal(plain.logits)


def test_padding_is_looked_for_among_the_last_tokens():
    mask, inputs = torch.tensor([[0, 1, 1], [1, 1, 1]]), torch.zeros(2, 3, 8)
    assert padding_of(mask, inputs).tolist() == [[True, False, False], [False] * 3]
    assert padding_of(mask, inputs[:, :2], earlier=True) is None and padding_of(None, inputs) is None


@torch.no_grad()
def test_a_token_in_another_precision_takes_the_general_way():
    model, token = small().eval(), torch.ones(1, 1).long()
    cache = model(token.expand(1, 3)).past_key_values
    with torch.autocast("cpu", torch.bfloat16):
        model(token, past_key_values=cache)
    assert cache.steps is None
    model(token, past_key_values=cache)
    assert cache.steps is not None


def test_what_the_code_of_a_folder_holds():
    """The modules of the model with all that they import, and which of them are packages; nothing that needs fairseq."""
    assigned = {node.targets[0].id: node.value for node in ast.parse(code()).body if isinstance(node, ast.Assign)}
    names, packages = (ast.literal_eval(assigned[name]) for name in ("SOURCES", "PACKAGES"))
    assert {"", "huggingface", "mixers", "mixers.fast_weight", "ops", "rules", "feature_maps"} <= {*names}
    assert packages == sorted(name for name in names if (ROOT / "fw_fairseq" / name.replace(".", "/")).is_dir())
    assert not any(name.startswith(("models", "tools", "tasks", "criterions")) for name in names)


def test_folders_of_two_versions_are_two_packages(monkeypatch):
    """In one program, each runs its own code."""
    names = []
    for text in ("", "# another version\n"):
        monkeypatch.setattr(standalone, "quoted", lambda source, text=text: quoted(text + source))
        names += [ast.literal_eval(node.value) for node in ast.parse(code()).body if ast.unparse(node).startswith("NAME =")]
    assert len({*names}) == 2 and all(name.startswith("fw_fairseq_of_a_model_") for name in names)


def test_sources_are_quoted_with_a_mark_before_each_line():
    assert quoted("a\\b\nc\n") == "r'''|a\\b\n|c\n'''"
    assert ast.literal_eval(quoted("a = '''b'''\n")) == "|a = '''b'''\n"
