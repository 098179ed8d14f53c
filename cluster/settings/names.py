"""The rule for names of nodes, clusters and identities.

`timerctl certs` and `timerctl tokens` import this module without the packages of a node.
"""

import re
from typing import Final

NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
NAME_RULE: Final = "1 to 63 letters, digits, '.', '_' and '-', the ends a letter or digit"
