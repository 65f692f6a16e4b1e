"""`python -m ringflash.cli`: the `ringflash` command where its script is not installed."""

import sys

from ringflash.cli import main

sys.exit(main())
