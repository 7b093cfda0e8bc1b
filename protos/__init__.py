"""What node and coordinator agree on: the wire protocol, the run file, the bucket table, digests and units.

Imports nothing of the other packages and no torch, so that the command line stays quick.
"""
