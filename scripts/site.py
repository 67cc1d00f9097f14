"""A hook of MkDocs: pages have the paths that they have in the repository, so that their links lead where they say."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
CARD = ("models/*/README.md", "models/*/*.svg", "models/*/*.txt")
PAGES = ("*.md", "LICENSE", "docs/**/*", "tests/metal/README.md", *CARD)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Put the documents, by their paths from the root, in the place of what MkDocs found in docs/."""
    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)
    for path in sorted({path for pattern in PAGES for path in ROOT.glob(pattern) if path.is_file()}):
        name = path.relative_to(ROOT).as_posix()
        files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return files
