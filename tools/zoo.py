"""Lists, verifies and extends the zoo: the same as `keras-rub zoo`."""

import sys

from keras_rub.cli.zoo import main

if __name__ == "__main__":
    sys.exit(main())
