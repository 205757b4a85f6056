"""Training under tf.distribute, on several devices or several machines."""

from __future__ import annotations

import json
import os
import pathlib
import time
from collections.abc import Callable

import keras
import tensorflow as tf

from keras_rub.tracing import compiled

STRATEGIES = ("none", "mirrored", "multiworker")


def make_strategy(name: str) -> tf.distribute.Strategy | None:
    """The strategy of this name.

    Args:
        name: `"none"`; `"mirrored"`, all devices of this machine;
            `"multiworker"`, the machines that the environment variable
            TF_CONFIG lists. The last must be made before anything else of
            TensorFlow is used.
    """
    if name not in STRATEGIES:
        raise ValueError(
            f"`strategy` must be one of {STRATEGIES}. "
            f"Received: `strategy={name!r}`"
        )
    if name == "none":
        return None
    if name == "mirrored":
        return tf.distribute.MirroredStrategy()
    check_cluster()
    return tf.distribute.MultiWorkerMirroredStrategy()


def check_cluster() -> None:
    """Raises unless TF_CONFIG describes a cluster of workers."""
    text = os.environ.get("TF_CONFIG", "")
    try:
        config = json.loads(text)
        workers = config["cluster"]["worker"]
        fits = 0 <= int(config["task"]["index"]) < len(workers)
    except (ValueError, KeyError, TypeError):
        fits = False
    if not fits:
        raise ValueError(
            "Strategy multiworker needs the environment variable TF_CONFIG, "
            'such as {"cluster": {"worker": ["host0:9000", "host1:9000"]}, '
            '"task": {"type": "worker", "index": 0}}, with another index on '
            f"each machine. Received: TF_CONFIG={text!r}"
        )


def worker_index() -> int:
    """The number of this worker; 0 where there is no cluster."""
    config = json.loads(os.environ.get("TF_CONFIG", "{}") or "{}")
    return int(config.get("task", {}).get("index", 0))


class MultiWorkerTraining:
    """The training loop of several machines.

    `fit` does not work under MultiWorkerMirroredStrategy in Keras 3, so the
    model's own `train_step` is run by the strategy. Each worker reads the
    same batches in the same order and keeps its own part, so that a step sees
    the samples that it would see on one machine.

    Args:
        strategy: `tf.distribute.MultiWorkerMirroredStrategy`.
        model: compiled Keras model, made within the strategy's scope.
        batches: makes what is trained on, for ever; the same for all
            workers. The strategy makes it where it reads it: a shuffled data
            set that was made elsewhere is shuffled in another order.
        batch_size: samples of a batch, which the workers share.
        folder: for checkpoints, one folder a worker.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        model: keras.Model,
        batches: Callable[[], tf.data.Dataset],
        batch_size: int,
        folder: str | os.PathLike,
    ):
        self.strategy, self.model, self._batches = strategy, model, batches
        count = strategy.num_replicas_in_sync
        if batch_size % count:
            raise ValueError(
                "`batch_size` must be a multiple of the number of workers, "
                f"{count}. Received: `batch_size={batch_size}`"
            )
        with strategy.scope():
            model.optimizer.build(model.trainable_variables)
            self.epoch = tf.Variable(0, dtype=tf.int64)
            checkpoint = tf.train.Checkpoint(
                model=model, optimizer=model.optimizer, epoch=self.epoch
            )
        self._manager = tf.train.CheckpointManager(
            checkpoint,
            str(pathlib.Path(folder) / "backup" / f"worker{worker_index()}"),
            max_to_keep=1,
        )
        self._manager.restore_or_initialize()
        self._step = compiled(self._run_step)

    def _own_part(self, context, done):
        """This worker's part of each batch, after the first `done` ones."""
        index, count = context.input_pipeline_id, context.num_input_pipelines

        def keep(x, y):
            return x[index::count], y[index::count]

        return self._batches().skip(done).map(keep)

    def _run_step(self, batch):
        logs = self.strategy.run(self.model.train_step, args=(batch,))
        return {
            name: self.strategy.reduce("MEAN", value, axis=None)
            for name, value in logs.items()
        }

    def run(self, epochs: int, steps: int):
        """Trains; yields the logs of each epoch."""
        begin = int(self.epoch.numpy())
        batches = iter(
            self.strategy.distribute_datasets_from_function(
                lambda context: self._own_part(context, begin * steps)
            )
        )
        for epoch in range(begin, epochs):
            start = time.monotonic()
            for metric in self.model.metrics:
                metric.reset_state()
            for _ in range(steps):
                logs = self._step(next(batches))
            self.epoch.assign_add(1)
            self._manager.save()
            seconds = time.monotonic() - start
            found = {name: float(value) for name, value in logs.items()}
            yield {"epoch": epoch, **found, "seconds": seconds}
