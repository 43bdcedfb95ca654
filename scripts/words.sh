#!/usr/bin/env bash
# Finds home-made words where the field has its own (scripts/words.txt). Prints path:line: text and what to write instead;
# ends with 1 if anything is found.
set -euo pipefail
cd "$(dirname "$0")/.."

CODE='crates/*.rs fuzz/*.rs'
CUDA='crates/*.cu crates/*.cuh'
PROSE='*.md *.toml'
ALL="$CODE $CUDA $PROSE scripts/*.sh tests/support/*.rs"

paths() { # the pathspecs a column stands for
  local out=()
  for word in $1; do
    case $word in
      CODE) out+=($CODE) ;; CUDA) out+=($CUDA) ;; PROSE) out+=($PROSE) ;; ALL) out+=($ALL) ;;
      *) out+=("$word") ;;
    esac
  done
  printf '%s\n' "${out[@]}"
}

set -f # pathspecs are for git, not for the shell
find_all() { # PATTERN PATHS: path:line:text of every finding
  local spec
  mapfile -t spec < <(paths "$2")
  git grep --untracked -nE -e "$1" -- "${spec[@]}" || true
}

allowed=$(mktemp); found=$(mktemp)
trap 'rm -f "$allowed" "$found"' EXIT
while IFS=$'\t' read -r kind pattern where _; do
  [ "$kind" = allow ] && find_all "$pattern" "$where" | cut -d: -f1,2 >>"$allowed"
done <scripts/words.txt
sort -u -o "$allowed" "$allowed"

while IFS=$'\t' read -r pattern where instead _; do
  case $pattern in ''|'#'*|allow) continue ;; esac
  find_all "$pattern" "$where" | while IFS= read -r line; do
    at=$(cut -d: -f1,2 <<<"$line")
    grep -qxF "$at" "$allowed" || printf '%s   -> %s\n' "$line" "$instead"
  done >>"$found"
done <scripts/words.txt

if [ -s "$found" ]; then
  sort "$found"
  echo "words.sh: $(wc -l <"$found") findings; write the field's words (scripts/words.txt)" >&2
  exit 1
fi
echo "words.sh: no home-made words"
