"""Prometheus series and the access log."""
