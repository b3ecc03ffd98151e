"""retrieval: one head stores pairs of keys and values, and is then asked for a value (Schlag et al. 2021, sec. 6.1)."""

from dataclasses import dataclass
from typing import Optional, cast

import torch
from fairseq.models import BaseFairseqModel, register_model
from fairseq.tasks.fairseq_task import FairseqTask
from torch import Tensor, nn
from torch.nn import functional as F

from ..config import SOFTMAX, FastWeightConfig, check_options, option, options_read, refuse_without_effect
from ..errors import Mistake
from ..mixers.parts.features import build_feature_map, check_combination, initial_bias, normalised_features, with_common_scale
from ..ops import fast_weight
from ..ops.chunkwise.recall import recall
from ..ops.inputs import READ
from ..ops.normalisation import divide
from ..rules import RULES, Rule
from ..rules.gates import Place


@dataclass
class RetrievalConfig(FastWeightConfig):
    """The options of --arch retrieval."""

    key_dim: int = option(64, "width of keys and queries before the feature map", least=1)


@register_model("retrieval", dataclass=RetrievalConfig)
class RetrievalModel(BaseFairseqModel):
    """A model of one head. It makes keys of the key symbol's learned embedding and the one-hot value, and queries of the embedding
    alone."""

    def __init__(self, config: RetrievalConfig, symbols: int) -> None:
        super().__init__()
        if str(config.mixer) not in ("fast_weight", SOFTMAX):
            raise Mistake(f"--mixer is {config.mixer}; retrieval has one head of fast_weight or {SOFTMAX}")
        self.softmax = str(config.mixer) == SOFTMAX
        self.rule_name, self.feature_norm, self.attention_norm = (
            str(config.update_rule),
            str(config.feature_norm),
            config.attention_norm,
        )
        self.symbols = symbols
        self.feature_map = build_feature_map(config, config.key_dim, 1)
        if not self.softmax:
            check_combination(config, self.feature_map)
            check_rule(self.rule_name)
        if self.attention_norm and self.rule.normaliser == "keys" and str(config.attention_norm_of) != READ:
            raise Mistake(
                f"--attention-norm divides what an erase of --update-rule {self.rule_name} reads, too, which retrieval cannot do;"
                f" use --feature-norm sum, or --attention-norm-of {READ}"
            )
        width = int(1.1 * 2 * symbols)
        self.embedding = nn.Embedding(symbols, width)
        self.query_projection = nn.Linear(width, config.key_dim, bias=False)
        self.key_projection = nn.Linear(width + symbols, config.key_dim, bias=False)
        widths = self.feature_map.out_dim, symbols
        gates = {} if self.softmax else self.rule.gates
        self.gates = nn.ModuleDict({name: nn.Linear(width + symbols, g.width(*widths)) for name, g in gates.items()})
        for name, gate in cast("dict[str, nn.Linear]", self.gates).items():
            spec, start = self.rule.gates[name], config.write_strength_init
            if spec.bias == "uniform" or (start and spec.writes):  # the others start around 1/2, as published
                gate.bias.data.copy_(initial_bias(spec, Place(len(gate.bias), 1), start))

    @property
    def rule(self) -> Rule:
        """The update rule, an entry of RULES."""
        return RULES[self.rule_name]

    @classmethod
    def build_model(cls, cfg: RetrievalConfig, task: FairseqTask) -> "RetrievalModel":
        """Checks the options and returns the model for the symbols of the task."""
        check_options(cfg, RetrievalConfig)
        return cls(cfg, task.cfg.symbols)

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        """Leaves out the gates that softmax attention once had, and never used."""
        if self.softmax:
            for key in [key for key in state_dict if key.startswith("gates.")]:
                del state_dict[key]

    def options_read(self, cfg: RetrievalConfig) -> set[str]:
        """Returns the names of this project's options that the model reads."""
        memory = "update_rule", "feature_map", "feature_norm", "attention_norm", "attention_norm_of", "write_strength_init"
        return options_read(cfg, (), *(() if self.softmax else memory), "mixer", "key_dim")

    def refuse_without_effect(self, cfg: RetrievalConfig) -> None:
        """Refuses options that this model does not read."""
        refuse_without_effect(cfg, RetrievalConfig, self.options_read(cfg))

    def forward(self, keys: Tensor, values: Tensor, queries: Tensor) -> Tensor:
        """Maps keys and values (B,T) and queries (B,Q) to the value that each query reads, (B,Q,S)."""
        v = F.one_hot(values, self.symbols).to(self.embedding.weight)
        k = self.of_pairs(self.key_projection, keys, values).unsqueeze(1)
        q = F.embedding(queries, self.query_projection(self.embedding.weight)).unsqueeze(1)
        if self.softmax:
            return F.scaled_dot_product_attention(q, k, v.unsqueeze(1)).squeeze(1)
        self.feature_map.redraw()
        gates = {
            name: torch.sigmoid(self.of_pairs(gate, keys, values)).unsqueeze(1)
            for name, gate in cast("dict[str, nn.Linear]", self.gates).items()
        }
        gates = {name: x.squeeze(-1) if self.rule.gates[name].axis is None else x for name, x in gates.items()}
        return self.read(self.features(q)[0], self.key_features(k), v.unsqueeze(1), gates).squeeze(1)

    def of_pairs(self, projection: nn.Linear, keys: Tensor, values: Tensor) -> Tensor:
        """Returns projection([embedding of the key; one-hot value]) of each pair. It looks them up, as there are few keys and
        values."""
        of_keys, of_values = projection.weight.split([self.embedding.embedding_dim, self.symbols], dim=1)
        return F.embedding(keys, F.linear(self.embedding.weight, of_keys, projection.bias)) + F.embedding(values, of_values.mT)

    def features(self, x: Tensor) -> tuple[Tensor, Optional[Tensor]]:
        """Maps keys or queries to their normalised features. Attention normalisation also gets the log of the factor that was
        divided out; that of a query cancels."""
        return normalised_features(self.feature_map, self.feature_norm, x, self.attention_norm)

    def key_features(self, k: Tensor) -> Tensor:
        """The keys' features, divided by the largest key's factor under attention normalisation, where a common factor cancels."""
        return with_common_scale(*self.features(k))

    def read(self, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor]) -> Tensor:
        """Returns the values that the queries read after the last token, (B,1,Q,S). Only a rule outside the recurrence builds its
        memory."""
        if self.rule.coefficients is None:
            return self.read_memory(q, k, v, gates)
        y, weights = recall(q, k, v, self.rule.coefficients(**gates))
        if not self.attention_norm:
            return y
        normaliser = q @ k.sum(2).unsqueeze(-1) if self.rule.normaliser == "keys" else weights.sum(-1, keepdim=True)
        return divide(y, normaliser, self.feature_map.eps)

    def read_memory(self, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor]) -> Tensor:
        """Writes all pairs, then reads with the queries as tokens that change nothing: keys and values are 0, gates are 1."""
        _, state = fast_weight(k, k, v, self.rule_name, gates)
        shape = q.shape[:3]
        still = {name: gate.new_ones(*shape, *gate.shape[3:]) for name, gate in gates.items()}
        return fast_weight(q, torch.zeros_like(q), v.new_zeros(*shape, v.shape[3]), self.rule_name, still, state)[0]


def check_rule(name: str) -> None:
    """Refuses a rule that needs more of a layer than keys, values and gates that are sigmoids."""
    able = [n for n, rule in RULES.items() if rule.only_sigmoid_gates]
    able += [n for n, rule in RULES.items() if rule.step is not None and n not in able]
    if name not in able:
        raise Mistake(
            f"--update-rule {name} is not for retrieval, which makes one key, one value and gates that are sigmoids for each pair;"
            f" use one of: {', '.join(able)}"
        )
