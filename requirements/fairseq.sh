#!/usr/bin/env bash
# Builds fairseq from its source into an environment that has torch, where there is no wheel of fairseq for it. `pip install fairseq` takes
# ten minutes, and downloads a torch for CUDA to build with; this takes less than one, because it leaves out the C++ parts of Levenshtein
# Transformers, BASE layers and simultaneous translation, and uses the torch that is there. Needs Python's headers and a C++ compiler.
#   requirements/fairseq.sh .venv/bin/python                               from Python 3.11 on
#   requirements/fairseq.sh .venv/bin/python requirements/official.txt     3.10, with pip before 24.1; official39.txt: 3.9
set -euo pipefail
cd "$(dirname "$0")/.."

pins=${2:-constraints.txt}
pip=("$1" -m pip --quiet --disable-pip-version-check)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"${pip[@]}" install -c "$pins" bitarray cffi Cython hydra-core numpy omegaconf packaging regex sacrebleu scikit-learn setuptools tqdm wheel
if [ "$pins" = constraints.txt ]; then
    source=(--require-hashes -r requirements/fairseq.txt)
else
    source=("$(grep '^fairseq==' "$pins")")
fi
"${pip[@]}" download --no-deps --no-binary :all: --no-build-isolation --dest "$work" "${source[@]}"
tar -xzf "$work"/*.tar.gz -C "$work"
"$1" - "$work"/fairseq*/ <<'EOF'
import pathlib, re, sys


def change(name, pattern, new):
    path = pathlib.Path(sys.argv[1], name)
    text, count = re.subn(pattern, new, path.read_text())
    if count != 1:
        sys.exit(f"fairseq's {name} is not as expected")
    path.write_text(text)


needed = "fairseq.libbleu", "fairseq.data.data_utils_fast", "fairseq.data.token_block_utils_fast"
change("setup.py", "ext_modules=extensions,", f"ext_modules=[part for part in extensions if part.name in {needed}],")
# Python 3.14 writes typing.Optional[str] as str | None
change("fairseq/dataclass/utils.py", r'typestring\.startswith\("typing\.Optional"\)', r'\g<0> or typestring.endswith(" | None")')
EOF
"${pip[@]}" install --no-deps --no-build-isolation "$work"/fairseq*/
"$1" - <<'EOF' # Python 3.14 refuses a help text of Hydra 1.3 that is no string
import pathlib, sys
from importlib.util import find_spec

path = pathlib.Path(find_spec("hydra").origin).parent / "_internal" / "utils.py"
if sys.version_info >= (3, 14):
    path.write_text(path.read_text().replace("help=LazyCompletionHelp(),", "help=repr(LazyCompletionHelp()),"))
EOF
