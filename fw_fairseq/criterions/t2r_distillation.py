"""t2r_distillation: a converted Transformer learns from the one that it came from. It matches layers first, then words."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Optional

import torch
from fairseq import checkpoint_utils
from fairseq.criterions import register_criterion
from fairseq.dataclass import ChoiceEnum
from fairseq.logging import metrics
from fairseq.models import BaseFairseqModel, FairseqDecoder
from fairseq.tasks import FairseqTask
from fairseq.utils import item
from torch import Tensor, nn
from torch.nn import functional as F

from ..config import option
from ..errors import Mistake
from .fast_weight_cross_entropy import PlainOrAdaptive, PlainOrAdaptiveConfig
from .memory_logging import MemoryLogging

MATCHES = ["hidden", "attention"]  # the default first


@dataclass
class T2rDistillationConfig(PlainOrAdaptiveConfig):
    """The options of --criterion t2r_distillation."""

    teacher: str = option("", "checkpoint of the Transformer with softmax attention to learn from")
    match: ChoiceEnum(MATCHES) = option(  # type: ignore[valid-type]
        "hidden",
        "what is matched of each layer first: its output, or its attention's output on the teacher's input",
    )
    match_updates: int = option(0, "updates that match layers; later ones match the teacher's words")
    teacher_weight: float = option(0.5, "share of the teacher's words in the loss after --match-updates; the rest is the text's")


class Distillation(PlainOrAdaptive):
    """The loss between a model and its teacher: the distance of their layers first, then the divergence of their words."""

    def __init__(
        self,
        task: FairseqTask,
        sentence_avg: bool,
        ddp_backend: str,
        state_norm_penalty: float,
        teacher: str,
        match: str,
        match_updates: int,
        teacher_weight: float,
    ) -> None:
        super().__init__(task, sentence_avg, ddp_backend)
        if not teacher:
            raise Mistake("--teacher is missing; it is the checkpoint that fw-convert started from")
        if str(match) != MATCHES[0] and not match_updates:
            raise Mistake(f"--match {match} has no effect without --match-updates, the updates that match layers")
        [model], _ = checkpoint_utils.load_model_ensemble([teacher], task=task)
        self._teacher = [model.eval()]  # a list hides it from training and checkpoints
        self.match, self.match_updates, self.teacher_weight = str(match), match_updates, teacher_weight
        self.state_norm_penalty, self.shares = state_norm_penalty, False

    def forward(self, model: BaseFairseqModel, sample: dict, reduce: bool = True) -> tuple:
        """Returns the loss, the sample size and the log. In validation the loss is the plain cross entropy, which can be
        compared with other runs."""
        if not model.training:
            return super().forward(model, sample, reduce)
        teacher = self.teacher_for(model)
        matching = model.num_updates < self.match_updates
        target = model.get_targets(sample, None)
        real = target.ne(self.padding_idx)
        if matching:
            check_layers(model.decoder, teacher.decoder)
            losses = {"match": real.sum() * self.match_layers(model, teacher, sample["net_input"], real)}
            loss = losses["match"] + zero_of_all(model) if torch.distributed.is_initialized() else losses["match"]
        else:
            losses = self.match_words(model, teacher, sample["net_input"], target)
            loss = self.teacher_weight * losses["teacher"] + (1 - self.teacher_weight) * losses["text"]
        count = int(real.sum())
        size = len(target) if self.sentence_avg else count
        log = {"loss": losses.get("text", loss).detach(), "ntokens": count, "nsentences": len(target), "sample_size": size}
        return loss, size, log | {f"distil_{name}": value.detach() for name, value in losses.items() if name != "text"}

    def teacher_for(self, model: BaseFairseqModel) -> BaseFairseqModel:
        """Returns the teacher, on the device of the model and in its precision."""
        like = next(model.parameters())
        [teacher] = self._teacher
        if next(teacher.parameters()).device != like.device or next(teacher.parameters()).dtype != like.dtype:
            teacher = self._teacher[0] = teacher.to(device=like.device, dtype=like.dtype)
        if not self.shares:
            self.shares = True
            share_frozen(model, teacher)
        return teacher

    def match_layers(self, model: BaseFairseqModel, teacher: BaseFairseqModel, net_input: dict, real: Tensor) -> Tensor:
        """Returns the squared distance in units of the teacher's mean square, a mean over layers and tokens."""
        if self.match == "hidden":
            with torch.no_grad():
                wanted = hidden(teacher, single_texts(net_input))
            given = hidden(model, net_input)
        else:
            with torch.no_grad(), attention(teacher) as (inputs, wanted):
                hidden(teacher, single_texts(net_input))
            with attention(model, inputs) as (_, given):
                hidden(model, net_input)
            if not all(x.requires_grad for x in given):
                raise Mistake("--match attention does not work with --checkpoint-activations or --reversible; use --match hidden")
        rows = real.t()  # (T,B), as in the layers
        pairs = [(x[rows].float(), y[rows].float()) for x, y in zip(given, wanted)]
        smallest = 1e-12 * max(1, pairs[0][1].numel())  # none: all is padding
        return torch.stack([(x - y).square().sum() / y.square().sum().clamp(min=smallest) for x, y in pairs]).mean()

    def match_words(self, model: BaseFairseqModel, teacher: BaseFairseqModel, net_input: dict, target: Tensor) -> dict[str, Tensor]:
        """Returns the text's cross entropy and the divergence from the teacher's probabilities, each summed over tokens. Of an
        adaptive softmax, the words of a cluster are compared only where the text has one of them."""
        with torch.no_grad():
            wanted, _ = words(teacher, teacher(**single_texts(net_input))[0], target)
        given, targets = words(model, model(**net_input)[0], target)
        losses: dict[str, Any] = {"text": 0.0, "teacher": 0.0}
        for number, (x, y, t) in enumerate(zip(given, wanted, targets)):
            if t is None:
                continue
            if number == 0:  # padding is among the frequent words
                x, y, t = (part[target.view(-1) != self.padding_idx] for part in (x, y, t))
            x = F.log_softmax(x.float(), -1)
            losses["text"] += F.nll_loss(x, t, reduction="sum")
            losses["teacher"] += F.kl_div(x, F.log_softmax(y.float(), -1), reduction="sum", log_target=True)
        return losses


@torch.no_grad()
def share_frozen(model: nn.Module, teacher: nn.Module) -> None:
    """Gives the teacher the model's own memory where the model has the same numbers and does not train them."""
    theirs = dict(teacher.named_parameters())
    for name, own in model.named_parameters():
        found = theirs.get(name)
        if found is not None and not own.requires_grad and found.shape == own.shape and torch.equal(found, own):
            found.data = own.data


def check_layers(own: FairseqDecoder, theirs: FairseqDecoder) -> None:
    """Refuses to match the layers of decoders that do not have as many of one width, or of which some are left out."""
    if not (hasattr(own, "layers") and hasattr(theirs, "layers")):
        raise Mistake("--match-updates is not for pretrained_lm; train its new parts with --criterion attention_transfer first")
    (count, width), (wanted, their_width) = ((len(decoder.layers), decoder.layers[0].embed_dim) for decoder in (own, theirs))
    if (count, width) != (wanted, their_width) or own.decoder_layerdrop:
        said = f"--teacher has {wanted} layers of width {their_width}, the model {count} of {width}"
        raise Mistake(f"{said}; they must be the same (and --decoder-layerdrop 0)")


def zero_of_all(model: BaseFairseqModel) -> Tensor:
    """Returns 0, which depends on every parameter. Torch's DDP waits for the gradients of all of them, and matched layers do not
    use those of the output."""
    return sum(0 * p.view(-1)[0] for p in model.parameters() if p.requires_grad and p.numel())


def single_texts(net_input: dict) -> dict:
    """Returns the input without the memories that a stream carries over, which the teacher does not have."""
    return {name: net_input[name] for name in ("src_tokens", "src_lengths")}


def hidden(model: BaseFairseqModel, net_input: dict) -> list[Tensor]:
    """Returns the output of each layer, (T,B,C). The logits are not computed."""
    return model(**net_input, features_only=True)[1]["inner_states"][1:]


def words(model: BaseFairseqModel, output: Tensor, target: Tensor) -> tuple[list[Tensor], list[Optional[Tensor]]]:
    """Returns logits (N,V) and targets (N). An adaptive softmax has several of each: for the frequent words, then for each
    cluster."""
    adaptive = getattr(model.decoder, "adaptive_softmax", None)
    if adaptive is None:
        return [output.flatten(0, 1)], [target.view(-1)]
    return adaptive(output, target.view(-1))


@contextlib.contextmanager
def attention(model: BaseFairseqModel, given: Optional[list[Tensor]] = None) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Collects the inputs and outputs of every layer's self-attention in the next forward. ``given`` replaces the inputs."""
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []
    handles = []

    def before(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if given is not None:
            kwargs = kwargs | dict.fromkeys(("query", "key", "value"), given[len(inputs)])
        inputs.append(kwargs["query"])
        return args, kwargs

    for layer in model.decoder.layers:
        handles.append(layer.self_attn.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(layer.self_attn.register_forward_hook(lambda module, args, output: outputs.append(output[0])))
    try:
        yield inputs, outputs
    finally:
        for handle in handles:
            handle.remove()


@register_criterion("t2r_distillation", dataclass=T2rDistillationConfig)
class T2rDistillation(MemoryLogging, Distillation):
    """The criterion: the loss of ``Distillation``, with statistics of the memories in the log."""

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict]) -> None:
        """Logs the parts of the loss too, as means over the tokens of all workers."""
        super().reduce_metrics(logging_outputs)
        tokens = item(sum(log.get("ntokens", 0) for log in logging_outputs))
        for key in dict.fromkeys(key for log in logging_outputs for key in log if key.startswith("distil_")):
            metrics.log_scalar(key, item(sum(log.get(key, 0) for log in logging_outputs)) / tokens, tokens, round=4)
