"""The Sphinx extension that makes the site from the chapters and the scripts.

It leaves the Markdown as a code host shows it, and adds what only a site can have: the
sidebar, a page for every two scripts side by side, and a page for every file of the
repository that a chapter links to.
"""

import itertools
import re
from pathlib import Path

from docutils import nodes
from sphinx import addnodes

from tools.diffs import changed_lines, hunks, scopes
from tools.scripts import ALL_EDGES, PARENTS, ROOT, SCRIPTS, ancestry
from tools.site import pages
from tools.site.build import chapters
from tools.site.explain import shown, sized, whys
from tools.site.home import home
from tools.site.side_by_side import id_of, page_of, parts, places_of, whole

# What the pages link to: pairs of files side by side, and files
linked_pairs = set()
linked_files = set()
# {a page: (the one before it, its title)}: Home for the first of a group, or the first
# that says `Next:` of it; page.html takes the one above it in the sidebar for others
before = {names[0]: ("index", "Home") for names in pages.GROUPS.values()}


def read_all(app, env, docnames):
    """Every build reads every page: what they show depends on the scripts, too."""
    docnames[:] = sorted(env.found_docs, key=pages.READING_ORDER.index)


def add_to_markdown(app, docname, source):
    """Diffs in colour, switches, links to pairs; on the first page, the sidebar."""
    page = pages.parse(f"docs/{docname}.md", source[0].splitlines())
    lines = [*page.lines]
    for block in reversed(page.blocks):
        if block.kind in ("diff", "scripts"):
            text = f'<p class="beside">Side by side: {beside(block)}</p>'
            lines[block.end + 1 : block.end + 1] = ["", text, ""]
        if block.kind == "diff":
            linked_pairs.add((block.old, block.new))
        lines[block.line : block.end] = shown(app, docname, page, block)
    for target in re.findall(r"\((\w+)\.md\)", page.lines[-1].partition(". ")[0]):
        before.setdefault(target, (docname, page.headings[0][1]))
    if docname == app.config.root_doc:
        for group, names in pages.GROUPS.items():
            names = ["self" if name == docname else name for name in names]
            lines += ["", "```{toctree}", ":hidden:", f":caption: {group}", ""]
            lines += [*names, "```"]
    source[0] = "\n".join(lines) + "\n"


def beside(block):
    """A link to what shows a block's diff, or any two scripts."""
    if block.kind == "scripts":
        return '<a href="side_by_side/index.html">any two of the scripts</a>'
    url = f"{page_of(block.old, block.new)}.html"
    if not block.hunks:
        return f'<a href="{url}">{block.old} and {block.new}</a>'
    numbers = ", ".join(str(hunk.number) for hunk in block.hunks)
    of_all = f"{numbers} of {len(hunks(block.old, block.new))}"
    what = f"change{'s' * (len(block.hunks) > 1)} {of_all}"
    return f'<a href="{url}#hunk-{block.hunks[0].number}">{what}</a>'


def link_files(app, doctree):
    """A link to a file of the repository leads to a page of the site that shows it."""
    links = list(doctree.findall(addnodes.download_reference))
    links += doctree.findall(addnodes.pending_xref)
    for node in links:
        target = node["reftarget"]
        if isinstance(node, addnodes.pending_xref):
            if node["refdomain"] != "doc" or target in app.env.found_docs:
                continue
            target += ".md"  # MyST takes README.md for a page
        name = str(Path(app.srcdir, target).resolve().relative_to(ROOT))
        linked_files.add(name)
        url = f"source/{name}.html{line_of(name, node.astext())}"
        node.replace_self(nodes.reference("", "", *node.children, refuri=url))


def line_of(name, text):
    """The address of the function or class of this name in a Python file, or ""."""
    for first, _, defined in scopes(name):
        if defined == text:
            return f"#L{first}"
    return ""


def make_pages(app):
    """The pages that are not made from Markdown."""
    explained = pages.explanations()
    scripts = sorted(SCRIPTS, key=ancestry)
    pairs = linked_pairs.union(itertools.permutations(scripts, 2), ALL_EDGES)
    files = sorted(linked_files.union(*pairs))
    app.builder.globalcontext |= {  # which Sphinx's page for searching gets as well
        "scripts": scripts,
        "edges": ALL_EDGES,
        "ancestry": ancestry,
        "parents": PARENTS,
        "id_of": id_of,
        "page_of": page_of,
        "chapters": {name: chapters(name, explained) for name in PARENTS},
        "title_of": pages.title,
        "sizes": {pair: len(changed_lines(*pair)) for pair in pairs},
        "files": files,
    }
    yield "index", home(), "home.html"
    yield "side_by_side/index", {"title": "Compare any two"}, "table_of_pairs.html"
    for old, new in sorted(pairs):
        places = places_of(old, new, explained)
        context = {
            "title": f"{old} and {new} side by side",
            "old": old,
            "new": new,
            "count": len(hunks(old, new)),
            "parts": parts(old, new, whys(app, old, new, places)),
        }
        yield page_of(old, new), context, "side_by_side.html"
    for name in files:
        context = {"title": name, "lines": whole(name)}
        yield f"source/{name}", context, "source.html"


EXTRAS = {  # {a page, or the folder of several: its own style and script}
    "index": "slow_motion",
    "predict": "one_step",
    "side_by_side": "side_by_side",
    "source": "side_by_side",
}


def add_to_page(app, pagename, templatename, context, doctree):
    # The name of the site leads to its start page, not to the first chapter.
    context["master_doc"] = "index"
    context["before"] = before.get(pagename)
    if doctree:
        context["body"] = sized(context["body"])
    name = EXTRAS.get(pagename.partition("/")[0])
    if name:
        app.add_css_file(f"{name}.css", priority=900)
        app.add_js_file(f"{name}.js", priority=900, loading_method="defer")


def setup(app):
    app.connect("env-before-read-docs", read_all)
    app.connect("source-read", add_to_markdown)
    # Before Sphinx copies the files that are linked to (500).
    app.connect("doctree-read", link_files, priority=400)
    app.connect("html-collect-pages", make_pages)
    app.connect("html-page-context", add_to_page)
