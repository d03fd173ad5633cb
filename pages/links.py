"""Look through a built site: links that lead nowhere, and anything that a page would fetch.

    python -m pages.links site

Of links to other sites only the form is looked at; whether they answer is not asked.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

# what a browser loads for a page, by tag
LOADED: Mapping[str, str] = {
    "script": "src",
    "img": "src",
    "source": "src",
    "iframe": "src",
    "video": "src",
    "object": "data",
}
LOADED_RELATIONS = {"stylesheet", "preconnect", "preload", "icon", "modulepreload", "prefetch"}


class Seen(NamedTuple):
    """Links, anchors and loaded files of a page.

    Attributes:
      anchors: what a link can lead to within it.
      links: where it leads.
      loaded: what a browser fetches to show it.
    """

    anchors: set[str]
    links: list[str]
    loaded: list[str]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen = Seen(set(), [], [])

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attributes}
        if "id" in values:
            self.seen.anchors.add(values["id"])
        if tag == "a" and "href" in values:
            self.seen.links.append(values["href"])
            self.seen.anchors.update(filter(None, [values.get("name")]))
        relations = set(values.get("rel", "").split())
        if tag == "link" and relations & LOADED_RELATIONS:
            self.seen.loaded.append(values.get("href", ""))
        if LOADED.get(tag, "") in values:
            self.seen.loaded.append(values[LOADED[tag]])


def read_page(path: Path) -> Seen:
    """Read the links and anchors of a page."""
    reader = _Reader()
    reader.feed(path.read_text())
    return reader.seen


def faults(site: Path) -> Iterator[str]:
    """Say what is wrong, one line each."""
    pages = {path: read_page(path) for path in sorted(site.rglob("*.html"))}
    for path, seen in pages.items():
        page = path.relative_to(site).as_posix()
        for link in seen.links:
            wrong = _wrong_link(link, path, pages, site)
            if wrong:
                yield f"{page}: {link}: {wrong}"
        for address in seen.loaded:
            if urlsplit(address).scheme == "data":
                continue
            if _is_elsewhere(address):
                yield f"{page}: {address}: the page fetches it"
            elif not address or not _target(address, path, site).is_file():
                yield f"{page}: {address!r}: no such file"


def _wrong_link(link: str, path: Path, pages: Mapping[Path, Seen], site: Path) -> str:
    """Say what is wrong with a link of a page, if anything is."""
    parts = urlsplit(link)
    if _is_elsewhere(link):
        is_whole = parts.scheme == "https" and "." in parts.netloc and " " not in link
        return "" if is_whole else "not https, or no address"
    if parts.scheme:
        return f"a link by {parts.scheme}"
    target = _target(link, path, site) if parts.path else path
    if target.is_dir():
        target /= "index.html"
    if not target.is_file():
        return "no such file"
    is_state = "=" in parts.fragment  # that a page reads itself
    is_there = not parts.fragment or is_state or target not in pages
    return "" if is_there or unquote(parts.fragment) in pages[target].anchors else "no such anchor"


def _target(address: str, path: Path, site: Path) -> Path:
    target = unquote(urlsplit(address).path)
    return (site / target[1:]) if target.startswith("/") else (path.parent / target).resolve()


def _is_elsewhere(address: str) -> bool:
    return bool(urlsplit(address).netloc)


def main() -> int:
    """Print what is wrong; return 1 if anything is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("site", type=Path)
    site = parser.parse_args().site.resolve()
    problems = list(faults(site))
    print(*problems, sep="\n", file=sys.stderr, end="\n" if problems else "")
    print(f"{site}: {len(list(site.rglob('*.html')))} pages, {len(problems)} faults")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
