"""Transports move tensors between the ranks of a ring and know nothing of attention."""
