"""sliding_language_modeling: fairseq-eval-lm --context-window, many windows at once, only their last positions scored."""

import torch
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask

from .streams import Text, load_text


class SlidingWindows(torch.utils.data.Dataset):
    """Windows of ``context`` + ``stride`` tokens; each scores its last ``stride``, the first one all of its tokens."""

    def __init__(self, text: Text, context: int, stride: int, eos: int):
        self.target, self.context, self.stride = text.tokens, context, stride
        self.source = torch.cat([torch.tensor([eos]), text.tokens[:-1]])
        self.starts = [0, *range(context + stride, len(text.tokens), stride)]  # of what each scores

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        start = self.starts[index]
        stop = start + (self.stride if index else self.context + self.stride)
        return index, self.source[max(0, start - self.context) : stop], self.target[start:stop]

    def batches(self, windows: int, shard: int = 0, shards: int = 1) -> list[list[int]]:
        """The first and a shorter last window by themselves, all others have one length. A shard has neighbouring windows."""
        own, ends = range(len(self) * shard // shards, len(self) * (shard + 1) // shards), (0, len(self) - 1)
        middle = [i for i in own if i not in ends]
        grouped = [middle[i : i + windows] for i in range(0, len(middle), windows)]
        return sorted(grouped + [[i] for i in own if i in ends])

    def collater(self, samples) -> dict:
        ids, source, target = zip(*samples)
        source, target = torch.stack(source), torch.stack(target)
        net_input = {"src_tokens": source, "score_last": target.shape[1]}
        return {
            "id": torch.tensor(ids),
            "nsentences": len(ids),
            "ntokens": target.numel(),
            "net_input": net_input,
            "target": target,
        }


@register_task("sliding_language_modeling", dataclass=LanguageModelingConfig)
class SlidingLanguageModelingTask(LanguageModelingTask):
    """For evaluation with the options of language_modeling. --batch-size: windows at once, 64 if not given; --max-tokens may make
    them fewer."""

    def load_dataset(self, split, epoch=1, combine=False, **kwargs):
        self.datasets[split] = load_text(self.args, self.dictionary, split, epoch, combine)

    def get_batch_iterator(self, *args, **kwargs):
        raise ValueError("sliding_language_modeling is for fairseq-eval-lm; train with --task language_modeling")

    def eval_lm_dataloader(
        self, dataset, max_tokens=36000, batch_size=None, num_shards=1, shard_id=0, num_workers=0, context_window=0, **unused
    ):
        stride = self.args.tokens_per_sample  # fairseq-eval-lm has already taken the context off
        if context_window < 0:
            raise ValueError(f"--context-window is {context_window}; it must be at least 0")
        if stride <= 0:
            given = stride + context_window
            raise ValueError(f"--tokens-per-sample is {given}; it must be larger than --context-window, {context_window}")
        if not 0 <= shard_id < num_shards:
            raise ValueError(f"--shard-id is {shard_id}; it must be at least 0 and less than --num-shards, {num_shards}")
        windows = SlidingWindows(dataset, context_window, stride, self.dictionary.eos())
        at_once = min(batch_size or 64, max(1, max_tokens // (context_window + stride)))
        return torch.utils.data.DataLoader(
            windows,
            batch_sampler=windows.batches(at_once, shard_id, num_shards),
            collate_fn=windows.collater,
            num_workers=num_workers,
        )
