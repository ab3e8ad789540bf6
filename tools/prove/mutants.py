"""What can be taken out of a script: statements, blocks and arguments, one at a time.

`mutants(parent, child)` makes all texts that lack one thing which the child's diff
adds. It starts no process; tools/prove/lines.py runs the tests on them.

    the parent's line    the child's                what is made of the child's
    b(x)                 b(x, fast=True)            b(x)            statement: put back
                         if a:                      pass            statement
                             c()                    c()             block: its header
                                                    if a: pass      statement
    d(1)                 d(1, e=2, f=3)             d(1, f=3)       argument
                                                    d(1, e=2)       argument

More are in MADE of tests/tools/test_lines.py.
"""

import ast
import functools
import io
import re
import textwrap
import tokenize
from typing import NamedTuple

from tools.diffs import align, changed_ranges, first_line, matcher

LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT)


class Mutant(NamedTuple):
    """A text that lacks one thing of the child's."""

    line: int  # of the child
    what: str
    kind: str  # "statement", "block" (only its header is out), "argument", "put back"
    text: str


def mutants(parent, child):
    """The mutants of the diff between two texts, which all mean something else."""
    diff = Diff(parent, child)
    original = meaning(child)
    found = {}  # {what a mutant means: the first mutant that means it}
    for line, what, kind, texts in [*statements(diff), *arguments(diff)]:
        for text in texts:
            means = meaning(text)
            if means not in (None, original):
                mutant = Mutant(line, " ".join(what.split()), kind, text)
                found.setdefault(means, mutant)
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


# Lines count from 1, as in `ast`.


def lines_of(node):
    return range(node.lineno, node.end_lineno + 1)


class Unit(NamedTuple):
    """What Python takes for one line, however many it stands on."""

    lineno: int
    end_lineno: int
    text: str

    def without_layout(self):
        """Its text without comments and layout, and how deep it is."""
        code = re.sub(r"#.*", "", self.text)
        return code.split(), indent_of(self.text)


def units_of(text):
    """The units of a Python text, in order."""
    lines = text.split("\n")
    found = []
    first = None
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NEWLINE:
            last = token.start[0]
            found.append(Unit(first, last, "\n".join(lines[first - 1 : last])))
            first = None
        elif first is None and token.type not in LAYOUT:
            first = token.start[0]
    return found


def indent_of(text):
    return re.match(" *", text)[0]


def indented(lines, like):
    """`lines` with the first indented as the line `like`, and the others deeper."""
    text = textwrap.dedent("\n".join(lines))
    return textwrap.indent(text, indent_of(like)).split("\n")


class Diff:
    """Two texts, and what of the parent's the child's lines stand for.

    pairs: {unit of the child: the unit of the parent that it stands for}.
    code: the child's lines that are in a unit, but not in a docstring.
    added: those of them that the diff adds, without what changes nothing.
    """

    def __init__(self, parent, child):
        self.child = child
        self.old = parent.split("\n")
        self.new = child.split("\n")
        self.old_tree = ast.parse(parent)
        self.tree = ast.parse(child)
        self.changes = [*changed_ranges(self.old, self.new)]
        self.units = units_of(child)
        self.pairs = self._pair_units(units_of(parent))
        self.code = set()
        self.added = set()
        self._find_added()

    def _pair_units(self, old_units):
        old = [unit.text for unit in old_units]
        new = [unit.text for unit in self.units]
        pairs = {}
        for _, i1, i2, j1, j2 in matcher(old, new).get_opcodes():
            for i, j in align(old[i1:i2], new[j1:j2]):
                pairs[self.units[j1 + j]] = old_units[i1 + i]
        return pairs

    def _find_added(self):
        changed = set()
        for _, _, j1, j2 in self.changes:
            changed.update(range(j1 + 1, j2 + 1))
        for unit in self.units:
            if unit.text.lstrip().startswith('"""'):  # a docstring
                continue
            self.code.update(lines_of(unit))
            old = self.pairs.get(unit)
            # Else only comments or the layout have changed.
            if not old or unit.without_layout() != old.without_layout():
                self.added.update(changed.intersection(lines_of(unit)))

    def words(self, first, last):
        """The child's lines as one, to be printed."""
        return " ".join(self.new[first - 1 : last])

    def is_added(self, first, last):
        """Whether the diff adds these lines, not counting blank ones and comments."""
        lines = self.code.intersection(range(first, last + 1))
        return bool(lines) and lines <= self.added

    def replaced(self, first, last, lines):
        """The child with other lines in place of `first` to `last`."""
        return "\n".join([*self.new[: first - 1], *lines, *self.new[last:]])

    def back(self, first, last):
        """[the child with what these lines stand for in the parent, if anything]."""
        old_units = [
            old_unit
            for unit, old_unit in self.pairs.items()
            if first <= unit.lineno and unit.end_lineno <= last
        ]
        if not old_units:
            return []
        start = min(old_units).lineno
        end = max(old_units).end_lineno
        lines = indented(self.old[start - 1 : end], self.new[first - 1])
        return [self.replaced(first, last, lines)]


# Each of these finds (line, what is taken out, kind, texts to try): of the texts, the
# first that is a program, and another one than the child, is the mutant.


def statements(diff):
    """Each statement and block that is added, and lines that are put back."""
    covered = set()
    for node in ast.walk(diff.tree):
        if not isinstance(node, ast.stmt):
            continue
        first = first_line(node)
        last = node.end_lineno
        if diff.is_added(first, last):
            # Not its decorators: each is a unit of its own, which is taken out below.
            covered.update(lines_of(node))
            yield take_out(diff, first, last)
            if hasattr(node, "body"):
                yield from block_alone(diff, node)
    # What is left is a statement that is changed, or a header above old lines.
    left = diff.added - covered
    for unit in diff.units:
        if left.intersection(lines_of(unit)):
            yield take_out(diff, unit.lineno, unit.end_lineno)
    for i1, i2, j1, j2 in diff.changes:
        if j1 == j2:
            lines = diff.old[i1:i2]
            # No line of the child is replaced: these come before line j1 + 1.
            text = diff.replaced(j1 + 1, j1, lines)
            yield j1 + 1, f"(put back) {' '.join(lines)}", "put back", [text]


def take_out(diff, first, last):
    """What the parent has there, `pass`, or nothing."""
    nothing = f"{indent_of(diff.new[first - 1])}pass"
    texts = diff.back(first, last)
    texts += [diff.replaced(first, last, lines) for lines in ([nothing], [])]
    return first, diff.words(first, last), "statement", texts


def block_alone(diff, node):
    """The block without its header, if it has lines of its own."""
    start = first_line(node.body[0])
    end = node.body[-1].end_lineno
    first = first_line(node)
    header = diff.new[first - 1]
    lines = diff.new[start - 1 : end]
    if header.lstrip().startswith("elif"):
        lines = [f"{indent_of(header)}else:", *lines]
    else:
        lines = indented(lines, header)
    what = f"{diff.words(first, start - 1)} (its block stays)"
    yield first, what, "block", [diff.replaced(first, node.end_lineno, lines)]


def arguments(diff):
    """Each argument that is added or changed."""
    for call in calls(diff.tree):
        if not diff.added.intersection(lines_of(call)):
            continue
        whole = ast.get_source_segment(diff.child, call)
        theirs = parents_arguments(diff, call)
        nodes = arguments_of(call)
        texts = [ast.get_source_segment(diff.child, node) for node in nodes]
        for number, node in enumerate(nodes):
            added = diff.added.intersection(lines_of(node))
            if added and ast.dump(node) not in theirs:
                others = [*texts[:number], *texts[number + 1 :]]
                text = with_arguments(diff, call, ", ".join(others))
                what = f"{texts[number]} in {whole}"
                yield min(added), what, "argument", [text]


def arguments_of(call):
    return [*call.args, *call.keywords]


def with_arguments(diff, call, others):
    """The child with `others`, a text, in the parentheses of a call."""
    function = call.func
    # In bytes, as `ast` counts columns
    before = diff.new[function.end_lineno - 1].encode()[: function.end_col_offset]
    after = diff.new[call.end_lineno - 1].encode()[call.end_col_offset :]
    line = f"{before.decode()}({others}){after.decode()}"
    return diff.replaced(function.end_lineno, call.end_lineno, [line])


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
    (unit,) = [unit for unit in diff.units if call.lineno in lines_of(unit)]
    if unit not in diff.pairs:
        return set()
    old_lines = lines_of(diff.pairs[unit])
    function = ast.dump(call.func)
    found = set()
    for other in calls(diff.old_tree):
        if other.lineno in old_lines and ast.dump(other.func) == function:
            found.update(map(ast.dump, arguments_of(other)))
    return found
