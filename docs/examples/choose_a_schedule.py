# %% [markdown]
# # Choose a schedule for Llama-3 70B on 8 nodes
#
# Eight nodes of eight H100: one worker is a node (tensor parallelism of 8 inside it), the pipeline has
# eight workers, and a step has 128 sequences of 8,192 tokens. Which schedule, which microbatch size,
# and is it worth recomputing activations? All of it is one grid, evaluated into a store.

# %%
import tempfile
import pipejax as pj
from pipejax.sweep import STATUS

grid = {
    "schedules": [
        "gpipe",
        "1f1b",
        {"name": "interleaved-1f1b", "stages_per_worker": 2},
        {"name": "interleaved-1f1b", "stages_per_worker": 5},
        "chimera",
    ],
    "workers": 8,
    "minibatch": 128,
    "microbatch_size": [1, 2, 4],
    "models": "llama3-70b",
    "systems": "h100",
    "tensor_parallel": 8,
    "sequence_parallel": [False, True],
    "recompute": ["none", "full"],
    "outputs": ["bubble_ratio", "tokens_per_second", "bound_by"],
}
data = pj.run_sweep(grid, f"{tempfile.mkdtemp()}/llama.zarr").load()
dict(data.step_time.sizes)

# %% [markdown]
# The same grid as a TOML file goes through `pipejax sweep run grid.toml --out llama.zarr`, which shows
# progress, can be interrupted and resumed, and takes a Dask scheduler.
#
# ## Memory
#
# A point that needs more than an accelerator has is kept and marked. Half of this grid does not fit:

# %%
{STATUS[code]: int((data.status == code).sum()) for code in (1, 2, 3)}

# %%
gigabytes = (data.memory_bytes / 1e9).sel(microbatch_size=1, sequence_parallel=False)
for name in data.schedule.values:
    none, full = gigabytes.sel(schedule=name).values
    print(f"{name:36} {none:5.0f} GB, recomputed {full:4.0f} GB")

# %% [markdown]
# GPipe holds all 128 microbatches at once and is out of the question. 1F1B fits by a hair without
# recomputation; interleaving, which has smaller bubbles, needs more memory and does not.
#
# ## Speed

# %%
fits = data.step_time.where(data.status == STATUS.index("feasible"))
ranked = fits.stack(point=fits.dims).dropna("point")
ranked = ranked.sortby(ranked)
for (name, size, is_split, recompute), seconds in list(zip(ranked.point.values, ranked.values))[:5]:
    split = "sequence parallel" if is_split else ""
    print(f"{seconds:.2f} s  {name}, b={size}, recompute {recompute} {split}".rstrip())

# %% [markdown]
# Splitting norms, dropout and messages too (sequence parallelism) is what pays: it makes room for
# interleaving five stages per worker, with two sequences in a microbatch. Recomputing would cost almost
# six seconds and is not needed.

# %%
from pipejax.analysis.uncertainty.sensitivity import RESOURCES

best = data.sel(
    schedule="interleaved-1f1b stages_per_worker=5",
    microbatch_size=2,
    sequence_parallel=True,
    recompute="none",
)
print(
    f"{float(best.bubble_ratio):.1%} idle, {float(best.memory_bytes) / 1e9:.0f} of 83 GB, "
    f"{float(best.tokens_per_second):,.0f} tokens/s, bound by {RESOURCES[int(best.bound_by)]}"
)

# %% [markdown]
# ## Robustness
#
# Real ops jitter. The runners-up see the same random factors: 5 % on every op, 2 % on every worker.

# %%
model, system = pj.load_model("llama3-70b"), pj.load_system("h100")
workload = pj.Workload(model, minibatch=128, tensor_parallel=8, sequence_parallel=True)
uneven = pj.analysis.Jitter(
    op=pj.analysis.Distribution("lognormal", 0.05),
    worker=pj.analysis.Distribution("lognormal", 0.02),
)
runs = []
for name, count, options in (("interleaved-1f1b", 64, {"stages_per_worker": 5}), ("1f1b", 128, {})):
    table = pj.schedules.build(name, num_workers=8, num_microbatches=count, **options)
    runs.append(pj.jitter(table, pj.stage_costs(workload, system, table), uneven, samples=64))
for row in pj.analysis.robustness(runs, quantile=0.95):
    print(
        f"{row.schedule:17} p95 {row.makespan:.1f} s, {row.slowdown - 1:.0%} more than without jitter"
    )

# %% [markdown]
# The order stays. What would change it is on the [next page](network_for_chimera.md); how the
# microbatch size is tuned for one schedule, on [the one after](tune_the_microbatch_size.md).
#
# ## The schedule
#
# As a file for PyTorch, and as a picture of its warm-up:

# %%
table = pj.schedules.build(
    "interleaved-1f1b", num_workers=8, num_microbatches=64, stages_per_worker=5
)
pj.write_table(table, f"{tempfile.mkdtemp()}/schedule.csv")  # PyTorch's format
pj.plot(pj.evaluate(table, pj.stage_costs(workload, system, table)), part="warmup")
