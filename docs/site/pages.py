"""A hook of MkDocs: what the site shows besides the pages in docs/. Nothing is kept twice.

README.md is the first page, and the other pages of the root have one each. Every file of the repository that a page
links to is a page with its source. Notebooks become pages with their outputs. A link that leads out of docs/ on disk
leads to these pages in the site; all other links are left to MkDocs, which checks them.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

import reference
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
# Page of the site -> file of the repository.
SHOWN = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "security.md": "SECURITY.md",
    "benchmarks.md": "benchmarks/RESULTS.md",
}
FENCE = re.compile(r"^(`{3,}).*?^\1`*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
OUTSIDE = ("https:", "http:", "mailto:", "#", "data:")
LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".toml": "toml", ".md": "markdown"}
LONGEST_OUTPUT = 4_000  # characters


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages, and one for each source file that a page leads to."""
    texts = {page: (ROOT / path).read_text() for page, path in SHOWN.items()}
    for file in list(files):
        if file.src_uri.endswith(".ipynb"):
            files.remove(file)
            stored = json.loads((ROOT / "docs" / file.src_uri).read_text())
            texts[file.src_uri.replace(".ipynb", ".md")] = notebook(stored)
    texts |= reference.pages()
    for page, text in texts.items():
        files.append(File.generated(config, page, content=text))
    for path in sorted(linked(texts, [file.src_uri for file in files.documentation_pages()])):
        files.append(File.generated(config, source_page(path), content=source(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    uri = page.file.src_uri
    if uri.startswith("source/"):
        return markdown
    in_site = outside_code(markdown, lambda text: LINK.sub(lambda match: f"]({target(match[1], uri)})", text))
    return in_site + reference.below(uri)


def outside_code(text: str, change: Any) -> str:
    """A page with its text changed and its blocks of code as they are."""
    parts, at = [], 0
    for block in FENCE.finditer(text):
        parts += [change(text[at : block.start()]), block[0]]
        at = block.end()
    return "".join([*parts, change(text[at:])])


def place(uri: str) -> str:
    """Where a page of the site comes from, in the repository."""
    return SHOWN.get(uri, f"docs/{uri}")


def target(link: str, uri: str) -> str:
    """Where a link of the page `uri` leads to in the site."""
    if link.startswith(OUTSIDE):
        return link
    path, _, anchor = link.partition("#")
    leads_to = posixpath.normpath(posixpath.join(posixpath.dirname(place(uri)), path))
    there = next((page for page, file in SHOWN.items() if file == leads_to), "")
    if not there and leads_to.startswith("docs/"):
        there = leads_to.removeprefix("docs/").replace(".ipynb", ".md")
    there = there or source_page(leads_to)
    back = posixpath.relpath(there, posixpath.dirname(uri) or ".")
    return back + (f"#{anchor}" if anchor else "")


def linked(texts: dict[str, str], uris: list[str]) -> set[str]:
    """Files and folders of the repository that pages lead to and that are not pages themselves."""
    found = set()
    for uri in uris:
        text = FENCE.sub("", texts[uri] if uri in texts else (ROOT / "docs" / uri).read_text())
        for link in LINK.findall(text):
            if link.startswith(OUTSIDE):
                continue
            path = posixpath.normpath(posixpath.join(posixpath.dirname(place(uri)), link.partition("#")[0]))
            if not path.startswith("docs/") and path not in SHOWN.values() and (ROOT / path).exists():
                found.add(path)
    return found


def source_page(path: str) -> str:
    return f"source/{path}.md"


def source(path: str) -> str:
    """A file with numbered lines, or the names in a folder. Left out of the search: the pages are what is searched."""
    file = ROOT / path
    head = f"---\nsearch:\n  exclude: true\nhide: [navigation, toc]\ntitle: {path}\n---\n\n# `{path}`\n\n"
    if file.is_dir():
        return head + "\n".join(f"- `{inside.name}`" for inside in sorted(file.iterdir()) if inside.is_file())
    return f'{head}``````{LANGUAGES.get(file.suffix, "text")} linenums="1"\n{file.read_text()}\n``````\n'


def notebook(stored: dict[str, Any]) -> str:
    """A notebook as a page: its text, its code, and what the code printed and drew."""
    parts = []
    for cell in stored["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
        elif cell["cell_type"] == "code":
            parts += [fenced(text, "python"), *filter(None, map(output, cell["outputs"]))]
    return "\n\n".join(parts) + "\n"


def output(stored: dict[str, Any]) -> str:
    data = stored.get("data", {})
    if "image/png" in data:
        picture = "".join(data["image/png"]).replace("\n", "")
        return f'<img alt="What this cell draws" src="data:image/png;base64,{picture}">'
    text = "".join(stored.get("text") or data.get("text/plain") or "").rstrip()
    return fenced(text[:LONGEST_OUTPUT], "text") if text else ""


def fenced(text: str, language: str) -> str:
    return f"``````{language}\n{text}\n``````"
