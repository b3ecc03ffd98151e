"""fw-export-hf of translation models, and what transformers makes of the folder."""

from __future__ import annotations

import copy
import math
import sys
from types import SimpleNamespace

import pytest
import torch
from fairseq import options, tasks
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.sequence_generator import SequenceGenerator
from omegaconf import OmegaConf
from support.checkpoints import save, save_format
from support.commands import run

from fw_fairseq.tools.export_hf.export import export
from fw_fairseq.tools.export_hf.tokenizers import word_tokenizer
from fw_fairseq.tools.export_hf.translation import set_generation

sys.modules.setdefault("torchaudio", None)  # fairseq's, of another torch than ours: transformers would trip over it
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread", "checked_here")

SOURCE, TARGET, EOS, PAD = 30, 24, 2, 1  # words with the special ones
SHAPE = (
    "--task translation --source-lang en --target-lang de --arch fast_weight_transformer --dropout 0.2"
    " --encoder-layers 2 --encoder-embed-dim 32 --encoder-ffn-embed-dim 48 --encoder-attention-heads 4"
    " --decoder-layers 2 --decoder-embed-dim 32 --decoder-ffn-embed-dim 40 --decoder-attention-heads 4"
)
ADAPTIVE = "--adaptive-softmax-cutoff 10 --criterion adaptive_loss --ddp-backend legacy_ddp"
OPTIONS = {
    "linear": "",
    "softmax": "--linear-attention=",
    "encoder": "--linear-attention encoder --encoder-learned-pos --decoder-learned-pos --activation-fn gelu",
    "decoder": "--linear-attention decoder --encoder-normalize-before --decoder-normalize-before",
    "cross": "--linear-attention cross --no-token-positional-embeddings --no-scale-embedding --layernorm-embedding",
    "favor": "--feature-map favor --feature-norm none --update-rule gated --attention-norm",
    "dpfp": "--feature-map dpfp --update-rule gated_delta --mixer-pattern softmax,fast_weight --share-decoder-input-output-embed",
    "other-widths": "--encoder-embed-dim 24 --decoder-output-dim 20 --scale-output",
    "sru": "--linear-attention encoder,decoder --mixer sru",
    "adaptive": ADAPTIVE,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Dictionaries of two languages in one folder, and one dictionary of both in another."""
    folder = tmp_path_factory.mktemp("data")
    for name, words in (("apart", {"en": SOURCE, "de": TARGET}), ("joined", {"en": TARGET, "de": TARGET})):
        (folder / name).mkdir()
        for language, count in words.items():
            word = "w" if name == "joined" else language
            (folder / name / f"dict.{language}.txt").write_text("".join(f"{word}{i} 1\n" for i in range(count - 4)))
    return folder


def made(text: str, data):
    """A model with random numbers everywhere, its task, and the state that fairseq saves of it."""
    words = [str(data), *SHAPE.split(), *text.split()]
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), words))
    task = tasks.setup_task(cfg.task)
    model = task.build_model(cfg.model).eval()
    with torch.no_grad():
        for x in model.parameters():
            x.copy_(1.5 * torch.randn_like(x) / math.sqrt(x.shape[-1]) if x.dim() > 1 else x + 0.1 * torch.randn_like(x))
    return model, task, save_format(model.state_dict(), cfg=OmegaConf.to_container(cfg, resolve=True, enum_to_str=True))


def exported(text: str, data, folder):
    """fairseq's model, its task, and the model that transformers loads."""
    model, task, state = made(text, data)
    export(save(state, folder), folder / "out", data=data)
    return model, task, load(folder / "out")


def load(folder):
    return transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=True).eval()


def sources(*lengths: int):
    """Sentences of these lengths, which end with the end of sentence, padded on the left."""
    rows = [torch.cat([torch.randint(4, TARGET, (length - 1,)), torch.tensor([EOS])]) for length in lengths]
    return torch.stack([torch.nn.functional.pad(row, (max(lengths) - len(row), 0), value=PAD) for row in rows])


def given(tokens) -> dict:
    """The source as transformers takes it."""
    return {"input_ids": tokens, "attention_mask": tokens.ne(PAD).long()}


def scores(fairseqs, tokens, target):
    output = fairseqs(tokens, tokens.ne(PAD).sum(1), target)
    return fairseqs.get_normalized_probs(output, log_probs=True)


@pytest.mark.cases_in_ci(1)
@pytest.mark.parametrize("name", OPTIONS)
@torch.no_grad()
def test_probabilities_are_fairseqs(name, data, tmp_path):
    """Of padded sources; in one pass, one by one, from the encoder's output, and with padding on the right."""
    fairseqs, _, model = exported(OPTIONS[name], data / "apart", tmp_path)
    tokens, target = sources(9, 4), torch.cat([torch.full((2, 1), EOS), torch.randint(4, TARGET, (2, 6))], 1)
    expected = scores(fairseqs, tokens, target)

    def close(logits, wanted):
        torch.testing.assert_close(logits.log_softmax(-1), wanted, rtol=1e-4, atol=1e-4)

    close(model(**given(tokens), decoder_input_ids=target).logits, expected)
    encoded, cache, steps = model.encoder(**given(tokens)), None, []
    for word in target.split(1, 1):
        output = model(
            attention_mask=tokens.ne(PAD), encoder_outputs=encoded, decoder_input_ids=word, past_key_values=cache, use_cache=True
        )
        cache = output.past_key_values
        steps.append(output.logits)
    close(torch.cat(steps, 1), expected)
    right = torch.stack([torch.cat([row[row.ne(PAD)], row[row.eq(PAD)]]) for row in tokens])
    close(model(**given(right), decoder_input_ids=target).logits, expected)


@pytest.mark.parametrize("search", [{"do_sample": True}, {"num_beams": 3}])
def test_an_end_that_is_ruled_out_does_not_come(search, data, tmp_path):
    """The last word of all is the end of sentence, but for this."""
    _, _, model = exported(OPTIONS["linear"], data / "apart", tmp_path)
    words = model.generate(**given(sources(9, 4)), max_new_tokens=6, suppress_tokens=[EOS], **search)
    assert words.shape == (2, 7) and not words[:, 1:].eq(EOS).any()
    assert model.config.decoder.eos_token_id == EOS  # for what asks the decoder's configuration


LIVELY = {
    "linear": (1, ""),
    "softmax": (1, "--linear-attention="),
    "gated_delta": (0, "--feature-map dpfp --update-rule gated_delta --mixer-pattern softmax,fast_weight"),
}


@pytest.fixture(scope="module", params=LIVELY)
def both(request, data, tmp_path_factory):
    """As ``exported``, with weights that make translations differ in their words and lengths."""
    seed, text = LIVELY[request.param]
    torch.manual_seed(seed)
    model, task, state = made(f"{text} --encoder-normalize-before --decoder-normalize-before", data / "apart")
    for name, x in model.named_parameters():
        x.data *= 3 if name.endswith(("attn.out_proj.weight", "mixer.out_proj.weight")) else 1
    model.decoder.output_projection.weight.data[EOS] *= 2
    folder = tmp_path_factory.mktemp("exported")
    export(save(state, folder), folder / "out", data=data / "apart")
    return model, task, load(folder / "out")


@pytest.mark.cases_in_ci(1)
@pytest.mark.parametrize("beam", [1, 5])
@torch.no_grad()
def test_translations_are_those_of_fairseqs_search(beam, both):
    """Tokens and scores, with sentences that end early and sentences that are cut."""
    fairseqs, task, model = both
    torch.manual_seed(0)
    tokens = sources(9, 4, 6, 7, 5, 9)
    search = SequenceGenerator([fairseqs], task.target_dictionary, beam_size=beam, max_len_b=14)
    sample = {"net_input": {"src_tokens": tokens, "src_lengths": tokens.ne(PAD).sum(1), "prev_output_tokens": None}}
    all_found = search.generate([fairseqs], sample)
    expected = [hypotheses[0] for hypotheses in all_found]
    done = {"return_dict_in_generate": True, "output_scores": True} if beam > 1 else {}
    found = model.generate(**given(tokens), num_beams=beam, max_new_tokens=15, **done)
    rows = found.sequences if done else found
    assert [row[1:][row[1:].ne(PAD)].tolist() for row in rows] == [best["tokens"].tolist() for best in expected]
    lengths = {len(each["tokens"]) for hypotheses in all_found for each in hypotheses}
    assert len(lengths) > 1 and max(lengths) == 15
    if done:
        torch.testing.assert_close(found.sequences_scores, torch.stack([best["score"] for best in expected]), rtol=1e-4, atol=1e-4)
    alone = [model.generate(**given(row[row.ne(PAD)][None]), num_beams=beam, max_new_tokens=15)[0].tolist() for row in tokens[:3]]
    assert [row[: len(one)].tolist() for one, row in zip(alone, rows)] == alone
    uncached = model.generate(**given(tokens), num_beams=beam, max_new_tokens=15, use_cache=False)
    assert uncached.equal(rows)


@pytest.mark.cases_in_ci(1)
@torch.no_grad()
def test_the_defaults_of_generate_are_those_of_fairseq_generate(both):
    fairseqs, task, model = both
    tokens = sources(5, 3)
    search = SequenceGenerator([fairseqs], task.target_dictionary, beam_size=5)
    sample = {"net_input": {"src_tokens": tokens, "src_lengths": tokens.ne(PAD).sum(1), "prev_output_tokens": None}}
    expected = [hypotheses[0]["tokens"].tolist() for hypotheses in search.generate([fairseqs], sample)]
    assert [row[1:][row[1:].ne(PAD)].tolist() for row in model.generate(**given(tokens))] == expected


def test_without_an_end_no_translation_ends_early(both):
    model = copy.deepcopy(both[2])
    for part in (model.generation_config, model.config, model.config.decoder):
        part.eos_token_id = None
    words = model.generate(**given(sources(9, 4)), num_beams=1, max_new_tokens=6)
    assert words.shape == (2, 7)


@pytest.mark.parametrize("limit, longest", [(None, 202), (24, 25), (201, 202), (1024, 202)])
def test_generate_has_the_defaults_of_fairseq_generate(limit, longest):
    """At most 200 words, and one less than the decoder has positions, between two ends of sentence; without padding."""
    config, search = transformers.PretrainedConfig(), SimpleNamespace()
    config.decoder = SimpleNamespace(max_position_embeddings=limit)
    set_generation(SimpleNamespace(config=config, generation_config=search), Dictionary())
    assert vars(search) == {
        "num_beams": 5, "early_stopping": True, "length_penalty": 1.0, "max_length": longest, "min_new_tokens": 1,
        "suppress_tokens": [PAD], "decoder_start_token_id": EOS,
    }  # fmt: skip
    ids = (config.bos_token_id, config.eos_token_id, config.pad_token_id, config.decoder_start_token_id)
    assert ids == (EOS, EOS, PAD, EOS)


def test_the_longest_translation_is_that_of_the_folder(both):
    """Also where transformers takes its length for a default, to which it adds the words that a translation begins with."""
    *_, model = both
    sizes = {"model_input_name": "input_ids", "input_ids_length": 1, "inputs_tensor": sources(5)}
    defaults = {"has_default_max_length": True, "has_default_min_length": True}
    found = model._prepare_generated_length(generation_config=copy.deepcopy(model.generation_config), **defaults, **sizes)
    assert found.max_length == model.generation_config.max_length == 202


def test_a_source_is_read_once(both, monkeypatch):
    *_, model = both
    read = []
    summarise = type(model.decoder.layers[0].encoder_attn).summarise
    monkeypatch.setattr(
        type(model.decoder.layers[0].encoder_attn), "summarise", lambda self, *source: read.append(self) or summarise(self, *source)
    )
    model.generate(**given(sources(5, 3)), num_beams=1, max_new_tokens=6)
    assert [sum(layer.encoder_attn is each for each in read) for layer in model.decoder.layers] == [1, 1]


@pytest.mark.cases_in_ci(1)
@pytest.mark.parametrize("shared", ["--share-all-embeddings", "--share-decoder-input-output-embed", ""])
def test_it_trains_and_is_saved_again(shared, data, tmp_path):
    """With gradient checkpointing, which changes no gradient; embeddings stay shared."""
    _, _, model = exported(shared, data / "joined", tmp_path)
    tokens, labels = sources(9, 4, 6, 7), torch.cat([torch.randint(4, TARGET, (4, 5)), torch.full((4, 1), EOS)], 1)
    labels[0, 3:] = -100
    model.train()(**given(tokens), labels=labels).loss.backward()
    plain = {name: x.grad.clone() for name, x in model.named_parameters()}
    model.gradient_checkpointing_enable()
    model.zero_grad()
    model(**given(tokens), labels=labels).loss.backward()
    for name, x in model.named_parameters():
        torch.testing.assert_close(x.grad, plain[name])
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.01), []
    for _ in range(10):
        loss = model(**given(tokens), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    assert (model.encoder.embed_tokens.weight is model.decoder.embed_tokens.weight) == (shared == "--share-all-embeddings")
    model.save_pretrained(tmp_path / "again")
    again = load(tmp_path / "again")
    with torch.no_grad():
        assert again(**given(tokens), labels=labels).loss == model.eval()(**given(tokens), labels=labels).loss
    assert again.num_parameters() == model.num_parameters()


@torch.no_grad()
def test_the_loss_is_that_of_the_labels(both):
    fairseqs, _, model = both
    tokens, labels = sources(9, 4), torch.tensor([[5, 6, 7, EOS], [8, EOS, -100, -100]])
    target = torch.tensor([[EOS, 5, 6, 7], [EOS, 8, EOS, PAD]])
    picked = scores(fairseqs, tokens, target).gather(-1, labels.clamp(min=0)[..., None])[..., 0][labels.ne(-100)]
    torch.testing.assert_close(model(**given(tokens), labels=labels).loss, -picked.mean(), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_weights_that_a_checkpoint_lacks_are_drawn(both, tmp_path):
    *_, model = both
    missing = ["encoder.layers.0.fc1.weight", "decoder.embed_tokens.weight", "decoder.layers.1.encoder_attn.out_proj.weight"]
    kept = {name: x for name, x in model.state_dict().items() if name not in missing}
    type(model).__mro__[1].save_pretrained(model, tmp_path, state_dict=kept)
    loaded = type(model).from_pretrained(tmp_path)
    assert all(loaded.state_dict()[name].equal(x) for name, x in kept.items())
    assert all(0.01 < loaded.state_dict()[name].std() < 1 for name in missing)


@pytest.mark.long
def test_the_folder_stands_alone(data, tmp_path):
    """Each language has its tokenizer."""
    exported("", data / "apart", tmp_path)
    missing = ["fairseq", "fw_fairseq", "omegaconf", "hydra"]
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({[*missing, 'torchaudio']}))\n"
        "from transformers import AutoModelForSeq2SeqLM, AutoTokenizer\n"
        "model = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "places = (sys.argv[1], sys.argv[1] + '/target')\n"
        "source, target = (AutoTokenizer.from_pretrained(place, trust_remote_code=True) for place in places)\n"
        "batch = source(['en3 en1', 'en5 unheard en2'], return_tensors='pt', padding=True)\n"
        "print(batch['input_ids'].tolist())\n"
        "tokens = model.generate(**batch, max_new_tokens=4, min_new_tokens=4)\n"
        "print(any(name.startswith('fw_fairseq_of_a_model_') and name.endswith('.ops') for name in sys.modules))\n"
        "print(target.batch_decode(tokens, skip_special_tokens=True))"
    )
    done = run(sys.executable, "-c", code, tmp_path / "out")
    assert done.returncode == 0, done.stderr[-2000:]
    *_, ids, alone, texts = done.stdout.splitlines()
    assert ids == "[[7, 5, 2, 1], [9, 3, 6, 2]]" and alone == "True"
    texts = eval(texts)
    assert all(text.split() and all(word.startswith(("de", "<unk>")) for word in text.split()) for text in texts)
    assert all(text == text.strip() for text in texts)


def test_labels_are_padded_behind_their_words(both):
    """So that each translation begins with the end of sentence and goes on with its own words, as in its batch alone."""
    *_, model = both
    tokenizer = word_tokenizer(Dictionary(), before=False)
    rows = [[3, 3, 2], [4, 3, 4, 3, 2]]  # <unk> among them
    collate = transformers.DataCollatorForSeq2Seq(tokenizer, model=model)
    batch = collate([{"input_ids": row, "labels": row} for row in rows])
    assert batch["labels"].tolist() == [[3, 3, 2, -100, -100], rows[1]]
    assert batch["decoder_input_ids"].tolist()[0][:3] == [model.config.decoder_start_token_id, 3, 3]
    assert tokenizer("a b", "c")["input_ids"][-2:] == [3, 2]


@pytest.mark.long
def test_what_it_cannot_export_is_refused(data, tmp_path):
    for text, said in (
        ("--linear-attention decoder --source-in-front", "--source-in-front"),
        ("--decoder-attentions 2", "--decoder-attentions"),
        ("--ffn-sparsity 4", "--ffn-sparsity"),
        ("--no-cross-attention --linear-attention decoder", "--no-cross-attention"),
    ):
        _, _, state = made(text, data / "apart")
        with pytest.raises(ValueError, match=f"CHECKPOINT was trained with {said}, which fw-export-hf does not have"):
            export(save(state, tmp_path), tmp_path / "out", data=data / "apart")
    _, _, state = made("", data / "apart")
    with pytest.raises(ValueError, match="--tokenizer is for a CHECKPOINT that fw-convert made of a GPT-2"):
        export(save(state, tmp_path), tmp_path / "out", data=data / "apart", tokenizer=tmp_path)
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_force_replaces_an_earlier_export_and_nothing_else(data, tmp_path):
    _, _, state = made("", data / "apart")
    checkpoint, out = save(state, tmp_path), tmp_path / "out"
    for force in (False, True):
        export(checkpoint, out, data=data / "apart", force=force)
    (out / "target" / "notes").write_text("kept")
    with pytest.raises(ValueError, match=r"OUTPUT .* has target, which fw-export-hf did not write and --force would delete"):
        export(checkpoint, out, data=data / "apart", force=True)
    assert (out / "target" / "notes").read_text() == "kept"


def test_arguments_that_cannot_be_obeyed_are_refused(both):
    *_, model = both
    tokens = sources(5)
    for arguments, said in (
        ({}, "forward takes either decoder_input_ids or decoder_inputs_embeds"),
        ({"labels": tokens, "output_attentions": True}, "forward takes no output_attentions"),
        ({"labels": tokens, "head_mask": torch.ones(1)}, "forward takes no head_mask; leave it out"),
    ):
        with pytest.raises(ValueError, match=said):
            model(**given(tokens), **arguments)
    for arguments, said in (
        ({}, "forward takes either input_ids or inputs_embeds"),
        (given(tokens) | {"inputs_embeds": torch.zeros(1, 5, 32)}, "forward takes either input_ids or inputs_embeds"),
        (given(tokens) | {"output_attentions": True}, "forward takes no output_attentions"),
    ):
        with pytest.raises(ValueError, match=said):
            model.encoder(**arguments)
    with pytest.raises(ValueError, match="new_num_tokens is 99; a translation model keeps its vocabularies"):
        model.resize_token_embeddings(99)


@torch.no_grad()
def test_other_embeddings_of_the_source(both):
    """They are those of the target, too, where the model has one table for both."""
    *_, model = both
    for tied in (False, True):
        copied, other = copy.deepcopy(model), torch.nn.Embedding(SOURCE, 32)
        copied.config.tie_word_embeddings, before = tied, copied.decoder.embed_tokens
        copied.set_input_embeddings(other)
        assert copied.get_input_embeddings() is copied.encoder.embed_tokens is other
        assert copied.decoder.embed_tokens is (other if tied else before)


@torch.no_grad()
def test_what_it_computes_on_its_way_and_from_what(both):
    *_, model = both
    tokens, target = sources(5, 3), torch.tensor([[EOS, 5, 6], [EOS, 7, 8]])
    plain = model(**given(tokens), decoder_input_ids=target)
    assert plain.decoder_hidden_states is plain.encoder_hidden_states is None and plain.past_key_values is not None
    shown = model(**given(tokens), decoder_input_ids=target, output_hidden_states=True, use_cache=False)
    assert len(shown.decoder_hidden_states) == len(shown.encoder_hidden_states) == 3 and shown.past_key_values is None
    assert shown.encoder_hidden_states[-1].equal(shown.encoder_last_hidden_state)
    assert model.decoder.scores(shown.decoder_hidden_states[-1]).equal(plain.logits)
    as_tuple = model(**given(tokens), decoder_input_ids=target, return_dict=False)
    assert isinstance(as_tuple, tuple) and as_tuple[0].equal(plain.logits)
    assert isinstance(model.encoder(**given(tokens), return_dict=False), tuple)
    sides = {"inputs_embeds": model.encoder.embed_tokens(tokens), "decoder_inputs_embeds": model.decoder.embed_tokens(target)}
    assert model(attention_mask=given(tokens)["attention_mask"], **sides).logits.equal(plain.logits)
    assert model.resize_token_embeddings(SOURCE) is model.resize_token_embeddings() is model.encoder.embed_tokens
    assert not model.accepts_loss_kwargs
