"""Mutation test: change one token of the package, and see whether a test fails.

    python tests/mutate.py                    # 60 changes of all rooms that a fixed seed draws; hours
    python tests/mutate.py --seed 2           # 60 others
    python tests/mutate.py --rooms engine,schedules
    python tests/mutate.py --list             # the changes alone
    python tests/mutate.py --again            # once more what survived, with the tests of today
    python tests/mutate.py --seconds 60       # of the processor for a change; says what it has not met

No test itself and no part of `make`: the tests of a room run once per change, in a copy of the
tree, so the working tree is never touched. They are collected once for all changes of their files
that are in bodies of functions (mutant_tests.py). A change is drawn by a hash of its line, so an
edit elsewhere draws the same ones. Results are kept in --results, and a second call goes on from there.
"""

import argparse
import ast
import contextlib
import hashlib
import importlib.util
import io
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
ROOMS = "base,schedules,costs,engine,analysis,search,sweep,runtimes,training,plots,cli"
SWAPS = {
    **{"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="},
    **{"+": "-", "-": "+", "+=": "-=", "-=": "+=", "and": "or", "or": "and"},
    **{"True": "False", "False": "True", "min": "max", "max": "min", "minimum": "maximum"},
    **{"maximum": "minimum", "argmin": "argmax", "argmax": "argmin", "any": "all", "all": "any"},
}

# Tests by what they look at, cheapest first: those that compile nothing, then those that do. A file
# has the tests of the longest prefix of its path.
_TABLES = (
    "links table host_links whole_files one_memory_rule pytorch_tables closed_forms fuzz fuzz_runs"
    " pair_links posting overlapped_pairs"
)
_BUILT = (
    "closed_forms staleness schedules published v_schedules published_forms published_predicates"
    " registry_grid overlapped_pairs"
)
_COMMANDS = "cli command_line doors shown printed_tables outputs init mistakes"
TESTS = {
    "pipejax/base": (
        "sizes files objects outputs progress doors incremental longest_paths",
        "twins",
    ),
    "pipejax/base/incremental_path.py": ("", "incremental"),
    "pipejax/base/longest_path.py": ("schedules", "longest_paths recurrence incremental"),
    "pipejax/schedules": (f"{_TABLES} staleness schedules activation_memory", "recurrence"),
    "pipejax/schedules/builders": (
        f"{_BUILT} activation_memory fused_schedules",
        "memory_limits v_schedules",
    ),
    "pipejax/schedules/heuristics": (
        f"building_blocks {_BUILT} transfer_order",
        "memory_limits optimize",
    ),
    "pipejax/schedules/naming.py": ("own_schedules schedules", "own_schedules"),
    "pipejax/schedules/table/table_files.py": (
        "doors whole_files pytorch_tables table",
        "own_schedules",
    ),
    "pipejax/costs": (
        "costs models sizes workload layout stragglers topology by_microbatch doors",
        "costs workload step_report stragglers topology by_microbatch",
    ),
    "pipejax/costs/layers": (
        "layer_ops activations kernel_time published models",
        "collectives workload step_report exchanges_beside_products overlap",
    ),
    "pipejax/costs/measured": (
        "measured_rows measured_tables measured_memory profiles doors costs megatron_log",
        "step_time profiles calibrate validation",
    ),
    "pipejax/costs/model": (
        "models layer_ops activations pipeline_layout published layout measured_memory "
        "hugging_face megatron_log",
        "workload step_report one_memory_rule",
    ),
    "pipejax/costs/stage": (
        "activation_memory one_memory_rule measured_memory staleness pipeline_layout",
        "workload step_report overlap topology sensitivity",
    ),
    "pipejax/costs/system": (
        "system_sections calibrated_numbers kernel_time models doors",
        "collectives workload step_report",
    ),
    "pipejax/engine": ("twins fuzz_runs", "recurrence transformations engine_pairs one_meaning"),
    "pipejax/engine/lowering": (
        f"{_TABLES} staleness transfer_order by_microbatch stragglers",
        "recurrence engine_pairs formula one_meaning",
    ),
    "pipejax/engine/batched": ("", "batch engine_pairs transformations devices one_meaning"),
    "pipejax/engine/batched/per_op_costs.py": ("", "jitter_factors jitter"),
    "pipejax/engine/steady_state.py": ("", "long_schedules engine_pairs"),
    "pipejax/engine/periodic_makespan.py": ("", "long_schedules engine_pairs one_meaning"),
    "pipejax/analysis": ("activation_memory objects compare diff", "step_report"),
    "pipejax/analysis/comparison": ("closed_forms compare diff fused_schedules", "compare"),
    "pipejax/analysis/formula": ("formula formula_family", "formula formula_batch formula_family"),
    "pipejax/analysis/paths": ("longest_paths transfer_order twins", "longest_paths incremental"),
    "pipejax/analysis/runs": (
        "host_links staleness activation_memory pictures chrome_trace compare",
        "step_report recurrence incremental",
    ),
    "pipejax/analysis/step": ("validation", "step_time step_report sensitivity calibrate"),
    "pipejax/analysis/uncertainty": ("corners", "jitter jitter_factors corners sensitivity"),
    "pipejax/checker": ("certificates formula", "fuzz_runs grammar_runs"),
    "pipejax/search": ("", "tuning joint_tuning"),
    "pipejax/search/calibration": (
        "robust_fit hold_outs bands calibrated_numbers",
        "calibrate calibrate_links",
    ),
    "pipejax/search/orders": (
        "transfer_order transfer_swaps",
        "microbatch_order deal topology transfer_order",
    ),
    "pipejax/search/partition": ("", "partition"),
    "pipejax/search/schedule": (
        "neighbourhoods building_blocks effort",
        "neighbourhoods effort optimize search_answers optimize_store optimize_cli",
    ),
    "pipejax/search/tuning": ("", "tuning joint_tuning"),
    "pipejax/sweep": ("results", "sweep sweep_store results plan"),
    "pipejax/sweep/plan": ("plan", "plan"),
    "pipejax/runtimes": ("mpmd_export torch_lowering", "runtimes"),
    "pipejax/training": ("objectives replay", "training objectives replay"),
    "pipejax/plots": ("pictures shown", "figures training_figures network_map"),
    "pipejax/plots/explorer": ("explorer", "explorer"),
    "pipejax/cli": (_COMMANDS, "cli command_line environment"),
    "pipejax/cli/commands": (
        f"{_COMMANDS} compare diff formula certificates staleness plan",
        "cli jitter results optimize_cli transfer_order microbatch_order partition tuning",
    ),
}
OF_TORCH = "pipejax/runtimes/gloo"  # runs in an environment of its own: make test-runtimes
PYTEST = "-m pytest -q --tb=no -p no:cacheprovider -p mutant_tests"
FEWER_EXAMPLES = {"HYPOTHESIS_PROFILE": "first_failure", "EXAMPLES": "300"}

# What cannot change a result, by file, line and change; each was looked at.
EQUIVALENT = {
    (
        "binary_program.py",
        "LEAST_OPS, LEAST_SLOTS, LEAST_ROWS = 512, 128, 64",
        "64 -> 63",
    ): "the smallest of the sizes to which programs are padded",
    ("binary_program.py", "slot: list[int] = [0] * size", "0 -> 1"): "written before it is read",
    (
        "interpreter.py",
        "return max(1, min(os.cpu_count() or 1, parts))",
        "1 -> 0",
    ): "no thread of its own and one thread are the same to the only caller",
    (
        "makespans.py",
        "values, counts = found[0] if len(found) == 1 else jax.tree.map(_joined, *found)",
        "1 -> 0",
    ): "one part joined with nothing is that part, copied",
    ("makespans.py", "matrix[size:] = 0", "0 -> 1"): "padding of the batch that is never read",
    (
        "makespans.py",
        "pieces, columns = rows.pieces(leaves), width(rows) - 1",
        "- -> +",
    ): "two columns of padding more that are never read",
    (
        "interpreter_loops.py",
        "kept = jnp.zeros((GROUP + 1, cost.shape[1]), bool if temperature is None else cost.dtype)",
        "1 -> 2",
    ): "one more row of zeros behind the one that is read",
    (
        "table_files.py",
        "return format_cell((cell[0]._replace(microbatch=cell[0].microbatch - 1),))",
        "0 -> -1",
    ): "cells of one op have the same first and last",
}


class Mutant(NamedTuple):
    """One token of a file, and what stands there instead."""

    path: str
    line: int
    text: str  # of the line
    column: int
    old: str
    new: str

    @property
    def change(self):
        return f"{self.old} -> {self.new}"

    @property
    def key(self):
        """What stays the same when other lines change."""
        return f"{self.path}|{self.text}|{self.column}|{self.change}"

    def hash(self, seed):
        return hashlib.sha256(f"{seed}|{self.key}".encode()).hexdigest()

    def applied(self, source):
        lines = source.splitlines(keepends=True)
        line = lines[self.line - 1]
        assert line[self.column :].startswith(self.old)
        after = line[self.column + len(self.old) :]
        lines[self.line - 1] = line[: self.column] + self.new + after
        return "".join(lines)


def is_never_run(node):
    """Whether a part of the tree is an annotation, or says what is wrong."""
    if isinstance(node, ast.Raise | ast.JoinedStr):
        return True
    if isinstance(node, ast.keyword) and node.arg == "strict":  # of zip: lengths are equal anyway
        return True
    returns = getattr(node, "returns", None)
    return isinstance(node, ast.FunctionDef) and "Error" in ast.unparse(returns or node.args)


def left_out(tree):
    """Places in the source that hold no executed code: ((line, column), (line, column))."""
    found = [node for node in ast.walk(tree) if is_never_run(node)]
    found += [getattr(node, "annotation", None) for node in ast.walk(tree)]
    found += [getattr(node, "returns", None) for node in ast.walk(tree)]
    return [
        ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset))
        for node in found
        if isinstance(node, ast.AST)
    ]


def replacements(token, before, after):
    """What may stand for a token."""
    if token.string in SWAPS and token.type in (tokenize.OP, tokenize.NAME):
        return [SWAPS[token.string]]
    if token.type != tokenize.NUMBER:
        return []
    value = ast.literal_eval(token.string)
    # 1e9 and one more are the same to every tolerance
    step = type(value)(value / 2) if value > 1000 else 1
    found = [repr(value + step), *([repr(value - step)] if value >= 1 else [])]
    return [*found, "-1"] if (before, value, after) == ("[", 0, "]") else found


def mutants_of(path, seed):
    """All changes of a file, one per token, in an order that the seed draws."""
    source = (ROOT / path).read_text()
    places, lines = left_out(ast.parse(source)), source.splitlines()
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    found = []
    for k, token in enumerate(tokens[1:-1], 1):
        if any(first <= token.start < end for first, end in places):
            continue
        each = [
            Mutant(path, token.start[0], lines[token.start[0] - 1], token.start[1], token.string, n)
            for n in replacements(token, tokens[k - 1].string, tokens[k + 1].string)
        ]
        found += sorted(each, key=lambda m: m.hash(seed))[:1]
    return sorted(found, key=lambda m: m.hash(seed))


def missing():
    """What the table of tests names and is no longer there: a file that moved takes its line along."""
    named = [*TESTS, *(file for path in TESTS for files in all_tests_of(path) for file in files)]
    return sorted({path for path in named if not (ROOT / path).exists()})


def draw(count, seed, rooms):
    """Draw changes: files by their size, the largest remainders first."""
    folders = [ROOT / "pipejax" / room for room in rooms.split(",")]
    files = sorted(str(p.relative_to(ROOT)) for each in folders for p in each.rglob("*.py"))
    files = [path for path in files if not path.startswith(OF_TORCH)]
    each = {path: mutants_of(path, seed) for path in files}
    size = {path: len({mutant.line for mutant in found}) for path, found in each.items()}
    share = {path: count * size[path] / sum(size.values()) for path in files}
    taken = {path: int(share[path]) for path in files}
    rest = sorted(files, key=lambda path: taken[path] - share[path])
    for path in rest[: count - sum(taken.values())]:
        taken[path] += 1
    return [mutant for path in files for mutant in each[path][: taken[path]]]


def all_tests_of(path):
    """Test files of each kind for a source file: those of the longest prefix."""
    prefix = max((p for p in TESTS if path.startswith(p)), key=len)
    return [[f"tests/test_{name}.py" for name in names.split()] for names in TESTS[prefix]]


def tests_of(folder, path):
    """Test files for a source file, and the file itself where it has examples."""
    own = [path] if ">>>" in (Path(folder) / path).read_text() else []
    return list(dict.fromkeys([*own, *itertools.chain(*all_tests_of(path))]))


def is_called(mutant):
    """Whether what changes is in the body of a function: it can be changed after an import."""
    tree = ast.parse((ROOT / mutant.path).read_text())
    bodies = [
        (node.body[0], node.body[-1]) if isinstance(node.body, list) else (node.body, node.body)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.Lambda)
    ]
    return any(
        (first.lineno, first.col_offset)
        <= (mutant.line, mutant.column)
        < (last.end_lineno, last.end_col_offset)
        for first, last in bodies
    )


class Copy:
    """A copy of the tree, all that git knows and what is new, and a folder of what is said of it."""

    def __init__(self, folder, said, seconds):
        self.folder, self.said, self.seconds = Path(folder), said.resolve(), seconds
        self.said.mkdir(parents=True, exist_ok=True)
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.check_output(listed, cwd=ROOT, text=True).splitlines():
            target = self.folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_file():
                shutil.copy(ROOT / name, target)

    def run(self, mutants):
        """Let mutants meet the tests of their files; what is said of them is added to a file."""
        tests = sorted({test for mutant in mutants for test in tests_of(self.folder, mutant.path)})
        is_there = not is_called(mutants[0])
        drawn = [
            {
                "key": mutant.key,
                "path": str(self.folder / mutant.path),
                "text": mutant.applied((self.folder / mutant.path).read_text()),
                "is_there": is_there,
                "seconds": self.seconds,
            }
            for mutant in mutants
        ]
        (self.said / "drawn.json").write_text(json.dumps(drawn))
        with self.changed(mutants[0]) if is_there else contextlib.nullcontext():
            self.pytest(*tests)

    @contextlib.contextmanager
    def changed(self, mutant):
        """Put a change into the copy, and take it out."""
        file = self.folder / mutant.path
        source = file.read_text()
        for text in (mutant.applied(source), source):
            file.write_text(text)
            # a change of one character within a second looks to Python like no change
            Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)
            if text != source:
                yield

    def pytest(self, *tests):
        cache = str(ROOT / "tests" / ".pytest_cache" / "compiled")
        environment = {"JAX_COMPILATION_CACHE_DIR": cache, **os.environ, **FEWER_EXAMPLES}
        environment["PYTHONPATH"] = f"{self.folder}:{self.folder / 'tests'}"
        environment["MUTANTS"] = str(self.said)
        # a session of its own: tests start processes, and those that hang must end with them
        with subprocess.Popen(
            [sys.executable, *PYTEST.split(), *tests],
            cwd=self.folder,
            env=environment,
            stdout=(self.said / "pytest.txt").open("w"),
            start_new_session=True,
        ) as process:
            try:
                process.wait()
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        if process.returncode not in (0, 1, 2, 5):
            sys.exit((self.said / "pytest.txt").read_text())


def why_equivalent(mutant):
    name = mutant.path.rsplit("/", 1)[1]
    return EQUIVALENT.get((name, mutant.text.strip(), mutant.change))


def verdict(mutant, killer):
    reason = why_equivalent(mutant)
    return killer or (f"equivalent: {reason}" if reason else "SURVIVED")


def parsed():
    parser = argparse.ArgumentParser(description="change one token, see whether a test fails")
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rooms", default=ROOMS, help="folders of pipejax/, as engine,schedules")
    parser.add_argument("--results", type=Path, default=ROOT / "results" / "mutants", help="folder")
    parser.add_argument("--seconds", type=float, help="of the processor for a change, at most")
    parser.add_argument("--list", action="store_true", help="only print the changes")
    parser.add_argument("--again", action="store_true", help="run survivors again")
    return parser.parse_args()


def known_of(folder):
    """What is known of mutants: the test that finds one, and how many it has not met."""
    file = folder / "found.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return {key: (found, left) for key, found, left in map(json.loads, lines)}


def main():
    options = parsed()
    if missing():
        sys.exit(f"TESTS names what is not there: {', '.join(missing())}")
    drawn = draw(options.count, options.seed, options.rooms)
    if options.list:
        for mutant in drawn:
            print(f"{mutant.path}:{mutant.line}: {mutant.change:14} {mutant.text.strip()}")
        return
    known = known_of(options.results)
    ready = {key for key, (found, _) in known.items() if found or not options.again}
    left = [m for m in drawn if m.key not in ready and not why_equivalent(m)]
    batches = {}
    for mutant in left:
        alone = None if is_called(mutant) else mutant.key
        batches.setdefault((str(all_tests_of(mutant.path)), alone), []).append(mutant)
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(folder, options.results, options.seconds)
        for batch in batches.values():
            copy.run(batch)
    known = known_of(options.results)
    for mutant in drawn:
        found, unmet = known.get(mutant.key, ("", 0))
        more = f", {unmet} tests not met" if unmet else ""
        place = f"{mutant.path}:{mutant.line}"
        print(
            f"{place:58} {mutant.change:18} {verdict(mutant, found) + more:70} {mutant.text.strip()}"
        )
    kinds = Counter(
        "found" if known.get(m.key, [""])[0] else verdict(m, "").split(":")[0] for m in drawn
    )
    print(", ".join(f"{kind}: {number}" for kind, number in kinds.items()))


if __name__ == "__main__":
    main()
