"""fw-export-hf: writes a checkpoint of fast_weight_lm as a folder for Hugging Face transformers.

AutoModelForCausalLM.from_pretrained(OUTPUT, trust_remote_code=True) loads it wherever torch and transformers are installed, because
the folder has the code of the model. Texts begin with the end of sentence, as in fairseq; the tokenizer in the folder adds it.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn

from .. import Mistake
from ..config import SOFTMAX, SPARSE_OPTIONS, option_name
from ..files import tokenizer_size
from ..mixers import MIXERS
from ..models.fast_weight_decoder import FastWeightDecoder
from ..modules.plain_softmax import PlainAdaptiveSoftmax
from . import standalone
from .checkpoints import load_language_model
from .command import make_parser, mistakes_as_sentences

PROG = "fw-export-hf"
EXAMPLE = "fw-export-hf checkpoint_best.pt folder --data DATA"
CODE_FILE = "modeling_fw_fairseq.py"
TOKENIZER_FILES = (
    "vocab.json",
    "merges.txt",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
WRITTEN = re.compile("|".join([*map(re.escape, (*TOKENIZER_FILES, CODE_FILE)), r"(generation_)?config\.json",
                               r"model(-\d+-of-\d+)?\.safetensors", r"model\.safetensors\.index\.json"]))  # fmt: skip
TOLERANCE = 1e-4
MARKS_AFTER = (
    ",",
    ".",
    ";",
    ":",
    "!",
    "?",
    ")",
    "]",
    "%",
    "n't",
    "'s",
    "'m",
    "'re",
    "'ve",
    "'ll",
    "'d",
)  # that follow without a space


def export(checkpoint, output, data=None, tokenizer=None, force: bool = False):
    """Writes the folder ``output`` and returns the model in it.

    data: the folder with dict.txt; by default that of the training. tokenizer: a folder with a GPT-2 tokenizer, if the
    symbols of the dictionary are its numbers, as fw-convert writes them. Without it, the words of dict.txt become a
    tokenizer.
    """
    output = Path(output).resolve()
    check_output(output, force)
    source, dictionary = load_language_model(checkpoint, data, PROG, ("fast_weight_lm",))
    model = build(source.decoder)
    difference = compare(source, model, len(dictionary))
    if not difference <= TOLERANCE:
        raise Mistake(f"CHECKPOINT {checkpoint} computes other logits in transformers, by {difference:.1e}; nothing was written")
    model.config.update(special_tokens(dictionary))
    if tokenizer is not None:
        renumber(model, dictionary, Path(tokenizer))
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        write(model, dictionary, tokenizer, temporary)
        check_output(output, force)
        replace(temporary, output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return model


def check_output(output: Path, force: bool) -> None:
    """Refuses an existing folder, unless --force is given and the folder is empty or an earlier export, with nothing else in it."""
    if not output.exists():
        return
    if not force:
        raise Mistake(f"OUTPUT {output} exists; name another folder, or give --force to replace an earlier export")
    if not output.is_dir() or (any(output.iterdir()) and not (output / CODE_FILE).exists()):
        raise Mistake(
            f"OUTPUT {output} is no earlier export, as it has no {CODE_FILE}; --force would delete it: name another folder"
        )
    foreign = sorted(path.name for path in output.iterdir() if path.is_dir() or not WRITTEN.fullmatch(path.name))
    if foreign:
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        raise Mistake(
            f"OUTPUT {output} has {foreign[0]}{more}, which fw-export-hf did not write and --force would delete; move that away or"
            " name another folder"
        )


def replace(new: Path, folder: Path) -> None:
    """Puts ``new`` in the place of ``folder``, which is deleted last."""
    old = new.with_suffix(".old")
    if folder.exists():
        os.replace(folder, old)
    try:
        os.replace(new, folder)
    except OSError:
        if old.exists():
            os.replace(old, folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def build(decoder: FastWeightDecoder):
    """Returns the model for transformers, with the weights of fairseq's decoder."""
    from ..huggingface import ACTIVATIONS, FastWeightForCausalLM, FastWeightHFConfig

    cfg, config = decoder.cfg, decoder.fast_weight_config
    if cfg.activation_fn not in ACTIVATIONS:
        raise Mistake(f"CHECKPOINT has activation {cfg.activation_fn}; fw-export-hf takes: {', '.join(ACTIVATIONS)}")
    for name in SPARSE_OPTIONS:
        if getattr(config, name):
            raise Mistake(f"CHECKPOINT was trained with {option_name(name)}, which fw-export-hf does not have")
    words, adaptive = decoder.embed_tokens, decoder.adaptive_softmax
    if isinstance(adaptive, PlainAdaptiveSoftmax):
        raise Mistake("CHECKPOINT was trained with --plain-adaptive-softmax, which fw-export-hf does not have")
    embedding, tied = embedding_tensors(words), is_tied(decoder)
    output, output_bands = output_tensors(decoder, tied)
    positions = "none" if decoder.embed_positions is None else ("learned" if cfg.decoder.learned_pos else "sinusoidal")
    hf = FastWeightHFConfig(
        vocab_size=len(decoder.dictionary),
        hidden_size=decoder.embed_dim,
        input_size=words.embedding_dim,
        output_size=(decoder.project_out_dim.out_features if decoder.project_out_dim is not None else decoder.embed_dim),
        intermediate_size=cfg.decoder.ffn_embed_dim,
        num_hidden_layers=len(decoder.layers),
        num_attention_heads=cfg.decoder.attention_heads,
        mixers=[mixer_name(layer.self_attn) for layer in decoder.layers],
        mixer_options={name: jsonable(value) for name, value in asdict(config).items() if not name.startswith("_")},
        decoding_graph=not config.no_decoding_graph,
        activation=str(cfg.activation_fn),
        normalize_before=cfg.decoder.normalize_before,
        final_norm=decoder.layer_norm is not None,
        embedding_norm=decoder.layernorm_embedding is not None,
        embedding_scale=decoder.embed_scale,
        output_scale=decoder.embed_dim**-0.5 if config.scale_output else 1.0,
        positions=positions,
        max_position_embeddings=None if positions == "none" and decoder.recurrent else cfg.max_target_positions,
        first_position=words.padding_idx + 1,
        input_bands=embedding.pop("bands", None),
        output_bands=output_bands if adaptive is not None else None,
        tie_word_embeddings=tied,
    )
    model = FastWeightForCausalLM(hf).eval()
    tensors = embedding | output
    for name, x in decoder.state_dict().items():
        name = name.replace(".self_attn.mixer.", ".self_attn.").replace("layernorm_embedding.", "embedding_norm.")
        name = re.sub(r"^project_(in|out)_dim\.", r"project_\1.", name)
        if name.startswith(("layers.", "layer_norm.", "embedding_norm.", "project_")) or name == "embed_positions.weight":
            tensors[name] = x
    model.load_state_dict(tensors)
    return model


def jsonable(value):
    """Returns a value that JSON can hold."""
    return value if isinstance(value, (int, float)) else str(value)  # an option with choices is an Enum


def mixer_name(attention: nn.Module) -> str:
    """Returns the name of a layer's mixer."""
    mixer = getattr(attention, "mixer", None)
    return next((name for name, kind in MIXERS.items() if type(mixer) is kind), SOFTMAX)


def embedding_tensors(words: nn.Module) -> dict:
    """Returns the weights of the input's embeddings by name, with their bands if they are adaptive."""
    if isinstance(words, nn.Embedding):
        return {"embed_tokens.weight": words.weight}
    tensors: dict = {"bands": [list(band[0].weight.shape) for band in words.embeddings]}
    for i, (table, linear) in enumerate(words.embeddings):
        tensors |= {f"embed_tokens.words.{i}.weight": table.weight, f"embed_tokens.maps.{i}.weight": linear.weight}
    return tensors


def is_tied(decoder) -> bool:
    """Returns whether the output shares the input's embeddings."""
    if decoder.adaptive_softmax is None:
        return decoder.output_projection.weight is decoder.embed_tokens.weight
    head = decoder.adaptive_softmax.head
    return hasattr(head, "word_proj") and weights(head.word_proj)[-1] is decoder.embed_tokens.embeddings[0][0].weight


def weights(module: nn.Module) -> list[Tensor]:
    """Returns the weights of a linear map, or of a chain of them in the order of their use."""
    linear = [part for part in module.modules() if hasattr(part, "weight")]
    return [part.weight.t() if getattr(part, "transpose", False) else part.weight for part in linear]


def output_tensors(decoder, tied: bool) -> tuple[dict[str, Tensor], list]:
    """Returns the weights of the output layer by name, and its bands."""
    softmax = decoder.adaptive_softmax
    if softmax is None:
        return ({} if tied else {"output.weight": decoder.output_projection.weight}), []
    first = softmax.cutoff[0]
    if hasattr(softmax.head, "word_proj"):
        clusters, bands = [weights(softmax.head.word_proj)], softmax.head.class_proj.weight
    else:
        clusters, bands = [[softmax.head.weight[:first]]], softmax.head.weight[first:]
    clusters += [weights(tail) for tail in softmax.tail]
    tensors = {"output.bands.weight": bands}
    for i, (*mapped, words) in enumerate(clusters):
        tensors |= {f"output.maps.{i}.weight": x for x in mapped}
        if not tied:
            tensors[f"output.words.{i}.weight"] = words
    return tensors, [list(words.shape) for *_, words in clusters]


@torch.no_grad()
def compare(source, model, words: int) -> float:
    """Returns the largest difference of log probabilities on random tokens, relative to the largest log probability."""
    length = min(16, model.config.max_position_embeddings or 16)
    tokens = torch.randint(4, words, (2, length), generator=torch.Generator().manual_seed(0))
    expected = source.get_normalized_probs(source(tokens), log_probs=True)
    actual = model(tokens).logits.float().log_softmax(-1)
    return float((actual - expected).abs().max() / expected.abs().max())


def special_tokens(dictionary) -> dict[str, int]:
    """Returns the ids of the special tokens."""
    return {"bos_token_id": dictionary.eos(), "eos_token_id": dictionary.eos(), "pad_token_id": dictionary.pad()}


def renumber(model, dictionary, tokenizer: Path) -> None:
    """Sorts embeddings by the tokenizer's ids. Its token i is the dictionary's symbol 'i', and the one without a symbol is </s>."""
    if not any((tokenizer / name).exists() for name in ("vocab.json", "tokenizer.json")):
        raise Mistake(f"--tokenizer {tokenizer} has neither vocab.json nor tokenizer.json; it must be a GPT-2 tokenizer's folder")
    numbers = dictionary.symbols[dictionary.nspecial :]
    size = len(numbers) + 1
    missing = sorted(set(map(str, range(size))).difference(numbers), key=int)
    if model.config.input_bands or model.config.output_bands or len(missing) != 1:
        raise Mistake("--tokenizer needs a checkpoint that fw-convert made of a GPT-2; leave it out for the words of dict.txt")
    if (found := tokenizer_size(tokenizer)) != size:
        raise Mistake(f"--tokenizer {tokenizer} has {found} tokens; it must be that of CHECKPOINT's GPT-2, which has {size}")
    end = int(missing[0])
    order = torch.tensor([dictionary.eos() if i == end else dictionary.index(str(i)) for i in range(size)])
    model.embed_tokens = nn.Embedding.from_pretrained(model.embed_tokens.weight[order].detach(), freeze=False)
    if model.output is not None:
        model.output.weight = nn.Parameter(model.output.weight[order].detach())
    model.config.update({"vocab_size": size, "bos_token_id": end, "eos_token_id": end, "pad_token_id": None})


def write(model, dictionary, tokenizer, folder: Path) -> None:
    """Writes the model, its code and its tokenizer into a new folder."""
    folder.mkdir(parents=True)
    model.config.auto_map = {
        "AutoConfig": "modeling_fw_fairseq.FastWeightHFConfig",
        "AutoModelForCausalLM": "modeling_fw_fairseq.FastWeightForCausalLM",
    }
    for name, value in model.config.to_dict().items():
        if name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(model.generation_config, name, value)
    model.generation_config._from_model_config = False
    model.save_pretrained(folder)
    (folder / CODE_FILE).write_text(standalone.code(), encoding="utf-8")
    if tokenizer is None:
        word_tokenizer(dictionary).save_pretrained(folder)
    else:
        for name in TOKENIZER_FILES:
            if (Path(tokenizer) / name).exists():
                shutil.copy(Path(tokenizer) / name, folder / name)
    for path in folder.iterdir():  # transformers writes weights that only their owner may read
        path.chmod((folder / CODE_FILE).stat().st_mode)


def word_tokenizer(dictionary):
    """Returns a tokenizer that splits at spaces and puts an end of sentence before each text. It decodes with a space before each
    word, also the first one, so that it continues a prompt, and no spaces where a text that was split at its marks has none."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    eos = dictionary.eos_word
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(dictionary.symbols)}, unk_token=dictionary.unk_word))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{eos} $A", special_tokens=[(eos, dictionary.eos())])
    joined = [decoders.Replace(f" {mark}", mark) for mark in MARKS_AFTER] + [decoders.Replace(f"{mark} ", mark) for mark in "(["]
    joined += [decoders.Replace(" @-@ ", "-"), decoders.Replace(" @,@ ", ","), decoders.Replace(" @.@ ", ".")]  # of WikiText
    if any(word.endswith("@@") for word in dictionary.symbols):
        joined.insert(0, decoders.Replace("@@ ", ""))  # pieces of words
    spaced = decoders.Replace(Regex(f"^(?!{re.escape(eos)})"), " ")
    tokenizer.decoder = decoders.Sequence([spaced, decoders.Fuse(), *joined])
    special = {"bos_token": eos, "eos_token": eos, "unk_token": dictionary.unk_word, "pad_token": dictionary.pad_word}
    names = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", model_input_names=names, **special)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = make_parser(PROG, __doc__, EXAMPLE)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint of fast_weight_lm, with any mixers")
    parser.add_argument("output", metavar="OUTPUT", help="the folder to write")
    parser.add_argument("--data", metavar="FOLDER", help="the folder of dict.txt; default: the data folder of the training")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="the tokenizer of the GPT-2 that fw-convert made CHECKPOINT of")
    parser.add_argument("--force", action="store_true", help="replace OUTPUT if it is an earlier export")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    args = vars(parser().parse_args(arguments))
    with mistakes_as_sentences(PROG):
        if importlib.util.find_spec("transformers") is None:
            raise Mistake("transformers is missing; install fw_fairseq with the extra [huggingface]")
        model = export(**args)
    print(f"{args['output']}: {model.num_parameters():,} parameters, {', '.join(dict.fromkeys(model.config.mixers))}")


if __name__ == "__main__":
    main()
