# shellcheck shell=bash
# Sourced by the launch scripts: `prepare_venv EXTRA` makes or reuses .venv and sets PYTHON to its interpreter.
# The torch that the chosen Python can import is used; without one, the pinned torch of constraints.txt is installed.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv

say() { printf 'setup: %s\n' "$*" >&2; }

# Sets base_python and base_torch: a Python that has torch if there is one, else the first that is new enough.
find_python() {
    local candidate torch
    base_python="" base_torch=none
    for candidate in ${CP_GDN_PYTHON:+"$CP_GDN_PYTHON"} python3 python python3.14 python3.13 python3.12 python3.11 python3.10; do
        torch=$("$candidate" "$root/launch/venv_tools.py" probe 2>/dev/null) || continue
        if [[ -z $base_python || $torch != none ]]; then
            base_python=$candidate base_torch=$torch
        fi
        if [[ $torch != none || -n ${CP_GDN_PYTHON:-} ]]; then return 0; fi
    done
    if [[ -z $base_python ]]; then
        say "no Python >= 3.10 found; install one or set CP_GDN_PYTHON to its path"
        return 1
    fi
}

# What the installed venv depends on; the folder too, since an editable install points at it.
fingerprint() {
    { echo "$root"; cat "$root"/pyproject.toml "$root"/constraints.txt "$root"/launch/setup.sh "$root"/launch/venv_tools.py; } |
        "$venv/bin/python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

is_ready() {
    local stamp want
    want=$(fingerprint 2>/dev/null) || return 1
    # The extra "test" contains "cli", but not "cuda".
    for stamp in "$venv/.ready-$1" "$venv/.ready-${1/#cli/test}"; do
        if [[ -f $stamp && $(<"$stamp") == "$want" ]]; then return 0; fi
    done
    return 1
}

make_venv() {
    say "making $venv with $("$base_python" --version) (torch: $base_torch)"
    if ! "$base_python" -m venv --clear "$venv"; then
        say "python -m venv failed; on Debian and Ubuntu the package python3-venv brings it"
        return 1
    fi
    if [[ $base_torch != none ]]; then
        "$base_python" "$root/launch/venv_tools.py" share "$(site_folder)/shared_torch.pth"
    fi
}

site_folder() { "$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

install_package() {
    local extra=$1 pins=$root/constraints.txt isolation=()
    if [[ $base_torch != none ]]; then
        pins=$venv/pins.txt
        "$base_python" "$root/launch/venv_tools.py" pins "$root/constraints.txt" >"$pins"
        # A shared setuptools that is new enough builds without asking the package index.
        if "$venv/bin/python" -c 'import sys, setuptools as s; sys.exit(int(s.__version__.split(".")[0]) < 77)' 2>/dev/null; then
            isolation=(--no-build-isolation)
        fi
    fi
    say "installing the package with [$extra]"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check ${isolation[@]+"${isolation[@]}"} \
        -c "$pins" -e "${root}[$extra]"
}

prepare_venv() {
    local extra=$1
    PYTHON=$venv/bin/python
    if is_ready "$extra"; then return 0; fi
    find_python
    if ! "$PYTHON" -c '' 2>/dev/null || [[ ! -f $venv/.torch || $(<"$venv/.torch") != "$base_torch" ]]; then
        make_venv
        echo "$base_torch" >"$venv/.torch"
    fi
    install_package "$extra"
    fingerprint >"$venv/.ready-$extra"
}
