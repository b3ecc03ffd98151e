"""fast_weight_transformer in Python: every subset of linear attentions and every feature map, padded, decoded and reordered."""

from __future__ import annotations

import copy
from argparse import Namespace
from itertools import chain, combinations

import pytest
import torch
from fairseq import models as registered
from fairseq import options
from fairseq.modules import MultiheadAttention
from fairseq.modules.transformer_layer import TransformerEncoderLayerBase
from fairseq.sequence_generator import SequenceGenerator
from omegaconf import OmegaConf
from support.draws import PLAIN
from support.language_models import ERASING, NON_NEGATIVE, assert_close, make_task

from fw_fairseq.config import ATTENTIONS, FastWeightTransformerConfig, linear_attentions
from fw_fairseq.feature_maps import FEATURE_MAPS
from fw_fairseq.mixers.parts.source import Source
from fw_fairseq.models.fast_weight_transformer import TranslationDecoder
from fw_fairseq.models.generation import GENERATION, Generation
from fw_fairseq.modules import LinearAttention
from fw_fairseq.modules.sparse.reversible import joined
from fw_fairseq.ops import native
from fw_fairseq.tools.bench.measure import state_bytes

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("one_thread")]

SMALL = {
    "encoder_layers": 2, "decoder_layers": 2, "encoder_embed_dim": 32, "decoder_embed_dim": 32, "encoder_ffn_embed_dim": 48,
    "decoder_ffn_embed_dim": 48, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "dropout": 0.0,
}  # fmt: skip
SUBSETS = [",".join(subset) for subset in chain.from_iterable(combinations(ATTENTIONS, size) for size in range(4))]
NORM = {phi: "sum" if phi in NON_NEGATIVE else "l2" for phi in FEATURE_MAPS}

every_subset = pytest.mark.parametrize("subset", SUBSETS)
every_map = pytest.mark.parametrize("phi", FEATURE_MAPS)


def build(subset="encoder,decoder,cross", words=40, arch="fast_weight_transformer", **options):
    args = Namespace(**{**SMALL, "linear_attention": subset, **options})
    registered.ARCH_CONFIG_REGISTRY[arch](args)
    return registered.MODEL_REGISTRY["fast_weight_transformer"].build_model(args, make_task(words)).double().eval()


def draw(*lengths, pad_left=False):
    """Sentences of these lengths in one batch, padded with 1."""
    rows = [torch.cat([torch.randint(4, 40, (length - 1,)), torch.tensor([2])]) for length in lengths]
    padded = [torch.cat([torch.ones(max(lengths) - len(row), dtype=torch.long), row][:: 1 if pad_left else -1]) for row in rows]
    return torch.stack(padded)


def logits(model, source, target):
    return model(source, source.ne(1).sum(1), target)[0]


@torch.no_grad()
def decode(model, source, target, start=0, state=None, encoded=None):
    state = {} if state is None else state
    encoded = model.encoder(source) if encoded is None else encoded
    steps = [
        model.decoder(target[:, : t + 1], encoder_out=encoded, incremental_state=state)[0][:, -1:]
        for t in range(start, target.shape[1])
    ]
    return torch.cat(steps, 1)


def tolerance(subset) -> float:
    return 1e-9 if subset == "encoder,decoder,cross" else 1e-5  # fairseq's softmax is fp32


def assert_padding_changes_nothing(model, tolerance):
    source, target = draw(6), draw(5)
    alone = logits(model, source, target)
    for left in (True, False):
        batch, targets = draw(6, 17, pad_left=left), draw(5, 12)
        batch[0, batch[0] != 1], targets[0, :5] = source[0], target[0]
        assert_close(logits(model, batch, targets)[:1, :5], alone, tolerance)


@every_subset
def test_padding_of_source_and_target_changes_nothing(subset):
    assert_padding_changes_nothing(build(subset), tolerance(subset))


@pytest.mark.parametrize(
    "phi, norm", [(phi, norm) for phi in FEATURE_MAPS for norm in ("none", "sum", "l2") if norm != "sum" or phi in NON_NEGATIVE]
)
def test_padding_changes_nothing_with_any_feature_map(phi, norm):
    assert_padding_changes_nothing(build(feature_map=phi, feature_norm=norm, update_rule="sum"), 1e-9)


@every_subset
def test_decoding_equals_the_full_pass(subset):
    model, source, target = build(subset), draw(6, 9, 4), draw(7, 7, 7)
    assert_close(decode(model, source, target), logits(model, source, target), tolerance(subset))


@every_map
@pytest.mark.parametrize("rule", PLAIN)
def test_decoding_with_any_rule_and_feature_map(rule, phi, monkeypatch):
    """On the short way through the decoder, and on the general one."""
    norm = "none" if phi not in NON_NEGATIVE and rule not in ERASING else NORM[phi]
    model, source, target = build(update_rule=rule, feature_map=phi, feature_norm=norm), draw(6, 9), draw(5, 5)
    expected = logits(model, source, target)
    assert_close(decode(model, source, target, state=(state := {})), expected)
    assert state[GENERATION]
    monkeypatch.setattr(Generation, "fits", staticmethod(lambda decoder: False))
    assert_close(decode(model, source, target), expected)


@pytest.mark.parametrize("phi", ["elu", "identity", "favor"])
def test_decoding_without_a_compiler(phi, monkeypatch):
    monkeypatch.setattr(native, "library", lambda: None)
    model, source, target = build(feature_map=phi, feature_norm=NORM[phi], update_rule="delta"), draw(6, 9), draw(5, 5)
    assert_close(decode(model, source, target, state=(state := {})), logits(model, source, target))
    assert state[GENERATION]


@torch.no_grad()
def test_a_decoder_that_is_given_no_source_reads_its_tokens_alone(monkeypatch):
    model, target, state = build(), draw(5, 5), {}
    found = [model.decoder(target[:, : t + 1], incremental_state=state)[0] for t in range(5)]
    assert state[GENERATION]
    assert_close(torch.cat(found, 1), model.decoder(target)[0])


@pytest.mark.parametrize("order", [[0, 0, 1, 1, 2, 2], [1, 1, 2, 2], [2, 0, 1], [0, 2, 2, 1, 1], [1, 0, 2, 2]], ids=str)
@every_subset
def test_reordered_states_belong_to_the_reordered_hypotheses(subset, order):
    """Copied hypotheses, compacted batches, and sentences that change places."""
    if "cross" not in subset and len(order) == 3:
        pytest.skip("fairseq's cross attention takes it that a batch of one size stays in its order")
    model, source = build(subset), draw(6, 9, 4)
    before, after, order = draw(5, 5, 5), draw(*[3] * len(order)), torch.tensor(order)
    state, encoded = {}, model.encoder(source)
    decode(model, source, before, state=state, encoded=encoded)
    model.decoder.reorder_incremental_state_scripting(state, order)
    encoded = model.encoder.reorder_encoder_out(encoded, order)
    whole, sources = torch.cat([before[order], after], 1), source[order]
    assert_close(decode(model, None, whole, 5, state, encoded), logits(model, sources, whole)[:, 5:], tolerance(subset))


@every_subset
def test_a_copy_of_the_states_goes_on_by_itself(subset):
    model, source, target = build(subset), draw(6, 9, 4), draw(9, 9, 9)
    state, encoded = {}, model.encoder(source)
    decode(model, source, target[:, :5], state=state, encoded=encoded)
    other, changed = copy.deepcopy(state), torch.cat([target[:, :5], draw(4, 4, 4)], 1)
    for rows, states in (target, state), (changed, other):
        assert_close(decode(model, None, rows, 5, states, encoded), logits(model, source, rows)[:, 5:], tolerance(subset))


@every_subset
def test_beams_as_the_generator_orders_them(subset):
    """Three sentences with two hypotheses each; then one is done, and the others' hypotheses are copied."""
    model, source = build(subset), draw(6, 9, 4)
    state, first, second = {}, torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([1, 1, 5, 4])
    before, after = draw(*[4] * 6), draw(*[3] * 4)
    encoded = model.encoder.reorder_encoder_out(model.encoder(source), first)
    assert_close(decode(model, None, before, 0, state, encoded), logits(model, source[first], before), tolerance(subset))
    model.decoder.reorder_incremental_state_scripting(state, second)
    encoded = model.encoder.reorder_encoder_out(encoded, second)
    whole, sources = torch.cat([before[second], after], 1), source[first][second]
    assert_close(decode(model, None, whole, 4, state, encoded), logits(model, sources, whole)[:, 4:], tolerance(subset))


@pytest.mark.parametrize(
    "order, memories, beam",
    [
        ([2, 3, 0, 1], [1, 0], 2),
        ([0, 1, 0, 1, 2, 3], [0, 0, 1], 2),
        ([1, 1, 3, 2], [0, 1], 2),  # of the first two sentences of three
        ([0, 2, 1, 3], [0, 1, 0, 1], 1),
        ([5, 4, 1], [2, 2, 0], 1),
        ([4], [2], 1),
    ],
)
def test_hypotheses_of_one_sentence_share_its_memory(order, memories, beam):
    numbers = torch.arange(3.0)
    for normaliser in (numbers.view(3, 1, 1), None):
        source = Source(numbers.view(3, 1, 1, 1), normaliser, 2)
        assert source.index_select(torch.tensor([1, 0, 2, 2, 5, 4])) is source
        chosen = source.index_select(torch.tensor(order))
        assert chosen.memory.flatten().tolist() == memories and chosen.beam == beam
        assert (chosen.normaliser is None) if normaliser is None else chosen.normaliser.flatten().tolist() == memories


@torch.no_grad()
def generate(model, source, **options):
    task = make_task(40)
    generator = SequenceGenerator([model], task.target_dictionary, max_len_b=9, **options)
    sample = {"net_input": {"src_tokens": source, "src_lengths": source.ne(1).sum(1)}}
    return [
        [(hypothesis["tokens"].tolist(), float(hypothesis["score"])) for hypothesis in found]
        for found in generator._generate(sample)
    ]


@every_subset
def test_generated_sentences_have_the_scores_of_the_full_pass(subset):
    model, source = build(subset), draw(6, 9, 4, pad_left=True)
    for row, found in zip(source, generate(model, source, beam_size=3)):
        for tokens, score in found:
            target = torch.tensor([[2, *tokens[:-1]]])
            chances = logits(model, row[row != 1][None], target).log_softmax(-1)[0]
            expected = chances[range(len(tokens)), tokens].mean()
            assert score == pytest.approx(float(expected), abs=1e-4)


@every_subset
def test_a_batch_generates_what_each_sentence_generates_alone(subset):
    model, source = build(subset), draw(6, 9, 4, pad_left=True)
    together = generate(model, source, beam_size=3)
    for row, found in zip(source, together):
        [alone] = generate(model, row[row != 1][None], beam_size=3)
        assert [tokens for tokens, _ in alone] == [tokens for tokens, _ in found]


def kept(model, length) -> int:
    """Bytes kept for a sentence with 2 hypotheses after 5 steps: in the decoder's state and in the encoder's output."""
    order, state = torch.tensor([0, 0]), {}
    encoded = model.encoder.reorder_encoder_out(model.encoder(draw(length)), order)
    decode(model, None, draw(5, 5), 0, state, encoded)
    encoded = model.encoder.reorder_encoder_out(encoded, order)
    return state_bytes(encoded) + state_bytes(state)


def test_memory_of_decoding_does_not_depend_on_the_length_of_the_source():
    linear, softmax = build(), build("encoder,decoder")
    assert kept(linear, 4) == kept(linear, 300)
    assert kept(softmax, 4) < kept(softmax, 300)
    encoded, order = linear.encoder(draw(7)), torch.tensor([0, 0])
    for _ in range(2):
        encoded = linear.encoder.reorder_encoder_out(encoded, order)
    assert state_bytes(encoded) == 0  # after the first step


@pytest.mark.parametrize(
    "subset, options, reads",
    [("encoder,decoder,cross", {}, True), ("encoder,cross", {}, True), ("encoder,decoder", {}, False), ("", {}, False),
     ("decoder", {"source_in_front": True}, False)],
)  # fmt: skip
def test_which_decoders_read_several_tokens_in_one_pass(subset, options, reads):
    """fairseq's attention to the source does not, nor its self-attention by xformers, nor layers that begin with the source."""
    decoder = build(subset, **options).decoder
    assert decoder.reads_prompts is reads
    for attention in decoder.softmax:
        attention.use_xformers = True
    assert decoder.reads_prompts is (reads and not decoder.softmax)


@every_map
def test_linear_attention_is_the_quotient_of_sums(phi):
    """Against the definition with all weights written out."""
    config = FastWeightTransformerConfig(feature_map=phi, feature_norm="none", update_rule="sum")
    attention = LinearAttention(32, 4, config).double().eval()
    query, source = torch.randn(5, 2, 32).double(), torch.randn(7, 2, 32).double()
    mask = torch.zeros(2, 7, dtype=torch.bool)
    mask[0, 4:] = True
    q, k, v = (
        x.unflatten(-1, (4, -1)).permute(1, 2, 0, 3)
        for x in (attention.q_proj(query), *attention.kv_proj(source).split([32, 32], -1))
    )
    weights = attention.feature_map(q) @ attention.feature_map(k).mT
    weights = weights.masked_fill(mask[:, None, None], 0)
    if phi in NON_NEGATIVE:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-6)
    else:
        weights = weights / torch.tensor([4, 7])[:, None, None, None]
    expected = attention.out_proj((weights @ v).permute(2, 0, 1, 3).flatten(2))
    actual, _ = attention(query, source, key_padding_mask=mask)
    assert_close(actual, expected, 1e-3 if phi == "favor" else 1e-5)


def test_favor_with_large_exponents_stays_finite():
    """Features that would overflow or vanish in fp32."""
    config = FastWeightTransformerConfig(feature_map="favor", feature_norm="none")
    attention = LinearAttention(32, 4, config)
    source = (30 * torch.randn(7, 2, 32)).requires_grad_()
    y, _ = attention(source, source)
    y.square().sum().backward()
    assert y.isfinite().all() and y.abs().max() > 0 and source.grad.isfinite().all()


def test_linear_attention_starts_as_fairseqs_attention():
    """Uniform weights, those of queries, keys and values 1/sqrt(2) as large as xavier's, and no biases."""
    torch.manual_seed(0)
    own, theirs = LinearAttention(256, 4, FastWeightTransformerConfig()), MultiheadAttention(256, 4)
    keys, values = own.kv_proj.weight.split(own.sizes)
    pairs = [
        (own.q_proj.weight, theirs.q_proj),
        (keys, theirs.k_proj),
        (values, theirs.v_proj),
        (own.out_proj.weight, theirs.out_proj),
    ]
    for weight, projection in pairs:
        torch.testing.assert_close(weight.abs().max(), projection.weight.abs().max(), rtol=1e-3, atol=0)
        torch.testing.assert_close(weight.std(), projection.weight.std(), rtol=0.02, atol=0)
    assert not any(projection.bias.any() for projection in (own.q_proj, own.kv_proj, own.out_proj))


@pytest.mark.parametrize("subset", ATTENTIONS)
@pytest.mark.parametrize("phi", ["favor", "rfa"])
def test_random_features_are_drawn_for_each_forward_of_training(phi, subset):
    model, source, target = build(subset, feature_map=phi, feature_norm="none", update_rule="sum").train(), draw(6), draw(5)
    assert not torch.allclose(logits(model, source, target), logits(model, source, target))
    model.eval()
    assert_close(logits(model, source, target), logits(model, source, target))


@pytest.mark.parametrize("phi", ["dpfp", "favor"])
def test_activation_checkpointing_has_the_same_gradients(phi):
    gradients = []
    for checkpointed in (False, True):
        torch.manual_seed(1)
        model, calls = build(feature_map=phi, checkpoint_activations=checkpointed).train(), []
        for part in (model.encoder, model.decoder):
            part.layers[0].fc1.register_forward_hook(lambda module, inputs, output, part=part, calls=calls: calls.append(part))
        logits(model, draw(6, 9), draw(7, 4)).square().sum().backward()
        assert [calls.count(part) for part in (model.encoder, model.decoder)] == [1 + checkpointed] * 2, "again in the backward"
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, expected in gradients[0].items():
        assert expected.abs().max() > 0, name
        assert_close(gradients[1][name], expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every_map
def test_half_precision_stays_near_the_exact_model(phi, dtype):
    model = build(feature_map=phi, feature_norm=NORM[phi], encoder_normalize_before=True, decoder_normalize_before=True).float()
    source, target = draw(20, 31), draw(24, 24)
    exact = logits(model, source, target).detach()
    rounded = logits(model.to(dtype), source, target)
    rounded.float().square().mean().backward()
    assert (rounded.float() - exact).abs().mean() < 0.05 * exact.abs().mean()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_a_model_of_hydra_has_the_options_of_the_command_line():
    """fairseq-hydra-train gives a DictConfig, whose attributes vars() does not name."""
    options = {"linear_attention": "decoder", "update_rule": "decay", "feature_map": "tanh", "feature_norm": "l2"}
    args = Namespace(**SMALL, **options)
    registered.ARCH_CONFIG_REGISTRY["fast_weight_transformer"](args)
    config = OmegaConf.create({"_name": "fast_weight_transformer", **vars(args)})
    model = registered.MODEL_REGISTRY["fast_weight_transformer"].build_model(config, make_task(40))
    shapes, expected = ({name: p.shape for name, p in m.named_parameters()} for m in (model, build("decoder", **options)))
    assert shapes == expected and model.decoder.layers[0].self_attn.mixer.rule_name == "decay"


@every_subset
def test_linear_attentions_are_where_they_were_asked_for(subset):
    model, linear = build(subset), subset.split(",")
    attentions = {"encoder": model.encoder.layers[1].self_attn, "cross": model.decoder.layers[1].encoder_attn}
    assert {name: isinstance(attention, LinearAttention) for name, attention in attentions.items()} == {
        name: name in linear for name in attentions
    }
    assert hasattr(model.decoder.layers[1].self_attn, "mixer") == ("decoder" in linear)


def test_without_linear_attention_it_is_fairseqs_transformer():
    ours = build("")
    args = Namespace(**SMALL)
    registered.ARCH_CONFIG_REGISTRY["transformer"](args)
    theirs = registered.MODEL_REGISTRY["transformer"].build_model(args, make_task(40)).double().eval()
    theirs.load_state_dict(ours.state_dict())
    source, target = draw(6, 9, pad_left=True), draw(5, 7)
    assert logits(ours, source, target).equal(logits(theirs, source, target))
    for model in (ours, theirs):
        assert model.encoder(source, return_all_hiddens=True)["fc_results"] == [None, None]


@pytest.mark.parametrize(
    "arch, layers, width, ffn, heads",
    [("", 6, 512, 2048, 8), ("_iwslt_de_en", 6, 512, 1024, 4), ("_wmt_en_de_big", 6, 1024, 4096, 16)],
)
def test_architectures(arch, layers, width, ffn, heads):
    args = Namespace()
    registered.ARCH_CONFIG_REGISTRY[f"fast_weight_transformer{arch}"](args)
    for side in ("encoder", "decoder"):
        sizes = [getattr(args, f"{side}_{name}") for name in ("layers", "embed_dim", "ffn_embed_dim", "attention_heads")]
        assert sizes == [layers, width, ffn, heads]


def test_the_terraformer_of_jaszczur_et_al():
    """With gated_delta in the decoder alone."""
    args = Namespace()
    registered.ARCH_CONFIG_REGISTRY["terraformer"](args)
    assert (args.linear_attention, args.update_rule, args.decoder_attentions) == ("decoder", "gated_delta", 2)
    assert (args.ffn_sparsity, args.qkv_sparsity, args.output_sparsity, args.ffn_sru) == (64, 16, 4, 32)
    assert args.source_in_front and args.reversible and args.no_token_positional_embeddings
    assert args.encoder_normalize_before and args.decoder_normalize_before


@pytest.mark.parametrize("subset, dropout", [("encoder,decoder,cross", 0.0), ("encoder,cross", 0.1), ("", 0.1)])
def test_weights_of_softmax_attention_alone_are_dropped(subset, dropout):
    args = Namespace(linear_attention=subset)
    registered.ARCH_CONFIG_REGISTRY["fast_weight_transformer_wmt_en_de_big"](args)
    assert args.attention_dropout == dropout and args.dropout == 0.3


@pytest.mark.parametrize(
    "message, options",
    [
        (
            "--linear-attention has 'dec'; allowed, separated by commas: encoder, decoder, cross",
            {"linear_attention": "encoder,dec"},
        ),
        ("--cross-self-attention needs softmax attention in the decoder; leave", {"cross_self_attention": True}),
        ("--load-alignments needs the weights of softmax cross attention", {"load_alignments": True}),
        ("--feature-norm sum needs a non-negative --feature-map, not tanh", {"feature_map": "tanh"}),
        ("--encoder-embed-dim is 30; it must be a multiple of --encoder-attention-heads, 4", {"encoder_embed_dim": 30}),
    ],
)
def test_refused_options(message, options):
    with pytest.raises(ValueError, match=message):
        build(**{"subset": "encoder,decoder,cross", **options})


@pytest.mark.parametrize(
    "subset, option, owner",
    [
        ("encoder,decoder,cross", {"attention_dropout": 0.1}, "--mixer softmax or .*"),
        ("encoder,cross", {"update_rule": "sum"}, "decoder in --linear-attention"),
        ("encoder,cross", {"mixer": "sru"}, "decoder in --linear-attention"),
        ("encoder,decoder,cross", {"srupp_width": 8}, "--mixer srupp"),
        ("encoder,decoder", {"dpfp_nu": 2}, "--feature-map dpfp"),
        ("", {"feature_map": "dpfp"}, "decoder in --linear-attention"),
        ("", {"mixer_pattern": "sru"}, "decoder in --linear-attention"),
        ("decoder", {"mixer": "sru", "feature_norm": "none"}, "--mixer fast_weight"),
    ],
)
def test_options_without_effect_are_refused(subset, option, owner):
    name = [*option][-1].replace("_", "-")
    belongs = f"without {owner}" if owner else "in this model"
    given = {"linear_attention": subset, "decoder_layers": 2}
    with pytest.raises(ValueError, match=f"^--{name} has no effect {belongs}; leave it out$"):
        build(subset, **option).refuse_without_effect(Namespace(**given, **option))
    build(subset).refuse_without_effect(Namespace(**given))


def test_a_checkpoint_with_other_options_is_refused():
    other = build("encoder,decoder")
    with pytest.raises(
        ValueError, match=r"trained with other options: it and the model differ in .*encoder_attn.* and \d+ more; give"
    ):
        build().load_state_dict(other.state_dict())


def test_alignments_are_refused():
    model, source, target = build(), draw(6), draw(5)
    with pytest.raises(ValueError, match="alignment_layer and alignment_heads needs the weights of softmax"):
        model(source, source.ne(1).sum(1), target, alignment_layer=1)
    soft = build("encoder,decoder")
    _, extra = soft(source, source.ne(1).sum(1), target, alignment_layer=1)
    assert extra["attn"][0].shape == (1, 5, 6)


def test_options_of_generation(caplog):
    """Alignments need the weights of cross attention; a translation has no rounds whose history could be kept."""

    def prepare(model, **given):
        cfg = Namespace(generation=Namespace(**{"retain_iter_history": False, "retain_dropout_modules": None} | given))
        model.prepare_for_inference_(cfg)
        return cfg.generation.retain_iter_history, caplog.text.count("--retain-iter-history is for models that refine")

    for name, value in {"print_alignment": "hard", "replace_unk": ""}.items():
        with pytest.raises(ValueError, match=f"^--{name.replace('_', '-')} needs the weights of softmax cross attention"):
            prepare(build(), **{name: value})
        prepare(build("encoder,decoder"), **{name: value})
    model = build()
    assert prepare(model, retain_dropout=True) == (False, 0) and model.encoder.dropout_module.apply_during_inference
    assert prepare(build(), retain_iter_history=True) == (False, 1)


def test_a_source_that_was_let_go_is_missed():
    model, order = build(), torch.tensor([0, 0])
    encoded = model.encoder.reorder_encoder_out(model.encoder(draw(6)), order)
    encoded = model.encoder.reorder_encoder_out(encoded, order)
    with pytest.raises(ValueError, match="the source was let go after the first step of decoding"):
        decode(model, None, draw(3, 3), encoded=encoded)


@pytest.mark.parametrize("phi", ["elu", "tanh"])
def test_autocast_does_not_lower_the_accumulation(phi):
    """The same queries, keys and values in bfloat16, summed with and without it."""
    options = {"feature_map": phi, "feature_norm": "sum" if phi in NON_NEGATIVE else "none"}
    module = LinearAttention(32, 4, FastWeightTransformerConfig(**options)).eval()
    query, source = torch.randn(3, 2, 32), torch.randn(9, 2, 32)
    with torch.autocast("cpu", torch.bfloat16):
        state = module.summarise(source, None)
        read = module.read(query, state)
        projected = (module.q_proj(query), module.kv_proj(source))
    for linear, x in zip((module.q_proj, module.kv_proj), projected):
        linear.forward = lambda _, x=x: x
    want = module.summarise(source, None)
    torch.testing.assert_close(state.memory, want.memory)
    torch.testing.assert_close(read, module.read(query, want))


def test_names_with_spaces_and_none():
    assert linear_attentions(FastWeightTransformerConfig(linear_attention="cross, encoder")) == ["cross", "encoder"]
    assert linear_attentions(FastWeightTransformerConfig(linear_attention=" ")) == []


def test_decoder_layers_that_are_kept_keep_mixers_and_windows():
    kept = {"decoder_layers": 4, "decoder_layers_to_keep": "0,2,3", "mixer_pattern": "leap*2,additive*2"}
    layers = build(**kept).decoder.layers
    assert [type(layer.self_attn.mixer).__name__ for layer in layers] == ["Leap", "Additive", "Additive"]
    assert [layer.self_attn.mixer.window for layer in layers] == [4, 16, 0]


def test_layers_that_the_command_line_names_are_kept():
    words = "data --task translation --arch fast_weight_transformer --encoder-layers-to-keep 1,3,5 --decoder-layers-to-keep 0,1"
    args = options.parse_args_and_arch(options.get_training_parser(), words.split())
    model = registered.build_model(args, make_task(40))
    assert [len(side.layers) for side in (model.encoder, model.decoder)] == [3, 2]


def test_a_window_of_all_positions_is_all_of_the_past():
    """Learned positions limit a translation, and no state carries over to the next one."""
    positions = {"decoder_learned_pos": True, "max_target_positions": 64}
    layers = build("decoder", mixer="additive", window_sizes="63,64", **positions).decoder.layers
    assert [layer.self_attn.mixer.window for layer in layers] == [63, 0]


@pytest.mark.parametrize("given, looks", [({}, True), ({"no_encoder_attn": True}, False)])
def test_a_decoder_looks_at_a_source_unless_it_is_told_not_to(given, looks):
    """As fairseq's decoder, which other projects build themselves."""
    args = Namespace(**SMALL)
    registered.ARCH_CONFIG_REGISTRY["fast_weight_transformer"](args)
    decoder = TranslationDecoder(args, make_task(40).target_dictionary, torch.nn.Embedding(40, 32, 1), **given)
    assert [layer.encoder_attn is not None for layer in decoder.layers] == [looks] * 2


def test_an_encoder_layer_keeps_no_copies_of_its_weights(monkeypatch):
    """fairseq 0.12.2 makes them, as parameters that nothing reads."""
    make = TransformerEncoderLayerBase.__init__

    def with_copies(layer, *args, **options):
        make(layer, *args, **options)
        for part in ("in_proj", "out_proj", "fc1", "fc2"):
            for kind in ("weight", "bias"):
                layer.register_parameter(f"{part}_{kind}", torch.nn.Parameter(torch.ones(2)))

    expected = [name for name, _ in build().encoder.named_parameters()]
    monkeypatch.setattr(TransformerEncoderLayerBase, "__init__", with_copies)
    assert [name for name, _ in build().encoder.named_parameters()] == expected


SPARSE = {"ffn_sparsity": 4, "qkv_sparsity": 4, "output_sparsity": 3, "ffn_sru": 5}
FRONT = {"source_in_front": True}
BEFORE = {"encoder_normalize_before": True, "decoder_normalize_before": True}
NEW_MODELS = {
    "sparse": ("encoder,decoder,cross", SPARSE),
    "sparse softmax": ("", SPARSE),
    "reversible": ("decoder,cross", SPARSE | BEFORE | {"reversible": True}),
    "two attentions": ("decoder", {"decoder_attentions": 2}),
    "in front": ("decoder", FRONT),
    "in front, softmax": ("", FRONT),
    "in front, sparse softmax": ("", FRONT | {"qkv_sparsity": 4, "decoder_attentions": 2}),
    "terraformer": (
        "decoder",
        FRONT | SPARSE | BEFORE | {"reversible": True, "decoder_attentions": 2, "update_rule": "gated_delta"},
    ),
}
every_new_model = pytest.mark.parametrize("subset, options", NEW_MODELS.values(), ids=NEW_MODELS)


@every_new_model
@torch.no_grad()
def test_sparse_models_decode_as_they_read(subset, options):
    """With hypotheses that change places, and sources of several lengths, padded on either side."""
    model, source, target = build(subset, **options), draw(6, 9, 4, pad_left=True), draw(7, 7, 7)
    assert_close(decode(model, source, target), logits(model, source, target), 1e-5)
    assert_padding_changes_nothing(model, 1e-5)
    order, state, encoded = torch.tensor([0, 0, 1, 1, 2, 2]), {}, model.encoder(source)
    encoded = model.encoder.reorder_encoder_out(encoded, order)
    before = target[order, :4]
    decode(model, None, before, state=state, encoded=encoded)
    order = torch.tensor([1, 0, 3, 2, 5, 4])
    model.decoder.reorder_incremental_state_scripting(state, order)
    whole = torch.cat([before[order], draw(*[3] * 6)], 1)
    sources = source[torch.tensor([0, 0, 1, 1, 2, 2])]
    assert_close(decode(model, None, whole, 4, state, encoded), logits(model, sources, whole)[:, 4:], 1e-5)


@pytest.mark.parametrize("name", [name for name in NEW_MODELS if name.startswith("in front")])
@torch.no_grad()
def test_the_shortest_source_in_front(name):
    """Two tokens are read at first, the one word of the source and the first of the target."""
    subset, options = NEW_MODELS[name]
    model, source, target = build(subset, **options), draw(1, 1), draw(4, 4)
    assert_close(decode(model, source, target), logits(model, source, target), 1e-5)


@torch.no_grad()
def test_cross_attention_keeps_the_keys_of_a_source_once(monkeypatch):
    monkeypatch.setattr(Generation, "fits", staticmethod(lambda decoder: False))
    model, source, state = build("", ffn_sru=3), draw(6, 4), {}
    decode(model, source, draw(5, 5), state=state)
    for layer in model.decoder.layers:
        assert layer.encoder_attn._get_input_buffer(state)["prev_key"].shape == (2, 4, 6, 8)


@pytest.mark.parametrize("options", [{}, {"ffn_sru": 3}], ids=str)
@torch.no_grad()
def test_a_layer_returns_the_weights_of_every_head_if_it_is_asked_to(options):
    """Their mean otherwise, as fairseq's layer does."""
    layer, x, source = build("", **options).decoder.layers[0], torch.randn(5, 2, 32).double(), torch.randn(6, 2, 32).double()
    mean, every = (layer(x, source, **asked)[1] for asked in ({}, {"need_head_weights": True}))
    assert mean.shape == (2, 5, 6) and every.shape == (4, 2, 5, 6)
    assert_close(every.mean(0), mean)


@every_new_model
def test_sparse_models_train_all_their_parameters(subset, options):
    model = build(subset, **options).train()
    logits(model, draw(6, 9), draw(5, 7)).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@torch.no_grad()
def test_the_source_stands_in_front_of_the_target_without_padding_between():
    """The decoder's layers read each row's source and target as one sequence."""
    model, source, target = build("decoder", **FRONT, no_token_positional_embeddings=True), draw(4, 6), draw(5, 5)
    encoded = model.encoder(source)["encoder_out"][0]
    for row, length in enumerate((4, 6)):
        x = model.decoder.embed_tokens(target[row]) * model.decoder.embed_scale
        x = torch.cat([encoded[:length, row], x])[:, None]
        for layer in model.decoder.layers.children():
            x, *_ = layer(x)
        assert_close(model.decoder.output_layer(x[length:, 0]), logits(model, source, target)[row])


def test_words_keep_their_order_where_padding_goes_to_the_end():
    """Also many words."""
    source, x = torch.arange(60.0).view(30, 2, 1), torch.arange(100.0, 140).view(20, 2, 1)
    hidden, padding = torch.rand(2, 30) < 0.4, torch.arange(20).expand(2, -1) > 15
    both, masked, places = joined(source, x, hidden, padding)
    for row in range(2):
        words = [*source[~hidden[row], row, 0].tolist(), *x[~padding[row], row, 0].tolist()]
        assert both[: len(words), row, 0].tolist() == words
        assert masked[row].tolist() == [False] * len(words) + [True] * (50 - len(words))
    assert both.gather(0, places[..., None]).equal(x)


@torch.no_grad()
def test_a_source_in_front_may_have_no_mask():
    """fairseq's decoders take an empty list in its place, where no word is padding."""
    model, target = build("decoder", **FRONT), draw(5, 5)
    encoded = model.encoder(draw(6, 6))
    expected = model.decoder(target, encoder_out=encoded)[0]
    assert_close(model.decoder(target, encoder_out=encoded | {"encoder_padding_mask": []})[0], expected)


def test_the_terraformer_has_no_cross_attention_and_two_attentions():
    args = Namespace(encoder_layers=1, decoder_layers=2, encoder_embed_dim=64, decoder_embed_dim=64, encoder_ffn_embed_dim=128)
    registered.ARCH_CONFIG_REGISTRY["terraformer"](args)
    model = registered.MODEL_REGISTRY["fast_weight_transformer"].build_model(args, make_task(40))
    for layer in model.decoder.layers.children():
        assert layer.encoder_attn is None and len(layer.more_attention) == 1
    assert [attention.mixer.rule_name for attention in model.decoder.mixers] == ["gated_delta"] * 4
    assert sorted(attention.layer for attention in model.decoder.mixers) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "options, message",
    [
        (
            FRONT | {"no_cross_attention": True},
            "--source-in-front takes the place of cross attention; leave --no-cross-attention out",
        ),
        ({"ffn_sparsity": 5}, "--ffn-sparsity is 5; it must be at least 2 and divide 48"),
        ({"output_sparsity": 2, "share_all_embeddings": True}, "which --share-all-embeddings shares or cuts"),
        (
            {"reversible": True, "decoder_normalize_before": True},
            "--reversible has norms before the layers; add --encoder-normalize",
        ),
        (
            {"qkv_sparsity": 4, "encoder_attention_heads": 5},
            "--encoder-embed-dim is 32; it must be a multiple of --encoder-attention",
        ),
        (
            {"qkv_sparsity": 4, "decoder_attention_heads": 5},
            "--decoder-embed-dim is 32; it must be a multiple of --decoder-attention",
        ),
        ({"qkv_sparsity": 4, "cross_self_attention": True}, "--qkv-sparsity does not work with --cross-self-attention"),
    ],
)
def test_sparse_translation_models_that_cannot_work(options, message):
    with pytest.raises(ValueError, match=message):
        build("", **options)


def test_a_layer_with_more_parts_returns_the_weights_of_its_cross_attention():
    """As fairseq's layer does where nothing is differentiated: those of softmax attention to the words of the source."""
    torch.manual_seed(3)
    model, source, target = build("", ffn_sru=3), draw(6, 4), draw(5, 5)
    read = {}
    attention = model.decoder.layers[-1].encoder_attn
    attention.register_forward_hook(lambda _, args, kwargs, found: read.update(weights=found[1]), with_kwargs=True)
    with torch.no_grad():
        [weights] = model(source, source.ne(1).sum(1), target)[1]["attn"]
    assert weights.shape == (2, 5, 6)
    assert_close(weights, read["weights"].double().mean(0), 1e-6)
    assert (weights[1, :, source[1] == 1] == 0).all()
    assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]), 1e-6)  # fp32
    assert model(source, source.ne(1).sum(1), target)[1]["attn"] == [None] and read["weights"] is None


@pytest.mark.parametrize(
    "subset, mixer", [("decoder", "softmax"), ("decoder", "abc"), ("", "fast_weight"), ("encoder", "fast_weight")]
)
def test_a_terraformer_with_softmax_attention_or_another_mixer(subset, mixer):
    """The architecture chooses an update rule only for a decoder that has one."""
    sizes = {"encoder_embed_dim": 64, "decoder_embed_dim": 64, "encoder_ffn_embed_dim": 128, "decoder_ffn_embed_dim": 128}
    model = build(subset, arch="terraformer", mixer=mixer, **sizes)
    assert logits(model, draw(5, 3), draw(4, 4)).isfinite().all()
