"""fast_weight_lm in Python: every rule with every feature map, decoded, padded, streamed and checkpointed."""

from __future__ import annotations

import copy
import pickle
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq import models as registered
from support.language_models import ERASING, NON_NEGATIVE, assert_close, build, draw, every_map, make_task, options_of

import fw_fairseq.models  # noqa: F401
from fw_fairseq.config import FastWeightConfig, layer_mixers
from fw_fairseq.mixers import MIXERS, FastWeight
from fw_fairseq.mixers.pooled import layer_window
from fw_fairseq.models.fast_weight_decoder import counted_from
from fw_fairseq.modules import MixerAttention, Streams
from fw_fairseq.rules import RULES
from fw_fairseq.tools.bench.measure import state_bytes

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("one_thread")]

POOLED = [{}, {"window_sizes": "3"}, {"window_sizes": "0"}, {"pooling_form": "published"}]
OTHER_MIXERS = dict.fromkeys(("additive", "leap"), POOLED) | {
    "sru": [{}, {"sru_projection": 8, "sru_tanh": True}],
    "srupp": [{}, {"srupp_memory": 4, "srupp_heads": 2, "srupp_segment": 3}, {"decoder_ffn_embed_dim": 0}],
    "local_attention": [{"local_window": 4}],
    "transformer_xl": [{"xl_memory": 4}, {"xl_memory": 3, "xl_segment": 4}],
    "linformer": [{"slots": 3, "slot_positions": 6}],
    "abc": [{"slots": 3}],
    "gsa": [{"slots": 3}],
    "lstm": [{}],
    "fwm_lstm": [{"fwm_width": 4, "fwm_reads": 2, "units_alone": True, "decoder_ffn_embed_dim": 0}],
}


def combinations():
    """Every rule and feature map with the options that suit them, also with attention norm where defined; the other mixers."""
    for rule in RULES:
        for phi in every_map(rule):
            norm = "sum" if phi in NON_NEGATIVE else "l2" if rule in ERASING else "none"
            yield {"update_rule": rule, "feature_map": phi, "feature_norm": norm}
            if RULES[rule].normaliser and phi in NON_NEGATIVE:
                yield {"update_rule": rule, "feature_map": phi, "feature_norm": norm, "attention_norm": True}
                yield {"update_rule": rule, "feature_map": phi, "feature_norm": "none", "attention_norm": True}
    for name, kind in MIXERS.items():
        yield from ({"mixer": name} | more for more in OTHER_MIXERS.get(name, [{}] if kind is not FastWeight else []))


def label(options) -> str:
    return "-".join("normalised" if value is True else str(value) for value in options.values())


every_combination = pytest.mark.parametrize("options", list(combinations()), ids=label)


def logits(model, tokens, **keywords):
    return model(tokens, **keywords)[0]


def decode(model, tokens, start: int = 0, incremental_state=None):
    """The logits from token ``start`` on, taken one at a time."""
    state = {} if incremental_state is None else incremental_state
    steps = [logits(model, tokens[:, : t + 1], incremental_state=state) for t in range(start, tokens.shape[1])]
    return torch.cat(steps, 1)


@every_combination
def test_decoding_equals_the_full_pass(options):
    model, tokens = build(**options), draw(3, 12)
    expected = logits(model, tokens)
    assert_close(decode(model, tokens), expected)
    state = {}
    assert_close(logits(model, tokens[:, :7], incremental_state=state), expected[:, :7])
    assert_close(decode(model, tokens, 7, state), expected[:, 7:])


@every_combination
def test_the_state_does_not_grow(options):
    """Beyond the memory, that is: the first tokens are kept as its factors while they are smaller."""
    model, tokens, sizes = build(**options), draw(2, 20), {}
    state = {}
    for t in range(20):
        logits(model, tokens[:, : t + 1], incremental_state=state)
        sizes[t + 1] = state_bytes(state)
    assert 0 < sizes[1] <= sizes[5] <= sizes[10] == sizes[20]


@every_combination
def test_reordered_states_belong_to_the_reordered_sequences(options):
    model, tokens, state = build(**options), draw(3, 6), {}
    order, after = torch.tensor([2, 0, 0, 1]), draw(4, 3)
    decode(model, tokens, incremental_state=state)
    model.decoder.reorder_incremental_state_scripting(state, order)
    whole = torch.cat([tokens[order], after], 1)
    assert_close(decode(model, whole, 6, state), logits(model, whole)[:, 6:])


@every_combination
def test_no_token_reaches_an_earlier_one(options):
    model, tokens = build(**options), draw(2, 10)
    changed = tokens.clone()
    changed[:, 6] = (tokens[:, 6] - 4 + 1) % 36 + 4
    before, after = logits(model, tokens), logits(model, changed)
    assert_close(after[:, :6], before[:, :6])
    assert (after[:, 6:] - before[:, 6:]).abs().amax((0, 2)).min() > 1e-6


@every_combination
def test_padding_on_the_right_changes_nothing(options):
    model, tokens = build(**options), draw(2, 11)
    alone = logits(model, tokens[:1, :5])
    tokens[0, 5:] = model.decoder.padding_idx
    assert_close(logits(model, tokens)[:1, :5], alone)


@every_combination
def test_segments_of_a_stream_equal_the_whole(options):
    model, tokens, streams = build(no_token_positional_embeddings=True, **options), draw(2, 14), Streams()
    parts = [logits(model, part, streams=streams) for part in tokens.split([3, 1, 10], 1)]
    assert_close(torch.cat(parts, 1), logits(model, tokens))


@pytest.mark.parametrize("resets", [False, True])
def test_a_layer_that_is_left_out_keeps_its_memory(resets, monkeypatch):
    """Where texts end in segments it may be another text's, and starts empty."""
    model, streams = build(decoder_layerdrop=0.5, no_token_positional_embeddings=True).train(), Streams()
    mask = torch.zeros(2, 5, dtype=torch.bool) if resets else None
    drawn = torch.empty(2)
    monkeypatch.setattr(torch.Tensor, "uniform_", lambda x: x.copy_(drawn))
    for left_out in ([], [1], [], [0, 1]):
        before = streams.last()
        drawn.fill_(1)[left_out] = 0
        logits(model, draw(2, 5), streams=streams, reset_mask=mask)
        assert {*streams.last()} == {0, 1} - {*(left_out if resets else [])}
        assert all(torch.equal(streams.last()[i].memory, before[i].memory) for i in left_out if not resets)


def test_a_model_in_the_middle_of_a_stream_can_be_copied():
    """As --store-ema does after the first update; the copy reads no stream, nor does a pickled model."""
    model, tokens, streams = build(no_token_positional_embeddings=True).train(), draw(2, 9), Streams()
    for part in tokens.split(3, 1):
        logits(model, part, streams=streams).sum().backward()
    expected = logits(model.eval(), tokens)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_close(logits(again, tokens), expected)


def test_the_state_size_after_decoding():
    model, state = build(), {}
    before = model.state_size()
    logits(model, draw(2, 1), incremental_state=state)
    assert model.state_size() == before


@pytest.mark.slow
@every_combination
def test_activation_checkpointing_has_the_same_gradients(options):
    """Random features are drawn once for a forward and its backward."""
    gradients = {}
    for checkpointed in (False, True):
        torch.manual_seed(1)
        model = build(no_token_positional_embeddings=True, checkpoint_activations=checkpointed, **options).train()
        tokens, streams = draw(2, 9), Streams()
        logits(model, tokens).square().sum().backward()
        logits(model, tokens[:, :4], streams=streams)
        logits(model, tokens[:, 4:], streams=streams).square().sum().backward()
        gradients[checkpointed] = {name: p.grad for name, p in model.named_parameters()}
    for name, expected in gradients[False].items():
        assert expected.abs().max() > 0, name
        assert_close(gradients[True][name], expected)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every_combination
def test_half_precision_stays_near_the_exact_model(options, dtype):
    model, tokens = build(decoder_normalize_before=True, **options).float(), draw(2, 40)
    exact = logits(model, tokens).detach()
    rounded = logits(model.to(dtype), tokens)
    rounded.float().square().mean().backward()
    assert (rounded.float() - exact).abs().mean() < 0.05 * exact.abs().mean()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("phi", ["favor", "rfa"])
def test_random_features_stay_while_a_memory_is_carried(phi):
    model = build(update_rule="sum", feature_map=phi, feature_norm="none", no_token_positional_embeddings=True).train()
    tokens, streams = draw(2, 14), Streams()
    with torch.no_grad():
        assert not torch.allclose(logits(model, tokens), logits(model, tokens)), "drawn anew each time without"
        parts = [logits(model, part, streams=streams) for part in tokens.split([3, 11], 1)]
        assert_close(torch.cat(parts, 1), logits(model.eval(), tokens))


@pytest.mark.parametrize(
    "pattern", ["softmax,fast_weight", "fast_weight*2,softmax", "softmax", "additive,leap,softmax", "sru*3,srupp"]
)
def test_hybrids_decode_as_the_full_pass(pattern):
    """Token by token, and after a prompt that is read in one pass; hypotheses change places after it."""
    model, tokens, order = build(mixer_pattern=pattern, decoder_layers=4), draw(3, 12), torch.tensor([2, 0, 0, 1])
    expected = logits(model, tokens)
    assert_close(decode(model, tokens), expected, 1e-5)  # fairseq's softmax is fp32
    for prompt in (2, 7):
        state = {}
        assert_close(logits(model, tokens[:, :prompt], incremental_state=state), expected[:, :prompt], 1e-5)
        model.decoder.reorder_incremental_state_scripting(state, order)
        assert_close(decode(model, tokens[order], prompt, state), expected[order, prompt:], 1e-5)


@pytest.mark.parametrize("options", [{}, {"mixer_pattern": "softmax,fast_weight"}, {"share_decoder_input_output_embed": True}])
def test_a_model_is_built_once(options, monkeypatch):
    """Every parameter that is created is the model's, but for a weight that fairseq replaces by the shared one."""
    created = []
    create = torch.nn.Parameter.__new__
    monkeypatch.setattr(torch.nn.Parameter, "__new__", lambda *args, **kw: created.append(create(*args, **kw)) or created[-1])
    model = build(**options)
    kept = {id(p) for p in model.parameters()}
    assert [tuple(p.shape) for p in created if id(p) not in kept] == [(40, 32)] * options.get("share_decoder_input_output_embed", 0)


def test_layers_that_are_kept_keep_their_mixers():
    """As fairseq prunes a checkpoint: the parameters of layers 0, 2 and 3 are those of layers 0, 1 and 2."""
    whole = build(mixer_pattern="softmax,fast_weight,fast_weight,softmax", decoder_layers=4).state_dict()
    model_cfg = Namespace(arch="fast_weight_lm", encoder_layers_to_keep=None, decoder_layers_to_keep="0,3,2")
    pruned = build(mixer_pattern="softmax,fast_weight,fast_weight,softmax", decoder_layers=4, decoder_layers_to_keep="0,3,2")
    pruned.load_state_dict(checkpoint_utils.prune_state_dict(whole, model_cfg))
    kept = [isinstance(layer.self_attn, MixerAttention) for layer in pruned.decoder.layers]
    assert kept == [False, True, False]


@pytest.mark.parametrize("sizes, expected", [("", [4, 16, 0]), ("7,8,9,10", [7, 9, 10]), ("5", [5, 5, 5])])
def test_layers_that_are_kept_keep_their_windows(sizes, expected):
    layers = build(mixer="additive", window_sizes=sizes, decoder_layers=4, decoder_layers_to_keep="0,3,2").decoder.layers
    assert [layer.self_attn.mixer.window for layer in layers] == expected


def test_all_layers_may_be_kept():
    layers = build(mixer_pattern="softmax,fast_weight", decoder_layers=4, decoder_layers_to_keep="3,0,1,2").decoder.layers
    assert [isinstance(layer.self_attn, MixerAttention) for layer in layers] == [False, True] * 2


@pytest.mark.parametrize("kept", ["0,4", "0,0", "0,x"])
def test_layers_to_keep_must_be_there(kept):
    with pytest.raises(ValueError, match=f"--decoder-layers-to-keep is '{kept}'; it must have different numbers from 0 to 3"):
        build(decoder_layers=4, decoder_layers_to_keep=kept)


def shapes(arch: str, words: int, **given) -> dict:
    """Parameter shapes of an architecture at its full size, which takes no memory."""
    with torch.device("meta"):
        args = options_of(arch, tokens_per_sample=1024, **given)
        model = registered.MODEL_REGISTRY[registered.ARCH_MODEL_NAME_REGISTRY[arch]].build_model(args, make_task(words))
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def outside_attention(named_shapes: dict) -> dict:
    return {name: shape for name, shape in named_shapes.items() if ".self_attn." not in name}


def count(named_shapes: dict) -> int:
    return sum(torch.Size(shape).numel() for shape in named_shapes.values())


@pytest.mark.parametrize("arch, width", [("small", 128), ("medium", 256)])
def test_wiki103_architectures(arch, width):
    args = options_of(f"fast_weight_lm_wiki103_{arch}")
    assert (args.decoder_layers, args.decoder_attention_heads, args.decoder_ffn_embed_dim) == (16, 8, 2048)
    assert (args.decoder_embed_dim, args.decoder_input_dim, args.decoder_output_dim) == (width, width, width)
    built = shapes(f"fast_weight_lm_wiki103_{arch}", 267744)
    embeddings = [shape for shape in built.values() if max(shape) > 10000]
    assert sum(rows for rows, _ in embeddings) == 267744 and {columns for _, columns in embeddings} == {width}, "shared, one width"
    assert built["decoder.layers.15.fc1.weight"] == (2048, width) and "decoder.layers.16.fc1.weight" not in built


def test_baevski_auli_is_fairseqs_wiki103_outside_attention():
    ours, theirs = (shapes(arch, 267744) for arch in ("fast_weight_lm_baevski_auli", "transformer_lm_wiki103"))
    assert outside_attention(ours) == outside_attention(theirs)
    assert ours["decoder.layers.15.self_attn.mixer.out_proj.weight"] == (1024, 1024)


def test_gpt2_small_has_124_million_parameters():
    args = options_of("fast_weight_lm_gpt2_small")
    assert (args.decoder_layers, args.decoder_embed_dim, args.decoder_attention_heads) == (12, 768, 12)
    gates = 12 * (768 * 12 + 12)
    assert count(shapes("fast_weight_lm_gpt2_small", 50257)) - gates == 124_439_808 + 2 * 768  # fairseq's positions start at 2


def test_the_model_to_begin_with():
    """The rule that the pages recommend, whose memory may cross segments of any length."""
    args = options_of("fast_weight_lm_small")
    assert (args.update_rule, args.feature_map, args.feature_norm) == ("gated_delta", "identity", "l2")
    assert (args.decoder_layers, args.decoder_embed_dim, args.decoder_input_dim, args.decoder_output_dim) == (4, 256, 256, 256)
    built = shapes("fast_weight_lm_small", 1000)
    assert [name for name, shape in built.items() if 1000 in shape] == ["decoder.embed_tokens.weight"], "no positions, one table"
    assert options_of("fast_weight_lm_small", update_rule="delta", dropout=0.0).update_rule == "delta"


def test_additive_architectures():
    args = options_of("additive_lm")
    assert (args.decoder_layers, args.decoder_embed_dim, args.decoder_ffn_embed_dim, args.decoder_attention_heads) == (
        6,
        128,
        512,
        4,
    )
    assert args.decoder_normalize_before and args.decoder_learned_pos and args.share_decoder_input_output_embed
    assert [layer_window(FastWeightConfig(), layer, 6) for layer in range(6)] == [4, 8, 16, 32, 64, 0]
    additive, leap = (shapes(arch, 32100) for arch in ("additive_lm", "leap_lm"))
    published = shapes("additive_lm_published", 32100, max_target_positions=2048)
    theirs = 6 * (4 * 128**2 + 2 * 128 + 2 * 512 * 128 + 3 * 2 * 128) + (32100 + 2048) * 128 + 2 * 128 + 32100
    ours = theirs + 6 * (512 + 128) + 2 * 128 - 32100  # biases within, none at the end; fairseq's positions start at 2
    assert count(published) == ours and round(ours / 1e6, 1) == 5.6
    assert "decoder.layers.0.self_attn.mixer.out_proj.weight" not in shapes("leap_lm_published", 32100)
    assert additive["decoder.layers.0.self_attn.mixer.in_proj.weight"] == (3 * 128, 128)
    assert leap["decoder.layers.0.self_attn.mixer.in_proj.weight"] == (4 * 128, 128)
    gpt2 = options_of("additive_lm_gpt2_small")
    assert (gpt2.decoder_layers, gpt2.decoder_embed_dim, gpt2.decoder_attention_heads) == (12, 768, 12)


def test_srupp_architectures_are_near_their_published_sizes():
    assert count(shapes("srupp_lm_enwik8_base", 205)) == pytest.approx(108e6, rel=0.01)
    assert count(shapes("srupp_lm_wiki103_base", 267744)) == pytest.approx(148e6, rel=0.03)


def test_what_published_architectures_share():
    """SRU++ has no positions and reads normalised inputs; the medium Terraformer of Jaszczur et al. 2021 drops a tenth."""
    for name in ("srupp_lm_enwik8_base", "srupp_lm_wiki103_base"):
        args = options_of(name)
        assert args.no_token_positional_embeddings and args.decoder_normalize_before
        assert (args.decoder_layers, args.decoder_embed_dim, args.srupp_width) == (10, 3072, 768)
    args = options_of("terraformer_lm_medium")
    assert (args.decoder_layers, args.decoder_embed_dim, args.decoder_ffn_embed_dim) == (24, 1024, 6144)
    assert args.decoder_attention_heads == 16
    assert (args.ffn_sparsity, args.qkv_sparsity, args.output_sparsity, args.ffn_sru, args.dropout) == (64, 16, 4, 32, 0.1)
    assert args.reversible and args.no_token_positional_embeddings and args.decoder_normalize_before


BANDS = {"adaptive_softmax_cutoff": "20000,40000,200000", "adaptive_input_cutoff": "20000,40000,200000", "adaptive_input": True}
BANDS |= {"tie_adaptive_weights": True}


@pytest.mark.parametrize(
    "arch, sizes, others",
    [
        ("sru_lm", (6, 512, 2048, 1), {"mixer": "sru", "no_token_positional_embeddings": True, "decoder_normalize_before": True}),
        ("sru_lm", (6, 512, 2048, 1), {"share_decoder_input_output_embed": True}),
        ("fast_weight_lm", (4, 128, 512, 8), {"decoder_input_dim": 128, "decoder_output_dim": 128, "no_decoding_graph": False}),
        ("terraformer_lm", (4, 128, 512, 4), {"ffn_sparsity": 16, "qkv_sparsity": 4, "output_sparsity": 4, "dropout": 0.1}),
        ("additive_lm", (6, 128, 512, 4), {"dropout": 0.1, "activation_dropout": 0.1, "activation_fn": "gelu"}),
        ("leap_lm", (6, 128, 512, 4), {"mixer": "leap", "scale_output": True, "no_scale_embedding": True}),
        ("additive_lm_published", (6, 128, 512, 4), {"pooling_form": "published", "pooling_dropout": 0.1, "activation_dropout": 0}),
        ("additive_lm_published", (6, 128, 512, 4), {"layernorm_embedding": True, "no_decoder_final_norm": True}),
        ("leap_lm_published", (6, 128, 512, 4), {"pooling_form": "published", "pooling_dropout": 0.1, "activation_dropout": 0}),
        ("additive_lm_gpt2_small", (12, 768, 3072, 12), {"mixer": "additive", "no_scale_embedding": True, "scale_output": True}),
        ("fast_weight_lm_gpt2_small", (12, 768, 3072, 12), {"dropout": 0.1, "activation_fn": "gelu"}),
        ("fast_weight_lm_wiki103_small", (16, 128, 2048, 8), BANDS | {"adaptive_softmax_factor": 1, "dropout": 0.1}),
        ("fast_weight_lm_wiki103_medium_schlag", (16, 256, 2048, 8), {"scale_reads": True, "bias_free": True, "init_std": 0.02}),
        ("fast_weight_lm_wiki103_medium_schlag", (16, 256, 2048, 8), {"positions_from_end": True, "plain_adaptive_softmax": True}),
        (
            "fast_weight_lm_wiki103_small_schlag",
            (16, 128, 2048, 8),
            {"activation_dropout": 0.1, "output_dropout": 0.1, "dropout": 0.1},
        ),
        ("srupp_lm_wiki103_base", (10, 3072, 0, 1), BANDS | {"adaptive_softmax_factor": 4, "adaptive_input_factor": 4}),
        (
            "srupp_lm_wiki103_base",
            (10, 3072, 0, 1),
            {"tie_adaptive_proj": True, "decoder_input_dim": 1024, "decoder_output_dim": 1024},
        ),
        ("transformer_xl_lm", (16, 410, 2100, 10), BANDS | {"xl_memory": 150, "xl_segment": 150}),
    ],
)
def test_what_an_architecture_stands_for(arch, sizes, others):
    args = options_of(arch)
    found = args.decoder_layers, args.decoder_embed_dim, args.decoder_ffn_embed_dim, args.decoder_attention_heads
    assert found == sizes and {name: getattr(args, name) for name in others} == others


def test_an_option_of_another_mixer_is_left_alone():
    """An architecture's options are those of its mixer; with another one they would have no effect."""
    assert options_of("transformer_xl_lm", mixer="softmax").xl_memory != 150
    assert options_of("terraformer_lm", mixer="softmax").update_rule == options_of("fast_weight_lm").update_rule != "gated_delta"
    assert options_of("additive_lm", mixer_pattern="sru,additive").mixer == options_of("fast_weight_lm").mixer
    assert options_of("fast_weight_lm_baevski_auli").attention_dropout == 0
    assert options_of("fast_weight_lm_baevski_auli", mixer="softmax").attention_dropout == 0.1


@pytest.mark.parametrize(
    "options, refused",
    [
        ({"adaptive_softmax_cutoff": "10,40"}, None),
        ({"adaptive_softmax_cutoff": "10,41"}, "softmax"),
        ({"adaptive_input_cutoff": "10,41"}, None),
        ({"adaptive_input_cutoff": "10,40", "adaptive_input": True}, None),
        ({"adaptive_input_cutoff": "10,41", "adaptive_input": True}, "input"),
        ({"adaptive_softmax_cutoff": "20,10"}, "softmax"),
        ({"adaptive_input_cutoff": "10,10", "adaptive_input": True}, "input"),
    ],
)
def test_bands_follow_each_other_within_the_dictionary(options, refused):
    """It has 40 words. Bands of the input matter where it is adaptive."""
    if refused is None:
        assert build(**options)(draw(2, 5), features_only=True)[0].isfinite().all()
        return
    given = options[f"adaptive_{refused}_cutoff"]
    message = (
        f"^--adaptive-{refused}-cutoff is {given}, and the dictionary has 40 words; its numbers must grow, and be at most that$"
    )
    with pytest.raises(ValueError, match=message):
        build(**options)


def test_transformer_xl_is_near_its_published_size():
    args = options_of("transformer_xl_lm")
    assert (args.decoder_layers, args.decoder_embed_dim, args.decoder_attention_heads, args.xl_memory) == (16, 410, 10, 150)
    built = shapes("transformer_xl_lm", 267735)
    assert count(built) == pytest.approx(151e6, rel=0.01)
    assert built["decoder.layers.15.fc1.weight"] == (2100, 410) and not any("embed_positions" in name for name in built)


def test_scaled_output():
    tokens = draw(2, 5)
    torch.manual_seed(1)
    plain = build()
    torch.manual_seed(1)
    assert_close(logits(build(scale_output=True), tokens), logits(plain, tokens) / 32**0.5)


@pytest.mark.parametrize(
    "options, limit",
    [
        ({"no_token_positional_embeddings": True}, 1_000_000_000),
        ({}, 64),
        ({"no_token_positional_embeddings": True, "mixer_pattern": "fast_weight,softmax"}, 64),
    ],
)
def test_positions_and_softmax_limit_the_length(options, limit):
    """To the length of the training samples."""
    assert build(**options).max_positions() == limit


@pytest.mark.parametrize("sizes, expected", [("", [4, 8, 0]), ("5", [5, 5, 5]), ("1, 0,7", [1, 0, 7])])
def test_window_sizes(sizes, expected):
    config = FastWeightConfig(window_sizes=sizes)
    assert [layer_window(config, layer, 3) for layer in range(3)] == expected
    layers = build(mixer_pattern="additive,leap", window_sizes=sizes, decoder_layers=3).decoder.layers
    assert [layer.self_attn.mixer.window for layer in layers] == expected


@pytest.mark.parametrize(
    "sizes, message",
    [("4,x", "--window-sizes has 'x'; each part must be a number"), ("-4", "has '-4'"), ("4,8", "has 2 numbers but .* 3 layers")],
)
def test_refused_window_sizes(sizes, message):
    with pytest.raises(ValueError, match=message):
        layer_window(FastWeightConfig(window_sizes=sizes), 0, 3)


@pytest.mark.parametrize("arch", registered.ARCH_MODEL_INV_REGISTRY["fast_weight_lm"])
def test_architectures_run(arch):
    names = ("adaptive_input_cutoff", "adaptive_softmax_cutoff")
    cutoffs = {name: "20,30" for name in names if getattr(options_of(arch), name)}
    task = make_task(40)
    model = registered.MODEL_REGISTRY["fast_weight_lm"].build_model(options_of(arch, decoder_layers=2, **cutoffs), task).eval()
    tokens = draw(2, 5)
    chances = model.get_normalized_probs(model(tokens), log_probs=False)
    assert_close(chances.sum(-1), torch.ones(2, 5), 1e-5)


@pytest.mark.parametrize(
    "pattern, expected",
    [
        ("", ["fast_weight"] * 4),
        ("softmax", ["softmax"] * 4),
        ("softmax,fast_weight", ["softmax", "fast_weight"] * 2),
        ("softmax, fast_weight * 3", ["softmax"] + ["fast_weight"] * 3),
        ("softmax*2,fast_weight", ["softmax", "softmax", "fast_weight", "softmax"]),
    ],
)
def test_mixer_patterns(pattern, expected):
    assert layer_mixers(FastWeightConfig(mixer_pattern=pattern), 4) == expected
    mixers = [layer.self_attn for layer in build(mixer_pattern=pattern, decoder_layers=4).decoder.layers]
    assert ["fast_weight" if hasattr(mixer, "mixer") else "softmax" for mixer in mixers] == expected


@pytest.mark.parametrize(
    "pattern, message",
    [
        ("softmax,attention", "--mixer-pattern has 'attention'; each part must be NAME or NAME\\*COUNT, NAME one of: "),
        ("softmax*0", "has 'softmax\\*0'"),
        ("softmax,,fast_weight", "has ''"),
        ("softmax*-1", "has 'softmax\\*-1'"),
        ("softmax*2,fast_weight*3", "names 5 layers but the model has 4; name at most 4"),
    ],
)
def test_refused_mixer_patterns(pattern, message):
    with pytest.raises(ValueError, match=message):
        layer_mixers(FastWeightConfig(mixer_pattern=pattern), 4)


@pytest.mark.parametrize(
    "message, options",
    [
        ("--feature-norm sum needs a non-negative --feature-map, not tanh; use", {"feature_map": "tanh"}),
        (
            "--attention-norm is not defined for --update-rule decay; .* sum, gated, delta$",
            {"update_rule": "decay", "attention_norm": True},
        ),
        (
            "--attention-norm divides by sums of features, which identity lets vanish; use one of: elu, relu, dpfp, favor",
            {"feature_map": "identity", "attention_norm": True, "feature_norm": "none"},
        ),
        ("--update-rule delta diverges with keys longer than 1, as elu gives; use --feature-norm sum", {"feature_norm": "none"}),
        (
            "--update-rule gated_delta diverges .* as tanh gives; use --feature-norm l2",
            {"update_rule": "gated_delta", "feature_map": "tanh", "feature_norm": "none"},
        ),
    ],
)
def test_refused_combinations(message, options):
    with pytest.raises(ValueError, match=message):
        FastWeight(32, 4, FastWeightConfig(**options))


def test_refused_width():
    """Also by a model whose layers are all fairseq's."""
    for mixer in ("fast_weight", "softmax"):
        with pytest.raises(ValueError, match="--decoder-embed-dim is 30; it must be a multiple of --decoder-attention-heads, 4"):
            build(mixer=mixer, decoder_embed_dim=30)


@pytest.mark.parametrize("prescale", [False, True])
def test_favor_estimates_the_kernel_that_is_asked_for(prescale):
    mixer = FastWeight(16, 1, FastWeightConfig(feature_map="favor", favor_features=20000, favor_prescale=prescale))
    q, k = (torch.randn(1, 1, 1, 16) * 0.4 for _ in range(2))
    exponent = (q * k).sum() / (4 if prescale else 1)
    phi_q, phi_k = mixer.feature_map(q), mixer.feature_map(k)
    torch.testing.assert_close((phi_q * phi_k).sum(), exponent.exp(), rtol=0.05, atol=0)


@torch.no_grad()
def test_texts_longer_than_the_learned_positions_are_refused():
    """Padding counts for nothing."""
    model = build(tokens_per_sample=16, decoder_learned_pos=True)
    model(torch.cat([torch.ones(2, 3, dtype=torch.long), draw(2, 16)], 1))
    with pytest.raises(ValueError, match=r"^a text has 17 tokens, and the model has 16 learned positions; give shorter"):
        model(draw(2, 17))


@torch.no_grad()
@pytest.mark.parametrize("others", [1, 5])
def test_positions_after_other_tokens(others):
    """As a worker counts them that has a later part of each segment; without positions there is nothing to count."""
    model, tokens = build(tokens_per_sample=16), draw(2, 16)
    positions = model.decoder.embed_positions
    whole = positions(tokens)
    with counted_from(positions, others):
        assert positions(tokens[:, others:]).equal(whole[:, others:])
        with ThreadPoolExecutor(1) as another_thread:
            assert another_thread.submit(torch.no_grad()(positions), tokens).result().equal(whole)
    assert positions(tokens).equal(whole)
    assert_close(logits(model, tokens, streams=Streams()), logits(model, tokens))  # alone, a worker counts from the first
    with counted_from(None, 5):
        pass
