"""Ranks as cards, rows or a heat map."""
