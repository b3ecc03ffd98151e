"""A rule, a feature map and a mixer of another package: tests/files/extension, registered as its users would."""

from __future__ import annotations

import sys

import pytest
import torch
from support.checkpoints import save, source
from support.commands import ROOT, fairseq, run, succeed
from support.imports import import_file
from support.language_models import assert_close, build, draw
from support.runs import updates
from support.streams import MODEL

from fw_fairseq.config import FastWeightConfig
from fw_fairseq.feature_maps import FEATURE_MAPS
from fw_fairseq.mixers import MIXERS
from fw_fairseq.models.retrieval import RetrievalConfig, RetrievalModel
from fw_fairseq.modules import Streams
from fw_fairseq.rules import RULES

EXTENSION = ROOT / "tests" / "files" / "extension"
USER_DIR = ["--user-dir", EXTENSION, "--cpu"]
OPTIONS = {
    "rule": {"update_rule": "decayed_delta"},
    "rule-wide": {"update_rule": "decayed_delta", "feature_map": "identity", "feature_norm": "l2", "feature_dim": 40},
    "map": {"feature_map": "squares"},
    "map-normalised": {"update_rule": "sum", "feature_map": "squares", "feature_norm": "none", "attention_norm": True},
    "both": {"update_rule": "decayed_delta", "feature_map": "squares"},
    "mixer": {"mixer": "moving_average"},
    "pattern": {"mixer_pattern": "moving_average,fast_weight", "update_rule": "decayed_delta"},
}
pytestmark = pytest.mark.usefixtures("one_thread", "extension")
every_part = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


@pytest.fixture(scope="module")
def extension():
    """Registered for this file only."""
    registries = (RULES, FEATURE_MAPS, MIXERS)
    before = [dict(registry) for registry in registries]
    yield import_file(EXTENSION / "__init__.py", "extension")
    for registry, entries in zip(registries, before):
        registry.clear()
        registry.update(entries)


def layer_of(options: dict):
    name = options.get("mixer", options.get("mixer_pattern", "fast_weight")).partition(",")[0]
    return MIXERS[name].of_layer(16, 2, FastWeightConfig(**options), 0, 2).double()


@every_part
def test_a_layer_in_one_pass_equals_its_steps(options):
    layer, x = layer_of(options), torch.randn(70, 2, 16).double()
    padding, resets = (torch.rand(2, 70) < 0.2 for _ in range(2))
    whole, last = layer(x, None, padding, resets)
    state, steps = None, []
    for t in range(70):
        y, state = layer(x[t : t + 1], state, padding[:, t : t + 1], resets[:, t : t + 1], decoding=True)
        steps.append(y)
    real = ~padding.T
    assert_close(torch.cat(steps)[real], whole[real])
    assert_close(layer(x[:1], state)[0], layer(x[:1], last)[0])


@pytest.mark.parametrize("backend", ["auto", "chunkwise"])
def test_the_rule_is_its_equation(backend):
    """W_t = Diag(f) W - beta k (k^T Diag(f) W) + beta k v^T, read after the write; also its gradients."""
    layer = layer_of({"update_rule": "decayed_delta", "feature_map": "squares", "fast_weight_backend": backend})
    x = torch.randn(70, 1, 16).double()
    q, k, v = (part[0] for part in layer.operands(x)[:3])
    f, beta = (gate[0] for gate in layer.operands(x)[3].values())
    memory, reads = torch.zeros(2, k.shape[-1], 8).double(), []
    for t in range(70):
        left = f[:, t, :, None] * memory
        erased = torch.einsum("hk,hkv->hv", k[:, t], left)
        memory = left + beta[:, t, None, None] * torch.einsum("hk,hv->hkv", k[:, t], v[:, t] - erased)
        reads.append(torch.einsum("hk,hkv->hv", q[:, t], memory).flatten())
    expected = layer.out_proj(torch.stack(reads))[:, None]
    y, state = layer(x)
    assert_close(y, expected)
    assert_close(state.memory[0], memory)
    parameters = [layer.in_proj.weight, layer.in_proj.bias]
    for actual, wanted in zip(*(torch.autograd.grad(out.square().sum(), parameters) for out in (y, expected))):
        assert_close(actual, wanted, 1e-7)


@every_part
def test_a_model_decodes_and_streams_as_the_full_pass(options):
    model, tokens, streams = build(no_token_positional_embeddings=True, **options), draw(2, 12), Streams()
    whole = model(tokens)[0]
    state = {}
    assert_close(torch.cat([model(tokens[:, : t + 1], incremental_state=state)[0] for t in range(12)], 1), whole)
    assert_close(torch.cat([model(part, streams=streams)[0] for part in tokens.split([5, 7], 1)], 1), whole)


@pytest.mark.parametrize("name", ["rule", "map", "both"])
def test_the_model_of_retrieval(name):
    """Against the memory that is built pair by pair."""
    model = RetrievalModel(RetrievalConfig(key_dim=8, **OPTIONS[name]), 7).double()
    keys, values = (torch.randint(7, (3, 20)) for _ in range(2))
    queries, seen = torch.arange(7).expand(3, -1), {}
    model.read = lambda q, k, v, gates: seen.update(q=q, k=k, v=v, gates=gates) or RetrievalModel.read(model, q, k, v, gates)
    y = model(keys, values, queries)
    k, v, gates = (seen[name] for name in ("k", "v", "gates"))
    coefficients = model.rule.coefficients(**gates)
    f, e = (torch.ones(1).double() if c is None else c for c in (coefficients.f, coefficients.e))
    memory = torch.zeros(3, 1, k.shape[-1], 7).double()
    for t in range(20):
        left = memory if coefficients.f is None else f[:, :, t].reshape(3, 1, -1, 1) * memory
        erased = torch.einsum("bhk,bhkv->bhv", k[:, :, t], left)
        memory = left + e[:, :, t, None, None] * torch.einsum("bhk,bhv->bhkv", k[:, :, t], v[:, :, t] - erased)
    assert_close(y, (seen["q"] @ memory).squeeze(1))


CONVERT = """
import sys
sys.path.insert(0, {folder!r})
import extension
from fw_fairseq.tools.convert.conversion import convert
for name, options in {cases!r}.items():
    convert("source.pt", name, "decayed_delta", **options)
"""


@pytest.mark.long
def test_conversions_are_evaluated(stream_data, tmp_path):
    """By the command, which has the extension from --user-dir; the conversion is a program that imports it."""
    _, _, state = source("--arch transformer_lm", stream_data)
    save(state, tmp_path)
    cases = {"plain.pt": {}, "wide.pt": {"feature_dim": 40}, "squares.pt": {"feature_map": "squares"}}
    succeed(run(sys.executable, "-c", CONVERT.format(folder=str(EXTENSION.parent), cases=cases), cwd=tmp_path))
    for name in cases:
        given = ["--path", tmp_path / name, "--gen-subset", "test", "--tokens-per-sample", 20]
        assert "Perplexity" in succeed(fairseq("eval_lm", stream_data, *USER_DIR, *given))


def test_the_commands_know_the_extension(stream_data, tmp_path):
    model = "--update-rule decayed_delta --feature-map squares --mixer-pattern moving_average,fast_weight"
    train = "--criterion fast_weight_cross_entropy --optimizer adam --lr 0.01 --seed 3 --log-format json --log-interval 1"
    stream = "--task stateful_language_modeling --tokens-per-sample 16 --batch-size 4 --no-token-positional-embeddings"
    given = [*MODEL.split(), *model.split(), *train.split(), *stream.split(), "--max-update", 6, "--save-dir", tmp_path]
    log = updates(succeed(fairseq("train", stream_data, *USER_DIR, *given)))
    assert float(log[6]["loss"]) < float(log[1]["loss"]) and "fw_1_gate_f" in log[6]
    read = ["--path", tmp_path / "checkpoint_last.pt", "--gen-subset", "test", "--task", "stateful_language_modeling"]
    printed = [succeed(fairseq("eval_lm", stream_data, *USER_DIR, *read, "--tokens-per-sample", n)) for n in (7, 50)]
    short, long = (text[text.index("Perplexity") :] for text in printed)
    assert short.split()[1] == long.split()[1]
    refused = fairseq("train", stream_data, *USER_DIR, *MODEL.split(), "--task", "language_modeling", "--update-rule", "decayed")
    assert refused.returncode and "'decayed_delta'" in refused.stderr


@pytest.mark.long
def test_fw_explain_reads_a_model_of_the_extension(stream_data, tmp_path):
    """In a process of its own, which knows the rule and the map from --user-dir alone."""
    model = "--update-rule decayed_delta --feature-map squares --task language_modeling --tokens-per-sample 16 --batch-size 4"
    train = "--optimizer adam --lr 0.01 --max-update 1 --disable-validation --save-dir"
    succeed(fairseq("train", stream_data, *USER_DIR, *MODEL.split(), *model.split(), *train.split(), tmp_path))
    page = tmp_path / "page.html"
    words = " ".join(line.split()[0] for line in (stream_data / "dict.txt").read_text().splitlines()[:3])
    command = [sys.executable, "-m", "fw_fairseq.tools.explain", tmp_path / "checkpoint_last.pt", words, "--html", page]
    refused = run(*command, cwd=ROOT)
    assert (
        refused.returncode == 1
        and "Invalid value 'decayed_delta', expected one of [sum, gated, " in refused.stderr
        and not page.exists()
    )
    succeed(run(*command, "--user-dir", EXTENSION, cwd=ROOT))
    assert all(f"<h2>layer {number}, fast_weight: read</h2>" in page.read_text() for number in (1, 2))


def test_retrieval_by_the_command(tmp_path):
    task = "--task associative_retrieval --symbols 7 --batch-size 4 --criterion retrieval_mse --optimizer adam --lr 0.001"
    model = "--arch retrieval --key-dim 8 --update-rule decayed_delta --feature-map squares --max-update 3"
    printed = succeed(fairseq("train", *USER_DIR, *task.split(), *model.split(), "--save-dir", tmp_path))
    assert "accuracy" in printed
