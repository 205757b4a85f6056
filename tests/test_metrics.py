"""Certified accuracy in compile, and by a callback."""

import keras
import numpy as np
import pytest
from keras import layers
from sklearn.datasets import load_iris

import keras_rub

DATA = load_iris()
X, Y = DATA.data.astype("float32"), DATA.target


def net():
    """A small classifier of the iris data."""
    return keras.Sequential(
        [
            layers.Input((4,)),
            layers.Dense(16, activation="relu"),
            layers.Dense(3),
        ]
    )


@pytest.mark.parametrize("wrap", [keras_rub.RUBModel, keras_rub.ARUBModel])
def test_metric_in_compile_agrees_with_certify(wrap, tmp_path):
    model = wrap(net(), rho=0.1)
    metrics = [
        "accuracy",
        keras_rub.metrics.CertifiedAccuracy(0.3, norm=1),
        keras_rub.metrics.CertifiedAccuracy(0.1, norm="inf", name="linf"),
    ]
    model.compile(
        keras.optimizers.Adam(0.02),
        "sparse_categorical_crossentropy",
        metrics=metrics,
    )
    history = model.fit(X, Y, epochs=8, batch_size=50, verbose=0).history
    assert {"certified_0.3", "linf"} <= set(history)
    logs = model.evaluate(X, Y, batch_size=64, verbose=0, return_dict=True)
    for rho, norm, name in ((0.3, 1, "certified_0.3"), (0.1, "inf", "linf")):
        method = "rub" if norm == 1 else "crown"
        expected = keras_rub.certify(
            model, X, Y, rho=rho, norm=norm, method=method
        ).certified_accuracy
        assert 0.0 < expected < 1.0
        np.testing.assert_allclose(logs[name], expected, atol=1e-6)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert again.evaluate(X, Y, verbose=0, return_dict=True)[
        "certified_0.3"
    ] == pytest.approx(logs["certified_0.3"], abs=1e-6)


def test_metric_of_a_plain_model_is_refused():
    model = net()
    model.compile(
        "sgd",
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras_rub.metrics.CertifiedAccuracy(0.3)],
    )
    with pytest.raises(ValueError, match="needs the inputs"):
        model.fit(X, Y, verbose=0)


def test_callback_logs_every_second_epoch(tmp_path):
    model = net()
    model.compile(
        "adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    look = keras_rub.callbacks.Certify(X, Y, rho=[0.1, 0.5], every=2)
    board = keras.callbacks.TensorBoard(tmp_path)
    history = model.fit(
        X, Y, epochs=4, verbose=0, callbacks=[look, board]
    ).history
    assert len(history["certified_0.1"]) == 2
    assert len(history["certified_0.5"]) == 2
    expected = keras_rub.certify(model, X, Y, rho=0.5).certified_accuracy
    assert history["certified_0.5"][-1] == pytest.approx(expected)
    events = b"".join(path.read_bytes() for path in tmp_path.rglob("events*"))
    assert b"epoch_certified_0.5" in events


def test_bad_arguments():
    with pytest.raises(ValueError, match="`rho` must be"):
        keras_rub.metrics.CertifiedAccuracy(-1.0)
    with pytest.raises(ValueError, match="`method` must be"):
        keras_rub.metrics.CertifiedAccuracy(1.0, method="auto")
    with pytest.raises(ValueError, match="`every` must be"):
        keras_rub.callbacks.Certify(X, Y, rho=0.1, every=0)
