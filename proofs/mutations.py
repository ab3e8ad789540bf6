"""What can be taken out of a rung: statements, blocks and arguments, one at a time.

`mutants(parent, child)` makes all texts that lack one thing which the child's diff
adds. It reads no file and starts no process; proofs/lines.py runs the tests on them.
"""

import ast
import difflib
import functools
import io
import re
import tokenize
import warnings
from typing import NamedTuple

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
COMPOUND = (ast.If, ast.With, ast.AsyncWith, ast.For, ast.AsyncFor, ast.While, ast.Try)
COMPOUND += (*FUNCTIONS, ast.ClassDef)
SIMILAR = 0.6  # from this ratio on, a line is a changed line of the parent's


class Mutant(NamedTuple):
    """A text that lacks one thing of the child's.

    `line` and `what` say where in the child it stands and what is taken out. `kind` is
    "statement", "block" (a header is taken out and its block stays), "branch" (an
    `else` or the like), "argument", or "put back" (lines that only the parent has).
    """

    line: int
    what: str
    kind: str
    text: str


def mutants(parent, child, changes=None):
    """The mutants of the diff between two texts, sorted by their lines.

    None of them means the same as the child or as another: comments and layout do not
    count. With an empty parent all of the child is added. changes: as ladder.diffs has
    them; by default, those that difflib finds.
    """
    diff = Diff(parent, child, changes)
    original = meaning(child)
    found = {}  # by what they mean
    for attempts in [*statements(diff), *arguments(diff), *put_back(diff)]:
        for mutant in attempts:
            program = meaning(mutant.text)
            if program not in (None, original):
                found.setdefault(program, mutant)
                break
    return sorted(found.values(), key=lambda mutant: (mutant.line, mutant.what))


@functools.cache
def meaning(text):
    """A program without its comments and layout, or None if it does not compile."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(text, "mutant", "exec", dont_inherit=True)
    except SyntaxError:
        return None
    return ast.dump(ast.parse(text))


class Diff:
    """Two texts and what stands for what in them. Lines count from 1.

    `added` is {line of the child: its hunk} for what the diff adds. Blank lines,
    comments and the docstrings of functions are left out: they change nothing.
    """

    def __init__(self, parent, child, changes=None):
        self.parent, self.child = parent, child
        self.old, self.new = parent.split("\n"), child.split("\n")
        self.tree = ast.parse(child)
        self.old_calls, self.calls = [*calls(ast.parse(parent))], [*calls(self.tree)]
        self.old_units, self.units = logical_lines(parent), logical_lines(child)
        self.pairs = self._pair_units()
        matcher = difflib.SequenceMatcher(None, self.old, self.new, autojunk=False)
        found = [x for tag, *x in matcher.get_opcodes() if tag != "equal"]
        self.hunks = [tuple(x) for x in changes or found]
        code = {line for first, last in self.units for line in range(first, last + 1)}
        code -= self._docstring_lines()
        changed = code - self._only_commented()
        self.added = {
            line: hunk
            for hunk in self.hunks
            for line in range(hunk[2] + 1, hunk[3] + 1)
            if line in changed and self.new[line - 1].strip()
        }
        self.code = code

    def _docstring_lines(self):
        owners = [x for x in ast.walk(self.tree) if isinstance(x, COMPOUND[-3:])]
        if not self.parent.strip():
            owners.append(self.tree)
        nodes = [x.body[0] for x in owners if ast.get_docstring(x) is not None]
        return {i for x in nodes for i in range(x.lineno, x.end_lineno + 1)}

    def _only_commented(self):
        """The lines that differ from the parent's in their comments and layout only."""
        found = set()
        for (first, last), there in self.pairs.items():
            new, old = self.new[first - 1 : last], self.old[there[0] - 1 : there[1]]
            depths = {len(lines[0]) - len(lines[0].lstrip()) for lines in (new, old)}
            if len(depths) == 1 and words_of(new) == words_of(old):
                found |= set(range(first, last + 1))
        return found

    def _pair_units(self):
        """{(first, last) of a logical line: that of the parent's it stands for}."""
        texts = [
            ["\n".join(lines[first - 1 : last]) for first, last in units]
            for lines, units in (
                (self.old, self.old_units),
                (self.new, self.units),
            )
        ]
        bare = [[" ".join(words_of([x])) for x in some] for some in texts]
        pairs = {}
        matcher = difflib.SequenceMatcher(None, *texts, autojunk=False)
        for tag, i1, i2, j1, j2 in matcher.get_opcodes():
            same = [(k, k) for k in range(i2 - i1)]
            if tag != "equal":
                same = align(bare[0][i1:i2], bare[1][j1:j2])
            pairs |= {self.units[j1 + j]: self.old_units[i1 + i] for i, j in same}
        return pairs

    def is_added(self, first, last):
        """Whether the diff adds these lines, not counting blank ones and comments."""
        lines = [x for x in range(first, last + 1) if x in self.code]
        return bool(lines) and all(line in self.added for line in lines)

    def indent(self, line):
        return re.match(" *", self.new[line - 1])[0]

    def words(self, first, last):
        """The child's lines as one, to be printed."""
        return " ".join(x.strip() for x in self.new[first - 1 : last])

    def replaced(self, first, last, lines):
        """The child with other lines in place of `first` to `last`."""
        return "\n".join([*self.new[: first - 1], *lines, *self.new[last:]])

    def counterpart(self, first, last):
        """(first, last) of what these lines stand for in the parent, or None."""
        of = [
            old for new, old in self.pairs.items() if first <= new[0] and new[1] <= last
        ]
        return (min(of)[0], max(of)[1]) if of else None

    def parents_lines(self, first, last):
        """The lines of the counterpart, indented like the child's, or None."""
        there = self.counterpart(first, last)
        if not there:
            return None
        lines = self.old[there[0] - 1 : there[1]]
        return indented(lines, self.indent(first))

    def without_hunks(self, first, last):
        """The child with the parent's lines in each hunk that these lines belong to."""
        lines, touched = list(self.new), []
        for hunk in self.hunks:
            if any(self.added.get(x) == hunk for x in range(first, last + 1)):
                touched.append(hunk)
        for i1, i2, j1, j2 in reversed(touched):
            lines[j1:j2] = self.old[i1:i2]
        return "\n".join(lines)


def logical_lines(text):
    """[(first line, last line)] of what Python takes for one line each."""
    found, first = [], None
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NEWLINE:
            found.append((first, token.start[0]))
            first = None
        elif first is None and token.type not in layout:
            first = token.start[0]
    return found


def words_of(lines):
    """The tokens of a logical line, without comments and layout."""
    text = "\n".join(lines).strip() + "\n"
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [x.string for x in tokens if x.type not in (tokenize.COMMENT, tokenize.NL)]


def indented(lines, indent):
    """`lines` with the first at `indent`, and the others deeper as before."""
    depth = len(lines[0]) - len(lines[0].lstrip())
    return [
        indent + line[depth:] if not line[:depth].strip() and line.strip() else line
        for line in lines
    ]


def similarity(one, other):
    """From 0 to 1. Headers of a function or class of one name are as good as alike."""
    one, other = one.strip(), other.strip()
    headers = [re.match(r"(?:async )?(?:def|class) \w+", x) for x in (one, other)]
    if all(headers) and headers[0][0] == headers[1][0]:
        return 1
    return difflib.SequenceMatcher(None, one, other).ratio()


def align(old, new):
    """[(i, j)]: which of the old texts has become which of the new ones, in order."""
    best = [
        [(0, [])] * (len(new) + 1) for _ in range(len(old) + 1)
    ]  # of the first i, j
    for i, before in enumerate(old):
        for j, after in enumerate(new):
            ratio = similarity(before, after)
            choices = [best[i][j + 1], best[i + 1][j]]
            if ratio > SIMILAR:
                score, pairs = best[i][j]
                choices.append((score + ratio, [*pairs, (i, j)]))
            best[i + 1][j + 1] = max(choices, key=lambda choice: choice[0])
    return best[-1][-1][1]


# Statements


def statements(diff):
    """The attempts to take out each statement, block and branch that is added."""
    covered = set()
    for node in ast.walk(diff.tree):
        for decorator in getattr(node, "decorator_list", []):
            first, last = decorator.lineno, decorator.end_lineno
            if diff.is_added(first, last):
                covered |= set(range(first, last + 1))
                text = diff.replaced(first, last, [])
                yield [Mutant(first, diff.words(first, last), "statement", text)]
        for first, last in branches(diff, node):
            if diff.is_added(first, last):
                covered.add(first)
                yield take_branch_out(diff, first, last)
        if not isinstance(node, ast.stmt):
            continue
        first, last = start(node), node.end_lineno
        if diff.is_added(first, last):
            covered |= set(range(first, last + 1))
            yield take_out(diff, first, last)
            if isinstance(node, COMPOUND):
                yield from block_alone(diff, node)
    for unit in diff.units:
        lines = {x for x in range(unit[0], unit[1] + 1) if x in diff.added} - covered
        if diff.is_added(*unit) and lines:  # a header whose block is not all new
            yield take_out(diff, *unit)
        else:
            for line in sorted(lines):
                yield take_line_out(diff, line)


def start(node):
    """The first line of a statement, which may be that of a decorator."""
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(x.lineno for x in decorators)])


def take_out(diff, first, last):
    """Attempts: what the parent has there, `pass`, nothing, the whole hunks back."""
    texts = []
    parents_lines = diff.parents_lines(first, last)
    if parents_lines:
        texts.append(diff.replaced(first, last, parents_lines))
    texts.append(diff.replaced(first, last, [f"{diff.indent(first)}pass"]))
    texts.append(diff.replaced(first, last, []))
    texts.append(diff.without_hunks(first, last))
    what = diff.words(first, last)
    return [Mutant(first, what, "statement", text) for text in texts]


def take_line_out(diff, line):
    """The same for one line of a statement that is only changed in part."""
    hunk, text = diff.added[line], diff.new[line - 1].strip()
    removed = [x.strip() for x in diff.old[hunk[0] : hunk[1]] if x.strip()]
    lines = [max(removed, key=lambda old: similarity(old, text))] if removed else []
    lines = [x for x in lines if similarity(x, text) > SIMILAR]
    texts = [
        diff.replaced(line, line, [diff.indent(line) + x]) for x in [*lines, "pass"]
    ]
    texts.append(diff.without_hunks(line, line))
    return [Mutant(line, text, "statement", x) for x in texts]


def block_alone(diff, node):
    """One attempt: the block without its header, if it has lines of its own."""
    first, last = start(node), node.end_lineno
    inside = start(node.body[0]), node.body[-1].end_lineno
    if inside[0] == node.lineno:
        return
    lines = diff.new[inside[0] - 1 : inside[1]]
    if diff.new[first - 1].lstrip().startswith("elif"):
        lines = [f"{diff.indent(first)}else:", *lines]
    else:
        lines = indented(lines, diff.indent(first))
    header = diff.words(first, inside[0] - 1)
    text = diff.replaced(first, last, lines)
    yield [Mutant(first, f"{header} (its block stays)", "block", text)]


def branches(diff, node):
    """[(first line, last line)] of a statement's `else`, `except` and `finally`."""
    found = []
    for handler in getattr(node, "handlers", []):
        found.append((handler.lineno, handler.end_lineno))
    for keyword, field in (("else", "orelse"), ("finally", "finalbody")):
        block = getattr(node, field, None)
        if isinstance(node, ast.stmt) and block:
            first = start(block[0])
            if diff.new[first - 1].lstrip().startswith("elif"):
                continue  # it is a statement, `if`, and taken out as such
            while not re.match(rf" *{keyword}\b", diff.new[first - 1]):
                first -= 1
            found.append((first, block[-1].end_lineno))
    return found


def take_branch_out(diff, first, last):
    """Attempts: what the parent has there, nothing."""
    texts = [diff.replaced(first, last, [])]
    parents_lines = diff.parents_lines(first, last)
    if parents_lines:
        texts.insert(0, diff.replaced(first, last, parents_lines))
    what = diff.words(first, last)
    return [Mutant(first, what, "branch", text) for text in texts]


def put_back(diff):
    """For each hunk that only removes lines: the child with them."""
    for i1, i2, j1, j2 in diff.hunks:
        if j1 == j2:
            lines = diff.old[i1:i2]
            text = "\n".join([*diff.new[:j1], *lines, *diff.new[j1:]])
            what = f"(put back) {' '.join(x.strip() for x in lines)}"
            yield [Mutant(j1 + 1, what, "put back", text)]


# Arguments


def arguments(diff):
    """The attempt to take out each argument that is added or changed."""
    source = Source(diff.child)
    old_source = Source(diff.parent)
    for call in diff.calls:
        same = parents_call(diff, call)
        for argument in in_order(call):
            lines = range(argument.lineno, argument.end_lineno + 1)
            added = [line for line in lines if line in diff.added]
            if not added:
                continue
            there = parents_argument(same, call, argument)
            if there is not None and ast.dump(there) == ast.dump(argument):
                continue
            what = source.text(argument)
            if there is None:
                text = source.without(call, argument)
            else:
                text = source.replaced(argument, old_source.text(there))
                what += f" -> {old_source.text(there)}"
            check(diff.tree, call, argument, there, text)
            words = " ".join(source.text(call).split())
            what = f"{' '.join(what.split())} in {words}"
            yield [Mutant(added[0], what, "argument", text)]


def calls(node):
    """All calls below `node`, but not in headers of functions or in f-strings.

    A header's run when the function is made, and Python 3.11 does not know where in the
    text an f-string's are.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.arguments, ast.JoinedStr)):
            continue
        if isinstance(child, ast.Call):
            yield child
        yield from calls(child)


def in_order(call):
    return sorted(
        [*call.args, *call.keywords], key=lambda node: (node.lineno, node.col_offset)
    )


def parents_call(diff, call):
    """The call of the same function in the line that this one stands for, or None."""
    line = next(x for x in diff.units if x[0] <= call.lineno <= x[1])
    if line not in diff.pairs:
        return None
    name = ast.dump(call.func)

    def of_that_name(calls, first, last):
        there = [x for x in calls if first <= x.lineno <= last]
        return [x for x in there if ast.dump(x.func) == name]

    number = of_that_name(diff.calls, *line).index(call)
    there = of_that_name(diff.old_calls, *diff.pairs[line])
    return there[number] if number < len(there) else None


def parents_argument(same, call, argument):
    """The argument that this one stands for in the parent's call, or None."""
    if same is None:
        return None
    if isinstance(argument, ast.keyword):
        return next((x for x in same.keywords if x.arg == argument.arg), None)
    number = call.args.index(argument)
    if number < len(same.args):
        alike = ast.dump(same.args[number]) == ast.dump(argument)
        if alike or len(same.args) == len(call.args):
            return same.args[number]
    return None


class Source:
    """A text that is cut where its syntax tree says: columns there count bytes."""

    def __init__(self, text):
        self.bytes = text.encode()
        self.lines = [0]
        for line in text.split("\n"):
            self.lines.append(self.lines[-1] + len(line.encode()) + 1)

    def span(self, node):
        return (
            self.lines[node.lineno - 1] + node.col_offset,
            self.lines[node.end_lineno - 1] + node.end_col_offset,
        )

    def text(self, node):
        first, last = self.span(node)
        return self.bytes[first:last].decode()

    def cut(self, first, last, new=""):
        return (self.bytes[:first] + new.encode() + self.bytes[last:]).decode()

    def replaced(self, node, new):
        return self.cut(*self.span(node), new)

    def without(self, call, argument):
        """The text without an argument and the comma that goes with it."""
        nodes = in_order(call)
        number = nodes.index(argument)
        opening = self.bytes.index(b"(", self.span(call.func)[1])
        closing = self.span(call)[1] - 1
        if len(nodes) == 1:
            return self.cut(opening + 1, closing)
        commas = []  # behind each argument; the last may have none
        for node, after in zip(nodes, [*nodes[1:], None], strict=True):
            end = self.span(node)[1]
            limit = self.span(after)[0] if after else closing
            comma = self.bytes.find(b",", end, limit)
            commas.append(comma if comma >= 0 else closing)
        if number > 0:
            return self.cut(commas[number - 1], commas[number])
        rest = self.bytes[commas[0] + 1 :]
        spaces = len(rest) - len(rest.lstrip(b" "))
        return self.cut(opening + 1, commas[0] + 1 + spaces)


def check(tree, call, argument, there, text):
    """AssertionError unless `text` is the tree with only that argument changed."""
    field = call.keywords if isinstance(argument, ast.keyword) else call.args
    number = field.index(argument)
    field[number : number + 1] = [] if there is None else [there]
    expected = ast.dump(tree)
    field[number : number + (there is not None)] = [argument]
    assert meaning(text) == expected, f"line {argument.lineno}: not cut as it should be"
