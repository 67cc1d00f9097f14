#!/bin/sh
# Run mypy over the packages laid out as they are installed: it does not know setuptools' package-dir, by which cli/ is
# dflash_mlx.cli and models/ is dflash_mlx.models. The files it names are links to the real ones.
set -eu
cd "$(dirname "$0")/.."
VENV=${VENV:-.venv}
tree=.mypy_cache/tree
rm -rf "$tree"
mkdir -p "$tree/dflash_mlx"
for item in dflash_mlx/* cli models; do ln -s "$(pwd)/$item" "$tree/dflash_mlx/"; done
ln -s "$(pwd)/dflash_on_mlx.py" "$tree/"
"$VENV/bin/mypy" "$tree/dflash_mlx" "$tree/dflash_on_mlx.py"
