"""What happens when fairseq imports this directory: its tools are fixed, models, tasks and criterions are registered."""

from . import fairseq_fixes, mistakes

fairseq_fixes.apply()
mistakes.shorten()

from . import criterions, models, tasks, until_solved  # noqa: E402, F401
