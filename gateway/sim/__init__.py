"""Simulated vLLM replica, workloads and virtual time."""
