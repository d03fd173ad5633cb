"""The order of transfers: PyTorch's lowering, greedy orders, and the search.

All tables that PyTorch's schedule classes generate at some sizes, at three sizes of a message.

    make test-runtimes  # makes an environment with PyTorch
    .venv-runtimes/bin/python -m benchmarks.transfer_order --out results/transfer_order.json
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

import pipejax as pj

MESSAGES = (0.1, 0.5, 1.0)  # seconds, beside ops of one second


def tables(workers):
    """All tables that PyTorch generates, with twice as many microbatches as workers."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "runtimes"))
    import torch_tables as torch_own

    for name, ranks, per_rank, count, actions in torch_own.grid(
        workers, (1, 2), lambda ranks: (2 * ranks,)
    ):
        named = f"{name} P={ranks} V={per_rank} M={count}"
        yield pj.ScheduleTable.from_rows(torch_own.texts(actions), name=named)


def searched(table, message, queues, seconds):
    """Makespans of one table: baselines, search and bound."""
    costs = pj.Costs(forward=1.0, input_grad=1.0, weight_grad=1.0, transmit=message)
    makespans = {"table": table.name, "message": message, "queues": queues}
    links = pj.Links("rendezvous", queues)
    result = pj.search.messages(
        table, costs, link=links, iterations=10**6, time_limit=seconds, gap=0.0
    )
    makespans |= {"search": result.value, "evaluated": result.evaluated, "stopped": result.stopped}
    return makespans | {
        "pytorch": result.baselines["pytorch"],
        "greedy": result.baselines["by need"],
        "bound": result.lower_bound,
    }


def summary(rows):
    """Lines by message size: what is saved of PyTorch's makespan, and how far bounds are."""
    head = "queues", "message", "tables", "greedy", "search", "optimal", "gap"
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    for queues in sorted({row["queues"] for row in rows}):
        for message in MESSAGES:
            chosen = [r for r in rows if (r["queues"], r["message"]) == (queues, message)]
            greedy, search = (
                np.mean([1 - row[name] / row["pytorch"] for row in chosen])
                for name in ("greedy", "search")
            )
            optimal = sum(row["stopped"] == "optimal" for row in chosen)
            gap = np.mean([1 - row["bound"] / row["search"] for row in chosen])
            yield (
                f"| {queues} | {message:g} | {len(chosen)} | {greedy:.1%} | {search:.1%} | "
                f"{optimal} | {gap:.1%} |"
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each search")
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--queues", nargs="+", default=["worker", "pair"])
    options = parser.parse_args()
    rows = []
    for table in tables(options.workers):
        for queues in options.queues:
            for message in MESSAGES:
                rows.append(searched(table, message, queues, options.seconds))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print("\n".join(summary(rows)))
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
