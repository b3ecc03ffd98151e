"""Recurrences whose state is a vector per head or channel: pooling of additive attention, and the SRU."""
