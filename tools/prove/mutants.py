"""What can be taken out of a script: statements, blocks and arguments, one at a time.

`mutants(parent, child)` makes all texts that lack one thing which the child's diff
adds. It starts no process; tools/prove/lines.py runs the tests on them.
"""

import ast
import difflib
import functools
import io
import re
import tokenize
from typing import NamedTuple

from tools.diffs import KINDS, align, first_line, matcher

COMPOUND = (ast.If, ast.With, ast.For, ast.While, ast.Try)
LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT)
SIMILAR = 0.6  # from this ratio on, a line is a changed line of the parent's


class Mutant(NamedTuple):
    """A text that lacks one thing of the child's."""

    line: int  # of the child
    what: str
    kind: str  # "statement", "block" (only its header is out), "argument", "put back"
    text: str


def mutants(parent, child):
    """The mutants of the diff between two texts, which all mean something else."""
    diff = Diff(parent, child)
    original, found = meaning(child), {}  # found: by what they mean
    for line, what, kind, texts in [*statements(diff), *arguments(diff)]:
        for text in texts:  # the first that is a program, and another one
            if meaning(text) not in (None, original):
                mutant = Mutant(line, " ".join(what.split()), kind, text)
                found.setdefault(meaning(text), mutant)
                break
    return sorted(found.values(), key=lambda mutant: (mutant.line, mutant.what))


@functools.cache
def meaning(text):
    """A program without its comments and layout, or None if it does not compile."""
    try:
        compile(text, "mutant", "exec", dont_inherit=True)
    except SyntaxError:
        return None
    return ast.dump(ast.parse(text))


class Diff:
    """Two texts and what stands for what in them. Lines count from 1.

    added: the child's lines that the diff adds, without what changes nothing. pairs:
    {(first, last) of a logical line: that of the parent's which it stands for}.
    """

    def __init__(self, parent, child):
        self.child = child
        self.old, self.new = parent.split("\n"), child.split("\n")
        self.old_tree, self.tree = ast.parse(parent), ast.parse(child)
        self.units = logical_lines(child)
        opcodes = matcher(self.old, self.new).get_opcodes()
        self.hunks = [tuple(x) for tag, *x in opcodes if tag != "equal"]
        self.pairs = self._pair_units(logical_lines(parent))
        self.code = {x for unit in self.units for x in lines_of(*unit)}
        for owner in ast.walk(self.tree):
            if isinstance(owner, KINDS) and ast.get_docstring(owner) is not None:
                text = owner.body[0]
                self.code -= {*lines_of(text.lineno, text.end_lineno)}
        added = {line for x in self.hunks for line in lines_of(x[2] + 1, x[3])}
        self.added = {x for x in added & self.code if self.new[x - 1].strip()}
        for unit, there in self.pairs.items():  # only comments or layout have changed
            new = self.new[unit[0] - 1 : unit[1]]
            old = self.old[there[0] - 1 : there[1]]
            if bare(new) == bare(old) and indent_of(new[0]) == indent_of(old[0]):
                self.added -= {*lines_of(*unit)}

    def _pair_units(self, old_units):
        new = ["\n".join(self.new[i - 1 : j]) for i, j in self.units]
        old = ["\n".join(self.old[i - 1 : j]) for i, j in old_units]
        pairs = {}
        for tag, i1, i2, j1, j2 in matcher(old, new).get_opcodes():
            same = [(k, k) for k in range(i2 - i1)]
            if tag != "equal":
                texts = [bare(x.split("\n")) for x in (*old[i1:i2], *new[j1:j2])]
                same = align(texts[: i2 - i1], texts[i2 - i1 :], likeness)
            pairs |= {self.units[j1 + j]: old_units[i1 + i] for i, j in same}
        pairs.setdefault(self.units[0], old_units[0])  # the docstrings
        return pairs

    def words(self, first, last):
        """The child's lines as one, to be printed."""
        return " ".join(x.strip() for x in self.new[first - 1 : last])

    def is_added(self, first, last):
        """Whether the diff adds these lines, not counting blank ones and comments."""
        lines = [x for x in lines_of(first, last) if x in self.code]
        return bool(lines) and all(line in self.added for line in lines)

    def replaced(self, first, last, lines):
        """The child with other lines in place of `first` to `last`."""
        return "\n".join([*self.new[: first - 1], *lines, *self.new[last:]])

    def back(self, first, last):
        """[the child with what these lines stand for in the parent, if anything]."""
        of = [y for x, y in self.pairs.items() if first <= x[0] and x[1] <= last]
        if not of:
            return []
        lines = self.old[min(of)[0] - 1 : max(of)[1]]
        return [self.replaced(first, last, indented(lines, self.new[first - 1]))]


def lines_of(first, last):
    return range(first, last + 1)


def logical_lines(text):
    """[(first line, last line)] of what Python takes for one line each."""
    found, first = [], None
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NEWLINE:
            found.append((first, token.start[0]))
            first = None
        elif first is None and token.type not in LAYOUT:
            first = token.start[0]
    return found


def bare(lines):
    """A logical line without comments and layout."""
    text = "\n".join(lines).strip() + "\n"
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return " ".join(x.string for x in tokens if x.type not in LAYOUT)


def indent_of(line):
    return re.match(" *", line)[0]


def indented(lines, like):
    """`lines` with the first indented as the line `like`, and the others deeper."""
    depth, indent = len(indent_of(lines[0])), indent_of(like)
    return [
        indent + x[depth:] if not x[:depth].strip() and x.strip() else x for x in lines
    ]


def likeness(one, other):
    """From 0 to 1. Headers of a function or class of one name are as good as alike."""
    headers = [re.match(r"(?:def|class) \w+", x) for x in (one, other)]
    if all(headers) and headers[0][0] == headers[1][0]:
        return 1
    ratio = difflib.SequenceMatcher(None, one, other).ratio()
    return ratio if ratio > SIMILAR else 0


# Each of these yields (line, what is taken out, kind, texts to try).


def statements(diff):
    """Each statement and block that is added, and lines that are put back."""
    covered = set()
    for node in ast.walk(diff.tree):
        if isinstance(node, ast.stmt):
            first, last = first_line(node), node.end_lineno
            if diff.is_added(first, last):
                covered |= {*lines_of(node.lineno, last)}  # decorators are apart
                yield take_out(diff, first, last)
                if isinstance(node, (*COMPOUND, *KINDS)):
                    yield from block_alone(diff, node)
    for unit in diff.units:  # a statement that is changed, or a header above old lines
        if {x for x in lines_of(*unit) if x in diff.added} - covered:
            yield take_out(diff, *unit)
    for i1, i2, j1, j2 in diff.hunks:
        if j1 == j2:
            lines = diff.old[i1:i2]
            text = "\n".join([*diff.new[:j1], *lines, *diff.new[j1:]])
            yield j1 + 1, f"(put back) {' '.join(lines)}", "put back", [text]


def take_out(diff, first, last):
    """What the parent has there, `pass`, or nothing."""
    nothing = [[f"{indent_of(diff.new[first - 1])}pass"], []]
    texts = diff.back(first, last) + [diff.replaced(first, last, x) for x in nothing]
    return first, diff.words(first, last), "statement", texts


def block_alone(diff, node):
    """The block without its header, if it has lines of its own."""
    first, last = first_line(node), node.end_lineno
    inside = first_line(node.body[0]), node.body[-1].end_lineno
    if inside[0] == node.lineno:
        return
    header, lines = diff.new[first - 1], diff.new[inside[0] - 1 : inside[1]]
    if header.lstrip().startswith("elif"):
        lines = [f"{indent_of(header)}else:", *lines]
    else:
        lines = indented(lines, header)
    what = f"{diff.words(first, inside[0] - 1)} (its block stays)"
    yield first, what, "block", [diff.replaced(first, last, lines)]


def arguments(diff):
    """Each argument that is added or changed."""
    for call in calls(diff.tree):
        theirs = parents_arguments(diff, call)
        nodes = [*call.args, *call.keywords]
        nodes.sort(key=lambda node: (node.lineno, node.col_offset))
        *texts, whole = (ast.get_source_segment(diff.child, x) for x in (*nodes, call))
        for number, node in enumerate(nodes):
            added = diff.added & {*lines_of(node.lineno, node.end_lineno)}
            if added and ast.dump(node) not in theirs:
                rest = ", ".join([*texts[:number], *texts[number + 1 :]])
                text = with_arguments(diff.child, call, rest)
                yield min(added), f"{texts[number]} in {whole}", "argument", [text]


def with_arguments(text, call, rest):
    """The text with the arguments `rest`, a text, in the parentheses of a call."""
    data = text.encode()  # columns count bytes
    starts = [0, *(x.end() for x in re.finditer(b"\n", data))]
    opening = data.index(
        b"(", starts[call.func.end_lineno - 1] + call.func.end_col_offset
    )
    closing = starts[call.end_lineno - 1] + call.end_col_offset - 1
    return (data[: opening + 1] + rest.encode() + data[closing:]).decode()


def calls(node):
    """All calls below `node`, but not in headers of functions or in f-strings.

    A header's run when the function is made, and Python 3.11 does not know where in the
    text an f-string's are.
    """
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.arguments, ast.JoinedStr)):
            if isinstance(child, ast.Call):
                yield child
            yield from calls(child)


def parents_arguments(diff, call):
    """Arguments of the same function in the line that this one stands for, dumped."""
    unit = next(x for x in diff.units if x[0] <= call.lineno <= x[1])
    first, last = diff.pairs.get(unit, (0, -1))
    there = [x for x in calls(diff.old_tree) if first <= x.lineno <= last]
    there = [x for x in there if ast.dump(x.func) == ast.dump(call.func)]
    return {ast.dump(y) for x in there for y in (*x.args, *x.keywords)}
