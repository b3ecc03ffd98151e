"""stateful_language_modeling: the state is carried over from segment to segment in training, validation and fairseq-eval-lm."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Optional

import torch
from fairseq.data import FairseqDataset
from fairseq.sequence_generator import SequenceGenerator
from fairseq.sequence_scorer import SequenceScorer
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask
from omegaconf import II
from torch import Tensor, nn

from ..config import option, option_name
from ..data.streams import StreamDataset, StreamIterator
from ..data.text import Text, check_positions, has_keyword, load_text
from ..errors import Mistake
from ..modules import Streams
from ..modules.positions import PositionsFromEnd

NOT_ACROSS = ("qkv_sparsity", "ffn_sru", "reversible")  # options of layers that cannot continue from another worker's state


@dataclass
class StatefulLanguageModelingConfig(LanguageModelingConfig):
    """The options of --task stateful_language_modeling."""

    reset_at_eos: bool = option(False, "empty the state after every end of sentence or document")
    sequence_parallel: int = option(
        1, "number of neighbouring workers that share their streams; each computes an equal part of every segment"
    )
    sentence_avg: bool = II("optimization.sentence_avg")
    curriculum: int = II("dataset.curriculum")


@register_task("stateful_language_modeling", dataclass=StatefulLanguageModelingConfig)
class StatefulLanguageModelingTask(LanguageModelingTask):
    """Language modeling in which each row of a batch reads one continuous stream of the text.

    --tokens-per-sample is the length of a segment, within which gradients flow; --batch-size is the number of streams of a worker.
    Dictionary, generation and the scoring of single texts are those of language_modeling."""

    carries_over = True  # which models ask before they are built

    def __init__(self, args: Any, *dictionaries, **targets) -> None:
        super().__init__(args, *dictionaries, **targets)
        if self.targets != ["future"]:
            raise Mistake("stateful_language_modeling predicts the next token only; leave --self-target and --past-target out")
        curriculum = getattr(args, "curriculum", 0)
        if type(curriculum) is int and curriculum:
            raise Mistake("--curriculum keeps the order of batches for some epochs, and streams always keep it; leave it out")
        self.stateless: list[nn.Module] = []  # models that cannot read streams, such as the teacher of a distillation
        self.group = None  # of the workers that share this one's streams

    def build_model(self, args: Any, from_checkpoint: bool = False) -> nn.Module:
        model = super().build_model(args, from_checkpoint)
        if not has_keyword(model, "streams"):
            self.stateless.append(model)
            model.register_forward_pre_hook(refuse_streams, with_kwargs=True)
            if not from_checkpoint:  # it is to be trained, on streams
                refuse_streams(model, (), {"streams": None})
        if self.args.sequence_parallel > 1:
            check_across_workers(model)
        if self.args.reset_at_eos and has_keyword(model, "streams") and not model.decoder.recurrent:
            raise Mistake("--reset-at-eos empties states, and softmax layers would read the text before; use --mixer fast_weight")
        return model

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs) -> None:
        self.datasets[split] = load_text(self, split, epoch, combine)

    def get_batch_iterator(self, dataset: FairseqDataset, *args, **options) -> Any:
        if isinstance(dataset, Text):
            return self.streams(dataset, *args, **options)
        return super().get_batch_iterator(dataset, *args, **options)  # single texts, for generation and scoring

    def streams(
        self, text: Text, max_tokens: Any = None, max_sentences: Any = None, max_positions: Any = None, **options
    ) -> StreamIterator:
        """Returns the segments of a text. A batch has ``max_sentences`` streams, or as many as ``max_tokens`` has segments."""
        segment = self.args.tokens_per_sample
        if max_tokens and max_tokens < segment * (max_sentences or 1):
            least = segment * (max_sentences or 1)
            raise Mistake(f"--max-tokens, or --max-tokens-valid, is {max_tokens}; a segment of each stream takes {least} tokens")
        rows = max_sentences or (max_tokens or segment) // segment
        workers = self.sequence_workers(options.get("num_shards", 1))
        shards, (shard, share) = options.get("num_shards", 1) // workers, divmod(options.get("shard_id", 0), workers)
        pad, eos = self.dictionary.pad(), self.dictionary.eos()
        streams = StreamDataset(text, segment, rows, pad, eos, shard, shards, (share, workers))
        check_positions(min(segment, streams.longest), max_positions)
        processes = options.get("num_workers", 0)
        if processes == 1:  # fairseq's default. To cut a batch here takes less time than to get it from another process
            processes = 0
        loading = dict(num_workers=processes, buffer_size=options.get("data_buffer_size", 0), epoch=options.get("epoch", 1))
        return StreamIterator(streams, Streams(self.group), shard, shards, **loading)

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

    def eval_lm_dataloader(
        self, dataset: Text, max_tokens: Any = None, batch_size: Any = None, context_window: int = 0, **options
    ) -> "StreamBatches":
        """Reads the text once, as one stream or as --batch-size streams side by side. The first token of each has no context."""
        for model in self.stateless:  # before any thread loads data, which could not end with the program
            refuse_streams(model, (), {"streams": None})
        if context_window:
            raise Mistake("--context-window computes the context again, but this task carries all of it over; leave it out")
        batches = self.get_batch_iterator(dataset, max_sentences=batch_size or 1, **options).next_epoch_itr(shuffle=False)
        return StreamBatches(self, batches)

    def build_generator(self, models: list, args: Any, seq_gen_cls: Optional[type] = None, **kwargs) -> Any:
        return super().build_generator(models, args, seq_gen_cls=seq_gen_cls or PromptedGenerator, **kwargs)

    def train_step(self, sample: dict, *args, **kwargs) -> tuple:
        self.bring_state(sample)
        return super().train_step(sample, *args, **kwargs)

    def valid_step(self, sample: dict, *args, **kwargs) -> tuple:
        self.bring_state(sample)
        return super().valid_step(sample, *args, **kwargs)

    def bring_state(self, sample: dict) -> None:
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

    def inference_step(self, generator: SequenceGenerator, models: list, sample: dict, *args, **kwargs) -> list:
        """Scores streams and single texts, and goes on with single texts. A prompt ends with its first end of sentence; a text
        that is scored may have several."""
        scores = isinstance(generator, SequenceScorer)
        if "streams" in sample:
            if not scores:
                said = "stateful_language_modeling reads a text as streams, which nothing goes on from"
                raise Mistake(f"{said}; generate with --task language_modeling --sample-break-mode eos, or --score-reference")
            self.bring_state(sample)
        elif scores and all(has_keyword(model, "reset_mask") for model in models):
            self.empty_at_eos(sample["net_input"])
        return super().inference_step(generator, models, sample, *args, **kwargs)


def refuse_streams(model: nn.Module, args: tuple, kwargs: dict) -> None:
    """A hook that refuses streams for a model without state. Single texts and the teacher of a distillation have no streams."""
    if "streams" in kwargs:
        name = type(model).__name__
        raise Mistake(f"stateful_language_modeling carries states over, and {name} has none; use --task language_modeling")


def check_across_workers(model: nn.Module) -> None:
    """Refuses a model with a layer that cannot continue from the state of the worker before."""
    decoder = model.decoder
    softmax = "softmax attention sees only its own worker's tokens; use --mixer fast_weight"
    reasons = [] if getattr(decoder, "recurrent", False) else [softmax]
    reasons += [attention.mixer.why_not_across_workers() for attention in getattr(decoder, "mixers", [])]
    if isinstance(getattr(decoder, "embed_positions", None), PositionsFromEnd):
        reasons.append("--positions-from-end counts the tokens of later workers, which a worker does not see; leave it out")
    if str(getattr(getattr(decoder, "fast_weight_config", None), "ffn_form", "")).startswith("rwkv"):
        reasons.append("the channel mixing of --ffn-form needs the last token of the worker before it; choose another form")
    given = [name for name in NOT_ACROSS if getattr(getattr(decoder, "fast_weight_config", None), name, None)]
    reasons += [f"{option_name(name)} needs what the worker before has, and does not get it; leave it out" for name in given]
    for reason in filter(None, reasons):
        raise Mistake(f"--sequence-parallel: {reason}")


class StreamBatches:
    """Batches with their streams among the model's inputs, for fairseq-eval-lm, which runs the model itself."""

    def __init__(self, task: StatefulLanguageModelingTask, batches: Iterable[dict]) -> None:
        self.task, self.batches = task, batches

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[dict]:
        for batch in self.batches:
            self.task.bring_state(batch)
            yield batch


class PromptedGenerator(SequenceGenerator):
    """fairseq's generator, which feeds a prompt token by token. Decoders of this project get all of it first, for one pass."""

    def _generate(
        self, sample: dict, prefix_tokens: Any = None, constraints: Any = None, bos_token: Optional[int] = None
    ) -> list[list[dict[str, Tensor]]]:
        decoders = [model.decoder for model in self.model.models if getattr(model.decoder, "reads_prompts", False)]
        if prefix_tokens is not None:
            prompt = self.common_prompt(prefix_tokens, self.eos if bos_token is None else bos_token)
            for decoder in decoders:
                decoder.expect_prompt(prompt, self.beam_size)
        try:
            return super()._generate(sample, prefix_tokens, constraints, bos_token)
        finally:
            for decoder in decoders:
                decoder.expect_prompt(None)

    def common_prompt(self, prefix_tokens: Tensor, first: int) -> Tensor:
        """The first token and as many tokens as every prompt has. The rest of longer prompts is read in the steps in which shorter
        ones go on, so nothing is computed for padding. An end of sentence finishes a hypothesis and takes its row out of the batch,
        so the common part stops before the first one."""
        inside = prefix_tokens.ne(self.pad) & prefix_tokens.ne(self.eos)
        shortest = int(inside.long().cumprod(1).sum(1).min())
        return torch.cat([torch.full_like(prefix_tokens[:, :1], first), prefix_tokens[:, :shortest]], dim=1)
