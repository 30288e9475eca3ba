"""Hooks in the training loops of other libraries: Lightning, transformers, Ignite.

Each is loaded with its library at the first use. Keras's is `asynchooks.HooksCallback`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._later import later

if TYPE_CHECKING:
    from ._ignite import IgniteHooks as IgniteHooks
    from ._lightning import LightningHooks as LightningHooks
    from ._transformers import TrainerHooks as TrainerHooks
else:
    __getattr__, __dir__ = later(
        __name__,
        {
            "IgniteHooks": "_ignite",
            "LightningHooks": "_lightning",
            "TrainerHooks": "_transformers",
        },
    )

__all__: list[str] = []  # a star import must work where the libraries are missing
