"""The error for what a user gave."""


class Mistake(ValueError):
    """Something that the user gave is not allowed: an option, an argument or a file. The message is one sentence that names it and
    says what is allowed. Commands show the sentence alone; any other exception keeps its traceback."""

    exit_code = 1  # of a command that ends with it


HINT = " (FW_TRACEBACK=1 shows where)"  # after an error that is no Mistake: any code may have raised it
