#!/bin/sh
# Protofleet on a device: a virtual environment with the base install, and nothing outside it.
#
#     sh install-device.sh [--into DIR] [--with EXTRA] [WHEEL | NAME]
#
# WHEEL or NAME is what pip installs: by default the newest protofleet wheel in this folder, else `protofleet` from the
# package index. DIR is ~/protofleet by default. EXTRA adds to the base install: `security`, which `client --trust` needs, or several with
# commas between. It can be run again: what is there is brought up to date.
#
# Raspberry Pi OS and Debian 12 keep pip out of the system's own Python (PEP 668: externally-managed-environment), so
# there has to be a virtual environment. ONNX Runtime has wheels for 64-bit systems only.
set -eu

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

into="${HOME:-/root}/protofleet"
what=""
extras=""
while [ "$#" -gt 0 ]; do
    case "$1" in
    --into)
        [ "$#" -ge 2 ] || fail "--into, expected a directory, got none"
        into=$2
        shift
        ;;
    --with)
        [ "$#" -ge 2 ] || fail "--with, expected an extra, got none, try --with security"
        extras="[$2]"
        shift
        ;;
    -h | --help)
        sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "$0"
        exit 0
        ;;
    -*) fail "$1, expected --into DIR, --with EXTRA, a wheel or a name, got another option" ;;
    *) what=$1 ;;
    esac
    shift
done

python=${PYTHON:-python3}
command -v "$python" >/dev/null || fail "$python, expected Python 3.11 or newer, got none, try apt install python3-venv"
bits=$("$python" -c 'import sys; print(64 if sys.maxsize > 2**32 else 32)')
[ "$bits" = 64 ] ||
    fail "this system, expected 64 bits, got $bits, try the 64-bit image of Raspberry Pi OS (ONNX Runtime has no other wheels)"
case "$(uname -m)" in
aarch64 | arm64 | x86_64) ;;
*) fail "this processor, expected aarch64 or x86_64, got $(uname -m)" ;;
esac
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$python, expected 3.11 or newer, got $("$python" -V 2>&1), try Raspberry Pi OS 12 (bookworm) or later"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python, expected the module venv, got none, try sudo apt install python3-venv"

if [ -z "$what" ]; then
    what=protofleet
    for wheel in ./protofleet-*.whl; do [ ! -f "$wheel" ] || what=$wheel; done
fi
case "$what" in
*.whl) [ -f "$what" ] || fail "$what, expected a wheel, got nothing there" ;;
esac

mkdir -p "$into" 2>/dev/null || fail "$into, expected a directory that can be written, got none, try --into DIR"
free_mb=$(df -Pm "$into" | awk 'NR == 2 { print $4 }')
[ "$free_mb" -ge 400 ] || fail "$into, expected 400 MB free, got $free_mb, try --into DIR on a larger disk"

if ! "$into/bin/python" -c 'import pip' 2>/dev/null; then
    "$python" -m venv "$into" || fail "$into, expected a virtual environment, got the lines above"
fi
# Not compiled beforehand: Python compiles what a device imports, a third of what lies there, when it first does.
pip() { "$into/bin/python" -m pip --disable-pip-version-check --quiet install --no-compile "$@"; }
pip --upgrade --upgrade-strategy only-if-needed "$what$extras" ||
    fail "pip, expected $what$extras and what it needs, got the lines above, try again with a network, or with PIP_FIND_LINKS=FOLDER of wheels"
case "$what" in
*.whl) pip --force-reinstall --no-deps "$what" || fail "pip, expected $what, got the lines above" ;;
esac
version=$("$into/bin/python" -c 'import importlib.metadata as m, onnxruntime; print(m.version("protofleet"), "with ONNX Runtime", onnxruntime.__version__)' 2>/dev/null) ||
    fail "$into, expected an ONNX Runtime that loads, got none, try $into/bin/python -c 'import onnxruntime'"
printf 'Protofleet %s in %s: %s/bin/protofleet doctor looks whether all is well\n' "$version" "$into" "$into"
