"""Published layers in float64, token by token, by the names of weights in flash-linear-attention's state dicts."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

EPS = 1e-5  # of the norms of its layers
Weights = dict[str, Tensor]


def split(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1))


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (T,C) and weights (C,1,taps), of which the last one is for the token itself."""
    padded = F.pad(x.mT, (weight.shape[-1] - 1, 0))
    y = F.conv1d(padded[None], weight, bias, groups=len(weight))[0].mT
    return y / (1 + (-y).exp())


def rms(y: Tensor, weight: Tensor, eps: float | None = None) -> Tensor:
    return y / (y.square().mean(-1, keepdim=True) + (EPS if eps is None else eps)).sqrt() * weight


def group_norm(y: Tensor, w: Weights, eps: float) -> Tensor:
    """y (T,H,V)"""
    return F.group_norm(y.flatten(1), y.shape[1], w["g_norm.weight"], w["g_norm.bias"], eps)


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def written(q: Tensor, k: Tensor, v: Tensor, f: Tensor, e: Tensor | None = None, w: Tensor | None = None) -> Tensor:
    """q (T,H,K), k, e (T,n,H,K), v, w (T,n,H,V), f (T,H,K) -> what is read, (T,H,V)."""
    memory, reads = q.new_zeros(*q.shape[1:], v.shape[-1]), []
    for t in range(len(q)):
        memory = f[t, :, :, None] * memory
        for i in range(k.shape[1]):
            key, value = k[t, i], v[t, i] if w is None else w[t, i] * v[t, i]
            if e is not None:
                value_there = torch.einsum("hk,hkv->hv", e[t, i] * key, memory)
                memory = memory - key[:, :, None] * value_there[:, None]
            memory = memory + key[:, :, None] * value[:, None]
        reads.append(torch.einsum("hk,hkv->hv", q[t], memory))
    return torch.stack(reads)


def decay_of_steps(x: Tensor, w: Weights, heads: int) -> Tensor:
    """exp(-exp(A) softplus(x + dt)), (T,H,X)"""
    return torch.exp(-w["A_log"].exp()[:, None] * split(torch.log1p((x + w["dt_bias"]).exp()), heads))


def delta_family(x: Tensor, w: Weights, heads: int, writes: int = 1, negative: bool = False) -> Tensor:
    """DeltaNet, Gated DeltaNet, KDA, GDN 2 and (Gated) DeltaProduct, by the weights that there are."""
    q, k, v = (convolved(x @ w[f"{name}_proj.weight"].mT, w[f"{name}_conv1d.weight"]) for name in "qkv")
    q = unit(split(q, heads))
    k, v = (part.unflatten(-1, (writes, heads, -1)) for part in (k, v))
    k, q = unit(k), q / math.sqrt(q.shape[-1])
    beta = torch.sigmoid(x @ w["b_proj.weight"].mT)
    beta = (2 if negative else 1) * beta.unflatten(-1, (writes, heads, -1)).expand_as(k)
    strength = torch.sigmoid(x @ w["w_proj.weight"].mT).unflatten(-1, (1, heads, -1)) if "w_proj.weight" in w else beta[..., :1]
    f = torch.ones_like(q)
    if "a_proj.weight" in w:
        f = decay_of_steps(x @ w["a_proj.weight"].mT, w, heads).expand_as(q)
    elif "f_proj.0.weight" in w:
        f = decay_of_steps(x @ w["f_proj.0.weight"].mT @ w["f_proj.1.weight"].mT, w, heads)
    y = rms(written(q, k, v, f, beta, strength), w["o_norm.weight"]).flatten(1)
    if "g_proj.weight" in w:
        gate = x @ w["g_proj.weight"].mT
        y = y * gate * torch.sigmoid(gate)
    elif "g_proj.0.weight" in w:
        y = y * torch.sigmoid(x @ w["g_proj.0.weight"].mT @ w["g_proj.1.weight"].mT + w["g_proj.1.bias"])
    return y @ w["o_proj.weight"].mT


def delta_product(x: Tensor, w: Weights, heads: int) -> Tensor:
    return delta_family(x, w, heads, 2, True)


def gla(x: Tensor, w: Weights, heads: int) -> Tensor:
    q, k, v, gate = (split(x @ w[f"{name}_proj.weight"].mT, heads) for name in "qkvg")
    f = torch.sigmoid(x @ w["gk_proj.0.weight"].mT @ w["gk_proj.1.weight"].mT + w["gk_proj.1.bias"]) ** (1 / 16)
    y = written(q / math.sqrt(q.shape[-1]), k[:, None], v[:, None], split(f, heads))
    return (rms(y, w["g_norm_swish_gate.weight"]) * gate * torch.sigmoid(gate)).flatten(1) @ w["o_proj.weight"].mT


def retnet(x: Tensor, w: Weights, heads: int) -> Tensor:
    q, k, v, gate = (split(x @ w[f"{name}_proj.weight"].mT, heads) for name in "qkvg")
    half = q.shape[-1] // 2
    angles = torch.arange(len(x))[:, None, None].double() * 10000 ** (-torch.arange(half).double() / half)
    turned = (torch.complex(part[..., :half], part[..., half:]) * torch.polar(torch.ones_like(angles), angles) for part in (q, k))
    q, k = (torch.cat([part.real, part.imag], -1) for part in turned)
    f = (1 - 2.0 ** -(5 + torch.arange(heads).double()))[:, None].expand_as(q)
    y = rms(written(q / math.sqrt(2 * half), k[:, None], v[:, None], f), w["g_norm_swish_gate.weight"])
    return (y * gate * torch.sigmoid(gate)).flatten(1) @ w["o_proj.weight"].mT


def comba(x: Tensor, w: Weights, heads: int) -> Tensor:
    """As published: the inner decay and the correction of the query come after both were divided by their lengths."""
    q, k, v = (convolved(x @ w[f"{name}_proj.weight"].mT, w[f"{name}_conv1d.weight"]) for name in "qkv")
    q, k, v = unit(split(q, heads)), unit(split(k, heads)), split(v, heads)
    beta, kept = torch.sigmoid(x @ w["b_proj.weight"].mT), decay_of_steps(x @ w["a_proj.weight"].mT, w, heads)[..., 0]
    memory, reads = q.new_zeros(*q.shape[1:], v.shape[-1]), []
    for t in range(len(x)):
        wanted = v[t] - torch.sigmoid(w["decay"])[:, None] * torch.einsum("hk,hkv->hv", k[t], memory)
        memory = kept[t, :, None, None] * memory + beta[t, :, None, None] * k[t, :, :, None] * wanted[:, None]
        reads.append(torch.einsum("hk,hkv->hv", q[t] - w["D"][:, None] * k[t], memory) / math.sqrt(q.shape[-1]))
    y = rms(torch.stack(reads), w["o_norm.weight"]).flatten(1)
    return y * torch.sigmoid(x @ w["g_proj.weight"].mT) @ w["o_proj.weight"].mT


def gsa(x: Tensor, w: Weights, heads: int) -> Tensor:
    """Slots of keys (H,N,K) and of values (H,N,V)."""
    q, k, v = (split(y * torch.sigmoid(y), heads) for y in (x @ w[f"{name}_proj.weight"].mT for name in "qkv"))
    g = split(torch.sigmoid(x @ w["f_proj.weight"].mT) ** (1 / 8), heads)
    keys, values = (q.new_zeros(*g.shape[1:], part.shape[-1]) for part in (k, v))
    reads = []
    for t in range(len(x)):
        keys, values = (
            g[t, :, :, None] * slots + (1 - g[t, :, :, None]) * part[t, :, None] for slots, part in ((keys, k), (values, v))
        )
        shares = torch.einsum("hnk,hk->hn", keys, q[t]).softmax(-1)
        reads.append(torch.einsum("hn,hnv->hv", shares, values))
    y = torch.stack(reads).flatten(1)
    return rms(y * torch.sigmoid(y), w["g_norm.weight"]) @ w["o_proj.weight"].mT


def hgrn2(x: Tensor, w: Weights, heads: int) -> Tensor:
    """With a bound, as in the layers after the first."""
    q, f, v = (x @ w[f"{name}_proj.weight"].mT for name in "qfi")
    f = w["lower_bound"] + (1 - w["lower_bound"]) * torch.sigmoid(f)
    q, f, v = (split(part, heads) for part in (q * torch.sigmoid(q), f, v))
    q = q / math.sqrt(q.shape[-1])
    return rms(written(q, 1 - f[:, None], v[:, None], f).flatten(1), w["g_norm.weight"], 1e-5) @ w["o_proj.weight"].mT


def mamba2(x: Tensor, w: Weights, heads: int) -> Tensor:
    width, state = len(w["norm.weight"]), (len(w["conv1d.weight"]) - len(w["norm.weight"])) // 2
    z, xbc, dt = (x @ w["in_proj.weight"].mT).split([width, width + 2 * state, heads], 1)
    v, k, q = convolved(xbc, w["conv1d.weight"], w["conv1d.bias"]).split([width, state, state], 1)
    v, step = split(v, heads), torch.log1p((dt + w["dt_bias"]).exp())
    q, k = (part[:, None].expand(-1, heads, -1) for part in (q, k))
    f = torch.exp(-w["A_log"].exp() * step)[..., None].expand_as(q)
    y = written(q, k[:, None], (step[..., None] * v)[:, None], f) + w["D"][:, None] * v
    return rms(y.flatten(1) * z * torch.sigmoid(z), w["norm.weight"]) @ w["out_proj.weight"].mT


def rwkv6(x: Tensor, w: Weights, heads: int) -> Tensor:
    change = F.pad(x, (0, 0, 1, 0))[:-1] - x
    low = torch.tanh((x + change * w["x_proj.0.mu"]) @ w["x_proj.0.linear.weight"].mT).unflatten(-1, (5, -1))
    shares = torch.einsum("tnr,cnr->tnc", low, w["x_proj.2.weight"].unflatten(1, (5, -1))) + w["x_bias"]
    r, d, k, v, gate = (x + change * shares[:, i] for i in range(5))
    r, k, v, gate = (part @ w[f"{name}_proj.linear.weight"].mT for part, name in zip((r, k, v, gate), "rkvg"))
    lora = "w_proj.linear.lora"
    d = torch.tanh(d @ w[f"{lora}.0.weight"].mT) @ w[f"{lora}.2.weight"].mT + w[f"{lora}.2.bias"]
    r, k, v, f = (split(part, heads) for part in (r, k, v, torch.exp(-d.exp())))
    memory, reads = r.new_zeros(*r.shape[1:], v.shape[-1]), []
    for t in range(len(x)):
        new = k[t, :, :, None] * v[t, :, None]
        reads.append(torch.einsum("hk,hkv->hv", r[t], memory + w["bonus"][:, :, None] * new))
        memory = f[t, :, :, None] * memory + new
    return group_norm(torch.stack(reads), w, EPS) * gate * torch.sigmoid(gate) @ w["o_proj.weight"].mT


def rwkv7(x: Tensor, w: Weights, heads: int, first_values: Tensor) -> Tensor:
    """A layer after the first one, whose values (T,C) are given."""

    def lora(name: str, x: Tensor, inner: Callable) -> Tensor:
        y = inner(x @ w[f"{name}_lora.lora.0.weight"].mT) @ w[f"{name}_lora.lora.2.weight"].mT
        return y + w.get(f"{name}_lora.lora.2.bias", 0)

    change = F.pad(x, (0, 0, 1, 0))[:-1] - x
    mixed = {name: x + change * w[f"x_{name}"][0, 0] for name in "rwkvag"}
    r, k, v = (mixed[name] @ w[f"{name}_proj.weight"].mT for name in "rkv")
    f = torch.exp(-math.exp(-0.5) * torch.sigmoid(lora("w", mixed["w"], torch.tanh)))
    v = v + torch.sigmoid(lora("v", mixed["v"], lambda x: x)) * (first_values - v)
    a, gate = torch.sigmoid(lora("a", mixed["a"], lambda x: x)), lora("g", mixed["g"], torch.sigmoid)
    kappa = F.normalize(split(k * w["k_k"], heads), dim=-1)
    k = k * (1 + (a - 1) * w["k_a"])
    r, k, v, f, a = (split(part, heads) for part in (r, k, v, f, a))
    memory, reads = r.new_zeros(*r.shape[1:], v.shape[-1]), []
    for t in range(len(x)):
        removed = torch.einsum("hk,hkv->hv", kappa[t], memory)
        memory = f[t, :, :, None] * memory - (kappa * a)[t, :, :, None] * removed[:, None] + k[t, :, :, None] * v[t, :, None]
        reads.append(torch.einsum("hk,hkv->hv", r[t], memory))
    y = group_norm(torch.stack(reads), w, x.shape[1] // heads * EPS)
    y = y + ((r * k * w["r_k"]).sum(-1, keepdim=True) * v).flatten(1)
    return y * gate @ w["o_proj.weight"].mT


LAYERS: dict[str, Callable[..., Tensor]] = {
    "delta_net_lm": delta_family,
    "gated_delta_lm": delta_family,
    "kda_lm": delta_family,
    "gdn2_lm": delta_family,
    "delta_product_lm": delta_product,
    "gated_delta_product_lm": delta_product,
    "gla_lm": gla,
    "retnet_lm": retnet,
    "comba_lm": comba,
    "gsa_lm": gsa,
    "hgrn2_lm": hgrn2,
    "mamba2_lm": mamba2,
    "rwkv6_lm": rwkv6,
    "rwkv7_lm": rwkv7,
}


C, HEADS, SLOTS = 24, 3, 5
WIDE = {"gated_delta_lm": 36, "comba_lm": 36, "retnet_lm": 48, "mamba2_lm": 48}  # values
KEYS = {"gated_delta_lm": 18, "comba_lm": 18, "gla_lm": 12}
WRITES = {"delta_product_lm": 2, "gated_delta_product_lm": 2}


def drawn(arch: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights by the names and shapes of the published layer."""
    values, keys, n = WIDE.get(arch, C), KEYS.get(arch, C), WRITES.get(arch, 1)
    head = values // HEADS
    qkv = {"q_proj.weight": (keys, C), "k_proj.weight": (n * keys, C), "v_proj.weight": (n * values, C)}
    conv = {f"{name}_conv1d.weight": (rows, 1, 4) for name, rows in (("q", keys), ("k", n * keys), ("v", n * values))}
    out = {"o_proj.weight": (C, values)}
    swish = {"g_proj.weight": (values, C), "o_norm.weight": (head,)}
    low = {"g_proj.0.weight": (head, C), "g_proj.1.weight": (values, head), "g_proj.1.bias": (values,), "o_norm.weight": (head,)}
    low |= {"f_proj.0.weight": (head, C), "f_proj.1.weight": (keys, head), "A_log": (HEADS,), "dt_bias": (keys,)}
    beta, steps = {"b_proj.weight": (n * HEADS, C)}, {"a_proj.weight": (HEADS, C), "A_log": (HEADS,), "dt_bias": (HEADS,)}
    group = {"g_norm.weight": (C,), "g_norm.bias": (C,)}
    retnet = qkv | out | {"g_proj.weight": (values, C), "g_norm_swish_gate.weight": (head,)}
    of_6 = {f"{name}_proj.linear.weight": (C, C) for name in "rkvg"} | {"x_bias": (5, C), "x_proj.0.mu": (C,), "bonus": (HEADS, 8)}
    of_6 |= {"x_proj.0.linear.weight": (160, C), "x_proj.2.weight": (C, 160)}
    of_6 |= {"w_proj.linear.lora.0.weight": (64, C), "w_proj.linear.lora.2.weight": (C, 64), "w_proj.linear.lora.2.bias": (C,)}
    of_7 = {f"{name}_proj.weight": (C, C) for name in "rkvo"} | {f"x_{name}": (1, 1, C) for name in "rwkvag"}
    of_7 |= {"k_k": (C,), "k_a": (C,), "r_k": (HEADS, 8)} | group
    for name, rank in (("w", 64), ("a", 64), ("v", 32), ("g", 128)):
        of_7 |= {f"{name}_lora.lora.0.weight": (rank, C), f"{name}_lora.lora.2.weight": (C, rank)}
        of_7 |= {} if name == "g" else {f"{name}_lora.lora.2.bias": (C,)}
    wide = {"conv1d.weight": (values + 12, 1, 4), "conv1d.bias": (values + 12,), "in_proj.weight": (2 * values + 12 + HEADS, C)}
    shapes = {
        "delta_net_lm": qkv | conv | beta | out | {"o_norm.weight": (head,)},
        "gated_delta_lm": qkv | conv | beta | steps | swish | out,
        "comba_lm": qkv | conv | beta | steps | swish | out | {"decay": (HEADS,), "D": (HEADS,)},
        "gsa_lm": qkv | out | {"f_proj.weight": (HEADS * SLOTS, C), "g_norm.weight": (C,)},
        "kda_lm": qkv | conv | beta | low | out,
        "gdn2_lm": qkv | conv | low | out | {"b_proj.weight": (keys, C), "w_proj.weight": (values, C)},
        "delta_product_lm": qkv | conv | beta | swish | out,
        "gated_delta_product_lm": qkv | conv | beta | steps | swish | out,
        "gla_lm": retnet | {"gk_proj.0.weight": (16, C), "gk_proj.1.weight": (keys, 16), "gk_proj.1.bias": (keys,)},
        "retnet_lm": retnet,
        "hgrn2_lm": {f"{name}_proj.weight": (C, C) for name in "qfio"} | {"g_norm.weight": (C,), "lower_bound": (C,)},
        "mamba2_lm": wide
        | dict.fromkeys(["A_log", "D", "dt_bias"], (HEADS,))
        | {"norm.weight": (values,), "out_proj.weight": (C, values)},
        "rwkv6_lm": of_6 | out | group,
        "rwkv7_lm": of_7,
    }
    torch.manual_seed(seed)
    weights = {}
    for name, shape in shapes[arch].items():
        weights[name] = torch.randn(shape, dtype=torch.float64) / (1 if len(shape) == 1 else math.sqrt(shape[-1]))
    if "dt_bias" in weights:
        weights["dt_bias"] -= 3  # steps of the size that they start with
    if "lower_bound" in weights:
        weights["lower_bound"] = weights["lower_bound"].sigmoid()
    return weights
