"""Checkpoints: how they are read and written, and what a run must share with the one that it resumes."""
