"""Serves exported models for development: the same as `keras-rub serve`."""

import sys

from keras_rub.cli.serve import main

if __name__ == "__main__":
    sys.exit(main())
