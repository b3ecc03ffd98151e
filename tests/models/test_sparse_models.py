"""Models with sparse and reversible layers: decoded, padded, streamed, checkpointed, refused."""

from __future__ import annotations

import pickle

import pytest
import torch
from support.language_models import assert_close, build, draw, make_task, options_of
from torch import nn

import fw_fairseq.models  # noqa: F401
from fw_fairseq import Mistake
from fw_fairseq.mixers import MIXERS
from fw_fairseq.models.generation import GENERATION, Generation
from fw_fairseq.modules import Streams
from fw_fairseq.modules.sparse import Multiplicative, SparseFeedForward, Stack, fused, reversible
from fw_fairseq.ops import native
from fw_fairseq.ops.state import SavedState
from fw_fairseq.tasks.stateful_language_modeling import check_across_workers

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("one_thread")]

BEFORE = {"decoder_normalize_before": True}
EVERYTHING = {"ffn_sparsity": 4, "qkv_sparsity": 4, "output_sparsity": 3, "ffn_sru": 5, "reversible": True} | BEFORE
OPTIONS = {
    "ffn": {"ffn_sparsity": 4, "ffn_controller_dim": 3},
    "qkv": {"qkv_sparsity": 4},
    "output": {"output_sparsity": 3},
    "sru": {"ffn_sru": 5},
    "sru-before": {"ffn_sru": 5} | BEFORE,
    "reversible": {"reversible": True} | BEFORE,
    "everything": EVERYTHING,
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
SPARSE_MIXERS = [name for name in (*MIXERS, "softmax") if name != "srupp"]
CASES = [options for options in OPTIONS.values()] + [EVERYTHING | {"mixer": name} for name in SPARSE_MIXERS]
CASES += [{"qkv_sparsity": 4, "mixer": name} for name in SPARSE_MIXERS if name != "fast_weight"]
CASES += [{"qkv_sparsity": 4, "update_rule": rule, "feature_dim": 12} for rule in ("decay", "gated_delta")]
every_case = pytest.mark.parametrize("options", CASES, ids=lambda o: "-".join(f"{k}={v}" for k, v in o.items()))


def make(**options):
    torch.manual_seed(5)
    return build(**({"no_token_positional_embeddings": True} | options))


def logits(model, tokens, **keywords):
    return model(tokens, **keywords)[0]


def decode(model, tokens, start=0, state=None):
    state = {} if state is None else state
    return torch.cat([logits(model, tokens[:, : t + 1], incremental_state=state) for t in range(start, tokens.shape[1])], 1)


@every_case
@pytest.mark.parametrize("short_way", [True, False])
@torch.no_grad()
def test_decoding_equals_the_full_pass(options, short_way, monkeypatch):
    """Also after hypotheses changed places."""
    if not short_way:
        monkeypatch.setattr(Generation, "fits", staticmethod(lambda decoder: False))
    model, tokens, state = make(**options), draw(3, 9), {}
    assert_close(decode(model, tokens[:, :5], state=state), logits(model, tokens[:, :5]))
    assert bool(state.get(GENERATION)) == short_way
    order = torch.tensor([2, 0, 0])
    model.decoder.reorder_incremental_state_scripting(state, order)
    whole = torch.cat([tokens[order, :5], tokens[:, 5:]], 1)
    assert_close(decode(model, whole, 5, state), logits(model, whole)[:, 5:])


FUSED = [
    EVERYTHING,
    EVERYTHING | {"mixer": "softmax"},
    {"qkv_sparsity": 2, "update_rule": "gated"},
    {"ffn_sparsity": 6, "ffn_sru": 3},
]


@pytest.mark.parametrize("options", FUSED, ids=lambda o: "-".join(map(str, o.values())))
@pytest.mark.parametrize("threads", [1, 2])
@torch.no_grad()
def test_compiled_loops_and_pytorch_decode_the_same(options, threads, monkeypatch):
    """Also for several rows that change places, from a prompt's state on, and with threads that share the work."""
    if native.library() is None:
        pytest.skip("no compiler")
    monkeypatch.setattr(fused, "threads", lambda numbers: threads)
    model, tokens = make(**options), draw(3, 12)
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)  # biases and norms that do something
    found, order = [], torch.tensor([1, 1, 0])
    for compiled in (True, False):
        if not compiled:
            monkeypatch.setattr(native, "library", lambda: None)
        state: dict = {}
        if model.decoder.recurrent:
            logits(model, tokens[:, :3], incremental_state=state)
        parts = [decode(model, tokens[:, :8], 3 if state else 0, state)[:, -5:]]
        assert any(getattr(part, "fused", None) is not None for part in state[GENERATION].parts()) == compiled
        model.decoder.reorder_incremental_state_scripting(state, order)
        found.append(torch.cat([*parts, decode(model, tokens, 8, state)], 1))
    assert_close(*found)


@every_case
@torch.no_grad()
def test_a_prompt_and_a_padded_token(options):
    """The prompt is read in one pass by recurrent models; a padded token takes the general path and changes no state."""
    model, tokens, state = make(**options), draw(2, 9), {}
    expected = logits(model, tokens)
    start = 0
    if model.decoder.recurrent:
        assert_close(logits(model, tokens[:, :4], incremental_state=state), expected[:, :4])
        start = 4
    assert_close(decode(model, tokens[:, :6], start, state), expected[:, start:6])
    padded = torch.cat([tokens[:, :6], torch.tensor([[1], [7]]), tokens[:, 6:]], 1)
    assert_close(decode(model, padded, 6, state)[0, 1:], expected[0, 6:])


@every_case
@torch.no_grad()
def test_padding_and_later_tokens_change_nothing(options):
    model, tokens = make(**options), draw(2, 9)
    alone = logits(model, tokens[:1, :5])
    tokens[0, 5:] = model.decoder.padding_idx
    assert_close(logits(model, tokens)[:1, :5], alone)


@pytest.mark.parametrize("options", [options for options in CASES if options.get("mixer") != "softmax"])
@torch.no_grad()
def test_segments_and_texts_of_a_stream(options):
    """Segments equal the whole, and after a reset a text is read as if it were alone."""
    model, tokens, streams = make(**options), draw(2, 11), Streams()
    parts = [logits(model, part, streams=streams) for part in tokens.split([3, 1, 7], 1)]
    assert_close(torch.cat(parts, 1), logits(model, tokens))
    resets, streams = torch.zeros(2, 11, dtype=torch.bool), Streams()
    resets[0, 4] = resets[1, 6] = True
    masks = resets.split([5, 6], 1)
    parts = [logits(model, part, streams=streams, reset_mask=mask) for part, mask in zip(tokens.split([5, 6], 1), masks)]
    assert_close(torch.cat(parts, 1)[:1, 4:], logits(model, tokens[:1, 4:]))
    assert_close(torch.cat(parts, 1)[1:, 6:], logits(model, tokens[1:, 6:]))


@torch.no_grad()
def test_a_stream_continues_from_the_states_of_a_checkpoint():
    model, tokens, streams, again = make(**EVERYTHING), draw(2, 9), Streams(), Streams()
    logits(model, tokens[:, :4], streams=streams)
    again.restart({layer: SavedState(state) for layer, state in streams.last().items()})
    assert {*streams.last()} == {layer for i in range(2) for layer in (i, f"{i}.source", f"{i}.recurrence")}
    assert_close(logits(model, tokens[:, 4:], streams=again), logits(model, tokens)[:, 4:])


@torch.no_grad()
def test_training_leaves_weights_of_sparse_attention_out():
    model, tokens = make(mixer="softmax", qkv_sparsity=4, attention_dropout=0.5), draw(2, 9)
    attention = model.decoder.layers[0].self_attn
    assert (attention.num_heads, attention.head_dim) == (4, 8)
    assert logits(model, tokens).equal(logits(model, tokens))
    model.train()
    assert not torch.allclose(logits(model, tokens), logits(model, tokens))


@every_option
def test_every_parameter_is_trained_and_saved(options):
    model, tokens = make(**options).train(), draw(2, 7)
    logits(model, tokens).sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or (not p.grad.any() and "ontroller" not in name)] == []
    again = make(**options)
    again.load_state_dict(model.state_dict())
    assert_close(logits(again, tokens), logits(model.eval(), tokens))
    assert_close(logits(pickle.loads(pickle.dumps(model)), tokens), logits(model, tokens))
    assert repr(model)


def test_what_the_options_build():
    model = make(**EVERYTHING)
    decoder = model.decoder
    assert isinstance(decoder.output_projection, Multiplicative) and isinstance(decoder.layers, Stack)
    for layer in decoder.layers.children():
        assert isinstance(layer.fc2, SparseFeedForward) and layer.fc2.controller_in.shape == (48 // 4, 32)
        assert isinstance(layer.self_attn.mixer.out_proj, nn.Identity) and layer.recurrence.part.units == 5


@pytest.mark.parametrize("options", [{"ffn_sparsity": 4, "ffn_sru": 3, "qkv_sparsity": 4}, {"mixer": "softmax", "qkv_sparsity": 4}])
def test_checkpointed_layers_draw_the_same_again(options):
    found = []
    for checkpointed in (False, True):
        model, tokens = make(**options, dropout=0.3, checkpoint_activations=checkpointed).train(), draw(1, 8).fill_(5)
        torch.manual_seed(7)
        logits(model, tokens).square().sum().backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    assert found[0].keys() == found[1].keys()
    for name in found[0]:
        assert_close(found[1][name], found[0][name])


def plain(updates, dtype, parameters, first, second, source, *unused):
    """The same residual connections, differentiated by autograd."""
    for update in updates:
        first, second = second, first + update.run(second.to(dtype), source)
    return first, second


@pytest.mark.parametrize("options", [{}, {"mixer": "softmax"}, {"feature_map": "favor"}, {k: v for k, v in EVERYTHING.items()}])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_reversible_gradients_equal_those_of_the_plain_residual(options, dtype, monkeypatch):
    """With dropout and Gumbel noise, which are replayed."""
    settings = BEFORE | {"reversible": True, "dropout": 0.2, "activation_dropout": 0.1, "decoder_layers": 5} | options
    model, tokens, found = make(**settings).to(dtype).train(), draw(2, 12), []
    for way in (reversible.Reversible.apply, plain):
        monkeypatch.setattr(reversible.Reversible, "apply", way)
        torch.manual_seed(11)
        model.zero_grad()
        y = logits(model, tokens)
        y.square().mean().backward()
        found.append([y.detach(), torch.rand(1), *(p.grad for p in model.parameters())])
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    for one, other in zip(*found):
        assert (one - other).abs().max() <= tolerance * max(1, other.abs().max())


def kept_bytes(model, tokens) -> int:
    """The bytes of what the graph of a forward pass keeps, parameters aside."""
    own, kept = {p.data_ptr() for p in model.parameters()}, {}

    def keep(x):
        if x.data_ptr() not in own:
            kept[x.data_ptr()] = x.nbytes
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        logits(model, tokens).sum()
    return sum(kept.values())


def test_the_activations_of_reversible_layers_do_not_grow_with_depth():
    tokens = draw(4, 32)
    flat = [kept_bytes(make(**EVERYTHING | {"decoder_layers": layers}).train(), tokens) for layers in (2, 8)]
    growing = [kept_bytes(make(**BEFORE, decoder_layers=layers).train(), tokens) for layers in (2, 8)]
    assert flat[1] <= 1.01 * flat[0] and growing[1] > 3 * growing[0]


def test_layer_drop_leaves_reversible_layers_out(monkeypatch):
    model, tokens = make(**EVERYTHING, decoder_layerdrop=0.5), draw(2, 6)
    monkeypatch.setattr(torch.Tensor, "uniform_", lambda x: x.copy_(torch.tensor([1.0, 0.0])))
    assert model.decoder.layers.train().kept() == [model.decoder.layers[0]]
    assert len(model.decoder.layers.eval().kept()) == 2
    logits(model.train(), tokens).sum().backward()
    assert model.decoder.layers[0].fc2.bias.grad is not None and model.decoder.layers[1].fc2.bias.grad is None


REFUSED = [
    ({"ffn_sparsity": 5}, "--ffn-sparsity is 5; it must be at least 2 and divide 48"),
    ({"qkv_sparsity": 5}, "--qkv-sparsity is 5; it must divide the width of the layers, 32"),
    ({"qkv_sparsity": 4, "feature_dim": 3, "decoder_attention_heads": 2}, "--qkv-sparsity is 4; it must divide 6, the width of q"),
    ({"qkv_sparsity": 4, "mixer": "srupp"}, "--qkv-sparsity is not for Srupp"),
    ({"qkv_sparsity": 4, "mixer": "sru", "sru_projection": 4}, "--qkv-sparsity is not for Sru"),
    ({"output_sparsity": 4, "share_decoder_input_output_embed": True}, "which --share-decoder-input-output-embed shares or cuts"),
    ({"reversible": True}, "--reversible has norms before the layers; add --decoder-normalize-before"),
    (
        {"reversible": True, "mixer": "additive", "pooling_form": "published"} | BEFORE,
        "does not work with --pooling-form published",
    ),
]


@pytest.mark.parametrize("options, message", REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_combinations_that_cannot_work(options, message):
    with pytest.raises(Mistake, match=message):
        build(**options)


def test_dense_layers_may_have_the_parts_that_fairseq_adds():
    assert build(scale_fc=True).decoder.layers[0].ffn_layernorm is not None


@pytest.mark.parametrize("name, value", [("qkv_sparsity", 4), ("ffn_sru", 3), ("reversible", True)])
def test_workers_that_share_a_stream(name, value):
    with pytest.raises(Mistake, match=f"^--sequence-parallel: --{name.replace('_', '-')} "):
        check_across_workers(build(**{name: value} | BEFORE))
    check_across_workers(build(ffn_sparsity=4, output_sparsity=3))


def test_options_reach_the_command_line():
    args = options_of("fast_weight_lm", ffn_sparsity=2)
    assert args.ffn_sparsity == 2 and args.qkv_sparsity == 0 and make_task(10)


@torch.no_grad()
@pytest.mark.parametrize("sparsity", [0, 4])
def test_softmax_layers_refuse_other_rows_than_their_states_have(sparsity):
    """And keep theirs. One row would be written into all."""
    model, text, state = build(mixer="softmax", qkv_sparsity=sparsity), draw(3, 9), {}
    for t in range(5):
        model(text[:, : t + 1], incremental_state=state)
    for rows in (1, 5):
        with pytest.raises(Mistake, match=f"tokens have {rows} rows and the states of this generation 3"):
            model(draw(rows, 6), incremental_state=state)
    found = model(text[:, :6], incremental_state=state)[0]
    assert_close(found, model(text[:, :6])[0][:, -1:])
