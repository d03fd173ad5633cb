"""How docstrings are read: `Example:` holds a session, which the reader knows as `Examples:`."""

import re
from typing import Any

import griffe

_HEADING = re.compile(r"^( *)Example:$", re.MULTILINE)


class Sessions(griffe.Extension):
    """Rename the sections that hold examples."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename them in one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = _HEADING.sub(r"\1Examples:", obj.docstring.value)
