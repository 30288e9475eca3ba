"""Creators of TensorFlow sessions: for the chief, which initialises a model, and for workers."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from ... import _check
from ..._check import number
from ..._errors import add_note, call_text
from ..checkpoint._format import durable_checkpoints, is_durable
from ._handle import GraphSessionCreator


class ChiefSessionCreator(tf.compat.v1.train.ChiefSessionCreator, GraphSessionCreator):  # type: ignore[misc]
    """Makes TensorFlow sessions that are initialised, or restored from the newest checkpoint.

    TensorFlow's own Scaffold and SessionManager do both, in a thread. The graph is the one that is
    the default when the `MonitoredSession` is made, or else when this creator is.

    Args:
        scaffold: a `tf.compat.v1.train.Scaffold`; None makes one from the graph's collections. Its
            `init_fn` is a plain function: its result is not awaited.
        master: the address of a TensorFlow server ("grpc://host:port"); "" runs in this process.
            Steps on a server run in threads.
        config: a `tf.compat.v1.ConfigProto`.
        checkpoint_dir: where to look for the newest checkpoint.
        checkpoint_filename_with_path: a checkpoint to restore instead.
        heartbeat_secs: seconds, > 0, within which a server that does not answer is detected; runs
            there then raise UnavailableError, and the session is recreated.

    Raises:
        TypeError: `scaffold` is no Scaffold; when opening: its `init_fn` is a coroutine.
        ValueError: `heartbeat_secs` is not > 0, or `master` lacks its protocol.
        RuntimeError: when opening: the model is not ready after initialisation.
        tf.errors.OpError: when opening: an error of TensorFlow; UnavailableError if no server
            answers.

    Example:
        with tf.Graph().as_default():
            train_op = build_model()
            session = MonitoredSession(hooks, ChiefSessionCreator(checkpoint_dir="model"))
    """

    is_chief = True
    _checkpoint_filename_with_path: str | None  # TensorFlow's own

    def __init__(
        self,
        scaffold: Any = None,
        master: str = "",
        config: Any = None,
        checkpoint_dir: str | None = None,
        checkpoint_filename_with_path: str | None = None,
        *,
        heartbeat_secs: float = 10.0,
    ) -> None:
        self._set_up(scaffold, master, config, heartbeat_secs)
        checkpoint_dir, checkpoint_filename_with_path = (
            _check.place(name, each, "a path") if each else each
            for name, each in (
                ("checkpoint_dir", checkpoint_dir),
                ("checkpoint_filename_with_path", checkpoint_filename_with_path),
            )
        )
        self.checkpoint_dir = checkpoint_dir
        super().__init__(
            self.scaffold, master, config, checkpoint_dir, checkpoint_filename_with_path
        )

    def create_session(self) -> Any:
        """An initialised or restored `tf.compat.v1.Session`; blocks."""
        newest = self._newest_checkpoint()
        source = self.checkpoint_dir, self._checkpoint_filename_with_path
        if newest is not None and is_durable(newest):  # an intact one, if the last one is damaged
            source = None, newest
        theirs = tf.compat.v1.train.ChiefSessionCreator
        creator = theirs(self.scaffold, self.master, self.config, *source)
        try:
            session = creator.create_session()
        except Exception as error:
            if newest is None:
                raise
            note = (
                f"in create_session of {type(self).__name__}, restoring {newest!r}; no file was "
                "changed: another checkpoint can be restored through "
                "checkpoint_filename_with_path"
            )
            if not isinstance(error, tf.errors.OutOfRangeError):
                add_note(error, note)
                raise
            # raised for a file that is too short; it must not pass for the end of input
            loss = tf.errors.DataLossError(None, None, error.message)
            add_note(loss, note)
            raise loss from error
        session.asynchooks_restored = newest  # hooks restore their state from there, too
        return session

    def _newest_checkpoint(self) -> str | None:
        """The checkpoint to be restored, None if there is none.

        Of those that `CheckpointSaverHook(background=True)` wrote, the newest intact one.

        Raises:
            ValueError: the file that names it cannot be read. TensorFlow would start from scratch.
            CheckpointError: there are some, and none of them is intact.
        """
        if self._checkpoint_filename_with_path or not self.checkpoint_dir:
            return self._checkpoint_filename_with_path
        try:
            state = tf.train.get_checkpoint_state(self.checkpoint_dir)
        except ValueError:  # it is empty
            state = None
        newest = None if state is None else state.model_checkpoint_path
        durable = durable_checkpoints(self.checkpoint_dir, newest)
        if durable is not None:
            intact = durable.newest_intact()
            return None if intact is None else intact.prefix
        if newest is not None:
            return str(newest)
        path = tf.io.gfile.join(self.checkpoint_dir, "checkpoint")
        if tf.io.gfile.exists(path):
            raise ValueError(
                f"{path!r}, which names the newest checkpoint, cannot be read. Starting from "
                "scratch would overwrite checkpoints: restore one through "
                "checkpoint_filename_with_path, or remove that file"
            )
        return None

    def __repr__(self) -> str:
        return call_text(
            self,
            master=self.master or None,
            checkpoint_dir=self.checkpoint_dir,
            checkpoint_filename_with_path=self._checkpoint_filename_with_path,
        )


class WorkerSessionCreator(tf.compat.v1.train.WorkerSessionCreator, GraphSessionCreator):  # type: ignore[misc]
    """Makes TensorFlow sessions on a model that a chief initialises, and waits until it has.

    It tries at once, again after a quarter of a second, and then after twice the pause before, at
    most ten seconds; a chief of this process wakes it. Waiting can be cancelled at any time.

    Args:
        scaffold, config, heartbeat_secs: as for `ChiefSessionCreator`.
        master: the address of the TensorFlow server ("grpc://host:port") that holds the model.
        max_wait_secs: seconds to wait for the model, >= 0; None waits as long as it takes.

    Raises:
        TypeError, ValueError: an argument is not what it should be.
        tf.errors.DeadlineExceededError: when opening: the model was not ready in time.

    Source: TensorFlow's `tf.compat.v1.train.WorkerSessionCreator`, which tries every 30 s.

    Example:
        with tf.Graph().as_default():
            train_op = build_model()
            creator = WorkerSessionCreator(master="grpc://localhost:2222", max_wait_secs=60)
            session = MonitoredSession(hooks, creator)
    """

    is_chief = False

    def __init__(
        self,
        scaffold: Any = None,
        master: str = "",
        config: Any = None,
        max_wait_secs: float | None = 30 * 60,
        *,
        heartbeat_secs: float = 10.0,
    ) -> None:
        self._set_up(scaffold, master, config, heartbeat_secs)
        secs = math.inf if max_wait_secs is None else max_wait_secs
        expected = "seconds >= 0, or None"
        self.max_wait_secs = number("max_wait_secs", secs, least=0, finite=False, expected=expected)
        # TensorFlow would sleep between its attempts: with no time to wait it makes one
        super().__init__(self.scaffold, master, config, max_wait_secs=0)

    def __repr__(self) -> str:
        return call_text(self, master=self.master or None)


def default_creator() -> ChiefSessionCreator:
    """The creator of a session that was given none."""
    creator = ChiefSessionCreator()
    creator.is_default = True
    return creator
