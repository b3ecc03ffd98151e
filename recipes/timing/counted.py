"""What an update of a model does, counted while a small batch of it runs on the CPU: products, bytes of everything else, attention,
and the kernels of this project, which a recorder takes the place of."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from support.launches import starts_a_kernel
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from .rows import configured

SIZES = (2, 3)  # sequences; one is no example, as it needs fewer copies
SENTENCE = 28  # tokens, about, of WMT 14


class Count(TorchDispatchMode):
    """``work``: of each operation its kind, its multiply-adds, the numbers in floating point that it reads or writes, and the bytes
    of other ones."""

    def __init__(self, scalar: float | None = None) -> None:
        """scalar: what tensors without memory have in place of a number that the host asks for."""
        super().__init__()
        self.scalar = scalar
        self.work: list[tuple[str, float, float, float]] = []
        self.kernels: list[dict[str, Any]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._opname == "_local_scalar_dense" and self.scalar is not None:
            return self.scalar
        out = func(*args, **(kwargs or {}))
        if not starts_a_kernel(func):
            return out
        if func.namespace == "fw_fairseq" and func._opname in ("scan", "scan_backward"):
            self.kernels += [described(args)] if func._opname == "scan" else []
            self.work.append(("kernel", 0, 0, 0))
            return out
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
        numbers = sum(held(x) for x in tensors if x.is_floating_point())
        other = sum(held(x) * x.element_size() for x in tensors if not x.is_floating_point())
        packet = func._overloadpacket
        flops = flop_registry[packet](*args, **(kwargs or {}), out_val=out) if packet in flop_registry else 0
        self.work.append(("product" if flops else "other", flops / 2, numbers, other))
        return out

    def taken(self) -> list[tuple[str, float, float, float]]:
        work, self.work = self.work, []
        return work


def held(x: Tensor) -> int:
    """The numbers that are there: an expanded tensor has each of them once."""
    return min(x.numel(), x.untyped_storage().nbytes() // x.element_size())


def described(args) -> dict[str, Any]:
    """The shapes of a kernel's operands, and what else it is given."""
    names = ("q", "k", "v", "f", "z", "e", "w")
    shapes = {name: None if x is None else list(x.shape) for name, x in zip(names, args)}
    return {"shapes": shapes, "settings": [args[9], args[10], args[11]], "row_map": list(args[15:18])}


class Attention(torch.autograd.Function):
    """Has the results' shapes and does nothing."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return q.new_empty(*q.shape[:-1], v.shape[-1])

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors)


@contextlib.contextmanager
def attention_noted() -> Iterator[list[float]]:
    """Multiply-adds of each softmax attention, forward; half of them where it is causal and has no mask."""
    found: list[float] = []

    def noted(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, **more):
        whole = q[..., 0].numel() * k.shape[-2] * (q.shape[-1] + v.shape[-1])
        found.append(whole / 2 if is_causal else whole)
        return Attention.apply(q, k, v)

    with mock.patch.object(F, "scaled_dot_product_attention", noted):
        yield found


def counted(config, task, model, criterion) -> dict[str, Any]:
    """For batches of two and of three sequences, whose difference is what each further sequence adds, and for the optimizer."""
    from hostcuda import Recorder
    from support.emulated import emulated

    from fw_fairseq.mixers.parts import onednn

    length = config.task.get("tokens_per_sample") or SENTENCE
    model.train()
    found: dict[str, Any] = {"length": length, "parameters": sum(p.numel() for p in model.parameters())}
    found["batch"] = config.dataset.batch_size or config.dataset.max_tokens / length
    found["micro_batches"], found["updates"] = config.optimization.update_freq[0], config.optimization.max_update
    found["epochs"], found["workers"] = config.optimization.max_epoch, config.distributed_training.distributed_world_size
    found["sequences"] = []
    on_device = mock.patch.object(onednn, "suits", return_value=False)  # products as a GPU has them
    with on_device, emulated(Recorder()), attention_noted() as attention:
        with torch.no_grad():
            criterion(model, drawn(model, task, 1, length))  # masks and positions are made once
        for size in SIZES:
            model.zero_grad(set_to_none=True)
            sample = drawn(model, task, size, length)
            count = Count()
            attention.clear()
            with count:
                loss = criterion(model, sample)[0]
                forward = count.taken()
                loss.backward()
            passes = {"forward": forward, "backward": count.taken()}
            found["sequences"].append(passes | {"attention": sum(attention), "kernels": count.kernels})
    found["optimizer"] = {flat: optimizer_work(config, model, flat) for flat in ("flat", "each")}
    return found


def optimizer_work(config, model, flat: str) -> list:
    """Of clipping and a step, in fp32, for the parameters as they are or, as fairseq has them in 16 bits, as one tensor."""
    from fairseq import optim

    shapes = [p.shape for p in model.parameters() if p.requires_grad]
    if flat == "flat":
        shapes = [torch.Size([sum(shape.numel() for shape in shapes)])]
    with FakeTensorMode(), Count(scalar=1.0) as count:  # tensors without memory
        parameters = [torch.nn.Parameter(torch.empty(shape)) for shape in shapes]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        optimizer = optim.build_optimizer(config.optimizer, parameters)
        optimizer.step()  # which makes its state
        count.taken()
        optimizer.clip_grad_norm(config.optimization.clip_norm)
        optimizer.step()
        return count.taken()


def drawn(model, task, sequences: int, length: int, seed: int = 0) -> dict[str, Any]:
    """A batch of words by Zipf's law, with some from each band of rare ones."""
    words = len(task.target_dictionary)
    generator = torch.Generator().manual_seed(seed)
    text = (torch.rand(sequences, length + 1, generator=generator) * torch.log(torch.tensor(words - 5.0))).exp().long() + 4
    text[:, 1:4] = torch.tensor([words - 1, words // 2, words // 5])
    inputs, target = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    lengths = torch.full((sequences,), length)
    if hasattr(model, "encoder"):
        source = {"src_tokens": inputs, "src_lengths": lengths, "prev_output_tokens": inputs}
    else:
        source = {"src_tokens": inputs, "src_lengths": lengths}
    return {
        "net_input": source,
        "target": target,
        "ntokens": target.numel(),
        "nsentences": sequences,
        "id": torch.arange(sequences),
    }


def count(arguments: list[str]) -> None:
    """In place of ``fairseq_cli.train``: prints the counts of the run that these arguments ask for."""
    print("\nanswer: " + json.dumps(counted(*configured(arguments))))
