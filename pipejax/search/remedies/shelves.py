"""Shelves of remedies: what a launcher runs today, what needs code, what needs other hardware."""

from collections.abc import Collection, Mapping, Sequence

from pipejax.analysis.scenario import Scenario
from pipejax.base.checks import unknown
from pipejax.costs.model.launchers import Launch, find_launcher, launches, pipeline_launches
from pipejax.search.remedies.candidates import Candidate

SHELVES: Mapping[str, str] = {  # and what a remedy of each needs
    "launcher": "options of a launcher",
    "code": "a table file or code",
    "hardware": "other hardware or a repair",
}


TABLE_SUFFIX = ".csv"  # of an option that names the file of a table
# options that say the stages of each worker, of a launcher that otherwise takes one or two
SAY_STAGES: Mapping[str, Collection[str]] = {
    "torchtitan": {
        "parallelism.pipeline_parallel_layers_per_stage",
        "parallelism.module_fqns_per_model_part",
    },
}


def run_launches(scenario: Scenario, layers: Sequence[int]) -> tuple[Launch, ...]:
    """Return options of launchers for a run; at measured times those of the pipeline alone."""
    workload, system = scenario.source.workload, scenario.source.system
    if workload is not None and system is not None:
        return launches(workload, scenario.table(), per_node=float(system.gpus_per_node))
    return pipeline_launches(scenario.table(), layers or None)


def run_launch(scenario: Scenario, launcher: str, layers: Sequence[int] = ()) -> Launch:
    """Return the options of one launcher for a run; refuse one that has none for it."""
    by_name = {launch.launcher: launch for launch in run_launches(scenario, layers)}
    name = find_launcher(launcher).name
    if name not in by_name:
        raise unknown("launcher of measured times", name, by_name)
    return by_name[name]


def step_launchers(old: Candidate, new: Candidate) -> tuple[str, ...]:
    """List the launchers that run a candidate, and whose options say what it changes."""
    if old.layers and not new.layers:
        return ()  # a layer would be divided
    before = {launch.launcher: launch for launch in run_launches(old.scenario, old.layers)}
    return tuple(
        launch.launcher
        for launch in run_launches(new.scenario, new.layers)
        if not launch.lacks
        and _says_stages(launch, new)
        # equal options start the same run: they say no times, places or order of messages
        and launch != before[launch.launcher]
    )


def _says_stages(launch: Launch, candidate: Candidate) -> bool:
    """Return whether the options say the stages of each worker, and need no table file."""
    names = SAY_STAGES.get(launch.launcher, launch.options)
    is_said = candidate.table.stages_per_worker <= 2 or any(
        name in launch.options for name in names
    )
    has_file = any(str(value).endswith(TABLE_SUFFIX) for value in launch.options.values())
    return is_said and not has_file
