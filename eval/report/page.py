"""A report as one HTML file that needs nothing else, and as Markdown with its figures beside it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape

from .drawing import INK
from .figures import LOOKS
from .parts import Section, Table, filled
from .sources import NotMeasured

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #5c6670; --line: #d9dee3; --paper: #fff;
  --box: #fff6e0; --edge: #d9a400; --row: #f5f7f9; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7ea; --soft: #9aa4ae; --line: #3a4148;
  --paper: #15181b; --box: #2e2610; --edge: #a98200; --row: #1e2226; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 2rem 1.25rem 4rem; background: var(--paper);
  color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 1.7rem; margin: 0 0 .4rem; } h2 { font-size: 1.25rem; margin: 3rem 0 .4rem; }
nav { display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; margin: 1rem 0; }
a { color: inherit; text-underline-offset: .2em; }
p { margin: .4rem 0 .8rem; } .soft { color: var(--soft); font-size: .86rem; }
figure { margin: 1rem 0 .4rem; } figure svg { width: 100%; height: auto; color: var(--ink); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .86rem;
  font-variant-numeric: tabular-nums; margin: .3rem 0 1rem; }
caption { text-align: left; color: var(--soft); padding: .4rem 0; }
caption span { position: sticky; left: 0; display: inline-block; max-width: min(57rem, 92vw); }
th, td { padding: .22rem .7rem; text-align: right; border-bottom: 1px solid var(--line);
  white-space: nowrap; } th { font-weight: 600; } td.word, th.word { text-align: left; }
td.word { white-space: normal; } td.word span { white-space: nowrap; }
tbody tr:nth-child(even) { background: var(--row); }
td i { display: inline-block; width: .62em; height: .62em; border-radius: 50%; margin-right: .4em; }
.missing { background: var(--box); border: 1px solid var(--edge); border-radius: .5rem;
  padding: .8rem 1rem; } code { font-size: .92em; }
summary { cursor: pointer; color: var(--soft); font-size: .9rem; }
"""
_TITLE = "sglang-ppd: what was measured"
_LEAD = (
    "Made of raw files alone. Each section names its file, commit, hardware and seeds; what is not "
    "measured is marked."
)


def html(sections: Sequence[Section]) -> str:
    """Return the report as one HTML page."""
    links = "".join(
        f'<a href="#{section.name}">{escape(section.title)}</a>' for section in sections
    )
    body = "\n".join(part for one in sections for part in _html_section(one))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_TITLE}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{_TITLE}</h1>\n<p>{_LEAD}</p>\n<nav>{links}</nav>\n{body}\n</body>\n</html>\n"
    )


def _html_section(section: Section) -> Iterator[str]:
    yield f'<section id="{section.name}">\n<h2>{escape(section.title)}</h2>'
    yield f"<p>{escape(section.reads)}</p>"
    if isinstance(section.source, NotMeasured):
        notice = f"{escape(section.source.file)} is not there; "
        notice += f"run <code>{escape(section.source.run)}</code>"
        yield f'<p class="missing"><strong>Not measured:</strong> {notice}</p>\n</section>'
        return
    if section.figure is not None:
        label = f'<svg role="img" aria-label="{escape(section.title)}" '
        drawn = _own_ids(section.figure().replace(INK, "currentColor"), section.name)
        yield f"<figure>{drawn.replace('<svg ', label, 1)}</figure>"
    tables = "\n".join(_html_table(table) for table in section.tables)
    if section.figure is not None and tables:
        yield f"<details><summary>The numbers</summary>\n{tables}\n</details>"
    elif tables:
        yield tables
    yield f'<p class="soft">{escape(section.source.origin())}</p>\n</section>'


def _own_ids(svg: str, name: str) -> str:
    """Ids are unique in a figure; on a page with several they must not meet."""
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)


def _html_table(table: Table) -> str:
    words = [not any(_is_number(row[i]) for row in table.rows) for i in range(len(table.head))]

    def line(tag: str, values: Sequence[str]) -> str:
        cells = (
            f"<{tag}{' class=word' if word else ''}>{_marked(value)}</{tag}>"
            for value, word in zip(values, words, strict=True)
        )
        return f"<tr>{''.join(cells)}</tr>"

    caption = f"<caption><span>{_code(table.caption)}</span></caption>" if table.caption else ""
    body = "\n".join(line("td", row) for row in table.rows)
    return (
        f'<div class="scroll"><table>{caption}<thead>{line("th", table.head)}</thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def _is_number(text: str) -> bool:
    return text[:1].isdigit() or (text[:1] in "+-" and text[1:2].isdigit())


def _marked(text: str) -> str:
    """Names of policies with their colours in the figures."""
    return " = ".join(
        f'<span><i style="background:{LOOKS[part][0]}"></i>{escape(part)}</span>'
        if part in LOOKS
        else _code(part)
        for part in text.split(" = ")
    )


def _code(text: str) -> str:
    """Text in HTML, where Markdown has names between backticks."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


_MARKDOWN_INK = "#222222"


def markdown(sections: Sequence[Section], figures: str) -> str:
    """Return the report as Markdown.

    Args:
        figures: the folder of :func:`figure_files`, as links say it.
    """
    parts = [f"# {_TITLE}", f"{_LEAD} `make report` writes this page."]
    for section in sections:
        parts += [f"## {section.title}", section.reads]
        if isinstance(section.source, NotMeasured):
            notice = f"`{section.source.file}` is not there; run `{section.source.run}`"
            parts.append(f"> **Not measured:** {notice}")
            continue
        if section.figure is not None:
            parts.append(f"![{section.title}]({figures}/{section.name}.svg)")
        parts += [table.markdown() for table in section.tables]
        parts.append(f"<sub>{filled(section.source.origin())}</sub>")
    return "\n\n".join(parts) + "\n"


def figure_files(sections: Sequence[Section]) -> Iterator[tuple[str, str]]:
    """Yield name and content of each figure's file, dark on white."""
    white = '<rect width="100%" height="100%" fill="#ffffff"/>'
    for section in sections:
        if section.figure is not None:
            drawn = section.figure().replace(INK, _MARKDOWN_INK)
            head, _, rest = drawn.partition(">")
            yield f"{section.name}.svg", f"{head}>{white}{rest}"
