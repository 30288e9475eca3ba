"""The parts of SciPy that fits use, or an error that names the extra that brings them."""

try:
    from scipy import special, stats
except ImportError as error:
    raise ImportError(
        "plans need SciPy, which is not installed; pip install 'asynchooks[plan]'"
    ) from error

__all__ = ["special", "stats"]
