"""Tests near a change: `make near` runs those that this file prints, `tests/mutate.py` uses the table.

A changed file of the package has the tests of the table, any other file those that import or name it.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
ALWAYS = (
    "tests/test_words.py",
    "tests/test_architecture.py",
    "tests/test_docs.py::test_every_public_name_is_in_the_reference",
    "tests/test_docs.py::test_a_page_has_every_key",
    "tests/test_docs.py::test_commands_and_options_that_a_page_mentions_exist",
)
# tests by path: a file has those of the longest prefix
TESTS = {
    "pipejax/": "public_api objects library one_schedule scenario",
    "pipejax/base": "sizes files objects outputs progress doors incremental longest_paths twins background shown signals many_numbers long_processes cold_start packaging",
    "pipejax/search/orders/transfer_swaps.py": "incremental transfer_swaps transfer_order topology",
    "pipejax/base/longest_path.py": "schedules longest_paths recurrence incremental",
    "pipejax/schedules": "links table host_links whole_files one_memory_rule pytorch_tables closed_forms fuzz fuzz_runs pair_links posting overlapped_pairs staleness schedules activation_memory recurrence megatron_orders published_schedules recomputation extending sliced new_kind own_kinds extended pasted_rows",
    "pipejax/schedules/builders": "closed_forms staleness schedules published v_schedules published_forms published_predicates registry_grid overlapped_pairs activation_memory fused_schedules memory_limits bitpipe braids megatron_orders sliced vocabulary encoders forward_memory published_schedules chunks",
    "pipejax/schedules/heuristics": "building_blocks closed_forms staleness schedules published v_schedules published_forms published_predicates registry_grid overlapped_pairs transfer_order memory_limits optimize braids encoders vocabulary extended",
    "pipejax/schedules/naming.py": "own_schedules schedules",
    "pipejax/schedules/table/table_files.py": "doors whole_files pytorch_tables table own_schedules pasted_rows fuzz",
    "pipejax/costs": "costs models sizes workload layout stragglers topology by_microbatch doors step_report input_files extending kind_costs many_numbers",
    "pipejax/costs/layers": "layer_ops activations kernel_time published models collectives workload step_report exchanges_beside_products overlap software_terms unfused_kernels working_set kind_costs sliced_costs ranks",
    "pipejax/costs/measured": "measured_rows measured_tables measured_memory profiles doors costs megatron_log step_time calibrate validation log_arguments trainer_logs evidence",
    "pipejax/costs/model": "models layer_ops activations pipeline_layout published layout measured_memory hugging_face megatron_log workload step_report one_memory_rule launchers ranks software_terms unfused_kernels log_arguments",
    "pipejax/costs/stage": "activation_memory one_memory_rule measured_memory staleness pipeline_layout workload step_report overlap topology sensitivity distinct_stages sharding sliced_costs working_set forward_memory chunks ranks kind_costs by_microbatch encoders",
    "pipejax/costs/system": "system_sections calibrated_numbers kernel_time models doors collectives workload step_report stacks ranks a100_out_of_the_box machines_out_of_the_box",
    "pipejax/engine": "twins fuzz_runs recurrence transformations engine_pairs one_meaning long_processes run_time_types levels",
    "pipejax/engine/lowering": "links table host_links whole_files one_memory_rule pytorch_tables closed_forms fuzz fuzz_runs pair_links posting overlapped_pairs staleness transfer_order by_microbatch stragglers recurrence engine_pairs formula one_meaning sharding vocabulary extended new_kind",
    "pipejax/engine/batched": "batch engine_pairs transformations devices one_meaning levels run_time_types many_numbers",
    "pipejax/engine/batched/pricing.py": "batch step_time jitter_factors jitter",
    "pipejax/engine/steady_state.py": "long_schedules engine_pairs",
    "pipejax/engine/periodic_makespan.py": "long_schedules engine_pairs one_meaning",
    "pipejax/analysis": "notebook activation_memory objects compare diff step_report",
    "pipejax/analysis/comparison": "closed_forms compare diff fused_schedules",
    "pipejax/analysis/formula": "formula formula_family formula_batch",
    "pipejax/analysis/paths": "longest_paths transfer_order twins",
    "pipejax/analysis/runs": "host_links staleness activation_memory pictures chrome_trace compare step_report recurrence",
    "pipejax/analysis/step": "validation step_time step_report sensitivity calibrate fitting a100_out_of_the_box machines_out_of_the_box",
    "pipejax/analysis/uncertainty": "corners jitter jitter_factors sensitivity",
    "pipejax/checker": "certificates formula fuzz_runs grammar_runs",
    "pipejax/search": "tuning joint_tuning",
    "pipejax/search/calibration": "robust_fit hold_outs bands calibrated_numbers calibrate calibrate_links",
    "pipejax/search/orders": "transfer_order transfer_swaps microbatch_order deal topology",
    "pipejax/search/partition": "partition",
    "pipejax/search/schedule": "neighbourhoods building_blocks effort optimize search_answers optimize_store optimize_cli",
    "pipejax/search/tuning": "tuning joint_tuning own_schedules sharding environment",
    "pipejax/sweep": "results sweep sweep_store plan own_schedules",
    "pipejax/sweep/plan": "plan evidence launchers fitting ranks",
    "pipejax/runtimes": "mpmd_export torch_lowering runtimes torch_runtime",
    "pipejax/traces": "trace_readers trace_suspects trace replay trace_truth nsight trace_faults trace_hosts trace_profilers",
    "pipejax/training": "objectives replay training",
    "pipejax/plots": "notebook pictures shown figures training_figures style",
    "pipejax/plots/explorer": "notebook explorer",
    "pipejax/cli": "cli command_line doors shown printed_tables outputs init mistakes environment signals cold_start next_commands",
    "pipejax/cli/commands": "cli command_line doors shown printed_tables outputs init mistakes compare diff formula certificates staleness plan jitter results optimize_cli transfer_order microbatch_order partition tuning golden readme explain next_commands docs",
    "pipejax/schedules/cells": "table schedules fuzz new_kind own_kinds extended sliced recomputation pasted_rows",
    "pipejax/schedules/table": "table whole_files pasted_rows pytorch_tables fuzz new_kind own_kinds extended recomputation layout diff",
    "pipejax/costs/data": "a100_out_of_the_box machines_out_of_the_box ranks stacks models system_sections measured_tables evidence log_arguments packaging published_accuracy input_files",
    "pipejax/search/remedies": "remedies explain next_commands fitting",
    "pipejax/runtimes/gloo": "torch_runtime",
    "pipejax/runtimes/spmd": "runtimes",
    "pipejax/traces/readers": "trace_readers trace_profilers nsight trace_hosts trace_truth",
    "pipejax/traces/replaying": "trace replay trace_truth trace_suspects trace_hosts",
    "pipejax/traces/findings": "trace_faults trace_hosts trace_suspects trace trace_truth",
    "pipejax/cli/options": "schemas scenario next_commands command_line cli mistakes doors one_schedule init environment launchers golden readme",
    "pipejax/cli/output": "schemas skill printed_tables outputs next_commands shown pictures explorer golden",
    "pipejax/cli/schemas": "schemas golden skill",
    "pipejax/SKILL.md": "skill packaging",
    "docs/": "docs extending input_files",
    "README.md": "readme docs",
    "examples/": "readme docs",
}
FILES = {
    path.stem.removeprefix("test_"): str(path.relative_to(ROOT))
    for folder in ("tests", "tests/papers")
    for path in sorted((ROOT / folder).glob("test_*.py"))
}


def get_tests(path):
    """Tests of a file: those of the longest prefix of its path, and itself if it has examples."""
    prefix = max((prefix for prefix in TESTS if path.startswith(prefix)), key=len)
    is_text = Path(path).suffix in (".py", ".md") and (ROOT / path).exists()
    examples = [path] if is_text and ">>>" in (ROOT / path).read_text() else []
    return [*examples, *(FILES[name] for name in TESTS[prefix].split())]


def matching_tests(pattern):
    """Test files that match a pattern, and those that import a helper that does."""
    tests = set()
    for path in (ROOT / "tests").rglob("*.py"):
        if not re.search(pattern, path.read_text()):
            continue
        is_test = path.name.startswith("test_")
        tests |= {str(path.relative_to(ROOT))} if is_test else helper_tests(path.stem)
    return tests & {*FILES.values()}


def helper_tests(module):
    return matching_tests(rf"(?m)^(from|import) {module}\b")


def near_tests(path):
    """Tests near a changed file: by the table, or those that import its folder or name the file."""
    file = Path(path)
    if any(path.startswith(prefix) for prefix in TESTS):
        return get_tests(path)
    if path in FILES.values():
        return [path]
    if file.suffix == ".py":
        return helper_tests(
            file.stem if path.startswith("tests/") else str(file.parent).replace("/", r"\.")
        )
    name = file.parts[2] if path.startswith("tests/data/") else file.name
    return matching_tests(f'["/]{re.escape(name)}')


def git(*words):
    result = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return result.stdout.split() if result.returncode == 0 else []


def changed_files():
    """Files changed since the branch left main, untracked ones too; of a clean main, its last commit."""
    if not git("rev-parse", "HEAD"):
        sys.exit(f"{ROOT} is no clone of git, which says what has changed: make test runs all")
    base = git("merge-base", "HEAD", "main") or git("merge-base", "HEAD", "origin/main") or ["HEAD"]
    untracked = git("ls-files", "--others", "--exclude-standard")
    changed = git("diff", "--name-only", *base) + untracked
    return changed or git("diff", "--name-only", "HEAD~1")


def main():
    tests = {*ALWAYS}
    for path in changed_files():
        near = sorted({*near_tests(path)})
        names = " ".join(Path(test).stem for test in near) or "no test, see make test"
        print(f"{path}: {names}", file=sys.stderr)
        tests.update(near)
    print(*sorted(test for test in tests if test.partition("::")[0] not in tests - {test}))


if __name__ == "__main__":
    main()
