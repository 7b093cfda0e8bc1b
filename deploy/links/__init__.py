"""Thin links on purpose: rate, delay, jitter and loss on a network interface of a Linux machine.

:func:`deploy.links.shaping.shape` is the entrance. Everything is set with ``tc``; nothing of it is needed
for training over links that are thin by themselves.
"""
