"""A language model for transformers as a file of ONNX: opset 27, whose LinearAttention is the recurrence."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import Mistake
from ...ops.onnx import DOMAIN, OPSET, for_onnx

FILE = "model.onnx"
NEEDED = ("onnx", "onnxruntime", "onnxscript")
NATIVE = 18  # the opset that torch writes; onnx converts it to that of LinearAttention
TRACED, CHECKED = (2, 3), (3, 9)  # sequences and tokens
TOLERANCE = 1e-3


class WithStates(nn.Module):
    """The model as a function of tensors: ids (B,T), how many tokens came before them (B), and the states after those, to logits
    (B,T,words), how many tokens there are now, and the states after them."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        from ...huggingface import Cache

        self.model, self.new_cache = model, Cache
        cache = self.read(torch.zeros(TRACED, dtype=torch.long), Cache())[1]
        self.kinds = {layer: type(state) for layer, state in cache.states.items()}
        fields = [(i, name) for i, state in cache.states.items() for name in state._fields]
        self.present = [(i, name) for i, name in fields if getattr(cache.states[i], name) is not None]
        self.start = [torch.zeros_like(getattr(cache.states[i], name)) for i, name in self.present]
        self.names = ["length", *(f"{i}.{name}" for i, name in self.present)]

    def read(self, ids: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """The logits, and the cache after the ids."""
        from ...huggingface.parts import CACHE

        return self.model(ids, use_cache=True, **{CACHE: cache}).logits, cache

    def forward(self, ids: Tensor, length: Tensor, states: list[Tensor]) -> tuple[Tensor, ...]:
        cache, given = self.new_cache(), dict(zip(self.present, states))
        fields = {i: {name: given.get((i, name)) for name in kind._fields} for i, kind in self.kinds.items()}
        cache.states = {i: kind(**fields[i]) for i, kind in self.kinds.items()}
        cache.tokens, cache.length = length, 1  # the cache is not empty
        logits, cache = self.read(ids, cache)
        return logits, cache.tokens, *(getattr(cache.states[i], name) for i, name in self.present)


def refuse(model: Any) -> None:
    """Refuses a model that ONNX has no form for."""
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise Mistake(f"--onnx needs {missing[0]}; install fw_fairseq with the extra [onnx], on Python 3.11 or later")
    if not hasattr(torch.onnx, "ops"):
        raise Mistake(f"--onnx needs torch 2.8 or later; this is {torch.__version__}")
    config, has = model.config, None
    if config.is_encoder_decoder:
        has = "two sides, for translation"
    elif others := [name for name in config.mixers if name != "fast_weight"]:
        has = f"layers with --mixer {others[0]}"
    elif config.input_bands or config.output_bands:
        has = "an adaptive vocabulary"
    if has is not None:
        raise Mistake(f"--onnx is for language models of fast_weight layers; this one has {has}")


@torch.no_grad()
def write(model: Any, file: Path) -> None:
    """Writes the model. Its inputs are ``input_ids`` and ``past.*``, which are 0 before the first token; its outputs ``logits`` and
    ``present.*``, the next ``past.*``."""
    import onnx
    from onnx import version_converter

    whole = WithStates(model.eval()).eval()
    made = version_converter.convert_version(traced(whole).model_proto, OPSET)
    for node in made.graph.node:
        node.domain = "" if node.domain == DOMAIN else node.domain
    kept = [version for version in made.opset_import if version.domain != DOMAIN]
    del made.opset_import[:]
    made.opset_import.extend(kept)
    onnx.checker.check_model(made)
    onnx.save(made, file)
    found, expected = difference(whole, file)
    if not found <= TOLERANCE * expected:
        raise Mistake(f"--onnx: onnxruntime computes other logits, by {found:.1e}; nothing was written")


def traced(whole: WithStates) -> Any:
    """torch's ONNX program of the model, for any number of sequences and tokens."""
    batch, tokens = torch.export.Dim("batch"), torch.export.Dim("tokens")
    given = torch.zeros(TRACED, dtype=torch.long), torch.zeros(TRACED[0], dtype=torch.long), whole.start
    dynamic = {0: batch, 1: tokens}, {0: batch}, [{0: batch}] * len(whole.start)
    with for_onnx(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(whole, given, dynamic_shapes=dynamic, strict=False)
        names = ["input_ids", *(f"past.{name}" for name in whole.names)], ["logits", *(f"present.{name}" for name in whole.names)]
        options: dict[str, Any] = {"input_names": names[0], "output_names": names[1], "opset_version": NATIVE, "verbose": False}
        return torch.onnx.export(program, dynamo=True, **options)


def difference(whole: WithStates, file: Path) -> tuple[float, float]:
    """How far onnxruntime's logits of random ids, read in one pass and then token by token, are from the model's; and the largest
    of these."""
    import onnxruntime

    ids = torch.randint(whole.model.config.vocab_size, CHECKED, generator=torch.Generator().manual_seed(0))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # its threads wait in loops, which other work on the machine makes long
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    starts = [torch.zeros(len(ids), dtype=torch.long), *(x.new_zeros(len(ids), *x.shape[1:]) for x in whole.start)]
    states = {f"past.{name}": x.numpy() for name, x in zip(whole.names, starts)}
    first, logits = CHECKED[1] // 2, []
    for part in (ids[:, :first], *ids[:, first:].split(1, 1)):
        y, *after = session.run(None, {"input_ids": part.numpy(), **states})
        states = dict(zip(states, after))
        logits.append(torch.from_numpy(y))
    expected = whole.model(ids).logits
    return float((torch.cat(logits, 1) - expected).abs().max()), float(expected.abs().max())
