"""The Sphinx extension that makes the site from the chapters and the scripts.

It leaves the Markdown as a code host shows it, and adds what only a site can have: the
sidebar, a page for every two rungs side by side, one for every sequel and its parent,
and a page for every file of the repository that a chapter links to.
"""

import html
import re
import sys
import textwrap
from pathlib import Path

from docutils import nodes
from sphinx import addnodes

from ladder import pages
from ladder.diffs import changed_lines, hunks
from ladder.rungs import (
    ALL_EDGES,
    PARENTS,
    ROOT,
    RUNGS,
    InputError,
    ancestry,
    read_lines,
)
from website import search
from website.explain import Explainer, flip, is_wrong, once
from website.home import home, readme
from website.side_by_side import (
    explain,
    page_of,
    parts,
    plain_lines,
    slug,
    strip,
)


def check_pages(app):
    """A wrong marker ends the build with one line, and not with Sphinx's fifty."""
    try:
        pages.explanations()
    except InputError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


def read_all(app, env, docnames):
    """Every build reads every page: what they show depends on the scripts, too."""
    docnames[:] = sorted(env.found_docs)


def add_links(app, docname, source):
    """Below each diff and table, links to its pairs; on the first page, the sidebar."""
    lines = source[0].splitlines()
    page = pages.parse(f"docs/{docname}.md", lines)
    blocks = [block for block in page.blocks if block.kind in ("diff", "rungs")]
    app.env.metadata[docname]["pairs"] = [
        (block.old, block.new) for block in blocks if block.old
    ]
    for block in reversed(blocks):
        links = ", ".join(f'<a href="{url}">{text}</a>' for url, text in beside(block))
        text = f'<p class="beside">Side by side: {links}</p>'
        lines[block.end + 1 : block.end + 1] = ["", text, ""]
    if docname == app.config.root_doc:
        for group, names in pages.GROUPS.items():
            names = ["self" if name == docname else name for name in names]
            lines += ["", "```{toctree}", ":hidden:", f":caption: {group}", ""]
            lines += [*names, "```"]
    source[0] = "\n".join(lines) + "\n"


def beside(block):
    """[(address, text)] of what shows a block's diff, or the table's, side by side."""
    pairs = ALL_EDGES if block.kind == "rungs" else [(block.old, block.new)]
    links = [
        (f"{page_of(*pair)}.html", html.escape(" and ".join(pair))) for pair in pairs
    ]
    if block.kind == "rungs":
        return [*links, ("side_by_side/index.html", "any two")]
    ((url, _),), total = links, len(hunks(block.old, block.new))
    changes = [
        (f"{url}#hunk-{hunk.number}", f"change {hunk.number} of {total}")
        for hunk in block.hunks
    ]
    return changes or links  # without hunks, the block is the whole diff


def link_files(app, doctree):
    """A link to a file of the repository leads to a page of the site that shows it."""
    shown = app.env.metadata[app.env.docname]["files"] = []
    links = list(doctree.findall(addnodes.download_reference))
    links += doctree.findall(addnodes.pending_xref)
    for node in links:
        target = node["reftarget"]
        if isinstance(node, addnodes.pending_xref):
            if node["refdomain"] != "doc" or target in app.env.found_docs:
                continue
            target += ".md"  # MyST takes README.md for a page
        path = Path(app.srcdir, target).resolve()
        name = str(path.relative_to(ROOT))
        shown.append(name)
        url = f"{source_page(name)}.html"
        parts, line = node.children, line_of(name, node.astext())
        if line:
            url += f"#L{line}"
            if not any(isinstance(x, nodes.literal) for x in parts):
                parts = breakable(node.astext())
        node.replace_self(nodes.reference("", "", *parts, refuri=url))


def line_of(name, text):
    """The line of the function or class of this name in a Python file, or None."""
    if name.endswith(".py") and text.isidentifier():
        for number, line in enumerate(read_lines(name), 1):
            if re.match(rf"(?:async )?(?:def|class) {text}\b", line):
                return number
    return None


def breakable(text):
    """The name as nodes; a line may break after each of its underscores."""
    found = []
    for piece in re.findall("_*[^_]+_?|_+", text):
        found += [nodes.Text(piece), nodes.raw("", "<wbr>", format="html")]
    return found[:-1]


def mark_outputs(app, doctree):
    """Output that shows no command gets no button to copy a command."""
    for node in doctree.findall(nodes.literal_block):
        lines = node.astext().splitlines()
        if node.get("language") == "console" and not any(
            line.startswith(app.config.copybutton_prompt_text) for line in lines
        ):
            node["classes"].append("output")


def source_page(name):
    return f"source/{name}"


def make_pages(app):
    """The pages that are not made from Markdown."""
    explained = pages.explanations()
    rungs = sorted(RUNGS, key=ancestry)
    common = {
        "rungs": rungs,
        "edges": ALL_EDGES,
        "ancestry": ancestry,
        "slug": slug,
        "page_of": page_of,
        "source": source_page,
    }
    start = home(
        explained,
        lambda *x: rows(break_long_code(app.builder.highlighter.highlight_block(*x))),
        app.config.repository_url,
    )
    yield "index", common | start, "home.html"
    pairs = [(old, new) for old in rungs for new in rungs if old != new]
    metadata = app.env.metadata.values()
    in_chapters = [pair for data in metadata for pair in data.get("pairs", [])]
    pairs = list(dict.fromkeys([*pairs, *ALL_EDGES, *in_chapters]))
    sizes = {pair: len(changed_lines(*pair)) for pair in pairs}
    table = {"title": "Compare any two", "sizes": sizes}
    yield "side_by_side/index", common | table, "table_of_pairs.html"
    explainer = Explainer(app)
    for old, new in pairs:
        places = explain(old, new, explained)
        whys = {
            n: [explainer.why(page, anchor) for page, _, anchor in some]
            for n, some in places.items()
        }
        whys = once(old, new, whys)
        context = common | {
            "title": f"{old} and {new} side by side",
            "old": old,
            "new": new,
            "size": sizes[old, new],
            "count": len(hunks(old, new)),
            "parts": parts(old, new, whys),
            "strip": strip(old, new),
            "explained": any(whys.values()),
        }
        yield page_of(old, new), context, "side_by_side.html"
    linked = {name for data in metadata for name in data.get("files", [])}
    shown = linked.union(*pairs)
    app.env.site_pairs, app.env.site_files = pairs, sorted(shown)
    for name in app.env.site_files:
        context = common | {
            "title": name,
            "parent": PARENTS.get(name),
            "lines": "".join(plain_lines(name)),
        }
        yield source_page(name), context, "source.html"


def break_long_code(text):
    """On a phone, diffs wrap: before an attribute or an argument, not inside a word."""
    return re.sub(
        r"(<[^>]*>)|([.(\[=_/])(?=\w)",
        lambda found: found[1] or f"{found[2]}<wbr>",
        text,
    )


def rows(text):
    """HTML with each line of its code in a `span` of its own: a row of the box."""

    def split(found):
        lines = found[1].removesuffix("\n").split("\n")
        return "<pre>" + "".join(f"<span>{x}</span>\n" for x in lines) + "</pre>"

    return re.sub("(?s)<pre>(?:<span></span>)?(.*?)</pre>", split, text)


RECORDED = re.compile(
    '(<!-- run [^\\n]* -->)\\n((?:(?!<!--).)*?)<div class="highlight-console'
    r"[^\n]*<pre>((?:(?!<!--).)*?)</pre></div>\n</div>\n<!-- end -->",
    re.S,
)


def switches(docname, body):
    """Below a change, a wrong output becomes a switch to the right one."""
    page = pages.parse(f"docs/{docname}.md")
    runs = {page.lines[x.line - 1].strip(): x for x in page.blocks if x.kind == "run"}
    explaining = {x.anchor for x in page.blocks if x.hunks}
    others = {x.line: pages.right_output(page, x) for x in runs.values()}
    right = {line: other for line, other in others.items() if other}
    shown = {
        runs[marker].line: (
            above.strip(),
            html.unescape(re.sub("<[^>]*>", "", output)),
        )
        for marker, above, output in RECORDED.findall(body)
    }

    def switch(found):
        block = runs[found[1]]
        other = right.get(block.line)
        if not other or not is_wrong(block, right) or block.anchor not in explaining:
            return found[0]
        switch = flip(block, shown[other.line], shown[block.line])
        return rows(switch.replace("FLIP", "flip"))

    return RECORDED.sub(switch, body)


def previews(app, pagename, context, doctree):
    """What a link to the page shows where it is shared, and under it in a search."""
    texts = doctree.findall(nodes.paragraph) if doctree else ()
    text = next((x.astext() for x in texts), "") or readme()[1]
    text = " ".join(re.sub("<[^>]*>", "", text).split())
    tags = {
        "description": textwrap.shorten(text, 200, placeholder=" ..."),
        "og:title": re.sub("<[^>]*>", "", context.get("title", app.config.project)),
        "og:site_name": app.config.project,
        "og:type": "website",
        "og:image": "_static/preview.png",
        "og:image:alt": "The three scripts as steps, with the lines that change",
        "twitter:card": "summary_large_image",
    }
    tags["og:description"] = tags["description"]
    base = app.config.html_baseurl.rstrip("/")
    if base:
        tags["og:url"] = f"{base}/{app.builder.get_target_uri(pagename)}"
        tags["og:image"] = f"{base}/{tags['og:image']}"
    else:  # only an address with a host is valid: without one, better no picture
        del tags["og:image"], tags["og:image:alt"]
    return "".join(
        f'<meta {"property" if ":" in key and key[:2] == "og" else "name"}="{key}" '
        f'content="{html.escape(html.unescape(value))}">\n'
        for key, value in tags.items()
    )


# Of what Sphinx and the theme load on every page: what no page uses, what only Sphinx's
# own search does, and what only pages with commands do.
UNUSED = ["furo-extensions.css"]
FOR_SEARCH = ["doctools.js", "sphinx_highlight.js"]
FOR_COPYING = ["clipboard.min.js", "copybutton.js", "copybutton.css"]


def drop_assets(pagename, context):
    """A page loads no file that it does not use."""
    unused = [*UNUSED]
    if pagename != "search":
        unused += FOR_SEARCH
    if pagename.startswith(("side_by_side/", "source/")) or pagename == "search":
        unused += FOR_COPYING
    for kind in ("script_files", "css_files"):
        context[kind] = [
            x for x in context[kind] if Path(x.filename or "").name not in unused
        ]


def add_assets(app, pagename, templatename, context, doctree):
    if "body" in context:
        if pagename in app.env.found_docs:
            context["body"] = switches(pagename, context["body"])
        if 'class="flip"' in context["body"]:
            app.add_css_file("flip.css", priority=900)
        context["body"] = re.sub(
            '(?s)<div class="highlight-(diff|console).*?</pre>',
            lambda x: rows(break_long_code(x[0]) if x[1] == "diff" else x[0]),
            context["body"],
        )
    # The name of the site leads to its start page, not to the first chapter.
    context["master_doc"] = "index"
    context["metatags"] = context.get("metatags", "") + previews(
        app, pagename, context, doctree
    )
    if pagename == "index":
        app.add_css_file("home.css", priority=900)  # after site.css
    if pagename.startswith(("side_by_side/", "source/")):
        app.add_css_file("flip.css", priority=890)
        app.add_css_file("side_by_side.css", priority=900)
        app.add_js_file("side_by_side.js", priority=900, loading_method="defer")
    drop_assets(pagename, context)


def shorten_styles(app, error):
    """Pygments says in a comment what each colour is for: a quarter of its styles."""
    if not error:
        path = Path(app.outdir, "_static", "pygments.css")
        path.write_text(re.sub(r" */\*.*?\*/", "", path.read_text()))


def make_search(app, exception):
    """The index of the search, when all pages are written."""
    if exception or app.builder.name != "html":
        return
    documents = {}
    for docname in app.env.found_docs:
        page = f"{docname}.html"
        documents[page] = search.chapter(Path(app.outdir, page))
    for old, new in app.env.site_pairs:
        page = f"{page_of(old, new)}.html"
        documents[page] = search.pair(old, new, whole=PARENTS.get(new) == old)
    for name in app.env.site_files:
        documents[f"{source_page(name)}.html"] = search.file(name)
    search.write_index(app.outdir, documents)


def setup(app):
    app.add_config_value("repository_url", "", "html")
    app.connect("builder-inited", check_pages)
    app.connect("env-before-read-docs", read_all)
    app.connect("source-read", add_links)
    # Before Sphinx copies the files that are linked to (500).
    app.connect("doctree-read", link_files, priority=400)
    app.connect("doctree-read", mark_outputs)
    app.connect("html-collect-pages", make_pages)
    app.connect("html-page-context", add_assets)
    # After the theme has written them (500).
    app.connect("build-finished", shorten_styles, priority=900)
    app.connect("build-finished", make_search)
    return {"parallel_read_safe": True}
