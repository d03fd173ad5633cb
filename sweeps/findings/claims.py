"""The findings, each judged on its dataset: kept beside the datasets with a verdict."""

import importlib
import pkgutil

import sweeps.findings
from sweeps.kit.claims import command

MODULES = tuple(
    importlib.import_module(f"sweeps.findings.{found.name}")
    for found in pkgutil.iter_modules(sweeps.findings.__path__)
    if found.name != "claims"
)
CLAIMS = tuple(
    sorted((claim for module in MODULES for claim in module.CLAIMS), key=lambda each: each.number)
)
STORES = {module.STORE.removesuffix(".zarr"): module.STORE for module in MODULES}


def main() -> None:
    """Print the table of findings and keep it beside their datasets."""
    command(__doc__ or "", CLAIMS, STORES, "findings.json")


if __name__ == "__main__":
    main()
