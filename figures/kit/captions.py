r"""Captions of all figures, to be read at once (Markdown) and to be set in a paper (LaTeX)."""

from collections.abc import Mapping

# what LaTeX reads as a command, and letters that its standard fonts have under another name
LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "µ": r"\textmu{}",
    **{letter: rf"\{letter}" for letter in "{}$&#_%"},
}
FIGURE = r"""\begin{{figure}}
  \centering
  \includegraphics{{{name}.pdf}}
  \caption{{{text}}}
  \label{{fig:{name}}}
\end{{figure}}
"""


def in_markdown(captions: Mapping[str, str]) -> str:
    """Write the page of all figures.

    Args:
      captions: by the name of the figure.

    Returns:
      The page; pictures lie beside it.
    """
    return "\n".join(f"![{name}]({name}.png)\n\n{text}\n" for name, text in captions.items())


def in_latex(captions: Mapping[str, str]) -> str:
    r"""Write a `figure` for every figure, at its own size, which is that of print.

    Args:
      captions: by the name of the figure.

    Returns:
      The text, for `\input`; needs graphicx. Figures are labelled `fig:NAME`.

    Example:
      >>> print(in_latex({"jitter": "5 % of a_b"}).splitlines()[3])
        \caption{5 \% of a\_b}
    """
    return "\n".join(
        FIGURE.format(name=name, text=escaped(text)) for name, text in captions.items()
    )


def escaped(text: str) -> str:
    """Write a text so that LaTeX sets it as it stands."""
    return "".join(LATEX.get(letter, letter) for letter in text)
