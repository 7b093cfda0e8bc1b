"""Bringing runs up: the `atoll` command, the demo, status and the processes behind them."""
