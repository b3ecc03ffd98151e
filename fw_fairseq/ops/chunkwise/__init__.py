"""The recurrence in chunks of tokens (docs/chunk_form.md)."""
