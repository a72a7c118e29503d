"""Typed configuration: schema, loading, checking, reference."""
