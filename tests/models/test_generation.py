"""Generation token by token: its short way through the decoder equals the general one, and writes where it wrote before."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from fairseq.modules import MultiheadAttention
from fairseq.sequence_generator import SequenceGenerator
from support.draws import PLAIN
from support.language_models import ERASING, NON_NEGATIVE, assert_close, build, draw, every_map, make_task
from torch import nn
from torch.utils._pytree import tree_leaves

from fw_fairseq import Mistake
from fw_fairseq.generation.base import InPlaceStepper, Stepper
from fw_fairseq.generation.memory import FactorBuffers, Memory, step_in_pytorch
from fw_fairseq.generation.memory_loop import MemoryLoop
from fw_fairseq.generation.pools import Pools
from fw_fairseq.generation.sru_cell import SruCell
from fw_fairseq.mixers import MIXERS
from fw_fairseq.models.generation import GENERATION, Generation
from fw_fairseq.models.generation.layers import has_stepper
from fw_fairseq.modules import Streams, with_arguments
from fw_fairseq.ops import native
from fw_fairseq.rules import RULES, Coefficients, Gate, Rule
from fw_fairseq.tools.bench.measure import state_bytes

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("one_thread")]


def combinations():
    """Each rule with each feature map, and both ways of attention norm where a rule has them; the other mixers."""
    for rule in RULES:
        for phi in every_map(rule) if rule in ("sum", "delta") else every_map(rule)[:1]:
            norm = "sum" if phi in NON_NEGATIVE else "l2" if rule in ERASING else "none"
            yield {"update_rule": rule, "feature_map": phi, "feature_norm": norm}
        if RULES[rule].normaliser:
            yield {"update_rule": rule, "feature_map": "relu", "feature_norm": "none", "attention_norm": True}
            yield {"update_rule": rule, "feature_map": "favor", "feature_norm": "none", "attention_norm": True}
        if RULES[rule].normaliser == "keys":
            yield {"update_rule": rule, "attention_norm": True, "attention_norm_of": "read"}
    yield {"update_rule": "sum", "feature_map": "favor", "feature_norm": "none"}
    yield {"update_rule": "gated_delta", "scale_reads": True, "bias_free": True, "feature_norm": "l2"}
    yield {"update_rule": "gated_delta", "feature_map": "identity", "feature_norm": "l2_eps"}
    around = {"short_conv": 4, "token_shift": True, "output_norm": True, "output_gate": True, "key_heads": 2}
    around |= {"token_shift_rank": 2, "rotary": True, "scale_reads": True}
    yield {"update_rule": "kda", "feature_norm": "l2", "negative_eigenvalues": True} | around
    shared = {"token_shift": True, "value_mixing_rank": 2}
    yield {"update_rule": "rwkv7", "feature_map": "identity", "feature_norm": "none"} | shared
    yield {"update_rule": "delta", "ffn_sru": 4, "value_mixing_rank": 2}
    yield from ({"mixer": name} for name in MIXERS if name != "fast_weight")


LAYOUTS = [
    {"decoder_normalize_before": True, "decoder_learned_pos": True},
    {"no_token_positional_embeddings": True, "layernorm_embedding": True, "decoder_output_dim": 16},
    {"decoder_input_dim": 16, "no_scale_embedding": True, "scale_output": True},
    {"decoder_ffn_embed_dim": 0, "decoder_normalize_before": True, "no_decoder_final_norm": True},
    {"mixer": "additive", "pooling_form": "published", "decoder_normalize_before": True},
    {"adaptive_input": True, "adaptive_input_cutoff": "10,20", "adaptive_softmax_cutoff": "10,20"},
    {"mixer_pattern": "softmax,fast_weight"},
    {"mixer": "softmax", "decoder_normalize_before": True},
    {"mixer_pattern": "softmax,local_attention", "bias_free": True},
    {"mixer": "sru", "sru_tanh": True},
    {"activation_fn": "gelu"},
    {name: 4 for name in ("decoder_embed_dim", "decoder_input_dim", "decoder_output_dim")} | {"decoder_attention_heads": 2},
]


def label(options) -> str:
    return "-".join(f"{name}={value}" if isinstance(value, (bool, int)) else str(value) for name, value in options.items())


WINDOWS = [{"mixer": mixer, "window_sizes": size} for mixer in ("additive", "leap") for size in "123"]


@torch.no_grad()
def generate(model, tokens, prompt: int = 0) -> tuple[torch.Tensor, dict]:
    """The logits, token after token, of hypotheses that change places, and of which one ends; and the last state."""
    state, found, rows = {}, [], torch.arange(len(tokens))
    if prompt:
        found.append(model(tokens[:, :prompt], incremental_state=state)[0].transpose(0, 1))
    for t in range(prompt, tokens.shape[1]):
        found.append(model(tokens[rows, : t + 1], incremental_state=state)[0])
        if t in (3, 4, 6):
            order = torch.tensor([1, 1, 0] if t < 6 else [0, 2])
            rows = rows[order]
            model.decoder.reorder_incremental_state_scripting(state, order)
    return torch.cat([part.flatten(0, 1) for part in found]), state


@pytest.mark.parametrize("options", [*combinations(), *LAYOUTS, *WINDOWS], ids=label)
def test_the_short_way_equals_the_general_one(options, monkeypatch):
    """Without a prompt, and after one."""
    model, tokens = build(**options), draw(3, 9)
    ways = [generate(model, tokens), generate(model, tokens, prompt=3)]
    monkeypatch.setattr(Generation, "fits", staticmethod(lambda decoder: False))
    expected, state = generate(model, tokens)
    assert not state.get(GENERATION)
    for found, state in ways:
        assert bool(state.get(GENERATION)) == ("pooling_form" not in options)
        assert_close(found, expected, 1e-9 if model.decoder.recurrent else 1e-6)  # fairseq's softmax is in fp32


COPIES = {"copied": copy.deepcopy, "pickled": lambda state: pickle.loads(pickle.dumps(state))}


COPIED = [({}, "copied"), *((options, "pickled") for options in [*combinations(), *LAYOUTS][::2])]


@pytest.mark.parametrize("options, way", COPIED, ids=lambda x: label(x) if isinstance(x, dict) else x)
@torch.no_grad()
def test_a_copy_goes_on_by_itself(options, way):
    """Two texts with the same beginning, and hypotheses that change places in the copy before its next token."""
    model, tokens, state = build(**options), draw(3, 7), {}
    for t in range(5):
        model(tokens[:, : t + 1], incremental_state=state)
    other, order = COPIES[way](state), torch.tensor([2, 0, 0])
    assert b"FastWeightDecoder" not in pickle.dumps(other), "a copy has no model"
    model.decoder.reorder_incremental_state_scripting(other, order)
    others = torch.cat([tokens[order, :5], draw(3, 2)], 1)
    for rows, states in (tokens, state), (others, other):
        found = torch.cat([model(rows[:, : t + 1], incremental_state=states)[0] for t in range(5, 7)], 1)
        assert_close(found, model(rows)[0][:, 5:], 1e-9 if model.decoder.recurrent else 1e-5)
    assert bool(other.get(GENERATION)) == ("pooling_form" not in options)


WITH_LOOPS = [
    options
    for options in combinations()
    if (options.get("feature_map", "elu") in ("elu", "dpfp", "favor") or options.get("attention_norm"))
    and options.get("mixer") in (None, "additive", "leap", "sru")
]


@pytest.mark.parametrize("options", WITH_LOOPS, ids=label)
def test_pytorch_computes_the_same_without_a_compiler(options, monkeypatch):
    model, tokens = build(**options), draw(3, 9)
    found, _ = generate(model, tokens)
    monkeypatch.setattr(native, "library", lambda: None)
    assert_close(generate(model, tokens)[0], found)


@pytest.mark.parametrize("norm", [{}, {"attention_norm": True}, {"attention_norm": True, "attention_norm_of": "read"}], ids=label)
@pytest.mark.parametrize("compiler", [True, False], ids=["compiled", "PyTorch"])
def test_a_token_that_erases_less_than_it_writes(norm, compiler, monkeypatch):
    """By a rule from outside, whose two strengths are gates of their own."""
    gates = {"beta": Gate(), "w": Gate()}
    rule = Rule("", "this test", lambda beta, w: Coefficients(e=beta, w=w), gates, normaliser="keys")
    monkeypatch.setitem(RULES, "apart", rule)
    if not compiler:
        monkeypatch.setattr(native, "library", lambda: None)
    model, tokens = build(update_rule="apart", **norm), draw(3, 11)
    found, state = generate(model, tokens)
    assert state[GENERATION]
    monkeypatch.setattr(Generation, "fits", staticmethod(lambda decoder: False))
    assert_close(found, generate(model, tokens)[0])


@pytest.mark.parametrize("compiler", [True, False], ids=["compiled", "PyTorch"])
def test_sums_of_keys_that_do_not_decay_with_the_keys(compiler, monkeypatch):
    """By a rule from outside, whose factors would decay both."""
    gates = {"f": Gate("K"), "beta": Gate()}
    rule = Rule("", "this test", lambda f, beta: Coefficients(f=f, e=beta, w=beta), gates, normaliser="keys")
    monkeypatch.setitem(RULES, "whole_sums", rule)
    if not compiler:
        monkeypatch.setattr(native, "library", lambda: None)
    model, tokens = build(update_rule="whole_sums", attention_norm=True), draw(3, 11)
    found, state = generate(model, tokens)
    assert all(isinstance(layer.stepper, InPlaceStepper) for layer in state[GENERATION].layers)
    monkeypatch.setattr(Generation, "fits", staticmethod(lambda decoder: False))
    assert_close(found, generate(model, tokens)[0])


K, V = Gate("K"), Gate("V")
FROM_OUTSIDE = {  # what no rule of the table has together, and whether the loop takes it
    "removal, both decays, a strength per channel": (
        {"f": K, "z": V, "a": K, "p": K, "w": V},
        {"coefficients": lambda f, z, a, p, w: Coefficients(f=f, z=z, w=w), "removal": lambda f, z, a, p, w: (-a / 3, p)},
        True,
    ),
    "bonus, erase per feature, a strength per token": (
        {"u": K, "e": K, "w": Gate(), "z": V},
        {"coefficients": lambda u, e, w, z: Coefficients(z=z, e=e / 3, w=w), "bonus": lambda u, e, w, z: u},
        True,
    ),
    "bonus, a strength per channel, another key, a skip": (
        {"u": K, "w": V, "f": Gate(), "d": Gate()},
        {"coefficients": lambda u, w, f, d: Coefficients(f=f, w=w), "bonus": lambda u, w, f, d: u}
        | {"key": lambda k, u, w, f, d: (1 - u) * k, "skip": lambda u, w, f, d: d},
        True,
    ),
    "removal and erase": (
        {"a": K, "e": Gate()},
        {"coefficients": lambda a, e: Coefficients(e=e / 3, w=e), "removal": lambda a, e: (a / 3, -a)},
        False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("prompt", [0, 3])
@pytest.mark.parametrize("name", FROM_OUTSIDE)
def test_rules_from_outside(name, prompt, monkeypatch):
    gates, functions, has_loop = FROM_OUTSIDE[name]
    monkeypatch.setitem(RULES, "outside", Rule("", "this test", gates=gates, **functions))
    model, tokens = build(update_rule="outside"), draw(3, 11)
    found, state = generate(model, tokens, prompt)
    assert all(type(layer.stepper) is (Memory if has_loop else Stepper) for layer in state[GENERATION].layers)
    monkeypatch.setattr(Generation, "fits", staticmethod(lambda decoder: False))
    assert_close(found, generate(model, tokens, prompt)[0])


def test_sums_of_keys_beside_an_erase_per_feature_have_no_loop(monkeypatch):
    rule = Rule("", "this test", lambda e, w: Coefficients(e=e, w=w), {"e": K, "w": Gate()}, normaliser="write")
    monkeypatch.setitem(RULES, "outside", rule)
    mixer = build(update_rule="outside").decoder.layers[0].self_attn.mixer
    assert Memory.can_hold(mixer)
    mixer.attention_norm = True
    assert not Memory.can_hold(mixer)


SUMS = {"update_rule": "sum", "feature_norm": "none", "attention_norm": True}
HELD = [
    ({}, Memory),
    ({"fast_weight_backend": "recurrent"}, Memory),
    ({"fast_weight_backend": "chunkwise"}, None),
    ({"qkv_sparsity": 4}, Memory),
    ({"short_conv": 2}, Memory),
    ({"rotary": True, "fast_weight_backend": "chunkwise"}, None),
    ({"output_norm": True, "output_gate": True, "qkv_sparsity": 4}, Memory),
    *(({"update_rule": rule}, Memory) for rule in ("retnet", "gla", "mamba2", "hgrn2", "rwkv6", "rwkv7", "kda", "gdn2")),
    ({"update_rule": "delta_product", "product_steps": 2}, Memory),
    ({"update_rule": "rwkv7", "value_mixing_rank": 2}, Memory),
    ({"update_rule": "fwm"}, None),
    (SUMS | {"feature_map": "relu"}, Memory),
    (SUMS | {"feature_map": "favor"}, None),  # whose keys have a scale of their own
    (SUMS | {"feature_map": "favor", "short_conv": 2}, None),
    (SUMS | {"feature_map": "favor", "feature_norm": "sum"}, Memory),
    (SUMS | {"short_conv": 2}, Memory),
    (SUMS | {"feature_map": "favor", "attention_norm": False}, Memory),
    ({"mixer": "additive"}, Pools),
    ({"mixer": "additive", "pooling_form": "published"}, None),
    ({"mixer": "leap"}, Pools),
    ({"mixer": "leap", "qkv_sparsity": 4}, None),
    ({"mixer": "sru"}, SruCell),
    ({"mixer": "sru", "sru_tanh": True}, None),
    ({"mixer": "softmax"}, None),
]

PLAIN_LAYERS = [
    options for options, kind in HELD if kind is Memory and build(**options).decoder.layers[0].self_attn.mixer.has_no_parts
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("compiler", [True, False], ids=["compiled", "PyTorch"])
@torch.no_grad()
def test_what_holds_the_state_of_a_layer(compiler, dtype, monkeypatch):
    """None: its mixer is called, and returns a new state."""
    if not compiler:
        monkeypatch.setattr(native, "library", lambda: None)
    for options, kind in HELD:
        if not compiler and options not in PLAIN_LAYERS:
            kind = None
        model, state = build(decoder_layers=1 + ("value_mixing_rank" in options), **options).to(dtype), {}
        model(draw(2, 1), incremental_state=state)
        if options.get("pooling_form"):
            assert not state.get(GENERATION)
            continue
        stepper = state[GENERATION].layers[0].stepper
        assert isinstance(stepper, InPlaceStepper) == (kind is not None and dtype != torch.bfloat16), options
        if isinstance(stepper, InPlaceStepper):
            assert type(stepper) is kind, options
        if type(stepper) is Memory:
            assert type(stepper.write_and_read) is (MemoryLoop if compiler else type(step_in_pytorch))


@pytest.mark.parametrize("rule", [name for name in PLAIN if RULES[name].coefficients])
@torch.no_grad()
def test_a_token_writes_into_the_memory_that_is_there(rule):
    model, tokens, state = build(update_rule=rule).double(), draw(2, 12), {}
    places = []
    for t in range(12):
        model(tokens[:, : t + 1], incremental_state=state)
        steppers = [layer.stepper for layer in state[GENERATION].layers]
        assert all(isinstance(stepper, InPlaceStepper) for stepper in steppers)
        places.append([place(stepper) for stepper in steppers])
        factors = [stepper.factors for stepper in steppers if stepper.factors is not None]
        assert all(buffers.shared == (rule in ("sum", "delta")) for buffers in factors), "hypotheses share what does not decay"
        assert all(buffers.room() == 3 for buffers in factors), "3 (8 + 8) numbers are fewer than 8 * 8, and 4 (8 + 8) are not"
    assert len({*map(tuple, places)}) == 2, "factors and then a matrix"


def place(stepper: Memory) -> int:
    return (stepper.memory if stepper.factors is None else stepper.factors.keys).data_ptr()


@pytest.mark.parametrize("second", [[1, 0, 2], [0, 2]], ids=str)
@pytest.mark.parametrize("length", [2, 6])
@torch.no_grad()
def test_orders_without_a_token_between_them_act_one_after_the_other(length, second):
    """On a memory that is still a few factors, and on a matrix."""
    model, tokens, state = build(), draw(3, length), {}
    for t in range(length):
        model(tokens[:, : t + 1], incremental_state=state)
    for order in ([1, 2, 0], second):
        model.decoder.reorder_incremental_state_scripting(state, torch.tensor(order))
    rows = [[1, 2, 0][row] for row in second]
    whole = torch.cat([tokens[rows], draw(len(rows), 1)], 1)
    assert_close(model(whole, incremental_state=state)[0], model(whole)[0][:, -1:])


def tensors(state) -> list[torch.Tensor]:
    return [part for part in tree_leaves(state) if part is not None]


STATES = [{}, SUMS, {"update_rule": "gated"}, {"short_conv": 3}, {"mixer": "sru"}]
STATES += [{"update_rule": "kda", "short_conv": 2, "token_shift": True, "rotary": True}, {"update_rule": "rwkv7"}]
STATES += [{"mixer": mixer, "window_sizes": sizes} for mixer in ("additive", "leap") for sizes in ("0", "2", "5")]


@pytest.mark.parametrize(
    "options, compiler, length",
    [*((options, True, length) for options in STATES for length in (2, 6)), *((options, False, 2) for options in STATES[:3])],
    ids=lambda x: label(x) if isinstance(x, dict) else str(x),
)
@torch.no_grad()
def test_a_state_has_the_order_of_its_rows_and_stays_as_it_is(length, compiler, options, monkeypatch):
    if not compiler:
        monkeypatch.setattr(native, "library", lambda: None)
    model, tokens, state = build(**options), draw(3, length + 1), {}
    for t in range(length):
        model(tokens[:, : t + 1], incremental_state=state)
    steppers = [layer.stepper for layer in state[GENERATION].layers]
    before = [stepper.state() for stepper in steppers]
    for order in (torch.tensor([2, 0, 0]), torch.tensor([2, 1])):
        model.decoder.reorder_incremental_state_scripting(state, order)
        before, tokens = [part.index_select(order) for part in before], tokens[order]
        for stepper, part in zip(steppers, before):
            assert_close(tensors(stepper.state()), tensors(part))
    copies = copy.deepcopy(before)
    assert_close(model(tokens, incremental_state=state)[0], model(tokens)[0][:, -1:])
    assert_close(tensors(before), tensors(copies), 0)


@pytest.mark.parametrize("shared", [True, False])
def test_factors_of_hypotheses(shared):
    """Those that have no decay stay where they are while there are no more rows; a new order moves their places alone."""
    buffers = FactorBuffers(2, 1, 4, 6, shared, torch.empty(0))
    assert buffers.room() == 2, "2 (4 + 6) numbers are fewer than 4 * 6, and 3 (4 + 6) are not"
    buffers.keys.copy_(torch.randn(2, 1, 2, 4))
    buffers.values.copy_(torch.randn(2, 1, 2, 6))
    buffers.count, first = 2, buffers.keys.data_ptr()
    for order, stays in ([1, 1], True), ([0], True), ([0, 0], True), ([1, 0, 0], False), ([2, 0, 1], True):
        want, place = [part[order] for part in buffers.gathered()], buffers.keys.data_ptr()
        buffers.reorder(torch.tensor(order))
        assert_close(buffers.gathered(), tuple(want), 0)
        assert (buffers.keys.data_ptr() == place) == (shared and stays)
        assert (shared and len(order) < 3) or len(buffers.keys) == len(order)
    assert buffers.keys.data_ptr() != first


@pytest.mark.parametrize(
    "heads, keys, values, room", [(1, 2, 2, 0), (2, 1, 9, 0), (1, 3, 3, 1), (1, 4, 4, 1), (1, 5, 5, 2), (4, 64, 64, 31)]
)
def test_room_for_as_many_factors_as_take_less_than_the_memory(heads, keys, values, room):
    assert FactorBuffers(1, heads, keys, values, True, torch.empty(0)).room() == room


@pytest.mark.parametrize("options", [{}, {"update_rule": "gated", "attention_norm": True, "feature_norm": "none"}], ids=str)
@pytest.mark.parametrize("compiled", [True, False])
def test_a_generation_may_change_between_inference_mode_and_no_grad(options, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(native, "library", lambda: None)
    model, tokens, state = build(**options), draw(3, 9), {}
    with torch.no_grad():
        whole = model(tokens)[0]
    for t, order in enumerate([None, [0, 1, 2], None, [0, 1, 2], None, [0, 1], None, [0, 1], None]):
        with torch.inference_mode() if t % 4 < 2 else torch.no_grad():
            rows = 3 if t <= 5 else 2
            assert_close(model(tokens[:rows, : t + 1], incremental_state=state)[0], whole[:rows, t : t + 1])
            if order is not None:
                model.decoder.reorder_incremental_state_scripting(state, torch.tensor(order))


def test_attentions_that_read_token_by_token():
    """Of fairseq's, those that read the tokens themselves, and nothing else."""

    def has(**options):
        return has_stepper(MultiheadAttention(8, 2, **options))

    assert has(self_attention=True)
    assert not has(encoder_decoder_attention=True)
    assert not has(self_attention=True, add_bias_kv=True)
    assert not has(self_attention=True, add_zero_attn=True)
    assert not has_stepper(torch.nn.Linear(2, 2))


def test_the_states_of_a_generation_count():
    """Those of the two hypotheses that are left."""
    model = build()
    _, state = generate(model, draw(3, 12))
    assert state_bytes(state) == 8 * 2 * model.state_size()


@pytest.mark.parametrize("mixer", ["additive", "leap"])
def test_a_window_of_one_token_keeps_none(mixer):
    _, state = generate(build(mixer=mixer, window_sizes="1"), draw(3, 5))
    assert state[GENERATION] and state_bytes(state) == 0


@pytest.mark.parametrize("beam", [None, 2])
@pytest.mark.parametrize("options", [{}, {"mixer_pattern": "softmax,fast_weight"}], ids=label)
@torch.no_grad()
def test_a_promised_prompt_is_read_once(options, beam):
    """Its first token asks for it; each hypothesis of a beam then goes on from it."""
    model, tokens, state = build(**options), draw(2, 9), {}
    tokens = tokens.repeat_interleave(beam or 1, 0)
    tokens[:, 4:] = draw(len(tokens), 5)
    model.decoder.expect_prompt(tokens[:: beam or 1, :4], *filter(None, [beam]))
    steps = [model(tokens[:, : t + 1], incremental_state=state)[0] for t in range(9)]
    assert_close(torch.cat(steps, 1), model(tokens)[0], 1e-5)  # fairseq's softmax is fp32


def elsewhere(call):
    """The result of a call by another thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.no_grad()(call)).result()


@torch.no_grad()
def test_another_thread_may_use_the_model_meanwhile():
    """While a prompt is promised, and while a segment of streams is read."""
    model, tokens, streams = build(mixer_pattern="softmax,fast_weight"), draw(2, 6), Streams()
    want = model(tokens)[0]
    model.decoder.expect_prompt(draw(2, 4))
    state = {}
    found = elsewhere(lambda: [model(tokens[:, : t + 1], incremental_state=state)[0] for t in range(6)])
    assert_close(torch.cat(found, 1), want, 1e-5)  # fairseq's softmax is fp32
    model.decoder.expect_prompt(None)
    assert not model.decoder.promises
    model = build(value_mixing_rank=2, ffn_sru=4)
    want = model(tokens)[0]
    model(draw(2, 6), streams=streams)
    with model.decoder.reading(streams, None, 6):
        assert_close(elsewhere(lambda: model(tokens)[0]), want)


def test_torch_compile_meets_no_thread_where_nothing_is_given():
    """It would have to cut its graph there."""
    module = nn.Linear(2, 2)

    @torch.compile(fullgraph=True, backend="eager")
    def call(x):
        with with_arguments([module], reset_mask=None):
            return module(x)

    assert_close(call(torch.ones(1, 2)), module(torch.ones(1, 2)))


PADDED = [{"mixer": name} for name in ("fast_weight", "additive", "leap", "sru")] + [{"update_rule": "sum", "attention_norm": True}]


@pytest.mark.parametrize("options", PADDED, ids=label)
@pytest.mark.parametrize("place", [0, 7])
@torch.no_grad()
def test_a_padded_token_changes_no_state(place, options):
    """Where it is the first one, the general path leaves a memory that is still a few factors."""
    model, tokens = build(**options), draw(2, 9)
    padded = torch.cat([tokens[:, :place], torch.tensor([[1], [7]]), tokens[:, place:]], 1)

    def last_of(rows):
        state = {}
        return [model(rows[:, : t + 1], incremental_state=state)[0] for t in range(rows.shape[1])][-1], state

    model.decoder.embed_positions = None  # which count padding
    found, state = last_of(padded)
    assert GENERATION in state
    assert_close(found[0], last_of(tokens)[0][0])
    assert_close(found[1], model(padded[1:])[0][0, -1:])  # which has a token there


@torch.no_grad()
def test_beam_search_writes_the_same_tokens(monkeypatch):
    task = make_task(40)
    models = [build(task, update_rule=rule, attention_norm=rule == "sum") for rule in ("delta", "sum")]
    sample = {"net_input": {"src_tokens": draw(3, 4), "src_lengths": torch.full((3,), 4)}}
    for model in models:
        model.max_positions = lambda: 64

    def search():
        generator = SequenceGenerator(models, task.target_dictionary, beam_size=4, max_len_b=12)
        found = generator.generate(models, sample, prefix_tokens=sample["net_input"]["src_tokens"][:, :2])
        return [[(h["tokens"].tolist(), h["score"].item()) for h in hypotheses] for hypotheses in found]

    found = search()
    monkeypatch.setattr(Generation, "fits", staticmethod(lambda decoder: False))
    for hypotheses, expected in zip(found, search()):
        assert [tokens for tokens, _ in hypotheses] == [tokens for tokens, _ in expected]
        assert [score for _, score in hypotheses] == pytest.approx([score for _, score in expected], abs=1e-9)


@pytest.mark.parametrize("change", ["training", "gradients", "autocast", "dropout", "hook", "hook before", "part", "argument"])
def test_everything_else_takes_the_general_way(change):
    model, tokens, state = build(), draw(2, 1), {}
    if change == "training":
        model.train()
    if change == "dropout":
        model.make_generation_fast_(retain_dropout=True)
    if change == "hook":
        model.decoder.layers[0].fc1.register_forward_hook(lambda module, inputs, output: None)
    if change == "hook before":
        model.decoder.layers[0].fc1.register_forward_pre_hook(lambda module, inputs: None)
    if change == "part":
        model.decoder.layers[1].ffn_layernorm = torch.nn.LayerNorm(48).double()
    more = {"return_all_hiddens": True} if change == "argument" else {}
    with torch.set_grad_enabled(change == "gradients"), torch.autocast("cpu", enabled=change == "autocast"):
        model.decoder(tokens, incremental_state=state, **more)
    assert not state.get(GENERATION) and len(state) > 1


EVERY_STATE = [{}, SUMS, {"mixer": "sru"}, {"mixer": "additive"}, {"mixer": "leap", "window_sizes": "3"}]
EVERY_STATE += [{"qkv_sparsity": 4, "ffn_sparsity": 12, "ffn_sru": 3}]


@pytest.mark.parametrize(
    "options, compiler, prompt, tokens",
    [
        *((options, True, *read) for options in EVERY_STATE for read in ((3, 2), (0, 5))),
        *((options, False, 3, 2) for options in EVERY_STATE[:2]),
        ({}, True, 3, 0),
    ],
    ids=lambda x: label(x) if isinstance(x, dict) else str(x),
)
@torch.no_grad()
def test_other_rows_than_the_states_have_are_refused(prompt, tokens, compiler, options, monkeypatch):
    """The loops would read and write behind the states. After the refusal the generation goes on."""
    if not compiler:
        monkeypatch.setattr(native, "library", lambda: None)
    model, text, state = build(**options), draw(3, 9), {}
    if prompt:
        model(text[:, :prompt], incremental_state=state)
    for t in range(prompt, prompt + tokens):
        model(text[:, : t + 1], incremental_state=state)
    read = prompt + tokens
    for rows in (1, 5):
        with pytest.raises((Mistake, RuntimeError)):
            model(draw(rows, read + 1), incremental_state=state)
    if tokens:
        found = model(text[:, : read + 1], incremental_state=state)[0]
        assert_close(found, model(text[:, : read + 1])[0][:, -1:])


@torch.no_grad()
def test_two_models_may_share_a_dictionary():
    """As fairseq's modules may: each has its own states in it, and its own order."""
    models, text, state, order = [build(), build(update_rule="gated")], draw(3, 6), {}, torch.tensor([2, 0, 0])
    for t in range(6):
        if t == 3:
            for model in models:
                model.decoder.reorder_incremental_state_scripting(state, order)
            text = torch.cat([text[order, :3], text[:, 3:]], 1)
        for model in models:
            assert_close(model(text[:, : t + 1], incremental_state=state)[0], model(text[:, : t + 1])[0][:, -1:])


def rule_of(coefficients, **gates):
    return Rule("", "this test", coefficients, gates)


LAYOUTS_OF_COEFFICIENTS = {
    "one number for all channels": rule_of(
        lambda f, beta: Coefficients(f=torch.full_like(f[..., :1], 0.9).expand_as(f), w=beta), f=Gate("K"), beta=Gate()
    ),
    "every second number": rule_of(
        lambda f, beta: Coefficients(f=torch.stack([f, 1 - f], -1)[..., 0], w=beta), f=Gate("K"), beta=Gate()
    ),
    "another type": rule_of(lambda beta: Coefficients(f=torch.full(beta.shape, 0.9), w=beta), beta=Gate()),
}


@pytest.mark.parametrize("name", LAYOUTS_OF_COEFFICIENTS)
def test_coefficients_of_any_layout_and_type(name, monkeypatch):
    """A rule from outside returns what PyTorch computes with."""
    monkeypatch.setitem(RULES, "outside", LAYOUTS_OF_COEFFICIENTS[name])
    model, tokens = build(update_rule="outside"), draw(3, 11)
    found, state = generate(model, tokens)
    assert type(state[GENERATION].layers[0].stepper) is Memory
    monkeypatch.setattr(Generation, "fits", staticmethod(lambda decoder: False))
    assert_close(found, generate(model, tokens)[0])


@pytest.mark.parametrize("compiler", [True, False], ids=["compiled", "PyTorch"])
def test_a_rule_without_keys_generates(compiler, monkeypatch):
    """From outside, with no function of its own that makes the key."""
    monkeypatch.setitem(RULES, "keyless", Rule("", "this test", lambda f: Coefficients(f=f), {"f": Gate("K")}, keyless=True))
    if not compiler:
        monkeypatch.setattr(native, "library", lambda: None)
    model, tokens, state = build(update_rule="keyless"), draw(3, 7), {}
    with torch.no_grad():
        found = [model(tokens[:, : t + 1], incremental_state=state)[0] for t in range(7)]
        assert state[GENERATION]
        assert_close(torch.cat(found, 1), model(tokens)[0])


@pytest.mark.parametrize("compiler", [True, False], ids=["compiled", "PyTorch"])
def test_heads_of_one_channel(compiler, monkeypatch):
    if not compiler:
        monkeypatch.setattr(native, "library", lambda: None)
    narrow = {name: 4 for name in ("decoder_embed_dim", "decoder_input_dim", "decoder_output_dim", "decoder_attention_heads")}
    model, tokens = build(update_rule="decay", feature_map="identity", feature_norm="none", **narrow), draw(3, 11)
    found, _ = generate(model, tokens)
    monkeypatch.setattr(Generation, "fits", staticmethod(lambda decoder: False))
    assert_close(found, generate(model, tokens)[0])


@pytest.mark.parametrize("phi", ["elu", "dpfp", "relu", "identity"])
@torch.no_grad()
def test_a_number_that_is_none_is_not_hidden(phi, monkeypatch):
    """One weight of a key is damaged: what the general way shows, the short one shows."""
    norm = "sum" if phi != "identity" else "none"
    model, tokens = build(update_rule="sum", feature_map=phi, feature_norm=norm), draw(2, 5)
    mixer = model.decoder.layers[1].self_attn.mixer
    mixer.in_proj.weight[mixer.sizes["q"]] = torch.nan
    found, _ = generate(model, tokens)
    monkeypatch.setattr(Generation, "fits", staticmethod(lambda decoder: False))
    assert generate(model, tokens)[0].isnan().equal(found.isnan()) and found.isnan().all()


def test_places_of_factors_lie_in_memory_whatever_the_default_device():
    with torch.device("meta"):
        buffers = FactorBuffers(2, 1, 4, 6, True, torch.empty(0, device="cpu"))
        buffers.reorder(torch.tensor([1, 0, 0], device="cpu"))
        assert buffers.places.device.type == "cpu"


KINDS = [{}, SUMS, {"update_rule": "decay", "feature_map": "identity", "feature_norm": "none"}, {"feature_map": "dpfp"}]


@pytest.mark.parametrize("threads", [5])
@pytest.mark.parametrize("options", KINDS, ids=label)
def test_threads_share_the_memories(options, threads, monkeypatch):
    """Factors and matrices; each row's head has one thread, which changes it in place."""
    model, tokens = build(**options), draw(3, 11)
    expected, _ = generate(model, tokens)
    monkeypatch.setattr(native, "MANY", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert_close(generate(model, tokens)[0], expected)


APART = {"f": Gate(), "z": Gate("V"), "beta": Gate(), "w": Gate()}
ALL = Rule("", "this test", lambda f, z, beta, w: Coefficients(f=f, z=z, e=beta, w=w), APART, normaliser="keys")
CHANNELS = Rule(
    "", "this test", lambda f, z, beta, w: Coefficients(f=f, z=z, e=beta, w=w), APART | {"f": Gate("K")}, normaliser="keys"
)
NORMS = [{}, {"attention_norm": True}, {"attention_norm": True, "attention_norm_of": "read"}]


@pytest.mark.parametrize("norm", NORMS, ids=label)
@pytest.mark.parametrize("compiler", [True, False], ids=["compiled", "PyTorch"])
@pytest.mark.parametrize("rule", [ALL, CHANNELS], ids=["all", "channels"])
def test_rules_with_every_coefficient(rule, compiler, norm, monkeypatch):
    """From outside. Erases read what both decays left; sums of keys decay with neither of them."""
    monkeypatch.setitem(RULES, "every", rule)
    if not compiler:
        monkeypatch.setattr(native, "library", lambda: None)
    model, tokens = build(update_rule="every", **norm), draw(3, 11)
    found, state = generate(model, tokens)
    assert all(isinstance(layer.stepper, InPlaceStepper) for layer in state[GENERATION].layers)
    monkeypatch.setattr(Generation, "fits", staticmethod(lambda decoder: False))
    assert_close(found, generate(model, tokens)[0])


@pytest.mark.parametrize(
    "options", [{"feature_map": "dpfp", "dpfp_nu": 3}, {"feature_map": "dpfp", "dpfp_nu": 2, "feature_norm": "l2"}], ids=label
)
def test_several_rolls_of_features(options, monkeypatch):
    model, tokens = build(**options), draw(3, 9)
    found, _ = generate(model, tokens)
    monkeypatch.setattr(Generation, "fits", staticmethod(lambda decoder: False))
    assert_close(found, generate(model, tokens)[0])


@pytest.mark.parametrize("norm, size", [("sum", 1e-9), ("l2", 1e-9), ("l2", 1e-13), ("l2_eps", 1e-3)])
@torch.no_grad()
def test_features_that_are_almost_0(norm, size, monkeypatch):
    """A sum below 1e-6 and a length below 1e-12 are divided by those; l2_eps divides by the root of 1e-6 and the square."""
    model, tokens = build(feature_map="relu", feature_norm=norm, update_rule="sum"), draw(3, 9)
    for layer in model.decoder.layers:
        layer.self_attn.mixer.feature_map.weight.mul_(size)
        layer.self_attn.mixer.out_proj.weight.mul_(1e4 if norm == "sum" or size < 1e-12 else 1)
    found, _ = generate(model, tokens)
    monkeypatch.setattr(Generation, "fits", staticmethod(lambda decoder: False))
    assert_close(found, generate(model, tokens)[0])
