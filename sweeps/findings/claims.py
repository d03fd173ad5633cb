"""The findings, each judged on its dataset: kept beside the datasets with a verdict."""

from sweeps.findings import delays, gradient_noise, links, offload, queues, regimes
from sweeps.kit.claims import command

MODULES = (links, offload, gradient_noise, regimes, delays, queues)
CLAIMS = tuple(
    sorted((claim for module in MODULES for claim in module.CLAIMS), key=lambda claim: claim.number)
)
STORES = {module.STORE.removesuffix(".zarr"): module.STORE for module in MODULES}


def main() -> None:
    """Print the table of findings and keep it beside their datasets."""
    command(__doc__ or "", CLAIMS, STORES, "findings.json")


if __name__ == "__main__":
    main()
