"""Compiled loops over arrays: hashing, first values, the index of a table, update rules, sums."""
