# Sourced by the scripts beside it: makes .venv when it is missing, installs when pyproject or constraints changed.
# After `setup EXTRA` (EXTRA may be empty) the variable `python` names the interpreter to use.

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            echo "$candidate"
            return 0
        fi
    done
    echo "error: ${PYTHON:-python3} is not Python 3.11 or newer; set PYTHON to one, as in PYTHON=python3.12 $0" >&2
    return 1
}

setup() {
    local extra=$1 base stamp wanted target=.
    python=.venv/bin/python
    if [ ! -x "$python" ]; then
        base=$(find_python) || exit 1
        echo "making .venv with $("$base" -V)"
        # A half-made folder (no pip in it) is worse than none: build beside it, then rename is not possible for a
        # venv, so remove what a failed attempt leaves.
        "$base" -m venv .venv || { rm -rf .venv; exit 1; }
    fi
    wanted=$(cat pyproject.toml constraints.txt | "$python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')
    stamp=.venv/meshwright-${extra:-run}.stamp
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        [ -z "$extra" ] || target=".[$extra]"
        echo "installing ${target} with the versions of constraints.txt"
        "$python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e "$target" || exit 1
        echo "$wanted" >"$stamp"
    fi
}
