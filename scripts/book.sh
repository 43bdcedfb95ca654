#!/usr/bin/env bash
# Builds the documentation site with mdBook into target/book, and checks that its search finds every key of a recipe.
# Usage: scripts/book.sh [--install]: with it mdBook is built into target/mdbook where there is none (some minutes).
set -euo pipefail
cd "$(dirname "$0")/.."

mdbook=$(command -v mdbook || echo target/mdbook/bin/mdbook)
if [ ! -x "$mdbook" ]; then
  if [ "${1:-}" != --install ]; then
    echo "book.sh: no mdbook (cargo install mdbook, or scripts/book.sh --install)" >&2
    exit 1
  fi
  cargo install --quiet --root target/mdbook --locked --no-default-features --features search mdbook --version 0.5.4
fi
"$mdbook" build

python3 - target/book docs/reference.md <<'END'
import pathlib, re, sys
book, reference = map(pathlib.Path, sys.argv[1:])
index = "".join(path.read_text() for path in book.glob("searchindex*.js*"))
keys = re.findall(r"^### (\S+)$", reference.read_text(), re.M)
missing = [key for key in keys if key not in index]
if not keys or missing:
    sys.exit(f"book.sh: the search index lacks {missing or 'everything'}")
print(f"book.sh: target/book/index.html; its search has all {len(keys)} keys")
END
