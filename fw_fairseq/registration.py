"""What happens when fairseq imports this directory: checkpoints load, models, tasks and criterions are registered."""

import argparse

import torch

# torch 2.6 and newer load checkpoints without running their pickled code; the Namespace in fairseq's is plain data.
torch.serialization.add_safe_globals([argparse.Namespace])

from . import criterions, models, tasks  # noqa: E402, F401
