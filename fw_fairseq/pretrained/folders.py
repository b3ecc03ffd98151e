"""Models in folders: their configuration, their weights, and the symbols that fairseq has for their tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from ..errors import Mistake

SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")  # the first symbols of every fairseq dictionary
NEVER = -1e4  # the score of a symbol that is none of the model's: its probability is 0, and no loss is NaN


def load_config(folder: str | Path) -> Any:
    """The configuration of a model in a folder, or in the one GGUF file of a folder."""
    return AutoConfig.from_pretrained(folder, **gguf_in(Path(folder)))


def load_model(folder: str | Path) -> Any:
    """The model of a folder, in fp32. Nothing is downloaded, and no code of the folder runs."""
    path = Path(folder)
    if not path.is_dir():
        raise Mistake(f"--pretrained {folder} is no folder; download the model first, with config.json and its weights")
    try:
        given: dict[str, Any] = {"dtype": torch.float32, "local_files_only": True, "output_loading_info": True, **gguf_in(path)}
        loaded: Any = AutoModelForCausalLM.from_pretrained(path, **given)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise Mistake(f"--pretrained {folder} does not load as a causal language model of transformers: {first}") from error
    model, found = loaded
    if missing := sorted(map(str, {*found["missing_keys"], *found["mismatched_keys"]})):
        raise Mistake(f"--pretrained {folder} lacks {missing[0]}, or has it in another shape; its weights are of another model")
    return model


def gguf_in(folder: Path) -> dict[str, str]:
    """The option that names a folder's GGUF file, where it has one and no config.json."""
    files = [] if (folder / "config.json").exists() else sorted(folder.glob("*.gguf"))
    return {"gguf_file": files[0].name} if len(files) == 1 else {}


def written(config: Any) -> str:
    """A configuration as one line, which options of a checkpoint may have."""
    return json.dumps({**config.to_dict(), "transformers_version": None}, sort_keys=True, default=str)


def empty_model(line: str) -> Any:
    """The model of a configuration as ``written``, with weights that are still to be loaded."""
    values = json.loads(line)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with no_init_weights():
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def first_of(value: Any) -> int | None:
    """A token's number, of which there may be several."""
    return value[0] if isinstance(value, (list, tuple)) and value else value if isinstance(value, int) else None


def special_tokens(config: Any) -> dict[str, int]:
    """fairseq's symbols that stand for tokens of the model: the end of text, and its beginning where that is another token."""
    end, begin = first_of(config.eos_token_id), first_of(config.bos_token_id)
    if end is None:
        raise Mistake("config.json of the pretrained model has no eos_token_id; name the token that ends a text there")
    return {"</s>": end} | ({"<s>": begin} if begin not in (None, end) else {})


def symbols_of(config: Any) -> list[str]:
    """The dictionary after fairseq's special symbols: token i is the symbol ``i``, but those that the special symbols stand for."""
    special = {*special_tokens(config).values()}
    return [str(token) for token in range(config.vocab_size) if token not in special]


def write_dictionary(config: Any, path: str | Path) -> None:
    """Writes dict.txt."""
    Path(path).write_text("".join(f"{symbol} 1\n" for symbol in symbols_of(config)))


def tokens_of(symbols: list[str], config: Any, name: str) -> tuple[Tensor, Tensor]:
    """The model's token of each of fairseq's symbols, and which symbols stand for one."""
    special = special_tokens(config)
    wanted = {*symbols_of(config)}
    if [*symbols[:4]] != [*SPECIALS] or not {*symbols[4:]} <= wanted:
        odd = next((symbol for symbol in symbols[4:] if symbol not in wanted), symbols[:4])
        raise Mistake(f"the dictionary has {odd!r}, which is no token of {name}; make the data with dict.txt of that model")
    known = [symbol in special for symbol in SPECIALS] + [True] * (len(symbols) - 4)
    tokens = [special.get(symbol, special["</s>"]) for symbol in SPECIALS] + [int(symbol) for symbol in symbols[4:]]
    return torch.tensor(tokens), torch.tensor(known)
