"""Files of the site for programs: a list of its pages, the skill, and the schemas of `--json`."""

from collections.abc import Iterator
from typing import Any

from pipejax.cli.app import SKILL
from pipejax.cli.options.assertions import FOLDER


def program_files(title: str, about: str, nav: Any) -> dict[str, str]:
    """Return the files by their paths on the site."""
    links = "".join(f"- [{name}]({address})\n" for name, address in _pages(nav))
    schemas = sorted(FOLDER.glob("*.json"))
    optional = "".join(f"- [schema of {path.stem}](schemas/{path.name})\n" for path in schemas)
    skill = "- [Skill](skill.txt): which command answers a question, and which key to read\n"
    index = f"# {title}\n\n> {about}\n\n{skill}\n## Pages\n\n{links}\n## Optional\n\n{optional}"
    files = {f"schemas/{path.name}": path.read_text(encoding="utf-8") for path in schemas}
    return files | {"llms.txt": index, "skill.txt": SKILL.read_text(encoding="utf-8")}


def _pages(nav: Any) -> Iterator[tuple[str, str]]:
    """Yield titles and addresses of all pages of a tree."""
    for entry in nav:
        for name, inner in entry.items():
            if isinstance(inner, str):
                yield name, inner.replace(".md", ".html")
            else:
                yield from _pages(inner)
