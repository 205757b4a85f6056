"""Keras's private names: each still means what the library takes it for."""

import keras
import pytest

from keras_rub import keras_internals


def test_operation_of():
    x = keras.KerasTensor((None, 2))
    assert type(keras_internals.operation_of(x + x)).__name__ == "Add", (
        "`KerasTensor._keras_history.operation` is another thing now"
    )
    layer = keras.layers.Dense(3)
    assert keras_internals.operation_of(layer(keras.Input((2,)))) is layer


def test_node_of():
    """A layer that is called twice has a node for each call."""
    layer = keras.layers.Dense(2)
    x = keras.Input((2,))
    once = layer(x)
    twice = layer(once)
    for tensor, source in ((once, x), (twice, once)):
        (found,) = keras_internals.node_of(tensor).input_tensors
        assert found is source, (
            "`Operation._inbound_nodes[...].input_tensors` is another thing now"
        )


def test_compile_settings():
    def loss(y_true, y_pred):
        return keras.ops.mean(y_pred, axis=-1)

    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(2)])
    model.compile("sgd", loss, metrics=["accuracy"])
    found = keras_internals.compile_settings(model)
    assert found["loss"] is loss, (
        "`Trainer._compile_config.config` no longer keeps the objects"
    )
    assert found["metrics"] == ["accuracy"]


@pytest.mark.parametrize(
    ("ask", "name"),
    [
        (keras_internals.operation_of, "object._keras_history"),
        (keras_internals.node_of, "object._keras_history"),
        (keras_internals.compile_settings, "object._compile_config"),
    ],
)
def test_what_broke_is_named(ask, name):
    with pytest.raises(RuntimeError, match=f"no `{name}`.*keras_rub reads"):
        ask(object())
