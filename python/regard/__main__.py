"""Entry point of `python -m regard` and of the command `regard`."""

from __future__ import annotations

import signal
import sys

from . import _regard


def main() -> None:
    """Run the command with `sys.argv` and exit. `jobs` is a command of the Python package alone."""
    if sys.argv[1:2] == ["jobs"]:
        from .jobs import main as jobs

        sys.exit(jobs(sys.argv[2:]))
    # Python's SIGINT handler runs only after the native command returns; the default handler stops it at once.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if not hasattr(_regard, "main"):
        sys.exit("this build of regard has no command line; build it with the feature `cli`")
    sys.exit(_regard.main(["regard", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
