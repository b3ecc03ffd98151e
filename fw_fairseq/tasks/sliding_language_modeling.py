"""sliding_language_modeling: fairseq-eval-lm --context-window, many windows at once, only their last positions scored."""

import torch
from fairseq.data import FairseqDataset
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask

from .streams import Text, load_text


class SlidingWindows(FairseqDataset):
    """Windows of ``context`` + ``stride`` tokens; each scores its last ``stride``, the first one all of its tokens."""

    def __init__(self, text: Text, context: int, stride: int, pad: int, eos: int):
        self.target, self.context, self.stride, self.pad = text.tokens, context, stride, pad
        self.source = torch.cat([torch.tensor([eos]), text.tokens[:-1]])
        self.starts = [0, *range(context + stride, len(text.tokens), stride)]  # of what each scores

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        start = self.starts[index]
        stop = start + (self.stride if index else self.context + self.stride)
        return index, self.source[max(0, start - self.context) : stop], self.target[start:stop]

    def num_tokens(self, index: int) -> int:
        return self.context + self.stride

    size = num_tokens

    def batches(self, windows: int) -> list[list[int]]:
        """The first and a shorter last window by themselves, all others have one length."""
        middle = range(1, len(self) - 1)
        grouped = [list(middle[i : i + windows]) for i in range(0, len(middle), windows)]
        return [[0], *grouped, *([[len(self) - 1]] if len(self) > 1 else [])]

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
    """For evaluation with the options of language_modeling. --batch-size: windows at once, 64 if not given."""

    def load_dataset(self, split, epoch=1, combine=False, **kwargs):
        self.datasets[split] = load_text(self.args, self.dictionary, split, epoch, combine)

    def get_batch_iterator(self, *args, **kwargs):
        raise ValueError("sliding_language_modeling is for fairseq-eval-lm; train with --task language_modeling")

    def eval_lm_dataloader(self, dataset, max_tokens=36000, batch_size=None, num_workers=0, context_window=0, **unused):
        windows = SlidingWindows(dataset, context_window, self.args.tokens_per_sample, self.dictionary.pad(), self.dictionary.eos())
        return torch.utils.data.DataLoader(
            windows, batch_sampler=windows.batches(batch_size or 64), collate_fn=windows.collater, num_workers=num_workers
        )
