"""The tasks that fairseq finds under --task."""

from .associative_retrieval import AssociativeRetrievalTask
from .sliding_language_modeling import SlidingLanguageModelingTask
from .stateful_language_modeling import StatefulLanguageModelingTask

__all__ = ["AssociativeRetrievalTask", "SlidingLanguageModelingTask", "StatefulLanguageModelingTask"]
