"""fw-explain: the weights are those of what each mixer computes; the command, its page and its picture."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
import torch
from fairseq.modules import MultiheadAttention
from support.checkpoints import save, source
from support.commands import USER_DIR, fairseq, succeed
from support.language_models import build
from support.streams import training
from torch import nn

import fw_fairseq.models  # noqa: F401
from fw_fairseq.config import FastWeightConfig
from fw_fairseq.mixers import Abc, Additive, FastWeight, Leap, LocalAttention, Sru, Srupp, TransformerXl
from fw_fairseq.mixers.look_back import look_back
from fw_fairseq.ops.scans.pooling import pool
from fw_fairseq.patches.non_finite import NotFinite
from fw_fairseq.rules import RULES
from fw_fairseq.tools.explain import __main__ as explain
from fw_fairseq.tools.explain import picture
from fw_fairseq.tools.explain.page import Shown
from fw_fairseq.tools.explain.weights import Part, attention
from fw_fairseq.tools.explain.weights import explain as weights_of

pytestmark = pytest.mark.usefixtures("one_thread")
T, C, HEADS = 30, 16, 2
OPTIONS = {
    "sum": dict(feature_norm="none", attention_norm=True),
    "delta": dict(feature_norm="sum"),
    "gated": dict(feature_norm="sum"),
    "gated_delta": dict(feature_map="identity", feature_norm="l2"),
    "decay": dict(feature_map="identity", feature_norm="none"),
}


def text() -> torch.Tensor:
    return torch.randn(T, 1, C)


@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if rule.coefficients is not None and not rule.several])
def test_the_answer_of_fast_weights_is_the_weighted_values(rule):
    mixer, x = FastWeight(C, HEADS, FastWeightConfig(update_rule=rule, **OPTIONS.get(rule, {}))), text()
    mixer.out_proj = nn.Identity()
    made = mixer.operands(x)
    v, gates = made.v, made.gates
    found = mixer.explain(x)
    if RULES[rule].gates.get("z"):  # each channel has weights of its own, of which the mean is shown
        left = gates["z"].flip(2).cumprod(2).flip(2) / gates["z"]
        v, found["read"] = v * left, found["read"] / left[0].mean(-1)
    if rule == "gdn2":  # likewise for the strength of a write
        v, found["read"] = v * gates["w"], found["read"] / gates["w"][0].mean(-1)
    answer = torch.einsum("ht,htv->hv", found["read"], v[0]).flatten()
    torch.testing.assert_close(answer, mixer(x)[0][-1, 0], rtol=1e-4, atol=1e-5)
    assert found["write"].shape == (HEADS, T)
    strength = RULES[rule].coefficients(**gates).w
    want = torch.ones(HEADS, T) if strength is None else strength[0]
    torch.testing.assert_close(found["write"], want.mean(-1) if want.dim() == 3 else want)


def test_the_weight_of_a_token_that_writes_several_times():
    mixer, x = FastWeight(C, HEADS, update_rule="delta_product", feature_map="relu", product_steps=3), text()
    mixer.out_proj = nn.Identity()
    v = mixer.operands(x).v
    same = v[:, :, ::3].repeat_interleave(3, dim=2)  # so that a token's weight is that of its value
    mixer.operands = lambda x, *given: type(mixer).operands(mixer, x, *given)._replace(v=same)
    answer = torch.einsum("ht,htv->hv", mixer.explain(x)["read"], same[0, :, ::3]).flatten()
    torch.testing.assert_close(answer, mixer(x)[0][-1, 0], rtol=1e-4, atol=1e-5)


def test_a_rule_without_weights_is_refused():
    mixer = FastWeight(C, HEADS, FastWeightConfig(update_rule="fwm", feature_map="tanh", feature_norm="none"))
    with pytest.raises(ValueError, match="--update-rule fwm has no weights of past tokens"):
        mixer.explain(text())


@pytest.mark.parametrize("window", [0, 7])
def test_pooling_weights(window):
    mixer, x = Additive(C, HEADS, None, window), text()
    q, k, _ = mixer.in_proj(x).chunk(3, -1)
    q = mixer.by_head(q)
    pooled = pool(mixer.scores(q, mixer.query_score), q, window)[0]
    p = mixer.by_head(mixer.norm(x + mixer.join(pooled) * k))
    last = {"query pooling": pooled, "key pooling": pool(mixer.scores(p, mixer.key_score), p, window)[0]}
    found = mixer.explain(x)
    for (name, weights), values in zip(found.items(), (q, p)):
        torch.testing.assert_close(torch.einsum("ht,htv->hv", weights, values[0]), last[name][0, :, -1])
        assert (weights > 0).sum(-1).tolist() == [window or T] * HEADS


def test_leap_weights():
    mixer, x = Leap(C, HEADS, None, 5), text()
    _, f, k, _ = map(mixer.by_head, mixer.in_proj(x).chunk(4, -1))
    focused = pool(mixer.scores(f, k), k, 5)[0][0, :, -1]
    torch.testing.assert_close(torch.einsum("ht,htv->hv", mixer.explain(x)["focus"], k[0]), focused)


@pytest.mark.parametrize("kind, segment", [(Sru, 1), (Srupp, 1), (Srupp, 8)])
def test_sru_memory(kind, segment):
    """Where every token writes ones, the state is the sum of the weights; and the last token's is what it writes."""
    mixer, x = kind(C, 1, FastWeightConfig(srupp_heads=2, srupp_memory=12, srupp_segment=segment)), text()
    with torch.no_grad():
        mixer.in_proj.weight[:C] = 0
        mixer.in_proj.bias[:C] = 1
    found = mixer.explain(x)
    torch.testing.assert_close(found["memory"].sum(), mixer(x)[1].cell.mean())
    torch.testing.assert_close(found["memory"][0, -1], found["write"][0, -1])
    if kind is Srupp:
        z = mixer.down_proj(x)
        view = look_back(z.transpose(0, 1), None, mixer.reach, None, None)
        attended = mixer.read(z, z, view)
        values = mixer.kv_proj(z)[:, 0].chunk(2, -1)[1].unflatten(-1, (2, -1))
        torch.testing.assert_close(torch.einsum("ht,thv->hv", found["attention"], values).flatten(), attended[-1, 0])
        own = (T - 1) % segment  # of its segment, the tokens before the last one
        assert (found["attention"] > 0).sum(-1).tolist() == [12 + own + 1] * 2


@pytest.mark.parametrize("kind", [LocalAttention, TransformerXl])
def test_attention_to_the_last_tokens(kind):
    mixer, x = kind(C, HEADS, FastWeightConfig(local_window=8, xl_memory=7)), text()
    mixer.out_proj = nn.Identity()
    weights, values = mixer.explain(x)["attention"], mixer.by_head(mixer.in_proj(x).chunk(3, -1)[2])[0]
    assert weights[:, :-8].eq(0).all() and weights[:, -8:].gt(0).all()
    torch.testing.assert_close(torch.einsum("ht,htv->hv", weights, values).flatten(), mixer(x)[0][-1, 0])


def test_scores_that_are_nan_are_refused():
    model = build()
    model.decoder.layers[0].fc1.bias.data[2] = float("nan")
    with pytest.raises(NotFinite, match=r"^the model's scores are NaN; the parameter decoder.layers.0.fc1.bias is not finite$"):
        weights_of(model, torch.tensor([2, 5, 6]), [2])


def test_a_token_reads_what_it_reads_in_a_shorter_text():
    """And the model is as it was before."""
    model, tokens = build(mixer_pattern="fast_weight,softmax").eval(), torch.tensor([2, 5, 6, 7, 8])
    first, last = weights_of(model, tokens, [2, 4])
    [alone] = weights_of(model, tokens[:3], [2])
    assert (first.reader, last.reader) == (2, 4) and [part.heads.shape[1] for part in last.parts] == [5] * len(last.parts)
    for part, wanted in zip(first.parts, alone.parts, strict=True):
        torch.testing.assert_close(part.heads, wanted.heads)
    assert [word for word, _ in first.expected] == [word for word, _ in alone.expected]
    assert not any(layer.self_attn._forward_pre_hooks for layer in model.decoder.layers)


def test_a_mixer_that_cannot_say_is_refused():
    with pytest.raises(ValueError, match="fw-explain cannot say what a layer of Abc takes from which token"):
        Abc(C, HEADS, FastWeightConfig()).explain(text())


class Words(HTMLParser):
    """The words of a page by heading, and what it loads from elsewhere."""

    def __init__(self):
        super().__init__()
        self.open, self.heading, self.spans, self.outside = [], "", {}, []

    def handle_starttag(self, tag, attributes):
        self.open.append(tag)
        self.outside += [value for name, value in attributes if name in ("src", "href")]

    def handle_endtag(self, tag):
        while self.open.pop() != tag:
            pass

    def handle_data(self, text):
        if self.open and self.open[-1] == "h2":
            self.heading = text
        if self.open and self.open[-1] == "span":
            self.spans.setdefault(self.heading, []).append(text)


def test_the_command(stream_data, tmp_path, capsys):
    """A model with all kinds of layers: a page and pictures, of a sentence and of a file."""
    pattern = "fast_weight,additive,leap,sru,srupp,softmax"
    options = training(stream_data, tmp_path, "--mixer-pattern", pattern, "--decoder-layers", 6, "--max-update", 1)
    succeed(fairseq("train", *options, *USER_DIR))
    capsys.readouterr()
    checkpoint, html, png = (str(tmp_path / name) for name in ("checkpoint_last.pt", "page.html", "picture.png"))
    explain.main([checkpoint, "one < two $3 w4", "--last", "3", "--html", html, "--png", png])
    assert capsys.readouterr().out.split() == [html, png] and (tmp_path / "picture.png").stat().st_size > 5000
    page = Words()
    page.feed((tmp_path / "page.html").read_text())
    names = [heading.split(", ")[1] for heading in page.spans]
    assert names == [
        "fast_weight: read", "fast_weight: write", "additive: query pooling", "additive: key pooling", "leap: focus",
        "sru: memory", "sru: write", "srupp: attention", "srupp: memory", "srupp: write", "softmax: attention",
    ]  # fmt: skip
    heads = 4
    assert page.spans["layer 1, fast_weight: read"] == (1 + heads) * ["</s>", "one?", "<?", "two?"] and page.outside == []
    (tmp_path / "text").write_text("w1\nw2\n")
    explain.main([checkpoint, str(tmp_path / "text"), "--html", html])
    assert 'title="2: ' in (tmp_path / "page.html").read_text()
    full = tmp_path / "full"
    full.symlink_to("/dev/full")
    for arguments, message in (
        (["w1"], "nothing to write; give --html, --png or both"),
        (["word1", "--last", "2", "--html", html], "--last is 2; TEXT has tokens 1 to 1"),
        (["w1 " * 5000, "--html", html], "TEXT has 5001 tokens, </s> included; the model takes at most"),
        (["", "--html", html], "TEXT has no words"),
        (["w1", "--html", html, "--data", str(tmp_path / "none")], "there is no dictionary at .*none"),
        (["word1", "--html", str(full)], f"{full} cannot be written .No space left on device"),
    ):
        with pytest.raises(SystemExit, match=f"fw-explain: {message}"):
            explain.main([checkpoint, *arguments])


def test_other_models_and_texts_are_refused(dictionary, tmp_path, monkeypatch):
    """A page that is not written leaves the one before."""
    transformer = save(source("--arch transformer_lm", dictionary)[2], dictionary)
    monkeypatch.setattr("support.checkpoints.SHAPE", "--task language_modeling")
    lstm = save(source("--arch lstm_lm --decoder-embed-dim 8 --decoder-hidden-size 8", dictionary)[2], tmp_path)
    (tmp_path / "latin").write_bytes("größer".encode("latin-1"))
    messages = [
        "holds a LSTMLanguageModel; fw-explain takes fast_weight_lm and transformer_lm",
        "latin is not a file with a sentence, as it is no text in UTF-8$",
    ]
    (tmp_path / "page.html").write_text("before")
    for (checkpoint, text), message in zip([(lstm, "a"), (transformer, tmp_path / "latin")], messages):
        with pytest.raises(SystemExit, match=message):
            explain.main([str(checkpoint), str(text), "--data", str(dictionary), "--html", str(tmp_path / "page.html")])
    assert (tmp_path / "page.html").read_text() == "before"


def test_checkpoints_without_a_model_are_refused_in_a_sentence(dictionary, tmp_path):
    """One has no options; the other one has those of more words."""
    state = source("--arch transformer_lm", dictionary)[2]
    fewer = tmp_path / "fewer"
    fewer.mkdir()
    (fewer / "dict.txt").write_text("w1 1\nw2 1\n")
    for changed, data, reason in (
        (state | {"cfg": None}, dictionary, "Neither args nor cfg exist"),
        (state, fewer, r"Error\(s\) in loading state_dict for TransformerLanguageModel: size mismatch for decoder"),
    ):
        path = save(changed, tmp_path)
        said = f"^fw-explain: CHECKPOINT {path} has options or a dictionary that do not make the model of its parameters .{reason}"
        with pytest.raises(SystemExit, match=said):
            explain.main([str(path), "w1 w2", "--data", str(data), "--html", str(tmp_path / "page.html")])


@pytest.mark.parametrize("tokens", [10, 95])
def test_rows_and_picture(tmp_path, tokens):
    """Of a short text every head, of a long one every part; borders between parts, or between layers."""
    parts = [Part(layer, "delta", what, torch.randn(3, tokens)) for layer in (1, 2) for what in ("read", "write")]
    labels, rows, borders = picture.rows_of(parts, heads=tokens == 10)
    assert (len(labels), len(rows), borders) == ((12, 12, [3, 6, 9]) if tokens == 10 else (4, 4, [2]))
    assert all(max(map(abs, row)) <= 1 for row in rows)
    bands = picture.bands_of(Shown([f"w{i}" for i in range(tokens)], parts, []))
    assert [word for band in bands for word in band.words] == [f"w{i}" for i in range(tokens)]
    for at, row in enumerate(rows):  # no cell is lost between two bands
        assert [cell for band in bands for cell in band.rows[at]] == row and len({len(band.rows) for band in bands}) == 1
    picture.draw("a $ title", [Shown(["$x_1$"] * tokens, parts, [("$", 0.5)])], tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 5000


def test_without_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"--png needs matplotlib; install fw_fairseq with the extra \[plots\]"):
        explain.main(["model.pt", "a", "--png", str(tmp_path / "a.png")])


def test_softmax_weights_are_those_of_the_layer():
    module, x = MultiheadAttention(C, HEADS, self_attention=True).eval(), text()
    weights = attention(module, x)
    values = module.v_proj(x[:, 0]).unflatten(-1, (HEADS, -1))
    answer = module.out_proj(torch.einsum("ht,thv->hv", weights, values).flatten())
    torch.testing.assert_close(answer, module(x[-1:], x, x)[0][0, 0])
