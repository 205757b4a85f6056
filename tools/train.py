"""Trains one network with one defence: the same as `keras-rub train`."""

import sys

from keras_rub.cli.train import main

if __name__ == "__main__":
    sys.exit(main())
