"""Verifiers and reward functions with deadlines."""
