"""Published recipes beside plans: what counts as held, and steps of recipes by another way."""

import types

import pytest

import pipejax as pj
from sweeps.published.recipes import IDEAS, RECIPES, Verdict, judge

NAMED = {(recipe.model, recipe.system): recipe for recipe in RECIPES}


@pytest.mark.parametrize(
    ("place", "step_time", "holds"),
    [(IDEAS, 2.0, True), (None, 1.049, True), (None, 1.051, False)],
)
def test_a_recipe_holds_among_the_best_ideas_or_close_to_the_best_step(place, step_time, holds):
    plan = types.SimpleNamespace(best=types.SimpleNamespace(step_time=1.0))
    assert Verdict(RECIPES[0], place, plan, step_time).holds == holds


def test_recipes_use_all_accelerators_and_whole_microbatches():
    assert len(RECIPES) == len(NAMED) == 11
    for recipe in RECIPES:
        tensor, context, expert, pipeline, _, size = recipe.degrees
        replicas, rest = divmod(recipe.gpus, tensor * context * pipeline)
        assert rest == 0 == recipe.minibatch % (replicas * size)
        assert tensor * context * replicas % expert == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "system", "degrees"),  # data, microbatches
    [("llama3-8b", "h100", (4, 32)), ("qwen3-30b-a3b", "gb200", (8, 16))],
)
def test_recipes_of_one_node_hold_with_the_step_of_evaluate(model, system, degrees):
    recipe, (data, microbatches) = NAMED[model, system], degrees
    verdict = judge(recipe)
    workload = pj.Workload(
        pj.load_model(model),
        microbatches * recipe.degrees[-1],
        data_parallel=data,
        context_parallel=recipe.degrees[1],
        expert_parallel=recipe.degrees[2],
        zero=1,
        **verdict.plan.request.shared,
    )
    table = pj.schedules.build("1f1b", num_workers=1, num_microbatches=microbatches)
    costs = pj.stage_costs(workload, verdict.plan.request.system, table)
    assert verdict.step_time == pytest.approx(pj.evaluate(table, costs).step_time, rel=1e-9)
    assert verdict.holds
    assert str(verdict).endswith("yes")
