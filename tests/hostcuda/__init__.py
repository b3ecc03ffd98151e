"""CUDA kernels without a GPU: the same .cu files run on the CPU (``HostModule``, ``EmulatorLaunch``) and compiled for any
architecture (``nvrtc.compile_check``)."""

from .emulator import SCHEDULES, EmulatorLaunch, guarded, unwritten_is_nan
from .hostemu import HostError, HostModule
from .recorder import Launch, Recorder
from .sanitize import run_sanitized, sanitized_launch

__all__ = [
    "SCHEDULES",
    "EmulatorLaunch",
    "HostError",
    "HostModule",
    "Launch",
    "Recorder",
    "guarded",
    "run_sanitized",
    "sanitized_launch",
    "unwritten_is_nan",
]
