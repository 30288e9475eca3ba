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
        "one is taken for the better one. %s", what, advice,
    )  # fmt: skip
    return Mode.MIN


_SMALLER = re.compile(
    "loss|logloss|error|err|perplexity|ppl|mse|rmse|mae|mape|nll|bce|crossentropy|cost|wer|cer|fid"
    "|brier|regret"
)
_LARGER = re.compile(
    "accuracy|acc|auc|auroc|auprc|rocauc|f1|fscore|fbeta|reward|score|precision|recall|return|r2"
    "|bleu|rouge|meteor|iou|miou|dice|ap|ndcg|mrr|psnr|ssim|kappa|mcc|specificity|sensitivity"
)
_NEGATING = re.compile(
    "neg|negative|negated|minus|inverse|inverted|inv|not|non|no|without|delta|diff|difference"
    "|change"
)
_NEUTRAL = re.compile(
    "mean|avg|average|median|total|sum|rate|per|macro|micro|weighted|top|epoch|step|batch|token"
    "|sample|train|training|val|valid|validation|dev|test|eval|evaluation|ema|smoothed|fn|[a-z]"
)
"""What may stand behind the word that says it: `reward_mean`, `f1_macro`, `loss_1`."""
_SUBTRACTED = re.compile(r"\W*[0-9.]*\s*[-\u2212\u2013/]|1_")
"""How `1-accuracy`, `100 - acc` and `-loss` begin."""


def mode_of(name: str) -> Mode | None:
    """The mode that a metric's name says; None where it says none, or where two words disagree.

    Of `eval/accuracy` the last part counts, and in it the last word that is not neutral must be a
    word for a loss or for a score.
    """
    if _SUBTRACTED.match(name):
        return None
    last = re.sub(r":\d+$", "", name).rpartition("/")[2]  # of a tensor `loss:0`
    if _SUBTRACTED.match(last):
        return None
    words = _words(last)
    if not any(map(_mode_of_word, words)):  # perhaps valLoss
        words = _words(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", last))
    while words and _is_neutral(words[-1]):
        words.pop()
    modes = {_mode_of_word(word) for word in words} - {None}
    is_plain = len(modes) == 1 and _mode_of_word(words[-1]) is not None
    return modes.pop() if is_plain and not any(map(_NEGATING.fullmatch, words)) else None


def _words(text: str) -> list[str]:
    text = re.sub(r"cross[\W_]*entropy", "crossentropy", text.lower())
    return re.findall(r"[a-z]+[0-9]*|[0-9]+", text)


def _is_neutral(word: str) -> bool:
    plain = word.rstrip("0123456789")
    return _mode_of_word(word) is None and (not plain or bool(_NEUTRAL.fullmatch(plain)))


def _mode_of_word(word: str) -> Mode | None:
    """Of one word, also in the plural and with a number: `losses`, `acc5`."""
    plain = word.rstrip("0123456789")
    for each in (word, plain, plain.removesuffix("s"), plain.removesuffix("es")):
        if _SMALLER.fullmatch(each):
            return Mode.MIN
        if _LARGER.fullmatch(each):
            return Mode.MAX
    return None
