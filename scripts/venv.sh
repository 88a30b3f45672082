# Sourced by the scripts beside it. `ensure_venv LOCKFILE` leaves a .venv in the repository that holds exactly what the
# lock file lists, checked against its hashes, and the project itself, editable.
#
# It does nothing, and asks no network, when .venv already fits; it may be called by several processes at once.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"

say() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; }

die() {
    say "$@"
    exit 2
}

# Is $1 a CPython that the lock file has wheels for, and able to make a virtual environment? (A pyenv shim on PATH can
# be a name without an interpreter behind it, and Debian ships Python without ensurepip: so run it rather than look.)
python_serves() {
    "$1" - >/dev/null 2>&1 <<'PROBE'
import ensurepip, sys, sysconfig, venv

fits = (3, 12) <= sys.version_info[:2] <= (3, 14) and sys.implementation.name == "cpython"
sys.exit(not fits or bool(sysconfig.get_config_var("Py_GIL_DISABLED")))
PROBE
}

# Print the newest Python that serves: those on PATH first, then those that pyenv has built.
find_python() {
    local candidate
    for candidate in python3.14 python3.13 python3.12 python3 \
        $(printf '%s\n' "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin/python | sort --version-sort --reverse); do
        if command -v "$candidate" >/dev/null && python_serves "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    die "no Python from 3.12 to 3.14 found, neither on PATH nor under pyenv: install one (with its venv module), and run this again"
}

# What the environment depends on: the lock, the project's own metadata, and the folder, which its scripts name.
fingerprint() {
    { printf '%s\n' "$root"; cat "$root/$1" "$root/pyproject.toml"; } | sha256sum | cut -d ' ' -f 1
}

# Run pip with the given arguments; its output goes to the log, and of it only the larger downloads are shown.
logged_pip() {
    local log="$venv/install.log"
    if ! "$venv/bin/python" -m pip install --no-input --disable-pip-version-check "$@" 2>&1 | tee -a "$log" |
        sed --unbuffered --quiet 's/^ *Downloading \([^-]*-[^-]*\)-[^ ]* (\([0-9.]* [MG]B\))$/  \1, \2/p' >&2; then
        tail -n 15 "$log" >&2
        die "the installation failed, its last lines are above, all of it is in $log"
    fi
}

install_venv() {
    local lock="$1" unfinished="$venv/unfinished" python
    if [[ -e "$unfinished" ]] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        python="$(find_python)"
        say "making $venv with $("$python" --version)"
        "$python" -m venv --clear "$venv"
    fi
    # The mark outlives an installation that is cut off, and tells the next run to start afresh.
    touch "$unfinished"
    : >"$venv/install.log"
    say "installing the packages of $lock (some 450 MB if none is here yet)"
    logged_pip --require-hashes --no-deps --requirement "$root/$lock"
    say "installing pagedjax itself"
    logged_pip --no-build-isolation --no-deps --editable "$root"
    rm "$unfinished"
}

# A subshell, so that the lock goes with it: a server started afterwards must not hold it.
ensure_venv() (
    local lock="$1" stamp="$venv/installed-$1"
    exec 9<"$root/pyproject.toml"
    if ! flock --nonblock 9; then
        say "waiting for another run that prepares $venv"
        flock 9
    fi
    if [[ ! -e "$venv/unfinished" && "$(cat "$stamp" 2>/dev/null)" == "$(fingerprint "$lock")" ]]; then
        return
    fi
    install_venv "$lock" 9<&-
    fingerprint "$lock" >"$stamp"
)
