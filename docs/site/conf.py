"""The configuration of Sphinx. `python scripts/make_site.py` writes the source and starts the build."""

project = "bnrnn"
author = "the bnrnn authors"
project_copyright = "the bnrnn authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns: list[str] = []

myst_heading_anchors = 4
myst_enable_extensions = ["attrs_inline"]

default_role = "code"
autodoc_member_order = "bysource"
autodoc_use_type_comments = False
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True, "exclude-members": "forward, extra_repr"}
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = "bnrnn"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
templates_path = ["templates"]
html_theme_options = {"navigation_with_keys": True}
