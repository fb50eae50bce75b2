"""`report`: tables, figures and provenance of a folder as one HTML page that needs no other file.

A folder of studies has `table.md` and a figure each; a sweep has `results.parquet` alone.
"""

from __future__ import annotations

import base64
import html
from pathlib import Path

import jinja2
from markdown_it import MarkdownIt

from oled.atomic import write_text
from oled.errors import UserError
from oled.results import table as results

MARKDOWN = MarkdownIt("js-default")
"""CommonMark with tables; HTML in a text is shown, not obeyed."""

PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{{ title }}</title>
<style>
body { font: 15px/1.5 sans-serif; max-width: 72em; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 1em 0; font-size: 13px }
table { display: block; overflow-x: auto }
th, td { border: 1px solid #ccc; padding: .2em .6em; text-align: left; vertical-align: top }
th { background: #f4f4f4 }
img { max-width: 100%; max-height: 42em; display: block; margin: 1em 0 }
pre { overflow-x: auto; font-size: 13px }
nav { columns: 3 }
</style>
<h1>{{ title }}</h1>
<nav>{% for part in parts %}<a href="#{{ part.name }}">{{ part.name }}</a><br>{% endfor %}</nav>
{% for part in parts %}
<section id="{{ part.name }}">
{{ part.text | safe }}
{% for image in part.images %}<img alt="{{ part.name }}" src="data:image/png;base64,{{ image }}">
{% endfor %}</section>
{% endfor %}
</html>
"""


def report(folder: Path) -> Path:
    """Write FOLDER/report.html of the folder's results and of those one level below; return it."""
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder")
    places = [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]
    parts = [
        {
            "name": place.name,
            "text": _text(place),
            "images": [_base64(file) for file in sorted(place.glob("*.png"))],
        }
        for place in places
        if (place / "table.md").is_file() or (place / results.TABLE).is_file()
    ]
    if not parts:
        raise UserError(f"{folder}: holds no results; `oled reproduce` and `oled sweep` write some")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    page = environment.from_string(PAGE).render(title=f"Results: {folder.name}", parts=parts)
    return write_text(folder / "report.html", page)


def _base64(file: Path) -> str:
    return base64.b64encode(file.read_bytes()).decode()


def _text(folder: Path) -> str:
    page, heading = folder / "table.md", f"<h2>{html.escape(folder.name)}</h2>\n"
    if page.is_file():
        text = page.read_text(encoding="utf-8")
        return ("" if text.startswith("#") else heading) + as_html(text)
    table = results.read_table(folder)
    shown = results.as_text(table, ["overrides"] if "overrides" in table else ["policy", "slots"])
    return f"{heading}<pre>{html.escape(shown)}</pre>"


def as_html(text: str) -> str:
    """Render Markdown with its headings one level lower: the page has a first one of its own."""
    tokens = MARKDOWN.parse(text)
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{int(token.tag[1]) + 1}"
    return str(MARKDOWN.renderer.render(tokens, MARKDOWN.options, {}))
