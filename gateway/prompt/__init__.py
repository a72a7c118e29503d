"""Tokenizer engines behind the core's chain interface."""
