"""Mode: which of two metrics is the better one; from a metric's name, where that is plain."""

from __future__ import annotations

import enum
import logging
import re

from .._errors import shown

logger = logging.getLogger("asynchooks")


class Mode(enum.Enum):
    """Which metric is better: the smaller one (a loss), or the larger one (an accuracy).

    Wherever a mode is taken, its text "min" or "max" is, too.

    Example:
        Retention(keep_best=1, mode=Mode.MAX)
    """

    MIN = "min"
    MAX = "max"

    def is_better(self, value: float, than: float, *, by: float = 0.0) -> bool:
        """Whether a value is better than an earlier one, by more than this.

        Of equal values the first one stays the best. Everything that compares metrics asks here.
        """
        gain = than - value if self is Mode.MIN else value - than
        return gain > by

    @property
    def says(self) -> str:
        """It in words, for people."""
        return f"{self}: {'smaller' if self is Mode.MIN else 'larger'} is better"


def checked_mode(mode: object) -> Mode | None:
    """The mode, given as such or as text; None where none is given."""
    if mode is None or isinstance(mode, Mode):
        return mode
    expected = 'give Mode.MIN or Mode.MAX, or the text "min" or "max"'
    if not isinstance(mode, str):
        raise TypeError(f"mode is {shown(mode)}; {expected}")
    try:
        return Mode(mode.lower())
    except ValueError:
        raise ValueError(f"mode is {mode!r}; {expected}") from None


def ask_for_mode(what: str, advice: str) -> Mode:
    """Ask for the mode in the log, where nothing says it; until then smaller is better."""
    logger.warning(
        "%s does not say whether smaller or larger is better, and no mode was given: the smaller "
        "one is taken for the better one. %s",
        what,
        advice,
    )
    return Mode.MIN


_SAYS = {
    Mode.MIN: re.compile(
        r"(loss|error|err|perplexity|ppl|mse|rmse|mae|nll|bce|crossentropy|cost|wer|fid)\d*"
    ),
    Mode.MAX: re.compile(
        r"(accuracy|acc|auc|ap|map|f1|r2|reward|return|score|precision|recall|bleu|rouge|iou"
        r"|dice)\d*"
    ),
}
_BEHIND = re.compile("mean|avg|macro|micro|rate")
"""What may stand behind the word that says it: `reward_mean`, `f1_macro`, `error_rate`."""
_TURNING = re.compile("neg|negative|minus|inverse|not|diff|delta")


def mode_of(name: str) -> Mode | None:
    """The mode that a metric's name says plainly, as its last word.

    Of `eval/accuracy` the last part counts. None where it says none, where two words disagree, and
    where it begins as `1 - accuracy` and `-loss` do.
    """
    last = name.removesuffix(":0").rpartition("/")[2]
    if any(re.match(r"[-\d]", each) for each in (name, last)):
        return None
    text = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", last).lower()  # valLoss
    words = re.findall(r"[a-z]+\d*", text.replace("cross_entropy", "crossentropy"))
    while words and _BEHIND.fullmatch(words[-1]):
        words.pop()
    said = {mode for mode, says in _SAYS.items() if any(map(says.fullmatch, words))}
    is_last = len(said) == 1 and any(says.fullmatch(words[-1]) for says in _SAYS.values())
    return said.pop() if is_last and not any(map(_TURNING.fullmatch, words)) else None
