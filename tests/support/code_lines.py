"""Counts the lines of code of a Python file, for comparisons of programs that do the same."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER, tokenize.ENCODING,
}  # fmt: skip


def num_code_lines(file: Path) -> int:
    """How many lines hold code: no blank ones, no comments and no docstrings."""
    text = file.read_text()
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {
        line
        for token in tokens
        if token.type not in _NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0]
            if ast.get_docstring(node, clean=False) is not None:
                lines -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines)
