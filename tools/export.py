"""Exports a trained network: the same as `keras-rub export`."""

import sys

from keras_rub.cli.export import main

if __name__ == "__main__":
    sys.exit(main())
