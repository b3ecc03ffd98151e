"""What happens when fairseq imports this directory: checkpoints load, models, tasks and criterions are registered."""

import argparse
import types

import numpy
import torch

# torch 2.6 and newer load checkpoints without running their pickled code; the Namespace in fairseq's is plain data.
torch.serialization.add_safe_globals([argparse.Namespace])

# fairseq generates and translates with numpy.compat.long, which NumPy 2 no longer has.
if not hasattr(numpy, "compat"):
    numpy.compat = types.SimpleNamespace(long=int)  # noqa: NPY201

from . import criterions, models, tasks  # noqa: E402, F401
