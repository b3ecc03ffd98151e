"""How many files a reader passes on the way of a call: ``python tests/walks.py``.

A stop is a run of calls within one file of fw_fairseq. The walks are those of a decoder layer to the first launch of a kernel and
to the first chunk on a CPU, and of a command line to a built language model of four layers.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = f"{ROOT}/fw_fairseq/"
OPTIONS = [
    "--task",
    "stateful_language_modeling",
    "--arch",
    "fast_weight_lm",
    "--decoder-layers",
    "4",
    "--decoder-embed-dim",
    "32",
    "--decoder-ffn-embed-dim",
    "32",
    "--decoder-attention-heads",
    "2",
    "--tokens-per-sample",
    "32",
    "--batch-size",
    "2",
    "--lr",
    "0.1",
    "--cpu",
]


class Walk(NamedTuple):
    """The files of consecutive calls, and with equal ones in a row as one."""

    calls: list[str]

    @property
    def stops(self) -> list[str]:
        return [file for file, _ in itertools.groupby(self.calls)]

    @property
    def files(self) -> list[str]:
        """In the order in which they are first entered."""
        return list(dict.fromkeys(self.calls))


def walk(run: Callable[[], object], until: Callable[[object], bool] = lambda frame: False) -> Walk:
    """The calls of ``run`` in this thread, up to the first frame that ``until`` is true for, which counts."""
    calls: list[str] = []
    seen = threading.Event()

    def trace(frame, event, _):
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(PACKAGE) and not seen.is_set():
            calls.append(file[len(PACKAGE) :])
            if until(frame):
                seen.set()
        return None

    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(None)
    return Walk(calls)


def layer():
    """A layer of a decoder with gated_delta, and its input."""
    import torch
    from fairseq.models.transformer import TransformerConfig

    from fw_fairseq.config import FastWeightConfig
    from fw_fairseq.modules import FastWeightDecoderLayer

    cfg = TransformerConfig()
    cfg.decoder.embed_dim, cfg.decoder.ffn_embed_dim, cfg.decoder.attention_heads = 32, 32, 2
    config = FastWeightConfig(update_rule="gated_delta")
    torch.manual_seed(0)
    built = FastWeightDecoderLayer(cfg, config, "fast_weight", 0, no_encoder_attn=True)
    return built, torch.randn(40, 2, 32)


def to_a_kernel() -> Walk:
    """From ``FastWeightDecoderLayer.forward`` to the launch, but at the first call."""
    from hostcuda import Recorder

    from fw_fairseq.modules.streams import LayerStates
    from fw_fairseq.ops.kernels import launch

    built, x = layer()
    recorder = Recorder()
    with launch.use(recorder):
        built(x, states=LayerStates())  # the first call of its kind, which prepares the launch
        recorder.taken()
        return walk_of(built, x, lambda: bool(recorder.launches))


def to_a_chunk() -> Walk:
    """From ``FastWeightDecoderLayer.forward`` to the first call in ``ops/chunkwise/chunk.py``."""
    built, x = layer()
    return walk_of(built, x, lambda: False, "ops/chunkwise/chunk.py")


def walk_of(built, x, over: Callable[[], bool], last: str = "") -> Walk:
    from fw_fairseq.modules.streams import LayerStates

    states = LayerStates()
    return walk(lambda: built(x, states=states), lambda frame: over() or (bool(last) and frame.f_code.co_filename.endswith(last)))


def to_a_model() -> Walk:
    """From the command line to a language model."""
    import tempfile

    from fairseq import options, tasks

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "dict.txt").write_text("".join(f"w{i} 1\n" for i in range(60)))
        given = [folder, "--user-dir", PACKAGE.rstrip("/"), "--update-rule", "gated_delta", *OPTIONS]
        import fw_fairseq.models  # noqa: F401

        def run():
            parser = options.get_training_parser()
            from fairseq.dataclass.utils import convert_namespace_to_omegaconf

            cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, given))
            tasks.setup_task(cfg.task).build_model(cfg.model)

        return walk(run)


WALKS = {"layer to kernel": to_a_kernel, "layer to chunk": to_a_chunk, "command line to model": to_a_model}


def main() -> None:
    for name, run in WALKS.items():
        found = run()
        print(f"{name}: {len(found.calls)} calls, {len(found.stops)} stops in {len(found.files)} files")
        for file in found.files:
            print(f"    {found.stops.count(file):4} {file}")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
