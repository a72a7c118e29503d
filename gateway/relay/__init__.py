"""Upstream connection pool and byte relay."""
