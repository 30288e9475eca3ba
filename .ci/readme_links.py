"""For the build: README.md as package indexes show it, with links that lead somewhere there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

# code is matched, too, so that nothing in it is taken for a link; of a link, what is ahead of the
# path: "](", or the label of a definition, which is not that of a footnote
CODE_OR_LINK = re.compile(
    r"^```.*?^```|`[^`\n]*`"
    r"|(?P<before>\]\(\s*<?|^ {0,3}\[(?P<label>[^\]^][^\]]*)\]:\s*<?)"
    r"(?![A-Za-z][\w+.-]*:|#|//)(?:\./|/)*(?P<path>[^)\s>]+)",
    re.MULTILINE | re.DOTALL,
)


class Description(MetadataHookInterface):
    """Makes the links of README.md absolute once pyproject.toml has the project's address."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        address = metadata.get("urls", {}).get("Repository")
        if address is not None:
            text = absolute(text, address.rstrip("/"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def absolute(text: str, address: str) -> str:
    """The text with its relative links below the address of a repository; those of images, too."""

    def changed(found: re.Match[str]) -> str:
        before, label, path = found["before"], found["label"], found["path"]
        if path is None:
            return found[0]
        if label is None:
            is_image = _is_of_image(text, found.start())
        else:
            is_image = re.search(rf"!\[[^\]]*\]\[{re.escape(label)}\]", text) is not None
        return f"{before}{address}/{'raw' if is_image else 'blob'}/HEAD/{path}"

    return CODE_OR_LINK.sub(changed, text)


def _is_of_image(text: str, end: int) -> bool:
    """Whether the label with its closing bracket there is an image's; it may hold an image."""
    depth = 0
    for place in range(end, 0, -1):
        depth += (text[place] == "]") - (text[place] == "[")
        if depth == 0:
            return text[place - 1] == "!"
    return False
