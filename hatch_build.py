"""For the build: README.md as package indexes show it, with links that lead somewhere there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

# code is matched, too, so that nothing in it is taken for a link
CODE_OR_LINK = re.compile(
    r"^```.*?^```|`[^`\n]*`|(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)", re.MULTILINE | re.DOTALL
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
        image, label, path = found.groups()
        if path is None:
            return found[0]
        return f"{image}[{label}]({address}/{'raw' if image else 'blob'}/HEAD/{path})"

    return CODE_OR_LINK.sub(changed, text)
