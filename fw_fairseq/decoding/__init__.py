"""Generation token by token: what a step needs is prepared once, and a step does the arithmetic alone."""

from .session import SESSION, Session

__all__ = ["SESSION", "Session"]
