"""Decisions, sans-io: values in, values out; never waits, reads a clock or opens anything."""
