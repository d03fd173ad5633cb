"""Results of functions of an object, cached on the object itself and freed with it."""

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

Owner = TypeVar("Owner")
Given = ParamSpec("Given")
Found = TypeVar("Found")

MOST = 8  # answers of one function that an object keeps: the latest ones


def cached_method(
    function: Callable[Concatenate[Owner, Given], Found],
) -> Callable[Concatenate[Owner, Given], Found]:
    """Cache a function of a frozen object on that object, by its other (hashable) arguments."""
    # Results are shared, so callers must not change them.

    @functools.wraps(function)
    def once(owner: Owner, /, *args: Given.args, **kwargs: Given.kwargs) -> Found:
        answers = vars(owner).setdefault(f"_{function.__qualname__}", {})
        key = (args, *kwargs.items())
        if key not in answers:
            if len(answers) == MOST:
                del answers[next(iter(answers))]
            answers[key] = function(owner, *args, **kwargs)
        answer: Found = answers[key]
        return answer

    return once
