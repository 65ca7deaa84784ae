"""Exit codes of the command line, and the error of a run that ends with one."""

USER_ERROR = 2
INTERRUPTED = 130


class RunEndedError(RuntimeError):
    """The run has ended without success; `exit_code` is that of the command."""

    exit_code = 1
