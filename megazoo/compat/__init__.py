"""Calls as other libraries spell them."""
