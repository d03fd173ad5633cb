"""Search for the cut of a prompt into chunks that yields its first output token earliest.

With few chunks, most workers are idle at the start and the end. With many chunks, the fixed cost of
a chunk is paid often. Later tokens attend to more tokens, so chunks of equal time get smaller. For
each number of chunks, the search starts from the best of several cuts. It moves tokens from chunk
to chunk as long as that shortens the makespan.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import brentq

from pipejax.analysis.runs.evaluate import evaluate
from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.base.checks import MismatchError, check_local_search, whole_number
from pipejax.base.display import short_repr
from pipejax.base.progress import OnProgress, telling
from pipejax.costs.chunks import PerStage, checked_times, chunk_costs
from pipejax.costs.costs import Costs
from pipejax.engine.batched.makespans import makespans
from pipejax.engine.lowering.lower import lower
from pipejax.schedules.naming import build
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable
from pipejax.search.found import GAP, TIME_LIMIT, Found
from pipejax.search.orders.permutations import LocalSearch
from pipejax.search.tuning.rounding import improve, swaps

MAX_CHUNKS = 64  # default of the largest number of chunks
STARTS, NUM_IMPROVED = 16, 2  # number of first cuts, and number of the best that are improved
MIN_TOKENS = 1e-6  # smallest size of a chunk of equal time [tokens]
Cuts = Int[NumpyArray, "cuts chunks"]


@short_repr
class PromptChunks(NamedTuple):
    """A prompt in chunks.

    Attributes:
      sizes: (chunks) tokens of each chunk.
      table: the schedule `chunked-prefill` with this number of chunks.
      costs: costs of the table.
    """

    sizes: tuple[int, ...]
    table: ScheduleTable
    costs: Costs


def chunks(
    tokens: int,
    num_workers: int,
    *,
    fixed: PerStage = 0.0,
    per_token: PerStage,
    per_pair: PerStage,
    per_prefix_token: PerStage = 0.0,
    latency: float = 0.0,
    transmit_per_token: float = 0.0,
    num_chunks: int | None = None,
    multiple: int = 1,
    link: str | Links = "delay",
    seed: int = 0,
    time_limit: float | None = TIME_LIMIT,
    on_progress: OnProgress | None = None,
    on_best: Callable[[Found[PromptChunks]], object] | None = None,
) -> Found[PromptChunks]:
    """Search the cut of a prompt into chunks that yields its first output token earliest.

    A chunk of n tokens after p tokens takes a + b n + c (n p + n^2 / 2) + g p on each stage.
    Numbers of chunks are tried in the order of their lower bounds, until no further number can save
    a thousandth of the makespan.

    Args:
      tokens: number of tokens of the prompt.
      num_workers: P; each worker has one stage.
      fixed: a, time of a chunk [s]: a number, or one per worker, as all times.
      per_token: b, time of a token [s].
      per_pair: c, time of a pair of a token and an earlier token [s].
      per_prefix_token: g, time of a token before the chunk, which is read or rebuilt [s].
      latency: latency of a message [s].
      transmit_per_token: transmit time of a message per token of its chunk [s].
      num_chunks: K; default: from 1 to 64.
      multiple: divisor of all chunk sizes except the last.
      link: link model, or `Links`.
      seed: seed of the starts.
      time_limit: time after which no further number of chunks is tried [s]; None for no limit.
      on_progress: called with each number of chunks, and the best makespan so far as a text.
      on_best: called with the result so far after each number of chunks.

    Returns:
      The best cut. The lower bound holds for all requested numbers of chunks. Baselines have the
      same number of chunks, of "equal sizes" or of "equal times".

    Raises:
      ValueError: if a count is no whole number of at least 1, a time is no finite number of at
        least 0, there are more chunks than multiples, or seed or time_limit is negative.

    Example:
      >>> import pipejax as pj
      >>> cuts = pj.search.chunks(4096, 4, fixed=1e-3, per_token=1e-5, per_pair=5e-9, num_chunks=4)
      >>> cuts.best.sizes, f"{1e3 * cuts.value:.2f} ms"
      ((1506, 1031, 836, 723), '152.10 ms')
      >>> [f"{1e3 * cuts.baselines[name]:.2f} ms" for name in ("equal sizes", "equal times")]
      ['175.67 ms', '152.10 ms']
    """
    counts = {"tokens": tokens, "num_workers": num_workers, "multiple": multiple}
    tokens, num_workers, multiple = (whole_number(v, name) for name, v in counts.items())
    _, seed = check_local_search(0, seed, time_limit)
    max_chunks = -(-tokens // multiple)
    if num_chunks is not None and whole_number(num_chunks, "num_chunks") > max_chunks:
        raise MismatchError(
            f"num_chunks must be at most the multiples of {multiple} in {tokens} tokens, "
            f"{max_chunks}, got {num_chunks}",
            "num_chunks",
        )
    times: dict[str, Any] = {"fixed": fixed, "per_token": per_token, "per_pair": per_pair}
    times["per_prefix_token"] = per_prefix_token
    messages = {"latency": latency, "transmit_per_token": transmit_per_token}
    numbers = range(1, min(max_chunks, MAX_CHUNKS) + 1) if num_chunks is None else [num_chunks]
    links = Links.resolve(link)
    search = _ChunkSearch(tokens, num_workers, multiple, times, messages, links, seed, numbers)
    with telling("cut", on_progress) as tell_progress:

        def tell(done: float, total: float | None, text: str) -> None:
            tell_progress(done, total, text)
            if on_best is not None:
                on_best(search.result("interrupted"))

        search.step(0)
        tell(0, len(numbers), f"best {search.value:.6g} s")
        return search.run(len(numbers) - 1, time_limit, tell, GAP)


class _ChunkSearch(LocalSearch[PromptChunks]):
    """State of a search: the best cut so far, and a lower bound for each number of chunks."""

    def __init__(
        self,
        tokens: int,
        num_workers: int,
        multiple: int,
        compute_times: dict[str, Any],
        messages: dict[str, float],
        links: Links,
        seed: int,
        counts: Sequence[int],
    ) -> None:
        super().__init__(seed)
        self.tokens, self.num_workers, self.multiple = tokens, num_workers, multiple
        self.times = checked_times(num_workers, **compute_times)
        self.latency, self.rate = (times[0] for times in checked_times(1, **messages))
        self.time_arguments: dict[str, Any] = compute_times | messages
        self.links, self.value = links, np.inf
        self._numbers = sorted((self._bound(count), count) for count in counts)
        self.lower_bound, _ = self._numbers[0]

    def step(self, iteration: int) -> None:
        """Try the number of chunks with the next lowest bound, if it can save enough."""
        bound, count = self._numbers[iteration]
        if bound < self.value * (1 - GAP):
            self._search_cuts(count)
            self.lower_bound = min(self.lower_bound, self.value)

    def best_so_far(self) -> tuple[PromptChunks, float]:
        return self.best, self.value

    def _bound(self, count: int) -> float:
        """Return a lower bound [s] on the time of all cuts of a prompt into `count` chunks."""
        # The path of a chunk has all earlier chunks on the first stage, this chunk on all stages,
        # and all later chunks on the last stage. The path bound is the mean path over chunks. The
        # work bound is the work of one stage, plus fixed time and latency on all other stages.
        a, b, c, _ = self.times  # (stages) times of a chunk, a token, a pair of tokens [s]
        stage_work = count * a + b * self.tokens + c * self.tokens**2 / 2  # without prefixes
        hops = self.num_workers - 1
        min_work = count * a.min() + b.min() * self.tokens + c.min() * self.tokens**2 / 2
        path_bound = (1 - 1 / count) * min_work + stage_work.sum() / count
        path_bound += hops * (self.latency + self.rate * self.tokens / count)
        work_bound = (stage_work - a).max() + a.sum() + (hops * self.latency)
        return float(max(path_bound, work_bound, self._prefix_bound(count)))

    def _prefix_bound(self, count: int) -> float:
        """Return a lower bound [s] from the longest chunk on all stages, and prefix costs."""
        # Let h(L) = b L + c L^2 / 2 be the work of the first L tokens, N all tokens, and t the work
        # of the longest chunk. Within a chunk of n tokens, L exceeds the prefix by at most n. So
        # the integral of L dh over the chunk is at most (prefix + n) t. The sum over all chunks
        # gives: all prefixes together have at least (integral of L dh) / t - N tokens.
        a, b, c, g = (time.min() for time in self.times)  # g: time of a token before the chunk
        work = b * self.tokens + c * self.tokens**2 / 2
        integral = b * self.tokens**2 / 2 + c * self.tokens**3 / 3
        hops = self.num_workers - 1
        # take the t at which g (integral / t - N) + (P - 1) t is smallest; beyond integral / N only
        # t counts. The longest of `count` chunks takes at least the mean and at most all work.
        optimum = math.sqrt(g * integral / hops) if hops else math.inf
        longest = min(max(min(optimum, integral / self.tokens), work / count), work)
        prefix_tokens = max(integral / longest - self.tokens, 0.0) if longest > 0 else 0.0
        other_stages = self.times[0].sum() - a + hops * (longest + self.latency)
        return float(count * a + work + g * prefix_tokens + other_stages)

    def _search_cuts(self, count: int) -> None:
        """Search the sizes of `count` chunks, from equal sizes, equal times and random sizes."""
        size = {"num_workers": self.num_workers, "num_microbatches": 1}
        table = build("chunked-prefill", **size, slices=count)
        self.program = lower(table, link=self.links)
        equal_sizes, time_sizes = np.full(count, self.tokens / count), self._equal_times(count)
        random = time_sizes * np.exp(self.rng.normal(0, 0.3, (STARTS - 2, count)))
        random *= self.tokens / random.sum(axis=1, keepdims=True)
        cuts = self._round_sizes(np.stack([equal_sizes, time_sizes, *random]))
        values = self._values(cuts)
        best, seconds = self._improve_sizes(cuts[values.argsort(kind="stable")[:NUM_IMPROVED]])
        sizes = best[seconds.argmin()]
        if seconds.min() < self.value:
            equal_values = values[:2].tolist()
            self.baselines = dict(zip(("equal sizes", "equal times"), equal_values, strict=True))
            costs = chunk_costs(sizes, self.num_workers, **self.time_arguments)
            self.best = PromptChunks(tuple(map(int, sizes)), table, costs)
            self.value = evaluate(table, costs, link=self.links).makespan

    def _equal_times(self, count: int) -> Float[NumpyArray, " chunks"]:
        """Return chunk sizes [tokens] that take equal times and add up to the prompt."""
        _, b, c, g = (float(time.mean()) for time in self.times)
        if not b + c > 0:
            return np.full(count, self.tokens / count)

        def sizes(seconds: float) -> Float[NumpyArray, " chunks"]:
            """Return the sizes of chunks that take so many seconds on a stage [tokens]."""
            chunks = np.zeros(count)
            for chunk in range(count):
                prefix = chunks.sum()
                slope, duration = b + c * prefix, max(seconds - g * prefix, 0.0)
                # the positive root of c n^2 / 2 + slope n = duration, without cancellation
                denominator = slope + math.sqrt(slope**2 + 2 * c * duration)
                root = 2 * duration / denominator if denominator > 0 else 0.0
                chunks[chunk] = max(root, MIN_TOKENS)
            return chunks

        def excess_tokens(share: float) -> float:  # `share` of the time of the prompt in one chunk
            return sizes(share * total_seconds).sum() - self.tokens

        total_seconds = b * self.tokens + c * self.tokens**2 / 2
        return sizes(brentq(excess_tokens, 0.0, 2.0, xtol=1e-14) * total_seconds)

    def _round_sizes(self, sizes: Float[NumpyArray, "cuts chunks"]) -> Cuts:
        """Round chunk sizes to positive multiples of `multiple`; the last chunk takes the rest."""
        count, num_multiples = np.shape(sizes)[-1], math.ceil(self.tokens / self.multiple)
        ends = np.round(np.cumsum(sizes, axis=-1) / self.multiple).astype(int)
        # at least one multiple per chunk: 0 1 1 5 becomes 1 2 3 5
        chunk = np.arange(count)
        ends = np.maximum.accumulate(np.maximum(ends, 1 + chunk) - chunk, axis=-1) + chunk
        ends = np.minimum(ends, num_multiples - count + 1 + chunk)
        ends = np.minimum(self.multiple * ends, self.tokens)
        ends[:, -1] = self.tokens
        return np.diff(ends, prepend=0, axis=-1)

    def _values(self, cuts: Cuts) -> Float[NumpyArray, " cuts"]:
        self.evaluated += len(cuts)
        costs = chunk_costs(cuts.astype(float), self.num_workers, **self.time_arguments)
        return np.asarray(makespans(self.program, costs, batch_size=len(cuts)))

    def _improve_sizes(self, cuts: Cuts) -> tuple[Cuts, Float[NumpyArray, " cuts"]]:
        """Move tokens between chunks, in ever smaller steps, as long as that saves time."""
        moves = -self.multiple * swaps(cuts.shape[1])  # rows such as -1 0 1: from chunk 0 to 2

        def values(points: Cuts, _: Any) -> Float[NumpyArray, " cuts"]:
            is_legal = (points > 0).all(axis=1)
            seconds = np.full(len(points), np.inf)
            if is_legal.any():
                seconds[is_legal] = self._values(points[is_legal])
            return seconds

        step, owner = max(1, int(cuts.mean()) // (4 * self.multiple)), np.arange(len(cuts))
        while True:
            cuts, seconds = improve(cuts, owner, step * moves, values)
            if step == 1:
                return cuts, seconds
            step //= 2
