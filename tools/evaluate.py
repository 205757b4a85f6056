"""Attacks and certifies a trained network: the same as `keras-rub evaluate`."""

import sys

from keras_rub.cli.evaluate import main

if __name__ == "__main__":
    sys.exit(main())
