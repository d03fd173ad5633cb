"""Results of functions of an object, cached on the object itself and freed with it."""

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

Owner = TypeVar("Owner")
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

MAX_RESULTS = 8  # cached results per object and function: the latest ones


def cached_method(
    function: Callable[Concatenate[Owner, Arguments], Result],
) -> Callable[Concatenate[Owner, Arguments], Result]:
    """Cache results of a function on its first argument, a frozen object; do not copy them."""

    @functools.wraps(function)
    def cached(owner: Owner, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        results = vars(owner).setdefault(f"_{function.__qualname__}", {})
        key = (args, *kwargs.items())
        if key not in results:
            if len(results) == MAX_RESULTS:
                del results[next(iter(results))]  # the oldest result
            results[key] = function(owner, *args, **kwargs)
        result: Result = results[key]
        return result

    return cached


def share_results(method: Callable[..., object], owner: object, other: object) -> None:
    """Let `other` share the cached results of a method of `owner`, also later results."""
    name = f"_{method.__qualname__}"
    vars(other)[name] = vars(owner).setdefault(name, {})
