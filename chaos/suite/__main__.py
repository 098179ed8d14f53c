"""`python -m chaos.suite`: the same as `timerctl chaos`."""

import sys

from chaos.cli import main

sys.exit(main())
