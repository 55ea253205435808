"""The entry point of the command ``ppd-eval``, which names the extra that it needs."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command.

    A module that is missing ends the process with a message of one line.
    """
    try:
        from .cli import main as run
    except ModuleNotFoundError as error:
        sys.exit(
            f"ppd-eval needs the extra `eval`, of which {error.name} is missing: in a checkout, "
            "pip install '.[eval]'"
        )
    run()
