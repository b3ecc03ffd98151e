"""fairseq-eval-lm that writes its memory after every EVERY tokens, lines of TOKENS RESIDENT ANONYMOUS in bytes:
measure.py EVERY FILE ARGUMENTS OF FAIRSEQ-EVAL-LM"""

import re
import sys
from pathlib import Path

from fairseq.models import FairseqLanguageModel
from fairseq_cli.eval_lm import cli_main
from torch.nn.modules.module import register_module_forward_hook


class Watch:
    def __init__(self, every: int, file):
        self.every, self.file, self.tokens = every, file, 0

    def __call__(self, module, inputs, output) -> None:
        if not isinstance(module, FairseqLanguageModel):
            return
        before, self.tokens = self.tokens, self.tokens + output[0].shape[:2].numel()
        if before // self.every != self.tokens // self.every:
            status = Path("/proc/self/status").read_text()
            sizes = (1024 * int(re.search(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE)[1]) for name in ("VmRSS", "RssAnon"))
            print(self.tokens, *sizes, file=self.file, flush=True)


with open(sys.argv[2], "w") as file:
    register_module_forward_hook(Watch(int(sys.argv[1]), file))
    sys.argv[1:] = sys.argv[3:]
    cli_main()
