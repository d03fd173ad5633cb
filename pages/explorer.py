"""Pictures of the explorer's page for the documentation, as a browser shows it.

    make explorer-pictures

They are kept in docs/assets, for the site is built without a browser.
"""

import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from pipejax.cli.app import run

ASSETS = Path(__file__).parents[1] / "docs" / "assets"
COLOURS, RARE_TOO = 256, Image.Quantize.MAXCOVERAGE  # what is rare keeps its colour
LARGEST = 150_000  # bytes of a picture
SIZES = "--workers 8 --microbatches 16 --worker-times F=1,B=2 --comm 0.15"


class Shot(NamedTuple):
    """A picture.

    Attributes:
      options: of `pipejax show`.
      at: what is chosen, as the address says it.
      scheme: "light" or "dark".
      height: of the window [pixels].
      pointer: where the pointer stands [pixels].
    """

    options: str
    at: str
    scheme: str
    height: int
    pointer: tuple[int, int]


SHOTS = {
    "explorer_schedules": Shot(
        f"--schedules gpipe,1f1b,zb-h1,chimera {SIZES}", "x.transmit=2", "light", 800, (590, 430)
    ),
    "explorer_chosen": Shot(
        f"--schedules 1f1b,zb-v {SIZES} --choose",
        "show=interleaved-1f1b*2,dualpipe-v*2&size=4x16",
        "light",
        760,
        (5, 5),
    ),
    "explorer_op": Shot(
        f"--schedule 1f1b {SIZES} --link blocking",
        "messages=1&view=20~42&selected=2B3",
        "dark",
        700,
        (5, 5),
    ),
    "explorer_model": Shot(
        "--schedule 1f1b --workers 8 --microbatches 32 --model gpt3-175b --system a100 "
        "--minibatch 32 --tensor-parallel 8 --data-parallel 4",
        "curve=memory&x.transmit=4&x.A=2",
        "light",
        800,
        (5, 5),
    ),
}


def take(browser: Browser, name: str, shot: Shot, folder: Path) -> Path:
    """Write a page, open it, and take its picture."""
    page = folder / f"{name}.html"
    if run(["show", *shot.options.split(), "--out", str(page)]):
        raise SystemExit(f"{name}: the page could not be written")
    window = browser.new_page(
        viewport={"width": 1280, "height": shot.height},
        color_scheme="dark" if shot.scheme == "dark" else "light",
    )
    window.goto(f"{page.as_uri()}#{shot.at}")
    window.wait_for_selector("html[data-ready]")
    window.mouse.move(*shot.pointer)
    window.wait_for_timeout(300)  # until it is drawn
    picture = ASSETS / f"{name}.png"
    window.screenshot(path=picture)
    window.close()
    Image.open(picture).quantize(COLOURS, RARE_TOO).save(
        picture, optimize=True
    )  # a third of the bytes
    return picture


def main() -> None:
    """Take all pictures."""
    browser_path = shutil.which("chromium")
    if browser_path is None:
        raise SystemExit("pictures of pages need a browser: apt install chromium")
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        for name, shot in SHOTS.items():
            picture = take(browser, name, shot, Path(folder))
            size = picture.stat().st_size
            print(f"{picture.name}: {size / 1000:.0f} KB")
            if size > LARGEST:
                raise SystemExit(f"{picture.name} is larger than {LARGEST / 1000:.0f} KB")
        browser.close()


if __name__ == "__main__":
    main()
