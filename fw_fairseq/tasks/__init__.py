"""The tasks that fairseq finds under --task."""

from .stateful_language_modeling import StatefulLanguageModelingTask

__all__ = ["StatefulLanguageModelingTask"]
