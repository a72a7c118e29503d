"""Listeners: the data port (raw protocol) and the admin port (aiohttp)."""
