"""The tests run stricter than users do: float64, no silent rank promotion, fixed seeds."""

import os

# most of the tests' time is compilation of programs that run once: here machine code is not
# optimised, and fusions do not go through the slower of XLA's two emitters. XLA_FLAGS= in the
# environment runs the tests with what users compile, or where XLA knows a flag no longer.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
)

import jax
from hypothesis import HealthCheck, settings

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_rank_promotion", "raise")

_quiet = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("dev", max_examples=25, derandomize=True, **_quiet)
settings.register_profile("ci", max_examples=60, derandomize=True, **_quiet)
settings.register_profile("nightly", max_examples=2000, **_quiet)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
