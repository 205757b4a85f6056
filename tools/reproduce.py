"""Reproduces the tables and figures of the paper: `keras-rub reproduce`."""

import sys

from keras_rub.cli import reproduce

if __name__ == "__main__":
    sys.exit(reproduce.main())
