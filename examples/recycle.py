r"""ReCycle: after failures the peers of lost workers take over their microbatches.

Gandhi et al. (arXiv:2405.14009). Pipelines train the same model on other data, so the peers of a
worker in the other pipelines hold its stage, too. Each way of microbatches through the workers is
a pipe of the table. Backwards in two halves let peers put weight gradients off into their gaps.

    pipejax evaluate --schedule examples/recycle.py:recycle --workers 11 --microbatches 18 \
        --stage-times F=1,I=1,W=1 --schedule-options stages=4,failed=6
"""

from itertools import cycle

import pipejax as pj

SPLIT, WHOLE = {"F": 1, "I": 1, "W": 1}, {"F": 1, "B": 2}  # times that an order is found for


def recycle(num_workers, num_microbatches, *, stages, failed="", split=True, more=1):
    """Make the table of a step. Before failures, worker d P + s had stage s of pipeline d.

    Args:
      num_workers: of those that are left, in whose order rows are.
      num_microbatches: of all pipelines together, dealt to them in turn.
      stages: P, of every pipeline.
      failed: numbers of the workers that failed, among all: one number, or several joined by +.
      split: whether backwards are in halves, I and W.
      more: activations that a stage may hold of a pipeline beyond the P of 1F1B's first stage.
    """
    lost = {int(worker) for worker in str(failed).split("+") if worker}
    pipelines, rest = divmod(num_workers + len(lost), stages)
    if rest:
        raise ValueError(f"{num_workers} workers and {len(lost)} that failed are no {stages} x D")
    before = range(stages * pipelines)
    if strange := sorted(lost - {*before}):
        raise ValueError(f"failed names worker {strange[0]}, and there were 0 to {before[-1]}")
    routes = _routes(stages, pipelines, num_microbatches, lost)
    number = {worker: k for k, worker in enumerate(sorted({*before} - lost))}
    routes = [tuple(number[worker] for worker in route) for route in routes]
    pipes = sorted(set(routes))
    return pj.ScheduleTable.from_rows(
        _ordered(routes, num_workers, pipelines, SPLIT if split else WHOLE, stages + more),
        placement=pipes,
        pipe_of_microbatch=[pipes.index(route) for route in routes],
        name="recycle",
    )


def _routes(stages, pipelines, microbatches, lost):
    """Workers of each microbatch, by stage: those of its pipeline, or their peers in turn."""
    alive = [[s + stages * d for d in range(pipelines)] for s in range(stages)]
    alive = [[worker for worker in peers if worker not in lost] for peers in alive]
    if [] in alive:
        raise ValueError(f"all workers of stage {alive.index([])} failed: its weights are lost")
    turns = {worker: cycle(alive[worker % stages]) for worker in lost}
    first = [stages * (m % pipelines) for m in range(microbatches)]
    own = [range(worker, worker + stages) for worker in first]
    return [tuple(next(turns[w]) if w in lost else w for w in workers) for workers in own]


def _ordered(routes, workers, pipelines, times, held):
    """Rows of ops: the worker that is free first takes what it can start, gradients first.

    Of a pipeline's microbatches at a stage as many are between F and gradient as in 1F1B, and so
    many are held until their W has ended.
    """
    stages, back = len(routes[0]), "I" if "I" in times else "B"
    rows, free = [[] for _ in range(workers)], [0] * workers
    ready = {("F", 0, d): 0 for d in range(min(pipelines, len(routes)))}  # when each op can start
    done = {(kind, d, s): 0 for kind in times for d in range(pipelines) for s in range(stages)}

    def may_start(kind, s, m):
        d, place = m % pipelines, m // pipelines
        room = min(done[back, d, s] + stages - s, done[list(times)[-1], d, s] + held)
        return kind != "F" or place < room

    while ready:
        _, _, m, s, kind = min(
            (max(moment, free[routes[m][s]]), (back, "F", "W").index(kind), m, s, kind)
            for (kind, s, m), moment in ready.items()
            if may_start(kind, s, m)
        )
        worker = routes[m][s]
        rows[worker].append(f"{s}{kind}{m}")
        end = free[worker] = max(ready.pop((kind, s, m)), free[worker]) + times[kind]
        done[kind, m % pipelines, s] += 1
        if (kind, s) == ("F", 0) and m + pipelines < len(routes):
            ready["F", 0, m + pipelines] = 0  # the next one of the pipeline
        follows = {
            "F": [("F", s + 1, m) if s < stages - 1 else (back, s, m)],
            back: [(back, s - 1, m)] * (s > 0) + [("W", s, m)] * (back == "I"),
            "W": [],
        }
        ready |= dict.fromkeys(follows[kind], end)
    return rows
