#!/usr/bin/env bash
# Makes .venv, or another FOLDER, with this project in it: what recipes/demo.sh and tests/run.sh call. It does nothing where that has all that is
# asked for.
#   requirements/install.sh EXTRA [FOLDER]      an extra of pyproject.toml: plots for the demo, test for the tests
#   PYTHON=python3.13 requirements/install.sh plots
# Without PYTHON it takes a Python for which fairseq has a wheel (3.11 or 3.12 on Linux x86-64), else python3, where fairseq is built
# from source, which needs Python's headers and a C++ compiler; and where neither will do and uv is installed, the 3.12 that uv fetches.
set -euo pipefail
cd "$(dirname "$0")/.."

extra=$1 venv=${2:-.venv}
stamp=$venv/installed-$extra
wanted=$(cat setup.py pyproject.toml constraints.txt requirements/*.txt requirements/install.sh | sha256sum)
for made in "$stamp" "$venv/installed-test"; do # the tests need all that the demo needs
    if [ -f "$made" ] && [ "$(cat "$made")" = "$wanted" ]; then exit 0; fi
done

fairseq_on() { # PYTHON: prints whether its fairseq is a wheel, or a source that can be built; nothing where it is not for this project
    "$1" - 2>/dev/null <<'EOF' || true
import os, platform, shutil, sys, sysconfig
version, machine = sys.version_info[:2], (platform.system(), platform.machine(), platform.libc_ver()[0])
wheel = (3, 11) <= version <= (3, 12) and machine == ("Linux", "x86_64", "glibc")
headers = os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))
compiler = any(map(shutil.which, (os.environ.get("CXX", "c++").split()[0], "g++", "clang++")))
if (3, 9) <= version <= (3, 14):
    print("wheel" if wheel else "source" if headers and compiler else "")
EOF
}

python='' kind=''
if [ -n "${PYTHON:-}" ]; then
    python=$PYTHON kind=$(fairseq_on "$PYTHON")
else
    for sought in wheel source; do
        for name in python3 python3.12 python3.11; do
            if [ -z "$python" ] && [ "$(fairseq_on $name)" = $sought ]; then python=$name kind=$sought; fi
        done
    done
    if [ -z "$python" ] && command -v uv >/dev/null; then python=uv; fi
fi
if [ "$python" = uv ]; then
    uv venv --quiet --clear --seed --python 3.12 "$venv"
    python="$venv/bin/python" kind=$(fairseq_on "$venv/bin/python")
fi
if [ -z "$kind" ]; then
    echo "${PYTHON:-python3} will not do: install Python 3.11 or 3.12, or the headers of a Python from 3.9 to 3.14 and a C++ compiler" \
        "(Debian and Ubuntu: apt install python3-dev python3-venv g++), or uv, which fetches a Python; or set PYTHON to one that will" >&2
    exit 2
fi

"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv "$venv" # again, where a call was stopped in it
kind=$(fairseq_on "$venv/bin/python")
version=$("$venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
how="fairseq from its wheel"
[ "$kind" = wheel ] || how="fairseq built from source, which takes about a minute"
echo "installing into $venv: Python $version ($python), $how" >&2

pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
case $version in
    3.9) pins=requirements/official39.txt ;;
    3.10) pins=requirements/official.txt ;;
    *) pins=constraints.txt ;;
esac
if [ $pins != constraints.txt ]; then # the official fairseq, whose metadata later versions of pip refuse
    "${pip[@]}" 'pip<24.1' wheel
fi
"${pip[@]}" --require-hashes -r requirements/build.txt
requirements/cpu_torch.sh "$venv/bin/python" "$(grep "^torch==" $pins)"
"${pip[@]}" -c $pins torch
if [ "$kind" = wheel ] && [ "$extra" = test ]; then
    "${pip[@]}" --require-hashes -r requirements/test.txt --no-deps --no-build-isolation
elif [ "$kind" = source ]; then
    requirements/fairseq.sh "$venv/bin/python" $pins
fi
"${pip[@]}" -c $pins --no-build-isolation -e ".[$extra]"
# fairseq asks for it, for speech; one that is made for another torch breaks transformers
"$venv/bin/python" -m pip uninstall --quiet --yes --disable-pip-version-check torchaudio
echo "$wanted" >"$stamp"
