"""`python -m regard` and the command `regard`: the command line of the engine, whole."""

from __future__ import annotations

import signal
import sys

from . import _regard


def main() -> None:
    """Runs the command with the arguments of this process, and ends it."""
    # Python's own handler waits for the interpreter, which waits for the command.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if not hasattr(_regard, "main"):
        sys.exit("this build of regard has no command line: it was made without the feature `cli`")
    sys.exit(_regard.main(["regard", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
