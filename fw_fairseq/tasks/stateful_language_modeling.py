"""stateful_language_modeling: the memory goes on from segment to segment, in training, validation and fairseq-eval-lm."""

from dataclasses import dataclass

import torch
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask
from omegaconf import II

from ..config import option
from ..data.streams import StreamDataset, StreamIterator
from ..data.text import Text, check_positions, check_shard, load_text, takes
from ..modules import Streams
from .generation import PromptedGenerator


@dataclass
class StatefulLanguageModelingConfig(LanguageModelingConfig):
    reset_at_eos: bool = option(False, "empty the memory at every end of sentence or document, wherever it falls in a segment")
    sequence_parallel: int = option(
        1, "so many neighbouring workers share their streams, each takes its part of every segment: --tokens-per-sample / this"
    )
    sentence_avg: bool = II("optimization.sentence_avg")


@register_task("stateful_language_modeling", dataclass=StatefulLanguageModelingConfig)
class StatefulLanguageModelingTask(LanguageModelingTask):
    """Each row of a batch reads one continuous stream of the text; --tokens-per-sample is the segment, and the span of gradients,
    --batch-size the number of streams of a worker. Dictionary, generation and scoring of single texts are language_modeling's."""

    def __init__(self, args, dictionary, output_dictionary=None, targets=None):
        super().__init__(args, dictionary, output_dictionary, targets)
        if self.targets != ["future"]:
            raise ValueError("stateful_language_modeling predicts the next token only; leave --self-target and --past-target out")
        self.group = None  # of the workers that share this one's streams

    def build_model(self, args, from_checkpoint=False):
        model = super().build_model(args, from_checkpoint)
        if not takes(model, "streams"):
            model.register_forward_pre_hook(refuse_memory, with_kwargs=True)
            if not from_checkpoint:  # it is to be trained, on streams
                refuse_memory(model, (), {"streams": None})
        if self.args.sequence_parallel > 1:
            check_across_workers(model)
        return model

    def load_dataset(self, split, epoch=1, combine=False, **kwargs):
        self.datasets[split] = load_text(self, split, epoch, combine)

    def get_batch_iterator(self, dataset, *args, **options):
        if isinstance(dataset, Text):
            return self.streams(dataset, *args, **options)
        return super().get_batch_iterator(dataset, *args, **options)  # single texts, for generation and scoring

    def streams(
        self, text, max_tokens=None, max_sentences=None, max_positions=None, num_shards=1, shard_id=0, epoch=1, **options
    ) -> StreamIterator:
        segment = self.args.tokens_per_sample
        if segment < 1:
            raise ValueError(f"--tokens-per-sample is {segment}; it must be at least 1")
        if max_tokens and max_tokens < segment:
            raise ValueError(f"--max-tokens is {max_tokens}; it must be at least --tokens-per-sample, {segment}")
        rows = max_sentences or (max_tokens or segment) // segment
        pad, eos = self.dictionary.pad(), self.dictionary.eos()
        workers, (shard_id, share) = self.sequence_workers(num_shards), divmod(shard_id, self.args.sequence_parallel)
        num_shards //= workers
        streams = StreamDataset(text, segment, rows, pad, eos, shard_id, num_shards, (share, workers))
        check_positions(min(segment, streams.longest), max_positions)
        loading = dict(num_workers=options.get("num_workers", 0), buffer_size=options.get("data_buffer_size", 0))
        return StreamIterator(streams, Streams(self.group), shard_id, num_shards, epoch=epoch, **loading)

    def sequence_workers(self, workers: int) -> int:
        """How many share a stream; their group is made when it is first needed."""
        count, segment = self.args.sequence_parallel, self.args.tokens_per_sample
        if count == 1:
            return 1
        if count < 1 or workers % count or segment % count:
            wanted = f"it must divide the number of workers ({workers}) and --tokens-per-sample ({segment})"
            raise ValueError(f"--sequence-parallel is {count}; {wanted}")
        if self.args.sentence_avg:
            raise ValueError("--sequence-parallel cuts streams into parts, which are no sentences; leave --sentence-avg out")
        if self.group is None:
            self.group, _ = torch.distributed.new_subgroups(count)
        return count

    def eval_lm_dataloader(self, dataset, max_tokens=36000, batch_size=None, context_window=0, **options):
        """One pass over one stream, or over --batch-size streams side by side, the first token of each without context."""
        check_shard(options.get("shard_id", 0), options.get("num_shards", 1))
        if context_window:
            raise ValueError("--context-window recomputes context, and this task carries all of it; leave it out")
        batches = self.get_batch_iterator(dataset, max_sentences=batch_size or 1, **options).next_epoch_itr(shuffle=False)
        return Brought(self, batches)

    def build_generator(self, models, args, seq_gen_cls=None, **kwargs):
        return super().build_generator(models, args, seq_gen_cls=seq_gen_cls or PromptedGenerator, **kwargs)

    def train_step(self, sample, model, criterion, optimizer, update_num, ignore_grad=False):
        self.bring_state(sample)
        return super().train_step(sample, model, criterion, optimizer, update_num, ignore_grad)

    def valid_step(self, sample, model, criterion):
        self.bring_state(sample)
        return super().valid_step(sample, model, criterion)

    def bring_state(self, sample) -> None:
        """The streams' state goes with their next segment; the first segment starts from none. A dummy batch has no streams."""
        streams, net_input = sample.get("streams"), sample["net_input"]
        if streams is None:
            return
        if sample["segment"] == 0:
            streams.restart()
        net_input["streams"] = streams
        if self.args.reset_at_eos:
            net_input["reset_mask"] = net_input["src_tokens"].eq(self.dictionary.eos())


def refuse_memory(model, args, kwargs) -> None:
    """A loaded model only where it is given one: single texts, and the teacher of a distillation, need none."""
    if "streams" in kwargs:
        name = type(model).__name__
        raise ValueError(f"stateful_language_modeling carries memories, and {name} has none; use --task language_modeling")


def check_across_workers(model) -> None:
    """Whether every layer can go on from the memory of the worker before."""
    softmax = "softmax attention sees only its own worker's tokens; use --mixer fast_weight"
    reasons = [] if getattr(model.decoder, "recurrent", False) else [softmax]
    reasons += [attention.mixer.why_not_across_workers() for attention in getattr(model.decoder, "mixers", [])]
    for reason in filter(None, reasons):
        raise ValueError(f"--sequence-parallel: {reason}")


class Brought:
    """Batches that bring their state, for a caller that runs the model itself."""

    def __init__(self, task: StatefulLanguageModelingTask, batches):
        self.task, self.batches = task, batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self):
        for batch in self.batches:
            self.task.bring_state(batch)
            yield batch
