"""Published recipes beside the layouts that a plan finds for the same jobs.

    python -m sweeps.published.recipes

For each recipe: the place of its idea among the best ideas of the plan, and its own step against
the best one. Exit code 1 where fewer than `ENOUGH` recipes are among the best ten ideas or within
5 % of the best step. Nothing is fitted to these recipes.
"""

import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from rich.console import Console

import pipejax as pj
from pipejax.files import DATA
from pipejax.results import PlanResult

IDEAS = 10  # among which a recipe should be
CLOSE = 0.05  # of the best step, by which a recipe may be slower
ENOUGH = 8  # recipes
IDEA = ("tensor", "pipeline", "expert", "expert_tensor")
SCHEDULES = ("1f1b", "interleaved-1f1b")  # of Megatron Core when the recipes were published
BRIDGE = "NVIDIA-NeMo/Megatron-Bridge 067f987 docs/performance-summary-archive.md"


class Recipe(NamedTuple):
    """A published layout of a job."""

    model: str  # name, or file beside the unseen runs
    system: str
    gpus: int
    minibatch: int
    precision: str
    stack: str
    # tensor, context, expert, pipeline, stages per worker, microbatch size
    degrees: tuple[int, int, int, int, int, int]
    source: str
    recompute: str = "none"
    shared: Mapping[str, Any] = {}  # that the source says of all layouts

    @property
    def choices(self) -> dict[str, list[Any]]:
        """Return the values that leave this layout alone."""
        axes = "tensor", "context", "expert", "pipeline", "stages_per_worker", "microbatch_size"
        choices = {axis: [value] for axis, value in zip(axes, self.degrees, strict=True)}
        return choices | {"expert_tensor": [1], "zero": [1], "recompute": [self.recompute]}

    def plan(self, runners_up: int, **choices: list[Any]) -> PlanResult:
        """Plan the job."""
        file = DATA / "measured" / "unseen" / self.model
        return pj.plan(
            file if file.exists() else self.model,
            self.system,
            gpus=self.gpus,
            minibatch=self.minibatch,
            precision=self.precision,
            stack=self.stack,
            schedules=SCHEDULES,
            runners_up=runners_up,
            choices=choices,
            **self.shared,
        )


BEFORE, GRAPHS = "megatron-core-2024", "megatron-core-2026"
OVERLAP = {"expert_overlap": 0.366}  # hidden share that was measured with overlap_moe_..
RECIPES = (
    Recipe("llama3-70b", "h100", 64, 256, "fp8", BEFORE, (4, 1, 1, 8, 5, 1), f"{BRIDGE} 26.04.01"),
    Recipe("llama3-405b", "h100", 1024, 1536, "fp8", BEFORE, (8, 2, 1, 8, 8, 1), f"{BRIDGE} 26.06"),
    Recipe(
        *("nemotron4-340b.json", "h100", 256, 64, "fp8", BEFORE, (8, 1, 1, 8, 12, 1)),
        "NVIDIA/dgxc-benchmarking, nemotron",
    ),
    Recipe("llama3-8b", "h100", 8, 128, "bf16", BEFORE, (1, 2, 1, 1, 1, 1), f"{BRIDGE} 25.11"),
    Recipe(
        *("qwen3-235b-a22b", "h100", 256, 8192, "fp8", BEFORE, (2, 1, 32, 8, 4, 1)),
        *(f"{BRIDGE} 26.04.01", "none", OVERLAP),
    ),
    Recipe(
        *("deepseek-v3", "h100", 1024, 8192, "fp8", BEFORE, (2, 1, 64, 8, 4, 1)),
        *(f"{BRIDGE} 25.09", "mla_up_proj+mlp"),
    ),
    Recipe(
        *("llama3-405b", "gb200", 256, 1536, "mxfp8", BEFORE, (4, 1, 1, 16, 8, 1)),
        f"{BRIDGE} 26.06",
    ),
    # perf_recipes/_common.py: no layer stays in bf16
    Recipe(
        *("llama3-405b", "gb300", 256, 1536, "nvfp4", BEFORE, (4, 1, 1, 8, 4, 1)),
        f"{BRIDGE} 26.06",
    ),
    Recipe(
        *("deepseek-v3", "gb200", 256, 4096, "mxfp8", GRAPHS, (1, 1, 64, 4, 4, 1)),
        *(f"{BRIDGE} 26.06", "mla_up_proj"),
    ),
    Recipe(
        *("deepseek-v3", "gb300", 256, 4096, "mxfp8", GRAPHS, (1, 1, 32, 2, 8, 1)),
        f"{BRIDGE} 26.06",
    ),
    Recipe(
        "qwen3-30b-a3b", "gb200", 8, 512, "mxfp8", GRAPHS, (1, 1, 8, 1, 1, 4), f"{BRIDGE} 26.06"
    ),
)


class Verdict(NamedTuple):
    """A recipe beside the plan of its job."""

    recipe: Recipe
    place: int | None  # of its idea, None beyond `IDEAS`
    plan: PlanResult  # of its job
    step_time: float  # of the recipe [s]

    @property
    def lag(self) -> float:
        """Return by what share of the best step the recipe is slower."""
        return self.step_time / self.plan.best.step_time - 1

    @property
    def holds(self) -> bool:
        """Return whether the recipe is among the best ideas or close to the best step."""
        return self.place is not None or self.lag <= CLOSE

    def __str__(self) -> str:
        recipe, layout = self.recipe, self.plan.best.layout
        names = ("t", "c", "e", "P", "V", "b")
        axes = "tensor", "context", "expert", "pipeline", "stages_per_worker", "microbatch_size"
        texts = [
            " ".join(f"{name}{value}" for name, value in zip(names, degrees, strict=True))
            for degrees in (recipe.degrees, [layout[axis] for axis in axes])
        ]
        place = f"beyond {IDEAS}" if self.place is None else str(self.place)
        return (
            f"{recipe.model} on {recipe.gpus} {recipe.system}: {texts[0]}, idea {place}, "
            f"{self.step_time:.4g} s; best {texts[1]} z{layout['zero']} {layout['recompute']}, "
            f"{self.plan.best.step_time:.4g} s ({self.lag:+.1%}): {'yes' if self.holds else 'NO'}"
        )


def judge(recipe: Recipe) -> Verdict:
    """Plan the job of a recipe, and evaluate the recipe."""
    plan = recipe.plan(IDEAS - 1)
    layout = recipe.plan(0, **recipe.choices).best
    places = [
        place
        for place, other in enumerate((plan.best, *plan.runners_up), 1)
        if all(other.layout[axis] == layout.layout[axis] for axis in IDEA)
    ]
    return Verdict(recipe, min(places, default=None), plan, layout.step_time)


def verdicts() -> Iterator[Verdict]:
    """Judge all recipes, one after another."""
    return map(judge, RECIPES)


if __name__ == "__main__":
    CONSOLE, HELD = Console(highlight=False, soft_wrap=True), 0
    for verdict in verdicts():
        CONSOLE.print(str(verdict), markup=False)
        HELD += verdict.holds
    CONSOLE.print(f"{HELD} of {len(RECIPES)} recipes hold; {ENOUGH} wanted")
    sys.exit(HELD < ENOUGH)
