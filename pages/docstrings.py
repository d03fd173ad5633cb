"""Docstrings as the site shows them: sections that hold sessions, and page names as links."""

import re
from typing import Any

import griffe

_SESSION = re.compile(r"^( *)Example:$", re.MULTILINE)
_PAGE = re.compile(r"\bdocs/(\w+)\.md\b")


class ForTheSite(griffe.Extension):
    """Rename `Example:` to `Examples:`, which the reader knows; link pages by their names."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change one docstring."""
        if obj.docstring is not None:
            text = _SESSION.sub(r"\1Examples:", obj.docstring.value)
            obj.docstring.value = _PAGE.sub(r"[\1](../\1.md)", text)
