"""`python -m rookery`: the same as the `rookery` command."""

import sys

from rookery.cli.main import main

if __name__ == "__main__":  # a config may name any module of ours
    sys.exit(main())
