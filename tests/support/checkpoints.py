"""Checkpoints of transformer_lm, the sources of conversions."""

from __future__ import annotations

import math
from argparse import Namespace

import torch
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import OmegaConf

SHAPE = (
    "--task language_modeling --tokens-per-sample 32 --decoder-layers 2 --decoder-embed-dim 32 --decoder-input-dim 32"
    " --decoder-output-dim 32 --decoder-ffn-embed-dim 48 --decoder-attention-heads 4"
)


ADAPTIVE = "--adaptive-input --adaptive-input-cutoff 20,40 --adaptive-input-factor 2 --adaptive-softmax-cutoff 20,40"


ADAPTIVE += " --adaptive-softmax-factor 2 --tie-adaptive-weights --criterion adaptive_loss --ddp-backend legacy_ddp"


def parse(text: str, data) -> Namespace:
    return options.parse_args_and_arch(options.get_training_parser(), [str(data), *f"{SHAPE} {text}".split(), "--dropout", "0.2"])


def source(text: str, data):
    """A transformer_lm with random numbers everywhere, norms and biases too, its args, and the state that fairseq saves of it."""
    args = parse(text, data)
    cfg = convert_namespace_to_omegaconf(args)
    model = tasks.setup_task(cfg.task).build_model(cfg.model).eval()
    with torch.no_grad():
        for x in model.parameters():
            x.copy_(torch.randn_like(x) / math.sqrt(x.shape[-1]) if x.dim() > 1 else x + 0.1 * torch.randn_like(x))
    return model, args, save_format(model.state_dict(), cfg=OmegaConf.to_container(cfg, resolve=True, enum_to_str=True))


def save_format(tensors: dict, cfg=None, args=None) -> dict:
    history = {"criterion_name": "x", "optimizer_name": "x", "lr_scheduler_state": {}, "num_updates": 3}
    extra = {"epoch": 1, "train_iterator": {"epoch": 1, "iterations_in_epoch": 3}}
    state = {"model": tensors, "optimizer_history": [history], "extra_state": extra, "last_optimizer_state": {"big": torch.ones(9)}}
    return state | ({"cfg": cfg, "args": None} if args is None else {"args": args})


def save(state: dict, folder):
    torch.save(state, folder / "source.pt")
    return folder / "source.pt"


def logits(model, tokens):
    """Of every word, through the adaptive softmax where there is one."""
    with torch.no_grad():
        output = model(tokens)
        adaptive = model.decoder.adaptive_softmax is not None
        return model.get_normalized_probs(output, log_probs=True, sample=None) if adaptive else output[0]
