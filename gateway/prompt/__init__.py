"""Prompts as exact tokens: chat templates, tokenizers and their caches.

Optional (the `tokens` extra): nothing outside imports it unless a model has a `tokenizer`.
"""
