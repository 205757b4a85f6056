"""Certifies a trained network: the same as `keras-rub certify`."""

import sys

from keras_rub.cli.certify import main

if __name__ == "__main__":
    sys.exit(main())
