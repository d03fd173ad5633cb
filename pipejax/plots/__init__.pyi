"""Parts of drawings, with their style and colours; `pj.plot` draws a timeline at once."""

from pipejax.plots import palette as palette, style as style
from pipejax.plots.charts import (
    PARAMETER_NAMES as PARAMETER_NAMES,
    draw_predictions as draw_predictions,
    draw_tornado as draw_tornado,
    draw_violins as draw_violins,
    tornado_entries as tornado_entries,
    violin_entries as violin_entries,
)
from pipejax.plots.timeline import (
    LIMIT as LIMIT,
    Curves as Curves,
    bar_entries as bar_entries,
    draw_bars as draw_bars,
    draw_memory as draw_memory,
)
from pipejax.plots.widget import ExplorerWidget as ExplorerWidget, explore as explore
