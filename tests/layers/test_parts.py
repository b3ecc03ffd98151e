"""The parts of a fast-weight layer around its recurrence: against formulas written another way, and in pieces as at once."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch.nn import functional as F

from fw_fairseq.mixers import FastWeight
from fw_fairseq.mixers.parts.convolution import DependentShift, ShortConvolution, TokenShift
from fw_fairseq.mixers.parts.output import HeadNorm
from fw_fairseq.mixers.parts.rotation import rotated
from fw_fairseq.ops.chunkwise import scan
from fw_fairseq.ops.chunkwise.frames import ChannelGates, TokenGatesWithZeros
from fw_fairseq.rules import RULES

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("one_thread")]
T, B, C, HEADS = 30, 3, 12, 4
AROUND = {"short_conv": 4, "token_shift": True, "output_norm": True, "output_gate": True, "key_heads": 2}
ROTARY = {"rotary": True, "feature_dim": 4}  # pairs of features
PUBLISHED_PARTS = {"expand_values": 2.0, "output_norm": True, "output_norm_of": "centred_head", "output_gate": True}
PUBLISHED_PARTS |= {"output_gate_form": "of_sigmoid", "output_gate_rank": 3, "read_own_value": True, "short_conv": 3}
PUBLISHED_PARTS |= {"short_conv_bias": True, "norm_after_gate": True}


EXPONENTIAL = {
    "gated_delta": {"exponential_decay": True, "feature_map": "identity", "feature_norm": "l2"},
    "gated_delta_product": {"feature_map": "identity", "feature_norm": "l2"},
}


def masks() -> tuple[torch.Tensor, torch.Tensor]:
    """Padding left, right and within; texts that begin within, at padding, and two in a row."""
    padding, resets = (torch.zeros(B, T, dtype=torch.bool) for _ in range(2))
    padding[0, 25:] = padding[1, :5] = padding[2, 10:13] = True
    resets[0, 10] = resets[0, 11] = resets[1, 20] = resets[2, 11] = True
    return padding, resets


def texts(padding, resets):
    """The tokens of each text of each row, without padding."""
    for row in range(B):
        text = []
        for t in range(T):
            if resets[row, t]:
                yield row, text
                text = []
            if not padding[row, t]:
                text.append(t)
        yield row, text


def build(rule: str, heads: int = HEADS, **options) -> FastWeight:
    mixer = FastWeight(C, heads, update_rule=rule, feature_map="identity", feature_norm="l2", layer=1, layers=4, **options)
    return mixer.double().eval()


def test_the_convolution_of_each_text():
    conv, x, (padding, resets) = ShortConvolution(C, 4).double(), torch.randn(T, B, C, dtype=torch.float64), masks()
    y, recent = conv(x, None, padding, resets)
    kernel = conv.weight.flip(0).mT.unsqueeze(1)  # F.conv1d has the oldest token first
    for row, text in texts(padding, resets):
        own = x[text, row]
        want = F.silu(F.conv1d(F.pad(own.mT, (3, 0)), kernel, groups=C)).mT
        torch.testing.assert_close(y[text, row], want)
    torch.testing.assert_close(recent[row], F.pad(own, (0, 0, 3, 0))[-3:])


def test_the_convolution_starts_as_one_of_pytorch():
    """Uniform, up to one over the root of the number of taps."""
    weight = ShortConvolution(512, 4).weight
    torch.testing.assert_close(torch.stack([-weight.min(), weight.max()]), torch.tensor([0.5, 0.5]), rtol=0, atol=0.01)
    assert weight.abs().max() <= 0.5


def test_the_shift_of_each_text():
    shift, weight = TokenShift({"q": 3, "u": 0, "v": 5}, C, 1, 4).double(), torch.randn(8, C, dtype=torch.float64)
    x, (padding, resets) = torch.randn(T, B, C, dtype=torch.float64), masks()
    added, previous = shift(x, weight, None, padding, resets)
    shares = shift.weight
    channels = torch.arange(C) / C
    torch.testing.assert_close(shares.float(), torch.stack([1 - channels ** (0.2 * 0.75), 1 - channels ** (0.7 * 0.75)]))
    all_parts = TokenShift(dict.fromkeys(["q", "k", "v", "s", "output", "mixing"], 1), C, 1, 4)
    powers = torch.tensor([0.2, 0.7, 0.7, 0.9, 0.2])[:, None] * 0.75  # "mixing" reads the mixture of the values
    torch.testing.assert_close(all_parts.weight, 1 - channels**powers)
    assert all_parts.mixture_of == [0, 1, 2, 3, 4, 2]
    for row, text in texts(padding, resets):
        own = x[text, row]
        before = F.pad(own, (0, 0, 1, 0))[:-1]
        mixtures = [own + share * (before - own) for share in shares]
        want = torch.cat([mixtures[0] @ weight[:3].mT, mixtures[1] @ weight[3:].mT], 1) - own @ weight.mT
        torch.testing.assert_close(added[text, row], want)
    torch.testing.assert_close(previous[row, 0], own[-1])


def test_the_shift_that_depends_on_the_token():
    """Token by token, from the formulas and starts of RWKV 6."""
    shift = DependentShift({"q": 3, "u": 0, "v": 5, "f": 2, "output": 4}, C, 1, 4, 2).double()
    channels, kept = torch.arange(C) / C, 0.75
    torch.testing.assert_close(shift.both.float(), 1 - channels**kept)
    starts = [1 - channels ** (kept / 2), 1 - channels**kept - 0.1, 1 - channels**kept, 1 - channels ** (kept / 2)]
    torch.testing.assert_close(shift.weight.float(), torch.stack(starts))
    for layer, layers in ((0, 1), (1, 2)):  # the only one, and the last of two, whose values take the least
        values = DependentShift({"v": 5}, C, layer, layers, 2).weight[0]
        torch.testing.assert_close(values, 1 - channels ** (1 / layers) - 0.3 * layer)
    assert shift.down.abs().max() == 0 < shift.up.abs().max() <= 0.01
    torch.nn.init.normal_(shift.down)
    torch.nn.init.normal_(shift.up)
    weight, x = torch.randn(14, C, dtype=torch.float64), torch.randn(T, B, C, dtype=torch.float64)
    padding, resets = masks()
    added, previous = shift(x, weight, None, padding, resets)
    for row, text in texts(padding, resets):
        before = torch.zeros(C, dtype=torch.float64)
        for t in text:
            now, want = x[t, row], []
            change = before - now
            both = now + shift.both * change
            for i, rows in enumerate((slice(0, 3), slice(3, 8), slice(8, 10), slice(10, 14))):
                low = torch.tanh(shift.down[2 * i : 2 * i + 2] @ both)
                mixed = now + change * (shift.weight[i] + shift.up[i].T @ low)
                want.append(weight[rows] @ mixed - weight[rows] @ now)
            torch.testing.assert_close(added[t, row], torch.cat(want))
            before = now
    torch.testing.assert_close(previous[row, 0], before)


@pytest.mark.parametrize("rule, writes", [("retnet", 1), ("delta_product", 2)])
@torch.no_grad()
def test_rotary_positions(rule, writes):
    """Features as complex numbers, which a token at place p turns by exp(i p 10000^(-j / 2)); each text begins at 0."""
    steps = {"product_steps": writes} if writes > 1 else {}
    mixer, x, given = build(rule, heads=1, **ROTARY, **steps), torch.randn(T, B, C, dtype=torch.float64), masks()
    y, state = mixer(x, None, *given)
    lengths = {}  # of the last text of each row
    for row, text in texts(*given):
        operands = build_like(mixer).operands(x[text][:, [row]])
        q, k, v = (part[0, 0] for part in operands[:3])
        turn = torch.polar(torch.ones(len(text), 2).double(), torch.arange(len(text))[:, None] * torch.tensor([1.0, 0.01]).double())
        q, k = (torch.complex(part[:, :2], part[:, 2:]) for part in (q, k))
        memory = torch.zeros(2, C, dtype=torch.complex128)
        for t, place in enumerate(text):
            if rule == "retnet":
                memory = (1 - 2.0**-5) * memory
            for i in range(writes):
                key, value = k[writes * t + i] * turn[t], v[writes * t + i]
                if rule == "delta_product":
                    value = operands.gates["beta"][0, 0, writes * t + i] * (value - (key.conj() @ memory).real)
                memory = memory + key[:, None] * value
            read = ((q[t] * turn[t]).conj() @ memory).real
            torch.testing.assert_close(y[place, row], mixer.out_proj(read))
        lengths[row] = len(text)
    assert state.position[:, 0].tolist() == [*lengths.values()]


def build_like(mixer: FastWeight) -> FastWeight:
    """A copy that turns nothing."""
    plain = copy.deepcopy(mixer)
    plain.rotary = False
    return plain


def test_positions_of_long_streams_are_exact():
    q, k = torch.randn(2, 1, 1, 1, 8)
    far = 10**10 + 7
    near, away = ((rotated(q, place) * rotated(k, place - 3)).sum() for place in (torch.tensor([[3]]), torch.tensor([[far]])))
    torch.testing.assert_close(near, away, atol=1e-5, rtol=0)


def test_norm_gate_and_shared_keys():
    mixer, x = build("sum", output_norm=True, output_gate=True, key_heads=2), torch.randn(T, 1, C, dtype=torch.float64)
    torch.nn.init.normal_(mixer.norm.weight)
    q, k, v, gate = mixer.in_proj(x[:, 0]).split([6, 6, C, C], 1)
    outputs = []
    for head in range(HEADS):
        own = slice(3 * (head // 2), 3 * (head // 2) + 3)
        queries, keys = (F.normalize(part[:, own], dim=-1) for part in (q, k))
        read = ((queries @ keys.mT).tril() @ v[:, 3 * head : 3 * head + 3]).T
        outputs.append((read / (read.square().mean(0) + 1e-5).sqrt()).T * mixer.norm.weight)
    want = mixer.out_proj(torch.cat(outputs, 1) * gate * torch.sigmoid(gate))
    torch.testing.assert_close(mixer(x)[0][:, 0], want)


def test_shared_keys_whose_scale_is_kept_apart():
    """FAVOR+ divides a factor out of each key. Heads that share keys read as heads with copies of these keys."""
    options = {"update_rule": "sum", "feature_map": "favor", "feature_norm": "none", "attention_norm": True}
    mixer, x = FastWeight(C, HEADS, key_heads=2, **options).double(), 5 * torch.randn(T, 2, C, dtype=torch.float64)
    copied = FastWeight(C, HEADS, **options).double()
    copied.feature_map, copied.out_proj = mixer.feature_map, mixer.out_proj
    for name in ("weight", "bias"):
        q, k, v = getattr(mixer.in_proj, name).data.split([*mixer.sizes.values()])
        of_heads = [part.unflatten(0, (2, -1)).repeat_interleave(2, 0).flatten(0, 1) for part in (q, k)]
        getattr(copied.in_proj, name).data = torch.cat([*of_heads, v])
    torch.testing.assert_close(mixer(x)[0], copied(x)[0])


@pytest.mark.parametrize(
    "rule, more",
    [(rule, {}) for rule in ("sum", "fwm", "hgrn2", "rwkv7", "gdn2", "comba")]
    + [("rwkv6", {"token_shift_rank": 2}), ("retnet", ROTARY), ("delta_product", ROTARY)]
    + [(rule, PUBLISHED_PARTS) for rule in ("sum", "hgrn2", "gated_delta_product")]
    + [("gated_delta", PUBLISHED_PARTS | {"exponential_decay": True}), ("decay", {"exponential_decay": True})],
)
@torch.no_grad()
def test_in_pieces_as_at_once(rule, more):
    """With every part, padding and texts that begin anywhere; a padded row as without its padding."""
    mixer, x, given = build(rule, **AROUND | more), torch.randn(T, B, C, dtype=torch.float64), masks()
    seen = ~given[0].mT
    want, last = mixer(x, None, *given)
    for cuts in ([13, 17], [1] * T):
        outputs, state, start = [], None, 0
        for length in cuts:
            now = slice(start, start + length)
            y, state = mixer(x[now], state, *(mask[:, now] for mask in given), decoding=length == 1)
            outputs.append(y)
            start += length
        torch.testing.assert_close(torch.cat(outputs)[seen], want[seen])
        for ours, theirs in zip(state, last):
            torch.testing.assert_close(ours, theirs)
    for row, text in texts(*given):
        torch.testing.assert_close(mixer(x[text][:, [row]])[0][:, 0], want[text, row])
    order = torch.tensor([2, 0, 0])
    more = torch.randn(5, B, C, dtype=torch.float64)
    together, _ = mixer(more, last.index_select(order))
    apart = [mixer(more[:, [i]], last.index_select(order[[i]]))[0] for i in range(B)]
    torch.testing.assert_close(together, torch.cat(apart, 1))


def channels(x):
    return x.unflatten(-1, (HEADS, -1))


PUBLISHED = {  # each gate of a layer by its formula, (T,H) or (T,H,X), from the rows p of the projection and the makers' parameters
    "retnet": lambda m, p, k: {"g": 1 - 2.0 ** -(5 + torch.arange(HEADS).double()).expand(T, -1)},
    "gla": lambda m, p, k: {"f": channels(torch.sigmoid(p["f"] @ m["f"].up.T + m["f"].bias)) ** (1 / 16)},
    "mamba2": lambda m, p, k: {
        "s": torch.log1p((p["s"] + m["s"].bias).exp()),
        "g": 1 / (1 + (p["s"] + m["s"].bias).exp()) ** m["g"].rate.exp(),
        "d": m["d"].bias.expand(T, -1),
    },
    "hgrn2": lambda m, p, k: {"f": channels(torch.sigmoid(m["f"].bias) + (1 - torch.sigmoid(m["f"].bias)) * torch.sigmoid(p["f"]))},
    "rwkv6": lambda m, p, k: {
        "f": channels(torch.exp(-torch.exp(torch.tanh(p["f"]) @ m["f"].up.T + m["f"].bias))),
        "u": channels(m["u"].bias).expand(T, -1, -1),
    },
    "rwkv7": lambda m, p, k: {
        "s": channels(torch.sigmoid(torch.tanh(p["s"]) @ m["s"].up.T + m["s"].bias)),
        "c": channels(torch.sigmoid(p["c"] @ m["c"].up.T + m["c"].bias)),
        "kappa": F.normalize(k * channels(m["kappa"].bias), dim=-1),
        "a": channels(m["a"].bias).expand(T, -1, -1),
    },
    "kda": lambda m, p, k: {
        "f": (1 + channels((p["f"] @ m["f"].up.T + m["f"].bias).exp())) ** -m["f"].rate.exp()[:, None],
        "beta": torch.sigmoid(p["beta"]),
    },
    "gdn2": lambda m, p, k: {
        "f": (1 + channels((p["f"] @ m["f"].up.T + m["f"].bias).exp())) ** -m["f"].rate.exp()[:, None],
        "b": channels(torch.sigmoid(p["b"])),
        "w": channels(torch.sigmoid(p["w"])),
    },
}


@pytest.mark.parametrize("rule", PUBLISHED)
def test_gates_are_made_as_published(rule):
    mixer, x = build(rule), torch.randn(T, 1, C, dtype=torch.float64)
    torch.nn.init.normal_(mixer.in_proj.weight)
    made = mixer.operands(x)
    parts = dict(zip(mixer.sizes, mixer.in_proj(x[:, 0]).split([*mixer.sizes.values()], 1)))
    want = PUBLISHED[rule](mixer.makers, parts, made.k[0].transpose(0, 1))
    assert [*want] == [*made.gates]
    for name, gate in made.gates.items():
        torch.testing.assert_close(gate[0].transpose(0, 1), want[name].double())


def dpfp_1(x):
    both = torch.cat([x, -x], -1).relu()
    return both * both.roll(1, -1)


@pytest.mark.parametrize("name, phi", [("elu", lambda x: torch.where(x > 0, x + 1, x.exp())), ("dpfp", dpfp_1)])
@pytest.mark.parametrize("norm", ["sum", "l2"])
def test_a_gate_made_of_the_key_is_made_of_its_features(name, phi, norm):
    mixer = FastWeight(C, HEADS, update_rule="rwkv7", feature_map=name, feature_norm=norm, layer=1, layers=4).double()
    x, bias = torch.randn(T, 1, C, dtype=torch.float64), channels(mixer.makers["kappa"].bias)
    keys = phi(channels(mixer.in_proj(x[:, 0])[:, C : 2 * C]))
    torch.testing.assert_close(mixer.operands(x).gates["kappa"][0].transpose(0, 1), F.normalize(keys * bias, dim=-1))


@pytest.mark.parametrize(
    "part, x, message",
    [({"rotary": True, "heads": 2}, (2, 3), "state is of 2 sequences and the tokens of 3; they must be as many"),
     ({"short_conv": 3}, (2, 3), r"state has earlier tokens of shape \(2, 2, 36\); for this x they must be \(3, 2, 36\)"),
     ({"token_shift": True}, (2, 1), r"state has earlier tokens of shape \(2, 1, 12\); for this x they must be \(1, 1, 12\)")],
)  # fmt: skip
def test_a_state_of_another_batch(part, x, message):
    mixer = build("delta", **part)
    _, state = mixer(torch.randn(T, 2, C, dtype=torch.float64))
    with pytest.raises(ValueError, match=f"^{message}$"):
        mixer(torch.randn(*x, C, dtype=torch.float64), state)


@pytest.mark.parametrize(
    "rule, rows",
    [("sum", 3 * C), ("hgrn2", 3 * C), ("delta", 3 * C + 4), ("gdn2", 5 * C + C // HEADS), ("delta_product", 5 * C + 2 * 4)],
)
def test_a_projection_has_the_rows_that_are_read(rule, rows):
    """hgrn2 makes its keys of its gates; gdn2 has two gates of channels, and one of a rank; delta_product writes twice."""
    assert build(rule).in_proj.out_features == rows


def test_where_gates_of_one_row_start():
    """At 1/2."""
    starts = {"gated": {"g": 0}, "delta": {"beta": 0}, "gated_delta": {"beta": 0}, "fwm": {"beta": 0}}
    starts |= {"kda": {"beta": 0}, "gdn2": {"b": 0, "w": 0}, "delta_product": {"beta": 0}}
    for rule, gates in starts.items():
        mixer = build(rule)
        biases = dict(zip(mixer.sizes, mixer.in_proj.bias.split([*mixer.sizes.values()])))
        assert {name: biases[name].unique().tolist() for name in gates} == {name: [start] for name, start in gates.items()}


def test_where_the_gate_of_the_gated_delta_rule_starts():
    """At exp(-a s), with a uniform from 1 to 16 and s from 0.001 to 0.1, uniform in its logarithm: shares of the numbers that are
    below, of the heads of many layers."""
    torch.manual_seed(0)
    layers = [FastWeight(64, 64, update_rule="gated_delta", feature_map="identity", feature_norm="l2") for _ in range(60)]
    biases = (dict(zip(layer.sizes, layer.in_proj.bias.split([*layer.sizes.values()]))) for layer in layers)
    found = torch.cat([bias["g"] for bias in biases]).detach().double().sigmoid()
    a = 1 + 15 * (torch.arange(500, dtype=torch.float64) + 0.5) / 500
    s = 10 ** (-3 + 2 * (torch.arange(500, dtype=torch.float64) + 0.5) / 500)
    want = torch.exp(-a[:, None] * s)
    for bound in (0.4, 0.7, 0.9, 0.97, 0.99):
        assert (found < bound).double().mean().item() == pytest.approx((want < bound).double().mean().item(), abs=0.04)
    assert found.min() > math.exp(-1.6) - 1e-6 and found.max() < math.exp(-0.001) + 1e-6


def test_where_published_gates_start():
    """Whatever the token for RWKV; the third of four layers, with heads of 16."""
    torch.manual_seed(0)
    plain = {"feature_map": "identity", "feature_norm": "l2"}
    layers = {rule: FastWeight(64, 4, update_rule=rule, layer=2, layers=4, **plain) for rule in PUBLISHED}
    made = {rule: mixer.operands(torch.randn(9, 1, 64)).gates for rule, mixer in layers.items()}
    n, depth = torch.arange(64) / 63, 2 / 3
    slow = torch.exp(-torch.exp(-6 + 5 * n ** (0.7 + 1.3 * depth)))
    torch.testing.assert_close(made["rwkv6"]["f"][0].transpose(0, 1).flatten(1), slow.expand(9, -1))
    only = FastWeight(64, 4, update_rule="rwkv6", **plain)  # the first of one layer, where nothing is said
    torch.testing.assert_close(only.makers["f"].bias.detach(), -6 + 5 * n**0.7)
    x = (torch.arange(64) % 16 - 7.5) / 7.5
    decay = torch.sigmoid(-6 + 6 * n ** (1 + depth**0.3) + 0.5 + 2.5 * x * x.abs())
    torch.testing.assert_close(made["rwkv7"]["s"][0].transpose(0, 1).flatten(1), decay.expand(9, -1))
    removed = torch.sigmoid(-0.19 + 0.3 * x * x.abs() + 0.4 * (n - 0.5))
    torch.testing.assert_close(made["rwkv7"]["c"][0].transpose(0, 1).flatten(1), removed.expand(9, -1))
    bonus = [2 / 3 * (1 - i / 63) + ((i + 1) % 3 - 1) / 10 for i in range(64)]
    torch.testing.assert_close(layers["rwkv6"].makers["u"].bias.detach(), torch.tensor(bonus))
    mixing = FastWeight(64, 4, update_rule="rwkv7", layer=2, layers=4, value_mixing_rank=2, **plain).mixing
    torch.testing.assert_close(mixing.bias.detach(), 0.73 - 0.4 * (n - 0.5))
    makers = layers["rwkv7"].makers
    torch.testing.assert_close(makers["kappa"].bias.detach(), 0.71 - 0.1 * (n - 0.5))
    assert makers["a"].bias.eq(1.02).all() and layers["mamba2"].makers["d"].bias.eq(1).all()
    torch.testing.assert_close(made["retnet"]["g"][0, :, 0], 1 - torch.tensor([1 / 32, 1 / 64, 1 / 128, 1 / 256]))
    torch.testing.assert_close(torch.sigmoid(layers["hgrn2"].makers["f"].bias), torch.full((64,), 0.5))
    assert layers["gla"].makers["f"].bias.eq(0).all()
    for rule, name in (("mamba2", "s"), ("kda", "f"), ("gdn2", "f")):
        step = F.softplus(layers[rule].makers[name].bias.detach())
        assert step.min() >= 0.001 and step.max() <= 0.1 and step.log().std() > 0.5
    for rule, name in (("mamba2", "g"), ("kda", "f"), ("gdn2", "f")):
        assert layers[rule].makers[name].rate.exp().min() >= 1 and layers[rule].makers[name].rate.exp().max() <= 16
    for rule, rank in (("gla", 16), ("kda", 16), ("gdn2", 16)):
        up, bound = layers[rule].makers["f"].up, math.sqrt(3 / (64 + rank))
        assert up.shape == (64, rank) and 0.98 * bound < up.abs().max() <= bound
    assert layers["retnet"].state_dict().keys() == FastWeight(64, 4, update_rule="sum").state_dict().keys()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gates_of_retnet_that_are_nearly_1_stay_so_in_16_bits(dtype):
    mixer, x = FastWeight(64, 8, update_rule="retnet").to(dtype), torch.randn(3, 2, 64, dtype=dtype)
    expected = 1 - 2.0 ** -(5 + torch.arange(8.0))
    torch.testing.assert_close(mixer.operands(x).gates["g"], expected[None, :, None].expand(2, -1, 3), rtol=0, atol=0)


@pytest.mark.parametrize("rule, name", [("rwkv6", "f"), ("kda", "f"), ("gdn2", "f"), ("mamba2", "g")])
def test_a_channel_that_forgets_at_once_keeps_the_chunk_form(rule, name, monkeypatch):
    """Its gates are next to 0, but not 0, which would run the chunk token by token. The outputs are those of gates of 0."""
    mixer = FastWeight(C, HEADS, update_rule=rule, feature_map="identity", feature_norm="l2")
    maker = mixer.makers["s" if rule == "mamba2" else name]
    with torch.no_grad():
        maker.bias.view(HEADS, -1)[1, 0] = 500.0
    x = torch.randn(T, B, C)
    gates = mixer.operands(x).gates[name]
    fast = gates[:, 1] if rule == "mamba2" else gates[:, 1, :, 0]
    assert fast.min() > 1e-36 and fast.max() < 1e-30
    ways, plan = [], scan.plan
    monkeypatch.setattr(scan, "plan", lambda *given: ways.extend(made := plan(*given)) or made)
    y, _ = mixer(x)
    assert {way for _, way in ways} == {TokenGatesWithZeros if rule == "mamba2" else ChannelGates}
    y.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in mixer.parameters())
    monkeypatch.setattr("fw_fairseq.rules.gates.FASTEST", math.inf)
    assert (mixer.operands(x).gates[name] == 0).any()
    torch.testing.assert_close(y, mixer(x)[0])


def test_layers_with_parts_around_the_recurrence_are_not_plain():
    parts = [{"short_conv": 4}, {"token_shift": True}, {"output_norm": True}, {"output_gate": True}, ROTARY, {"key_heads": 2}]
    parts += [{"negative_eigenvalues": True}, {"value_mixing_rank": 1}, {"read_own_value": True}]
    assert not build("gated_delta", exponential_decay=True).has_no_parts
    assert not any(build("delta", **options).has_no_parts for options in parts)
    plain = ["sum", "gated", "delta", "decay", "gated_delta"]
    assert [rule for rule, entry in RULES.items() if entry.coefficients is not None and build(rule).has_no_parts] == plain


def test_reads_may_be_divided_by_the_root_of_the_width_of_a_head():
    mixer, x = build("sum"), torch.randn(T, B, C, dtype=torch.float64)
    scaled = build("sum", scale_reads=True)
    scaled.load_state_dict(mixer.state_dict())
    scaled.out_proj = mixer.out_proj = torch.nn.Identity()
    torch.testing.assert_close(scaled(x)[0], mixer(x)[0] / math.sqrt(3))


def reads_of_retnet(q, k, v):
    """Of each head and token, from (H,T,X). Head h keeps 1 - 2^(-5-h) of its memory."""
    for head, own in enumerate(zip(q, k, v)):
        memory = q.new_zeros(q.shape[2], v.shape[2])
        for query, key, value in zip(*own):
            memory = (1 - 2.0 ** (-5 - head)) * memory + torch.outer(key, value)
            yield query @ memory


@pytest.mark.parametrize("after", [False, True])
def test_reads_are_scaled_before_the_norm(after):
    """Queries are divided by the root of the width, then come recurrence, norm and gate, as in the authors' RetNet. Reads are so
    small that the norm's 1e-5 counts. In checkpoints of before, the scale comes after the norm."""
    options = {"update_rule": "retnet", "feature_map": "identity", "feature_norm": "none", "output_norm": True, "output_gate": True}
    mixer = FastWeight(C, HEADS, scale_reads=True, scale_after_norm=after, bias_free=True, **options).double()
    torch.nn.init.normal_(mixer.norm.weight)
    x, width = 0.05 * torch.randn(T, 1, C, dtype=torch.float64), C // HEADS
    q, k, v, gate = (x[:, 0] @ rows.mT for rows in mixer.in_proj.weight.split([C] * 4))
    q, k, v = (part.unflatten(1, (HEADS, width)).transpose(0, 1) for part in (q if after else q / math.sqrt(width), k, v))
    reads = torch.stack([*reads_of_retnet(q, k, v)]).unflatten(0, (HEADS, T))
    reads = reads / (reads.square().mean(-1, keepdim=True) + 1e-5).sqrt() * mixer.norm.weight
    reads = reads / math.sqrt(width) if after else reads
    want = (reads.transpose(0, 1).flatten(1) * gate * torch.sigmoid(gate)) @ mixer.out_proj.weight.mT
    torch.testing.assert_close(mixer(x)[0][:, 0], want)


def test_features_of_favor_without_any_norm_are_those_of_the_map():
    """Nothing is divided out of them, since nothing would cancel it."""
    mixer, x = FastWeight(C, HEADS, update_rule="sum", feature_map="favor", feature_norm="none"), torch.randn(T, B, C)
    made = mixer.operands(x)
    for found, rows in zip((made.q, made.k), mixer.in_proj(x).chunk(3, -1)):
        torch.testing.assert_close(found, mixer.feature_map(mixer.by_head(rows)))
    assert made.key_log_scale is None


def test_negative_eigenvalues_double_what_erases():
    """And nothing else: a write with full strength then turns around what its key reads."""
    x = torch.randn(T, B, C, dtype=torch.float64)
    for rule, name in (("delta", "beta"), ("kda", "beta"), ("gdn2", "b"), ("rwkv7", "c"), ("delta_product", "beta")):
        mixer = build(rule)
        plain = mixer.operands(x).gates
        signed = build(rule, negative_eigenvalues=True)
        signed.load_state_dict(mixer.state_dict())
        for other, gate in signed.operands(x).gates.items():
            torch.testing.assert_close(gate, plain[other] * (2 if other == name else 1))


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"negative_eigenvalues": True},
            "^--negative-eigenvalues doubles a gate that erases; leave it out, or use a rule that has one: delta, gated_",
        ),
        (
            {"product_steps": 3},
            "^--product-steps is 3; that is for --update-rule delta_product or gated_delta_product: lea",
        ),
        ({"key_heads": 3}, "^--key-heads is 3; it must divide the number of heads, 4$"),
        ({"key_heads": 8}, "^--key-heads is 8; it must divide the number of heads, 4$"),
        ({"short_conv": 1}, "^--short-conv is 1; it must be 0, for none, or at least 2$"),
        (
            {"allow_divergence": True},
            "^--allow-divergence has nothing to allow: without it, these options are taken too; leave it out$",
        ),
        ({"short_conv_bias": True}, "^--short-conv-bias is for --short-conv: add it, or leave this out$"),
        (
            {"norm_after_gate": True, "output_norm": True},
            "^--norm-after-gate is for --output-norm with --output-gate: add both, or leave this out$",
        ),
        ({"output_gate_form": "sigmoid"}, "^--output-gate-form is sigmoid; that is for --output-gate: add it, or leave this out$"),
        (
            {"exponential_decay": True},
            "^--exponential-decay is for sigmoids that decay the memory, and --update-rule sum has none; use: ",
        ),
        ({"expand_values": 1.1}, "^--expand-values makes values 13 wide; that must be a multiple of the heads, 4$"),
        (
            {"read_own_value": True, "attention_norm": True, "feature_map": "elu", "feature_norm": "sum"},
            "^--read-own-value adds products that --attention-norm does not divide; leave one of them out$",
        ),
        ({"token_shift_rank": 2}, "^--token-shift-rank is 2; that is for --token-shift: add it, or leave this out$"),
        ({"rotary": True}, "^--rotary turns pairs of features, and keys have 3; choose an even --feature-dim$"),
        (
            ROTARY | {"update_rule": "rwkv7"},
            "^--rotary turns queries and keys, and nothing else that --update-rule rwkv7 has; use: ",
        ),
        (
            ROTARY | {"update_rule": "hgrn2"},
            "^--rotary turns queries and keys, and nothing else that --update-rule hgrn2 has; use: ",
        ),
        (
            ROTARY | {"attention_norm": True, "feature_map": "elu", "feature_norm": "sum"},
            "^--rotary gives --attention-norm divisors that may vanish; leave one of them out$",
        ),
    ],
)
def test_refused(options, message):
    plain = {"update_rule": "sum", "feature_map": "identity", "feature_norm": "l2"}
    with pytest.raises(ValueError, match=message):
        FastWeight(C, HEADS, **plain | options)


def test_the_refusal_of_rotary_positions_names_the_rules_that_have_them():
    with pytest.raises(ValueError, match="use: ") as refused:
        build("rwkv7", **ROTARY)
    named = str(refused.value).rpartition("use: ")[2].split(", ")
    assert named == [rule for rule in RULES if rule not in ("hgrn2", "rwkv7")]
    for rule in named:
        build(rule, **ROTARY)


def test_several_workers_are_refused_where_tokens_before_are_needed():
    assert build("sum").why_not_across_workers() is build("rwkv7", output_norm=True).why_not_across_workers() is None
    assert build("sum", short_conv=4).why_not_across_workers().startswith("--short-conv needs the tokens of the worker before")
    assert build("sum", token_shift=True).why_not_across_workers().startswith("--token-shift needs the tokens of the worker")
    assert build("sum", **ROTARY).why_not_across_workers().startswith("--rotary needs the tokens of the worker")


def test_the_start_of_rwkv7():
    """Orthogonal projections, keys of a tenth, an output of 0, weights of the norm by the layer; low ranks begin at 0, and the maps
    from them are a tenth of orthogonal ones."""
    options = {"output_norm": True, "output_gate": True, "output_gate_form": "of_sigmoid", "output_gate_rank": 3}
    mixer = build("rwkv7", projection_init="rwkv7", **options)
    rows = dict(zip(mixer.sizes, mixer.in_proj.weight.split([*mixer.sizes.values()])))
    for name, gain in (("q", 1), ("k", 0.1), ("v", 1)):
        torch.testing.assert_close(rows[name] @ rows[name].mT, gain**2 * torch.eye(C).double(), rtol=0, atol=1e-6)
    assert all(rows[name].eq(0).all() for name in ("s", "c", "output")) and mixer.out_proj.weight.eq(0).all()
    torch.testing.assert_close(mixer.norm.weight.float(), torch.full((3,), 0.5**0.7))
    torch.testing.assert_close(mixer.gate.up.mT @ mixer.gate.up, 0.01 * torch.eye(3).double(), rtol=0, atol=1e-8)
    up = mixer.makers["s"].up  # (12,64): its rows are orthogonal, and longer where the rank is larger than the width
    torch.testing.assert_close(up @ up.mT, 0.01 * 64 / 12 * torch.eye(C).double(), rtol=0, atol=1e-7)


def test_where_exponential_decays_start():
    """exp(A) uniform from 0 to 16, and steps from 0.001 to 0.1."""
    torch.manual_seed(0)
    made = [FastWeight(64, 64, update_rule=rule, **more).makers["g"] for rule, more in EXPONENTIAL.items() for _ in range(20)]
    rates, steps = (
        torch.cat([part.detach() for part in x]) for x in ([m.rate.exp() for m in made], [F.softplus(m.bias) for m in made])
    )
    assert rates.min() < 0.1 and rates.max() > 15.9 and rates.mean().item() == pytest.approx(8, abs=0.5)
    assert steps.min() >= 0.001 and steps.max() <= 0.1 and steps.log().std() > 0.5


@pytest.mark.parametrize(
    "options",
    [
        {"update_rule": "delta", "feature_map": "elu", "feature_norm": "none"},
        {"update_rule": "delta", "feature_map": "identity", "feature_norm": "none"},
        {"update_rule": "sum", "feature_map": "identity", "feature_norm": "none", "attention_norm": True},
    ],
)
def test_what_papers_report_to_diverge_can_be_tried(options):
    """With the equations as they are: the last row is divided by 1e-6 and the product of its query with all keys."""
    with pytest.raises(ValueError, match=r"diverges with keys longer than 1|which identity lets vanish"):
        FastWeight(C, 1, **options)
    mixer, x = (
        FastWeight(C, 1, allow_divergence=True, bias_free=True, **options).double(),
        torch.randn(5, 1, C, dtype=torch.float64),
    )
    q, k, v, *beta = (x[:, 0] @ mixer.in_proj.weight.mT).split([*mixer.sizes.values()], 1)
    if options["feature_map"] == "elu":
        q, k = (torch.where(part > 0, part + 1, part.exp()) for part in (q, k))
    memory = torch.zeros(C, C, dtype=torch.float64)
    for t in range(5):
        strength = torch.sigmoid(beta[0][t]) if beta else 1
        memory = memory + torch.outer(k[t], strength * (v[t] - (k[t] @ memory if beta else 0)))
    read = q[-1] @ memory
    read = read / (q[-1] @ k.sum(0) + 1e-6) if "attention_norm" in options else read
    torch.testing.assert_close(mixer(x)[0][-1, 0], read @ mixer.out_proj.weight.mT)


def test_a_norm_of_16_bits_is_computed_in_more():
    y = torch.full((1, 4), 300.0, dtype=torch.float16)
    torch.testing.assert_close(HeadNorm(4)(y), torch.ones(1, 4, dtype=torch.float16))


def test_the_state_counts_what_it_keeps():
    assert build("kda", **AROUND).state_size() == C * C // HEADS + 3 * (6 + 6 + C) + C
    assert math.isclose(build("sum").state_size(), C * C // HEADS)
