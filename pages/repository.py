"""Files of the repository that are pages of the site, and links between the two."""

import posixpath
import re
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
# page: the file that it shows
SHOWN: Mapping[str, str] = {
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "glossary.md": "GLOSSARY.md",
    "measured_tables.md": "pipejax/costs/data/measured/README.md",
}
_PAGE_OF = {f"../{path}": page for page, path in SHOWN.items()}
_EXAMPLE = re.compile(r"^(examples/\w+)\.py$")
_LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")


def for_the_site(markdown: str) -> str:
    """Let links of a page to files that are pages too lead to those: in a repository they work."""

    def rewrite_link(link: re.Match[str]) -> str:
        return "](" + _EXAMPLE.sub(r"\1.md", _PAGE_OF.get(link[1], link[1]))

    return _LINK.sub(rewrite_link, markdown)


def shown(page: str) -> str:
    """Return the text of a page that is a file outside of docs/, with the links of a page."""
    path = ROOT / SHOWN[page]
    folder = path.parent.relative_to(ROOT).as_posix()

    def rewrite_relative(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[1]))
        return f"]({posixpath.relpath(target, 'docs')}"

    return for_the_site(_LINK.sub(rewrite_relative, path.read_text()))
