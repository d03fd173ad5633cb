"""`pipejax tune chunks`: where to cut a long prompt, so that its first token comes soonest."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

import pipejax as pj
from pipejax.base.checks import resolve_choice
from pipejax.cli.options.option import options
from pipejax.cli.options.run import LinkOptions
from pipejax.cli.options.values import Count, CountIfGiven, Seed, Text, TimeLimit, parse_seconds
from pipejax.cli.output.answer import Answer, best_so_far
from pipejax.cli.output.numbers import seconds
from pipejax.cli.output.progress import progress
from pipejax.cli.output.report import FOUND, grid, pick, savings, search_end

if TYPE_CHECKING:
    from pipejax.search.found import Found
    from pipejax.search.tuning.chunks import PromptChunks

# letters of --stage-times: arguments of `pj.search.chunks`
LETTERS = {"a": "fixed", "b": "per_token", "c": "per_pair", "g": "per_prefix_token"}
TIMES = "a=2ms,b=5us,c=0.7ns"


@options
def chunks(
    *,
    links: LinkOptions = LinkOptions(),
    prompt: Count,
    stage_times: Text = None,
    workers: CountIfGiven = None,
    num_chunks: CountIfGiven = None,
    multiple: Count = 1,
    latency: Text = None,
    transmit: Text = None,
    seed: Seed = 0,
    time_limit: TimeLimit = "60",
) -> Answer:
    """Cut a prompt into the chunks whose first token comes soonest, one stage on each worker.

    A chunk of n tokens behind p tokens takes a + b n + c (n p + n^2 / 2) + g p on each stage.

    Options:
      stage_times: a of any chunk, b of each token, c of each pair of a token and one before it, g
        of each token of the prefix that is read or rebuilt; 0 if not given.
      num_chunks: the best number from 1 to 64 if not given.
      multiple: but for the last one.

    Example:
      pipejax tune chunks -P 4 --prompt 65536 -T a=2ms,b=5us,c=0.7ns
    """
    if workers is None or stage_times is None:
        raise ValueError(f"tune chunks needs --workers P and --stage-times {TIMES}")
    link = links.links()
    messages = {"--latency": latency or "0", "--transmit": transmit or "0"}
    latency_seconds, by_token = (parse_seconds(text, name) for name, text in messages.items())

    def report(result: "Found[PromptChunks]") -> Answer:
        sizes, durations = result.best.sizes, np.asarray(result.best.costs.forward)[0]
        best = {"sizes": sizes, "ends": np.cumsum(sizes), "seconds": durations}
        data = {"workers": workers, "prompt": prompt, "link": link.model, "best": best}
        details = {"chunks": [_chunks(best)], "search": search_end(result, "cuts")}
        return Answer(data | pick(result, FOUND), _view(data, result), details=details)

    with best_so_far(report) as keep, progress("cutting", None) as bar:
        result = pj.search.chunks(
            prompt,
            workers,
            **_parse_times(stage_times),
            latency=latency_seconds,
            transmit_per_token=by_token,
            num_chunks=num_chunks,
            multiple=multiple,
            link=link,
            seed=seed,
            time_limit=parse_seconds(time_limit, "--time-limit"),
            on_progress=bar.tell,
            on_best=keep,
        )
    return report(result)


def _parse_times(text: str) -> dict[str, Any]:
    """Read times such as a=2ms,b=5us,c=0.7ns; those of other letters are 0."""
    times: dict[str, Any] = {}
    for letter, _, value in (entry.partition("=") for entry in text.split(",")):
        name = LETTERS[resolve_choice(letter.strip(), tuple(LETTERS), "--stage-times: letter")]
        if name in times:
            raise ValueError(f"--stage-times must have each letter once, got {text!r}")
        times[name] = parse_seconds(value.strip(), f"--stage-times: {letter.strip()}")
    return dict.fromkeys(LETTERS.values(), 0.0) | times


def _view(data: Mapping[str, Any], result: "Found[PromptChunks]") -> Iterator[object]:
    sizes = data["best"]["sizes"]
    yield (
        f"[bold]{seconds(result.value)}[/] until the first token with {len(sizes)} chunks of "
        f"{min(sizes)} to {max(sizes)} tokens on {data['workers']} workers"
    )
    yield savings("chunks", "first token", result.baselines, result.value)


def _chunks(best: Mapping[str, Any]) -> object:
    count, durations = len(best["sizes"]), map(seconds, best["seconds"])
    columns = [("tokens", best["sizes"]), ("ends at", best["ends"]), ("first stage", durations)]
    return grid([("chunk", range(count)), *columns])
