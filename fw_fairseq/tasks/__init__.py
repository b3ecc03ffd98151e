"""The tasks that fairseq finds under --task."""

from .sliding_language_modeling import SlidingLanguageModelingTask
from .stateful_language_modeling import StatefulLanguageModelingTask

__all__ = ["SlidingLanguageModelingTask", "StatefulLanguageModelingTask"]
