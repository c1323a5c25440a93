"""Environments of other libraries as ours, each in a module of its own."""
