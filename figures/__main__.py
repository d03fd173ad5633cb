"""Draw every figure from saved data: `python -m figures --data STORE --out FOLDER`."""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import xarray as xr
from rich.console import Console
from rich.progress import track

from figures import asymmetric, bubble_ratio, hanayo, memory, ranking, run_time
from pipejax import style

SCRIPTS = (bubble_ratio, run_time, memory, hanayo, asymmetric, ranking)


def main() -> None:
    """Draw all figures as pdf and png."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="Zarr store to read")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    options = parser.parse_args()
    style.use()
    options.out.mkdir(parents=True, exist_ok=True)
    with xr.open_zarr(options.data) as store:
        data = store.load()
    drawn = []
    for script in track(SCRIPTS, "figures", console=Console(stderr=True)):
        for name, figure in script.draw(data).items():
            figure.savefig(options.out / f"{name}.pdf", metadata={"CreationDate": None})
            figure.savefig(options.out / f"{name}.png")
            plt.close(figure)
            drawn.append(name)
    Console().print(f"{len(drawn)} figures in {options.out}: {', '.join(drawn)}", soft_wrap=True)


if __name__ == "__main__":
    main()
