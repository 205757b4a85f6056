r"""Serves exported models on this machine, for development and tests.

    keras-rub serve models/

Speaks TensorFlow Serving's gRPC and REST, loads every version that
`keras-rub export` adds to the folder, and drains the one before. It takes the
flags of tensorflow_model_server that the commands of docs/serving.md use. It
is no production server: that is tensorflow/serving, with the same folder and
the same requests.
"""

from __future__ import annotations

import pathlib
import signal
import sys
import threading
from collections.abc import Sequence

from absl import logging

from keras_rub.cli import command
from keras_rub.serving.development import DevelopmentServer

FLAGS = command.Flags()

_MODELS = FLAGS.string(
    "models", None, "Folder of all models; the word behind `serve` is this too."
)
_PORT = FLAGS.whole("port", 8500, "Of gRPC; 0 for any free one.")
_REST_API_PORT = FLAGS.whole(
    "rest_api_port", 8501, "Of REST; 0 for any free one."
)
_HOST = FLAGS.string(
    "host",
    "127.0.0.1",
    "The address to listen at; by default this machine only.",
)
_MODEL_CONFIG_FILE = FLAGS.string(
    "model_config_file",
    None,
    "By default the models.config of the folder, if there is one.",
)
_MOUNTED_AT = FLAGS.string(
    "mounted_at", "/models", "Where the paths of models.config see the folder."
)
_ENABLE_BATCHING = FLAGS.switch(
    "enable_batching",
    False,
    "Refuse what is larger than the max_batch_size of "
    "--batching_parameters_file; nothing is batched.",
)
_BATCHING_PARAMETERS_FILE = FLAGS.string(
    "batching_parameters_file",
    None,
    "By default the batching.config of the folder.",
)
_POLL_SECONDS = FLAGS.number(
    "file_system_poll_wait_seconds", 1.0, "How often to look for new versions."
)


def run(stopped: threading.Event | None = None) -> None:
    """Serves until it is told to stop."""
    logging.set_verbosity(logging.WARNING)
    stopped = threading.Event() if stopped is None else stopped
    for number in (signal.SIGTERM, signal.SIGINT):
        if threading.current_thread() is threading.main_thread():
            signal.signal(number, lambda *_: stopped.set())
    with DevelopmentServer(
        _MODELS.value,
        _PORT.value,
        _REST_API_PORT.value,
        host=_HOST.value,
        model_config_file=_here(_MODEL_CONFIG_FILE.value),
        mounted_at=_MOUNTED_AT.value,
        batching_parameters_file=_batching_file(),
        poll_seconds=_POLL_SECONDS.value,
    ) as server:
        for name, versions in server.repository.names().items():
            print(f"{name}: version {', '.join(map(str, versions))}")
        print(
            f"REST at http://{server.host}:{server.rest_api_port}/v1/models, "
            f"gRPC at {server.host}:{server.port}; for development only. "
            "Ctrl-C ends it.",
            flush=True,
        )
        stopped.wait()


def _batching_file() -> str | pathlib.Path | None:
    if not _ENABLE_BATCHING.value:
        return None
    if _BATCHING_PARAMETERS_FILE.value is not None:
        return _here(_BATCHING_PARAMETERS_FILE.value)
    if _MODELS.value is None:
        raise ValueError(
            "--enable_batching needs --batching_parameters_file. Received: none"
        )
    return pathlib.Path(_MODELS.value) / "batching.config"


def _here(path: str | None) -> str | pathlib.Path | None:
    """A path within the server's mount as one within the folder."""
    if path is None or _MODELS.value is None or pathlib.Path(path).exists():
        return path
    mount = pathlib.PurePosixPath(_MOUNTED_AT.value)
    if pathlib.PurePosixPath(path).is_relative_to(mount):
        inside = pathlib.PurePosixPath(path).relative_to(mount)
        return pathlib.Path(_MODELS.value) / inside
    return path


def main(argv: Sequence[str] | None = None) -> int:
    """Calls the command; see `keras_rub.cli.command.call`."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and not argv[0].startswith("-"):
        argv[0] = f"--models={argv[0]}"
    return command.call("serve", FLAGS, run, argv, about=__doc__)
