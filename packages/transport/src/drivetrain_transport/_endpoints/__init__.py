"""Typed calls between two processes over ZeroMQ."""
