"""Generation with transformers: its short way from token to token equals the general one, on the kernels and as CUDA graphs."""

from __future__ import annotations

import copy
import pickle
import sys
from dataclasses import asdict

import pytest
import torch
from support.graphs import Repeated, emulate_graphs

from fw_fairseq.config import FastWeightConfig
from fw_fairseq.generation.base import InPlaceStepper
from fw_fairseq.ops.parallel import packing

sys.modules.setdefault("torchaudio", None)  # fairseq's, of another torch than ours: transformers would trip over it
pytest.importorskip("transformers")
from fw_fairseq.huggingface import (  # noqa: E402
    FastWeightForCausalLM,
    FastWeightHFConfig,
)
from fw_fairseq.huggingface.parts import CACHE  # noqa: E402
from fw_fairseq.huggingface.steps import Steps  # noqa: E402

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("one_thread")]
LENGTHS = [2, 9, 5, 1, 9]
SIZES = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS = {
    "delta": {"mixer_options": {"update_rule": "delta"}, "positions": "sinusoidal"},
    "gated": {
        "mixer_options": {"update_rule": "gated", "feature_norm": "none", "attention_norm": True},
        "normalize_before": False,
        "embedding_norm": True,
    },
    "hybrid": {"mixers": ["softmax", "fast_weight"], "positions": "learned", "max_position_embeddings": 60, "intermediate_size": 0},
    "sru": {"mixers": ["sru"] * 2, "input_bands": [[20, 32], [30, 16]], "output_bands": [[20, 32], [30, 16]]},
    "leap": {"mixers": ["leap", "additive"], "final_norm": False},
}


def build(name: str, **options):
    mixers = {"mixers": MODELS[name].get("mixers", ["fast_weight"] * 2), "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}
    given = {key: value for key, value in asdict(FastWeightConfig()).items() if not key.startswith("_")}
    mixers["mixer_options"] = given | MODELS[name].get("mixer_options", {})
    return FastWeightForCausalLM(FastWeightHFConfig(**SIZES | MODELS[name] | mixers | options)).eval()


@pytest.fixture
def kernels(emulate, monkeypatch):
    return emulate_graphs(emulate(), monkeypatch)


def generate(model, **options) -> list[list[int]]:
    """Continues two prompts, of which the first is padded."""
    prompt, mask = torch.tensor([[1, 1, 7, 8], [4, 5, 6, 9]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    return model.generate(prompt, attention_mask=mask, max_new_tokens=9, **options).tolist()


@pytest.mark.parametrize("positions, window", [("learned", 0), ("sinusoidal", 4), ("none", 4)])
def test_only_learned_positions_limit_the_text_that_a_window_can_be_all_of(positions, window):
    """A window as wide as the longest text is all of the past."""
    options = asdict(FastWeightConfig(window_sizes="4"))
    options = {key: value for key, value in options.items() if not key.startswith("_")}
    model = build("leap", positions=positions, max_position_embeddings=4, mixer_options=options)
    assert [layer.self_attn.window for layer in model.layers] == [window] * 2


def in_general(monkeypatch) -> None:
    monkeypatch.setattr(Steps, "can_read", staticmethod(lambda model, kind: False))


@pytest.mark.parametrize(
    "name, options",
    [
        ("delta", {}),
        ("hybrid", {}),
        *((name, {"num_beams": 3, "min_new_tokens": 9}) for name in MODELS),
        ("gated", {"num_beams": 3}),
    ],
    ids=str,
)
def test_the_short_way_finds_the_same_tokens(name, options, monkeypatch):
    model = build(name)
    found = generate(model, **options)
    in_general(monkeypatch)
    assert found == generate(model, **options)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_the_short_way(name):
    model, token = build(name), torch.full((2, 1), 7)
    cache = model(token.expand(2, 3)).past_key_values
    model(token, past_key_values=cache)
    assert cache.steps is not None and cache.get_seq_length() == 4 and cache.tokens.tolist() == [4, 4]


@torch.no_grad()
def test_a_cache_can_be_copied_and_goes_on_either_way(monkeypatch):
    """With its states in place, and with them given back."""
    model, tokens = build("delta"), torch.randint(4, 50, (2, 12))
    expected = model(tokens, use_cache=False).logits
    cache, logits = model(tokens[:, :4]).past_key_values, []
    for t in range(4, 8):
        logits.append(model(tokens[:, t : t + 1], past_key_values=cache).logits)
    assert all(isinstance(layer.stepper, InPlaceStepper) for layer in cache.steps.layers)
    other = copy.deepcopy(cache)
    assert other.steps is None and other.get_seq_length() == 8
    model(torch.randint(4, 50, (2, 3)), past_key_values=other)  # changes nothing in the first one
    logits.append(model(tokens[:, 8:10], past_key_values=cache).logits)
    logits += [model(tokens[:, t : t + 1], past_key_values=cache).logits for t in (10, 11)]
    torch.testing.assert_close(torch.cat(logits, 1), expected[:, 4:], rtol=1e-4, atol=1e-5)
    cache.reorder_cache(torch.tensor([1]))
    last = model(tokens[1:, :1], past_key_values=cache).logits
    expected = model(torch.cat([tokens[1:], tokens[1:, :1]], 1)).logits[:, -1:]
    torch.testing.assert_close(last, expected, rtol=1e-4, atol=1e-5)


def test_a_cache_goes_on_with_the_model_that_is_called():
    """Also where it was filled token by token by another one, with other weights."""
    one, other, tokens = build("delta"), build("delta"), torch.tensor([[4, 5, 6, 7, 8]])
    for parameter in other.parameters():
        parameter.data.add_(torch.randn_like(parameter).mul_(0.3))
    found = []
    for as_states in (False, True):
        with torch.no_grad():
            cache = one(tokens[:, :3]).past_key_values
            one(tokens[:, 3:4], past_key_values=cache)
            if as_states:
                cache.states  # noqa: B018  (takes them back from the steps)
            found.append(other(tokens[:, 4:], past_key_values=cache).logits)
    torch.testing.assert_close(found[0], found[1])


@torch.no_grad()
def test_a_cache_of_other_sequences_is_refused_and_stays_as_it_is():
    model, tokens = build("delta"), torch.tensor([[4, 5, 6, 7]])
    cache = model(tokens[:, :2]).past_key_values
    model(tokens[:, 2:3], past_key_values=cache)
    for rows in (2, 3):
        with pytest.raises(ValueError, match=f"^{CACHE} is of 1 sequences; it must be of .* the input has, {rows}$"):
            model(tokens[:, 3:].expand(rows, -1), past_key_values=cache)
    assert cache.get_seq_length() == 3
    torch.testing.assert_close(model(tokens[:, 3:], past_key_values=cache).logits[:, 0], model(tokens).logits[:, -1])


@torch.no_grad()
def test_models_with_dynamically_quantised_layers_generate():
    model = torch.ao.quantization.quantize_dynamic(build("delta"), {torch.nn.Linear}, dtype=torch.qint8)
    tokens = torch.tensor([[4, 5, 6]])
    found = model.generate(tokens, max_new_tokens=4, min_new_tokens=4)
    for length in range(3, 7):
        assert model(found[:, :length]).logits[0, -1].topk(2).indices.eq(found[0, length]).any()  # the end is not allowed


@pytest.mark.parametrize("activation", ["gelu_accurate", "gelu_fast", "relu_squared", "linear"])
def test_models_can_be_pickled(activation):
    model, tokens = build("delta", activation=activation), torch.tensor([[4, 5, 6]])
    torch.testing.assert_close(pickle.loads(pickle.dumps(model))(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("name", ["delta", "sru"])
def test_an_output_layer_of_offloaded_embeddings_is_refused(name):
    """accelerate leaves a placeholder in place of an offloaded weight, and multiplies by whatever memory has."""
    model = build(name, tie_word_embeddings=True)
    x = model(torch.tensor([[4, 5]]), output_hidden_states=True).hidden_states[-1]
    model.embed_tokens.to("meta")
    with pytest.raises(ValueError, match="the embeddings are offloaded, and the output layer reads them too; name"):
        model.scores(x)


def test_gradients_hooks_and_hidden_states_take_the_general_way():
    model, tokens = build("delta"), torch.randint(4, 50, (2, 4))
    cache = model(tokens).past_key_values
    assert model(tokens[:, :1], past_key_values=cache).logits.requires_grad and cache.steps is None
    with torch.no_grad():
        assert len(model(tokens[:, :1], past_key_values=cache, output_hidden_states=True).hidden_states) == 3
        assert cache.steps is None
        hook = model.layers[1].fc1.register_forward_hook(lambda module, inputs, output: None)
        model(tokens[:, :1], past_key_values=cache)
        assert cache.steps is None
        hook.remove()
        model(tokens[:, :1], past_key_values=cache)
        assert cache.steps is not None


def test_states_keep_what_was_made_of_the_tokens_once_they_come_one_by_one(monkeypatch):
    """In the general way, too, but with gradients: in place of the window's inputs the state then has their keys and values."""
    in_general(monkeypatch)
    model, tokens = build("delta", mixers=["local_attention"] * 2), torch.randint(4, 50, (2, 4))

    def small(cache) -> bool:
        return all(state.inputs is None and state.memory is not None for state in cache.states.values())

    with torch.no_grad():
        assert not small(model(tokens[:, :1]).past_key_values)
        cache = model(tokens[:, :3]).past_key_values
    assert not small(cache) and not small(model(tokens[:, 3:], past_key_values=copy.deepcopy(cache)).past_key_values)
    with torch.no_grad():
        assert small(model(tokens[:, 3:], past_key_values=cache).past_key_values)


@pytest.mark.parametrize("name, options", [("delta", {"num_beams": 3}), ("gated", {}), ("gated", {"num_beams": 2})], ids=str)
def test_graphs_find_the_same_tokens_at_the_same_addresses(kernels, name, options, monkeypatch):
    model = build(name)
    found = generate(model, **options)
    even, odd = Repeated.made
    for graph in (even, odd):
        assert all(launches == graph.seen[0] for launches in graph.seen) and len(graph.seen[0]) == 2
        assert 0 < graph.largest < 2 * options.get("num_beams", 1) * 4 * 8 * 8
    for (source, target, order), other in zip(even.seen[0], odd.seen[0]):
        assert (target, source, order) == other and source != target
    in_general(monkeypatch)
    assert found == generate(model, **options)


def test_graphs_can_be_switched_off(kernels, monkeypatch):
    model = build("delta")
    found = generate(model, decoding_graph=False)
    monkeypatch.setenv("FW_FAIRSEQ_DECODING_GRAPH", "0")
    assert generate(model) == found
    monkeypatch.delenv("FW_FAIRSEQ_DECODING_GRAPH")
    assert generate(build("delta", decoding_graph=False)) and not Repeated.made
    assert generate(model) == found and len(Repeated.made) == 2


def padded(left: bool) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Prompts of unequal length, as a batch with its mask and one by one."""
    rows = [torch.randint(4, 50, (length,)) for length in LENGTHS]
    side = "left" if left else "right"
    batch = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=1, padding_side=side)
    return batch, batch.ne(1).long(), rows


@pytest.mark.parametrize(
    "name, left, options",
    [
        *((name, left, {}) for name in MODELS for left in (True, False)),
        ("hybrid", True, {"num_beams": 2}),
        ("sru", False, {"num_beams": 2}),
    ],
    ids=str,
)
def test_prompts_of_unequal_length_go_on_as_one_by_one(name, left, options, monkeypatch):
    """Each of the passes has one prompt's tokens, or those of several prompts of its length."""
    model, (batch, mask, rows), sizes = build(name), padded(left), []
    options = options | {"max_new_tokens": 6, "min_new_tokens": 6}
    expected = [model.generate(row[None], **options)[0, len(row) :] for row in rows]
    monkeypatch.setattr(packing, "PASS", 0)
    through = type(model).through_layers
    monkeypatch.setattr(type(model), "through_layers", lambda self, x, *rest: sizes.append(x.shape[:2]) or through(self, x, *rest))
    found = model.generate(batch, attention_mask=mask, **options)[:, batch.shape[1] :]
    assert found.equal(torch.stack(expected))
    copies = options.get("num_beams", 1)  # which transformers makes of the prompts
    assert sorted(sizes) == [(copies * rows, length) for rows, length in ((1, 1), (1, 2), (1, 5), (2, 9))]


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_prompts_may_share_a_pass(name, monkeypatch):
    """Then they are padded; their outputs and states are the same."""
    model, (batch, mask, rows) = build(name), padded(False)
    together = model(batch, attention_mask=mask)
    monkeypatch.setattr(packing, "PASS", 0)
    apart = model(batch, attention_mask=mask)
    torch.testing.assert_close(together.logits, apart.logits, rtol=1e-4, atol=1e-5)
    for row, length in enumerate(LENGTHS):
        alone = model(rows[row][None]).logits[0]
        torch.testing.assert_close(apart.logits[row, :length], alone, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(apart.logits[row, length:], alone[-1:].expand(9 - length, -1), rtol=1e-4, atol=1e-5)
    token = torch.full((5, 1), 7)
    after = [model(token, past_key_values=each.past_key_values).logits for each in (together, apart)]
    torch.testing.assert_close(*after, rtol=1e-4, atol=1e-5)


def test_groups_cost_the_fewest_tokens():
    """Among all ways to cut the sorted lengths."""

    def cost(groups) -> int:
        return sum(len(rows) * max(lengths[row] for row in rows) + packing.PASS for rows in groups)

    lengths = torch.randint(1, 400, (8,)).tolist()
    order = sorted(range(8), key=lambda row: lengths[row])
    ways = []
    for cuts in range(2**7):
        groups = [[order[0]]]
        for place in range(1, 8):
            if cuts >> (place - 1) & 1:
                groups.append([])
            groups[-1].append(order[place])
        ways.append(cost(groups))
    found = packing.cut(lengths)
    assert sorted(row for rows in found for row in rows) == list(range(8)) and cost(found) == min(ways)
    assert packing.cut([3, 4, 3]) and len(packing.cut([3, 4, 3])) == 1 and len(packing.cut([3, 1000, 1000])) == 2
    assert packing.cut([10, 74]) == [[0, 1]] and packing.cut([10, 75]) == [[1], [0]], "a pass takes the time of 64 tokens"
