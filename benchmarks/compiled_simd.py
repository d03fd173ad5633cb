"""The same recurrence in C++ with blocked SIMD, compiled for one table where a compiler is found.

`blocked_simd/bench.cpp` is the reference that the batched engine is held against, unchanged: an
expert's alternative, table-driven loops over blocks of the batch that the compiler vectorizes. It
takes F and B of each stage and one message time per configuration. Its table is a header that is
written here, with the ops in the order in which they start at unit costs.
"""

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from pipejax.engine.lowering.program import SOURCE
from pipejax.schedules.cells.ops import Phase

SOURCES = Path(__file__).parent / "blocked_simd"
FLAGS = ["-O3", "-march=native", "-mprefer-vector-width=512", "-std=c++17", "-pthread"]


def compiler():
    """Return the C++ compiler of this machine, or None."""
    return next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))), None)


@functools.cache
def library(table):
    """Compile the loops for a table, which is the text of its header."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "table.h").write_text(table)
        # the form that writes out every op takes one cost per phase only, and is not compared
        Path(folder, "straight.h").write_text("const V vout = tF + tB + c;\n")
        compiled = Path(folder, "table.so")
        source = SOURCES / "door.cpp"
        command = [
            compiler(),
            *FLAGS,
            "-w",
            "-shared",
            "-fPIC",
            f"-I{folder}",
            str(source),
            "-o",
            str(compiled),
        ]
        subprocess.run(command, check=True)
        return ctypes.CDLL(str(compiled))


def blocked(program, forward, backward, message):
    """Return a function that solves a batch: costs (batch,) or (batch, stages), messages (batch,).

    None without a compiler, or where the program has ops other than F and B. The loops read costs
    stage by stage; the copy that puts them so is made here and not timed.
    """
    if compiler() is None or not np.isin(program.phase[1:], (Phase.F, Phase.B)).all():
        return None
    loops, dtype = library(header(program)), message.dtype
    load, run = (getattr(loops, f"{name}_{dtype}") for name in ("load", "run"))
    load.restype = ctypes.c_void_p
    size = len(message)
    columns = [np.ascontiguousarray(costs.T) for costs in (forward, backward, message)]
    loaded = load(*map(_address, columns), size, int(forward.ndim == 2))
    out = np.empty(size, dtype)

    def solve():
        run(ctypes.c_void_p(loaded), _address(out), size, os.cpu_count())
        return out

    return solve


def _address(array):
    return ctypes.c_void_p(array.ctypes.data)


def header(program):
    """Write a program as the arrays that the loops read: ops in order, and reused buffer slots."""
    preds, worker = np.asarray(program.preds), np.asarray(program.worker)
    end = np.zeros(program.num_nodes)
    for node in range(1, program.num_nodes):
        end[node] = end[preds[node]].max() + 1
    order = 1 + np.lexsort((worker[1:], end[1:]))  # by unit start
    number = {node: k for k, node in enumerate(order.tolist())}
    previous, other, last = [], [], {}
    for node in order.tolist():
        previous.append(number[last[worker[node]]] if worker[node] in last else -1)
        last[worker[node]] = node
        sent = [p for p in preds[node].tolist() if p != SOURCE and worker[p] != worker[node]]
        other.append(number[sent[0]] if sent else -1)
    ends = [number[node] for node in last.values()]
    slot, num_slots = slots(previous, other, ends)
    arrays = {
        "kind": np.asarray(program.phase)[order] != Phase.F,
        "stage": np.asarray(program.stage)[order],
        "prev": previous,
        "dep": other,
        "slot": slot,
        "sp": [slot[op] if op >= 0 else -1 for op in previous],
        "sd": [slot[op] if op >= 0 else -1 for op in other],
        "fs": [slot[op] for op in ends],
        "fin": ends,
    }
    stages = int(np.max(program.stage)) + 1
    sizes = f"N={len(order)}, NP={len(ends)}, NS={stages}, NSLOT={num_slots}, NFIN={len(ends)}"
    lines = [f"static const int {sizes};"]
    for name, values in arrays.items():
        numbers = ",".join(str(int(value)) for value in values)
        lines.append(f"static const int t_{name}_init[]={{{numbers}}};")
    return "\n".join(lines) + "\n"


def slots(previous, other, ends):
    """Give every op a slot, that of an operand which nobody else reads where there is one."""
    last_use = list(range(len(previous)))
    for op, operands in enumerate(zip(previous, other, strict=True)):
        for operand in operands:
            if operand >= 0:
                last_use[operand] = op
    for op in ends:
        last_use[op] = len(previous)
    slot, free, used = [], [], 0
    for op, operands in enumerate(zip(previous, other, strict=True)):
        free += [slot[k] for k in sorted(set(operands)) if k >= 0 and last_use[k] == op]
        slot.append(free.pop() if free else used)
        used = max(used, slot[-1] + 1)
    return slot, used
