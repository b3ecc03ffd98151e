"""Optimiser

An update of all parameters is a few launches.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from fairseq import utils
from fairseq.optim.adam import Adam, FairseqAdam
from fairseq.utils import safe_getattr
from torch import Tensor

from ..replacing import replaces

AVERAGES = ("exp_avg", "exp_avg_sq")
HALVES = (torch.float16, torch.bfloat16)
NUMBERS = 2**24  # of 16-bit parameters that have a copy in float32 at one time, if one of them does not have more


class FusedAdam(Adam):
    """fairseq's Adam, whose states it keeps, by torch's fused kernel.

    fairseq divides by sqrt(v) + eps and corrects both averages for their start afterwards; torch corrects v before it adds eps.
    With eps / sqrt(1 - beta2^t) in torch's place both are the same.
    """

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> Any:
        """Updates all parameters that have a gradient."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            alike = defaultdict(list)
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.grad.is_sparse:
                    raise RuntimeError("Adam does not support sparse gradients, please consider SparseAdam instead")
                state = self.counted(p)
                alike[p.device, p.dtype, state["step"]].append(p)
            for (device, dtype, step), params in alike.items():
                count = torch.full((), step, dtype=torch.float32, device=device)
                for part in parts(params) if dtype in HALVES else [params]:
                    self.update(group, part, count, step)
        return loss

    def counted(self, p: Tensor) -> dict[str, Any]:
        """Returns the state of a parameter, as fairseq has it, with one more step."""
        state, exact = self.state[p], torch.float32 if p.dtype in HALVES else p.dtype
        if not state:
            state["step"] = 0
        for name in AVERAGES:
            x = state.get(name)
            state[name] = torch.zeros(p.shape, dtype=exact, device=p.device) if x is None else x.to(p.device, exact).contiguous()
        state["step"] += 1
        return state

    def update(self, group: dict[str, Any], params: list[Tensor], count: Tensor, step: int) -> None:
        """One update of parameters of one type, at the same number of steps."""
        means, squares = ([self.state[p][name] for p in params] for name in AVERAGES)
        exact, originals = means[0].dtype, [p.data for p in params]
        weights, grads = contiguous(originals, exact), contiguous([p.grad for p in params if p.grad is not None], exact)
        none: list[Tensor] = []
        beta1, beta2 = group["betas"]
        torch._fused_adamw_(
            weights, grads, means, squares, none, [count] * len(params), lr=group["lr"], beta1=beta1, beta2=beta2,
            weight_decay=group["weight_decay"], eps=group["eps"] / math.sqrt(1 - beta2**step), amsgrad=False, maximize=False,
        )  # fmt: skip
        copy_all([(p, weight) for p, weight in zip(originals, weights) if p is not weight])


def contiguous(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Returns them in this type and without gaps; those that are so already are no copies."""
    found = [x if x.dtype == dtype and x.is_contiguous() else torch.empty(x.shape, dtype=dtype, device=x.device) for x in tensors]
    copied = [(copy, x) for copy, x in zip(found, tensors) if copy is not x]
    copy_all(copied)
    return found


def copy_all(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copies the second tensor of each pair into the first one."""
    if pairs:
        torch._foreach_copy_([into for into, _ in pairs], [x for _, x in pairs])


def parts(params: list[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive parameters of at most ``NUMBERS`` numbers, or one with more."""
    part: list[Tensor] = []
    for p in params:
        if part and sum(x.numel() for x in part) + p.numel() > NUMBERS:
            yield part
            part = []
        part.append(p)
    yield part


@replaces(FairseqAdam, "__init__")
def take_the_fused_adam(original: Callable, optimizer: FairseqAdam, cfg: Any, params: Iterable) -> None:
    """Without apex, fairseq's Adam starts seven operations or more for each parameter. Now torch's fused Adam computes the same for
    all parameters at once; its checkpoints are fairseq's. `--use-old-adam` keeps fairseq's."""
    original(optimizer, cfg, params)
    made = optimizer._optimizer
    if type(made) is Adam and not safe_getattr(cfg, "use_old_adam") and not safe_getattr(cfg, "tpu"):
        optimizer._optimizer = FusedAdam(made.param_groups, **optimizer.optimizer_config)


@replaces(utils, "clip_grad_norm_")
def take_all_norms_at_once(original: Callable, params: Any, max_norm: float, aggregate_norm_fn: Callable | None = None) -> Tensor:
    """Without apex, fairseq takes the norm of each gradient by itself. Now torch takes those of a device at once."""
    params = [params] if isinstance(params, Tensor) else list(params)
    grads = [p.grad.detach() for p in params if p is not None and p.grad is not None]
    apart = any(hasattr(p, "expert") for p in params) or any(x.is_sparse or x.device != grads[0].device for x in grads)
    if len(grads) < 2 or apart or utils.multi_tensor_l2norm_available:
        return original(params, max_norm, aggregate_norm_fn)
    norm = torch.norm(torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32)))
    norm = norm if aggregate_norm_fn is None else aggregate_norm_fn(norm)
    if max_norm > 0:
        torch._foreach_mul_(grads, (float(max_norm) / (norm + 1e-6)).clamp_(max=1))
    return norm
