"""--bpe pretrained: texts as the tokens of a pretrained model, each of which is the symbol of its number."""

from dataclasses import dataclass, field
from typing import Any

from fairseq.data.encoders import register_bpe
from fairseq.dataclass import FairseqDataclass

from ..errors import Mistake


@dataclass
class PretrainedTokensConfig(FairseqDataclass):
    """The options of --bpe pretrained."""

    pretrained_tokenizer: str = field(default="", metadata={"help": "the folder of the model, with its tokenizer and config.json"})


@register_bpe("pretrained", dataclass=PretrainedTokensConfig)
class PretrainedTokens:
    """The tokenizer of a folder. fairseq's symbols </s> and <s> are the model's end and beginning of text."""

    def __init__(self, cfg: PretrainedTokensConfig) -> None:
        if not cfg.pretrained_tokenizer:
            raise Mistake("--pretrained-tokenizer is missing; it is the folder of the pretrained model")
        from transformers import AutoTokenizer  # which fairseq does without

        from ..pretrained.folders import load_config, special_tokens

        self.tokenizer: Any = AutoTokenizer.from_pretrained(cfg.pretrained_tokenizer, local_files_only=True)
        self.tokens = special_tokens(load_config(cfg.pretrained_tokenizer))
        self.symbols = {token: symbol for symbol, token in self.tokens.items()}

    def encode(self, text: str) -> str:
        """A text to symbols, with spaces between them."""
        tokens = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return " ".join(self.symbols.get(token, str(token)) for token in tokens)

    def decode(self, text: str) -> str:
        """Symbols to their text. Padding and unknown symbols have none."""
        known = (self.tokens.get(symbol, int(symbol) if symbol.isdecimal() else None) for symbol in text.split())
        return self.tokenizer.decode([token for token in known if token is not None])
