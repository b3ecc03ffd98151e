"""What ``fast_weight`` would launch on a device for one sequence and head, without a device: kernels, macros, sizes, parameters."""

from __future__ import annotations

from typing import NamedTuple

import torch
from hostcuda import Launch, Recorder
from support.emulated import emulated

from fw_fairseq.feature_maps import AS_IS, RowMap
from fw_fairseq.ops import FastWeightState, fast_weight
from fw_fairseq.rules import RULES

TIERS = "one round", "small gates", "halves", "split", "levels"  # of cuda/gates.cuh: how a chunk of decay runs
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PASSES = "forward", "forward of training", "backward"


class Case(NamedTuple):
    rule: str
    width: int  # of values, and of keys before the feature map
    dtype: str
    attention_norm: bool = False
    row_map: RowMap = AS_IS
    tier: str | None = None  # of every chunk, where channels decay without erase
    processors: int = 1  # of the device, for each sequence and head

    def __str__(self) -> str:
        norm = ", attention normalisation" if self.attention_norm else ""
        features = f", {self.row_map.name} with {self.row_map.norm} norm" if self.row_map != AS_IS else ""
        key, widths = self.row_map.width(self.width), f"V = {self.width}"
        widths = f"K = {widths}" if key == self.width else f"K = {key}, {widths}"
        tier = f", {self.tier}" if self.tier else ""
        few = f", {self.processors} processors for each" if self.processors > 1 else ""
        return f"{self.rule}, {widths}, {self.dtype}{norm}{features}{tier}{few}"


class Recording(NamedTuple):
    """By pass: its launches, and the bytes that it must at least read or write."""

    launches: dict[str, list[Launch]]
    moved: dict[str, int]


def record(case: Case, tokens: int, architecture: str) -> Recording:
    """One sequence with one head that goes on from a memory, without gradients and with gradients of everything."""
    q, k, v = (torch.zeros(1, 1, tokens, case.width, dtype=TYPES[case.dtype]) for _ in range(3))
    sizes = (1, 1, tokens, case.row_map.width(case.width), case.width)
    gates = {name: torch.ones(gate.shape(sizes)) for name, gate in RULES[case.rule].gates.items()}
    inputs, before = [q, k, v, *gates.values()], torch.zeros(1, 1, *sizes[3:])
    state = FastWeightState(before, before[..., 0] if case.attention_norm else None)

    def run():
        options = dict(attention_norm=case.attention_norm, feature_map=case.row_map, backend="cuda", state=state)
        return fast_weight(q, k, v, case.rule, gates, **options)

    launches = {}
    with emulated(Recorder((int(architecture[:-1]), int(architecture[-1])), case.processors)) as recorder:
        run()
        launches["forward"] = recorder.taken()
        for x in (*inputs, before):
            x.requires_grad_()
        y, after = run()
        launches["forward of training"] = recorder.taken()
        torch.autograd.backward((y, after.memory), (torch.zeros_like(y), torch.zeros_like(before)))
        launches["backward"] = recorder.taken()
    read, written, memories = size(*inputs), size(y), 2 * size(after.memory)
    once = read + written + memories
    if case.tier:
        forced = {"FW_TIER": TIERS.index(case.tier)}
        launches = {name: [x._replace(defines=x.defines | forced) for x in found] for name, found in launches.items()}
    return Recording(launches, dict(zip(PASSES, (once, once, once + read))))


def size(*tensors: torch.Tensor) -> int:
    """Bytes."""
    return sum(x.numel() * x.element_size() for x in tensors)
