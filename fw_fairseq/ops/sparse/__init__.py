"""The products of sparse layers for few tokens."""

from .gathered import feed_forward, few_rows, gained, rows_product

__all__ = ["feed_forward", "few_rows", "gained", "rows_product"]
