"""What happens when fairseq imports this directory."""

import argparse

import torch

# torch 2.6 and newer load checkpoints without running their pickled code, and refuse the Namespace in fairseq's; it is plain data.
torch.serialization.add_safe_globals([argparse.Namespace])
