"""The proof that a test fails without a line, and what this proof depends on."""

import ast
import difflib
import functools
import re
import symtable

from tools.prove import record
from tools.prove.record import Proof
from tools.scripts import ROOT


def function_of(test):
    """A test's id without its parameters."""
    return test.partition("[")[0]


def make_proof(edge, mutant, killer):
    """The proof that `killer`, a test, kills a mutant.

    It depends on the function that the mutant stands in, before and after, or on the
    statement if that stands in no function; on what the lines that differ use of
    utils.py; and on the killer.
    """
    before = statements_of((ROOT / edge[1]).read_text())
    after = statements_of(mutant.text)
    old = "\n".join(sorted(before - after))
    new = "\n".join(sorted(after - before))
    lines = difflib.ndiff(old.splitlines(), new.splitlines())
    differ = [line for line in lines if line.startswith(("-", "+"))]
    parts = [mutant.kind, old, "becomes", new]
    parts += used_of(code_of("utils.py"), differ)
    parts.append(code_of_test(function_of(killer)))
    return Proof(" ".join(edge), label(mutant), killer, record.digest(parts))


def label(mutant):
    return mutant.what.partition(" # ")[0][:50]


@functools.cache
def statements_of(text):
    """The code of each statement at the top level, and of each method of a class."""
    return {*codes_in(ast.parse(text))}


def codes_in(tree, scope=""):
    """Yield each statement as code, with its class in front."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield from codes_in(node, node.name)
            node.body = []
        yield f"{scope}: {ast.unparse(node)}"


def used_of(codes, texts):
    """Of `codes`, {name: code}: those that these texts name, and that those name."""
    used = set()
    to_read = [*texts]
    while to_read:
        names = set(re.findall(r"\w+", to_read.pop())) & set(codes) - used
        used |= names
        to_read += [codes[name] for name in names]
    return [codes[name] for name in sorted(used)]


@functools.cache
def code_of(path):
    """{name: the code that defines it}, of all names at the top level of a file.

    Comments and imports are no part of it, so that they may change.
    """
    codes = {}
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        code = ast.unparse(node)
        for name in names_set_by(code):
            codes[name] = codes.get(name, "") + code
    return codes


def names_set_by(code):
    """The names that a statement sets, in its blocks as well; if none, all its names.

    `TABLE.append(3)` sets no name, and still changes what TABLE holds.
    """
    symbols = symtable.symtable(code, "", "exec").get_symbols()
    names = {symbol.get_name() for symbol in symbols if symbol.is_assigned()}
    return names or {symbol.get_name() for symbol in symbols}


@functools.cache
def code_of_test(test):
    """The code of a test, and of what it uses of its file."""
    path, _, name = test.partition("::")
    return "\n".join([test, *used_of(code_of(path), [name])])
