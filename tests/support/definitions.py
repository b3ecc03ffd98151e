"""The update rules, the SRU and windowed means, written from their equations."""

from __future__ import annotations

import math

import torch

WRITES = {  # the memory (K,V) after one token
    "sum": lambda W, k, v: W + torch.outer(k, v),
    "gated": lambda W, k, v, g: g * W + (1 - g) * torch.outer(k, v),
    "delta": lambda W, k, v, beta: W + beta * torch.outer(k, v - k @ W),
    "decay": lambda W, k, v, f, z: torch.outer(f, z) * W + torch.outer(k, v),
    "gated_delta": lambda W, k, v, g, beta: g * W + beta * torch.outer(k, v - k @ (g * W)),
    "fwm": lambda W, k, v, beta: W + beta * torch.outer(k, v - k @ W),
    "retnet": lambda W, k, v, g: g * W + torch.outer(k, v),
    "gla": lambda W, k, v, f: torch.diag(f) @ W + torch.outer(k, v),
    "mamba2": lambda W, k, v, s, g, d: g * W + s * torch.outer(k, v),
    "hgrn2": lambda W, k, v, f: torch.diag(f) @ W + torch.outer((1 - f) * k, v),
    "rwkv6": lambda W, k, v, f, u: torch.diag(f) @ W + torch.outer(k, v),
    "rwkv7": lambda W, k, v, s, c, kappa, a: (
        torch.diag(torch.exp(-s / math.sqrt(math.e))) @ W
        - torch.outer(c * kappa, kappa @ W)
        + torch.outer(k * (1 + (c - 1) * a), v)
    ),
    "kda": lambda W, k, v, f, beta: (
        (torch.eye(len(k), dtype=k.dtype) - beta * torch.outer(k, k)) @ torch.diag(f) @ W + beta * torch.outer(k, v)
    ),
    "gdn2": lambda W, k, v, f, b, w: torch.diag(f) @ W - torch.outer(k, (b * k) @ torch.diag(f) @ W) + torch.outer(k, w * v),
    "comba": lambda W, k, v, s, beta, b, d: torch.exp(-s) * W - b * beta * torch.outer(k, k @ W) + beta * torch.outer(k, v),
    "delta_product": lambda W, k, v, beta: W + beta * torch.outer(k, v - k @ W),
    "gated_delta_product": lambda W, k, v, g, beta: g * W + beta * torch.outer(k, v - k @ (g * W)),
}
READS = {  # what a token reads, from the memory before it and after it, where that is not the memory after it
    "mamba2": lambda before, W, q, k, v, s, g, d: q @ W + d * v,
    "comba": lambda before, W, q, k, v, s, beta, b, d: (q - d * k) @ W,
    "rwkv6": lambda before, W, q, k, v, f, u: q @ (before + torch.outer(u * k, v)),
}
NAMES = ("product", "x", "v_forget", "v_reset", "state")


def by_the_equations(product, x, v_forget, v_reset, state, padding=None, resets=None, scale=1.0, of_cell=lambda c: c):
    (u, forget, reset), c, outputs = product.chunk(3, -1), state, []
    for t in range(len(u)):
        if resets is not None:
            c = torch.where(resets[:, t, None], 0.0, c)
        f, r = (forget[t] + v_forget * c).sigmoid(), (reset[t] + v_reset * c).sigmoid()
        new = f * c + (1 - f) * u[t]
        h = r * of_cell(new) + (1 - r) * scale * x[t]
        skipped = c.new_zeros(len(c), 1, dtype=torch.bool) if padding is None else padding[:, t, None]
        c = torch.where(skipped, c, new)
        outputs.append(torch.where(skipped, 0.0, h))
    return torch.stack(outputs), c


def by_definition(a, x, window=0, padding=None, reset=None):
    """(B,H,T), (B,H,T,V): a list of what is seen, token by token."""
    rows = []
    for b in range(a.shape[0]):
        seen, outputs = [], []
        for t in range(a.shape[2]):
            if reset is not None and reset[b, t]:
                seen = []
            if padding is not None and padding[b, t]:
                outputs.append(torch.zeros_like(x[b, :, t]))
                continue
            seen.append(t)
            seen = seen[-window:] if window else seen
            outputs.append((a[b][:, seen].softmax(-1)[..., None] * x[b][:, seen]).sum(1))
        rows.append(torch.stack(outputs, 1))
    return torch.stack(rows)
