"""sliding_language_modeling: fairseq-eval-lm --context-window with many windows at once; only their last positions are scored."""

import functools
from collections.abc import Callable
from typing import Any

from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask
from torch import nn
from torch.utils.data import DataLoader

from ..data.text import Text, check_positions, has_keyword, load_text
from ..data.windows import SlidingWindows
from ..errors import Mistake


@register_task("sliding_language_modeling", dataclass=LanguageModelingConfig)
class SlidingLanguageModelingTask(LanguageModelingTask):
    """A task for evaluation, with the options of language_modeling. --batch-size is the number of windows at once, 64 by default;
    --max-tokens may make it smaller."""

    def build_model(self, args: Any, from_checkpoint: bool = False) -> nn.Module:
        model = super().build_model(args, from_checkpoint)
        if not has_keyword(model, "score_last"):
            model.forward = only_last(model.forward)
        return model

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs) -> None:
        self.datasets[split] = load_text(self, split, epoch, combine)

    def get_batch_iterator(self, *args, **kwargs) -> None:
        raise Mistake("sliding_language_modeling is for fairseq-eval-lm; train with --task language_modeling")

    def eval_lm_dataloader(
        self, dataset: Text, max_tokens: int = 36000, batch_size: Any = None, context_window: int = 0, **options
    ) -> DataLoader:
        stride = self.args.tokens_per_sample  # fairseq-eval-lm has already taken the context off
        if stride <= 0:
            given = stride + context_window
            raise Mistake(f"--tokens-per-sample is {given}; it must be larger than --context-window, {context_window}")
        check_positions(min(context_window + stride, len(dataset)), options.get("max_positions"))
        windows = SlidingWindows(dataset, context_window, stride, self.dictionary.eos())
        at_once = min(batch_size or 64, max(1, max_tokens // (context_window + stride)))
        batches = windows.batches(at_once, options.get("shard_id", 0), options.get("num_shards", 1))
        processes = options.get("num_workers", 0)
        return DataLoader(windows, batch_sampler=batches, collate_fn=windows.collater, num_workers=processes)


def only_last(forward: Callable) -> Callable:
    """Gives ``score_last`` to a forward that returns outputs at every token."""

    @functools.wraps(forward)
    def cut(*args, score_last: int = 0, **kwargs) -> tuple:
        output, *extra = forward(*args, **kwargs)
        return output[:, -score_last:], *extra

    return cut
