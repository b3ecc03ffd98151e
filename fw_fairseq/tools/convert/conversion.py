"""Makes the parameters of a fast_weight_lm from the parameters of a softmax Transformer."""

from __future__ import annotations

import math
import shlex
import zipfile
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...config import DECODER_OPTIONS, SOFTMAX, FastWeightConfig, check_options, layer_mixers, option_name
from ...errors import Mistake
from ...feature_maps import FEATURE_MAPS
from ...files import write_atomically
from ...mixers import MIXERS
from ...mixers.fast_weight import FastWeight
from ...mixers.parts.features import drawn_bias
from ...models.fast_weight_lm import FastWeightLanguageModelConfig
from ...patches.checkpoints.model_options import OWN, SHAPES, UNSEEN, written
from ...patches.checkpoints.reading import ORIGIN
from ...rules import RULES
from ..command import check_outputs
from .decoders import ARCHITECTURE, convert_decoder, is_decoder
from .pretrained import Source, load_mapped, read_pretrained
from .recurrent import convert_recurrent, is_recurrent
from .report import Change, merged

LOCAL = "local_attention"
Tensors = dict[str, Tensor]
ATTENTION = [f"{part}_proj.{kind}" for part in ("q", "k", "v", "out") for kind in ("weight", "bias")]
TARGETS = [*RULES, LOCAL, SOFTMAX]
SUM_SCALE = 1 / 512  # Mao 2022, footnote 4


def convert(
    source: str | Path,
    output: str | Path,
    rule: str | None = None,
    *,
    force: bool = False,
    seed: int = 1,
    memory_window: int = 0,
    drop_rotary: bool = False,
    **options: Any,
) -> list[Change]:
    """Writes the checkpoint ``output`` and returns a line for every tensor: copied, changed or new.

    options: feature_dim, feature_map, feature_norm, attention_norm, attention_norm_of, mixer_pattern and local_window, as
    fast_weight_lm has them; None stands for the default; memory_window and drop_rotary as pretrained_lm has them, which any decoder
    of transformers but GPT-2 becomes. A recurrent model takes neither rule nor options. A folder also gets dict.txt, its tokens as
    fairseq's symbols, in the folder of ``output``.
    """
    output, source = Path(output), Path(source)
    recurrent = is_recurrent(source)
    every = {"rule": rule, **options, "memory_window": memory_window, "drop_rotary": drop_rotary}
    if recurrent and (given := [name for name, value in every.items() if value]):
        raise Mistake(f"SOURCE {source} is a recurrent model, which stays as it is; leave {option_name(given[0])} out")
    if not recurrent and rule is None:
        raise Mistake(f"--rule is missing; a Transformer becomes one of: {', '.join(TARGETS)}")
    config = FastWeightConfig() if rule is None else fast_weight_config(rule, **options)
    check_options(config)
    if output.exists() and not force:
        raise Mistake(f"OUTPUT {output} exists; name another file, or give --force to replace it")
    check_outputs([("OUTPUT", output)], [("SOURCE", source)])
    if output.exists() and not zipfile.is_zipfile(output):
        raise Mistake(f"OUTPUT {output} is no checkpoint, and --force would delete it; name another file")
    architecture, changes = "fast_weight_lm", None
    if recurrent:
        architecture, read, lines = convert_recurrent(source)
        changes = [Change(*line) for line in lines]
    elif is_decoder(source):
        architecture = ARCHITECTURE
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            read, lines = convert_decoder(source, config, memory_window, drop_rotary)
            changes = [Change(*line) for line in lines]
    elif memory_window or drop_rotary:
        raise Mistake("--memory-window and --drop-rotary are for decoders of transformers other than GPT-2; leave them out")
    else:
        read = read_pretrained(source)
    words = output.parent / "dict.txt"
    symbols = None if read.symbols is None else "".join(f"{symbol} 1\n" for symbol in read.symbols)
    if symbols is not None:
        check_outputs([("OUTPUT", output)], [("the dictionary", words)])
        if words.exists() and words.read_text() != symbols and not force:
            raise Mistake(f"{words} is another model's dictionary; name an OUTPUT in another folder, or give --force to replace it")
    if changes is None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            changes = convert_tensors(read, config)
        made = {name: value for name, value in asdict(config).items() if name not in DECODER_OPTIONS}  # which the source keeps
        read.options |= {name: value for name, value in made.items() if not name.startswith("_")}
    checkpoint = _checkpoint(read, architecture)
    write_atomically(output, lambda temporary: torch.save(checkpoint, temporary))
    if symbols is not None:
        write_atomically(words, lambda temporary: temporary.write_text(symbols))
    return merged(changes)


def fast_weight_config(
    rule: str, feature_map: str | None = None, feature_norm: str | None = None, local_window: int | None = None, **options: Any
) -> FastWeightConfig:
    """Returns the options of the new model. The defaults are the best ones of Mao 2022, table 1: learned ReLU features divided by
    their sum for rules that erase, plain features for the others."""
    window: dict[str, Any] = {} if local_window is None else {"local_window": local_window}
    if rule in (LOCAL, SOFTMAX):
        if named := [
            name for name, value in {"feature_map": feature_map, "feature_norm": feature_norm, **options}.items() if value
        ]:
            given = ", ".join(map(option_name, named))
            raise Mistake(f"--rule {rule} keeps queries and keys as they are; leave {given} out")
        return FastWeightConfig(mixer=rule, **window)
    options = {name: value for name, value in options.items() if value is not None}
    erases = RULES[rule].erases
    feature_map = feature_map or ("relu" if erases else "identity")
    norm = feature_norm or (("sum" if FEATURE_MAPS[feature_map].non_negative else "l2") if erases else "none")
    return FastWeightConfig(update_rule=rule, feature_map=feature_map, feature_norm=norm, **window, **options)


def convert_tensors(source: Source, config: FastWeightConfig) -> list[Change]:
    """Replaces each layer's attention in ``source.tensors``, one layer after the other, and returns the lines of the report."""
    tensors, options, changes = source.tensors, source.options, []
    names = layer_mixers(config, options["decoder_layers"])
    if unknown := sorted({*names} - {*CONVERSIONS, SOFTMAX}):
        raise Mistake(f"--mixer-pattern has {unknown[0]}; fw-convert makes: {', '.join([*CONVERSIONS, SOFTMAX])}")
    for layer, name in enumerate(names):
        if name == SOFTMAX:
            continue
        prefix = f"decoder.layers.{layer}.self_attn."
        parts = {key: tensors.pop(prefix + key) for key in ATTENTION if prefix + key in tensors}
        if left := next((key for key in tensors if key.startswith(prefix)), None):
            raise Mistake(f"SOURCE has {left}, an option of attention that fast weights do not have")
        sizes = options["decoder_embed_dim"], options["decoder_attention_heads"]
        mixer = MIXERS[name].of_layer(*sizes, config, layer, len(names))
        new, entries = CONVERSIONS[name](parts, mixer)
        changes += [Change(f"{prefix}mixer.{key}", *entry) for key, *entry in entries]
        tensors |= {f"{prefix}mixer.{key}": x for key, x in new.items()}
    tied = {x.data_ptr(): key for key, x in reversed(tensors.items())}
    copied = [key for key, x in tensors.items() if ".self_attn.mixer." not in key and tied[x.data_ptr()] == key]
    return [Change(key, "copied", tensors[key].numel(), "") for key in copied] + changes


@torch.no_grad()
def convert_attention(parts: Tensors, mixer: Any) -> tuple[Tensors, list[tuple]]:
    """Returns the mixer's tensors, made from softmax attention's, and (name, what, parameters, how) of each of their pieces."""
    dtype, heads, width = parts["q_proj.weight"].dtype, mixer.num_heads, mixer.sizes["q"] // mixer.num_heads
    q, k, v = (torch.cat([parts[f"{x}_proj.weight"], parts[f"{x}_proj.bias"][:, None]], 1).float() for x in "qkv")
    q, projected = q * mixer.head_dim**-0.5, ""
    if width != mixer.head_dim:
        phi = width_map(heads, width, mixer.head_dim)
        q, k = ((phi @ x.unflatten(0, (heads, -1))).flatten(0, 1) for x in (q, k))
        projected = f"width per head {mixer.head_dim} -> {width}"
    gates = gate_rows(mixer)
    scale, scaled = value_scale(mixer, gates)
    keys = [] if mixer.rule.keyless else [k] * mixer.writes
    rows = torch.cat([q, *keys, *[v * scale] * mixer.writes, *gates.values()]).to(dtype)
    state = mixer.state_dict()
    state = {key: x.to(dtype) for key, x in state.items()}
    state |= {"in_proj.weight": rows[:, :-1].contiguous(), "in_proj.bias": rows[:, -1].contiguous()}
    state |= {key: x for key, x in parts.items() if key.startswith("out_proj.")}
    entries = [
        ("in_proj q", "changed", q.numel(), ", ".join(filter(None, [f"times 1/sqrt({mixer.head_dim})", projected]))),
        *(("in_proj k", "changed" if projected else "copied", x.numel(), projected) for x in keys),
        *(("in_proj v", "changed" if scaled else "copied", v.numel(), scaled) for _ in range(mixer.writes)),
        *((f"in_proj gate {name}", "new", x.numel(), start_of(name, x, mixer)) for name, x in gates.items() if len(x)),
        *((key, "new", x.numel(), "") for key, x in state.items() if key.startswith("makers.")),
        *((key, "copied", x.numel(), "") for key, x in parts.items() if key.startswith("out_proj.")),
    ]
    for key in [key for key in state if key.startswith("feature_map.")]:
        learned = key == "feature_map.weight"
        state[key] = (torch.eye(width).repeat(heads, 1, 1) if learned else state[key]).to(dtype)
        entries.append((key, "new", state[key].numel(), "starts as the identity" if learned else ""))
    return state, entries


def convert_to_local(parts: Tensors, mixer: Any) -> tuple[Tensors, list[tuple]]:
    """Returns queries, keys and values in one matrix, unchanged."""
    state = {f"in_proj.{kind}": torch.cat([parts[f"{x}_proj.{kind}"] for x in "qkv"]) for kind in ("weight", "bias")}
    state |= {key: x for key, x in parts.items() if key.startswith("out_proj.")}
    return state, [(key, "copied", x.numel(), "") for key, x in state.items()]


CONVERSIONS = {"fast_weight": convert_attention, LOCAL: convert_to_local}


def width_map(heads: int, width: int, head_dim: int) -> Tensor:
    """Returns W_phi of Mao 2022, eq. 8, (H, width, head_dim), for queries and keys. It is orthogonal and keeps q.k on average."""
    larger, smaller = max(width, head_dim), min(width, head_dim)
    columns = torch.linalg.qr(torch.randn(heads, larger, smaller))[0]
    return columns if width > head_dim else columns.transpose(1, 2) * math.sqrt(head_dim / width)


def gate_rows(mixer: FastWeight) -> Tensors:
    """Returns rows of zero weights and the biases that the rule gives a converted model. A gate without one gets uniform gate
    initialisation, over the width of the model or over its own size, whichever is larger."""
    biases = dict(zip(mixer.sizes, mixer.in_proj.bias.split(list(mixer.sizes.values()))))
    rows = {}
    for name, gate in mixer.rule.gates.items():
        bias, count = biases[name], len(biases[name])
        start = "uniform" if gate.bias is None and gate.converted is None else gate.converted
        if start is not None and name not in mixer.makers:
            bias = drawn_bias(start, max(mixer.embed_dim, count))[:count]
        rows[name] = torch.cat([torch.zeros(len(bias), mixer.embed_dim), bias[:, None]], 1)
    return rows


def value_scale(mixer: FastWeight, gates: Tensors) -> tuple[Tensor | float, str]:
    """Returns the factor of the rows of W_v and its name in the report. Without it the first updates overflow (Mao 2022, sec.
    3)."""
    decay = [name for name, gate in mixer.rule.gates.items() if gate.axis == "V"]
    if decay and mixer.rule.sample.z is not None:
        return 1 - torch.sigmoid(gates[decay[0]][:, -1:]), f"times 1 - sigmoid(bias of {decay[0]})"
    keeps_all = not mixer.rule.gates and not mixer.attention_norm and mixer.feature_norm == "none"
    return (SUM_SCALE, f"times 1/{round(1 / SUM_SCALE)}") if keeps_all else (1.0, "")


def start_of(name: str, rows: Tensor, mixer: FastWeight) -> str:
    """Returns where a gate starts, as the report says it."""
    gate, bias = mixer.rule.gates[name], rows[:, -1]
    if name in mixer.makers or (callable(gate.bias) and gate.converted is None):
        return "starts as in a new model"
    return f"starts at {bias[0].sigmoid():.4f}" if bias.eq(bias[0]).all() else "starts by uniform gate initialisation"


def _checkpoint(source: Source, architecture: str) -> dict:
    """The checkpoint that fairseq saves before the first update. It has no optimizer state, so that any optimizer and criterion can
    continue from it."""
    history = {"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}, "num_updates": 0}
    iterator = {"epoch": 1, "iterations_in_epoch": 0, "shuffle": True}
    origin = {} if source.origin is None else {ORIGIN: source.origin}
    return {
        "args": None,
        "cfg": source.cfg | {"model": {"_name": architecture, **source.options}},
        "model": source.tensors,
        "optimizer_history": [history],
        "last_optimizer_state": None,
        "task_state": {},
        "extra_state": {"epoch": 1, "train_iterator": iterator, **origin},
    }


def training_options(checkpoint: Path) -> str:
    """Returns the options of fairseq-train that build the model of a checkpoint which fw-convert wrote, and start from it."""
    options, path = load_mapped(Path(checkpoint))["cfg"]["model"], shlex.quote(str(checkpoint))
    if options["_name"] != "fast_weight_lm":
        return f"--task language_modeling --arch {options['_name']} --options-from {path} --finetune-from-model {path}"
    defaults = {f.name: f.default for f in fields(FastWeightLanguageModelConfig)}
    decide = [name for name in options if name in {*SHAPES, *UNSEEN, *OWN} and options[name] not in (None, defaults.get(name))]
    task = [written(name, options[name]) for name in ("tokens_per_sample", "max_target_positions")]
    given = [written(name, options[name]) for name in sorted(decide)]
    kind = "--task language_modeling --arch fast_weight_lm"  # the task first, which --tokens-per-sample belongs to
    return " ".join([kind, "--finetune-from-model", path, *task, *given])
