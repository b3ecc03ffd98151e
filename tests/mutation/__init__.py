"""Small faults in the code, one at a time, and whether a test notices each (``tests/mutation.sh``)."""
