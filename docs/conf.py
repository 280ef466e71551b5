"""Sphinx's settings for the site: `make docs` builds it into build/docs/html, without a network."""

import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path.insert(0, str(HERE))

import charts  # noqa: E402  (docs/charts.py)
import pictures  # noqa: E402  (docs/pictures.py)

import raddle  # noqa: E402

project = "Raddle"
version = release = raddle.__version__
copyright = "the Raddle authors, Apache-2.0"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_*"]

# Headings are targets, as they are where Markdown is shown without this site.
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "deflist", "attrs_inline"]

# Docstrings name things in single backticks; what is not a name of Raddle stays code.
default_role = "py:obj"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"

html_theme = "furo"
html_title = f"Raddle {version}"
html_static_path = ["_static"]
html_css_files = ["raddle.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#a33b20", "color-brand-content": "#a33b20"},
    "dark_css_variables": {"color-brand-primary": "#f0916f", "color-brand-content": "#f0916f"},
}

_LINK = re.compile(r"(?<!!)\[([^\]\n]*)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")

def _name_sources(app, docname, source):
    """A link out of the docs, to a file of the sources, becomes that file's name: the site does not carry it."""
    folder = Path(app.env.doc2path(docname)).parent

    def replaced(found):
        target = (folder / found[2]).resolve()
        if target.is_relative_to(HERE):
            return found[0]
        path = target.relative_to(ROOT) if target.is_relative_to(ROOT) else found[2]
        return found[1] if found[1].strip("`") == str(path) else f"{found[1]} (`{path}`)"

    source[0] = _LINK.sub(replaced, source[0])


# In the sidebar, the pages of these folders stand below their README. As plain text, where a directive would show, the
# READMEs have tables of them.
_LISTED_BELOW = {"design/README": "*\n*/*", "lab/README": "*"}


def _list_folder(app, docname, source):
    if docname in _LISTED_BELOW:
        source[0] += f"\n```{{toctree}}\n:hidden:\n:glob:\n\n{_LISTED_BELOW[docname]}\n```\n"


def _hide_unknown(app, what, name, obj, options, signature, returned):
    """Keywords that a function refuses by name are no part of how it is called."""
    return (signature and signature.replace(", **unknown", "")), returned


def setup(app):
    drawn = HERE / "_drawn"
    pictures.draw_all(drawn)
    charts.draw_all(drawn)
    app.connect("source-read", _name_sources)
    app.connect("source-read", _list_folder)
    app.connect("autodoc-process-signature", _hide_unknown)
