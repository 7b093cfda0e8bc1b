"""The control plane of a run: who is in a round, when it closes, who reads which data, and the hub's reducer.

Decisions (``rounds``, ``roster``, ``leases``, ``reducer``, ``admission``, ``digests``) are pure: they import
no network, no asyncio and no clock.
"""
