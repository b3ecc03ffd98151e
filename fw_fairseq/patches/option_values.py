"""Values of options

Options that come from a checkpoint, `--model-overrides` or Hydra are refused in the words of the command line.
"""

from __future__ import annotations

from fairseq import models, registry, tasks
from fairseq.dataclass import utils as dataclass_utils
from omegaconf.errors import OmegaConfBaseException

from .. import Mistake
from ..config import check_values
from .literals import plain
from .replacing import replaces


@replaces(dataclass_utils, "merge_with_parent")
@replaces(models, "merge_with_parent")
@replaces(tasks, "merge_with_parent")
@replaces(registry, "merge_with_parent")
def say_what_the_command_line_says(original, options, cfg, *args, **kwargs):
    """A value that an option cannot have ends in omegaconf's traceback if it does not come from the command line. Now the sentence
    of the command line is shown."""
    try:
        return original(options, cfg, *args, **kwargs)
    except OmegaConfBaseException as error:
        check_values(options if isinstance(options, type) else type(options), plain(cfg))
        raise Mistake(str(error).splitlines()[0]) from error
