"""Runs fairseq-eval-lm and writes its memory after every EVERY tokens to FILE, as lines of TOKENS RESIDENT (bytes).

measure.py EVERY FILE ARGUMENT of fairseq-eval-lm...
"""

import sys

from fairseq.models import FairseqLanguageModel
from fairseq_cli.eval_lm import cli_main
from torch.nn.modules.module import register_module_forward_hook

from fw_fairseq.tools.bench.contest import process_memory


class Watch:
    def __init__(self, every: int, file):
        self.every, self.file, self.tokens = every, file, 0

    def __call__(self, module, inputs, output) -> None:
        if not isinstance(module, FairseqLanguageModel):
            return
        before, self.tokens = self.tokens, self.tokens + output[0].shape[:2].numel()
        if before // self.every != self.tokens // self.every:
            print(self.tokens, process_memory("VmRSS"), file=self.file, flush=True)


with open(sys.argv[2], "w") as file:
    register_module_forward_hook(Watch(int(sys.argv[1]), file))
    sys.argv[1:] = sys.argv[3:]
    cli_main()
