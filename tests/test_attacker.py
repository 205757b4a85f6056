"""One attacker: every call takes it, and a robust model brings its own."""

import keras
import numpy as np
import pytest

import keras_rub
from keras_rub.bounds import methods

MASK = np.array([True, False, True, True, False, True])
WEIGHTS = np.array([1.0, 1.0, 2.0, 1.5, 1.0, 1.0])
RANGE = (0.0, 1.0)


def network(seed=3):
    keras.utils.set_random_seed(seed)
    return keras_rub.models.mlp([6], 3, (12, 12))


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    return rng.uniform(size=(12, 6)).astype("float32")


@pytest.fixture(scope="module")
def masked():
    return keras_rub.RUBModel(
        network(),
        0.4,
        mask=MASK,
        weights=WEIGHTS,
        input_range=RANGE,
        vertices="all",
    )


@pytest.fixture(scope="module")
def labels(masked, data):
    return masked.predict(data, verbose=0).argmax(axis=-1)


@pytest.mark.eager
def test_certify_speaks_of_the_attacker_that_was_trained(masked, data, labels):
    found = keras_rub.certify(masked, data, labels, rho=0.4, method="rub")
    assert found.perturbations is masked.perturbations
    own = masked.worst_case_margins(data, labels, rho=0.4)
    np.testing.assert_allclose(found.margins, own, rtol=1e-5, atol=1e-6)
    other = keras_rub.certify(
        masked, data, labels, rho=0.4, method="rub",
        perturbations=keras_rub.PerturbationSet(1),
    )  # fmt: skip
    assert np.all(other.margins >= found.margins - 1e-6)
    assert np.any(other.margins > found.margins + 1e-3)
    # One part in place of the model's own, the others as they are.
    part = keras_rub.certify(
        masked, data, labels, rho=0.1, norm="inf", method="crown"
    )
    assert part.perturbations == masked.perturbations.with_norm("inf")
    config = found.to_dict()["perturbations"]
    assert keras_rub.PerturbationSet.from_config(config) == found.perturbations
    assert "L1, 4 of 6 free, weighted, inputs in [0, 1]" in repr(found)
    table = keras_rub.certify(
        masked, data, labels, rho=[0.1, 0.2], method="rub"
    )
    assert "4 of 6 free" in repr(table)


@pytest.mark.eager
def test_norm_of_a_robust_model(data):
    model = keras_rub.ARUBModel(network(), 0.05, norm="inf")
    settings = {"rho": 0.01, "method": "crown"}
    assert keras_rub.certify(model, data, **settings).norm == "inf"
    assert keras_rub.certify(model.base, data, **settings).norm == 1
    radius = keras_rub.certified_radius(model, data[:3], method="crown")
    expected = keras_rub.certified_radius(
        model.base, data[:3], method="crown", norm="inf"
    )
    np.testing.assert_array_equal(radius, expected)


@pytest.mark.eager
def test_attacks_and_evaluate(masked, data, labels):
    attack = keras_rub.attacks.PGD(masked, steps=5)
    assert attack.perturbations is masked.perturbations
    points = attack(data, labels, 0.4)
    assert masked.perturbations.contains(data, points, 0.4).all()
    assert keras_rub.attacks.make("pgd", masked.base).norm == "inf"
    with pytest.raises(ValueError, match="foolbox knows no `mask`"):
        keras_rub.attacks.make("foolbox-pgd", masked)
    result = keras_rub.evaluate(
        masked, data, labels, radii=[0.2], attacks=["pgd"], certificates="rub"
    )
    assert result.norms == ["1"]
    assert result.perturbations == masked.perturbations
    assert "4 of 6 free" in result.attacker and result.attacker in repr(result)
    assert result.attacker in keras_rub.evaluation.html_report(result)
    again = keras_rub.Evaluation.from_dict(result.to_dict())
    assert again.perturbations == result.perturbations


def test_points_outside_the_mask_break_nothing(
    masked, data, labels, monkeypatch
):
    """An attack that cheats is not counted."""

    def cheat(self, x, y, radii):
        return np.repeat(x[None] + ~MASK * 50.0, len(radii), axis=0)

    monkeypatch.setattr(keras_rub.attacks.PGD, "sweep", cheat)
    result = keras_rub.evaluate(
        masked, data, labels, radii=[0.2], attacks=["pgd"], certificates=False
    )
    moved = masked.predict(data + ~MASK * 50.0, verbose=0).argmax(axis=-1)
    assert np.any(moved != labels)
    assert result.rows[0]["pgd"] == 1.0


@pytest.mark.eager
def test_metric_and_callback(data, labels):
    model = keras_rub.RUBModel(network(), 0.4, mask=MASK)
    metric = keras_rub.metrics.CertifiedAccuracy(0.4)
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=[metric])
    logs = model.evaluate(data, labels, verbose=0, return_dict=True)
    own = keras_rub.certify(model, data, labels, rho=0.4, method="rub")
    assert logs["certified_0.4"] == pytest.approx(own.certified_accuracy)
    wide = keras_rub.PerturbationSet(1)
    other = keras_rub.metrics.CertifiedAccuracy(0.4, perturbations=wide)
    again = type(other).from_config(other.get_config())
    assert again.perturbations == wide
    history = {}
    callback = keras_rub.callbacks.Certify(
        data, labels, 0.4, perturbations=wide, method="rub"
    )
    callback.set_model(model)
    callback.on_epoch_end(0, history)
    expected = keras_rub.certify(
        model, data, labels, rho=0.4, method="rub", perturbations=wide
    )
    assert history["certified_0.4"] == expected.certified_accuracy


def test_export(masked, tmp_path):
    path = keras_rub.export(
        masked, tmp_path / "own", signatures=["serving_default", "certify"]
    )
    facts = keras_rub.serving.read_metadata(path)["certificates"]
    assert facts["mask"] == MASK.tolist()
    assert facts["input_range"] == [0.0, 1.0]
    with pytest.raises(ValueError, match="units behind `preprocessing`"):
        keras_rub.export(
            masked,
            tmp_path / "scaled",
            preprocessing=keras.layers.Rescaling(0.5),
        )


@pytest.mark.parametrize("name", ["mask", "norm", "weights", "input_range"])
@pytest.mark.parametrize(
    "call",
    [
        lambda model, x, y, **kw: keras_rub.certify(model, x, y, rho=0.1, **kw),
        lambda model, x, y, **kw: keras_rub.certified_radius(model, x, y, **kw),
        lambda model, x, y, **kw: keras_rub.attacks.PGD(model, **kw),
        lambda model, x, y, **kw: keras_rub.attacks.Suite(model, **kw),
        lambda model, x, y, **kw: keras_rub.export(model, "unused", **kw),
        lambda model, x, y, **kw: keras_rub.PGDModel(model.base, **kw),
    ],
)
def test_both_at_once_is_an_error(call, name, masked, data, labels):
    value = {
        "mask": MASK,
        "norm": 1,
        "weights": WEIGHTS,
        "input_range": RANGE,
    }[name]
    both = {name: value, "perturbations": keras_rub.PerturbationSet(1)}
    with pytest.raises(ValueError, match=f"leave out `{name}`"):
        call(masked, data, labels, **both)


def test_defences_take_the_whole_attacker():
    attacker = keras_rub.PerturbationSet(1, mask=MASK, input_range=RANGE)
    model = keras_rub.RUBModel(network(), perturbations=attacker)
    assert model.perturbations is attacker
    again = type(model).from_config(model.get_config())
    assert again.perturbations == attacker
    with pytest.raises(ValueError, match="L1 perturbations only"):
        keras_rub.RUBModel(network(), perturbations=attacker.with_norm(2))
    with pytest.raises(ValueError, match="can't respect a valid range"):
        keras_rub.ARUBModel(network(), perturbations=attacker)


# Promises that were broken before ---------------------------------------------


def test_memory_budget_limits_vertex_methods_only(data):
    model = network()
    with pytest.raises(ValueError, match="`memory_budget` is too small"):
        keras_rub.certify(model, data, rho=0.1, memory_budget=10)
    for norm in ("inf", 1):
        keras_rub.certify(
            model, data, rho=0.1, memory_budget=10, norm=norm, method="crown"
        )


def test_a_long_name_of_a_method_is_not_cut(data, monkeypatch):
    name = "a-method-with-a-long-name"
    crown = methods.METHODS["crown"]
    monkeypatch.setitem(
        methods.METHODS, name, methods.Method(name, margins=crown.margins)
    )
    found = keras_rub.certify(network(), data, rho=1e-4, method=name)
    assert set(found.decided_by) == {name}


def test_margins_of_a_subclassed_base_that_was_built():
    class Classifier(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(3)

        def build(self, input_shape):
            self.dense.build(input_shape)
            self.built = True

        def call(self, x):
            return self.dense(x)

    model = keras_rub.ARUBModel(Classifier(), 0.1)
    model.build((None, 4))
    margins = model.worst_case_margins(np.ones((2, 4), "float32"), [0, 1])
    assert margins.shape == (2, 3) and np.all(np.isfinite(margins))


def test_value_of_a_ramp_without_an_end():
    ramp = keras_rub.callbacks.RhoSchedule(epochs=5)
    with pytest.raises(ValueError, match="known when training begins"):
        ramp.value(3)
    assert keras_rub.callbacks.RhoSchedule(2.0, epochs=4).value(2) == 1.0
