"""What the optimiser answers, derived again by the checker."""

import numpy as np

import pipejax as pj


def check_solution(
    best,
    costs,
    *,
    memory_limit,
    sizes=1.0,
    weight_share=1 / 3,
    offload=False,
    link="delay",
    objective="makespan",
    **_,
):
    """Order, starts, limits and bound of a solution hold; its own makespan is that of the run."""
    run = pj.evaluate(best.table, costs, link=link)
    reached = run.makespan if objective == "makespan" else run.max_span
    assert reached == best.makespan
    claimed = pj.certificate(
        run,
        memory=pj.activation_memory(run, sizes=sizes, weight_share=weight_share),
        limits=np.broadcast_to(memory_limit, run.workers),
        objective=objective,
        offload=offload,
        lower_bounds={best.bound_by: best.lower_bound},
    )
    assert claimed["claim"]["offloaded"] == best.offloaded
    assert pj.verify(claimed).problems == ()
