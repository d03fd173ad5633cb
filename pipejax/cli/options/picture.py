"""Options of pictures that several commands share: the paper, and what schedules are called."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipejax.cli.options.option import options
from pipejax.cli.options.tables import with_labels
from pipejax.cli.options.values import Text

if TYPE_CHECKING:
    from pipejax.plots.style import Paper


@options
class PaperSettings:
    """Size and font of a drawing.

    Attributes:
      size: of a drawing; 5in, 84mm and 240pt are widths too.
      font: of a drawing.
      font_size: of titles in a drawing; numbers have a point less.
    """

    size: Text = None
    font: Text = None
    font_size: float | None = None

    def paper(self, size: str = "page") -> "Paper":
        """Return what a drawing is made for; `size` is the width that it has if none is given."""
        from pipejax.plots import style  # matplotlib is an extra, slow to import

        font_size = style.FONT_SIZE if self.font_size is None else self.font_size
        return style.paper(self.size or size, self.font, font_size)


def labelled(labels: str | None, schedules: Sequence[str]) -> list[str]:
    """Give every schedule a name of its own: its label, or the name that it has."""
    from pipejax.plots.caption import named

    if labels is None:
        return [*named((name, None) for name in schedules)]
    return with_labels(labels, schedules)
