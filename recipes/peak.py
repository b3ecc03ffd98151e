"""Runs a command and writes the most memory that one of its processes had, in kB: python peak.py FILE COMMAND..."""

import resource
import subprocess
import sys
from pathlib import Path

code = subprocess.call(sys.argv[2:])
Path(sys.argv[1]).write_text(str(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))
sys.exit(code if code >= 0 else 128 - code)
