"""The tasks that fairseq finds under --task."""

from .associative_retrieval import AssociativeRetrievalTask
from .mqar import MqarTask
from .sliding_language_modeling import SlidingLanguageModelingTask
from .state_tracking import StateTrackingTask
from .stateful_language_modeling import StatefulLanguageModelingTask

__all__ = [
    "AssociativeRetrievalTask",
    "MqarTask",
    "SlidingLanguageModelingTask",
    "StateTrackingTask",
    "StatefulLanguageModelingTask",
]
