"""Pollers that correct the core's picture of each backend."""
