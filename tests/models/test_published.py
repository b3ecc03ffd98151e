"""The models of publications: switches that an architecture turns on and off, windows, and the layer of additive attention."""

from __future__ import annotations

import pytest
import torch
from fairseq import models as registered
from fairseq import options as fairseq_options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.modules.fairseq_dropout import FairseqDropout
from support.definitions import by_the_equations
from support.language_models import build, draw, make_task, options_of
from torch.nn.functional import layer_norm, relu

import fw_fairseq.models  # noqa: F401
from fw_fairseq.config import FastWeightConfig
from fw_fairseq.mixers.pooled import layer_window
from fw_fairseq.modules import Streams
from fw_fairseq.tasks.stateful_language_modeling import StatefulLanguageModelingConfig, StatefulLanguageModelingTask
from fw_fairseq.tools.export_hf.language_models import build as export

pytestmark = pytest.mark.quick


def command_line(task: str, arch: str, *options):
    """The model's options as fairseq-train reads them."""
    parser = fairseq_options.get_training_parser(task)
    args = fairseq_options.parse_args_and_arch(parser, ["data", "--task", task, "--arch", arch, *options])
    return convert_namespace_to_omegaconf(args).model


@pytest.mark.long
def test_switches_turn_on_and_off():
    off = ["--no-scale-output", "--no-decoder-learned-pos", "--scale-embedding", "--no-share-decoder-input-output-embed"]
    given = command_line("language_modeling", "additive_lm", *off, "--no-srupp-rescale", "--sru-rescale", "--no-attention-norm")
    assert not given.scale_output and not given.decoder_learned_pos and not given.share_decoder_input_output_embed
    assert not given.no_scale_embedding and not given.srupp_rescale and given.sru_rescale and not given.attention_norm
    default = command_line("language_modeling", "additive_lm")
    assert default.scale_output and default.decoder_learned_pos and default.no_scale_embedding and default.srupp_rescale
    assert not command_line("language_modeling", "leap_lm_published").scale_output
    assert command_line("language_modeling", "leap_lm_published", "--scale-output").scale_output
    translation = command_line("translation", "fast_weight_transformer_iwslt_de_en", "--no-sru-input-bias", "--attention-norm")
    assert not translation.sru_input_bias and translation.attention_norm


def test_windows_of_leap():
    config = FastWeightConfig(window_sizes="leap")
    assert [layer_window(config, layer, 9) for layer in range(9)] == [0, 4, 8, 16, 0, 4, 8, 16, 0]


def windows(task=None, **options) -> list[int]:
    model = build(task, mixer="additive", window_sizes="63,64", max_target_positions=64, **options)
    return [layer.self_attn.mixer.window for layer in model.decoder.layers]


def test_a_window_of_all_positions_is_all_of_the_past():
    """Learned positions limit the text, unless states carry over; then a window means what it says."""
    task = StatefulLanguageModelingTask(StatefulLanguageModelingConfig(), make_task(40).source_dictionary)
    assert windows(decoder_learned_pos=True) == [63, 0]
    assert windows() == windows(task, decoder_learned_pos=True) == [63, 64]
    assert windows(decoder_learned_pos=True, no_token_positional_embeddings=True) == [63, 64]


def test_the_published_layer_of_additive_attention():
    """Its code: the residual connection takes the norm of the input, and q' k and p' v are added to it."""
    args = options_of("additive_lm_published", decoder_layers=1, max_target_positions=64, activation_fn="relu")
    model = registered.MODEL_REGISTRY["fast_weight_lm"].build_model(args, make_task(40)).double().eval()
    layer, inputs = model.decoder.layers[0], []
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    layer.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    features, _ = model(draw(2, 9), features_only=True)
    w = dict(layer.named_parameters())
    x = layer_norm(inputs[0], (128,), w["self_attn_layer_norm.weight"], w["self_attn_layer_norm.bias"])
    x = x + layer.self_attn.mixer(x)[0]
    inner = layer_norm(x, (128,), w["final_layer_norm.weight"], w["final_layer_norm.bias"])
    expected = x + relu(inner @ w["fc1.weight"].t() + w["fc1.bias"]) @ w["fc2.weight"].t() + w["fc2.bias"]
    torch.testing.assert_close(features, expected.transpose(0, 1))


def of_srupp(x, w):
    """A unit with attention to the 6 tokens before each, from x (T,B,C); w: its weights by name."""
    z = x @ w["down_proj.weight"].t()
    k, v = (z @ w["kv_proj.weight"].t()).chunk(2, -1)
    rows = []
    for t in range(len(z)):
        seen = slice(max(0, t - 6), t + 1)
        shares = ((k[seen] * z[t]).sum(-1) / z.shape[-1] ** 0.5).softmax(0)
        rows.append((shares[..., None] * v[seen]).sum(0))
    inner = layer_norm(z + w["alpha"] * torch.stack(rows), z.shape[-1:], w["norm.weight"], w["norm.bias"])
    return inner @ w["in_proj.weight"].t()


@pytest.mark.parametrize("mixer", ["sru", "srupp"])
def test_units_alone_are_the_whole_published_model(mixer):
    """Embeddings, units and output, and nothing between: training drops nothing there either. In streams and token by token."""
    options = {"units_alone": True, "sru_input_bias": False, "decoder_ffn_embed_dim": 0, "no_decoder_final_norm": True}
    options |= {"no_scale_embedding": True, "no_token_positional_embeddings": True, "decoder_normalize_before": True}
    options |= {"srupp_memory": 6, "srupp_rescale": False} if mixer == "srupp" else {"sru_rescale": False}
    model, tokens = build(mixer=mixer, decoder_layers=3, **options), draw(2, 11)
    w = {name.removeprefix("decoder."): x for name, x in model.named_parameters()}
    x = w["embed_tokens.weight"][tokens].transpose(0, 1)
    for layer in range(3):
        own = {name.split(".mixer.")[1]: part for name, part in w.items() if name.startswith(f"layers.{layer}.")}
        product = of_srupp(x, own) if mixer == "srupp" else x @ own["in_proj.weight"].t()
        product = product + torch.cat([torch.zeros(32), *own["gate_bias"]])
        x, _ = by_the_equations(product, x, *own["gate_weight"], torch.zeros(2, 32, dtype=torch.float64))
    want = (x @ w["output_projection.weight"].t()).transpose(0, 1)
    assert not [name for name in w if "norm" in name and ".mixer." not in name]
    torch.testing.assert_close(model(tokens)[0], want)
    streams, state = Streams(), {}
    parts = [model(part, streams=streams)[0] for part in tokens.split([4, 7], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), want)
    steps = [model(tokens[:, :end], incremental_state=state)[0] for end in range(5, 12)]
    torch.testing.assert_close(torch.cat(steps, 1), want)
    exported = export(model.decoder)
    torch.testing.assert_close(exported(tokens).logits, want.float(), rtol=1e-4, atol=1e-4)
    for module in model.modules():
        if isinstance(module, FairseqDropout):
            module.p = 0.5 if "DecoderLayer" in module.module_name else 0.0
    torch.testing.assert_close(model.train()(tokens)[0], want)


def test_the_lstm_with_a_fast_weight_memory_has_the_size_of_its_authors():
    """Of 180 words: embeddings, the LSTM, what writes and what reads, and the output, but for the bias of which they have none."""
    args = options_of("fwm_lstm_lm", max_target_positions=64)
    model = registered.MODEL_REGISTRY["fast_weight_lm"].build_model(args, make_task(180))
    of_lstm, of_memory = 4 * 256 * (2 * 256 + 1), 257 * (3 * 32 + 1) + 257 * 4 * 32 + 33 * 256
    assert sum(p.numel() for p in model.parameters()) == 2 * 180 * 256 + of_lstm + of_memory
    assert model.decoder.layer_norm is None and model.state_size() == 2 * 256 + 32**3
