"""Searches hyper-parameters: the same as `keras-rub tune`."""

import sys

from keras_rub.cli.tune import main

if __name__ == "__main__":
    sys.exit(main())
