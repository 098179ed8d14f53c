"""`python -m chaos.audit RUN`."""

import sys

from chaos.audit.command import main

sys.exit(main())
