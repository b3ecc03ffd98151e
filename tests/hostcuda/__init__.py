"""CUDA kernels without a GPU: the same .cu files run on the CPU (``HostModule``, ``EmulatorLaunch``) and compiled for any
architecture (``nvrtc.compile_check``)."""

from .emulator import EmulatorLaunch, guarded
from .hostemu import HostError, HostModule

__all__ = ["EmulatorLaunch", "HostError", "HostModule", "guarded"]
