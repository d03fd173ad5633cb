"""What is to be done where the program ends in the middle of it: files put right, results said.

The library handles no signals: a KeyboardInterrupt unwinds as any exception does. The command line
ends without unwinding (`pipejax.cli.ending`), and does what stands here instead.
"""

import contextlib
from collections.abc import Callable, Iterator

Action = Callable[[], str | None]
_actions: list[Action] = []


@contextlib.contextmanager
def if_interrupted(action: Action) -> Iterator[None]:
    """Have something done if the command line is interrupted in this block.

    It is done by another thread, while the main one stands still or is in a long call. What it
    returns, if anything, is what the line about the interruption says besides.
    """
    _actions.append(action)
    try:
        yield
    finally:
        _actions.remove(action)


def act() -> str | None:
    """Do all of it, the innermost first; return what the first of them has to say."""
    said = [action() for action in reversed(_actions.copy())]
    return next(filter(None, said), None)
