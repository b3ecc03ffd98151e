"""Generates a few tokens with every loop of ``fw_fairseq/ops/native``, in a process that a sanitizer watches."""

from __future__ import annotations

import torch
from support.language_models import build, draw

import fw_fairseq.models  # noqa: F401
from fw_fairseq.ops import native

OPTIONS = [
    {"update_rule": "sum", "feature_map": "dpfp", "attention_norm": True},
    {"update_rule": "delta", "feature_map": "relu"},
    {"update_rule": "delta", "attention_norm": True},
    {"update_rule": "decay", "feature_map": "identity", "feature_norm": "none"},
    {"update_rule": "rwkv6"},
    {"update_rule": "rwkv7", "value_mixing_rank": 2},
    {"update_rule": "gdn2", "short_conv": 3, "token_shift": True, "output_gate": True, "key_heads": 2},
    {"update_rule": "delta_product", "rotary": True},
    {"mixer": "additive"},
    {"mixer": "leap"},
    {"mixer": "sru"},
    {"ffn_sparsity": 2},
    {"ffn_sparsity": 12, "ffn_sru": 3, "qkv_sparsity": 4, "output_sparsity": 3},
]
ORDERS = {2: [1, 1, 0], 9: [1, 1, 0], 15: [0, 2], 20: [1]}  # of the rows, after the token at that place


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    assert native.library() is not None
    for options in OPTIONS:
        model, tokens, state, rows = build(**options), draw(3, 24), {}, torch.arange(3)
        model(tokens)
        for t in range(24):
            model(tokens[rows, : t + 1], incremental_state=state)
            if order := ORDERS.get(t):
                order = torch.tensor(order)
                rows = rows[order]
                model.decoder.reorder_incremental_state_scripting(state, order)
    print(len(OPTIONS), "models")


if __name__ == "__main__":
    main()
