"""stateful_language_modeling: the state is carried over from segment to segment in training, validation and fairseq-eval-lm."""

from dataclasses import dataclass

import torch
from fairseq.sequence_scorer import SequenceScorer
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask
from omegaconf import II

from ..config import option
from ..data.streams import StreamDataset, StreamIterator
from ..data.text import Text, check_positions, check_shard, load_text, takes
from ..errors import Mistake
from ..modules import Streams
from ..modules.positions import PositionsFromEnd
from .generation import PromptedGenerator

MULTIPLE = 8  # fairseq's default of --required-batch-size-multiple, which says nothing about streams


@dataclass
class StatefulLanguageModelingConfig(LanguageModelingConfig):
    reset_at_eos: bool = option(False, "empty the state after every end of sentence or document, also within a segment")
    sequence_parallel: int = option(
        1,
        "how many neighbouring workers share their streams; each computes an equal part of every segment",
    )
    sentence_avg: bool = II("optimization.sentence_avg")
    curriculum: int = II("dataset.curriculum")


@register_task("stateful_language_modeling", dataclass=StatefulLanguageModelingConfig)
class StatefulLanguageModelingTask(LanguageModelingTask):
    """Language modeling in which each row of a batch reads one continuous stream of the text.

    --tokens-per-sample is the length of a segment, within which gradients flow; --batch-size is the number of streams of a worker.
    Dictionary, generation and the scoring of single texts are those of language_modeling."""

    carries_over = True  # which models ask before they are built

    def __init__(self, args, dictionary, output_dictionary=None, targets=None):
        super().__init__(args, dictionary, output_dictionary, targets)
        if self.targets != ["future"]:
            raise Mistake("stateful_language_modeling predicts the next token only; leave --self-target and --past-target out")
        curriculum = getattr(args, "curriculum", 0)
        if type(curriculum) is int and curriculum:
            raise Mistake("--curriculum keeps the order of batches for some epochs, and streams always keep it; leave it out")
        self.stateless: list = []  # models that cannot read streams, such as the teacher of a distillation
        self.group = None  # of the workers that share this one's streams

    def build_model(self, args, from_checkpoint=False):
        model = super().build_model(args, from_checkpoint)
        if not takes(model, "streams"):
            self.stateless.append(model)
            model.register_forward_pre_hook(refuse_memory, with_kwargs=True)
            if not from_checkpoint:  # it is to be trained, on streams
                refuse_memory(model, (), {"streams": None})
        if self.args.sequence_parallel > 1:
            check_across_workers(model)
        if self.args.reset_at_eos and takes(model, "streams") and not model.decoder.recurrent:
            raise Mistake("--reset-at-eos empties states, and softmax layers would read the text before; use --mixer fast_weight")
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
            raise Mistake(f"--tokens-per-sample is {segment}; it must be at least 1")
        if max_sentences is not None and max_sentences < 1:
            raise Mistake(f"{self.option('--batch-size', text)} is {max_sentences}; it must be at least 1, the streams of a worker")
        if max_tokens and max_tokens < segment * (max_sentences or 1):
            wanted = f"--tokens-per-sample, {segment}" + (f", times --batch-size, {max_sentences}" if max_sentences else "")
            raise Mistake(f"{self.option('--max-tokens', text)} is {max_tokens}; it must be at least {wanted}")
        rows = max_sentences or (max_tokens or segment) // segment
        multiple = options.get("required_batch_size_multiple", 1)
        if multiple != MULTIPLE and rows % multiple:
            raise Mistake(f"--required-batch-size-multiple is {multiple}, and a batch has {rows} streams; leave it out")
        pad, eos = self.dictionary.pad(), self.dictionary.eos()
        workers, (shard_id, share) = self.sequence_workers(num_shards), divmod(shard_id, self.args.sequence_parallel)
        num_shards //= workers
        streams = StreamDataset(text, segment, rows, pad, eos, shard_id, num_shards, (share, workers))
        check_positions(min(segment, streams.longest), max_positions)
        processes = options.get("num_workers", 0)
        if processes == 1:  # fairseq's default. To cut a batch here takes less time than to get it from another process
            processes = 0
        loading = dict(num_workers=processes, buffer_size=options.get("data_buffer_size", 0))
        return StreamIterator(streams, Streams(self.group), shard_id, num_shards, epoch=epoch, **loading)

    def option(self, name: str, text) -> str:
        """The option that gives the size of a batch of this text: training has its own, or lends it to validation."""
        return name if text is self.datasets.get("train") else f"{name} or {name}-valid"

    def sequence_workers(self, workers: int) -> int:
        """The number of workers that share a stream. The first call makes their group."""
        count, segment = self.args.sequence_parallel, self.args.tokens_per_sample
        if count < 1 or workers % count or segment % count:
            wanted = f"it must divide the number of workers ({workers}) and --tokens-per-sample ({segment})"
            raise Mistake(f"--sequence-parallel is {count}; {wanted}")
        if count == 1:
            return count
        if self.args.sentence_avg:
            raise Mistake("--sequence-parallel cuts streams into parts that are not sentences; leave --sentence-avg out")
        if self.group is None:
            self.group, _ = torch.distributed.new_subgroups(count)
        return count

    def eval_lm_dataloader(self, dataset, max_tokens=None, batch_size=None, context_window=0, **options):
        """Reads the text once, as one stream or as --batch-size streams side by side. The first token of each has no context."""
        check_shard(options.get("shard_id", 0), options.get("num_shards", 1))
        for model in self.stateless:  # before any thread loads data, which could not end with the program
            refuse_memory(model, (), {"streams": None})
        if context_window:
            raise Mistake("--context-window computes the context again, but this task carries all of it over; leave it out")
        rows = 1 if batch_size is None else batch_size
        batches = self.get_batch_iterator(dataset, max_sentences=rows, **options).next_epoch_itr(shuffle=False)
        return StreamBatches(self, batches)

    def build_generator(self, models, args, seq_gen_cls=None, **kwargs):
        return super().build_generator(models, args, seq_gen_cls=seq_gen_cls or PromptedGenerator, **kwargs)

    def train_step(self, sample, model, criterion, optimizer, update_num, ignore_grad=False):
        self.bring_state(sample)
        return super().train_step(sample, model, criterion, optimizer, update_num, ignore_grad)

    def valid_step(self, sample, model, criterion):
        self.bring_state(sample)
        return super().valid_step(sample, model, criterion)

    def bring_state(self, sample) -> None:
        """Adds the streams to the model's inputs; the first segment starts from empty states. A dummy batch has no streams."""
        streams, net_input = sample.get("streams"), sample["net_input"]
        if streams is None:
            return
        if sample["segment"] == 0:
            streams.restart()
        net_input["streams"] = streams
        self.empty_at_eos(net_input)

    def empty_at_eos(self, net_input: dict) -> None:
        """Adds to the model's inputs where --reset-at-eos empties the state."""
        if self.args.reset_at_eos:
            net_input["reset_mask"] = net_input["src_tokens"].eq(self.dictionary.eos())

    def inference_step(self, generator, models, sample, *args, **kwargs):
        """Scores streams and single texts, and goes on with single texts. A prompt ends with its first end of sentence; a text
        that is scored may have several."""
        scores = isinstance(generator, SequenceScorer)
        if "streams" in sample:
            if not scores:
                said = "stateful_language_modeling reads a text as streams, which nothing goes on from"
                raise Mistake(f"{said}; generate with --task language_modeling --sample-break-mode eos, or --score-reference")
            for model in models:
                if not takes(model, "streams"):
                    refuse_memory(model, (), {"streams": None})
            self.bring_state(sample)
        elif scores and all(takes(model, "reset_mask") for model in models):
            self.empty_at_eos(sample["net_input"])
        return super().inference_step(generator, models, sample, *args, **kwargs)


def refuse_memory(model, args, kwargs) -> None:
    """A hook that refuses streams for a model without state. Single texts and the teacher of a distillation have no streams."""
    if "streams" in kwargs:
        name = type(model).__name__
        raise Mistake(f"stateful_language_modeling carries states over, and {name} has none; use --task language_modeling")


def check_across_workers(model) -> None:
    """Refuses a model with a layer that cannot continue from the state of the worker before."""
    softmax = "softmax attention sees only its own worker's tokens; use --mixer fast_weight"
    reasons = [] if getattr(model.decoder, "recurrent", False) else [softmax]
    reasons += [attention.mixer.why_not_across_workers() for attention in getattr(model.decoder, "mixers", [])]
    if isinstance(getattr(model.decoder, "embed_positions", None), PositionsFromEnd):
        reasons.append("--positions-from-end counts the tokens of later workers, which a worker does not see; leave it out")
    reasons += why_sparse_layers_cannot(getattr(model.decoder, "fast_weight_config", None))
    for reason in filter(None, reasons):
        raise Mistake(f"--sequence-parallel: {reason}")


def why_sparse_layers_cannot(config) -> list[str]:
    """The reasons why sparse and reversible layers cannot continue from the worker before."""
    reasons = {
        "qkv_sparsity": "--qkv-sparsity reads two tokens of the worker before, which it does not get; leave it out",
        "ffn_sru": "--ffn-sru continues from a cell of the worker before, which it does not get; leave it out",
        "reversible": "--reversible computes layers again, while the other workers do not wait for it; leave it out",
    }
    return [reason for name, reason in reasons.items() if getattr(config, name, None)]


class StreamBatches:
    """Batches with their streams among the model's inputs, for fairseq-eval-lm, which runs the model itself."""

    def __init__(self, task: StatefulLanguageModelingTask, batches):
        self.task, self.batches = task, batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self):
        for batch in self.batches:
            self.task.bring_state(batch)
            yield batch
