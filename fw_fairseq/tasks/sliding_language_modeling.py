"""sliding_language_modeling: fairseq-eval-lm --context-window with many windows at once; only their last positions are scored."""

import functools

import torch
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask

from ..data.text import check_positions, check_shard, load_text, takes
from ..data.windows import SlidingWindows
from ..errors import Mistake


@register_task("sliding_language_modeling", dataclass=LanguageModelingConfig)
class SlidingLanguageModelingTask(LanguageModelingTask):
    """A task for evaluation, with the options of language_modeling. --batch-size is the number of windows at once, 64 by default;
    --max-tokens may make it smaller."""

    def build_model(self, args, from_checkpoint=False):
        model = super().build_model(args, from_checkpoint)
        if not takes(model, "score_last"):
            model.forward = only_last(model.forward)
        return model

    def load_dataset(self, split, epoch=1, combine=False, **kwargs):
        self.datasets[split] = load_text(self, split, epoch, combine)

    def get_batch_iterator(self, *args, **kwargs):
        raise Mistake("sliding_language_modeling is for fairseq-eval-lm; train with --task language_modeling")

    def eval_lm_dataloader(
        self,
        dataset,
        max_tokens=36000,
        batch_size=None,
        max_positions=None,
        num_shards=1,
        shard_id=0,
        num_workers=0,
        context_window=0,
        **unused,
    ):
        stride = self.args.tokens_per_sample  # fairseq-eval-lm has already taken the context off
        if context_window < 0:
            raise Mistake(f"--context-window is {context_window}; it must be at least 0")
        if stride <= 0:
            given = stride + context_window
            raise Mistake(f"--tokens-per-sample is {given}; it must be larger than --context-window, {context_window}")
        if batch_size is not None and batch_size < 1:
            raise Mistake(f"--batch-size is {batch_size}; it must be at least 1, the windows at once")
        check_shard(shard_id, num_shards)
        check_positions(min(context_window + stride, len(dataset)), max_positions)
        windows = SlidingWindows(dataset, context_window, stride, self.dictionary.eos())
        at_once = min(batch_size or 64, max(1, max_tokens // (context_window + stride)))
        return torch.utils.data.DataLoader(
            windows,
            batch_sampler=windows.batches(at_once, shard_id, num_shards),
            collate_fn=windows.collater,
            num_workers=num_workers,
        )


def only_last(forward):
    """Gives ``score_last`` to a forward that returns outputs at every token."""

    @functools.wraps(forward)
    def cut(*args, score_last=0, **kwargs):
        output, *extra = forward(*args, **kwargs)
        return output[:, -score_last:], *extra

    return cut
