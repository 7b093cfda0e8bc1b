"""Coordinator and nodes in one process on a virtual clock, with faults addressed by (who, round, phase)."""
