"""The language models of the code that Schlag et al. 2021 published: their size, their start and their equations."""

from __future__ import annotations

import math

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq import models as registered
from fairseq.modules import AdaptiveSoftmax
from support.checkpoints import save, save_format
from support.draws import PLAIN
from support.language_models import build, draw, make_task, options_of
from torch.nn import functional as F

from fw_fairseq.mixers.fast_weight import FastWeight
from fw_fairseq.models.retrieval import RetrievalConfig, RetrievalModel
from fw_fairseq.modules import Streams
from fw_fairseq.modules.plain_softmax import PlainAdaptiveSoftmax
from fw_fairseq.patches.checkpoints.model_options import UNSEEN, differing
from fw_fairseq.patches.checkpoints.reading import model_options
from fw_fairseq.rules import RULES
from fw_fairseq.tasks.stateful_language_modeling import check_across_workers

pytestmark = pytest.mark.quick

WORDS, CUTOFF = 400, "100,200"


def published(size: str = "small", words: int = WORDS, cutoff: str = CUTOFF, **options):
    """The model with the delta rule, as the recipe's row small-delta_schlag builds it, with other words; or that of another row."""
    args = options_of(f"fast_weight_lm_wiki103_{size}_schlag", adaptive_softmax_cutoff=cutoff, tokens_per_sample=64, **options)
    return registered.MODEL_REGISTRY["fast_weight_lm"].build_model(args, make_task(words))


def parameters_of_the_authors(words: int, bands: int, width: int, heads: int = 8, inner: int = 2048, layers: int = 16) -> int:
    """Counted from their code: tied words with biases, bands' classes with biases; q, k, v, beta and output without biases, two
    norms, and a feed-forward layer, in each layer. Softmax attention has no beta: heads = 0."""
    layer = width * (3 * width + heads) + width * width + 2 * width * inner + inner + width + 4 * width
    return (words + bands) * (width + 1) + layers * layer


@pytest.mark.parametrize("size, width", [("small", 128), ("medium", 256)])
def test_the_number_of_parameters(size, width):
    model = published(size)
    assert sum(p.numel() for p in model.parameters()) == parameters_of_the_authors(WORDS, 2, width)


@pytest.mark.parametrize("size, width", [("small", 128), ("medium", 256)])
def test_the_number_of_parameters_of_the_comparators(size, width):
    """Transformer-XL has a matrix more in each layer, for distances, and two vectors, which all layers of the authors share."""
    plain = parameters_of_the_authors(WORDS, 2, width, heads=0)
    transformer = published(size, mixer="softmax")
    assert sum(p.numel() for p in transformer.parameters()) == plain
    xl = published(size, mixer="transformer_xl", no_token_positional_embeddings=True)
    assert sum(p.numel() for p in xl.parameters()) == plain + 16 * (width**2 + 2 * width)


def test_the_published_numbers_of_parameters():
    """44.0 and 89.9 million, of 267,735 words in four bands."""
    assert parameters_of_the_authors(267735, 3, 128) == 44_034_778 and parameters_of_the_authors(267735, 3, 256) == 89_866_202


@torch.no_grad()
def test_the_start():
    """Weights from N(0, 0.02), norms from N(1, 0.02), and writes of strength 1/2."""
    model = published()
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            assert (p == 0).all(), name
        else:
            weights = p[p.abs().sum(-1) > 0] if p.dim() == 2 else p - 1  # the row of padding is 0
            assert weights.std().item() == pytest.approx(0.02, rel=0.25) and weights.mean().abs() < 0.01, name
    mixers = [module for module in model.modules() if isinstance(module, FastWeight)]
    assert len(mixers) == 16
    words = model.decoder.embed_tokens
    assert words.padding_idx == 1 and (words.weight.abs().sum(1) == 0).nonzero().flatten().tolist() == [1]
    x = torch.randn(50, 4, 128)
    for mixer in mixers:
        beta = torch.sigmoid(mixer.in_proj(x)[..., -8:])
        assert beta.min() > 0.2 and beta.max() < 0.8 and beta.mean().item() == pytest.approx(0.5, abs=0.05)


def test_gates_start_where_their_biases_have_them():
    """Whatever the width of the distribution of the weights; other biases are 0."""
    model = build(init_std=0.02, write_strength_init=0.25)
    mixer, plain = model.decoder.mixers[0].mixer, build(write_strength_init=0.25).decoder.mixers[0].mixer
    assert mixer.in_proj.bias.equal(plain.in_proj.bias) and mixer.in_proj.bias.any()
    assert mixer.in_proj.weight.std().item() == pytest.approx(0.02, rel=0.25)
    assert not model.decoder.layers[0].fc1.bias.any()


@pytest.mark.parametrize("tied", [False, True])
def test_rows_that_start_as_0_stay(tied):
    """That of padding, also where the output layer has the table of the input, and the gates of RWKV-7 that are the same for all
    tokens at first."""
    options = {"update_rule": "rwkv7", "feature_map": "identity", "feature_norm": "none", "token_shift": True}
    options |= {"share_decoder_input_output_embed": tied}
    make = registered.MODEL_REGISTRY["fast_weight_lm"].build_model
    drawn, plain = (make(options_of("fast_weight_lm", init_std=std, **options), make_task(40)) for std in (0.02, 0.0))
    for name in ("decoder.embed_tokens.weight", "decoder.layers.0.self_attn.mixer.in_proj.weight"):
        rows = [model.state_dict()[name].eq(0).all(-1) for model in (drawn, plain)]
        assert rows[0].any() and rows[0].equal(rows[1])
        assert drawn.state_dict()[name][~rows[0]].std().item() == pytest.approx(0.02, rel=0.25)


def test_the_dropouts():
    model = published()
    decoder = model.decoder
    assert (decoder.output_dropout.p, decoder.dropout_module.p) == (0.1, 0.1)
    assert {(layer.activation_dropout_module.p, layer.dropout_module.p) for layer in decoder.layers} == {(0.1, 0.1)}
    features = torch.ones(2, 3, 128)
    assert (decoder.train().output_layer(features) == 0).any() and (decoder.eval().output_layer(features) == 1).all()


def read_by_the_delta_rule(at, x, part, heads=8):
    """What the heads of layer ``part`` read, (T,C): keys and queries after ELU + 1 divided by their sums, reads by sqrt(d)."""
    elu = lambda x: torch.where(x > 0, x + 1, x.exp())  # noqa: E731
    width = x.shape[1]
    d, read = width // heads, torch.zeros_like(x)
    q, k, v, beta = (x @ at[f"{part}.mixer.in_proj.weight"].mT).split([width, width, width, heads], -1)
    for h in range(heads):
        own = slice(h * d, h * d + d)
        W = x.new_zeros(d, d)
        for t in range(len(x)):
            key, query = (elu(y[t, own]) / elu(y[t, own]).sum() for y in (k, q))
            W = W + torch.sigmoid(beta[t, h]) * torch.outer(v[t, own] - W @ key, key)
            read[t, own] = W @ query / math.sqrt(d)
    return read @ at[f"{part}.mixer.out_proj.weight"].mT


def read_by_softmax(at, x, part, heads=8):
    """What causal softmax attention without biases reads, (T,C)."""
    width = x.shape[1]
    d, read = width // heads, torch.zeros_like(x)
    q, k, v = (x @ at[f"{part}.{name}_proj.weight"].mT for name in "qkv")
    for h in range(heads):
        own = slice(h * d, h * d + d)
        for t in range(len(x)):
            weights = (k[: t + 1, own] @ q[t, own] / math.sqrt(d)).exp()
            read[t, own] = weights @ v[: t + 1, own] / weights.sum()
    return read @ at[f"{part}.out_proj.weight"].mT


def scores_by_the_equations(model, tokens, read, layers=2):
    """Log probabilities (B,T,words) in float64 from the weights of the model: positions from the end of the text, norms after the
    sums. ``read``: what attention adds."""
    at = {name: p.detach() for name, p in model.decoder.state_dict().items()}
    table = at["embed_tokens.weight"]
    width = table.shape[1]
    rates = torch.tensor([10000 ** (-2 * i / width) for i in range(width // 2)], dtype=torch.float64)
    angles = torch.tensor([*range(tokens.shape[1])][::-1], dtype=torch.float64)[:, None] * rates
    positions = torch.cat([angles.sin(), angles.cos()], -1)
    results = []
    for row in tokens:
        x = table[row] * math.sqrt(width) + positions
        for i in range(layers):
            norm = lambda x, name: F.layer_norm(x, (width,), at[f"{name}.weight"], at[f"{name}.bias"])  # noqa: E731
            x = norm(x + read(at, x, f"layers.{i}.self_attn"), f"layers.{i}.self_attn_layer_norm")
            inner = torch.relu(x @ at[f"layers.{i}.fc1.weight"].mT + at[f"layers.{i}.fc1.bias"])
            x = norm(x + inner @ at[f"layers.{i}.fc2.weight"].mT + at[f"layers.{i}.fc2.bias"], f"layers.{i}.final_layer_norm")
        softmax = "adaptive_softmax."
        head = torch.cat([table[:100], at[softmax + "head.classes"]])
        head = (x @ head.mT + at[softmax + "head.bias"]).log_softmax(-1)
        bands = [head[:, :100]]
        for band, (first, last) in enumerate([(100, 200), (200, WORDS)]):
            inside = (x @ table[first:last].mT + at[f"{softmax}tail.{band}.bias"]).log_softmax(-1)
            bands.append(head[:, 100 + band, None] + inside)
        results.append(torch.cat(bands, -1))
    return torch.stack(results)


@pytest.mark.parametrize("mixer, read", [("fast_weight", read_by_the_delta_rule), ("softmax", read_by_softmax)])
def test_the_whole_model(mixer, read):
    model, tokens = drawn(mixer=mixer), draw(2, 9)
    output = model(tokens)
    got = model.get_normalized_probs(output, log_probs=True)
    want = scores_by_the_equations(model, tokens, read)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.exp().sum(-1), torch.ones(2, 9, dtype=torch.float64))
    target = torch.randint(4, WORDS, (2, 9))
    logits, targets = model.decoder.adaptive_softmax(output[0], target)
    losses = [F.cross_entropy(x, t, reduction="sum") for x, t in zip(logits, targets) if t is not None]
    torch.testing.assert_close(sum(losses), -want.gather(-1, target.unsqueeze(-1)).sum(), rtol=1e-5, atol=1e-4)


def drawn(**options):
    model = published(decoder_layers=2, **options).double().eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model


@torch.no_grad()
def test_positions_count_from_the_end_of_a_text_or_segment():
    """Whatever padding follows or stands before it; in streams each segment has positions of its own."""
    model, tokens = drawn(), draw(1, 7)
    want = model(tokens)[0]
    for padding in ((0, 3), (3, 0)):
        own = slice(padding[0], padding[0] + 7)
        torch.testing.assert_close(model(F.pad(tokens, padding, value=1))[0][:, own], want)
    streams = Streams()
    torch.testing.assert_close(model(tokens, streams=streams)[0], want)
    emptied = torch.tensor([[True, False, False]])
    torch.testing.assert_close(model(tokens[:, :3], streams=streams, reset_mask=emptied)[0], model(tokens[:, :3])[0])


def test_positions_from_the_end_score_and_do_not_generate():
    model = published(decoder_layers=2)
    with pytest.raises(ValueError, match=r"^--positions-from-end moves all positions with each new token; such a model scores and"):
        model(draw(1, 3), incremental_state={})
    with pytest.raises(ValueError, match=r"^--sequence-parallel: --positions-from-end counts the tokens of later workers"):
        check_across_workers(model)
    for other in ("no_token_positional_embeddings", "decoder_learned_pos"):
        assert not options_of("fast_weight_lm_wiki103_small_schlag", **{other: True}).positions_from_end
        with pytest.raises(ValueError, match=r"^--positions-from-end is for sinusoidal positions; leave it out, or"):
            published(decoder_layers=2, positions_from_end=True, **{other: True})


@torch.no_grad()
def test_a_checkpoint_of_before_keeps_its_positions(tmp_path):
    """It lacks the option, which the architecture sets today; a run of today does not continue it unawares."""
    model, tokens = drawn(positions_from_end=False), draw(2, 9)
    arch = "fast_weight_lm_wiki103_small_schlag"
    now = options_of(arch, adaptive_softmax_cutoff=CUTOFF, decoder_layers=2, tokens_per_sample=64)
    saved = vars(now) | {"_name": arch, "arch": arch}
    path = save(
        save_format({}, cfg={"model": {name: x for name, x in saved.items() if name != "positions_from_end"}, "task": {}}), tmp_path
    )
    read = checkpoint_utils.load_checkpoint_to_cpu(str(path))["cfg"]["model"]
    loaded = registered.build_model(read, make_task(WORDS), from_checkpoint=True).double().eval()
    loaded.load_state_dict(model.state_dict())
    torch.testing.assert_close(loaded(tokens)[0], model(tokens)[0], rtol=0, atol=0)
    assert differing(model_options[str(path)], now, {*UNSEEN}) == {"positions_from_end": (False, True)}


@pytest.mark.parametrize("rule", [name for name in PLAIN if any(gate.writes for gate in RULES[name].gates.values())])
def test_the_start_of_write_strength(rule):
    """In language models and in retrieval; only that gate, and before the weights add what they do."""
    model = build(update_rule=rule, feature_norm="sum", write_strength_init=0.25)
    mixer = model.decoder.mixers[0].mixer
    biases = dict(zip(mixer.sizes, mixer.in_proj.bias.split(list(mixer.sizes.values()))))
    torch.testing.assert_close(torch.sigmoid(biases["beta"]), torch.full((4,), 0.25, dtype=torch.float64))
    assert all((bias == 0).all() for name, bias in biases.items() if name != "beta" and (rule, name) != ("gated_delta", "g"))
    retrieval = RetrievalModel(RetrievalConfig(update_rule=rule, write_strength_init=0.25), 7)
    torch.testing.assert_close(torch.sigmoid(retrieval.gates["beta"].bias), torch.full((1,), 0.25))


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"write_strength_init": 0.5, "update_rule": "decay", "feature_norm": "none"},
            r"^--write-strength-init is 0.5; --update-rule decay has no such gate; use one of: delta, gated_delta, fwm",
        ),
        (
            {"write_strength_init": 0.5, "update_rule": "mamba2", "feature_norm": "none"},
            r"^--write-strength-init is 0.5; --update-rule mamba2 has no such gate; use one of: delta, gated_delta, fwm",
        ),
        (
            {"write_strength_init": 0.5, "bias_free": True},
            "^--write-strength-init is 0.5, a bias; leave it out",
        ),
        (
            {"plain_adaptive_softmax": True},
            "^--adaptive-softmax-cutoff is missing; with --plain-adaptive-softmax it must rise and stay below 40",
        ),
        (
            {"plain_adaptive_softmax": True, "adaptive_softmax_cutoff": "20,10"},
            "^--adaptive-softmax-cutoff is 20,10, and the dictionary has 40 words; its numbers must grow, and be at most that$",
        ),
        ({"sru_highway_bias": 1e9, "mixer": "sru"}, "^--sru-highway-bias is 1000000000.0; it must be at least -100 and below 100"),
        ({"sru_highway_bias": math.nan, "mixer": "sru"}, "^--sru-highway-bias is nan; it must be at least -100 and below 100"),
        ({"init_std": -1.0}, "^--init-std is -1.0; it must be at least 0 and below 1"),
        ({"output_dropout": 1.0}, "^--output-dropout is 1.0; it must be at least 0 and below 1"),
    ],
)
def test_refused(options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)


@pytest.mark.parametrize(
    "cutoff, fits", [([1], True), ([39], True), ([0], False), ([40], False), ([10, 10], False), ([10, 39], True)]
)
def test_where_bands_may_end(cutoff, fits):
    """Each has a word at least, and they rise."""
    words = torch.nn.Embedding(40, 4)
    if not fits:
        with pytest.raises(ValueError, match="it must rise and stay below 40, the number of words"):
            PlainAdaptiveSoftmax(words, cutoff, 0.0)
        return
    softmax = PlainAdaptiveSoftmax(words, cutoff, 0.0)
    x = torch.randn(2, 3, 4)
    assert softmax.get_log_prob(x, None).exp().sum(-1).allclose(torch.ones(2, 3))
    sizes = [band.bias.numel() for band in (softmax.head, *softmax.tail)]
    assert sizes == [cutoff[0] + len(cutoff), *(stop - start for start, stop in zip(cutoff, [*cutoff[1:], 40]))]


def test_what_bands_start_from():
    """Words of a band for later bands from Glorot's distribution, biases at 0, and fairseq's number of its format."""
    softmax = PlainAdaptiveSoftmax(torch.nn.Embedding(100, 64), [20, 40, 60, 80], 0.0)
    end = (6 / (4 + 64)) ** 0.5
    assert softmax.head.classes.shape == (4, 64) and 0.9 * end < softmax.head.classes.abs().max() <= end
    assert not any(band.bias.any() for band in (softmax.head, *softmax.tail))
    assert softmax.state_dict()["version"].tolist() == AdaptiveSoftmax(9, 4, [5], 0.0).version.tolist() == [1]


def test_the_words_are_one_table():
    model = published()
    softmax = model.decoder.adaptive_softmax
    assert isinstance(softmax, PlainAdaptiveSoftmax)
    assert all(band.words is model.decoder.embed_tokens.weight for band in (softmax.head, *softmax.tail))
    copied = published()
    copied.load_state_dict(model.state_dict())
    assert torch.equal(copied.decoder.embed_tokens.weight, copied.decoder.adaptive_softmax.tail[1].words)
