"""Hooks that MkDocs calls while it builds: pages that no file in docs/ holds, and their links.

The environment variable DOCS_WHOLE=false leaves out what takes time: running notebooks and
commands, drawing pictures. Pages and links are the same.
"""

import os

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from pages.api import api_pages
from pages.commands import commands_page, with_output
from pages.drawings import drawings
from pages.gallery import gallery_files
from pages.input_files import input_file_pages
from pages.live import LIVE, address, live_page
from pages.notebooks import notebook_files, scripts
from pages.options import options_page
from pages.programs import program_files
from pages.repository import SHOWN, for_the_site, shown


def is_whole() -> bool:
    """Return whether to make the slow parts too."""
    return os.environ.get("DOCS_WHOLE", "true") != "false"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and pictures that are made."""
    os.environ["COLUMNS"] = "80"  # of what commands print
    contents: dict[str, str | bytes] = {page: shown(page) for page in SHOWN}
    contents |= gallery_files(draw=is_whole(), address=address) | drawings(draw=is_whole())
    contents[LIVE] = live_page(whole=is_whole())
    contents |= {"commands.md": commands_page(whole=is_whole()), "options.md": options_page()}
    contents |= api_pages() | input_file_pages()
    contents |= program_files(config.site_name, str(config.site_description), config.nav)
    for script in scripts():
        files.remove(files.src_uris[f"examples/{script.name}"])
        contents |= notebook_files(script, execute=is_whole())
    for path, content in contents.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links to files of the repository that are pages; run the commands of sessions."""
    return for_the_site(with_output(markdown) if is_whole() else markdown)
