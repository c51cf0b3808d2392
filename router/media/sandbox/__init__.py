"""Decoding in processes that may die."""
