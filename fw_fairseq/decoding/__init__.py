"""Generation token by token: what a step needs is prepared once, and a step does the arithmetic alone."""

from .generation import GENERATION, Generation

__all__ = ["GENERATION", "Generation"]
