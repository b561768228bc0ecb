"""`python -m rookery`: the same as the `rookery` command."""

import sys

from rookery.cli.main import main

sys.exit(main())
