"""Writes a GPT-2 of random numbers with 2 layers of width 32, whose tokens are bytes: python toy.py FOLDER"""

import json
import sys
from pathlib import Path

import torch
from fairseq.data.encoders.gpt2_bpe_utils import bytes_to_unicode

WIDTH, LAYERS, HEADS, POSITIONS = 32, 2, 4, 32
LINEAR = {
    "attn.c_attn": (WIDTH, 3 * WIDTH),
    "attn.c_proj": (WIDTH, WIDTH),
    "mlp.c_fc": (WIDTH, 4 * WIDTH),
    "mlp.c_proj": (4 * WIDTH, WIDTH),
}


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokens = [*bytes_to_unicode().values(), "<|endoftext|>"]
    sizes = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": POSITIONS, "vocab_size": len(tokens)}
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "eos_token_id": len(tokens) - 1, **sizes}))
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    torch.manual_seed(1)
    tensors = {"wte.weight": torch.randn(len(tokens), WIDTH) * 0.1, "wpe.weight": torch.randn(POSITIONS, WIDTH) * 0.1}
    tensors |= norm("ln_f")
    for layer in range(LAYERS):
        tensors |= norm(f"h.{layer}.ln_1") | norm(f"h.{layer}.ln_2")
        for name, (rows, columns) in LINEAR.items():
            tensors[f"h.{layer}.{name}.weight"] = torch.randn(rows, columns) * rows**-0.5
            tensors[f"h.{layer}.{name}.bias"] = torch.zeros(columns)
    torch.save(tensors, folder / "pytorch_model.bin")


def norm(name: str) -> dict[str, torch.Tensor]:
    return {f"{name}.weight": torch.ones(WIDTH), f"{name}.bias": torch.zeros(WIDTH)}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
