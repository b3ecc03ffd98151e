"""The models of publications: switches that an architecture turns on and off, windows, and the layer of additive attention."""

from __future__ import annotations

import pytest
import torch
from fairseq import models as registered
from fairseq import options as fairseq_options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from support.language_models import build, draw, make_task, options_of
from torch.nn.functional import layer_norm, relu

import fw_fairseq.models  # noqa: F401
from fw_fairseq.config import FastWeightConfig
from fw_fairseq.mixers.pooled import layer_window
from fw_fairseq.tasks.stateful_language_modeling import StatefulLanguageModelingConfig, StatefulLanguageModelingTask

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
