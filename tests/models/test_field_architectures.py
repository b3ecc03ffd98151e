"""Architectures of published recurrences: the parts that each has got later, and checkpoints from before."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq import models as registered
from support.checkpoints import save, save_format
from support.language_models import make_task, options_of

from fw_fairseq.config import FastWeightConfig, read_config
from fw_fairseq.mixers import FastWeight, Gsa
from fw_fairseq.models.field_architectures import DEFAULTS
from fw_fairseq.modules import Streams
from fw_fairseq.tasks.stateful_language_modeling import check_across_workers

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("one_thread")]
WORDS = 20
TINY = {f"decoder_{name}_dim": 8 for name in ("embed", "input", "output", "ffn_embed")}
TINY |= {"decoder_layers": 2, "decoder_attention_heads": 2}
CENTRED, ALL = {"output_norm_of": "centred_head"}, {"output_norm_of": "all_heads"}
KIMI = {"output_gate_form": "sigmoid", "output_gate_rank": 4}
SWIGLU = {"norm_form": "rms", "norm_eps": 1e-6, "ffn_form": "swiglu", "output_norm_eps": 1e-6}
LATER = {
    "rwkv6_lm": {"token_shift_rank": 32, "ffn_form": "rwkv6"} | CENTRED,
    "retnet_lm": {"rotary": True, "expand_values": 2.0, "scale_reads_of": "keys"} | SWIGLU,
    "rwkv7_lm": {"value_mixing_rank": 32, "output_norm_eps": 4e-5, "read_own_value": True, "projection_init": "rwkv7"}
    | {"output_gate_form": "of_sigmoid", "output_gate_rank": 128, "ffn_form": "rwkv7"}
    | CENTRED,
    "gla_lm": {"scale_reads_of": "keys"} | SWIGLU,
    "mamba2_lm": {"expand_values": 2.0, "short_conv_bias": True, "norm_after_gate": True, "norm_form": "rms"} | ALL,
    "hgrn2_lm": SWIGLU | {"scale_reads": True, "output_norm_eps": 1e-5} | ALL,
    "kda_lm": KIMI | SWIGLU,
    "gdn2_lm": KIMI | SWIGLU,
    "delta_net_lm": SWIGLU,
    "gated_delta_lm": {"scale_reads_of": "keys"} | SWIGLU,
    "comba_lm": {"scale_reads_of": "keys"} | SWIGLU,
    "delta_product_lm": SWIGLU,
    "gated_delta_product_lm": SWIGLU,
}  # architecture: its later options
SIZES = {  # layers, width, heads, width of the feed-forward layers; of keys, where they have another than values; heads of keys
    "retnet_lm": (24, 1024, 4, 1536, 0, 0),
    "gla_lm": (24, 1024, 4, 2816, 128, 0),
    "mamba2_lm": (24, 768, 24, 0, 128, 1),
    "hgrn2_lm": (24, 1024, 8, 2816, 0, 0),
    "rwkv6_lm": (12, 768, 12, 2688, 0, 0),
    "rwkv7_lm": (12, 768, 12, 3072, 0, 0),
    "kda_lm": (24, 1024, 8, 2816, 0, 0),
    "gdn2_lm": (24, 1024, 8, 2816, 0, 0),
    "delta_net_lm": (24, 1024, 8, 2816, 0, 0),
    "gated_delta_lm": (21, 1024, 4, 2816, 192, 0),
    "comba_lm": (21, 1024, 4, 2816, 192, 0),
    "delta_product_lm": (24, 1024, 8, 2816, 0, 0),
    "gated_delta_product_lm": (24, 1024, 8, 2816, 0, 0),
}
PUBLISHED_SIZES = {  # parameters of one layer, without its feed-forward part, as the authors' code has them
    "retnet_lm": 8_389_120,
    "gla_lm": 4_219_648,
    "mamba2_lm": 3_764_552,
    "hgrn2_lm": 4_195_328 + 1024,  # and the bound, which theirs keeps for all layers together
    "rwkv6_lm": 3_300_864,
    "rwkv7_lm": 2_812_416,
    "kda_lm": 4_741_256,
    "gdn2_lm": 6_830_216,
    "delta_net_lm": 4_214_912,
    "gated_delta_lm": 6_312_328,
    "comba_lm": 6_312_336,
    "delta_product_lm": 7_377_024,
    "gated_delta_product_lm": 7_385_232,
}
PARTS = {  # those that are on, beside an output norm and no biases: the length of the convolution, the norm of keys, and switches
    "retnet_lm": (0, "none", {"output_gate", "scale_reads", "rotary"}),
    "gla_lm": (0, "none", {"output_gate", "scale_reads"}),
    "mamba2_lm": (4, "none", {"output_gate"}),
    "hgrn2_lm": (0, "none", {"scale_reads"}),
    "rwkv6_lm": (0, "none", {"output_gate", "token_shift"}),
    "rwkv7_lm": (0, "none", {"output_gate", "token_shift"}),
    "kda_lm": (4, "l2_eps", {"output_gate", "scale_reads"}),
    "gdn2_lm": (4, "l2_eps", {"output_gate", "scale_reads"}),
    "delta_net_lm": (4, "l2_eps", {"scale_reads"}),
    "gated_delta_lm": (4, "l2_eps", {"output_gate", "scale_reads", "exponential_decay"}),
    "comba_lm": (4, "l2_eps", {"output_gate", "scale_reads"}),
    "delta_product_lm": (4, "l2_eps", {"output_gate", "scale_reads", "negative_eigenvalues"}),
    "gated_delta_product_lm": (4, "l2_eps", {"output_gate", "scale_reads", "negative_eigenvalues"}),
}
SWITCHES = {"output_gate", "scale_reads", "rotary", "token_shift", "negative_eigenvalues", "attention_norm", "exponential_decay"}
RULES = {"delta_net_lm": "delta"}  # of architectures that have another name


def built(args: Namespace, arch: str) -> torch.nn.Module:
    """The model that fairseq makes of the options in a checkpoint, which name their architecture."""
    args._name = arch
    return registered.build_model(args, make_task(WORDS)).eval()


@pytest.mark.parametrize("arch", SIZES)
def test_published_sizes(arch):
    args = options_of(arch)
    sizes = (args.decoder_layers, args.decoder_embed_dim, args.decoder_attention_heads, args.decoder_ffn_embed_dim)
    assert (*sizes, args.feature_dim or 0, args.key_heads or 0) == SIZES[arch]
    assert args.update_rule == RULES.get(arch, arch[:-3]) and args.output_norm and args.bias_free
    assert args.decoder_normalize_before and args.no_scale_embedding
    assert args.layernorm_embedding == arch.startswith("rwkv")


@pytest.mark.parametrize("arch", PARTS)
def test_the_parts_of_published_layers(arch):
    args = options_of(arch)
    on = {name for name in SWITCHES if getattr(args, name)}
    assert (args.short_conv or 0, args.feature_norm, on) == PARTS[arch]
    assert args.feature_map == ("silu" if arch == "hgrn2_lm" else "identity")
    assert (args.token_shift_rank, args.value_mixing_rank) == {"rwkv6_lm": (32, 0), "rwkv7_lm": (0, 32)}.get(arch, (0, 0))
    assert args.activation_fn == "gelu" and args.no_token_positional_embeddings and args.share_decoder_input_output_embed


@pytest.mark.parametrize("arch", PUBLISHED_SIZES)
def test_layers_have_the_parameters_of_their_authors(arch):
    args = options_of(arch)
    config, layers = read_config(FastWeightConfig, args), args.decoder_layers
    mixer = FastWeight.of_layer(args.decoder_embed_dim, args.decoder_attention_heads, config, 1, layers)
    assert sum(x.numel() for x in mixer.parameters()) == PUBLISHED_SIZES[arch]


def test_gated_slot_attention_has_the_size_of_its_authors():
    args = options_of("gsa_lm")
    assert (args.decoder_layers, args.decoder_ffn_embed_dim, args.ffn_form, args.norm_form) == (24, 2816, "swiglu", "rms")
    mixer = Gsa(args.decoder_embed_dim, args.decoder_attention_heads, read_config(FastWeightConfig, args))
    assert sum(x.numel() for x in mixer.parameters()) == 4_457_472 and mixer.norm.eps == 1e-6
    assert mixer.state_size() == 4 * 2 * 64 * 256


@pytest.mark.parametrize("arch", PUBLISHED_SIZES)
def test_any_part_can_be_turned_off(arch):
    for part in ({"output_norm": False}, {"output_gate": False}, {"short_conv": 0}, {"scale_reads": False}, {"token_shift": False}):
        built(options_of(arch, **TINY, **part), arch)


def test_one_layer_has_no_other_whose_values_it_could_mix_in():
    assert options_of("rwkv7_lm", decoder_layers=1).value_mixing_rank == 0


@pytest.mark.parametrize("arch", LATER)
def test_later_parts_can_be_left_out(arch):
    assert LATER[arch].items() <= vars(options_of(arch, **TINY)).items()
    assert LATER[arch].items() <= vars(options_of(arch, **TINY, bias_free=True)).items()
    without = {name: DEFAULTS[name] for name in LATER[arch]}
    assert without.items() <= vars(options_of(arch, **TINY, **without)).items()


@pytest.mark.parametrize("arch", LATER)
@torch.no_grad()
def test_a_checkpoint_of_before_computes_as_before(arch):
    old = options_of(arch, **TINY, **{name: DEFAULTS[name] for name in LATER[arch]})
    torch.manual_seed(1)
    want = built(old, arch)
    for name in LATER[arch]:
        delattr(old, name)
    model, tokens = built(old, arch), torch.randint(4, WORDS, (2, 9))
    model.load_state_dict(want.state_dict())
    torch.testing.assert_close(model(tokens)[0], want(tokens)[0], atol=0, rtol=0)


@pytest.mark.parametrize("arch", PUBLISHED_SIZES)
@torch.no_grad()
def test_models_decode_token_by_token(arch):
    """As at once, with every part of the published layer; the start of a gate or projection at 0 would hide some."""
    torch.manual_seed(1)
    model, tokens = (
        built(options_of(arch, **TINY | {"feature_dim": 4} if arch == "gla_lm" else TINY), arch).double(),
        torch.randint(4, WORDS, (2, 9)),
    )
    for weight in model.parameters():
        if weight.eq(0).all() and weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.3)
    want, steps = model(tokens)[0], {}
    found = [model(tokens[:, : t + 1], incremental_state=steps)[0] for t in range(9)]
    torch.testing.assert_close(torch.cat(found, 1), want)


def drawn(arch: str) -> torch.nn.Module:
    """A model in float64 whose channel mixing is not 0, as it starts."""
    torch.manual_seed(1)
    model = built(options_of(arch, **TINY), arch).double()
    for weight in model.parameters():
        if weight.eq(0).all() and weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.3)
    return model


@pytest.mark.parametrize("arch", ["rwkv6_lm", "rwkv7_lm"])
@torch.no_grad()
def test_channel_mixing_keeps_the_last_token(arch):
    """Of a segment of a stream, whose texts do not see each other, and of a hypothesis that goes on as another."""
    model, tokens, streams, resets = drawn(arch), torch.randint(4, WORDS, (2, 9)), Streams(), torch.zeros(2, 9, dtype=torch.bool)
    resets[0, 6] = True
    want = model(tokens)[0]
    segments = [model(tokens[:, part], streams=streams, reset_mask=resets[:, part])[0] for part in (slice(4), slice(4, 9))]
    found = torch.cat(segments, 1)
    torch.testing.assert_close(found[1], want[1])
    torch.testing.assert_close(found[0, :6], want[0, :6])
    torch.testing.assert_close(found[0, 6:], model(tokens[:1, 6:])[0][0])
    swapped, steps = torch.cat([tokens.flip(0)[:, :5], tokens[:, 5:]], 1), {}
    model(tokens[:, :4], incremental_state=steps)
    model(tokens[:, :5], incremental_state=steps)
    model.decoder.reorder_incremental_state_scripting(steps, torch.tensor([1, 0]))
    found = [model(swapped[:, : end + 1], incremental_state=steps)[0] for end in range(5, 9)]
    torch.testing.assert_close(torch.cat(found, 1), model(swapped)[0][:, 5:])


def test_channel_mixing_is_not_for_several_workers():
    args = options_of("gla_lm", **TINY, ffn_form="rwkv7")
    with pytest.raises(ValueError, match=r"^--sequence-parallel: the channel mixing of --ffn-form needs the last token of "):
        check_across_workers(built(args, "gla_lm"))


def test_feed_forward_layers_that_do_not_go_together():
    for other, said in (({"ffn_sparsity": 2}, "--ffn-sparsity"), ({"decoder_ffn_embed_dim": 0}, "--decoder-ffn-embed-dim 0")):
        with pytest.raises(ValueError, match=rf"^--ffn-form swiglu does not work with {said}; leave one of them out$"):
            built(options_of("gla_lm", **TINY | {"ffn_form": "swiglu"} | other), "gla_lm")
        built(options_of("gla_lm", **TINY | other), "gla_lm")  # it is not the architecture's choice then
    with pytest.raises(
        ValueError, match=r"^--scale-fc is for feed-forward layers without channel mixing, and --ffn-form is rwkv7$"
    ):
        built(options_of("rwkv7_lm", **TINY, scale_fc=True), "rwkv7_lm")


@torch.no_grad()
def test_heads_may_have_any_width():
    """Gated DeltaNet of width 2048 has 6 heads."""
    sizes = TINY | {"decoder_attention_heads": 3, "feature_dim": 2, "expand_values": 1.5}
    model, tokens, steps = (
        built(options_of("gated_delta_lm", **sizes), "gated_delta_lm").double(),
        torch.randint(4, WORDS, (2, 6)),
        {},
    )
    assert model.decoder.layers[0].self_attn.mixer.out_proj.in_features == 12
    found = [model(tokens[:, : t + 1], incremental_state=steps)[0] for t in range(6)]
    torch.testing.assert_close(torch.cat(found, 1), model(tokens)[0])
    with pytest.raises(ValueError, match=r"^--decoder-embed-dim is 8; it must be a multiple of --decoder-attention-heads, 3$"):
        built(options_of("delta_net_lm", **TINY | {"decoder_attention_heads": 3}), "delta_net_lm")


def test_models_of_translation_say_where_their_reads_are_scaled(tmp_path):
    """Their checkpoints lack options that were not given. Those of new models have this one, and it is added to older ones."""
    sizes = {f"{side}_{name}": 8 for side in ("encoder", "decoder") for name in ("embed_dim", "ffn_embed_dim", "attention_heads")}
    given = Namespace(arch="fast_weight_transformer", scale_reads=True, output_norm=True, **sizes)
    old = save(save_format({}, cfg={"model": Namespace(**vars(given)), "task": {}}), tmp_path)
    assert checkpoint_utils.load_checkpoint_to_cpu(str(old))["cfg"]["model"].scale_after_norm is True
    registered.build_model(given, make_task(WORDS))
    assert given.scale_after_norm is False
