"""A hook of mkdocs (`mkdocs.yml`) for pages that are not files of `docs/`.

The navigation lists all pages: `reference/MODULE.md` is made from the docstrings of MODULE, and a page in `PAGES` from
its file of the repository. Links work in the repository as they are written; in the site they become links to its
pages, and a link to a file without a page becomes its text.
"""

import os
import re
from pathlib import PurePosixPath
from typing import Any

# Page of the site -> file of the repository.
PAGES = {
    "index.md": "README.md",
    "project/benchmarks.md": "bench/README.md",
    "project/examples.md": "examples/README.md",
    "project/security.md": "SECURITY.md",
    "project/contributing.md": "CONTRIBUTING.md",
    "project/changes.md": "CHANGELOG.md",
}
REFERENCE = "reference/"
# Names that a package imports from its modules on first access, where a parser does not find them.
_OF_PACKAGES = {"terrace": ("terrace.train.trainer.Trainer", "terrace.model.hf.blocks.blocks_of")}
_LINK = re.compile(r"(\[[^\]\n]*\])\((?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the root and of the reference."""
    from mkdocs.structure.files import File  # here, so that tests of the other functions need no mkdocs

    for uri, path in PAGES.items():
        with open(path, encoding="utf-8") as file:
            files.append(File.generated(config, uri, content=file.read()))
    for uri in sorted(pages_of(config["nav"])):
        if uri.startswith(REFERENCE):
            files.append(File.generated(config, uri, content=reference(PurePosixPath(uri).stem)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """The page's text with links to pages of the site."""
    uri = str(page.file.src_uri)
    return linked(markdown, uri, {str(each.src_uri) for each in files})


def pages_of(navigation: Any) -> set[str]:
    """Every page that a navigation names."""
    if isinstance(navigation, str):
        return {navigation}
    parts = navigation.values() if isinstance(navigation, dict) else navigation
    return {uri for part in parts for uri in pages_of(part)}


def reference(module: str) -> str:
    """The page of a module, which mkdocstrings fills in."""
    parts = "".join(f"\n::: {name}\n    options:\n      heading_level: 2\n" for name in _OF_PACKAGES.get(module, ()))
    return f"# {module}\n\n::: {module}\n    options:\n      show_root_heading: false\n{parts}"


def linked(markdown: str, uri: str, uris: set[str]) -> str:
    """The text of page `uri` with links to the pages `uris` of the site."""
    source = PAGES.get(uri, f"docs/{uri}")
    pages = {path: page for page, path in PAGES.items()}

    def changed(match: re.Match[str]) -> str:
        words, target, anchor = match[1], match[2], match[3] or ""
        path = os.path.normpath(os.path.join(os.path.dirname(source), target))
        page = pages.get(path, path.removeprefix("docs/") if path.startswith("docs/") else "")
        if page not in uris:
            return words[1:-1]
        return f"{words}({os.path.relpath(page, os.path.dirname(uri) or '.')}{anchor})"

    return _LINK.sub(changed, markdown)
