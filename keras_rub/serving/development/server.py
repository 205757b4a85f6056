"""The development server: models from a folder, by gRPC and REST."""

from __future__ import annotations

import concurrent.futures
import importlib.util
import os
import pathlib
import re
import threading
from typing import Any

from absl import logging

from keras_rub.serving.development.repository import (
    ModelConfig,
    Repository,
    model_config,
    newest,
)
from keras_rub.serving.versions import list_versions

# What the extra `serving` installs, by the names of the modules.
_NEEDED = {
    "tensorflow_serving": "tensorflow-serving-api",
    "grpc": "grpcio",
    "waitress": "waitress",
}


class DevelopmentServer:
    """Serves all models of a folder, as TensorFlow Serving would.

    It is for laptops and tests; production is `tensorflow/serving`.

    Args:
        models: the folder that holds one folder a model, or `None` if
            `model_config_file` has all paths.
        port: int. Of gRPC; 0 for any free one. Defaults to `8500`.
        rest_api_port: int. Of REST; 0 for any free one. Defaults to `8501`.
        host: the address to listen at. Defaults to `"127.0.0.1"`: this
            machine only.
        model_config_file: path, or `None`. Defaults to `None`: the
            models.config of the folder if there is one, else every folder
            with versions.
        mounted_at: what the paths of models.config begin with in the place of
            `models`. Defaults to `"/models"`, as `write_config` does.
        batching_parameters_file: path of batching.config, or `None`. Of it,
            the largest size of a request is kept to; nothing is batched.
            Defaults to `None`.
        poll_seconds: float. How often to look for new versions. Defaults to
            `1.0`.
        threads: int. Requests of each protocol that are worked on at the
            same time. Defaults to `16`.

    Example:
    ```python
    with keras_rub.serving.DevelopmentServer("models") as server:
        print(server.rest_api_port, server.port)
    ```
    """

    def __init__(
        self,
        models: str | os.PathLike | None,
        port: int = 8500,
        rest_api_port: int = 8501,
        *,
        host: str = "127.0.0.1",
        model_config_file: str | os.PathLike | None = None,
        mounted_at: str | os.PathLike = "/models",
        batching_parameters_file: str | os.PathLike | None = None,
        poll_seconds: float = 1.0,
        threads: int = 16,
    ):
        _check_extra()
        from keras_rub.serving.development.answers import Answers

        if not poll_seconds > 0:
            raise ValueError(
                "`poll_seconds` must be above 0. "
                f"Received: `poll_seconds={poll_seconds!r}`"
            )
        self._models = None if models is None else pathlib.Path(models)
        if self._models is not None and not self._models.is_dir():
            raise ValueError(
                "`models` must be a folder. "
                f"Received: `models={str(self._models)!r}`"
            )
        self._config = (
            None
            if model_config_file is None
            else pathlib.Path(model_config_file)
        )
        if self._models is None and self._config is None:
            raise ValueError(
                "A server needs a folder of models or a `model_config_file`. "
                "Received: neither"
            )
        self._mounted_at = pathlib.PurePosixPath(mounted_at)
        self.repository = Repository(self._read_config)
        self._answers = Answers(
            self.repository, _max_batch_size(batching_parameters_file)
        )
        self.host = host
        self.port, self.rest_api_port = port, rest_api_port
        self._poll_seconds = poll_seconds
        self._threads = threads
        self._stopping = threading.Event()
        self._sockets: dict[int, Any] = {}  # of waitress, by file descriptor

    def start(self) -> DevelopmentServer:
        """Loads the models and begins to listen."""
        import grpc
        import waitress

        from keras_rub.serving.development import rest, rpc

        self.repository.refresh()
        self._rpc = grpc.server(
            concurrent.futures.ThreadPoolExecutor(self._threads),
            options=[
                ("grpc.max_receive_message_length", -1),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),
            ],
        )
        rpc.add_services(self._rpc, self._answers)
        try:
            self.port = self._rpc.add_insecure_port(f"{self.host}:{self.port}")
            self._rest: Any = waitress.create_server(
                rest.RestApplication(self._answers),
                map=self._sockets,
                host=self.host,
                port=self.rest_api_port,
                threads=self._threads,
                ident="keras-rub",
            )
        except (OSError, RuntimeError) as error:
            raise ValueError(
                f"Can't listen at {self.host}: a port is in use. Received: "
                f"`port={self.port}`, `rest_api_port={self.rest_api_port}` "
                f"({error})"
            ) from error
        self.rest_api_port = int(self._rest.effective_port)
        self._rpc.start()
        self._running = [
            threading.Thread(target=target, daemon=True)
            for target in (self._rest.run, self._poll)
        ]
        for thread in self._running:
            thread.start()
        return self

    def stop(self) -> None:
        """Ends the requests that are under way, then listens no more."""
        self._stopping.set()
        self._rpc.stop(grace=30).wait()
        self._rest.task_dispatcher.shutdown(cancel_pending=False, timeout=30)
        # In the thread that reads from them, behind what it still has to send.
        self._rest.pull_trigger()
        self._rest.trigger.pull_trigger(self._close_sockets)
        for thread in self._running:
            thread.join(30)

    def _close_sockets(self) -> None:
        for socket in list(self._sockets.values()):
            socket.close()

    def __enter__(self) -> DevelopmentServer:
        return self.start()

    def __exit__(self, *_: Any) -> None:
        self.stop()

    def _poll(self) -> None:
        while not self._stopping.wait(self._poll_seconds):
            try:
                self.repository.refresh()
            except (OSError, ValueError) as error:
                # What is served stays; the next look may find it mended.
                logging.warning("%s", error)

    def _read_config(self) -> dict[str, ModelConfig]:
        path = self._config
        if path is None:
            assert self._models is not None
            path = self._models / "models.config"
            if not path.exists():
                return {
                    folder.name: ModelConfig(folder, newest(1), {})
                    for folder in sorted(self._models.iterdir())
                    if list_versions(folder)
                }
        return {
            entry.name: model_config(entry, self._local(entry.base_path))
            for entry in _parse_config(path)
        }

    def _local(self, base_path: str) -> pathlib.Path:
        """A path of models.config as this machine sees it."""
        path = pathlib.PurePosixPath(base_path)
        if self._models is not None and path.is_relative_to(self._mounted_at):
            return self._models / path.relative_to(self._mounted_at)
        return pathlib.Path(base_path)


def _check_extra() -> None:
    missing = [
        package
        for module, package in _NEEDED.items()
        if importlib.util.find_spec(module) is None
    ]
    if missing:
        raise ValueError(
            f"A development server needs {', '.join(missing)}. Install the "
            'extra `serving`: pip install "keras-rub[serving]".'
        )


def _parse_config(path: pathlib.Path) -> list[Any]:
    from google.protobuf import text_format
    from tensorflow_serving.config import model_server_config_pb2

    try:
        config = text_format.Parse(
            path.read_text(encoding="utf-8"),
            model_server_config_pb2.ModelServerConfig(),
        )
    except OSError as error:
        raise ValueError(f"Can't read {path}: {error.strerror}.") from error
    except (text_format.ParseError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no models.config: {error}.") from error
    entries = list(config.model_config_list.config)
    for entry in entries:
        if not entry.name or not entry.base_path:
            raise ValueError(
                f"{path} must give each model a name and a base_path. "
                f"Received: {' '.join(str(entry).split())!r}"
            )
    return entries


def _max_batch_size(path: str | os.PathLike | None) -> int | None:
    """Of batching.config; its protocol buffer is in no Python package."""
    if path is None:
        return None
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"Can't read {path}: {error.strerror}.") from error
    fields = re.compile(r"(\w+)\s*\{\s*value\s*:\s*(\d+)\s*\}")
    rest = fields.sub("", re.sub(r"#.*", "", text)).strip()
    found = dict(fields.findall(text))
    if rest or "max_batch_size" not in found:
        raise ValueError(
            f"{path} is no batching.config with a max_batch_size. Received: "
            f"{rest[:80]!r}"
        )
    return int(found["max_batch_size"])
