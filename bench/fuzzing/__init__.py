"""Fuzzing: everything that reads bytes of a peer, and inputs that are almost right."""
