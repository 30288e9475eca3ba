"""Writes `llms.txt` and `llms-full.txt` beside the built pages, for readers that are programs.

`llms.txt` lists all pages with their first sentences, in the order of the site. `llms-full.txt` has
the text of all pages: Markdown as it was written, and the reference as text made of the docstrings.
It builds nothing twice, executes nothing and needs no network.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.builders.text import TextBuilder

# what others have made of a page stands in no source
MADE = re.compile(r"^```\{(eval-rst|include|literalinclude)\}", re.MULTILINE)
TOCTREE = re.compile(r"^```\{toctree\}.*?^```\n", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"^<!--.*?-->\n", re.MULTILINE | re.DOTALL)
ROLE = re.compile(r"\{[\w:]+\}`[~!]?([^`<]*?)\s*(?:<[^`]*>)?`")
FULL = "llms-full.txt"


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def write(app: Sphinx, exception: Exception | None) -> None:
    """Write both files, if the site was built as HTML."""
    if exception is not None or app.builder.format != "html":
        return
    root = app.config.root_doc
    lines = [f"# {app.config.project}", "", f"> {summary(app, root)}", ""]
    lines += [f"The text of all pages in one file: [{FULL}]({FULL})", ""]
    texts = [text(app, root)]
    for group in app.env.get_doctree(root).findall(addnodes.toctree):
        names = [each for top in group["includefiles"] for each in below(app, top)]
        texts += [text(app, name) for name in names]
        lines += [f"## {group['caption']}", "", *(entry(app, name) for name in names), ""]
    (app.outdir / "llms.txt").write_text("\n".join(lines), encoding="utf-8")
    (app.outdir / FULL).write_text("\n\n".join(texts) + "\n", encoding="utf-8")


def below(app: Sphinx, name: str) -> Iterator[str]:
    """A page and all pages below it, in the order of the site."""
    yield name
    for each in app.env.toctree_includes.get(name, []):
        yield from below(app, each)


def entry(app: Sphinx, name: str) -> str:
    """A line of llms.txt. It leads to the copied Markdown, unless that is not all of the page."""
    path = Path(app.env.doc2path(name))
    where = f"_sources/{name}{path.suffix}{app.config.html_sourcelink_suffix}"
    if path.suffix != ".md" or MADE.search(path.read_text(encoding="utf-8")):
        where = app.builder.get_target_uri(name)
    about = summary(app, name)
    return f"- [{title(app, name)}]({where})" + (f": {about}" if about else "")


def title(app: Sphinx, name: str) -> str:
    return app.env.titles[name].astext()


def summary(app: Sphinx, name: str) -> str:
    """The first paragraph below the title of a page, in one line."""
    for paragraph in app.env.get_doctree(name).findall(nodes.paragraph):
        if isinstance(paragraph.parent, nodes.section):
            return " ".join(paragraph.astext().split())
    return ""


def text(app: Sphinx, name: str) -> str:
    path = Path(app.env.doc2path(name))
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        return cells(source)
    if path.suffix != ".md" or MADE.search(source):
        return made(app, name)
    return ROLE.sub(r"`\1`", COMMENT.sub("", TOCTREE.sub("", source))).strip()


def cells(source: str) -> str:
    """The cells of a notebook, as Markdown."""
    found = []
    for cell in json.loads(source)["cells"]:
        content = "".join(cell["source"]).strip()
        found.append(f"```python\n{content}\n```" if cell["cell_type"] == "code" else content)
    return "\n\n".join(found)


def made(app: Sphinx, name: str) -> str:
    """What directives have made of a page, as plain text."""
    builder = TextBuilder(app, app.env)
    builder.init()
    doctree = app.env.get_doctree(name)
    translator = builder.create_translator(doctree, builder)
    doctree.walkabout(translator)
    return str(translator.body).strip()  # type: ignore[attr-defined]
