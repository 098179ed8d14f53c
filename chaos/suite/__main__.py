"""`python -m chaos.suite`: the same as `timerctl chaos`."""

import sys

from chaos.commands.chaos_commands import main

sys.exit(main())
