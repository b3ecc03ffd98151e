"""What every mixer takes: any layout and type of its input, one token, no sequence at all, autocast around all of it, copies."""

from __future__ import annotations

import copy
import math
import pickle
from typing import NamedTuple

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from fw_fairseq.config import FastWeightConfig
from fw_fairseq.mixers import MIXERS
from fw_fairseq.mixers.parts.source import SourceMemory
from fw_fairseq.rules import RULES

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("one_thread")]
WIDTH, SIZES = 16, dict(local_window=4, xl_memory=4, srupp_memory=4, slots=3)
FAST_WEIGHTS = [dict(update_rule="decay", feature_norm="none"), dict(update_rule="gated_delta", feature_map="relu")]
CASES = [(name, {}) for name in MIXERS] + [("fast_weight", options) for options in FAST_WEIGHTS]


@pytest.fixture(params=CASES, ids=lambda case: "-".join(map(str, [case[0], *case[1].values()])))
def mixer(request):
    name, options = request.param
    return MIXERS[name].of_layer(WIDTH, 2, FastWeightConfig(mixer=name, **SIZES, **options), 0, 2)


def close(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)


def test_any_layout_and_no_gradients(mixer):
    x = torch.randn(3, WIDTH, 20).permute(2, 0, 1)
    y, _ = mixer(x)
    close(mixer(x.contiguous())[0], y)
    close(mixer(x[:, 1:2])[0], y[:, 1:2])
    with torch.inference_mode():
        close(mixer(x)[0], y)


@pytest.mark.parametrize("window", [0, 1, 2, 7])
@pytest.mark.parametrize("name", ["additive", "leap"])
def test_the_state_size_of_a_mixer_that_pools_is_that_of_its_state(name, window):
    mixer = MIXERS[name](WIDTH, 4, window=window)
    _, state = mixer(torch.randn(1, 1, WIDTH))
    assert mixer.state_size() == sum(part.numel() for part in state if part is not None)


def test_copies(mixer):
    x = torch.randn(9, 2, WIDTH)
    y, state = mixer(x)
    for again in (copy.deepcopy(mixer), pickle.loads(pickle.dumps(mixer))):
        close(again(x, pickle.loads(pickle.dumps(state)))[0], mixer(x, state)[0])
        close(again(x)[0], y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(mixer, dtype):
    x = torch.randn(20, 3, WIDTH)
    y, half = mixer(x)[0], copy.deepcopy(mixer).to(dtype)
    leaf = x.to(dtype).requires_grad_()
    first, state = half(leaf[:7])
    rest, _ = half(leaf[7:], state)
    torch.cat([first, rest]).float().sum().backward()
    assert rest.dtype == dtype and leaf.grad.isfinite().all()
    close(torch.cat([first, rest]), y, 0.1)


@pytest.mark.parametrize("kind", ["delta", "gated", "sum", "cross attention"])
def test_gradients_in_fp16_of_divisors_that_are_small(kind):
    """fp16 holds neither the small features of dpfp nor their gradients."""
    given = dict(feature_map="dpfp", feature_norm="none")
    if kind == "cross attention":
        half = SourceMemory(WIDTH, 4, FastWeightConfig(**given)).half()
    else:
        half = MIXERS["fast_weight"](WIDTH, 4, update_rule=kind, attention_norm=True, **given).half()
    x, weight, gradients = torch.randn(37, 2, WIDTH).half(), torch.randn(37, 2, WIDTH).double(), []
    for layer in (half, copy.deepcopy(half).double()):
        leaf = x.to(next(layer.parameters()).dtype).requires_grad_()
        y = layer.read(leaf, layer.summarise(leaf[:3], None)) if kind == "cross attention" else layer(leaf)[0]
        found = torch.autograd.grad((y.double() * weight).sum(), [leaf, *layer.parameters()], materialize_grads=True)
        gradients.append(torch.cat([gradient.double().flatten() for gradient in found]))
    assert (gradients[0] - gradients[1]).norm() < 0.02 * gradients[1].norm()


@pytest.mark.parametrize(
    "x, is_",
    [
        ([1.0], "a list"),
        (torch.zeros(3, 2, WIDTH - 4), rf"torch.float32 of shape \(3, 2, {WIDTH - 4}\)"),
        (torch.zeros(3, WIDTH), rf"torch.float32 of shape \(3, {WIDTH}\)"),
        (torch.zeros(3, 2, WIDTH, dtype=torch.int64), rf"torch.int64 of shape \(3, 2, {WIDTH}\)"),
    ],
)
def test_an_input_of_another_kind_is_refused(mixer, x, is_):
    must = rf"it must be a tensor of floating-point numbers \(T,B,C\) with C = {WIDTH}"
    with pytest.raises(ValueError, match=f"^x is {is_}; {must}$"):
        mixer(x)


def test_a_state_of_another_kind_is_refused(mixer):
    class Other(NamedTuple):
        memory: torch.Tensor

    for state in (torch.zeros(2, WIDTH), Other(torch.zeros(2, WIDTH))):
        must = f"it must be None or the {mixer.state_type.__name__} that an earlier call returned"
        with pytest.raises(ValueError, match=f"^state is a {type(state).__name__}; {must}$"):
            mixer(torch.zeros(3, 2, WIDTH), state)


@pytest.mark.parametrize("name", MIXERS)
def test_a_mixer_on_the_meta_device_has_the_shapes_of_its_results(name):
    with torch.device("meta"):
        y, state = MIXERS[name](WIDTH, 2)(torch.zeros(9, 2, WIDTH))
    assert y.shape == (9, 2, WIDTH) and y.is_meta and len(next(part for part in state if part is not None)) == 2


def test_autocast_around_forward_and_backward(mixer):
    x = torch.randn(20, 3, WIDTH)
    y, _ = mixer(x)
    expected = torch.autograd.grad(y.sum(), mixer.in_proj.weight)[0]
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = mixer(x)
        close(torch.autograd.grad(y.sum(), mixer.in_proj.weight)[0], expected, 0.03 * expected.abs().max().item())


@pytest.mark.parametrize("rule", sorted(RULES))
def test_the_names_of_statistics_are_known_before_a_forward(rule):
    """All workers log the same names, also for a layer that was left out."""
    norm = "sum" if RULES[rule].erases else "none"
    mixer = MIXERS["fast_weight"].of_layer(WIDTH, 2, FastWeightConfig(update_rule=rule, feature_norm=norm), 0, 2).train()
    names = list(mixer.statistics())
    mixer.watch(keeps_state_norm=False)
    mixer(torch.randn(5, 2, WIDTH))
    assert names and list(mixer.statistics()) == names and all(value.isfinite() for value in mixer.statistics().values())


@pytest.mark.parametrize("rule", ["delta", "sum"])
def test_statistics_are_those_of_a_training_forward_that_was_watched(rule):
    mixer, x = MIXERS["fast_weight"](WIDTH, 2, update_rule=rule), torch.randn(5, 3, WIDTH)
    mixer.train()(x)
    assert {*mixer.statistics().values()} == {None} and mixer.take_state_norm() is None
    mixer.watch(keeps_state_norm=True)
    mixer.eval()(x)
    assert {*mixer.statistics().values()} == {None} and mixer.take_state_norm() is None
    _, state = mixer.train()(x)
    norm = state.memory.square().sum((2, 3)).sqrt().mean()
    found, kept = mixer.statistics(), mixer.take_state_norm()
    close(torch.stack([found["state_norm"], kept]), norm.detach().expand(2))
    assert kept.requires_grad and not found["state_norm"].requires_grad and mixer.take_state_norm() is None
    strength = mixer.operands(x).gates["beta"].mean() if rule == "delta" else torch.ones(())
    close(found["write_strength"], strength)
    mixer.watch(keeps_state_norm=False)
    mixer(x)
    assert found.keys() == mixer.statistics().keys() and mixer.take_state_norm() is None


@pytest.mark.parametrize("rule", sorted(RULES))
def test_statistics_are_means_over_the_tokens(rule):
    """Padding has gates too. A text of padding has a mean of 0, not NaN."""
    norm = "sum" if RULES[rule].erases else "none"
    mixer = MIXERS["fast_weight"].of_layer(WIDTH, 2, FastWeightConfig(update_rule=rule, feature_norm=norm), 0, 2).train()
    x, lengths = torch.randn(7, 3, WIDTH), (7, 2, 0)
    padding = torch.arange(7)[None] >= torch.tensor(lengths)[:, None]

    def measured(x, padding=None) -> dict:
        mixer.watch(keeps_state_norm=False)
        mixer(x, padding_mask=padding)
        return {name: value for name, value in mixer.statistics().items() if name != "state_norm"}

    alone = [measured(x[:length, row : row + 1]) for row, length in enumerate(lengths) if length]
    assert measured(x[:, 2:], padding[2:]).keys() == alone[0].keys()
    assert all(value.isfinite() for value in measured(x[:, 2:], padding[2:]).values())
    for name, value in measured(x, padding).items():
        close(value, (7 * alone[0][name] + 2 * alone[1][name]) / 9)


def test_random_features_are_new_unless_they_are_kept():
    mixer, x = MIXERS["fast_weight"](WIDTH, 2, feature_map="favor"), torch.randn(5, 3, WIDTH)
    expected, _ = mixer.eval()(x)
    mixer.train().redraw()
    assert not mixer(x)[0].allclose(expected, rtol=0.01)
    mixer.redraw(keep=True)
    close(mixer(x)[0], expected)


def test_a_row_of_padding_leaves_an_empty_state(mixer):
    x, padding = torch.randn(12, 3, WIDTH), torch.zeros(3, 12, dtype=torch.bool)
    padding[1] = True
    y, state = mixer(x, None, padding)
    y.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in mixer.parameters())
    whole, _ = mixer(x)
    close(y[:, ::2], whole[:, ::2])
    close(mixer(x[:, 1:2], state.index_select(torch.tensor([1])))[0], whole[:, 1:2])


def test_a_state_of_another_batch_is_refused(mixer):
    _, state = mixer(torch.randn(5, 2, WIDTH))
    with pytest.raises(ValueError, match="state"):
        mixer(torch.randn(5, 3, WIDTH), state)


def test_no_sequence_and_no_token(mixer):
    y, state = mixer(torch.randn(5, 0, WIDTH))
    y.sum().backward()
    assert y.shape == (5, 0, WIDTH) and next(s for s in state if s is not None).shape[0] == 0
    with pytest.raises(ValueError, match=r"T.* must be at least 1"):
        mixer(torch.randn(0, 3, WIDTH))


@pytest.mark.parametrize(
    "name, options",
    [
        ("fast_weight", {"update_rule": "gated", "feature_map": "favor", "feature_norm": "none", "attention_norm": True}),
        ("fast_weight", {"short_conv": 4, "token_shift": True}),
        ("fast_weight", {"feature_map": "identity", "feature_norm": "l2", "rotary": True}),
        ("local_attention", {"local_window": 4}),
        ("transformer_xl", {"xl_memory": 4}),
        ("srupp", {"srupp_memory": 4}),
    ],
    ids=str,
)
def test_no_sequence_and_no_token_with_other_options_and_padding(name, options):
    """The window is shorter than the text, which then runs in several blocks."""
    layer = MIXERS[name](WIDTH, 2, **options)
    assert layer(torch.randn(300, 0, WIDTH), padding_mask=torch.zeros(0, 300, dtype=torch.bool))[0].shape == (300, 0, WIDTH)
    with pytest.raises(ValueError, match=r"T.* must be at least 1"):
        layer(torch.randn(0, 3, WIDTH))


def test_token_shift_with_an_offloaded_projection_is_refused():
    """accelerate loads the weight for the projection itself alone."""
    layer, x = MIXERS["fast_weight"](WIDTH, 2, token_shift=True), torch.randn(3, 2, WIDTH)
    projected = layer.in_proj(x)
    layer.project = lambda x: projected
    layer.in_proj.to("meta")
    with pytest.raises(ValueError, match="in_proj is offloaded, and token shift reads its weight; name a device"):
        layer(x)


def test_an_offloaded_feature_map_is_refused():
    layer, x = MIXERS["fast_weight"](WIDTH, 2, feature_map="relu"), torch.randn(3, 2, WIDTH)
    layer.feature_map.to("meta")
    with pytest.raises(ValueError, match="feature_map is offloaded, and its layer reads its weight; name a device"):
        layer(x)


@pytest.mark.parametrize("mask", ["padding_mask", "reset_mask"])
@pytest.mark.parametrize("tanh", [False, True])
def test_a_mask_says_one_thing_of_each_token(mixer, mask, tanh):
    mixer.tanh = tanh  # SRU and SRU++ with a tanh have a way of their own
    x, right = torch.randn(4, 3, WIDTH), torch.zeros(3, 4, dtype=torch.bool)
    close(mixer(x, **{mask: right})[0], mixer(x)[0])
    for wrong in (right.t(), right[:1], right[:, :1], right[0], torch.zeros(3, 8, dtype=torch.bool), right.int(), right.float()):
        with pytest.raises(ValueError, match=rf"{mask} is .* must be a bool tensor of shape \(B,T\) = \(3, 4\)"):
            mixer(x, **{mask: wrong})


@pytest.mark.parametrize("name", ["fast_weight", "local_attention", "transformer_xl", "linformer", "abc"])
def test_projections_start_as_those_of_fairseqs_attention(name):
    """Uniform weights, those of queries, keys and values 1/sqrt(2) as large as xavier's, and no biases."""
    mixer, bound = MIXERS[name](256, 4), math.sqrt(6 / 512)
    starts = [(mixer.out_proj.weight, bound)]
    starts += [(weight, bound / math.sqrt(2)) for weight in mixer.in_proj.weight[: 3 * 256].split(256)]
    for weight, most in starts:
        assert 0.98 * most < weight.abs().max() <= most
        assert weight.std().item() == pytest.approx(most / math.sqrt(3), rel=0.02)
    assert not mixer.in_proj.bias[: 3 * 256].any() and not mixer.out_proj.bias.any()


@pytest.mark.parametrize("width", [2, 3, 8])
def test_decays_of_channels_start_uniformly(width):
    """From 1/n to 1 - 1/n, for n channels."""
    options = {"update_rule": "decay", "feature_map": "identity", "feature_norm": "none"}
    starts = torch.stack([MIXERS["fast_weight"](width, **options).in_proj.bias[3 * width :] for _ in range(200)]).sigmoid()
    ends = torch.stack([starts.amin(0), starts.amax(0)])
    torch.testing.assert_close(ends, torch.tensor([[1 / width], [1 - 1 / width]]).expand(-1, 2 * width), rtol=0, atol=0.05)
    assert ends[0].min() > 1 / width - 1e-5 and ends[1].max() < 1 - 1 / width + 1e-5


@pytest.mark.cases_in_ci(3)
@pytest.mark.parametrize("name", MIXERS)
def test_exported(name):
    """For batches of any size."""
    mixer, x = MIXERS[name](WIDTH, 2, FastWeightConfig()).eval(), torch.randn(40, 3, WIDTH)
    batch = torch.export.Dim("batch", min=1, max=64)
    exported = torch.export.export(mixer, (x,), dynamic_shapes=({1: batch},), strict=False).module()
    for size in (3, 1, 7):
        x = torch.randn(40, size, WIDTH)
        close(exported(x)[0], mixer(x)[0])


@pytest.mark.cases_in_ci(1)
@pytest.mark.parametrize("name", MIXERS)
def test_compiled_by_torch(name):
    """As one graph, also where it is the first call of all."""
    mixer, x = MIXERS[name](WIDTH, 2, FastWeightConfig()), torch.randn(40, 3, WIDTH)
    torch.compiler.reset()
    y, _ = torch.compile(mixer, backend="eager", fullgraph=True)(x)
    close(y, mixer(x)[0])


def numbers_of_slices(y: torch.Tensor) -> int:
    """How many numbers the gradients of indexed tensors have, each as large as the whole tensor, in the graph that made y."""
    nodes, found = [y.grad_fn], {}
    while nodes:
        node = nodes.pop()
        if node is not None and node not in found:
            found[node] = math.prod(getattr(node, "_saved_self_sym_sizes", [0]))
            nodes += [earlier for earlier, _ in node.next_functions]
    return sum(found.values())


@pytest.mark.parametrize("name, options", [*CASES, *(("fast_weight", {"update_rule": rule}) for rule in RULES)], ids=str)
def test_gradients_of_slices_do_not_take_time_that_grows_with_the_square_of_the_length(name, options):
    options = {"feature_map": "elu", "feature_norm": "sum"} | options
    mixer = MIXERS[name].of_layer(WIDTH, 2, FastWeightConfig(mixer=name, **SIZES, **options), 0, 2)
    short, long = (numbers_of_slices(mixer(torch.randn(tokens, 1, WIDTH, requires_grad=True))[0]) for tokens in (256, 1024))
    assert long <= 4.5 * short


@pytest.mark.parametrize("name", ["local_attention", "transformer_xl", "srupp"])
def test_gradients_across_blocks_are_those_of_one_block_and_have_gradients(name, monkeypatch):
    mixer = MIXERS[name].of_layer(WIDTH, 2, FastWeightConfig(mixer=name, **SIZES), 0, 2).double()
    x, dy = torch.randn(40, 2, WIDTH, dtype=torch.float64, requires_grad=True), torch.randn(40, 2, WIDTH, dtype=torch.float64)
    found = []
    for block in (8, 40):
        monkeypatch.setattr("fw_fairseq.mixers.look_back.BLOCK", block)
        with sdpa_kernel(SDPBackend.MATH):  # the others have no second gradient, and neither has the cell of srupp
            [dx] = torch.autograd.grad(mixer(x)[0], x, dy, create_graph=name != "srupp")
        found.append((dx.detach(), *torch.autograd.grad((dx * dy).sum(), x)) if dx.requires_grad else (dx,))
    assert len(found[0]) == (1 if name == "srupp" else 2)
    for part, whole in zip(*found):
        torch.testing.assert_close(part, whole)
