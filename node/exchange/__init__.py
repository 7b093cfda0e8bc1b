"""Exchanges: how a worker takes part in rounds, whatever carries the bytes."""

import os

# Before anything imports grpc: what it logs about connections, this package says in words.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
