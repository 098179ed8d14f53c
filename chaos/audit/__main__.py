"""`python -m chaos.audit RUN`."""

import sys

try:
    from chaos.audit.command import main
except ImportError as missing:  # status 1 would say that a promise was broken
    from timerclient.cli.missing_modules import why_missing

    print(f"audit: {why_missing(missing, 'server,audit')}", file=sys.stderr)
    sys.exit(2)
sys.exit(main())
