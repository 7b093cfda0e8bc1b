"""Imported by the server that :mod:`bench.forked` forks from, and by nobody else: it ends with its parent.

Else it would live as long as any process that was forked from it; these end with it, stopped ones as well.
"""

from __future__ import annotations

import os

from deploy.processes import PARENT_KEY, follow_parent

follow_parent({PARENT_KEY: str(os.getppid())})
