"""Swarm: streams between nodes over libp2p, which reaches through NAT, and a table of who is there.

The only package that uses hivemind (extra ``swarm``), and of it the daemon's client ``P2P`` and the hash
table's ``DHTNode``, both in the network thread. Its import takes seconds: whoever may do without the swarm
imports :mod:`node.exchange.swarm.swarm` only where it is wanted.
"""
