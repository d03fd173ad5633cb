"""Mutation test: cosmic-ray changes the package, and the tests of the changed file run.

    pip install -e '.[mutate]'
    python tests/mutate.py pipejax/engine --count 20       # 20 changes of each file
    python tests/mutate.py pipejax/base/checks.py --seed 2  # others

No part of `make`: a change takes as long as its tests. They run in a clone of the last commit in
--folder, where a second call goes on. The changes that no test finds are printed.
"""

import argparse
import os
import random
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
# arithmetic, comparisons, numbers, booleans: not annotations, decorators and what is raised
OPERATORS = re.compile(
    ".*(BinaryOperator_(Add_Sub|Sub_Add|Mul_Div|Div_Mul)|ComparisonOperator_(Lt_LtE|LtE_Lt|Gt_GtE|"
    "GtE_Gt|Eq_NotEq|NotEq_Eq)|NumberReplacer|TrueWithFalse|FalseWithTrue|AndWithOr|OrWithAnd)"
)
CONFIG = """[cosmic-ray]
module-path = "{path}"
timeout = 600.0
excluded-modules = []
test-command = "{python} -m pytest -q -x --tb=no -p no:cacheprovider -m 'not slow' {tests}"
distributor.name = "local"
"""

# Tests by what they look at. A file has the tests of the longest prefix of its path.
TESTS = {
    "pipejax/": "public_api objects",
    "pipejax/base": "sizes files objects outputs progress doors incremental longest_paths twins",
    "pipejax/search/orders/transfer_swaps.py": "incremental",
    "pipejax/base/longest_path.py": "schedules longest_paths recurrence incremental",
    "pipejax/schedules": (
        "links table host_links whole_files one_memory_rule pytorch_tables closed_forms fuzz"
        " fuzz_runs pair_links posting overlapped_pairs staleness schedules activation_memory"
        " recurrence"
    ),
    "pipejax/schedules/builders": (
        "closed_forms staleness schedules published v_schedules published_forms"
        " published_predicates registry_grid overlapped_pairs activation_memory"
        " fused_schedules memory_limits"
    ),
    "pipejax/schedules/heuristics": (
        "building_blocks closed_forms staleness schedules published v_schedules"
        " published_forms published_predicates registry_grid overlapped_pairs transfer_order"
        " memory_limits optimize"
    ),
    "pipejax/schedules/naming.py": "own_schedules schedules",
    "pipejax/schedules/table/table_files.py": (
        "doors whole_files pytorch_tables table own_schedules"
    ),
    "pipejax/costs": (
        "costs models sizes workload layout stragglers topology by_microbatch doors step_report"
    ),
    "pipejax/costs/layers": (
        "layer_ops activations kernel_time published models collectives workload step_report"
        " exchanges_beside_products overlap"
    ),
    "pipejax/costs/measured": (
        "measured_rows measured_tables measured_memory profiles doors costs megatron_log"
        " step_time calibrate validation"
    ),
    "pipejax/costs/model": (
        "models layer_ops activations pipeline_layout published layout measured_memory"
        " hugging_face megatron_log workload step_report one_memory_rule"
    ),
    "pipejax/costs/stage": (
        "activation_memory one_memory_rule measured_memory staleness pipeline_layout workload"
        " step_report overlap topology sensitivity"
    ),
    "pipejax/costs/system": (
        "system_sections calibrated_numbers kernel_time models doors collectives workload"
        " step_report"
    ),
    "pipejax/engine": "twins fuzz_runs recurrence transformations engine_pairs one_meaning",
    "pipejax/engine/lowering": (
        "links table host_links whole_files one_memory_rule pytorch_tables closed_forms fuzz"
        " fuzz_runs pair_links posting overlapped_pairs staleness transfer_order"
        " by_microbatch stragglers recurrence engine_pairs formula one_meaning"
    ),
    "pipejax/engine/batched": "batch engine_pairs transformations devices one_meaning",
    "pipejax/engine/batched/pricing.py": "batch step_time jitter_factors jitter",
    "pipejax/engine/steady_state.py": "long_schedules engine_pairs",
    "pipejax/engine/periodic_makespan.py": "long_schedules engine_pairs one_meaning",
    "pipejax/analysis": "activation_memory objects compare diff step_report",
    "pipejax/analysis/comparison": "closed_forms compare diff fused_schedules",
    "pipejax/analysis/formula": "formula formula_family formula_batch",
    "pipejax/analysis/paths": "longest_paths transfer_order twins",
    "pipejax/analysis/runs": (
        "host_links staleness activation_memory pictures chrome_trace compare step_report"
        " recurrence"
    ),
    "pipejax/analysis/step": "validation step_time step_report sensitivity calibrate",
    "pipejax/analysis/uncertainty": "corners jitter jitter_factors sensitivity",
    "pipejax/checker": "certificates formula fuzz_runs grammar_runs",
    "pipejax/search": "tuning joint_tuning",
    "pipejax/search/calibration": (
        "robust_fit hold_outs bands calibrated_numbers calibrate calibrate_links"
    ),
    "pipejax/search/orders": "transfer_order transfer_swaps microbatch_order deal topology",
    "pipejax/search/partition": "partition",
    "pipejax/search/schedule": (
        "neighbourhoods building_blocks effort optimize search_answers optimize_store optimize_cli"
    ),
    "pipejax/search/tuning": "tuning joint_tuning",
    "pipejax/sweep": "results sweep sweep_store plan",
    "pipejax/sweep/plan": "plan",
    "pipejax/runtimes": "mpmd_export torch_lowering runtimes",
    "pipejax/traces": "trace_readers trace_suspects trace replay trace_truth",
    "pipejax/training": "objectives replay training",
    "pipejax/plots": "pictures shown figures training_figures",
    "pipejax/plots/explorer": "explorer",
    "pipejax/cli": "cli command_line doors shown printed_tables outputs init mistakes environment",
    "pipejax/cli/commands": (
        "cli command_line doors shown printed_tables outputs init mistakes compare diff"
        " formula certificates staleness plan jitter results optimize_cli transfer_order"
        " microbatch_order partition tuning"
    ),
}


def get_tests(path):
    """Test files for a source file: those of the longest prefix, and itself if it has examples."""
    prefix = max((prefix for prefix in TESTS if path.startswith(prefix)), key=len)
    names = TESTS[prefix].split()
    examples = [path] if ">>>" in (ROOT / path).read_text() else []
    files = {test.stem.removeprefix("test_"): test for test in (ROOT / "tests").rglob("test_*.py")}
    if missing := {*names} - files.keys():
        sys.exit(f"TESTS names what is not there: {', '.join(sorted(missing))}")
    return [*examples, *(str(files[name].relative_to(ROOT)) for name in names)]


def survivors(path, folder, count, seed):
    """Let changes of a file meet its tests; yield those that no test finds."""
    from cosmic_ray.work_db import use_db
    from cosmic_ray.work_item import TestOutcome, WorkerOutcome, WorkResult

    config, session = (folder / f"{path.replace('/', '.')}.{end}" for end in ("toml", "sqlite"))
    tests = " ".join(get_tests(path))
    config.write_text(CONFIG.format(path=path, python=sys.executable, tests=tests))
    clone = folder / "clone"
    environment = {**os.environ, "HYPOTHESIS_PROFILE": "first_failure", "EXAMPLES": "300"}
    if not session.exists():
        subprocess.run(
            [sys.executable, "-m", "cosmic_ray.cli", "init", config, session], cwd=clone, check=True
        )
        with use_db(str(session)) as work:
            items = list(work.pending_work_items)
            useful = [item for item in items if OPERATORS.match(item.mutations[0].operator_name)]
            sample = random.Random(seed).sample(useful, min(count, len(useful)))
            jobs = {item.job_id for item in sample}
            for item in items:
                if item.job_id not in jobs:
                    work.set_result(item.job_id, WorkResult(worker_outcome=WorkerOutcome.SKIPPED))
    subprocess.run(
        [sys.executable, "-m", "cosmic_ray.cli", "exec", config, session],
        cwd=clone,
        env=environment,
        check=True,
    )
    with use_db(str(session)) as work:
        for _, result in work.completed_work_items:
            if result.test_outcome == TestOutcome.SURVIVED:
                yield result.diff


def main():
    parser = argparse.ArgumentParser(description="change the package, see whether a test fails")
    parser.add_argument("paths", nargs="+", type=Path, help="files or folders of the package")
    parser.add_argument("--count", type=int, default=5, help="changes of a file")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=ROOT / "results" / "mutants")
    options = parser.parse_args()
    folder = options.folder.resolve()
    if not (folder / "clone").exists():
        subprocess.run(["git", "clone", "--quiet", ROOT, folder / "clone"], check=True)
    for arguments in options.paths:
        for path in [arguments] if arguments.is_file() else sorted(arguments.rglob("*.py")):
            for diff in survivors(str(path), folder, options.count, options.seed):
                print(diff)


if __name__ == "__main__":
    main()
