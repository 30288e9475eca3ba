"""Small things that several tests use."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from inspect import isawaitable
from typing import Any

import anyio
import anyio.lowlevel

from asynchooks import Coordinator, FunctionSessionCreator, SessionRunHook


def counting_step() -> tuple[Callable[[], dict[str, int]], list[int]]:
    """A step function that returns how often it was called, and the list of its calls."""
    calls: list[int] = []

    def step() -> dict[str, int]:
        calls.append(len(calls) + 1)
        return {"calls": len(calls)}

    return step, calls


def counting_creator() -> FunctionSessionCreator:
    return FunctionSessionCreator(counting_step()[0])


async def turns(num: int = 1) -> None:
    """Let each task that can run do so, so many times."""
    for _ in range(num):
        await anyio.lowlevel.checkpoint()


async def settle() -> None:
    """Let every task that can run do so until it waits."""
    await anyio.wait_all_tasks_blocked()


@asynccontextmanager
async def another_task() -> AsyncIterator[None]:
    """Within it, the running task is not the only one of its event loop."""
    async with anyio.create_task_group() as group:
        group.start_soon(anyio.sleep_forever)
        yield
        group.cancel_scope.cancel()


async def cancelled_when_settled(fn: Callable[..., Awaitable[object]], *args: object) -> bool:
    """Cancel a call as soon as it waits; returns whether its cancellation left it."""
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:

            async def call() -> None:
                await fn(*args)

            group.start_soon(call)
            await settle()
            scope.cancel()
    return scope.cancelled_caught


class KeepsCoord(SessionRunHook):
    """Has the coordinators of all its raw sessions; `coord` is that of the present one."""

    def __init__(self) -> None:
        self.coords: list[Coordinator] = []

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        self.coords.append(coord)

    @property
    def coord(self) -> Coordinator:
        return self.coords[-1]


class StartsTask(SessionRunHook):
    """Starts `fn(coord)` as a side task of each raw session."""

    def __init__(self, fn: Callable[[Coordinator], Awaitable[Any]]) -> None:
        self.fn = fn

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        coord.start_soon(self.fn, coord)


def hook_of(
    name: str, moments: Mapping[str, Callable[..., Any]], *, is_plain: bool = False
) -> SessionRunHook:
    """A hook, of a class of that name, that calls or awaits functions at its moments."""

    def method(fn: Callable[..., Any]) -> Callable[..., Any]:
        async def coroutine(hook: SessionRunHook, *given: object) -> Any:
            result = fn(*given)
            return await result if isawaitable(result) else result

        return (lambda hook, *given: fn(*given)) if is_plain else coroutine

    methods = {moment: method(fn) for moment, fn in moments.items()}
    hook: SessionRunHook = type(name, (SessionRunHook,), methods)()
    return hook


def raises_at(
    moment: str, error: BaseException | type[BaseException], *, is_plain: bool = False
) -> SessionRunHook:
    """A hook, of the class `Raises`, that raises the error at one moment."""

    def fail(*_: object) -> None:
        raise error

    return hook_of("Raises", {moment: fail}, is_plain=is_plain)


class Box:
    """Holds what a task left behind."""

    def __init__(self) -> None:
        self.value: Any = None
        self.error: BaseException | None = None


@asynccontextmanager
async def in_task(fn: Callable[..., Awaitable[object]], *args: object) -> AsyncIterator[Box]:
    """A call in a task of its own that waits by now; the block ends after it."""
    box = Box()

    async def call() -> None:
        try:
            box.value = await fn(*args)
        except Exception as error:
            box.error = error

    async with anyio.create_task_group() as group:
        group.start_soon(call)
        await settle()
        yield box
