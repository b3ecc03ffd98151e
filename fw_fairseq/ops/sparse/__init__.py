"""The products of sparse layers for few tokens."""

from .gathered import chosen_units, few_rows, gained, rows_product, sum_of_units

__all__ = ["chosen_units", "few_rows", "gained", "rows_product", "sum_of_units"]
