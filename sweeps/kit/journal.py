"""Results that are kept as they come, so that a sweep that was cut short goes on where it was."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipejax.files import write_file

Record = dict[str, Any]


class Journal:
    """A file with one result per line, each under a key.

    Attributes:
      path: the file.
      context: what decides all results, as the code that makes them.
      records: what it holds, by key and context.

    Example:
      >>> import tempfile
      >>> path = Path(tempfile.mkdtemp()) / "sums.jsonl"
      >>> Journal(path, "in floats").once("1+1", lambda: {"sum": 1.0 + 1.0})
      {'sum': 2.0}
      >>> Journal(path, "in floats").once("1+1", lambda: {"sum": None})  # is there already
      {'sum': 2.0}
      >>> Journal(path, "in integers").once("1+1", lambda: {"sum": 1 + 1})
      {'sum': 2}
    """

    def __init__(self, path: Path, context: str) -> None:
        """Read what is there.

        Args:
          path: the file; a last line that was cut short is left out.
          context: as above.
        """
        self.path, self.context = path, context
        self._lock = threading.Lock()
        self.records: dict[str, Record] = {}
        if not path.exists():
            return
        text = path.read_text()
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            write_file(path, whole)
        for line in whole.splitlines():
            entry = json.loads(line)
            self.records[entry["key"]] = entry["record"]

    def once(self, key: str, make: Callable[[], Record]) -> Record:
        """Return the result under a key; make and keep it first if it is not there.

        Args:
          key: says what decides this result.
          make: makes it; NaN and infinity are kept too.

        Returns:
          The result.
        """
        key = f"{key}; {self.context}"
        if key not in self.records:
            record = make()
            with self._lock, self.path.open("a") as file:
                file.write(json.dumps({"key": key, "record": record}) + "\n")
            self.records[key] = record
        return self.records[key]
