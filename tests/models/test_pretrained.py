"""pretrained_lm around decoders of transformers: against the library itself, and against the equations in float64."""

from __future__ import annotations

import copy
from argparse import Namespace

import pytest
import torch
from support.commands import ROOT
from support.gpt2 import END, TEXT, save_gpt2
from support.pretrained_models import ARCHITECTURES, LAYERS, build, dictionary_of, make, stirred, symbols, texts, transformers
from torch import nn

from fw_fairseq import Mistake
from fw_fairseq.criterions.t2r_distillation import Distillation
from fw_fairseq.data.pretrained_tokens import PretrainedTokens, PretrainedTokensConfig
from fw_fairseq.modules import Streams
from fw_fairseq.pretrained.adapter import adapt, all_heads
from fw_fairseq.tools.checkpoints import load_model
from fw_fairseq.tools.convert.conversion import convert

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("one_thread")]

GATED_DELTA = {"update_rule": "gated_delta", "feature_map": "relu", "feature_norm": "sum"}
DECAY = {"update_rule": "decay", "feature_map": "identity", "feature_norm": "none"}
HYBRID = {**GATED_DELTA, "mixer_pattern": "fast_weight,softmax,local_attention", "memory_window": 5, "local_window": 4}
NEVER = -1e3
PAGE = ROOT / "docs" / "pretrained.md"


def converted(name: str, monkeypatch, **options):
    """A converted model whose new parts depend on the token."""
    model = build(make(name), monkeypatch, **options)
    for heads in model.decoder.heads.values():
        stirred(heads, 0.3)
    return model


def scores(model, tokens: torch.Tensor, **given) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens, **given)[0]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_softmax_gives_the_logits_of_transformers(name, monkeypatch):
    library = make(name)
    model, tokens = build(library, monkeypatch, mixer="softmax"), texts()
    got = scores(model, symbols(model, tokens))
    with torch.no_grad():
        want = library(tokens).logits
    order = symbols(model, torch.arange(want.shape[-1])[None])[0]
    torch.testing.assert_close(got[..., order], want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.log_softmax(-1)[..., order], want.log_softmax(-1), rtol=1e-5, atol=1e-5)
    assert [model.decoder.dictionary[i] for i in (~model.decoder.known).nonzero()] == ["<pad>", "<unk>"]
    assert (got[..., ~model.decoder.known] < NEVER).all()


def fast_weights(heads, x, q, k, v):
    """What the heads read, from the equations: q (H,T,D) scaled, k and v (G,T,D), x (T,C)."""
    count, per = q.shape[0], q.shape[0] // k.shape[0]
    made, out = heads.in_proj(x), torch.zeros(q.shape[0], len(x), v.shape[2]).double()
    for h in range(count):
        memory = torch.zeros(k.shape[2], v.shape[2]).double()
        for t in range(len(x)):
            query, key, value = q[h, t], k[h // per, t], v[h // per, t]
            if heads.rule_name == "gated_delta":
                phi, bias = heads.feature_map.weight[h], heads.feature_map.bias[h, 0]
                query, key = (torch.relu(part @ phi + bias) for part in (query, key))
                query, key = (part / part.sum().clamp(min=1e-12) for part in (query, key))
                gate, strength = made[t, h].sigmoid(), made[t, count + h].sigmoid()
                left = gate * memory
                memory = left + strength * torch.outer(key, value - left.T @ key)
            else:
                f = made[t, : count * len(key)].view(count, -1)[h].sigmoid()
                z = made[t, count * len(key) :].view(count, -1)[h].sigmoid()
                memory = torch.outer(f, z) * memory + torch.outer(key, heads.value_scale[h, 0] * value)
            out[h, t] = memory.T @ query
    return out


def windowed(heads, x, q, k, v, window):
    """Softmax over the last tokens, and what left them through the memory, by the share of each head."""
    per, local = q.shape[0] // k.shape[0], torch.zeros(q.shape[0], len(x), v.shape[2]).double()
    for h in range(len(q)):
        for t in range(len(x)):
            seen = slice(max(0, t - window + 1), t + 1)
            local[h, t] = (k[h // per, seen] @ q[h, t]).softmax(0) @ v[h // per, seen]
    if heads is None or len(x) <= window:
        return local
    late = torch.cat([q[:, window:], torch.zeros_like(q[:, :0])], 1)
    read = fast_weights(heads, x[:-window], late, k[:, :-window], v[:, :-window])
    share = heads.in_proj(x)[window:, -len(q) :].sigmoid().T[..., None]
    return torch.cat([local[:, :window], share * local[:, window:] + (1 - share) * read], 1)


def reference(library, patterns, tokens):
    """The library's model in float64, whose attention of each layer is what ``patterns`` computes of one text."""
    library = copy.deepcopy(library).double()
    heads = all_heads(library)

    def attention(module, query, key, value, mask, scaling=None, layer_input=None, **others):
        own = heads[module.layer_idx]
        read = patterns[module.layer_idx](own, layer_input[0], query[0] * scaling, key[0], value[0])
        return read[None].transpose(1, 2), None

    transformers.AttentionInterface.register("reference", attention)
    for part in library.modules():
        if hasattr(part, "drops_rotary"):
            part.config._attn_implementation = "reference"
    with torch.no_grad():
        return torch.cat([library(row[None]).logits for row in tokens])


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("rule", [GATED_DELTA, DECAY], ids=["gated_delta", "decay"])
def test_a_converted_model_is_the_equations(name, rule, monkeypatch):
    model, tokens = converted(name, monkeypatch, **rule), texts(count=10)
    order = symbols(model, torch.arange(model.decoder.model.config.vocab_size)[None])[0]
    want = reference(model.decoder.model, [fast_weights] * LAYERS, tokens)
    torch.testing.assert_close(scores(model.double(), symbols(model, tokens))[..., order], want, rtol=1e-9, atol=1e-9)


def test_a_hybrid_is_the_equations(monkeypatch):
    model, tokens = converted("llama", monkeypatch, **HYBRID), texts(count=14)
    order = symbols(model, torch.arange(model.decoder.model.config.vocab_size)[None])[0]
    want = reference(
        model.decoder.model,
        {0: lambda *given: windowed(*given, window=5), 2: lambda own, *given: windowed(None, *given, window=4)},
        tokens,
    )
    torch.testing.assert_close(scores(model.double(), symbols(model, tokens))[..., order], want, rtol=1e-9, atol=1e-9)


def test_llama_from_nothing_but_its_weights(monkeypatch):
    """The whole model in float64: norms, rotary positions, grouped heads and MLP, too."""
    model, tokens = converted("llama", monkeypatch, **GATED_DELTA), texts(rows=1, count=9)
    got = scores(model.double(), symbols(model, tokens))[0]
    core = model.decoder.model.model

    def norm(x, layer):
        return x * (x.square().mean(-1, keepdim=True) + core.config.rms_norm_eps).rsqrt() * layer.weight

    def turned(x):
        half = x.shape[-1] // 2
        angles = torch.arange(x.shape[1])[:, None].double() * 10000.0 ** (-torch.arange(half).double() / half)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)

    with torch.no_grad():
        x = core.embed_tokens.weight[tokens[0]]
        for layer in core.layers:
            inner, own = norm(x, layer.input_layernorm), layer.self_attn
            made = [inner @ linear.weight.T for linear in (own.q_proj, own.k_proj, own.v_proj)]
            q, k, v = (part.unflatten(-1, (-1, own.head_dim)).transpose(0, 1) for part in made)
            read = fast_weights(own.heads, inner, turned(q) * own.head_dim**-0.5, turned(k), v)
            x = x + read.transpose(0, 1).flatten(1) @ own.o_proj.weight.T
            inner, mlp = norm(x, layer.post_attention_layernorm), layer.mlp
            gate = inner @ mlp.gate_proj.weight.T
            x = x + (gate * gate.sigmoid() * (inner @ mlp.up_proj.weight.T)) @ mlp.down_proj.weight.T
        want = norm(x, core.norm) @ model.decoder.model.lm_head.weight.T
    order = symbols(model, torch.arange(want.shape[-1])[None])[0]
    torch.testing.assert_close(got[:, order], want, rtol=1e-6, atol=1e-6)  # the library's rotary positions are in fp32


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_prompt_and_single_tokens_are_one_pass(name, monkeypatch):
    model = converted(name, monkeypatch, **HYBRID)
    tokens = symbols(model, texts())
    want, state, got = scores(model, tokens), {}, []
    for stop in (9, *range(10, tokens.shape[1] + 1)):
        got.append(scores(model, tokens[:, :stop], incremental_state=state))
    torch.testing.assert_close(torch.cat(got, 1), want, rtol=1e-4, atol=1e-5)


def test_a_promised_prompt_is_read_once_for_all_beams(monkeypatch):
    """fairseq's generator gives its tokens one by one, in two rows for each text."""
    model = converted("llama", monkeypatch, **HYBRID)
    tokens, passes = symbols(model, texts()), []
    model.decoder.model.register_forward_hook(lambda module, given, output: passes.append(output.logits.shape[:2]))
    model.decoder.expect_prompt(tokens[:, :9], 2)
    rows, state = tokens.repeat_interleave(2, 0), {}
    got = torch.cat([scores(model, rows[:, :stop], incremental_state=state) for stop in range(1, 13)], 1)
    model.decoder.expect_prompt(None)
    assert passes == [(2, 9), (4, 1), (4, 1), (4, 1)]
    torch.testing.assert_close(got, scores(model, rows[:, :12]), rtol=1e-4, atol=1e-5)


def test_beams_take_their_states_along(monkeypatch):
    model, state = converted("qwen3", monkeypatch, **HYBRID), {}
    tokens = symbols(model, texts(rows=3))
    scores(model, tokens[:, :9], incremental_state=state)
    order = torch.tensor([2, 0, 0])
    model.decoder.reorder_incremental_state_scripting(state, order)
    tokens = torch.cat([tokens[order, :9], tokens[:, 9:]], 1)
    got = scores(model, tokens[:, :12], incremental_state=state)
    torch.testing.assert_close(got, scores(model, tokens[:, :12])[:, 9:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pattern", ["fast_weight", "fast_weight,local_attention"])
def test_segments_of_a_stream_are_one_pass(pattern, monkeypatch):
    """Rotary positions count on from segment to segment."""
    model = converted("llama", monkeypatch, **HYBRID | {"mixer_pattern": pattern})
    tokens, streams = symbols(model, texts()), Streams()
    got = torch.cat([scores(model, tokens[:, part], streams=streams) for part in (slice(0, 7), slice(7, 8), slice(8, 20))], 1)
    torch.testing.assert_close(got, scores(model, tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "opt"])
@pytest.mark.parametrize("options", [GATED_DELTA, HYBRID], ids=["gated_delta", "hybrid"])
def test_padding_changes_nothing(name, options, monkeypatch):
    model = converted(name, monkeypatch, **options)
    tokens = symbols(model, texts())
    pad = model.decoder.pad
    right, left = tokens.clone(), tokens.clone()
    right[0, 12:], left[0, :8] = pad, pad
    torch.testing.assert_close(scores(model, right)[0, :12], scores(model, tokens[:1, :12])[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(scores(model, left)[0, 8:], scores(model, tokens[:1, 8:])[0], rtol=1e-4, atol=1e-5)


def test_a_reset_begins_a_text(monkeypatch):
    """Also where the text before it is still in the window."""
    model = converted("llama", monkeypatch, **HYBRID | {"mixer_pattern": "fast_weight,local_attention"})
    tokens, resets = symbols(model, texts()), torch.zeros(2, 20, dtype=torch.bool)
    resets[:, 6] = True
    got = scores(model, tokens, reset_mask=resets)
    alone = scores(model, tokens[:, 6:])
    torch.testing.assert_close(got[:, 6:], alone, rtol=1e-4, atol=1e-5)


def test_activations_that_are_computed_again_give_the_same_gradients(monkeypatch):
    options = {**HYBRID, "mixer_pattern": "fast_weight,local_attention"}
    plain = converted("llama", monkeypatch, **options).train()
    again = build(make("llama"), monkeypatch, **options, checkpoint_activations=True).train()
    again.load_state_dict(plain.state_dict())
    tokens = symbols(plain, texts())
    for model in (plain, again):
        streams = Streams()
        model(tokens[:, :8], streams=streams)
        model(tokens[:, 8:], streams=streams)[0].log_softmax(-1)[..., 5].sum().backward()
    for (name, x), y in zip(plain.named_parameters(), again.parameters()):
        torch.testing.assert_close(x.grad, y.grad, msg=name)


def test_only_new_parts_train(monkeypatch):
    model = build(make("llama"), monkeypatch, **HYBRID, train_only="new")
    trained = {name.split(".heads.")[1] for name, x in model.named_parameters() if x.requires_grad}
    assert trained == {"in_proj.weight", "in_proj.bias", "feature_map.weight", "feature_map.bias"}
    assert sum(x.requires_grad for x in model.parameters()) == 4
    with pytest.raises(Mistake, match="leaves nothing to train"):
        build(make("llama"), monkeypatch, mixer="softmax", train_only="new")


def test_rotary_positions_can_be_left_out(monkeypatch):
    """Then a text that begins later is read in the same way, and with them, too: they are relative. Only their absence makes two
    memories of a permuted past equal."""
    options = {"update_rule": "sum", "feature_map": "identity", "feature_norm": "none"}
    differences = []
    for drops in (False, True):
        model = converted("llama", monkeypatch, **options, mixer_pattern="fast_weight", drop_rotary=drops)
        model.decoder.model.model.layers = model.decoder.model.model.layers[:1]
        tokens = symbols(model, texts(rows=1))
        permuted = torch.cat([tokens[:, :18].flip(1), tokens[:, 18:]], 1)
        differences.append((scores(model, tokens)[0, -1] - scores(model, permuted)[0, -1]).abs().max().item())
    assert differences[0] > 1e-2 > 1e-5 > differences[1]


def test_what_does_not_fit_is_refused_in_one_sentence(monkeypatch):
    with pytest.raises(Mistake, match="sru cannot take the place of a pretrained attention"):
        build(make("llama"), monkeypatch, mixer="sru")
    with pytest.raises(Mistake, match="does not have one attention in each layer"):
        adapt(nn.Linear(2, 2), ["fast_weight"], {})
    bloom = transformers.AutoModelForCausalLM.from_config(
        transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=50)
    )
    with pytest.raises(Mistake, match=r"docs/pretrained.md says what an architecture needs"):
        adapt(bloom, ["fast_weight"] * 2, {})
    model = build(make("gpt2"), monkeypatch, mixer="softmax")
    with pytest.raises(Mistake, match="--memory-window has no effect"):
        model.refuse_without_effect(type("Options", (), {"memory_window": 4, "mixer": "softmax"}))


def test_an_architecture_is_added_as_the_page_says():
    module = pytest.importorskip("transformers.models.xglm.modeling_xglm")
    config = transformers.XGLMConfig(d_model=32, ffn_dim=40, num_layers=2, attention_heads=4, vocab_size=50, activation_dropout=0)
    library = stirred(transformers.AutoModelForCausalLM.from_config(config).eval(), 0.1)
    with pytest.raises(Mistake, match=r"docs/pretrained\.md says what an architecture needs"):
        adapt(library, ["softmax", "fast_weight"], {})
    tokens = texts()
    with torch.no_grad():
        before = library(tokens).logits
        forward = module.XGLMAttention.forward
        try:
            exec(PAGE.read_text().split("```python\n")[1].split("```")[0], {})
            torch.testing.assert_close(library(tokens).logits, before)
            adapt(library, ["softmax", "fast_weight"], GATED_DELTA)
            once = library(tokens).logits
            asked = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            found = library.generate(tokens[:, :9], **asked, return_dict_in_generate=True, output_logits=True)
            again = library(found.sequences).logits[:, 8:-1]
            torch.testing.assert_close(torch.stack(found.logits, 1), again, rtol=1e-4, atol=1e-5)
        finally:
            module.XGLMAttention.forward = forward
            del module.XGLMAttention.config, module.XGLMAttention.is_causal
    assert (once - before).abs().max() > 1e-3


def test_the_tokenizer_of_the_folder_makes_and_joins_symbols(tmp_path):
    save_gpt2(tmp_path)
    bpe = PretrainedTokens(PretrainedTokensConfig(pretrained_tokenizer=str(tmp_path)))
    encoded = bpe.encode(f"{TEXT}{END}")
    tokens = transformers.AutoTokenizer.from_pretrained(tmp_path)(TEXT)["input_ids"]
    assert encoded == " ".join(map(str, tokens)) + " </s>"
    assert bpe.decode(f"{encoded} <pad>") == TEXT + END
    with pytest.raises(Mistake, match="--pretrained-tokenizer is missing"):
        PretrainedTokens(PretrainedTokensConfig())


def test_data_of_another_dictionary_are_refused(monkeypatch):
    library, other = make("llama"), make("llama")
    other.config.eos_token_id = 9
    made = dictionary_of(other)
    monkeypatch.setattr("support.pretrained_models.dictionary_of", lambda _: made)
    with pytest.raises(Mistake, match="the dictionary has '7', which is no token of the pretrained model"):
        build(library, monkeypatch)


@pytest.mark.parametrize("name", ["qwen3", "pythia"])
def test_attention_transfer_compares_each_layer_with_the_softmax_it_was(name, monkeypatch):
    """The reference runs the unchanged model, and hands each layer's own inputs to the heads."""
    options = {**HYBRID, "mixer_pattern": "fast_weight,softmax,fast_weight"}
    model, tokens = converted(name, monkeypatch, **options, train_only="new").train(), texts()
    padded = symbols(model, tokens)
    padded[1, 15:] = model.decoder.pad
    plain, seen = make(name), {}
    found = model.decoder.attention_distance(padded)

    def softmax(module, query, key, value, mask, scaling=None, layer_input=None, **others):
        per = query.shape[1] // key.shape[1]
        k, v = (part.repeat_interleave(per, 1) for part in (key, value))
        scores = (query @ k.mT * scaling).masked_fill(torch.ones(20, 20).triu(1).bool(), -torch.inf)
        y = (scores.softmax(-1) @ v).transpose(1, 2)
        seen[module.layer_idx] = (layer_input, query * scaling, key, value, y)
        return y, None

    adapt(plain, ["fast_weight"] * LAYERS, {})
    transformers.AttentionInterface.register("reference", softmax)
    for part in plain.modules():
        if hasattr(part, "drops_rotary"):
            part.config._attn_implementation = "reference"
    want = []
    with torch.no_grad():
        plain(tokens)
        for layer, heads in model.decoder.heads.items():
            *given, softmaxes = seen[layer]
            pairs = []
            for row, count in enumerate((20, 15)):
                x, q, k, v = (part[row] if part.dim() == 3 else part[row, :, :count] for part in given)
                read = windowed(copy.deepcopy(heads).double(), x[:count].double(), *(part.double() for part in (q, k, v)), window=5)
                pairs.append((read.transpose(0, 1), softmaxes[row, :count].double()))
            distance = sum((x - y).square().sum() for x, y in pairs) / sum(y.square().sum() for _, y in pairs)
            want.append(distance)
    torch.testing.assert_close(found.double(), sum(want) / 2, rtol=1e-4, atol=1e-6)
    found.backward()
    assert all((x.grad is not None) == (".heads." in name) for name, x in model.named_parameters())


def test_words_of_a_teacher_that_shares_what_is_not_trained(tmp_path):
    """The divergence from the original's words, and the memory of embeddings, MLPs and norms once for both."""
    library = make("qwen3")
    library.save_pretrained(tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "softmax" / "start.pt", "softmax")
    convert(tmp_path / "model", tmp_path / "start.pt", "gated_delta", memory_window=4)
    teacher = str(tmp_path / "softmax" / "start.pt")
    student, task = load_model(tmp_path / "start.pt", tmp_path, "a test", ("pretrained_lm",))
    student.train().freeze_all_but("attention")
    given = {"sentence_avg": False, "ddp_backend": "legacy_ddp", "state_norm_penalty": 0.0, "match": "hidden"}
    criterion = Distillation(task, **given, teacher=teacher, match_updates=0, teacher_weight=0.25)
    tokens = symbols(student, texts())
    sample = {"net_input": {"src_tokens": tokens[:, :-1], "src_lengths": None}, "target": tokens[:, 1:].contiguous()}
    loss, size, log = criterion(student, sample)
    with torch.no_grad():
        want = library(texts()[:, :-1]).logits.double().log_softmax(-1)
        order = symbols(student, torch.arange(want.shape[-1])[None])[0]
        got = student(tokens[:, :-1])[0].double()[..., order].log_softmax(-1)
    divergence = (want.exp() * (want - got)).sum()
    text = -got.gather(2, texts()[:, 1:, None]).sum()
    torch.testing.assert_close(log["distil_teacher"].double(), divergence, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(loss.double(), 0.25 * divergence + 0.75 * text, rtol=1e-4, atol=1e-4)
    assert size == tokens[:, 1:].numel()
    theirs = dict(criterion._teacher[0].named_parameters())
    same = {name: x.data_ptr() == theirs[name].data_ptr() for name, x in student.named_parameters() if name in theirs}
    assert all(shared != (".self_attn." in name) for name, shared in same.items()) and len(same) == len(theirs)
    criterion = Distillation(task, **given, teacher=teacher, match_updates=1, teacher_weight=0.25)
    with pytest.raises(Mistake, match=r"--match-updates is not for pretrained_lm.*attention_transfer first"):
        criterion(student, sample)


def test_only_attention_trains(monkeypatch):
    model = build(make("llama"), monkeypatch, **HYBRID, train_only="attention")
    assert {".self_attn." in name for name, x in model.named_parameters() if x.requires_grad} == {True}
    assert {".self_attn." in name for name, x in model.named_parameters() if not x.requires_grad} == {False}


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_only_adapters_train_and_merge_into_the_weights(name, monkeypatch):
    """Before training they change nothing. The reference adds their products to the library's own weights."""
    library, tokens = make(name), texts()
    plain = build(library, monkeypatch, mixer="softmax")
    model = build(library, monkeypatch, mixer="softmax", train_only="adapters", adapter_rank=2)
    torch.testing.assert_close(scores(model, symbols(model, tokens)), scores(plain, symbols(plain, tokens)), rtol=0, atol=0)
    adapters = {name: x for name, x in model.named_parameters() if x.requires_grad}
    assert all(".self_attn." in name or ".attn." in name for name in adapters)
    assert len(adapters) == LAYERS * 2 * {"llama": 4, "gpt2": 2}[name]
    model(symbols(model, tokens))[0].log_softmax(-1)[..., 5].sum().backward()
    assert all(x.grad.any() == name.endswith(".left") for name, x in adapters.items())
    stirred(nn.ParameterList(adapters.values()), 0.2)
    with torch.no_grad():
        for key, x in adapters.items():
            if key.endswith(".left"):
                part = library.get_submodule(key.removeprefix("decoder.model.").removesuffix(".adapter.left"))
                part.weight.add_(x @ adapters[key.replace(".left", ".right")])
        want = library(tokens).logits
    order = symbols(model, torch.arange(want.shape[-1])[None])[0]
    torch.testing.assert_close(scores(model, symbols(model, tokens))[..., order], want, rtol=1e-4, atol=1e-4)
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(scores(plain, symbols(plain, tokens))[..., order], want, rtol=1e-4, atol=1e-4)


def test_a_converted_model_gets_adapters_beside_its_heads(monkeypatch):
    """Which a checkpoint without adapters leaves as they are."""
    start = converted("llama", monkeypatch, **HYBRID)
    model = build(make("llama"), monkeypatch, **HYBRID, train_only="adapters", adapter_rank=3)
    model.load_state_dict(start.state_dict())
    tokens = symbols(model, texts())
    torch.testing.assert_close(scores(model, tokens), scores(start, tokens), rtol=0, atol=0)
    trained = {name for name, x in model.named_parameters() if x.requires_grad}
    assert len(trained) == LAYERS * 2 * 4 and not [name for name in trained if ".heads." in name]
    options = Namespace(train_only="all", adapter_rank=3, mixer="softmax")
    with pytest.raises(Mistake, match="--adapter-rank has no effect"):
        start.refuse_without_effect(options)
