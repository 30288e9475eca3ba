"""Three event loops: a module that imports `anyio_backend` has its tests run on each of them."""

import pytest

LOOPS = ["asyncio", "uvloop", "trio"]


def loop_of(name: str) -> tuple[str, dict[str, bool]]:
    """The backend and its options, as anyio takes them."""
    if name == "trio":
        return "trio", {}
    if name == "uvloop":
        pytest.importorskip("uvloop")
    return "asyncio", {"use_uvloop": name == "uvloop"}


@pytest.fixture(params=LOOPS)
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    return loop_of(request.param)
