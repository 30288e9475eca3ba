"""Docstrings as reStructuredText: code in single backticks, examples as code, links to names.

The docstrings are written to be read in a terminal, by `help()`. What Sphinx needs beyond that is
added here, before napoleon sees them.
"""

from __future__ import annotations

import importlib
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from docutils import nodes  # type: ignore[import-untyped]
    from sphinx.addnodes import pending_xref
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

PUBLIC_MODULES = (
    "asynchooks",
    "asynchooks.checkpoints",
    "asynchooks.data",
    "asynchooks.planning",
    "asynchooks.protocols",
    "asynchooks.simulation",
    "asynchooks.distributed",
    "asynchooks.testing",
    "asynchooks.tf",
)
IN_BACKTICKS = re.compile(r"(?<![`:\w])`([^`\n]+(?:\n[^`\n]+)?)`(?!`)")
SECTIONS = {
    "Args:", "Attributes:", "Raises:", "Returns:", "Yields:", "Source:", "Note:", "Warning:",
}  # fmt: skip


def public_paths() -> dict[str, str]:
    """From where each public object is defined, and from its bare name, to its public path."""
    paths: dict[str, str] = {}
    for module_name in PUBLIC_MODULES:
        module = importlib.import_module(module_name)
        for name in sorted({*module.__all__, *dir(module)}):
            public = getattr(module, name)
            defined_in = getattr(public, "__module__", None)
            path = f"{module_name}.{name}"
            if isinstance(defined_in, str) and defined_in.startswith("asynchooks"):
                paths.setdefault(f"{defined_in}.{name}", path)
                paths.setdefault(name, path)
            elif name in module.__all__ and name != "Scaffold":  # an alias of a type
                paths.setdefault(name, path)
    return paths


PATHS = public_paths()
# names in signatures that stand for others
FOREIGN = {
    "Axes": "matplotlib.axes.Axes",
    "Figure": "matplotlib.figure.Figure",
    "NDArray": "numpy.typing.NDArray",
    "OutOfRangeError": "tf.errors.OutOfRangeError",
    "np.generic": "numpy.generic",
    "numpy.random._generator.Generator": "numpy.random.Generator",
    "tensorflow.python.framework.ops.Graph": "tf.Graph",
}

# Objects that the library makes for its users: their constructors are no part of the interface.
MADE_BY_THE_LIBRARY = {
    "Batches", "Cluster", "Queue", "Recording", "Report", "ServerReport", "SessionRunValues",
    "Stage", "Status", "Sweep", "StepContext", "Subscription", "Timeline", "Worker", "WorkerReport",
}  # fmt: skip


def linked(found: re.Match[str]) -> str:
    """What stands in single backticks: a link, where it is a public name, or else code."""
    text = found[1].replace("\n", " ")
    text = re.sub(r" +", " ", text)
    path = PATHS.get(text)
    markup = f":py:obj:`{text} <{path}>`" if path else f"``{text}``"
    # a plural's "s" may follow the code directly
    return markup + ("\\ " if found.string[found.end() : found.end() + 1].isalnum() else "")


def indent_of(line: str) -> int:
    return len(line) - len(line.lstrip())


def to_code_blocks(lines: list[str]) -> list[str]:
    """Put `Example:`, and every indented block after an empty line, into a code block."""
    made: list[str] = []
    section: int | None = None  # indentation of the section that a line belongs to
    rest = iter(enumerate(lines))
    for index, line in rest:
        text = line.strip()
        if section is not None and text and indent_of(line) <= section:
            section = None
        if text in SECTIONS:
            section = indent_of(line)
        is_example = text in ("Example:", "Examples:")
        opens = (
            section is None
            and text
            and indent_of(line) > 0
            and (index == 0 or not lines[index - 1].strip())
            and not text.startswith(("-", "*", "..", "|"))
        )
        if not (is_example or opens):
            made.append(line)
            continue
        if is_example:
            made += [".. rubric:: Example", ""]
        block = [] if is_example else [line]
        base = indent_of(line) if is_example else 0
        for _, after in rest:
            if after.strip() and indent_of(after) <= base:
                made += [*code(block), after]
                if after.strip() in SECTIONS:
                    section = indent_of(after)
                break
            block.append(after)
        else:
            made += code(block)
    return made


def code(block: list[str]) -> list[str]:
    return [
        "",
        ".. code-block:: python",
        "",
        *("    " + line for line in block),
        "",
    ]


def prepare(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    text = "\n".join(to_code_blocks(lines))
    parts = re.split(r"(\.\. code-block:: python\n\n(?:(?:    .*)?\n)*)", text + "\n")
    parts[::2] = [IN_BACKTICKS.sub(linked, part) for part in parts[::2]]
    lines[:] = "".join(parts).split("\n")
    if what in ("attribute", "property", "data"):
        # napoleon takes what stands before a colon of the first line for the type
        lines[:0] = ["..", ""]


def signature(
    app: Sphinx,
    what: str,
    name: str,
    obj: Any,
    options: Any,
    arguments: str,
    returns: str,
) -> tuple[str, str] | None:
    if what == "class" and name.rpartition(".")[2] in MADE_BY_THE_LIBRARY:
        return "", ""
    # the package's own mark for "one step more"
    return (re.sub(r" \| [\w.~]*\bSentinel\b", "", arguments), returns) if arguments else None


def resolve(
    app: Sphinx,
    env: BuildEnvironment,
    node: pending_xref,
    contnode: nodes.TextElement,
) -> nodes.reference | None:
    """Link a type of a signature, which is given by its private path, under its public one."""
    target = node["reftarget"] = FOREIGN.get(node.get("reftarget", ""), node.get("reftarget", ""))
    path = PATHS.get(target) or PATHS.get(target.rpartition(".")[2])
    if node.get("refdomain") != "py" or path is None or path == target:
        return None
    domain: Any = env.get_domain("py")
    return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", path, node, contnode)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", prepare, priority=400)
    app.connect("autodoc-process-signature", signature)
    app.connect("missing-reference", resolve, priority=400)  # before intersphinx
    return {"parallel_read_safe": True}
