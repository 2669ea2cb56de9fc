"""What a block of code on a page needs from the blocks before it."""

from __future__ import annotations

import ast
import builtins
import re
import symtable
import textwrap
from collections.abc import Iterator, Sequence
from html import escape

_BLOCK = re.compile(
    r"(?P<mark>^[ \t]*<!-- [^\n]* -->\n)?^(?P<indent>[ \t]*)```python(?P<info>[^\n`]*)\n(?P<code>.*?)^[ \t]*```$",
    re.MULTILINE | re.DOTALL,
)


def names(code: str) -> tuple[set[str], set[str]]:
    """Return the global names that a block uses before it makes them, and those that it makes."""
    needed, later, made = set[str](), set[str](), set[str]()
    for statement in _WithGenerators().visit(ast.parse(code)).body:
        now, inside, new = _of_statement(ast.unparse(statement))
        needed |= now - made - (set() if isinstance(statement, ast.Assign) else new)  # the right side comes first
        later |= inside
        made |= new
    return {name for name in needed | later - made if not hasattr(builtins, name) and name != "__name__"}, made


class _WithGenerators(ast.NodeTransformer):
    """Make each comprehension a generator expression: from Python 3.12 on, only these have a scope of their own in a symtable."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        node = super().generic_visit(node)
        match node:
            case ast.ListComp(elt, generators) | ast.SetComp(elt, generators):
                return ast.GeneratorExp(elt, generators)
            case ast.DictComp(key, value, generators):
                return ast.GeneratorExp(ast.Tuple([key, value]), generators)
        return node


def _of_statement(code: str) -> tuple[set[str], set[str], set[str]]:
    """Return the global names that a statement uses at once, those that its functions use when called, and those it makes."""
    now, inside, made = set[str](), set[str](), set[str]()
    tables = [symtable.symtable(code, "a statement", "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            top = table.get_type() == "module"
            if top and (symbol.is_assigned() or symbol.is_imported()):
                made.add(symbol.get_name())
            if symbol.is_referenced() and (top or symbol.is_global()):
                (inside if table.get_type() == "function" else now).add(symbol.get_name())
    return now, inside, made


def needs(codes: Sequence[str]) -> list[tuple[set[str], list[int]]]:
    """Return for each block the names that it takes from blocks before it, and the indices of these and what they need."""
    makers, found = dict[str, int](), list[tuple[set[str], list[int]]]()
    for index, code in enumerate(codes):
        used, made = names(code)
        taken = {name for name in used if name in makers}
        direct = {makers[name] for name in taken}
        found.append((taken, sorted(direct.union(*(found[one][1] for one in direct)))))
        makers |= dict.fromkeys(made, index)
    return found


def add_notes(markdown: str) -> str:
    """Say below each block of Python what it takes from blocks before it; a script makes a button of the note."""
    blocks = list(_BLOCK.finditer(markdown))
    codes = ["" if _alone(block) else textwrap.dedent(block["code"]) for block in blocks]
    parts, end = list[str](), 0
    for block, (taken, others) in zip(blocks, needs(codes), strict=True):
        parts += [markdown[end : block.end()], *_note(taken, others, block["indent"])]
        end = block.end()
    return "".join([*parts, markdown[end:]])


def _alone(block: re.Match[str]) -> bool:
    """Return True for a block that is not run with the others: a file, and what is only shown."""
    return ".py" in block["info"] or "<!-- shown" in (block["mark"] or "")


def _note(taken: set[str], others: list[int], indent: str) -> Iterator[str]:
    if taken:
        words = ", ".join(f"<code>{escape(name)}</code>" for name in sorted(taken))
        yield f'\n\n{indent}<p class="goes-on" data-blocks="{" ".join(map(str, others))}">Goes on from above: {words}.</p>\n'
