"""keras_rub.evaluate: figures, files, pictures, and signs of false safety."""

import dataclasses
import functools
import json
import re
import shutil
import subprocess

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import keras_rub
from keras_rub.evaluation import html_report, plots

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="module")
def data():
    """60 test samples of the iris-like digits."""
    x, y = keras_rub.datasets.load("digits").test
    return x[:60], y[:60]


@functools.cache
def train(wrap, **kwargs):
    keras.utils.set_random_seed(0)
    samples = keras_rub.datasets.load("digits").train
    base = keras_rub.models.mlp((64,), 10, hidden=(24,))
    model = wrap(base, **kwargs) if wrap else base
    model.compile(
        keras.optimizers.Adam(5e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    model.fit(*samples, epochs=8, batch_size=64, verbose=0)
    return model


@pytest.fixture(scope="module")
def model():
    """A network trained by RUB."""
    return train(keras_rub.RUBModel, rho=0.5)


@pytest.fixture(scope="module")
def result(model, data):
    """Its evaluation by the strong attacks."""
    return keras_rub.evaluate(
        model,
        *data,
        radii={1: [0.5, 1.5], 2: [0.3], "inf": [0.05]},
        attacks="strong",
        input_range=(0, 1),
        verbose=0,
    )


def test_figures_are_in_order(result, data):
    assert result.norms == ["1", "2", "inf"] and len(result) == 60
    assert result.attacks == list(keras_rub.attacks.STRONG)
    for row in result.rows:
        assert row["certified"] <= row["worst"] <= row["paper"] <= row["clean"]
        assert row["worst"] <= min(row[name] for name in result.attacks)
        assert row["paper"] == min(
            row[name] for name in keras_rub.attacks.PAPER
        )
    first, second = result.rows[:2]
    assert second["worst"] < first["worst"] < first["clean"]
    assert second["certified"] <= first["certified"]
    assert not any("bug" in text for text in result.warnings)


def test_examples_are_real(result, model):
    for norm, examples in result.examples.items():
        assert len(examples) == 6
        for example in examples:
            attacker = keras_rub.PerturbationSet(norm, input_range=(0, 1))
            inside = attacker.contains(
                example["clean"][None],
                example["attacked"][None],
                example["rho"],
            )
            assert inside.all()
            found = model.predict(example["attacked"][None], verbose=0)
            assert found.argmax() == example["predicted_attacked"]
    first = result.examples["1"][0]
    assert first["predicted_attacked"] != first["label"] == first["predicted"]


def test_files(result):
    again = keras_rub.Evaluation.from_dict(json.loads(result.to_json()))
    assert repr(again) == repr(result)
    np.testing.assert_array_equal(
        again.examples["1"][0]["attacked"], result.examples["1"][0]["attacked"]
    )
    both = keras_rub.Evaluation.merge([result, again])
    assert len(both) == 120 and both.rows == result.rows
    assert len(both.signs.zero_gradient) == 120
    # A part without signs leaves the whole without.
    blind = dataclasses.replace(result, signs=None)
    assert keras_rub.Evaluation.merge([result, blind]).signs is None
    untried = dataclasses.replace(result.signs, survives_huge=None)
    some = dataclasses.replace(result, signs=untried)
    mixed = keras_rub.Evaluation.merge([result, some])
    assert mixed.signs.survives_huge is None
    lines = result.to_csv().splitlines()
    assert len(lines) == 5 and lines[0].startswith("norm,rho,clean,foolbox-fgm")
    table = result.to_markdown().splitlines()
    assert table[0].startswith("| norm | rho |") and table[2].startswith("| L1")
    assert "certified" in repr(result)


def test_pictures(result, tmp_path):
    plots.accuracy_curves(result, title="digits").savefig(tmp_path / "a.png")
    plots.feature_changes(result, 1).savefig(tmp_path / "b.png")
    for name in "ab":
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    with pytest.raises(ValueError, match="image inputs"):
        plots.image_grid(result, 1)


def test_image_grid(tmp_path):
    keras.utils.set_random_seed(0)
    base = keras.Sequential(
        [layers.Input((6, 6, 3)), layers.Flatten(), layers.Dense(3)]
    )
    x = np.random.default_rng(0).uniform(size=(5, 6, 6, 3)).astype("float32")
    y = base.predict(x, verbose=0).argmax(-1)
    found = keras_rub.evaluate(
        base, x, y, radii=[0.2], norms=["inf"], attacks=["pgd"], verbose=0
    )
    plots.image_grid(found, "inf").savefig(tmp_path / "grid.png")
    assert (tmp_path / "grid.png").stat().st_size > 10_000


def report(result, model):
    return html_report(
        result,
        title="Digits <b>",
        model=model,
        settings={"samples": 60},
        command="keras-rub evaluate --model m.keras",
    )


def test_report_is_self_contained(result, model):
    page = report(result, model)
    assert page.count("data:image/png;base64,") == 4
    assert "Digits &lt;b&gt;" in page
    for text in ("dense", "keras-rub evaluate", "TensorFlow", "certified"):
        assert text in page
    for reference in ("http", 'href="', "file:"):
        assert reference not in page


@pytest.mark.medium
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_report_in_a_browser(result, model, tmp_path):
    path = tmp_path / "report.html"
    # Ends with the sizes of the pictures, as the browser has decoded them.
    script = (
        "<p id='sizes'></p><script>window.onload = () => {document."
        "getElementById('sizes').textContent = 'sizes ' + [...document.images]"
        ".map(i => i.naturalWidth).join(' ');}</script></body>"
    )
    path.write_text(report(result, model).replace("</body>", script))
    shown = subprocess.run(
        [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--virtual-time-budget=5000",
            "--dump-dom",
            path.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout
    sizes = re.search(r'id="sizes">sizes ([^<]*)<', shown).group(1).split()
    assert len(sizes) == 4 and all(int(size) > 300 for size in sizes)
    for text in ("Accuracy", "apgd-targeted", "keras_rub", "60 samples"):
        assert text in shown


def test_radius_of_the_paper():
    radius = keras_rub.paper_radius(0.01, 1, (28, 28, 1))
    np.testing.assert_allclose(radius, 0.28)
    assert keras_rub.paper_radius(0.01, "inf", (28, 28, 1)) == 0.01


@pytest.mark.medium
def test_mask_and_weights(model, data):
    mask = np.arange(64) < 32
    found = keras_rub.evaluate(
        model,
        *data,
        radii=[1.0],
        norms=[1],
        attacks="strong",
        mask=mask,
        weights=np.linspace(1, 2, 64),
        certificates="rub",
        verbose=0,
    )
    assert "foolbox-pgd" not in found.attacks
    (row,) = found.rows
    assert row["certified"] <= row["worst"]
    for example in found.examples["1"]:
        change = example["attacked"] - example["clean"]
        assert np.all(change[32:] == 0)


def test_no_certificate_is_a_note(data):
    keras.utils.set_random_seed(0)
    base = keras.Sequential(
        [layers.Input((64,)), layers.Dense(8, "softmax"), layers.Dense(10)]
    )
    found = keras_rub.evaluate(
        base, *data, radii=[0.1], norms=[1], attacks=["fgm"], verbose=0
    )
    assert found.certified == {} and "certified" not in found.rows[0]
    assert "softmax" in found.notes[0]
    found = keras_rub.evaluate(
        base, *data, radii=[0.1], norms=[1], attacks=[], certificates=False,
        verbose=0,
    )  # fmt: skip
    assert set(found.rows[0]) == {"norm", "rho", "clean"}


def test_subclassed_model_can_be_attacked(data):
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.last = layers.Dense(10)

        def call(self, x):
            return self.last(tf.tanh(x))

    own = Own()
    with pytest.raises(ValueError, match="not built yet"):
        keras_rub.attacks.PGD(own)
    own(data[0])
    found = keras_rub.evaluate(
        own, *data, radii=[0.1], norms=[2], attacks=["pgd"], verbose=0
    )
    assert found.notes and found.rows[0]["pgd"] <= found.rows[0]["clean"]


# Signs of false safety --------------------------------------------------------


def signs_of(base, data, **kwargs):
    settings = {"radii": [0.3], "norms": ["inf"], "attacks": ["pgd"]}
    return keras_rub.evaluate(
        base, *data, **{**settings, **kwargs}, certificates=False, verbose=0
    ).warnings


class HiddenHead(keras.Model):
    """A subclassed model, at whose end nobody can look."""

    def __init__(self, outputs, activation):
        super().__init__()
        self.outputs_of = layers.Dense(outputs, activation=activation)

    def call(self, inputs):
        return self.outputs_of(inputs)


@pytest.mark.parametrize(
    ("outputs", "activation"), [(10, "softmax"), (1, "sigmoid")]
)
def test_probabilities_are_seen(data, outputs, activation):
    x, y = data
    base = HiddenHead(outputs, activation)
    base(x)
    found = signs_of(base, (x, np.minimum(y, max(outputs, 2) - 1)))
    assert any("probabilities" in text for text in found)
    # Where the head can be seen there is nothing to warn of.
    seen = keras.Sequential(
        [layers.Input((64,)), layers.Dense(10, activation="softmax")]
    )
    assert not any("probabilities" in text for text in signs_of(seen, data))


def test_saturation_is_seen(data):
    plain = train(None)
    x = keras.Input((64,))
    scaled = keras.Model(x, plain(x) * 1e4)
    assert any("Zero gradients" in text for text in signs_of(scaled, data))
    assert not any("Zero" in text for text in signs_of(plain, data))


@keras.saving.register_keras_serializable("test_evaluation")
class Quantize(layers.Layer):
    """Rounds, with a gradient that points nowhere useful."""

    def call(self, x):
        return (
            x
            + tf.stop_gradient(tf.round(4 * x) / 4 - x)
            - 2 * (x - tf.stop_gradient(x))
        )


def test_masked_gradients_are_seen(data):
    plain = train(None)
    x = keras.Input((64,))
    masked = keras.Model(x, plain(Quantize()(x)))
    found = signs_of(masked, data, input_range=(0, 1), radii=[0.5])
    assert any("random points" in text for text in found)
    assert any("huge radius" in text for text in found)


def test_a_broken_certificate_is_called_a_bug(result):
    state = result.to_dict()
    state["certified"]["1"] = np.ones((2, 60), int).tolist()
    liar = keras_rub.Evaluation.from_dict(state)
    assert any("This is a bug" in text for text in liar.warnings)


def test_a_weak_attack_is_seen(result):
    state = result.to_dict()
    for name in keras_rub.attacks.PAPER:
        state["standing"]["1"][name] = np.ones((2, 60), int).tolist()
    fooled = keras_rub.Evaluation.from_dict(state)
    assert any("Report the smaller" in text for text in fooled.warnings)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"radii": []}, "`radii` must hold at least one"),
        ({"radii": [-1.0]}, "`radii` must be finite and at least 0"),
        ({"radii": {1: [0.1]}}, r"no list for the norms \['inf'\]"),
        ({"norms": []}, "`norms` must hold"),
        ({"norms": [3]}, "`norm` must be"),
        ({"attacks": ["apdg-ce"]}, "Did you mean 'apgd-ce'.*Known: .*strong"),
        ({"certificates": "lp"}, "`certificates` must be"),
        ({"input_range": (0.4, 0.6)}, "leaves `input_range`"),
        ({"attacks": "paper", "mask": np.ones(64)}, "knows no `mask`"),
        ({"x": np.zeros((3, 63))}, "`x` must have the shape"),
        ({"y": np.zeros(3)}, "same length"),
        ({"y": np.full(60, 12)}, "class numbers from 0 to 9"),
    ],
)
def test_bad_input(model, data, kwargs, message):
    settings = {
        "x": data[0],
        "y": data[1],
        "radii": [0.1],
        "norms": ["inf"],
        "attacks": ["fgm"],
        "verbose": 0,
        **kwargs,
    }
    x, y = settings.pop("x"), settings.pop("y")
    with pytest.raises(ValueError, match=message):
        keras_rub.evaluate(model, x, y, **settings)
