"""CUDA graphs on a CPU: what a function starts is written down once, and started again at the same addresses, without Python."""

from __future__ import annotations

from functools import partial

import torch
from hostcuda import EmulatorLaunch
from support.launches import NOTHING, WAITS, is_mask
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fw_fairseq.autograd import OPERATORS

VIEWS = {"detach", "alias", "lift_fresh", "_unsafe_view"}


class Recording(TorchDispatchMode):
    """Writes down the operators within it, each with its inputs and outputs, and the launches of this project's kernels."""

    def __init__(self, launcher):
        super().__init__()
        self.launcher, self.work, self.kept = launcher, [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        indices = args[1] if name.startswith("index") and isinstance(args[1], (list, tuple)) else ()
        if name in WAITS or any(map(is_mask, indices)):
            raise RuntimeError(f"the host waits for {name}, which a graph cannot")
        if func.namespace == "fw_fairseq":  # what it starts is written down
            with self:
                return OPERATORS[name](*args, **kwargs)
        out = func(*args, **kwargs)
        self.kept.append(out)  # launches have addresses only
        if not (func.is_view or name in NOTHING | VIEWS):
            self.work.append(partial(again, func, args, kwargs, out))
        return out


def again(func, args, kwargs, out) -> None:
    """Puts what the operator gives where it was when it was written down."""
    new = func(*args, **kwargs)
    for place, x in zip(pytree.tree_leaves(out), pytree.tree_leaves(new)):
        if isinstance(place, torch.Tensor) and place.data_ptr() != x.data_ptr():
            place.detach().copy_(x)


class RecordingLaunch(EmulatorLaunch):
    """The emulator, whose launches a recording has, too."""

    recording: Recording | None = None

    def __call__(self, *launch, **keywords) -> None:
        start = partial(super().__call__, *launch, **keywords)
        if self.recording is not None:
            self.recording.work.append(start)
        start()


class Recorded:
    """Stands for a CUDA graph. ``made`` lists all of them."""

    made: list[Recorded] = []  # noqa: RUF012
    launcher: RecordingLaunch

    def __init__(self, function, **how):
        self.replays = 0
        with Recording(self.launcher) as recording:
            self.launcher.recording = recording
            try:
                function()
            finally:
                self.launcher.recording = None
        self.work, self.kept = recording.work, recording.kept
        self.made.append(self)

    def replay(self) -> None:
        self.replays += 1
        with torch.no_grad():
            for run in self.work:
                run()
