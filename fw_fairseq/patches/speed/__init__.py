"""Changes that make an update take less time."""
