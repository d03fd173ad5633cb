"""What draws itself, and shows that in notebooks."""

from typing import Any

MOST_CELLS = 20_000  # of a table that a notebook draws without being asked: it takes a second


class Drawn:
    """A run, or a table in its own slots, as a timeline."""

    def plot(self, **how: Any) -> Any:
        """Draw it as a timeline; arguments and result are those of `pipejax.plot`."""
        import pipejax as pj  # drawing is above this room: the door knows where

        return pj.plot(self, **how)  # type: ignore[arg-type]  # all that are drawn derive from this

    def _repr_svg_(self) -> str | None:
        """Show it in a notebook, if it is not too large and matplotlib is installed."""
        table: Any = getattr(self, "table", self)
        if table.num_workers * table.num_slots > MOST_CELLS:
            return None
        try:
            picture = self.plot()
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] != "matplotlib":
                raise
            return None
        text: str = picture._repr_svg_()
        return text

    def above_picture(self, text: str) -> str:
        """Put HTML above the picture: where there is HTML, a notebook shows nothing else."""
        picture = self._repr_svg_()
        return text if picture is None else f"<div>{text}{picture}</div>"
