"""Times of a prompt that is processed in chunks: later chunks attend to more tokens.

A chunk of n tokens after p tokens of its prompt takes a + b n + c (n p + n^2 / 2) + g p seconds:
a per chunk, b per token, c per pair of a token and a token that it attends to, and g per earlier
token, whose keys and values are read or rebuilt.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pipejax.base.array_types import Array, Float, Num, NumpyArray
from pipejax.base.checks import as_floats, wrong
from pipejax.costs import array_functions as xp
from pipejax.costs.costs import Costs

PerStage = float | Sequence[float] | Float[NumpyArray, " stages"]
Sizes = Num[NumpyArray, "*batch chunks"] | Num[Array, "*batch chunks"]


def chunk_costs(
    sizes: Sequence[float] | Sizes,
    num_stages: int,
    *,
    fixed: PerStage = 0.0,
    per_token: PerStage,
    per_pair: PerStage,
    per_prefix_token: PerStage = 0.0,
    latency: float = 0.0,
    transmit_per_token: float = 0.0,
) -> Costs:
    """Return the costs of a prompt's chunks on every stage, for the schedule `chunked-prefill`.

    Args:
      sizes: (..., chunks) tokens of each chunk; the first axes are a batch for `makespans`.
      num_stages: S.
      fixed: a, time per chunk: a number, or one for each stage [s].
      per_token: b, time per token [s].
      per_pair: c, time per pair of a token and an earlier token [s].
      per_prefix_token: g, time per token before the chunk, to read or rebuild its keys [s].
      latency: latency of a message [s].
      transmit_per_token: transmit time of a message per token of its chunk [s].

    Returns:
      Costs with forward (..., stages, chunks) and transmit (..., 2, 1, stages - 1, chunks).

    Raises:
      ValueError: if a time is negative or not finite, or there are not as many times as stages.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("chunked-prefill", num_workers=4, num_microbatches=1, slices=3)
      >>> costs = pj.costing.chunk_costs([50, 30, 20], 4, per_token=0.01, per_pair=1e-4)
      >>> costs.forward[0].round(3).tolist()
      [0.625, 0.495, 0.38]
      >>> round(pj.evaluate(table, costs).makespan, 3)  # 4 stages of 0.625, then 0.495 and 0.38
      3.375
    """
    work = {"fixed": fixed, "per_token": per_token, "per_pair": per_pair}
    times = checked_times(num_stages, **work, per_prefix_token=per_prefix_token)
    message_times = checked_times(1, latency=latency, transmit_per_token=transmit_per_token)
    (latency,), (transmit_per_token,) = (time.tolist() for time in message_times)
    tokens = sizes if hasattr(sizes, "shape") else np.asarray(sizes, float)
    return Costs(
        forward=chunk_seconds(tokens, *times),
        latency=latency,
        transmit=sent(tokens, transmit_per_token, num_stages),
    )


def checked_times(count: int, **times: PerStage) -> list[Float[NumpyArray, " stages"]]:
    """Check named times, and broadcast each to an array of `count` stages."""
    arrays = []
    for name, time in times.items():
        values = as_floats(time, name)
        if values.shape not in ((), (count,)):
            raise wrong(name, f"must be a number or one for each of {count} stages, got {time!r}")
        if not (np.isfinite(values) & (values >= 0)).all():
            raise wrong(name, f"must be finite numbers of at least 0, got {time!r}")
        arrays.append(np.broadcast_to(values, count).astype(float))
    return arrays


def chunk_seconds(sizes: Any, fixed: Any, per_token: Any, per_pair: Any, per_prefix: Any) -> Any:
    """Return each chunk's time a + b n + c (n p + n^2 / 2) + g p [s], (..., stages, chunks)."""
    # The times a, b, c and g have the shape (stages), n and p the shape (..., chunks).
    prefix = xp.cumsum(sizes, axis=-1) - sizes  # p: chunks of 50 30 20 tokens follow 0 50 80
    token_pairs = sizes * (prefix + sizes / 2)
    a, b, c, g = (time[:, None] for time in (fixed, per_token, per_pair, per_prefix))
    n, p, pairs = (array[..., None, :] for array in (sizes, prefix, token_pairs))
    return a + b * n + g * p + c * pairs


def sent(sizes: Any, per_token: float, num_stages: int) -> Any:
    """Return the transmit time of each chunk's message, (..., 2, 1, boundaries, chunks)."""
    shape = (*sizes.shape[:-1], 2, 1, num_stages - 1, sizes.shape[-1])
    return xp.broadcast_to(per_token * sizes[..., None, None, None, :], shape)
