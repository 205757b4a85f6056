"""The estimator behaves as scikit-learn's own do."""

import pickle

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import parametrize_with_checks

import keras_rub
from keras_rub.sklearn import RobustClassifier

SMALL = RobustClassifier(
    hidden=(16,), epochs=25, batch_size=64, random_state=0, learning_rate=0.03
)


@pytest.mark.slow
@parametrize_with_checks([SMALL])  # none of them is expected to fail
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def cancer():
    x, y = load_breast_cancer(return_X_y=True, as_frame=True)
    return x, np.where(y == 1, "benign", "malignant")


@pytest.mark.medium
def test_grid_search_over_rho(cancer):
    x, y = cancer
    radius = 3.0  # deviations
    search = GridSearchCV(
        make_pipeline(
            FunctionTransformer(),
            clone(SMALL).set_params(epochs=10),
        ),
        {"robustclassifier__rho": [0.02, radius]},
        scoring=lambda model, x, y: model[-1].certified_score(x, y, rho=radius),
        cv=2,
    )
    search.fit(x, y)
    weak, strong = search.cv_results_["mean_test_score"]
    # Who trains for the radius is certified at it.
    assert strong > weak and strong > 0.6
    best = search.best_estimator_[-1]
    assert best.rho == radius and best.classes_.tolist() == [
        "benign",
        "malignant",
    ]
    assert list(best.feature_names_in_) == list(x.columns)
    chances = best.predict_proba(x)
    np.testing.assert_allclose(chances.sum(axis=1), 1.0)
    np.testing.assert_array_equal(
        best.predict(x), best.classes_[chances.argmax(axis=1)]
    )
    clean, certified = best.score(x, y), best.certified_score(x, y)
    assert 0.6 < certified < clean
    # It is what certify says of the model, in the same units.
    numbers = np.searchsorted(best.classes_, y)
    some = slice(0, 60)
    np.testing.assert_array_equal(
        best.certify(x[some], y[some]).certified,
        keras_rub.certify(
            best.model_,
            x[some].to_numpy("float32"),
            numbers[some],
            rho=radius,
            decide_only=True,
            verbose=0,
        ).certified,
    )
    deviation = x.to_numpy().std(axis=0)
    np.testing.assert_allclose(
        best.model_.perturbations.weights, 1 / deviation, rtol=1e-6
    )
    again = pickle.loads(pickle.dumps(best))
    np.testing.assert_allclose(again.predict_proba(x), chances, rtol=1e-5)
    with pytest.raises(ValueError, match="`y` must hold the classes.*'new'"):
        best.certified_score(x[some], ["new"] * 60)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"rho": -1}, "`rho` must be"),
        ({"units": "metres"}, "`units` must be one of"),
        ({"epochs": 0}, "`epochs` must be a whole number"),
        ({"ramp": 2}, "`ramp` must be between 0 and 1"),
        ({"mask": [True]}, "`mask` must broadcast|must broadcast"),
        ({"weights": [0, 1]}, "`weights` must be finite"),
    ],
)
def test_bad_parameters(said, message):
    x, y = np.arange(8.0).reshape(4, 2), [0, 1, 0, 1]
    if "mask" in said:
        said = {"mask": [True, False, True]}
    with pytest.raises(ValueError, match=message):
        RobustClassifier(**said).fit(x, y)


def test_raw_units():
    made = RobustClassifier(rho=2.0, units="raw", weights=[1.0, 3.0])
    assert made.get_params()["weights"] == [1.0, 3.0]
    found = made._attacker(np.array([5.0, 7.0]))
    np.testing.assert_array_equal(found.weights, [1.0, 3.0])
